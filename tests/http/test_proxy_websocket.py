"""WebSockets through the proxy: frames, subprotocols, headers, and how either side ends them."""

import asyncio

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.patience import patiently


class Engine:
    """A WebSocket engine: it echoes, and closes, dies or floods when told to."""

    def __init__(self):
        self.handshakes = []
        self.ends = asyncio.Queue()
        self.refuse_with = None

    def check(self, connection, request):
        self.handshakes.append(request)
        return connection.respond(self.refuse_with, "no") if self.refuse_with else None

    async def talk(self, connection):
        try:
            async for message in connection:
                if message == "close":
                    await connection.close(4321, "enough")
                elif message == "die":
                    connection.transport.abort()
                elif message == "flood":
                    await connection.send(bytes(100_000))
                else:
                    await connection.send(message)
        except ConnectionClosed:
            pass
        self.ends.put_nowait(connection.protocol.close_rcvd)


@pytest.fixture
async def engine():
    engine = Engine()
    choose = {
        "process_request": engine.check,
        "select_subprotocol": lambda _, offered: offered[-1] if offered else None,
    }
    async with serve(engine.talk, "127.0.0.1", 0, **choose) as server:
        engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield engine


@pytest.fixture
async def realtime(start_proxy, engine):
    """The proxy before that engine."""
    async with start_proxy(engine.url) as front:
        front.websocket_url = front.url.replace("http", "ws") + "/v1/realtime?model=a%2Fb+c"
        yield front


async def test_text_and_binary_frames_go_both_ways(realtime):
    """Unchanged in kind and content."""
    async with connect(realtime.websocket_url) as socket:
        for message in ("h\u00e9llo", b"\x00\xff", "", b""):
            await socket.send(message)
            assert await socket.recv() == message


async def test_the_engine_sees_target_headers_and_subprotocols(realtime, engine):
    """What the client offered is what the engine chooses from; credentials travel."""
    headers = {"Authorization": "Bearer theirs", "X-Request-Id": "r1"}
    async with connect(realtime.websocket_url, subprotocols=["x", "realtime"], additional_headers=headers) as socket:
        assert socket.subprotocol == "realtime"
        assert socket.response.headers["x-request-id"] == "r1"
    (request,) = engine.handshakes
    assert request.path == "/v1/realtime?model=a%2Fb+c"
    assert [request.headers[name] for name in headers] == ["Bearer theirs", "r1"]
    assert request.headers["host"] == engine.url.removeprefix("http://")


async def test_the_engines_close_code_reaches_the_client(realtime):
    """With its reason."""
    async with connect(realtime.websocket_url) as socket:
        await socket.send("close")
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (4321, "enough")


@pytest.mark.parametrize(("code", "reason"), [(4000, "done"), (1000, "")])
async def test_the_clients_close_code_reaches_the_engine(realtime, engine, code, reason):
    """With its reason."""
    async with connect(realtime.websocket_url) as socket:
        await socket.close(code, reason)
    end = await patiently(engine.ends.get())
    assert (end.code, end.reason) == (code, reason)


async def test_a_client_that_vanishes_closes_the_engine(realtime, engine):
    """No close frame from the client, and none is made up: the engine's connection ends."""
    async with connect(realtime.websocket_url) as socket:
        await socket.send("hello")
        await socket.recv()
        socket.transport.abort()
        end = await patiently(engine.ends.get())
    assert end is None


async def test_an_engine_that_dies_is_not_a_clean_end(realtime):
    """No close frame comes from nowhere: the client sees what it would see without us."""
    async with connect(realtime.websocket_url) as socket:
        await socket.send("die")
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1006


async def test_a_large_message_passes(realtime):
    """In bounded memory, for it is never put together here."""
    async with connect(realtime.websocket_url) as socket:
        await socket.send("flood")
        assert await socket.recv() == bytes(100_000)


async def test_a_refused_handshake_is_refused_with_the_same_status(realtime, engine):
    """And the same body."""
    engine.refuse_with = 401
    with pytest.raises(InvalidStatus) as refusal:
        await connect(realtime.websocket_url)
    assert refusal.value.response.status_code == 401
    assert refusal.value.response.body == b"no"
    assert realtime.observed.ended[0][:3] == ("realtime", "GET", 401)


async def test_an_engine_that_is_down_refuses_the_handshake_with_502(start_proxy, unused_tcp_port):
    """As for any other request."""
    async with start_proxy(f"http://127.0.0.1:{unused_tcp_port}") as front:
        with pytest.raises(InvalidStatus) as refusal:
            await connect(front.url.replace("http", "ws") + "/v1/realtime")
    assert refusal.value.response.status_code == 502


async def test_a_client_that_leaves_within_the_handshake_frees_the_engine(front, upstream):
    """Here the engine never answers it."""
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
