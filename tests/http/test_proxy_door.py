"""The door as clients meet it: images wait for room, are told when to come back, and no byte of theirs is changed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json

import pytest

from gated_proxy.door import Door
from gated_proxy.door_items import NOTHING, DoorLimits
from tests.fakes import images
from tests.patience import until

PATH = "/v1/chat/completions"
MIB = 1024 * 1024
SIDE = 512  # pixels; such an image takes 1 MiB once decoded


def png(width: int = SIDE, height: int = SIDE, *, pixels: int = 8) -> bytes:
    return images.png(width, height, pixels=pixels)


def chat(*pngs: bytes, url: str | None = None) -> bytes:
    urls = [images.data_url(each) for each in pngs] + ([url] if url else [])
    parts = [{"type": "text", "text": "what?"}, *({"type": "image_url", "image_url": {"url": each}} for each in urls)]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def door(mib: float = 1, *, mode: str = "on", **limits) -> Door:
    return Door(mode=mode, limits=DoorLimits(decoded_bytes=round(mib * MIB), **limits))


@pytest.fixture
def answered(upstream):
    """The engine reads each request, and answers once this is set."""
    answer = asyncio.Event()

    @upstream.on(PATH)
    async def handle(call):
        body = await call.read()
        await answer.wait()
        await call.answer(body)

    return answer


@contextlib.asynccontextmanager
async def full(start_proxy, **limits):
    """A door whose room the first client's image has, and another client."""
    async with start_proxy(door=door(**limits)) as front:
        first, second = [await front.connect() for _ in range(2)]
        await first.request("POST", PATH, body=chat(png()))
        await until(lambda: front.door.inside.items == 1)
        yield front, first, second


async def test_an_image_without_room_waits_and_is_served_when_there_is_some(start_proxy, upstream, answered):
    async with full(start_proxy) as (front, first, second):
        body = chat(png())
        await second.request("POST", PATH, body=body)
        await until(lambda: front.door.waiting == 1)
        await until(lambda: any(call.body for call in upstream.calls))
        assert sum(bool(call.body) for call in upstream.calls) == 1
        answered.set()
        assert (await first.answer()).status == 200
        answer = await second.answer()
        assert (answer.status, answer.body) == (200, body)
        await until(lambda: front.door.inside == NOTHING)
        assert front.door.counts.waited == 1


async def test_text_is_never_behind_images(start_proxy, answered):
    async with start_proxy(door=door()) as front:
        wires = [await front.connect() for _ in range(2)]
        for wire in wires:
            await wire.request("POST", PATH, body=chat(png()))
        await until(lambda: front.door.waiting == 1)
        assert (await front.post("/v1/completions", b'{"prompt": "x"}')).status == 200
        assert front.door.waiting == 1
        answered.set()


async def test_an_image_that_can_never_fit_gets_413(start_proxy, upstream):
    async with start_proxy(door=door()) as front:
        answer = await front.post(PATH, chat(png(8192, 8192)))
        assert answer.status == 413
        error = json.loads(answer.body)["error"]
        assert (error["code"], error["type"]) == ("door_too_large", "request_too_large")
        for words in ("268435456 bytes once decoded", "at most 1048576", "door.decoded_bytes"):
            assert words in error["message"]
        assert front.observed.refused == ["door_too_large"]
        assert [call.body for call in upstream.calls] in ([], [b""])
        assert front.door.inside == NOTHING


async def test_a_decode_bomb_is_refused_before_all_of_it_has_come(start_proxy):
    async with start_proxy(door=door()) as front:
        wire = await front.connect()
        start = chat(png(60_000, 60_000, pixels=4000))[:1000]
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {10**8}\r\n\r\n"
        await wire.send(head.encode() + start)
        assert (await wire.answer()).status == 413


async def test_an_image_that_waits_too_long_gets_503_and_when_to_come_back(start_proxy, answered):
    async with full(start_proxy, wait_seconds=0.05) as (_, _, second):
        await second.request("POST", PATH, body=chat(png()))
        answer = await second.answer()
        assert (answer.status, bool(answer.header("retry-after"))) == (503, True)
        error = json.loads(answer.body)["error"]
        assert "door.wait_seconds" in error["message"]
        assert "door.decoded_bytes" in error["message"]
        answered.set()
        await second.request("POST", PATH, body=chat(png()))  # the connection goes on
        assert (await second.answer()).status == 200


async def test_a_client_that_leaves_while_it_waits_frees_its_place(start_proxy, answered):
    async with full(start_proxy) as (front, _, second):
        await second.request("POST", PATH, body=chat(png()))
        await until(lambda: front.door.waiting == 1)
        await second.leave()
        await until(lambda: front.door.waiting == 0)
        assert front.observed.departures == 1
        answered.set()


async def test_the_first_token_of_a_stream_gives_the_room_back(start_proxy, upstream):
    go = asyncio.Event()

    @upstream.on(PATH)
    async def stream(call):
        await call.read()
        await call.begin()
        await go.wait()
        go.clear()
        await call.chunk(b"data: 1\n\n")
        await go.wait()
        await call.end()

    async with start_proxy(door=door()) as front:
        wire = await front.connect()
        await wire.request("POST", PATH, body=chat(png()))
        await wire.head()
        assert front.door.inside.items == 1
        go.set()
        assert await wire.chunk() == b"data: 1\n\n"
        assert (front.door.inside, [each.state for each in front.door.requests()]) == (NOTHING, ["passed"])
        go.set()
        assert await wire.chunk() == b""


@pytest.mark.parametrize("framing", ["counted", "chunked"])
async def test_a_body_goes_on_as_it_comes_up_to_the_image_without_room(start_proxy, upstream, answered, framing):
    async with start_proxy(door=door(2)) as front:
        other, wire = [await front.connect() for _ in range(2)]
        pieces = [
            chat(png())[:-4],
            b', {"image_url": {"url": "data:image/png;base64,',
            base64.b64encode(png()),
            b'"}}]}]}',
        ]
        got = []

        @upstream.on("/v1/messages")
        async def handle(call):
            async for piece in call.pieces():
                got.append(piece)  # noqa: PERF401 - it is looked at meanwhile
            await call.answer(b"".join(got))

        await other.request("POST", PATH, body=chat(png(SIDE // 2)))
        await until(lambda: front.door.inside.items == 1)
        framed = f"content-length: {sum(map(len, pieces))}" if framing == "counted" else "transfer-encoding: chunked"
        await wire.send(f"POST /v1/messages HTTP/1.1\r\nhost: x\r\n{framed}\r\n\r\n".encode())
        for sent, piece in enumerate(pieces, 1):
            await wire.send(piece if framing == "counted" else b"%x\r\n%b\r\n" % (len(piece), piece))
            await until(lambda sent=sent: len(b"".join(got)) == sum(map(len, pieces[: min(sent, 2)])))
        await until(lambda: front.door.waiting == 1)
        assert len(b"".join(got)) == sum(map(len, pieces[:2]))
        await wire.send(b"0\r\n\r\n" if framing == "chunked" else b"")
        answered.set()
        await other.answer()
        answer = await wire.answer()
        assert (answer.status, answer.body) == (200, b"".join(pieces))


async def test_what_follows_the_waiting_piece_stays_with_the_client(start_proxy, answered):
    async with full(start_proxy) as (front, first, second):
        body = chat(png(pixels=30 * MIB))
        sending = asyncio.create_task(second.request("POST", PATH, body=body))
        await until(lambda: front.door.waiting == 1)
        (exchange,) = [each for each in front.proxy.exchanges if each._at_door]
        await asyncio.sleep(0.05)
        assert exchange._at_door._bytes < MIB
        for _ in range(10_000):  # looks at the clock: no limit but the door's own counts
            exchange.tick()
        answered.set()
        await first.answer()
        assert (await second.answer()).body == body
        await sending


async def test_many_pieces_that_wait_go_on_in_their_order(start_proxy, answered):
    async with full(start_proxy) as (front, first, second):
        body = chat(png(SIDE // 2), png(SIDE // 4), png(SIDE // 8), url="https://example.com/x.png" * 999)
        pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
        await second.request("POST", PATH, ("transfer-encoding", "chunked"))
        await second.send(chunked(*pieces))
        await until(lambda: front.door.waiting == 1)
        front.door.change(mode="on", limits=DoorLimits(decoded_bytes=MIB, unknown_bytes=1))
        answered.set()
        await first.answer()
        answer = await second.answer()
        assert (answer.status, answer.body) == (200, body)
        (record, _) = front.door.requests()
        assert record.cost.items == 4


@pytest.mark.parametrize("framing", ["counted", "chunked"])
async def test_a_body_that_trickles_lends_its_room_and_is_served_once_it_is_whole(start_proxy, upstream, framing):
    """A few bytes must not keep the room from others for as long as they like."""
    answer = asyncio.Event()

    @upstream.on("/v1/slow")
    async def handle(call):
        await call.answer(await call.read())

    @upstream.on(PATH)
    async def keep(call):
        await call.read()
        await answer.wait()
        await call.answer(b"{}")

    body = chat(png())
    framed = f"content-length: {len(body)}" if framing == "counted" else "transfer-encoding: chunked"

    def frame(piece: bytes) -> bytes:
        return piece if framing == "counted" else b"%x\r\n%b\r\n" % (len(piece), piece)

    async with start_proxy(door=door(wait_seconds=1)) as front:
        slow, other = [await front.connect() for _ in range(2)]
        await slow.send(f"POST /v1/slow HTTP/1.1\r\nhost: x\r\n{framed}\r\n\r\n".encode() + frame(body[:-4]))
        await until(lambda: front.door.inside.items == 1)
        await other.request("POST", PATH, body=chat(png()))
        await until(lambda: front.door.waiting == 1)
        await until(lambda: front.door.waiting == 0)
        await until(lambda: any(call.target == PATH and call.body for call in upstream.calls))
        await slow.send(frame(body[-4:-2]) + frame(body[-2:]) + (b"0\r\n\r\n" if framing == "chunked" else b""))
        await until(lambda: front.door.waiting == 1)
        answer.set()
        assert (await other.answer()).status == 200
        got = await slow.answer()
        assert (got.status, got.body) == (200, body)
        await slow.request("POST", "/v1/slow", body=body)  # the connection goes on
        assert (await slow.answer()).body == body
        await until(lambda: front.door.inside == NOTHING)


async def test_a_body_that_lent_its_room_and_finds_none_gets_503(start_proxy, answered):
    body = chat(png())
    async with start_proxy(door=door(wait_seconds=0.2)) as front:
        slow, other = [await front.connect() for _ in range(2)]
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await slow.send(head.encode() + body[:-4])
        await until(lambda: front.door.inside.items == 1)
        await other.request("POST", PATH, body=chat(png()))
        await until(lambda: front.door.waiting == 1)
        await until(lambda: front.door.waiting == 0)
        await slow.send(body[-4:])
        assert (await slow.answer()).status == 503
        answered.set()
        assert (await other.answer()).status == 200
        await slow.request("POST", PATH, body=body)
        assert (await slow.answer()).status == 200


async def test_a_request_at_the_door_does_not_hold_up_a_reset(start_proxy, answered):
    """It does not count at the gate before the engine can act on it."""
    async with full(start_proxy) as (front, first, second):
        body = chat(png())
        await second.request("POST", PATH, ("content-length", str(len(body))))
        await second.send(body[:-4])
        await until(lambda: front.door.waiting == 1)
        await second.send(body[-4:])
        await until(lambda: all(exchange.request_bytes == len(body) for exchange in front.proxy.exchanges))
        with front.gate.closed(60):
            answered.set()
            await front.gate.drained()
            assert (await first.answer()).status == 200
            await until(lambda: front.gate.held == 1)
        answer = await second.answer()
        assert (answer.status, answer.body) == (200, body)


async def test_a_response_that_comes_early_ends_the_wait(start_proxy, upstream, answered):
    @upstream.on("/v1/early")
    async def refuse(call):
        await call.answer(b'{"error": {}}', 401)
        call.close()

    async with full(start_proxy) as (front, first, second):
        await second.request("POST", "/v1/early", body=chat(png()))
        assert (await second.answer()).status == 401
        await until(lambda: front.door.waiting == 0)
        answered.set()
        await first.answer()


async def test_a_response_that_comes_early_ends_the_wait_of_a_last_piece(start_proxy, upstream, answered):
    go, end = asyncio.Event(), asyncio.Event()

    @upstream.on("/v1/early")
    async def stream(call):
        await go.wait()
        await call.begin()
        await call.chunk(b"1")
        await end.wait()
        await call.end()
        call.close()

    body = chat(png())
    async with start_proxy(door=door(wait_seconds=1)) as front:
        slow, other = [await front.connect() for _ in range(2)]
        await slow.request("POST", "/v1/early", ("content-length", str(len(body))))
        await slow.send(body[:-4])
        await until(lambda: front.door.inside.items == 1)
        await other.request("POST", PATH, body=body)
        await until(lambda: front.door.waiting == 1)
        await until(lambda: front.door.waiting == 0)
        await slow.send(body[-4:])
        await until(lambda: front.door.waiting == 1)
        go.set()
        await slow.head()
        await until(lambda: front.door.waiting == 0)
        assert not front.door.counts.refused
        end.set()
        assert [await slow.chunk(), await slow.chunk()] == [b"1", b""]
        answered.set()


async def test_the_engines_death_ends_the_wait(start_proxy, upstream, answered):
    async with full(start_proxy) as (front, first, second):
        await second.request("POST", PATH, body=chat(png()))
        await until(lambda: front.door.waiting == 1 and len(upstream.calls) == 2)
        for call in upstream.calls:
            call.die()
        assert [(await wire.answer()).status for wire in (first, second)] == [502, 502]
        assert (front.door.waiting, front.door.inside) == (0, NOTHING)
        answered.set()


async def test_an_observing_door_holds_nobody(start_proxy):
    async with start_proxy(door=door(mode="observe")) as front:
        body = chat(png(8192, 8192))
        answer = await front.post(PATH, body)
        assert (answer.status, answer.body) == (200, body)
        assert front.door.counts.refused == {"door_too_large": 1}
        assert front.observed.refused == []


@pytest.mark.parametrize("key", ["authorization: Bearer sk-1", "X-API-Key: sk-1", "api-key:sk-1"])
async def test_a_request_with_images_is_listed_with_its_sender_and_no_content(start_proxy, key):
    async with start_proxy(door=door(1000)) as front:
        name, _, value = key.partition(":")
        await front.post(PATH, chat(png(640, 480)), (name, value), ("x-request-id", "r-1"))
        await until(lambda: [each.status for each in front.door.requests()] == [200])
        (record,) = front.door.requests()
        assert (record.request_id, record.path_class, record.client) == (
            "r-1",
            "chat_completions",
            hashlib.sha256(b"sk-1").hexdigest()[:12],
        )
        assert [(each.width, each.height) for each in record.largest] == [(640, 480)]


async def test_the_access_log_has_the_time_at_the_door(start_proxy, answered):
    lines = []

    class Log:
        def write(self, line):
            lines.append(line)

        def close(self):
            pass

    async with start_proxy(door=door(wait_seconds=0.05), access_log=Log()) as front:
        wires = [await front.connect() for _ in range(2)]
        for wire in wires:
            await wire.request("POST", PATH, body=chat(png()))
        assert (await wires[1].answer()).status == 503
        (line,) = lines
        assert line["held_seconds"] >= 0.04
        assert line["reason"] == "door_timeout"
        answered.set()
