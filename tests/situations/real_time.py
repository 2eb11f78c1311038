"""The same situations in real time, with `highwater serve` as a process of its own.

`python -m tests.situations.real_time NAME PORT FILE` is the engine's process: it plays the situation, writes what
happened as JSON to the file, and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from highwater.terminal.demo.process import KeptProcess, environ_with, free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.situations.device import MIB
from tests.situations.events import end_engine, neighbours, traffic
from tests.situations.judge import Judge, missed_goals
from tests.situations.rows import SITUATIONS
from tests.situations.run import model_of, play
from tests.situations.situation import Situation, Stage
from tests.situations.worker import modelled_workers

ROOT = Path(__file__).resolve().parent.parent.parent
BEGIN_SECONDS = 4.0
PATIENCE_SECONDS = 60.0
_NAMED = {row.name: row for row in SITUATIONS}
_FILLED = traffic(images=4.0, stray=160 * MIB)
# Slow enough for a machine that is busy with something else: from high water to the end are five seconds.
_SLOWLY = traffic(images=1.0, stray=100 * MIB)

REAL_TIME: tuple[Situation, ...] = (
    replace(
        _NAMED["fragments-fast"],
        name="fragments-in-real-time",
        title="fragments fill the device",
        script=((BEGIN_SECONDS, _FILLED), (BEGIN_SECONDS + 2.5, _SLOWLY)),
        seconds=30.0,
        load_seconds=1.0,
        needs=1,
    ),
    replace(
        _NAMED["h100-92-images"],
        name="steady-in-real-time",
        title="steady images that fit",
        script=((BEGIN_SECONDS, traffic(images=4.0)),),
        seconds=25.0,
        load_seconds=1.0,
        most_remedies=0,
    ),
    replace(
        _NAMED["restart-after-hopeless-life"],
        name="second-life-in-real-time",
        title="a life beside a neighbour that leaves nothing to give back, and one in which fragments can be",
        script=(
            (BEGIN_SECONDS, neighbours(5_800 * MIB)),
            (BEGIN_SECONDS + 6.0, end_engine),
            (BEGIN_SECONDS + 6.0, neighbours(0)),
            (BEGIN_SECONDS + 9.0, _FILLED),
            (BEGIN_SECONDS + 11.5, _SLOWLY),
        ),
        seconds=35.0,
        load_seconds=1.0,
        needs=1,
    ),
)


def run_in_real_time(situation: Situation, folder: Path) -> list[str]:
    """Play one beside a served sidecar, and return the goals that it missed.

    Delays are left out: a machine that is busy with something else makes any reaction late.
    """
    port, outcome = free_port(), folder / "outcome.json"
    engine = KeptProcess("the model engine", folder / "engine.log")
    command = [sys.executable, "-m", "tests.situations.real_time", situation.name, str(port), str(outcome)]
    with DemoSidecar(f"http://127.0.0.1:{port}", folder=folder):
        engine.start(command, env=environ_with({}), cwd=ROOT)
        try:
            deadline = time.monotonic() + situation.seconds + PATIENCE_SECONDS
            while not outcome.exists() and engine.is_running() and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            engine.stop()
    if not outcome.exists():
        return [f"the engine's process left no result: {(folder / 'engine.log').read_text(encoding='utf-8')[-500:]}"]
    missed: list[str] = json.loads(outcome.read_text(encoding="utf-8"))
    return missed


async def _play(situation: Situation, port: int) -> list[str]:
    engine = model_of(situation, time.monotonic, port)
    judge = engine.watcher = Judge(engine, cache_counts=situation.cache_counts)
    with modelled_workers(engine.torch):
        engine.begin()
        steps = asyncio.create_task(engine.run())
        await play(situation, Stage(engine, None))
        steps.cancel()
        await engine.close()
    outcome = replace(judge.finish(), late=[])
    return list(missed_goals(outcome, situation))


def main() -> None:
    name, port, path = sys.argv[1:]
    situation = next(row for row in REAL_TIME if row.name == name)
    missed = asyncio.run(_play(situation, int(port)))
    unfinished = Path(path).with_suffix(".part")
    unfinished.write_text(json.dumps(missed), encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    main()
