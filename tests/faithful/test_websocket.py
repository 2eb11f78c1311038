"""WebSockets, against a real server: what one side sends the other gets, with its pings and its end."""

import asyncio
import contextlib
import time
from collections import Counter

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from tests.faithful.engine import BACKLOG
from tests.faithful.fronts import fronted_by, reset
from tests.patience import LIMIT_SECONDS, patience, patiently

MIB = 2**20
ATTEMPTS = 100
SPEAKERS = ("sidecar", "direct", "nginx")
"""vllm-router passes no WebSockets on."""
KEY = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
UPGRADE = (("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13"), KEY)


class Listening(ServerConnection):
    """The engine's end of a connection, that counts what kinds of frames reach it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.frames = Counter()

    def process_event(self, event):
        if isinstance(event, Frame):
            self.frames[event.opcode] += 1
        super().process_event(event)


class RealtimeEngine:
    """It echoes, and does what else a message asks for."""

    def __init__(self):
        self.connections: list[Listening] = []
        self.ends: asyncio.Queue[tuple[ServerConnection, float]] = asyncio.Queue()
        self.refusal: tuple[int, str] | None = None

    def check(self, connection, _):
        self.connections.append(connection)
        return connection.respond(*self.refusal) if self.refusal else None

    async def talk(self, connection):
        with contextlib.suppress(ConnectionClosed):
            async for message in connection:
                await self.obey(connection, message)
        self.ends.put_nowait((connection, time.monotonic()))

    async def obey(self, connection, message):
        command, _, rest = message.partition(" ") if isinstance(message, str) else ("", "", "")
        if command == "close":
            await connection.close(int(rest), "enough")
        elif command == "vanish":
            reset(connection.transport) if rest else connection.transport.abort()
        elif command == "ping":
            await patiently(await connection.ping(rest))
            await connection.send("ponged")
        elif command == "flood":
            for _ in range(int(rest)):
                await connection.send(bytes(MIB))
        elif command == "deaf":
            connection.transport.pause_reading()
        elif command == "pieces":
            await connection.send(iter(rest.split()))
        else:
            await connection.send(message)


@pytest.fixture
async def engine(engine_port):
    engine = RealtimeEngine()
    choices = {
        "process_request": engine.check,
        "select_subprotocol": lambda _, offered: offered[-1] if offered else None,
        "create_connection": Listening,
        "compression": None,
        "max_size": 64 * MIB,
        "ping_interval": None,
        "close_timeout": LIMIT_SECONDS,
    }
    async with serve(engine.talk, sock=engine_port.dup(), backlog=BACKLOG, **choices):
        yield engine
        for connection in engine.connections:  # one that reads nothing would be waited for
            connection.transport.abort()


def dial(through, **options):
    """A client that leaves pings, limits and compression to the test."""
    calm = {"ping_interval": None, "max_size": 64 * MIB, "compression": None, "proxy": None}
    patient = {"open_timeout": LIMIT_SECONDS, "close_timeout": LIMIT_SECONDS}
    return connect(through.websocket_url + "?model=a%2Fb+c", **{**calm, **patient, **options})


async def closed(socket) -> tuple[int, str]:
    """How the client sees it end."""
    async with patience():
        with contextlib.suppress(ConnectionClosed):
            while True:
                await socket.recv()
    return socket.close_code, socket.close_reason


@fronted_by(*SPEAKERS)
async def test_text_and_binary_messages_go_both_ways(through, engine):
    messages = ["h\u00e9llo \u4f60\u597d", b"\x00\xff", "", b"", "x" * 125, "x" * 126, b"y" * 65535, b"y" * 65536]
    async with dial(through) as socket:
        for message in messages:
            await socket.send(message)
        assert [await socket.recv() for _ in messages] == messages


@fronted_by(*SPEAKERS)
async def test_fragments_stay_fragments(through, engine):
    async with dial(through) as socket:
        await socket.send(iter(["one", "two", "three"]))
        assert await socket.recv() == "onetwothree"
        (connection,) = engine.connections
        assert connection.frames[Opcode.CONT] >= 2
        await socket.send("pieces a b c d")
        assert [piece async for piece in socket.recv_streaming()][:4] == ["a", "b", "c", "d"]


@fronted_by(*SPEAKERS)
async def test_the_engine_sees_target_headers_and_subprotocols(through, engine):
    headers = {"Authorization": "Bearer theirs", "X-Tag": "1", "Origin": "http://example.org"}
    async with dial(through, subprotocols=["x", "realtime"], additional_headers=headers) as socket:
        assert socket.subprotocol == "realtime"
    request = engine.connections[0].request
    assert request.path == "/v1/realtime?model=a%2Fb+c"
    assert [request.headers[name] for name in headers] == list(headers.values())
    assert request.headers["sec-websocket-protocol"].replace(" ", "") == "x,realtime"


@fronted_by(*SPEAKERS)
@pytest.mark.parametrize("engine_does", [None, "deflate"])
async def test_compression_is_for_the_two_ends_to_agree_on(through, engine_port, engine_does):
    engine = RealtimeEngine()
    text = "the same again and again " * 1000
    async with (
        serve(engine.talk, sock=engine_port.dup(), backlog=BACKLOG, compression=engine_does),
        dial(through, compression="deflate") as socket,
    ):
        assert [type(extension).__name__ for extension in socket.protocol.extensions] == (
            ["PerMessageDeflate"] if engine_does else []
        )
        for message in (text, text.encode(), ""):
            await socket.send(message)
            assert await socket.recv() == message


@fronted_by(*SPEAKERS)
async def test_a_clients_ping_reaches_the_engine(through, engine):
    async with dial(through) as socket:
        await socket.send("hello")
        await socket.recv()
        await patiently(await socket.ping(b"are you there"))
        assert engine.connections[0].frames[Opcode.PING] == 1


@fronted_by(*SPEAKERS)
async def test_an_engines_ping_reaches_the_client(through, engine):
    seen = Counter()
    async with dial(through) as socket:
        real = socket.process_event
        socket.process_event = lambda event: (seen.update([getattr(event, "opcode", None)]), real(event))
        await socket.send("ping anybody")
        assert await patiently(socket.recv()) == "ponged"
    assert seen[Opcode.PING] == 1
    assert engine.connections[0].frames[Opcode.PONG] == 1


@fronted_by(*SPEAKERS)
async def test_sixteen_megabytes_are_a_message(through, engine):
    message = bytes(range(256)) * (16 * MIB // 256)
    before = through.rss_bytes()
    async with dial(through) as socket:
        sending = asyncio.create_task(socket.send(message))
        answer = await patiently(socket.recv())
        await sending
        assert answer == message
        assert through.rss_bytes() - before < 8 * MIB


@fronted_by(*SPEAKERS)
async def test_a_client_that_does_not_read_holds_the_engine_back(through, engine):
    before = through.rss_bytes()
    async with dial(through) as socket:
        socket.transport.pause_reading()
        await socket.send("flood 128")
        async with patience():
            while not engine.connections or not stuck(engine.connections[0]):  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.05)
        assert through.rss_bytes() - before < 8 * MIB
        socket.transport.abort()


def stuck(connection) -> bool:
    """Whether its writer waits for the peer."""
    return connection.transport.get_write_buffer_size() > 0


async def push(socket):
    """128 MiB."""
    for _ in range(128):
        await socket.send(bytes(MIB))


@fronted_by(*SPEAKERS)
async def test_an_engine_that_does_not_read_holds_the_client_back(through, engine):
    before = through.rss_bytes()
    async with dial(through) as socket:
        await socket.send("deaf now")
        pushing = asyncio.create_task(push(socket))
        await asyncio.sleep(0.5)  # what is tested is that it does not come to its end
        assert not pushing.done()
        pushing.cancel()
        await asyncio.wait([pushing])
        assert through.rss_bytes() - before < 8 * MIB
        socket.transport.abort()


@fronted_by(*SPEAKERS)
@pytest.mark.parametrize("code", [1000, 1001, 1008, 1011, 3000, 4321])
async def test_the_engines_close_code_reaches_the_client(through, engine, code):
    async with dial(through) as socket:
        await socket.send(f"close {code}")
        assert await closed(socket) == (code, "enough")


@fronted_by(*SPEAKERS)
@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1001, "bye"), (4000, "done \u2713")])
async def test_the_clients_close_code_reaches_the_engine(through, engine, code, reason):
    async with dial(through) as socket:
        await socket.close(code, reason)
    connection, _ = await patiently(engine.ends.get())
    received = connection.protocol.close_rcvd
    assert (received.code, received.reason) == (code, reason)


@fronted_by(*SPEAKERS)
@pytest.mark.parametrize("manner", ["aborts", "resets"])
async def test_a_client_that_vanishes_is_missed_at_once(through, engine, manner):
    """No close frame is made up for it: the engine sees the connection go."""
    times = []
    while len(times) < ATTEMPTS and (not times or min(times) > 0.1):
        async with dial(through) as socket:
            await socket.send("hello")
            await socket.recv()
            began = time.monotonic()
            reset(socket.transport) if manner == "resets" else socket.transport.abort()
            connection, ended = await patiently(engine.ends.get())
        times.append(ended - began)
        assert connection.protocol.close_rcvd is None or connection.protocol.close_rcvd.code == 1001
    assert min(times) < 0.1


@fronted_by(*SPEAKERS)
@pytest.mark.parametrize("manner", ["vanish", "vanish reset"])
async def test_an_engine_that_vanishes_is_no_normal_end(through, engine, manner):
    async with dial(through) as socket:
        await socket.send("hello")
        await socket.recv()
        await socket.send(manner)
        code, _ = await closed(socket)
        assert code in (1006, 1014)


@fronted_by(*SPEAKERS)
@pytest.mark.parametrize("refusal", [(401, "who?\n"), (403, "no\n"), (404, "not here\n"), (503, "later\n")])
async def test_a_refused_handshake_arrives_as_it_is(through, engine, refusal):
    engine.refusal = refusal
    with pytest.raises(InvalidStatus) as refused:
        await dial(through)
    response = refused.value.response
    assert (response.status_code, response.body.decode()) == refusal


@fronted_by(*SPEAKERS)
async def test_a_wrong_version_is_the_engines_to_refuse(through, engine):
    client = await through.connect()
    old = [(name, "8" if name == "sec-websocket-version" else value) for name, value in UPGRADE]
    await client.request("GET", "/v1/realtime", *old)
    answer = await client.whole()
    assert answer.status in (400, 426)


@fronted_by(*SPEAKERS)
async def test_the_handshake_is_between_the_two_ends(through, engine):
    client = await through.connect()
    await client.request("GET", "/v1/realtime", *UPGRADE, ("x-request-id", "r-1"))
    head = await patiently(client.head())
    answered = {name.lower(): value for name, value in head.headers}
    assert (head.status, answered["sec-websocket-accept"]) == (101, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
    assert (answered["upgrade"].lower(), "upgrade" in answered["connection"].lower()) == ("websocket", True)
    request = engine.connections[0].request
    assert request.headers["sec-websocket-key"] == KEY[1]
    if through.kind == "sidecar":
        assert (request.headers["x-request-id"], answered["x-request-id"]) == ("r-1", "r-1")


MASKED_HI = b"\x81\x82\x00\x00\x00\x00hi"


@fronted_by(*SPEAKERS)
async def test_a_frame_that_comes_with_the_handshake_is_not_lost(through, engine):
    """A client need not wait for the 101."""
    client = await through.connect()
    head = "".join(f"{name}: {value}\r\n" for name, value in UPGRADE)
    await client.send(f"GET /v1/realtime HTTP/1.1\r\nhost: s\r\n{head}\r\n".encode() + MASKED_HI)
    assert (await client.head()).status == 101
    assert await patiently(client.reader.readexactly(4)) == b"\x81\x02hi"


@fronted_by(*SPEAKERS)
async def test_a_frame_that_comes_with_the_101_is_not_lost(through, engine_port):

    async def speak_first(reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            status = b"101 Switching Protocols" if b"websocket" in head else b"404 Not Found\r\ncontent-length: 0"
            writer.write(b"HTTP/1.1 %s\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\r\n\x81\x05hello" % status)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:  # the loop may end before the proxy has let go
            writer.transport.abort()

    async with await asyncio.start_server(speak_first, sock=engine_port.dup(), backlog=BACKLOG):
        client = await through.connect()
        await client.request("GET", "/v1/realtime", *UPGRADE)
        assert (await patiently(client.head())).status == 101
        assert await patiently(client.reader.readexactly(7)) == b"\x81\x05hello"
        await client.leave()


@fronted_by(*SPEAKERS)
async def test_the_case_of_the_upgrade_is_free(through, engine):
    client = await through.connect()
    fields = [("connection", "keep-alive, UPGRADE"), ("Upgrade", "WebSocket"), *UPGRADE[2:]]
    await client.request("GET", "/v1/realtime", *fields)
    assert (await patiently(client.head())).status == 101


@fronted_by("sidecar")
async def test_what_follows_a_refused_handshake_is_a_request_like_any_other(through, oracle):
    head = "".join(f"{name}: {value}\r\n" for name, value in UPGRADE)
    handshake = f"GET /v1/realtime HTTP/1.1\r\nhost: s\r\n{head}\r\n".encode()
    hidden = b"POST /collective_rpc HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\r\n"
    client = await through.connect()
    await client.send(handshake + hidden)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        assert (await client.whole()).status in range(400, 600)
        assert (await client.whole()).status in (400, 403)
    assert "/collective_rpc" not in oracle.targets()


@fronted_by("sidecar", "nginx")
async def test_what_follows_a_refused_handshake_may_be_served(through, engine):
    engine.refusal = (403, "no\n")
    client = await through.connect()
    await client.request("GET", "/v1/realtime", *UPGRADE)
    assert (await client.whole()).status == 403
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        await client.request("GET", "/v1/realtime", *UPGRADE)
        assert (await client.whole()).status == 403


@fronted_by("sidecar", "nginx")
@pytest.mark.parametrize("method", ["POST", "HEAD"])
async def test_only_a_get_is_a_handshake(through, oracle, method):
    client = await through.connect()
    await client.request(method, "/v1/realtime", *UPGRADE, ("content-length", "0"))
    answer = await client.whole(method=method)
    assert answer.status != 101
    assert not [seen for seen in oracle.requests if seen.method == method and seen.header("upgrade")]


@fronted_by("sidecar")
async def test_a_handshake_with_a_body_makes_no_tunnel_of_it(through, oracle):
    hidden = b"POST /collective_rpc HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\r\n"
    for framing in (("content-length", str(len(hidden))), ("transfer-encoding", "chunked")):
        client = await through.connect()
        await client.request("GET", "/v1/realtime", *UPGRADE, framing)
        await client.send(
            hidden if framing[0] == "content-length" else b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
        )
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            assert (await client.whole()).status != 101
        await through.settle()
    assert "/collective_rpc" not in oracle.targets()


@fronted_by(*SPEAKERS)
async def test_one_hundred_conversations_are_kept_apart(through, engine):
    async with contextlib.AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(dial(through)) for _ in range(100)]
        for number, socket in enumerate(sockets):
            await socket.send(f"before {number}")
        for socket in sockets[::2]:
            socket.transport.abort()
        for number, socket in enumerate(sockets):
            if number % 2:
                await socket.send(f"after {number}")
        async with patience():
            for number, socket in enumerate(sockets):
                if number % 2:
                    assert [await socket.recv(), await socket.recv()] == [f"before {number}", f"after {number}"]


@fronted_by("sidecar", "nginx")
async def test_two_hundred_conversations_leave_nothing_behind(through, engine):

    async def talk(how: int) -> None:
        async with dial(through) as socket:
            await socket.send("hello")
            await socket.recv()
            if how == 0:
                await socket.send("close 1000")
            elif how == 1:
                await socket.send("vanish")
            elif how == 2:
                socket.transport.abort()

    await asyncio.gather(*(talk(how % 4) for how in range(20)))
    files = await through.files_at_rest()
    await asyncio.gather(*(talk(how % 4) for how in range(200)))
    assert await through.files_at_rest(files) <= files
