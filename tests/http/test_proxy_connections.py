"""Connections on both sides: how many, how long, and what is made of one that ends at the wrong moment."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from tests.patience import patience, patiently

JSON = b'{"model": "m"}'


# --- an idle engine connection that ends ---


async def _one_idle(front, upstream):
    """A connection to the engine that has served a request and waits for the next."""

    @upstream.on("/v1/x")
    async def serve(call):
        await call.answer(await call.read())

    await front.post("/v1/x", JSON)
    (idle,) = front.proxy.pool._idle
    return idle


async def test_a_post_does_not_go_over_a_connection_whose_end_has_come(front, upstream):
    """The kernel knows of it before the loop does: here the loop does not look."""
    idle = await _one_idle(front, upstream)
    idle.read_side.hold("test")
    upstream.calls[0].close()
    await upstream.calls[0].writer.wait_closed()
    answer = await front.post("/v1/x", JSON)
    assert (answer.status, answer.body) == (200, JSON)
    assert len(upstream.calls) == 2


class _ClosesWhenTaken:
    """A transport that closes when the pool has looked at it, before anything is written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _name: str) -> None:
        self._transport.close()


@pytest.mark.parametrize("body", [JSON, JSON * 10_000], ids=["small", "large"])
async def test_a_post_of_which_nothing_was_sent_is_sent_again(front, upstream, body):
    idle = await _one_idle(front, upstream)
    real = idle.transport
    idle.transport = _ClosesWhenTaken(real)
    answer = await front.post("/v1/x", body)
    assert (answer.status, answer.body) == (200, body)
    assert [len(call.body) for call in upstream.calls] == [len(JSON), len(body)]
    assert front.proxy.pool.retries == 1
    assert real.is_closing()


async def test_a_post_that_the_engine_may_have_is_never_sent_again(front, upstream):
    """It came whole, and the connection ended without an answer: 502, and the engine has it once."""
    await _one_idle(front, upstream)

    @upstream.on("/v1/x")
    async def vanish(call):
        await call.read()
        if len(upstream.calls) == 2:
            call.close()
        else:
            await call.answer(b"{}")

    answer = await patiently(front.post("/v1/x", JSON))
    assert (answer.status, answer.header("retry-after")) == (502, ["5"])
    assert [call.body for call in upstream.calls] == [JSON, JSON]
    assert front.proxy.pool.retries == 0


async def test_a_get_is_asked_again_once(front, upstream):
    await _one_idle(front, upstream)

    @upstream.on("/v1/x")
    async def vanish(call):
        call.close()

    assert (await front.get("/v1/x")).status == 502
    assert len(upstream.calls) == 3
    assert front.proxy.pool.retries == 1


# --- how many ---


@pytest.fixture
async def crowded(start_proxy):
    """A front that serves two clients, and two who hold their places."""
    async with start_proxy(max_connections=2) as front:
        for _ in range(2):
            await front.connect()
        async with patience():
            while len(front.proxy.clients) < 2:  # noqa: ASYNC110 - the other side of a connection has no event here
                await asyncio.sleep(0.001)
        yield front


async def test_a_request_above_the_limit_of_clients_gets_503(crowded, upstream):
    wire = await crowded.connect()
    await wire.request("POST", "/v1/x", body=JSON)
    answer = await wire.answer()
    assert (answer.status, answer.header("retry-after"), answer.header("connection")) == (503, ["1"], ["close"])
    assert b"proxy.max_connections" in answer.body
    assert await wire.reader.read() == b""
    assert upstream.calls == []


async def test_a_client_that_came_too_early_is_served_when_there_is_room(crowded, upstream):

    @upstream.on("/v1/x")
    async def serve(call):
        await call.answer(await call.read())

    wire = await crowded.connect()
    await crowded.wires[0].leave()
    async with patience():
        while len(crowded.proxy.clients) > 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
    for _ in range(2):
        await wire.request("POST", "/v1/x", body=JSON)
        assert (await wire.answer()).status == 200


async def test_connections_far_above_the_limit_are_refused_at_once(crowded):
    for _ in range(40):
        await crowded.connect()
    last = await crowded.connect()
    assert b"503" in await patiently(last.reader.read())
    assert len(crowded.proxy.clients) <= 2 + 32 + 1


async def test_an_idle_connection_above_the_limit_is_closed(start_proxy):
    async with start_proxy(max_connections=1, linger_seconds=0.05) as front:
        ordinary, surplus = await front.connect(), await front.connect()
        assert await patiently(surplus.reader.read()) == b""
        assert not ordinary.reader.at_eof()


class _NoConnection:
    """A loop that can open nothing."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def create_connection(self, *_args: object, **_options: object) -> None:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_a_lack_of_descriptors_is_not_the_engines(front, upstream, number):
    front.proxy.pool._loop = _NoConnection(number)
    answer = await front.post("/v1/x", JSON)
    assert (answer.status, answer.header("retry-after")) == (503, ["1"])
    assert b"ulimit -n" in answer.body
    assert (front.observed.refused, front.observed.errors, upstream.calls) == (["file_descriptors"], [], [])


async def test_a_connect_that_takes_too_long_is_the_engines(front):
    front.proxy.pool._loop = _NoConnection(errno.ETIMEDOUT)
    assert (await front.post("/v1/x", JSON)).status == 504
    assert (front.observed.refused, front.observed.errors) == ([], ["connect_timeout"])


# --- how long ---


async def test_an_idle_client_is_kept_longer_than_one_that_has_begun(start_proxy):
    """A load balancer in front must be the first to close; whoever sends half a head is none."""
    async with start_proxy(client_wait_seconds=0.05, client_keepalive_seconds=600) as front:
        idle, begun = await front.connect(), await front.connect()
        await begun.send(b"GET /v1/x HTTP/1.1\r\n")
        assert await patiently(begun.reader.read()) == b""
        await idle.request("GET", "/v1/x")
        assert (await idle.answer()).status == 200


async def test_an_idle_client_is_not_kept_for_ever(start_proxy):
    async with start_proxy(client_keepalive_seconds=0.05) as front:
        wire = await front.connect()
        await wire.request("GET", "/v1/x")
        assert (await wire.answer()).status == 200
        assert await patiently(wire.reader.read()) == b""


# --- what the engine says of itself, and what it is told ---


@pytest.fixture
def redirecting(upstream):
    """An engine that redirects as Starlette does, by the `Host` and the scheme that it sees."""

    @upstream.on("/v1/x/")
    async def redirect(call):
        await call.read()
        here = f"http://{call.header('host')[0]}"
        await call.answer(b"", 307, ("Location", f"{here}/v1/x?y=1"), ("content-location", f"{here}/v1/x"))

    @upstream.on("/v1/elsewhere")
    async def away(call):
        await call.answer(b"", 307, ("location", "http://elsewhere/v1/x"))

    return upstream


@pytest.mark.usefixtures("redirecting")
async def test_a_redirect_does_not_lead_to_the_clients_own_loopback(front):
    answer = await front.post("/v1/x/", JSON)
    assert (answer.status, answer.header("Location")) == (307, ["/v1/x?y=1"])
    assert answer.header("content-location") == ["/v1/x"]
    assert (await front.get("/v1/elsewhere")).header("location") == ["http://elsewhere/v1/x"]


async def test_a_redirect_leads_below_the_root_path(start_proxy, redirecting):
    async with start_proxy(redirecting.url, root_path="/llm") as front:
        assert (await front.get("/v1/x/")).header("Location") == ["/llm/v1/x?y=1"]


# --- what a client is told at once ---


@pytest.mark.parametrize(
    "start",
    [
        b"GET /v1/x HTTP/1.1\nhost: s\n\n",
        b"GET /v1/x HTTP/1.1\r\nhost: s\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["line-feeds-alone", "one-line-feed-alone", "a-client-that-speaks-tls"],
)
async def test_what_will_never_be_a_head_is_answered_at_once(front, upstream, start):
    """It has no end that counts, which would be waited for."""
    wire = await front.connect()
    await wire.send(start)
    answer = await patiently(wire.answer())
    assert (answer.status, answer.header("connection")) == (400, ["close"])
    assert upstream.calls == []


async def test_a_line_feed_may_come_after_its_carriage_return(front):
    wire = await front.connect()
    for piece in (b"GET /v1/x HTTP/1.1\r", b"\nhost: s\r", b"\n\r", b"\n"):
        await wire.send(piece)
        await asyncio.sleep(0)  # for a packet of its own, most times
    assert (await wire.answer()).status == 200


async def test_times_can_be_switched_off(start_proxy, upstream):
    arrived, late = asyncio.Event(), asyncio.Event()

    @upstream.on("/v1/x")
    async def think(call):
        arrived.set()
        await late.wait()
        await call.answer(b"{}")

    async with start_proxy(first_byte_seconds=0, idle_seconds=0) as front:
        wire = await front.connect()
        await wire.request("GET", "/v1/x")
        await patiently(arrived.wait())
        (exchange,) = front.proxy.exchanges
        for _ in range(100_000):  # looks at the clock: more than a day
            exchange.tick()
        late.set()
        assert (await wire.answer()).status == 200
