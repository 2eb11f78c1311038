"""How conversations end: clients that leave, engines that fail, bodies that are too large."""

import asyncio
import logging
import socket

import pytest
import uvloop

from tests.fakes.upstream import Upstream
from tests.patience import patiently


async def test_a_client_that_leaves_before_the_answer_frees_the_engine(front, upstream):
    """The engine's connection closes, so that it stops computing."""
    arrived = asyncio.Event()

    @upstream.on("/v1/completions")
    async def think(call):
        await call.read()
        arrived.set()
        await call.wait_until_gone()

    wire = await front.connect()
    await wire.request("POST", "/v1/completions", body=b"{}")
    await patiently(arrived.wait())
    await wire.leave()
    await patiently(upstream.calls[0].gone.wait())
    assert front.observed.departures == 1
    assert front.observed.ended[0][:3] == ("completions", "POST", 499)


async def test_a_client_that_leaves_within_the_answer_frees_the_engine(front, upstream):
    """The same in the middle of a stream."""

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.read()
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await call.wait_until_gone()

    wire = await front.connect()
    await wire.request("POST", "/v1/completions", body=b"{}")
    await wire.head()
    await wire.chunk()
    await wire.leave()
    await patiently(upstream.calls[0].gone.wait())
    assert front.observed.departures == 1
    assert front.observed.errors == []


async def test_a_client_that_leaves_within_its_upload_frees_the_engine(front, upstream):
    """And the engine never takes the part for the whole: no final chunk is sent."""
    arrived, broken = asyncio.Event(), asyncio.Event()

    @upstream.on("/v1/completions")
    async def listen(call):
        try:
            async for _ in call.pieces():
                arrived.set()
        except asyncio.IncompleteReadError:
            broken.set()
            raise

    wire = await front.connect()
    await wire.request("POST", "/v1/completions", ("transfer-encoding", "chunked"))
    await wire.send(b"3\r\nabc\r\n")
    await patiently(arrived.wait())
    await wire.leave()
    await patiently(broken.wait())
    assert front.observed.departures == 1


async def test_one_that_leaves_does_not_disturb_the_others(front, upstream):
    """64 streams, one cancelled: 63 complete."""
    proceed, begun = asyncio.Event(), 0

    @upstream.on("/v1/completions")
    async def stream(call):
        nonlocal begun
        number = (await call.read()).decode()
        await call.begin()
        await call.chunk(f"begin {number}\n".encode())
        begun += 1
        if number == "7":
            return await call.wait_until_gone()
        await proceed.wait()
        await call.chunk(f"end {number}\n".encode())
        return await call.end()

    wires = [await front.connect() for _ in range(64)]
    for number, wire in enumerate(wires):
        await wire.request("POST", "/v1/completions", body=str(number).encode())
    for wire in wires:
        await wire.head()
        await wire.chunk()
    await wires[7].leave()
    await patiently(next(call for call in upstream.calls if call.body == b"7").gone.wait())
    proceed.set()
    for number, wire in enumerate(wires):
        if number != 7:
            assert await wire.chunk() == f"end {number}\n".encode()
            assert await wire.chunk() == b""
    assert front.observed.departures == 1


async def test_an_engine_that_is_down_is_a_502(start_proxy, unused_tcp_port, caplog):
    """With one line in the log, and the reason counted."""
    async with start_proxy(f"http://127.0.0.1:{unused_tcp_port}") as front:
        answer = await front.post("/v1/completions", b"{}", ("x-request-id", "r1"))
    assert (answer.status, answer.header("x-request-id")) == (502, ["r1"])
    assert front.observed.errors == ["connect"]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "POST /v1/completions: the engine does not accept connections, request_id=r1" in line


async def test_an_engine_that_hangs_up_without_an_answer_is_a_502(front, upstream):
    """A POST is not repeated: the engine may have begun."""

    @upstream.on("/v1/completions")
    async def hang_up(call):
        await call.read()
        call.die()

    assert (await front.post("/v1/completions", b"{}")).status == 502
    assert len(upstream.calls) == 1
    assert front.observed.errors == ["disconnected"]


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("POST", 502)])
async def test_only_a_read_on_a_pooled_connection_that_dies_is_repeated(front, upstream, method, status):
    """Closed before any byte of an answer, as an idle one may be at any time: GET is safe, a POST may have begun."""

    @upstream.on("/v1/models")
    async def twice(call):
        await call.read()
        if len(upstream.calls) == 2:
            call.die()
        else:
            await call.answer(b"ok")

    await front.get("/v1/models")
    wire = await front.connect()
    await wire.request(method, "/v1/models", ("content-length", "0"))
    assert (await wire.answer()).status == status
    assert len(upstream.calls) == (3 if status == 200 else 2)


async def test_a_read_on_a_fresh_connection_is_not_repeated(front, upstream):
    """An engine that dies of a request would die of it again."""

    @upstream.on("/v1/models")
    async def dies(call):
        call.die()

    assert (await front.get("/v1/models")).status == 502
    assert len(upstream.calls) == 1


async def test_an_engine_that_talks_nonsense_is_a_502(front, upstream):
    """Not HTTP, no answer."""

    @upstream.on("/v1/models")
    async def babble(call):
        await call.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        call.close()

    assert (await front.get("/v1/models")).status == 502
    assert front.observed.errors == ["malformed"]


async def test_an_engine_that_never_answers_is_a_504(start_proxy, upstream):
    """After first_byte_seconds, and it is let go."""

    @upstream.on("/v1/completions")
    async def think(call):
        await call.read()
        await call.wait_until_gone()

    async with start_proxy(first_byte_seconds=0.05) as front:
        answer = await front.post("/v1/completions", b"{}")
        await patiently(upstream.calls[0].gone.wait())
    assert answer.status == 504
    assert front.observed.errors == ["first_byte_timeout"]


async def test_an_answer_that_stands_still_is_cut(start_proxy, upstream):
    """After idle_seconds, which is not first_byte_seconds: here the first byte may take longer."""

    @upstream.on("/v1/completions")
    async def stall(call):
        await asyncio.sleep(0.09)
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await call.wait_until_gone()

    async with start_proxy(idle_seconds=0.05) as front:
        answer = await front.get("/v1/completions")
        await patiently(upstream.calls[0].gone.wait())
    assert (answer.status, answer.body, answer.complete) == (200, b"data: 1\n\n", False)
    assert front.observed.errors == ["idle_timeout"]


@pytest.mark.parametrize("framing", ["chunked", "counted"])
@pytest.mark.parametrize("ending", ["die", "close"])
async def test_an_engine_that_dies_within_its_answer_cuts_the_stream(front, upstream, caplog, framing, ending):
    """The client sees a stream cut short, never a clean end; the log has no traceback."""
    seen = asyncio.Event()

    @upstream.on("/v1/completions")
    async def stream(call):
        if framing == "chunked":
            await call.begin()
            await call.chunk(b"data: 1\n\n")
        else:
            await call.head(200, ("content-length", "100"))
            await call.write(b"data: 1\n\n")
        await seen.wait()
        getattr(call, ending)()

    wire = await front.connect()
    await wire.request("GET", "/v1/completions")
    head = await wire.head()
    if framing == "chunked":
        assert await wire.chunk() == b"data: 1\n\n"
        seen.set()
        assert await wire.chunk() is None
    else:
        assert await wire.reader.readexactly(9) == b"data: 1\n\n"
        seen.set()
        assert await wire.reader.read() == b""
    assert head.status == 200
    assert front.observed.errors == ["truncated"]
    assert not any(record.exc_info for record in caplog.records)
    assert len([record for record in caplog.records if record.name.startswith("highwater.")]) == 1


async def test_an_engine_whose_framing_breaks_cuts_the_stream(start_proxy, upstream):
    """A chunk size that is no number: what came before it was delivered, and nothing hangs."""
    seen = asyncio.Event()

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await seen.wait()
        await call.write(b"not a size\r\n")
        await call.wait_until_gone()

    async with start_proxy(idle_seconds=0.1) as front:
        wire = await front.connect()
        await wire.request("GET", "/v1/completions")
        await wire.head()
        assert await wire.chunk() == b"data: 1\n\n"
        seen.set()
        assert await patiently(wire.chunk()) is None
    assert len(front.observed.errors) == 1


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


async def test_a_refusal_with_a_closed_door_reaches_the_client(front, upstream):
    """An engine that answers 413 and closes, with the upload unread."""

    @upstream.on("/v1/audio/transcriptions")
    async def refuse(call):
        await call.answer(b"too large", 413, ("connection", "close"))
        call.close()

    wire = await front.connect()
    await wire.request("POST", "/v1/audio/transcriptions", ("content-length", "100000"))
    await wire.send(bytes(1000))
    answer = await patiently(wire.answer())
    assert (answer.status, answer.body) == (413, b"too large")


async def test_a_declared_body_over_the_cap_never_reaches_the_engine(start_proxy, upstream):
    """413 at the head, before a byte is read."""
    async with start_proxy(max_body_bytes=1000) as front:
        wire = await front.connect()
        await wire.request("POST", "/v1/completions", ("content-length", "1001"), ("expect", "100-continue"))
        answer = await wire.answer()
    assert answer.status == 413
    assert b"proxy.max_body_bytes" in answer.body
    assert upstream.calls == []
    assert front.observed.errors == []


async def test_a_chunked_body_over_the_cap_is_stopped_on_its_way(start_proxy, upstream):
    """413 for the client; the engine sees a body that breaks off, not one that ends."""
    begun, broken = asyncio.Event(), asyncio.Event()

    @upstream.on("/v1/completions")
    async def listen(call):
        begun.set()
        try:
            await call.read()
        except asyncio.IncompleteReadError:
            broken.set()
            raise

    async with start_proxy(max_body_bytes=1000) as front:
        wire = await front.connect()
        await wire.request("POST", "/v1/completions", ("transfer-encoding", "chunked"))
        await wire.send(b"190\r\n" + bytes(400) + b"\r\n")
        await patiently(begun.wait())
        await wire.send(b"3e8\r\n" + bytes(1000) + b"\r\n")
        assert (await patiently(wire.answer())).status == 413
        await patiently(broken.wait())


async def test_a_body_at_the_cap_passes(start_proxy, upstream):
    """The limit is inclusive."""
    async with start_proxy(max_body_bytes=1000) as front:
        assert (await front.post("/v1/completions", bytes(1000))).status == 200


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


async def test_expect_100_continue_is_the_engines_to_answer(front, upstream):
    """It asks for the body when it wants it; its interim answer goes on as it is."""

    @upstream.on("/v1/completions")
    async def ask(call):
        await call.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await call.answer(await call.read())

    wire = await front.connect()
    for _ in range(2):
        await wire.request("POST", "/v1/completions", ("content-length", "3"), ("expect", "100-continue"))
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(b"abc")
        assert (await wire.answer()).body == b"abc"
    assert upstream.calls[0].header("expect") == ["100-continue"]
    assert upstream.connections == 1


async def test_a_body_that_was_not_asked_for_ends_the_connection(front, upstream):
    """What the client sends next may be the body or another request: it cannot be told."""

    @upstream.on("/v1/completions")
    async def refuse(call):
        await call.answer(b"{}", 401)

    wire = await front.connect()
    await wire.request("POST", "/v1/completions", ("content-length", "3"), ("expect", "100-continue"))
    answer = await wire.answer()
    assert (answer.status, answer.header("connection")) == (401, ["close"])
    assert await wire.reader.read() == b""


async def test_a_request_target_that_is_no_path_is_refused(start_proxy, upstream):
    """`OPTIONS *` and the like; a target must never become part of the host's name."""
    async with start_proxy() as front:
        wire = await front.connect()
        await wire.request("OPTIONS", "*")
        assert (await wire.answer()).status == 400
    assert upstream.calls == []


async def test_a_connect_that_takes_too_long_is_a_504(start_proxy):
    """A host that drops packets: here a listener whose backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        async with start_proxy(f"http://127.0.0.1:{listener.getsockname()[1]}", connect_seconds=0.05) as front:
            answer = await front.get("/v1/models")
        for filler in fillers:
            filler.close()
    assert answer.status == 504
    assert front.observed.errors == ["connect_timeout"]


@pytest.mark.parametrize(
    "scenario",
    [
        test_a_client_that_leaves_before_the_answer_frees_the_engine,
        test_a_client_that_leaves_within_the_answer_frees_the_engine,
        test_a_client_that_leaves_within_its_upload_frees_the_engine,
        test_one_that_leaves_does_not_disturb_the_others,
        test_an_engine_that_hangs_up_without_an_answer_is_a_502,
        test_an_early_refusal_reaches_a_client_that_still_uploads,
        test_a_refusal_with_a_closed_door_reaches_the_client,
    ],
)
def test_the_ends_are_the_same_on_uvloop(run_proxy, scenario):
    """The loop of production: who closes what, and when, is where loops differ."""

    async def play():
        async with Upstream() as upstream, run_proxy(upstream.url) as front:
            await scenario(front, upstream)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


@pytest.mark.parametrize("ending", ["die", "close"])
@pytest.mark.parametrize("framing", ["chunked", "counted"])
def test_a_cut_stream_is_cut_on_uvloop_too(run_proxy, caplog, framing, ending):
    """Here the write buffers differ."""

    async def play():
        async with Upstream() as upstream, run_proxy(upstream.url) as front:
            await test_an_engine_that_dies_within_its_answer_cuts_the_stream(front, upstream, caplog, framing, ending)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())
