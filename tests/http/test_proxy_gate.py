"""The gate as clients meet it: they wait, or are told when to come back; what is under way is never cut."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.gate import Gate


async def until(condition) -> None:
    """Wait for what comes by itself."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)


async def test_a_request_that_comes_while_the_gate_is_closed_waits_and_is_served(front, upstream):
    """Not a byte of it reaches the engine before; all of it does afterwards."""
    wire = await front.connect()
    with front.gate.closed(10):
        await wire.request("POST", "/v1/completions", body=b'{"prompt": "x"}')
        await until(lambda: front.gate.held == 1)
        assert upstream.calls == []
    answer = await wire.answer()
    assert (answer.status, answer.body) == (200, b'{"prompt": "x"}')
    await until(lambda: front.gate.in_flight == 0)
    assert front.observed.refused == []


async def test_a_stream_under_way_is_never_cut(front, upstream):
    """It goes on while the gate is closed, and the gate waits for its end."""
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
    with front.gate.closed(10):
        assert front.gate.in_flight == 1
        go.set()
        assert [await wire.chunk(), await wire.chunk()] == [b"data: 2\n\n", b""]
        await asyncio.wait_for(front.gate.drained(), 10)


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/v1/models"), ("HEAD", "/health")])
async def test_what_cannot_reach_the_model_is_not_held(front, method, path):
    """A liveness probe must not wait for a reset."""
    with front.gate.closed(10):
        wire = await front.connect()
        await wire.request(method, path)
        assert (await wire.answer(without_body=method == "HEAD")).status == 200


async def test_one_too_many_gets_503_and_when_to_come_back(start_proxy):
    """In the API's shape, counted as refused and not as the engine's failure."""
    async with start_proxy(gate=Gate(max_held=0)) as front:
        with front.gate.closed(7):
            answer = await front.post("/v1/chat/completions", b"{}")
        assert (answer.status, answer.header("retry-after")) == (503, ["7"])
        error = json.loads(answer.body)["error"]
        assert (error["code"], error["type"]) == (503, "service_unavailable_error")
        assert "wait already for a cache reset to end" in error["message"]
        assert (front.observed.refused, front.observed.errors) == (["gate_full"], [])
        (ended,) = front.observed.ended
        assert ended[:4] == ("chat_completions", "POST", 503, "refused")
        assert ended.first_byte_seconds is None


async def test_whoever_is_held_too_long_gets_503(start_proxy, upstream):
    """The engine has not seen it: it may be sent again anywhere."""
    async with start_proxy(gate=Gate(hold_seconds=0.01)) as front:
        with front.gate.closed(10):
            answer = await front.post("/v1/completions", b"{}")
        assert (answer.status, front.observed.refused) == (503, ["held_too_long"])
        assert upstream.calls == []


async def test_a_client_that_left_while_held_never_reaches_the_engine(front, upstream):
    """Its request would be computed for nobody."""
    wire = await front.connect()
    with front.gate.closed(10):
        await wire.request("POST", "/v1/completions", body=b"{}")
        await until(lambda: front.gate.held == 1)
        await wire.leave()
        await asyncio.sleep(0.05)  # for the server to see it; there is no event for that
    await until(lambda: front.observed.ended)
    assert (upstream.calls, front.gate.in_flight) == ([], 0)
    assert front.observed.departures == 1


async def test_a_websocket_is_held_like_a_request(front, upstream):
    """Its handshake waits."""
    wire = await front.connect()
    with front.gate.closed(10):
        upgrade = (("connection", "upgrade"), ("upgrade", "websocket"))
        key = (("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="), ("sec-websocket-version", "13"))
        await wire.request("GET", "/v1/realtime", *upgrade, *key)
        await until(lambda: front.gate.held == 1)
        assert upstream.calls == []
    await until(lambda: upstream.calls)
