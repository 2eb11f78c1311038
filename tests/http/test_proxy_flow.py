"""Limits on what one connection takes, whatever its client does: memory, time and turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import socket
from dataclasses import replace

import pytest
import uvloop

from gated_proxy.client import STEPS_PER_TURN, ClientConnection
from gated_proxy.failures import Failure
from gated_proxy.heads import LINES_AT_ONCE
from gated_proxy.routes import Destination
from tests.fakes.upstream import Upstream
from tests.http.conftest import AllProxied, running_proxy
from tests.patience import patience, until

ANSWER_BYTES = 100_000
# The transport's: a kernel that takes a little more after the high-water mark was passed leaves it between the two.
LOW_WATER_BYTES = 16 * 1024
# The transport's high-water mark, the answer that passes it, and what is read of the engine in one turn.
HELD_BYTES = 64 * 1024 + ANSWER_BYTES + 2 * 256 * 1024
TURNS = 300
UPGRADE = b"GET /v1/realtime HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
LAST = b"\r\n\r\nlast"


class Mixed(AllProxied):
    """Some paths are proxied, some our own, some nobody's."""

    @staticmethod
    def judge(method, raw_path, websocket):
        if raw_path.startswith(b"/own"):
            return Destination("sidecar")
        if raw_path.startswith(b"/nobodys"):
            return Destination("nowhere", refusal=Failure(404, "not_admitted", "not here"))
        return AllProxied.judge(method, raw_path, websocket)

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        ids = [header for header in scope["headers"] if header[0] == b"x-request-id"]
        headers = [(b"content-length", b"%d" % ANSWER_BYTES), *ids]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": f"{scope['path']:-<{ANSWER_BYTES}}".encode()})


@contextlib.asynccontextmanager
async def timeless(upstream):
    """A front whose time passes when a test says so, before an engine with a large answer."""

    @upstream.on("/v1/big")
    async def big(call):
        await call.read()
        await call.answer(f"{call.target:-<{ANSWER_BYTES}}".encode())

    async with running_proxy(upstream.url, app=Mixed) as running:
        running.proxy._timer.cancel()
        yield running


@pytest.fixture
async def front(upstream):
    async with timeless(upstream) as running:
        yield running


async def only_client(front) -> ClientConnection:
    await until(lambda: front.proxy.clients)
    (client,) = front.proxy.clients
    return client


async def turn(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def pass_ticks(front, count: int) -> None:
    """Let time pass foreverybody, and what comes of it happen."""
    for _ in range(count):
        for timed in [*front.proxy.exchanges, *front.proxy.clients]:
            timed.tick()
        await turn(3)


class Narrow:
    """A client whose kernel takes little for it, and that reads only when it is told to."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Narrow:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)
        self.loop = asyncio.get_running_loop()
        await self.loop.sock_connect(self.socket, ("127.0.0.1", self.port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.socket, data)

    async def read_all(self, last: bytes) -> bytes:
        got = bytearray()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        async with patience():
            while not got.endswith(last) and (data := await self.loop.sock_recv(self.socket, 2**20)):
                got += data
        return bytes(got)


def narrow_too(client) -> None:
    """Have our own kernel take little, so that what is not read shows in the transport."""
    client.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


# --- answers that nobody takes ---


@pytest.mark.parametrize(("path", "count"), [("/v1/big", 100), ("/own", 100), ("/nobodys", 5_000)])
async def test_a_client_that_pipelines_and_reads_nothing_costs_one_answer(front, upstream, path, count):
    async with Narrow(front.port) as reader:
        client = await only_client(front)
        narrow_too(client)
        requests = b"".join(
            b"GET %b HTTP/1.1\r\nhost: a\r\nx-request-id: %d\r\n\r\n" % (path.encode(), n) for n in range(count)
        )
        sending = asyncio.create_task(reader.send(requests))
        await until(lambda: client.transport.get_write_buffer_size() > LOW_WATER_BYTES)
        most = asked = 0
        for _ in range(TURNS):
            await asyncio.sleep(0.001)  # an engine that were asked could answer meanwhile
            most = max(most, client.transport.get_write_buffer_size())
            asked = max(asked, len(upstream.calls))
        assert most < HELD_BYTES
        assert len(client._rest) < 400_000
        assert asked < 20
        reading = asyncio.create_task(reader.read_all(LAST))
        await sending
        await reader.send(b"GET /v1/last HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nlast")
        answers = await reading
    assert [int(n) for n in re.findall(rb"x-request-id: (\d+)\r\n", answers)] == list(range(count))
    assert answers.count(b"HTTP/1.1 ") == count + 1


async def test_requests_that_wait_for_a_full_client_go_on_as_soon_as_it_reads(front):
    async with Narrow(front.port) as reader:
        client = await only_client(front)
        narrow_too(client)
        paths = [b"/v1/big", b"/own", b"/nobodys", b"/v1/big", b"/nobodys", b"/own"] * 3
        await reader.send(b"".join(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path for path in paths))
        await until(lambda: client.transport.get_write_buffer_size() > LOW_WATER_BYTES)
        await turn(20)
        await reader.send(b"GET /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nlast")
        answers = await reader.read_all(LAST)
    bodies = re.findall(rb"\r\n\r\n(/v1/big|/own|\{\"error\")", answers)
    assert bodies == [b'{"error"' if path == b"/nobodys" else path for path in paths]


class Shrinking:
    """A transport whose client takes a byte now and then."""

    def __init__(self, transport, size: int) -> None:
        self._transport, self._size = transport, size

    def get_write_buffer_size(self) -> int:
        self._size -= 1
        return self._size

    def __getattr__(self, name: str):
        return getattr(self._transport, name)


@pytest.mark.parametrize(("size", "ticks"), [(1000, 4), (80_000, 13)])
async def test_a_client_that_takes_its_answer_too_slowly_is_let_go(front, size, ticks):
    """It is memory that nobody else gets: a byte now and then keeps it no longer than 8 KiB/s would need."""
    front.proxy.client_ticks = 3
    wire = await front.connect()
    client = await only_client(front)
    client.transport = Shrinking(client.transport, size)
    await pass_ticks(front, ticks - 1)
    assert client in front.proxy.clients
    await pass_ticks(front, 2)
    assert client not in front.proxy.clients
    with contextlib.suppress(ConnectionError):
        assert await wire.reader.read() == b""


# --- requests that do not come ---


async def drip(front, wire, pieces: list[bytes]) -> int:
    """Send a piece at every tick until the connection is closed; how many were sent."""
    for sent, piece in enumerate(pieces):
        if not front.proxy.clients:
            return sent
        with contextlib.suppress(ConnectionError):
            await wire.send(piece)
        await asyncio.sleep(0.005)  # for the piece to arrive; a late one makes the time only shorter
        await pass_ticks(front, 1)
    return len(pieces)


@pytest.mark.parametrize(
    ("first", "more"),
    [(b"", b"\r\n"), (b"GET /v1/x HTTP/1.1\r\n", b"x: y\r\n"), (b"", b"G"), (b"\r\n", b"GET /v1/x HTTP/1.1\r\n")],
    ids=["line-ends", "lines", "letters", "line-end-and-lines"],
)
async def test_a_head_that_drips_is_not_waited_for(front, first, more):
    """It has one time, from its first byte; the connection closes without an answer, as nginx's does."""
    front.proxy.client_ticks = 3
    wire = await front.connect()
    await until(lambda: front.proxy.clients)
    if first:
        await wire.send(first)
    assert await drip(front, wire, [more] * 20) < 8
    async with patience():
        assert await wire.reader.read() == b""


async def test_a_head_behind_an_answer_has_one_time_too(front):
    front.proxy.client_ticks = 3
    wire = await front.connect()
    await wire.send(b"GET /v1/x HTTP/1.1\r\nhost: a\r\n\r\nGET /v1/x HTT")
    assert (await wire.answer()).status == 200
    assert await drip(front, wire, [b"P"] * 20) < 8


async def test_a_head_after_a_long_silence_has_its_whole_time(front):
    front.proxy.client_ticks = 3
    wire = await front.connect()
    client = await only_client(front)
    await pass_ticks(front, 3)
    await wire.send(b"GET /v1/x HTTP/1.1\r\n")
    await until(lambda: client._rest)
    await pass_ticks(front, 3)
    await wire.send(b"host: a\r\n\r\n")
    assert (await wire.answer()).status == 200


@pytest.mark.parametrize("framing", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_a_body_that_drips_is_not_waited_for(front, upstream, framing):
    """A byte now and then renews nothing: the client gets a 408 that names the limit."""
    front.proxy.limits = replace(front.proxy.limits, slow_body_seconds=3.0, body_bytes_per_second=700)
    broken = asyncio.Event()

    @upstream.on("/v1/x")
    async def listen(call):
        try:
            await call.read()
        finally:
            broken.set()

    wire = await front.connect()
    await wire.send(b"POST /v1/x HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % framing)
    await until(lambda: upstream.calls)
    piece = b"x" if b"length" in framing else b"1\r\nx\r\n"
    for _ in range(8):
        await wire.send(piece)
        await asyncio.sleep(0.005)  # for the piece to arrive
        await pass_ticks(front, 1)
    async with patience():
        answer = await wire.answer()
        await broken.wait()
    assert answer.status == 408
    assert b"too slowly (under 700 bytes/s)" in answer.body


async def test_a_slow_body_that_moves_is_waited_for(front, upstream):
    """Faster than 512 bytes/s for as long as it takes."""
    front.proxy.limits = replace(front.proxy.limits, slow_body_seconds=3.0)
    wire = await front.connect()
    await wire.send(b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 20000\r\n\r\n")
    for number in range(20):
        await wire.send(bytes(1000))
        await until(
            lambda least=number * 1000: sum(e.request_bytes for e in front.proxy.exchanges) > least or least == 19000
        )
        await pass_ticks(front, 1)
    assert len((await wire.answer()).body) == 20000


async def test_an_idle_tunnel_is_closed(front, upstream):
    front.proxy.idle_ticks = 3

    @upstream.on("/v1/realtime")
    async def echo(call):
        await call.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        while data := await call.reader.read(100):
            await call.write(data)
        call.gone.set()

    wire = await front.connect()
    await wire.send(UPGRADE)
    assert (await wire.head()).status == 101
    for _ in range(5):
        await pass_ticks(front, 2)
        await wire.send(b"ping")
        assert await wire.reader.readexactly(4) == b"ping"
    assert front.gate.open_ended == 1
    await pass_ticks(front, 5)
    async with patience():
        assert await wire.reader.read() == b""
        await upstream.calls[0].gone.wait()
    assert (front.gate.in_flight, front.observed.errors) == (0, [])


async def test_a_peer_that_vanishes_without_a_word_is_found_out(front, upstream):
    """By the kernel, on connections that last: nobody else would notice."""

    @upstream.on("/v1/x")
    async def wait(call):
        await call.wait_until_gone()

    wire = await front.connect()
    await wire.request("GET", "/v1/x")
    await until(lambda: upstream.calls)
    await pass_ticks(front, 1)
    (client,), (exchange,) = front.proxy.clients, front.proxy.exchanges
    for transport in (client.transport, exchange._engine.transport):
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


# --- clients that leave ---


@pytest.mark.parametrize("size", [10, 60_000, 100_000])
async def test_a_held_client_that_leaves_is_noticed_whatever_it_has_sent(front, size):
    wire = await front.connect()
    with front.gate.closed(10):
        await wire.send(b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n" + bytes(size))
        await until(lambda: front.gate.held == 1)
        client = await only_client(front)
        await until(lambda: size < 2**16 or client.read_side.is_held)
        wire.writer.close()
        async with patience():
            while front.proxy.clients:
                await pass_ticks(front, 1)
                await asyncio.sleep(0.001)  # for the kernel to tell
        assert (front.gate.held, front.proxy.exchanges) == (0, set())
    assert front.observed.departures == 1


async def test_a_client_that_leaves_with_requests_unread_frees_the_engine(front, upstream):

    @upstream.on("/v1/x")
    async def think(call):
        await call.wait_until_gone()

    wire = await front.connect()
    await wire.send(b"GET /v1/x HTTP/1.1\r\nhost: a\r\n\r\n" * 3_000)
    client = await only_client(front)
    await until(lambda: client.read_side.is_held and upstream.calls)
    wire.writer.close()
    async with patience():
        while front.proxy.clients:
            client.tick()
            await asyncio.sleep(0.001)  # for the kernel to tell
        await upstream.calls[0].gone.wait()


# --- turns of the loop ---


class Turns:
    """Counts the loop's turns."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


async def test_a_flood_of_requests_leaves_turns_to_others(front, monkeypatch):
    turns, judged = Turns(), []

    def judge(method, raw_path, websocket):
        judged.append(turns.count)
        return Destination("nowhere", refusal=Failure(404, "not_admitted", "not here"))

    monkeypatch.setattr(Mixed, "judge", staticmethod(judge))
    wire = await front.connect()
    await wire.send(b"GET /n HTTP/1.1\r\nhost: a\r\n\r\n" * 1000)
    for _ in range(1000):
        assert (await wire.answer()).status == 404
    turns.stop()
    assert len(judged) == 1000
    assert max(judged.count(turn) for turn in set(judged)) <= 2 * STEPS_PER_TURN  # a read and a continuation


async def test_a_flood_of_chunks_leaves_turns_to_others(front, upstream):
    count = 20_000
    wire = await front.connect()
    await wire.send(b"POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    await until(lambda: front.proxy.exchanges)
    turns = Turns()
    await wire.send(b"1\r\na\r\n" * count + b"0\r\n\r\n")
    answer = await wire.answer()
    turns.stop()
    assert answer.body == b"a" * count
    assert turns.count >= 2 * count / (2 * STEPS_PER_TURN * LINES_AT_ONCE)


@pytest.mark.parametrize(
    ("scenario", "values"),
    [
        (test_a_client_that_pipelines_and_reads_nothing_costs_one_answer, {"path": "/v1/big", "count": 100}),
        (test_a_client_that_pipelines_and_reads_nothing_costs_one_answer, {"path": "/own", "count": 100}),
        (test_a_client_that_pipelines_and_reads_nothing_costs_one_answer, {"path": "/nobodys", "count": 5000}),
        (test_an_idle_tunnel_is_closed, {}),
        (test_a_peer_that_vanishes_without_a_word_is_found_out, {}),
        (test_a_flood_of_chunks_leaves_turns_to_others, {}),
        (test_a_held_client_that_leaves_is_noticed_whatever_it_has_sent, {"size": 60_000}),
        (test_a_held_client_that_leaves_is_noticed_whatever_it_has_sent, {"size": 100_000}),
    ],
)
def test_flow_is_the_same_on_uvloop(scenario, values):

    async def play():
        async with Upstream() as upstream, timeless(upstream) as front:
            known = {"front": front, "upstream": upstream, **values}
            await scenario(**{name: known[name] for name in inspect.signature(scenario).parameters})

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())
