"""How conversations end: clients that leave, engines that fail, and what the other side is told."""

import asyncio
import contextlib
import json
import time

import pytest

from highwater.terminal.demo.process import free_port
from tests.faithful.engine import Engine, gone_after
from tests.faithful.fronts import PATIENT, PROXIES, Profile, fronted_by
from tests.faithful.fronts import reset as reset_connection
from tests.patience import patiently

JSON = (("content-type", "application/json"),)
PROMPT_SECONDS = 0.1
ATTEMPTS = 100


async def leave(client):
    await client.leave()


async def reset(client):
    client.reset()


async def half_close(client):
    await client.half_close()


DEPARTURES = pytest.mark.parametrize("depart", [leave, reset, half_close], ids=lambda depart: depart.__name__)


async def quickest(attempt) -> float:
    """The best of a few: a busy machine may delay most of them, a proxy that waits delays all."""
    times = []
    while len(times) < ATTEMPTS and (not times or min(times) > PROMPT_SECONDS):
        times.append(await attempt())
    return min(times)


@DEPARTURES
async def test_a_client_that_leaves_before_the_answer_is_missed_at_once(through, engine, depart):
    arrived = asyncio.Queue()

    @engine.on("/v1/x")
    async def think(call):
        await call.read()
        arrived.put_nowait(call)
        await call.wait_until_gone()
        call.close()

    async def attempt():
        client = await through.connect()
        await client.request("POST", "/v1/x", *JSON, body=b"{}")
        call = await patiently(arrived.get())
        began = time.monotonic()
        await depart(client)
        return await gone_after(call, began)

    assert await quickest(attempt) < PROMPT_SECONDS


@DEPARTURES
async def test_a_client_that_leaves_within_the_answer_is_missed_at_once(through, engine, depart):

    @engine.on("/v1/x")
    async def stream(call):
        await call.read()
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await call.wait_until_gone()
        call.close()

    async def attempt():
        client = await through.connect()
        await client.request("POST", "/v1/x", *JSON, body=b"{}")
        await client.head()
        await patiently(client.chunk())
        began = time.monotonic()
        await depart(client)
        return await gone_after(engine.seen("/v1/x")[-1], began)

    assert await quickest(attempt) < PROMPT_SECONDS


@pytest.mark.parametrize("framing", ["counted", "chunked"])
@pytest.mark.parametrize("depart", [leave, reset], ids=lambda depart: depart.__name__)
async def test_a_client_that_leaves_within_its_upload_is_missed_at_once(through, engine, depart, framing):
    arrived, broken = asyncio.Queue(), asyncio.Queue()

    @engine.on("/v1/x")
    async def listen(call):
        try:
            async for _ in call.pieces():
                arrived.put_nowait(call)
        except (asyncio.IncompleteReadError, ConnectionError):
            broken.put_nowait(True)
            raise
        broken.put_nowait(framing == "counted" and call.reader.at_eof())

    async def attempt():
        client = await through.connect()
        how = ("transfer-encoding", "chunked") if framing == "chunked" else ("content-length", "100")
        await client.request("POST", "/v1/x", how)
        await client.send(b"3\r\nabc\r\n" if framing == "chunked" else b"abc")
        await patiently(arrived.get())
        began = time.monotonic()
        await depart(client)
        assert await patiently(broken.get())
        return time.monotonic() - began

    assert await quickest(attempt) < PROMPT_SECONDS


async def test_a_client_that_leaves_with_requests_waiting_takes_them_along(through, engine):
    """What it had pipelined behind the first is not begun for nobody."""

    @engine.on("/v1/x")
    async def think(call):
        await call.wait_until_gone()
        call.close()

    client = await through.connect()
    await client.request("GET", "/v1/x")
    await client.request("POST", "/v1/y", ("content-length", "0"))
    await through.settle()
    (call,) = engine.seen("/v1/x")
    client.reset()
    await patiently(call.gone.wait())
    await through.settle()
    assert engine.seen("/v1/y") == []


async def test_one_that_leaves_does_not_disturb_the_others(through, engine):
    proceed = asyncio.Event()

    @engine.on("/v1/x")
    async def stream(call):
        number = json.loads(await call.read())["n"]
        await call.begin()
        await call.chunk(b"begin %d\n" % number)
        if number == 7:
            return await call.wait_until_gone()
        await proceed.wait()
        await call.chunk(b"end %d\n" % number)
        return await call.end()

    clients = [await through.connect() for _ in range(64)]
    for number, client in enumerate(clients):
        await client.request("POST", "/v1/x", *JSON, body=b'{"n":%d}' % number)
    for client in clients:
        await client.head()
        await patiently(client.chunk())
    await clients[7].leave()
    seventh = next(call for call in engine.calls if call.body == b'{"n":7}')
    await patiently(seventh.gone.wait())
    proceed.set()
    for number, client in enumerate(clients):
        if number != 7:
            assert [await client.chunk(), await client.chunk()] == [b"end %d\n" % number, b""]


async def test_a_client_that_comes_and_goes_is_no_request(through, engine):
    for data in (b"", b"GET /v1/x HTTP/1.1\r\nhos", b"\r\n"):
        client = await through.connect()
        await client.send(data)
        await client.leave()
    assert (await through.ask("GET", "/v1/y")).status == 200
    assert engine.seen("/v1/x") == []


@fronted_by(*PROXIES)
@pytest.mark.parametrize("ending", ["die", "close"])
@pytest.mark.parametrize("moment", ["before", "within-the-head", "after-hints"])
async def test_an_engine_that_hangs_up_before_its_answer_is_a_502(through, engine, ending, moment):
    """Nothing was said yet, so there is room for the truth; and a POST is not sent again, for it may have begun."""

    @engine.on("/v1/x")
    async def hang_up(call):
        await call.read()
        if moment == "within-the-head":
            await call.write(b"HTTP/1.1 200 OK\r\ncontent-le")
        elif moment == "after-hints":
            await call.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        getattr(call, ending)()

    client = await through.connect()
    await client.request("POST", "/v1/x", *JSON, body=b"{}")
    answer = await client.whole()
    assert (answer.status, len(engine.seen("/v1/x"))) == (502, 1)


@fronted_by(*PROXIES)
async def test_errors_have_the_apis_shape(through, engine):

    @engine.on("/v1/x")
    async def hang_up(call):
        await call.read()
        call.die()

    client = await through.connect()
    await client.request("POST", "/v1/x", ("x-request-id", "r-1"), *JSON, body=b"{}")
    answer = await client.whole()
    error = json.loads(answer.body)["error"]
    assert (answer.status, answer.header("content-type"), answer.header("x-request-id")) == (
        502,
        ["application/json"],
        ["r-1"],
    )
    assert (error["code"], error["type"], error["param"]) == ("disconnected", "upstream_error", None)
    assert error["message"]
    await client.request("GET", "/v1/y")
    assert (await client.whole()).status == 200


@pytest.fixture(scope="session")
def nobodys_port() -> int:
    """Nobody listens there."""
    return free_port()


@fronted_by("sidecar", "nginx")
class TestNobodyThere:
    """The engine is not up, or not up yet."""

    @pytest.fixture
    def profile(self, nobodys_port) -> Profile:
        return Profile("nobody", nginx=PATIENT.nginx, engine_port=nobodys_port)

    @pytest.mark.parametrize("method", ["GET", "POST"])
    async def test_an_engine_that_is_down_is_a_502(self, through, method):
        answer = await through.ask(method, "/v1/x", body=b"{}" if method == "POST" else b"")
        assert (answer.status, answer.complete) == (502, True)

    async def test_an_upload_to_an_engine_that_is_down_is_refused(self, through):
        client = await through.connect()
        await client.request("POST", "/v1/x", ("content-length", "10000000"))
        with contextlib.suppress(ConnectionError):
            await client.send(bytes(10000))
        assert (await client.whole()).status == 502


FRAMINGS = {
    "chunked": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"9\r\ndata: 1\n\n\r\n"),
    "within-a-chunk": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"ff\r\ndata: 1\n\n"),
    "before-the-end": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"9\r\ndata: 1\n\n\r\n0\r\n"),
    "counted": (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"data: 1\n\n"),
}


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("ending", ["die", "close"])
async def test_an_engine_that_dies_within_its_answer_cuts_the_stream(through, engine, framing, ending):
    seen = asyncio.Event()

    @engine.on("/v1/x")
    async def stream(call):
        await call.write(b"".join(FRAMINGS[framing]))
        await seen.wait()
        getattr(call, ending)()

    client = await through.connect()
    await client.request("GET", "/v1/x")
    reading = asyncio.create_task(client.whole())
    await through.settle()
    seen.set()
    answer = await reading
    assert (answer.status, answer.complete) == (200, False)
    assert answer.body in (b"data: 1\n\n", b"")
    assert await client.rest() == b""


async def test_an_answer_that_only_the_connection_ends_is_cut_by_a_reset(through, engine):
    """Nothing else can tell it from a whole one: a reset, or a last chunk that is missing."""
    seen = asyncio.Event()

    @engine.on("/v1/x")
    async def stream(call):
        await call.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: 1\n\n")
        await seen.wait()
        reset_connection(call.writer.transport)
        call.keep_alive = False

    client = await through.connect()
    await client.request("GET", "/v1/x")
    head = await client.head()
    if chunked := [value for name, value in head.headers if name.lower() == "transfer-encoding"]:
        assert await client.chunk() == b"data: 1\n\n"
    else:
        assert await client.reader.readexactly(9) == b"data: 1\n\n"
    seen.set()
    if chunked:
        assert await patiently(client.chunk()) is None
    else:
        with pytest.raises(ConnectionError):
            await patiently(client.reader.read())


async def test_after_an_engine_died_the_next_request_is_served(through, engine):

    @engine.on("/v1/die")
    async def die(call):
        call.die()

    await asyncio.gather(*(through.ask("GET", "/v1/x") for _ in range(8)))
    client = await through.connect()
    await client.request("POST", "/v1/die", *JSON, body=b"{}")
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        await client.whole()
    for _ in range(8):
        assert (await through.ask("POST", "/v1/x", *JSON, body=b"{}")).status == 200


async def test_an_engine_that_was_restarted_is_met_on_new_connections(through, engine_port):
    for _ in range(3):
        async with Engine(engine_port) as life:
            answers = await asyncio.gather(*(through.ask("POST", "/v1/x", *JSON, body=b"{}") for _ in range(16)))
            assert [answer.status for answer in answers] == [200] * 16
            assert len(life.seen("/v1/x")) == 16
