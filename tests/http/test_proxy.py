"""What nobody sees from outside, where tests/faithful looks: memory, counts, retries, and engines of other kinds."""

import asyncio
import gc
from collections import Counter

import pytest

from gated_proxy.proxy import Proxy
from gated_proxy.traffic import ProxyTraffic
from tests.patience import patiently, until


def _of_the_proxy() -> list[object]:
    return [thing for thing in gc.get_objects() if str(type(thing).__module__).startswith("gated_proxy")]


async def test_requests_leave_nothing_for_the_garbage_collector(front, upstream):
    """Cycles cost a third of the CPU per request: whatever a request held is freed by counting when it ends."""
    gc.collect()
    known = _of_the_proxy()  # tests of the process keep heads of their own
    gc.disable()
    try:
        wire = await front.connect()
        for _ in range(5):
            await wire.request("POST", "/v1/completions", body=b"{}")
            await wire.answer()
        await wire.leave()
        await until(lambda: not front.proxy.clients)
        kept = set(map(id, known))
        left = [thing for thing in _of_the_proxy() if id(thing) not in kept or isinstance(thing, Proxy)]
    finally:
        gc.enable()
    counts = Counter(type(thing).__name__ for thing in left)
    assert {"Proxy", "EngineConnection"} <= set(counts)  # it does look
    assert {"EngineExchange", "RequestHead", "ResponseHead", "IncomingRequest", "ClientConnection"}.isdisjoint(counts)


async def test_a_request_under_way_has_no_dict_of_its_own(front, upstream):
    """CPython 3.11 makes one, of 1.3 KB, for an object of 30 attributes or more."""
    upstream.on("/v1/completions")(thinks)
    wire = await front.connect()
    await wire.request("POST", "/v1/completions", body=b"{}")
    await until(lambda: upstream.calls)
    (exchange,) = front.proxy.exchanges
    (client,) = front.proxy.clients
    assert max(len(vars(thing)) for thing in (exchange, exchange.head, client, exchange._engine)) < 30


async def test_a_unix_socket_is_an_engine_too(start_proxy, upstream, tmp_path):
    """vLLM listens on one with --uds."""
    server = await upstream.listen_on(f"{tmp_path}/engine.sock")
    async with start_proxy(f"unix:{tmp_path}/engine.sock") as front:
        assert (await front.post("/v1/completions", b"hello")).body == b"hello"
    server.close()
    assert upstream.calls[0].header("host") == ["localhost"]


def test_an_upstream_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="unix:/path"):
        Proxy("localhost:8000", observer=ProxyTraffic())


async def test_the_observer_hears_of_every_request(front, upstream):
    await front.post("/v1/chat/completions", b"{}")
    await front.get("/v1/models/org%2Fname")
    wire = await front.connect()
    await wire.request("PROPFIND", "/whatever/it/is")
    await wire.answer()
    assert front.observed.started == 3
    assert [ended[:4] for ended in front.observed.ended] == [
        ("chat_completions", "POST", 200, "complete"),
        ("models", "GET", 200, "complete"),
        ("other", "other", 200, "complete"),
    ]
    assert all(0 < ended.first_byte_seconds <= ended.seconds for ended in front.observed.ended)


async def thinks(call):
    await call.read()
    await call.wait_until_gone()


async def stands_still(call):
    await asyncio.sleep(0.09)  # idle_seconds is not first_byte_seconds
    await call.begin()
    await call.chunk(b"data: 1\n\n")
    await call.wait_until_gone()


async def hangs_up(call):
    await call.read()
    call.die()


async def babbles(call):
    await call.write(b"SSH-2.0-OpenSSH\r\n\r\n")
    call.close()


@pytest.mark.parametrize(
    ("engine", "limits", "seen"),
    [
        (thinks, {"first_byte_seconds": 0.05}, (504, "first_byte_timeout")),
        (stands_still, {"idle_seconds": 0.05}, (200, "idle_timeout")),
        (hangs_up, {}, (502, "disconnected")),
        (babbles, {}, (502, "malformed")),
    ],
)
async def test_what_the_engine_fails_is_counted_by_its_reason(start_proxy, upstream, engine, limits, seen):
    upstream.on("/v1/completions")(engine)
    async with start_proxy(**limits) as front:
        answer = await front.post("/v1/completions", b"{}")
    assert (answer.status, *front.observed.errors) == seen
    assert front.observed.refused == []


async def test_an_early_refusal_reaches_a_client_that_still_uploads(front, upstream):
    """A 401 while the body is on its way up: delivered at once, and the client may finish sending."""

    @upstream.on("/v1/audio/transcriptions")
    async def refuse(call):
        await call.answer(b'{"error":"Unauthorized"}', 401)
        await call.wait_until_gone()

    wire = await front.connect()
    await wire.request("POST", "/v1/audio/transcriptions", ("content-length", "1000000"))
    await wire.send(bytes(1000))
    answer = await patiently(wire.answer())
    assert (answer.status, answer.body) == (401, b'{"error":"Unauthorized"}')
    await patiently(upstream.calls[0].gone.wait())
    await wire.send(bytes(999000))
    await wire.request("GET", "/health")
    assert (await wire.answer()).status == 200


async def test_an_engine_that_stops_taking_the_body_is_a_504(start_proxy, upstream):
    """Otherwise nobody would notice that the client left."""

    @upstream.on("/v1/completions")
    async def deaf(call):
        call.writer.transport.pause_reading()
        await asyncio.Event().wait()

    async with start_proxy(idle_seconds=0.1) as front:
        wire = await front.connect()
        await wire.request("POST", "/v1/completions", ("content-length", str(2**26)))
        pump = asyncio.create_task(wire.send(bytes(2**26)))
        assert (await patiently(wire.head())).status == 504
        pump.cancel()
        await asyncio.wait([pump])
    assert front.observed.errors == ["upload_stalled"]


async def refuses(call):
    await call.answer(b"{}", 401)


async def dies(call):
    call.die()


@pytest.mark.parametrize(("engine", "status"), [(refuses, 401), (dies, 502)])
async def test_a_body_that_was_not_asked_for_ends_the_connection(front, upstream, engine, status):
    """What the client sends next may be the body or another request: it cannot be told."""
    upstream.on("/v1/completions")(engine)
    wire = await front.connect()
    await wire.request("POST", "/v1/completions", ("content-length", "3"), ("expect", "100-continue"))
    answer = await wire.answer()
    assert (answer.status, answer.header("connection")) == (status, ["close"])
    await wire.send(b"abc")
    assert await wire.reader.read() == b""


async def test_a_body_that_came_unasked_costs_no_connection(front, upstream):
    upstream.on("/v1/completions")(hangs_up)
    wire = await front.connect()
    await wire.request("POST", "/v1/completions", ("expect", "100-continue"), body=b"abc")
    answer = await wire.answer()
    assert (answer.status, answer.header("connection")) == (502, [])
    await wire.request("GET", "/health")
    assert (await wire.answer()).status == 200


async def test_a_client_that_leaves_within_the_handshake_frees_the_engine(front, upstream):
    arrived = asyncio.Event()

    @upstream.on("/v1/realtime")
    async def silent(call):
        arrived.set()
        await call.wait_until_gone()

    wire = await front.connect()
    key = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
    upgrade = (("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13"), key)
    await wire.request("GET", "/v1/realtime", *upgrade)
    await patiently(arrived.wait())
    assert upstream.calls[0].header("sec-websocket-key") == [key[1]]
    await wire.leave()
    await patiently(upstream.calls[0].gone.wait())
    assert front.observed.departures == 1
