"""The invariant: nothing that holds traffic outlives one HTTP call, and what is held is held in the sidecar's process.

A sidecar is killed (SIGKILL) in every state of every remedy, before an engine on a real port. Afterwards the engine
must answer as soon as the one call that was under way is over, and it was never told to pause, to sleep or to abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from pathlib import Path

import httpx
import pytest
from starlette.responses import JSONResponse

from highwater.terminal.demo.process import free_port
from tests.fakes.engine import FakeEngine, _replay
from tests.fakes.sidecar_process import TOKEN, start
from tests.http.conftest import serving
from tests.patience import patience

pytestmark = pytest.mark.slow("`highwater serve` as a process")

PATIENCE = 120.0
# How long one worker call may hold the engine's loop (`max_seconds` of a trim), and one step of it.
BOUND_SECONDS = 0.2
STEP_SECONDS = 0.02
NEVER_ASKED = ("/pause", "/resume", "/sleep", "/wake_up", "/abort_requests")
ROOT = Path(__file__).parents[2]


class Engine(FakeEngine):
    """It has one loop: a step, a reset or a worker call at a time. It says when a relief has come to a given place.

    Attributes:
        script: What is asked of it until that place, the last being the place: operations, or paths.
        reached: Set there; what was asked for then holds the loop for as long as a worker call may.
        events: What its loop did since.
        lags: Whether its own counts show a request, from the next reading on, that has been answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.script: list[str] = []
        self.reached = asyncio.Event()
        self.events: list[str] = []
        self.let_go = asyncio.Event()
        self.lags = False
        self._loop = asyncio.Lock()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._note(scope.get("path", ""))
            await super().__call__(scope, receive, send)
            return
        body = await _whole(receive)
        if scope["path"] == "/v1/completions":
            await self._complete(body, scope, send)
            return
        asked = json.loads(body)["args"][0] if scope["path"] == "/collective_rpc" else scope["path"]
        async with self._loop:
            await self._note(asked)
            await super().__call__(scope, _replay(body), send)

    async def _note(self, asked: str) -> None:
        if self.reached.is_set():
            self.events.append(asked)
        if not self.script or self.script[0] != asked:
            return
        self.script.pop(0)
        self.running = int(self.lags)
        if not self.script:
            self.reached.set()
            await asyncio.sleep(BOUND_SECONDS)
            self.events.append(f"{asked} ended")

    async def _complete(self, body: bytes, scope, send) -> None:
        if b"long" in body:
            await self.let_go.wait()
        while self.paused or self.asleep:  # noqa: ASYNC110 - as long as somebody has it so, nobody is answered
            await asyncio.sleep(STEP_SECONDS)
        async with self._loop:
            await asyncio.sleep(STEP_SECONDS)
            self.events.append("step")
        await JSONResponse({"choices": [{"text": "on"}]})(scope, _replay(b""), send)


async def _whole(receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


# What a reading asks last, and what it asks of the workers.
READING, WORKERS = "/is_paused", "memory"
DIRECT = {"release": "release", "trim_encoder_cache": "trim", "reset_encoder_cache": "/reset_encoder_cache"}
HELD = {"reset_mm_cache": "/reset_mm_cache", "reset_prefix_cache": "/reset_prefix_cache"}
CASES = [
    *((remedy, "reading", [WORKERS]) for remedy in (*DIRECT, *HELD)),
    *((remedy, "closing", [READING]) for remedy in HELD),
    *((remedy, "drained", [READING, "/metrics", "/metrics"]) for remedy in HELD),
    *((remedy, "calling", [asked]) for remedy, asked in (DIRECT | HELD).items()),
    *((remedy, "releasing", [DIRECT[remedy], "release"]) for remedy in ("trim_encoder_cache", "reset_encoder_cache")),
    *((remedy, "measuring", [asked, WORKERS]) for remedy, asked in (DIRECT | HELD).items()),
    ("reset_encoder_cache of Whisper", "closing", [READING]),
    ("reset_encoder_cache of Whisper", "calling", ["/reset_encoder_cache"]),
    ("restore", "calling", ["restore"]),
    ("restore", "measuring", ["restore", WORKERS]),
]


@contextlib.asynccontextmanager
async def sidecar_before(url: str):
    """A client of a sidecar that acts only when told to, and polls only then; and what kills it."""
    port = free_port()
    process = start(
        engine_url=url,
        port=port,
        poll_seconds=3600.0,
        rpc_deadline_seconds=60.0,
        policy={"mode": "observe"},
        gate={"drain_seconds": 60.0, "hold_seconds": 90.0},
    )

    async def kill() -> None:
        process.kill()
        await asyncio.to_thread(process.join, PATIENCE)

    headers = {"Authorization": f"Bearer {TOKEN}"}
    options = {"base_url": f"http://127.0.0.1:{port}", "headers": headers, "timeout": PATIENCE, "trust_env": False}
    try:
        async with httpx.AsyncClient(**options) as client:
            yield client, kill
    finally:
        await kill()


async def until(condition) -> None:
    """Ask again until it is so; a sidecar that is not there yet is none."""
    async with patience(PATIENCE):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if await condition():
                    return
            await asyncio.sleep(0.01)


async def has_read(client: httpx.AsyncClient) -> bool:
    """Whether there is a report, old enough for a relief to take another reading first."""
    report = (await client.get("/memory")).json()
    return report["engine"]["state"] == "ready" and report["age_seconds"] > 0.3


async def holds(client: httpx.AsyncClient) -> bool:
    """Whether a request waits at the gate."""
    return "highwater_proxy_requests_held 1.0" in (await client.get("/metrics?engine=0")).text


async def complete(client: httpx.AsyncClient, prompt: str) -> int | None:
    """Its status; None where the connection broke."""
    try:
        return (await client.post("/v1/completions", json={"prompt": prompt})).status_code
    except httpx.TransportError:
        return None


async def complete_until_broken(client: httpx.AsyncClient) -> None:
    """One after the other: the first may pass before the gate closes."""
    while await complete(client, "held") is not None:
        pass


async def relieve(client: httpx.AsyncClient, remedy: str) -> httpx.Response | None:
    name = remedy.partition(" of ")[0]
    path = "/memory/encoder-cache/restore" if name == "restore" else "/memory/reclaim"
    try:
        return await client.post(path, json=None if name == "restore" else {"remedies": [name]})
    except httpx.TransportError:
        return None


@pytest.mark.parametrize(("remedy", "state", "script"), CASES, ids=[f"{case[0]}, {case[1]}" for case in CASES])
async def test_a_sidecar_killed_in_any_state_of_any_remedy_holds_nobody(remedy, state, script):
    """The engine answers once the call that is under way has ended, and does nothing else before that."""
    engine = Engine()
    engine.encoder_decoder = "Whisper" in remedy
    engine.serve_images(2)
    async with contextlib.AsyncExitStack() as stack:
        url = f"http://127.0.0.1:{await stack.enter_async_context(serving(engine))}"
        client, kill = await stack.enter_async_context(sidecar_before(url))
        await until(lambda: has_read(client))
        waiting = []
        if state == "closing":
            waiting.append(asyncio.create_task(complete(client, "long")))
            await until(lambda: counts_one(client))
        engine.script, engine.lags = list(script), state == "drained"
        reset = asyncio.create_task(relieve(client, remedy))
        async with patience(PATIENCE):
            await engine.reached.wait()
        if state == "closing":
            waiting.append(asyncio.create_task(complete_until_broken(client)))
            await until(lambda: holds(client))
        assert not reset.done()
        engine.events.clear()
        await kill()
        engine.running = 0
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as direct:
            assert await complete(direct, "still there?") == 200
        done = [event for event in engine.events if event != "/metrics"]
        if state == "closing":  # one that had passed before the gate closed may take its step only now
            assert set(done) == {"step"}
        else:
            # The broken request ends in the engine before or after that, as the cores allow.
            assert sorted(done) in (sorted([f"{script[-1]} ended", "step"]), ["step"])
        assert await reset is None
        assert await asyncio.gather(*waiting) == [None] * len(waiting), "those it held are told at once"
        engine.let_go.set()
    assert (engine.paused, engine.asleep) == (False, False)
    assert {call.path for call in engine.calls}.isdisjoint(NEVER_ASKED)


async def counts_one(client: httpx.AsyncClient) -> bool:
    """Whether a request is under way."""
    return "highwater_proxy_requests_in_flight 1.0" in (await client.get("/metrics?engine=0")).text


# Where these paths stand in the sources: refusals of the proxy. Advice to whoever paused the engine is no code.
NAMED_IN = {
    "app/gated_proxy/allowlist.py",
}


def test_no_source_names_what_would_hold_the_engine():
    word = re.compile(r"/(?:pause|resume|sleep|wake_up|abort_requests)\b")
    every = [path for folder in ("app", "worker_ext") for path in (ROOT / folder).rglob("*")]
    files = [path for path in every if path.suffix in {".py", ".js"}]
    assert len(files) > 100
    naming = {str(path.relative_to(ROOT)) for path in files if word.search(path.read_text(encoding="utf-8"))}
    assert naming == NAMED_IN
