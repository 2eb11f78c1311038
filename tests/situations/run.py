"""Runs a situation: the whole sidecar beside the model engine, in one loop on virtual time."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from highwater.process.clocks import Clocks
from highwater.server.main import create_app
from highwater.server.settings import Settings
from highwater.server.sidecar import Sidecar
from highwater.terminal.demo.process import free_port
from tests.patience import LIMIT_SECONDS
from tests.situations.clients import Clients
from tests.situations.clock import VirtualLoop, run_virtually
from tests.situations.device import Card
from tests.situations.engine import EngineModel
from tests.situations.judge import Judge, Outcome, missed_goals
from tests.situations.situation import Situation, Stage
from tests.situations.wire import InProcess
from tests.situations.worker import modelled_workers

TOKEN = "situations-situations-situations"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a situation, and the goals that it missed."""

    situation: Situation
    outcome: Outcome
    missed: Sequence[str]
    events: Sequence[str]


def run(situation: Situation) -> Result:
    outcome, events = run_virtually(lambda loop: _live(loop, situation))
    return Result(situation, outcome, missed_goals(outcome, situation), events)


def model_of(situation: Situation, clock: Callable[[], float], port: int | None = None) -> EngineModel:
    return EngineModel(
        plan=situation.plan,
        cards=tuple(Card(total) for total in situation.cards),
        options=situation.options,
        version=situation.version,
        clock=clock,
        load_seconds=situation.load_seconds,
        restarts=situation.restarts,
        tick_seconds=situation.tick_seconds,
        port=port,
    )


async def play(situation: Situation, stage: Stage) -> None:
    """Let happen what the situation's script says, from now on."""
    began_at = stage.engine.clock()
    for at, event in situation.script:
        await asyncio.sleep(max(0.0, began_at + at - stage.engine.clock()))
        event(stage)
    await asyncio.sleep(max(0.0, began_at + situation.seconds - stage.engine.clock()))


async def _live(loop: VirtualLoop, situation: Situation) -> tuple[Outcome, list[str]]:
    port = free_port() if situation.served else None
    engine = model_of(situation, loop.time, port)
    judge = engine.watcher = Judge(engine, cache_counts=situation.cache_counts)
    with modelled_workers(engine.torch), tempfile.TemporaryDirectory(prefix="highwater-situation-") as folder:
        engine.begin()
        steps = asyncio.create_task(engine.run())
        settings = Settings.model_validate(
            {
                "engine_url": f"http://127.0.0.1:{port or 8000}",
                "port": 1,
                "admin_token": TOKEN,
                "state_file": str(Path(folder) / "state.json"),
                **situation.settings,
            }
        )
        sidecar = create_app(settings, Clocks(loop.time, loop.wall_time), transport=InProcess(engine.face))
        try:
            async with _serving(sidecar) as url:
                # A worker's `release` collects garbage: it need not walk all that is there already each time.
                gc.collect()
                gc.freeze()
                clients = Clients(url)
                await play(situation, Stage(engine, loop, clients))
                await clients.stop()
                if not (situation.may_die and judge.outcome.deaths):
                    judge.outcome.problems += clients.missed(served=situation.served, refused=situation.refused)
                events = await _look_at_the_face(url, judge.outcome)
        finally:
            steps.cancel()
            with suppress(asyncio.CancelledError):
                await steps
            await engine.close()
    return judge.finish(), events


@asynccontextmanager
async def _serving(sidecar: Sidecar) -> AsyncIterator[str]:
    """The sidecar on a port of its own, as `highwater serve` has it.

    Without its signals, and without uvicorn's ten ticks a second, which on virtual time would be most of the work.
    """
    config = uvicorn.Config(
        sidecar,
        host="127.0.0.1",
        port=0,
        http=sidecar.protocol,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        sidecar.begin_stop()
        await server.shutdown()


async def _look_at_the_face(url: str, outcome: Outcome) -> list[str]:
    """Ask the sidecar as an operator does: it must still be there, whatever happened; its events, for who debugs."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=LIMIT_SECONDS) as client:  # noqa: S501 - no TLS
        for path in ("/livez", "/memory", "/policy", "/metrics"):
            response = await client.get(path)
            if response.status_code != httpx.codes.OK:
                outcome.problems.append(f"GET {path} answered {response.status_code}")
        history = (await client.get("/memory/history", params={"since": "0"})).json()
    return [
        f"{event.get('at', 0):.1f} {event.get('kind')}: {event.get('summary')}" for event in history.get("events", [])
    ]
