"""A new sidecar beside the same engine, as docs/fleet.md tells: processes, a stream, and the signal of the kubelet."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from highwater.terminal.demo.process import answers
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.fakes.engine import FakeEngine

from .conftest import serving

pytestmark = pytest.mark.slow("`highwater serve` as a process")

PATIENCE_SECONDS = 60.0


class SlowEngine:
    """A fake engine whose completions have a first piece, and a last one when a test says so."""

    def __init__(self) -> None:
        self.fake = FakeEngine()
        self.goes_on = asyncio.Event()
        self.ended: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != "/v1/completions":
            await self.fake(scope, receive, send)
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        waits = {asyncio.ensure_future(self.goes_on.wait()), asyncio.ensure_future(receive())}
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        self.ended.append("whole" if self.goes_on.is_set() else "cut")
        if self.goes_on.is_set():
            await send({"type": "http.response.body", "body": b"last", "more_body": False})


async def ended(sidecar: DemoSidecar) -> None:
    """When no process of it is left."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sidecar.pids() and time.monotonic() < deadline:  # noqa: ASYNC110 - processes have no event for it
        await asyncio.sleep(0.05)
    assert sidecar.pids() == []


async def told_to_stop(sidecar: DemoSidecar) -> None:
    """After SIGTERM no new client is accepted."""
    for pid in sidecar.pids():
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while await asyncio.to_thread(answers, sidecar.port, "/livez"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def beside(port: int, folder: Path, **settings: str) -> DemoSidecar:
    return DemoSidecar(f"http://127.0.0.1:{port}", folder=folder, settings=settings)


async def test_a_stream_ends_well_and_the_next_sidecar_keeps_the_policy(tmp_path):
    """SIGTERM in the middle of an answer: it goes on to its end, nobody new gets in, and the engine notices nothing."""
    engine = SlowEngine()
    engine.fake.serve_images()
    state = {"HIGHWATER_STATE_FILE": str(tmp_path / "state.json")}
    async with serving(engine) as port, httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        first = beside(port, tmp_path / "first", **state)
        second = beside(port, tmp_path / "second", **state)
        try:
            await asyncio.to_thread(first.start)
            await asyncio.to_thread(first.call, "PUT", "/policy", {"mode": "observe"})
            async with client.stream("POST", f"{first.url}/v1/completions", json={}) as answer:
                pieces = answer.aiter_bytes()
                assert await anext(pieces) == b"first "
                await told_to_stop(first)
                engine.goes_on.set()
                assert [piece async for piece in pieces] == [b"last"]
            await ended(first)
            cached = [len(worker.entries) for worker in engine.fake.workers]
            await asyncio.to_thread(second.start)
            policy = await asyncio.to_thread(second.call, "GET", "/policy")
        finally:
            await asyncio.to_thread(first.stop)
            await asyncio.to_thread(second.stop)
    assert (policy["mode"], engine.ended) == ("observe", ["whole"])
    assert cached == [len(worker.entries) for worker in engine.fake.workers]
    assert all(cached)


async def test_a_stream_that_outlasts_the_grace_is_cut_and_the_engine_told(tmp_path):
    """After `shutdown_seconds`: the client sees a broken answer, never one that ends well."""
    engine = SlowEngine()
    async with serving(engine) as port, httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        sidecar = beside(port, tmp_path, HIGHWATER_SHUTDOWN_SECONDS="1")
        try:
            await asyncio.to_thread(sidecar.start)
            async with client.stream("POST", f"{sidecar.url}/v1/completions", json={}) as answer:
                pieces = answer.aiter_bytes()
                assert await anext(pieces) == b"first "
                await told_to_stop(sidecar)
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(pieces)
            await ended(sidecar)
        finally:
            await asyncio.to_thread(sidecar.stop)
    assert engine.ended == ["cut"]
