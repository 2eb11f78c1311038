"""The gate as clients meet it: they wait, or are told when to come back; what is under way is never cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import httpx
import pytest

from gated_proxy.exchange import EngineExchange, State
from gated_proxy.gate import Gate
from gated_proxy.heads import parse_head
from gated_proxy.transports import ReadSide
from highwater.act.rules import PolicySettings
from highwater.server.main import create_app
from highwater.server.settings import Settings
from highwater.server.settings.sections import GateSettings
from tests.fakes.engine import FakeEngine
from tests.http.conftest import Wire, serving
from tests.http.test_control_plane import Running, alive, both_on_ports
from tests.patience import LIMIT_SECONDS, patiently, until


async def test_a_request_that_comes_while_the_gate_is_closed_waits_and_is_served(front, upstream):
    wire = await front.connect()
    with front.gate.closed(60):
        await wire.request("POST", "/v1/completions", body=b'{"prompt": "x"}')
        await until(lambda: front.gate.held == 1)
        assert upstream.calls == []
    answer = await wire.answer()
    assert (answer.status, answer.body) == (200, b'{"prompt": "x"}')
    await until(lambda: front.gate.in_flight == 0)
    assert front.observed.refused == []


async def test_a_stream_under_way_is_never_cut(front, upstream):
    go = asyncio.Event()

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.read()
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await go.wait()
        await call.chunk(b"data: 2\n\n")
        await call.end()

    wire = await front.connect()
    await wire.request("POST", "/v1/completions", body=b"{}")
    await wire.head()
    assert await wire.chunk() == b"data: 1\n\n"
    with front.gate.closed(60):
        assert front.gate.in_flight == 1
        go.set()
        assert [await wire.chunk(), await wire.chunk()] == [b"data: 2\n\n", b""]
        await patiently(front.gate.drained())


async def test_after_a_reset_one_waits_for_the_response_to_the_one_before(front, upstream, monkeypatch):
    monkeypatch.setattr("gated_proxy.gate.PACE_SECONDS", 60.0)
    monkeypatch.setattr("gated_proxy.gate.ALONE_SECONDS", 20.0)
    begin, end = asyncio.Event(), asyncio.Event()

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.read()
        await begin.wait()
        await call.begin()
        await end.wait()
        await call.end()

    wires = [await front.connect() for _ in range(2)]
    with front.gate.closed(60, then_pace=True):
        for held, wire in enumerate(wires, 1):
            await wire.request("POST", "/v1/completions", body=b"{}")
            await until(lambda held=held: front.gate.held == held)
    await until(lambda: upstream.calls)
    await asyncio.sleep(0.1)  # several steps of the gate's
    assert (len(upstream.calls), front.gate.held) == (1, 1)
    begin.set()
    await until(lambda: len(upstream.calls) == 2)
    end.set()
    assert [(await wire.answer()).status for wire in wires] == [200, 200]


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/v1/models"), ("HEAD", "/health")])
async def test_what_cannot_reach_the_model_is_not_held(front, method, path):
    """A liveness probe must not wait for a reset."""
    with front.gate.closed(60):
        wire = await front.connect()
        await wire.request(method, path)
        assert (await wire.answer(without_body=method == "HEAD")).status == 200


async def test_one_too_many_gets_503_and_when_to_come_back(start_proxy):
    async with start_proxy(gate=Gate(max_held=0, clock=lambda: 1000.0)) as front:
        with front.gate.closed(7):
            answer = await front.post("/v1/chat/completions", b"{}")
        assert (answer.status, answer.header("retry-after")) == (503, ["7"])
        error = json.loads(answer.body)["error"]
        assert (error["code"], error["type"]) == ("gate_full", "service_unavailable_error")
        assert "wait already for a cache reset to end" in error["message"]
        assert (front.observed.refused, front.observed.errors) == (["gate_full"], [])
        (ended,) = front.observed.ended
        assert ended[:4] == ("chat_completions", "POST", 503, "refused")
        assert ended.first_byte_seconds is None


async def test_a_request_that_is_held_too_long_gets_503(start_proxy, upstream):
    async with start_proxy(gate=Gate(hold_seconds=0.01)) as front:
        with front.gate.closed(60):
            answer = await front.post("/v1/completions", b"{}")
        assert (answer.status, front.observed.refused) == (503, ["held_too_long"])
        assert upstream.calls == []


async def test_a_client_that_left_while_held_never_reaches_the_engine(front, upstream):
    """Otherwise the engine would compute a request whose client has left."""
    wire = await front.connect()
    with front.gate.closed(60):
        await wire.request("POST", "/v1/completions", body=b"{}")
        await until(lambda: front.gate.held == 1)
        await wire.leave()
        await asyncio.sleep(0.05)  # for the server to see it; there is no event for that
    await until(lambda: front.observed.ended)
    assert (upstream.calls, front.gate.in_flight) == ([], 0)
    assert front.observed.departures == 1


FRAMINGS = {
    "counted": (b"content-length: 6", [b"abc", b"de", b"f"]),
    "chunked": (b"transfer-encoding: chunked", [b"3\r\nabc\r\n", b"3\r\ndef\r\n", b"0\r\n\r\n"]),
}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_request_that_has_not_come_whole_does_not_count(front, upstream, framing):
    """The engine has what came of it, and can do nothing with that; its last piece waits while the gate is closed."""
    line, pieces = FRAMINGS[framing]
    got = bytearray()

    @upstream.on("/v1/completions")
    async def listen(call):
        async for piece in call.pieces():
            got.extend(piece)
        await call.answer(bytes(got))

    wire = await front.connect()
    await wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n%b" % (line, pieces[0]))
    await until(lambda: got == b"abc")
    assert front.gate.in_flight == 0
    with front.gate.closed(60):
        await patiently(front.gate.drained())
        await wire.send(pieces[1])
        await until(lambda: got.startswith(b"abcde"))  # it is streamed on all the same
        await wire.send(pieces[2])
        await until(lambda: front.gate.held == 1)
        (exchange,) = front.proxy.exchanges
        for _ in range(10_000):  # looks at the clock: no limit but the gate's own counts
            exchange.tick()
        assert (front.gate.in_flight, front.observed.ended) == (0, [])
        assert (got == b"abcde") or framing == "chunked"
    answer = await wire.answer()
    assert (answer.status, answer.body) == (200, b"abcdef")
    await until(lambda: front.gate.in_flight == 0)


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_last_piece_that_is_held_too_long_never_reaches_the_engine(start_proxy, upstream, framing):
    line, pieces = FRAMINGS[framing]
    begun, broken = asyncio.Event(), asyncio.Event()

    @upstream.on("/v1/completions")
    async def listen(call):
        begun.set()
        try:
            await call.read()
        finally:
            broken.set()
        if len(call.body) == 6:
            pytest.fail("the request was whole")

    async with start_proxy(gate=Gate(hold_seconds=0.01)) as front:
        wire = await front.connect()
        await wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n%b" % (line, pieces[0]))
        await patiently(begun.wait())
        with front.gate.closed(60):
            await wire.send(pieces[1] + pieces[2])
            answer = await wire.answer()
            await patiently(broken.wait())
        assert (answer.status, front.observed.refused) == (503, ["held_too_long"])
        assert (front.gate.in_flight, front.gate.held) == (0, 0)
        await wire.request("GET", "/health")
        assert (await wire.answer()).status == 200


async def test_a_request_that_is_held_before_it_is_whole_goes_on_and_does_not_count_yet(front, upstream):
    wire = await front.connect()
    with front.gate.closed(60):
        await wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{")
        await until(lambda: front.gate.held == 1)
    await until(lambda: upstream.calls)
    assert (front.gate.in_flight, front.gate.held) == (0, 0)
    await wire.send(b"}")
    assert (await wire.answer()).body == b"{}"


async def test_an_early_answer_counts_though_its_request_is_not_whole(front, upstream):
    go = asyncio.Event()

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.begin()
        await call.chunk(b"1")
        await go.wait()
        await call.end()
        call.close()

    wire = await front.connect()
    await wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{")
    await wire.head()
    assert front.gate.in_flight == 1
    with front.gate.closed(60):
        await wire.send(b"}")
        go.set()
        assert [await wire.chunk(), await wire.chunk()] == [b"1", b""]
        await patiently(front.gate.drained())
    await until(lambda: not front.proxy.exchanges)
    assert (front.gate.in_flight, front.gate.held) == (0, 0)


async def test_a_connection_whose_engine_lacks_the_last_piece_is_not_used_again(front, upstream):
    """It would take the next request for that piece."""
    go = asyncio.Event()

    @upstream.on("/v1/completions")
    async def refuse(call):
        await go.wait()
        await call.answer(b"{}", 401)

    wire = await front.connect()
    await wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{")
    await until(lambda: upstream.calls)
    with front.gate.closed(60):
        await wire.send(b"}")
        await until(lambda: front.gate.held == 1)
        go.set()
        assert (await wire.answer()).status == 401
        assert front.proxy.pool.idle == 0


async def test_an_answer_with_a_length_has_left_the_engine(front, upstream):
    go = asyncio.Event()

    @upstream.on("/v1/completions")
    async def answer(call):
        await call.read()
        await call.head(200, ("content-length", "2"))
        await call.write(b"{")
        await go.wait()
        await call.write(b"}")

    wire = await front.connect()
    await wire.request("POST", "/v1/completions", body=b"{}")
    await wire.head()
    assert front.gate.in_flight == 0
    go.set()
    assert await wire.reader.readexactly(2) == b"{}"


async def test_a_websocket_is_held_like_a_request(front, upstream):
    wire = await front.connect()
    with front.gate.closed(60):
        upgrade = (("connection", "upgrade"), ("upgrade", "websocket"))
        key = (("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="), ("sec-websocket-version", "13"))
        await wire.request("GET", "/v1/realtime", *upgrade, *key)
        await until(lambda: front.gate.held == 1)
        assert upstream.calls == []
    await until(lambda: upstream.calls)


@pytest.mark.parametrize("where", ["gate", "door"])
async def test_a_request_that_ended_while_its_last_piece_waited_is_not_counted(where):
    """Its place at the gate would never be given back, and no reset would be safe again."""
    gate = Gate()
    client = SimpleNamespace(read_side=ReadSide(asyncio.Transport()), write_side=SimpleNamespace(write=lambda _: None))
    head = parse_head(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n")
    exchange = EngineExchange(SimpleNamespace(gate=gate), client, head, "completions")
    exchange._state, exchange._last = State.OVER, b"{}"
    if where == "gate":
        await exchange._wait_at_gate()
    else:
        exchange._door_opens()
    assert gate.in_flight == 0


# --- with what closes it ---


@contextlib.asynccontextmanager
async def sidecar_beside(upstream, **options):
    """A sidecar whose clients reach one engine and whose own questions another, in process."""
    fake = FakeEngine()
    quiet = PolicySettings(rules=())
    settings = Settings(engine_url=upstream.url, poll_seconds=60.0, policy=quiet, trust_loopback=True, **options)
    app = create_app(settings, transport=fake.transport())
    async with alive(app), serving(app) as port, httpx.AsyncClient(trust_env=False, timeout=LIMIT_SECONDS) as client:
        client.base_url = f"http://127.0.0.1:{port}"
        await app.services.poller.poll()
        yield Running(fake, app, client, port)


def proxy_of(sidecar):
    return sidecar.app.protocol.args[0]


async def test_one_half_sent_request_keeps_no_reset_from_its_moment():
    """Nobody else waits for it: it is not under way in the engine."""
    async with both_on_ports() as sidecar:
        half = Wire(*await asyncio.open_connection("127.0.0.1", sidecar.port))
        await half.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{")
        await until(lambda: proxy_of(sidecar).exchanges)
        answer = await patiently(sidecar.client.post("/reset_mm_cache?mode=safe"))
        assert (answer.status_code, answer.json()["quiesced_by"]) == (200, "gate")
        await half.leave()


async def test_a_tunnel_that_lasts_has_a_reset_refused_at_once(upstream):
    """Holding requests would gain nothing: none is held, and the refusal says what stands in the way."""

    @upstream.on("/v1/realtime")
    async def switch(call):
        await call.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        await call.wait_until_gone()

    async with sidecar_beside(upstream, gate=GateSettings(drain_seconds=0.05)) as sidecar:
        gate = proxy_of(sidecar).gate
        tunnel = Wire(*await asyncio.open_connection("127.0.0.1", sidecar.port))
        upgrade = (("connection", "upgrade"), ("upgrade", "websocket"))
        await tunnel.request("GET", "/v1/realtime", *upgrade)
        assert (await tunnel.head()).status == 101
        await until(lambda: gate.open_ended == 1)
        answer = await sidecar.client.post("/reset_mm_cache?mode=safe")
        assert answer.status_code == 409
        message = answer.json()["error"]["message"]
        assert "1 WebSocket is open, which ends when the client wants" in message
        assert "no request was held" in message
        await tunnel.leave()
