"""The recorder's cost to the engine: its share of the worker's main thread, and tokens a second beside it."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from bench.figure import Figure, Goal, number, percentile
from bench.stage import Stage
from bench.throughput import rates_of, ratio_figure
from highwater.watch.recorder.folder import RecorderFolder
from highwater.watch.recorder.ring import Ring
from highwater_worker.errors import Notes
from highwater_worker.recorder.steps import Steps

SECONDS = 120
RATE = 10
STEP_MS = 2
"""A short step, in which counting it weighs most."""
GOAL = Goal("at most", 1.0)
CALLS = 20_000


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """Two shares of a short step, and a ratio; no sidecar runs, so that nothing but the recorder is in them."""
    folder = stage.folder / "rings"
    rates = rates_of(stage, {str(RATE): partial(_recording, stage, folder)}, short=short)
    costs, size = _samples(folder)
    ratio = ratio_figure(
        f"Engine's tokens/s with the recorder at {RATE} samples a second, over that without",
        str(RATE),
        rates,
        None,
    )
    counting = _counting_ms()
    by = {"median": statistics.median(costs), "p99": percentile(costs, 99)}
    shares = [_share(which, cost_ms, costs, size=size, counting_ms=counting) for which, cost_ms in by.items()]
    return [*shares, ratio]


def _share(which: str, cost_ms: float, costs: Sequence[float], *, size: int, counting_ms: float) -> Figure:
    """Return the share: what samples take of a second, and what counting takes of a step."""
    return Figure(
        what=f"The recorder's share of the engine's thread, steps of {STEP_MS} ms, by the {which} of a sample",
        value=100 * (cost_ms * RATE / 1000 + counting_ms / STEP_MS),
        unit="%",
        goal=GOAL,
        spread=f"a sample takes {number(cost_ms)} ms at the {which}, {number(max(costs))} at the most; a file of "
        f"{number(size / 1e6)} MB",
        method=f"`cost_ms` of {len(costs)} samples under load, times {RATE} a second, and counting the step, "
        f"{number(counting_ms * 1000)} us, over its length (arithmetic)",
    )


@contextmanager
def _recording(stage: Stage, folder: Path) -> Iterator[None]:
    instance = secrets.token_hex(8)
    begin = {"directory": str(folder), "instance": instance, "rate": RATE, "seconds": SECONDS}
    stage.worker_op("recorder_start", begin)
    try:
        yield
    finally:
        stage.worker_op("recorder_stop", {"instance": instance})


def _samples(folder: Path) -> tuple[list[float], int]:
    """Every sample's cost in milliseconds, and the size of a file."""
    recorder, costs, size = RecorderFolder(folder), list[float](), 0
    for ring in recorder.others():
        with closing(Ring(ring.path)) as file:
            records = file.newest()
        costs += [cost for record in records if (cost := record.get("cost_ms")) is not None]
        size = ring.path.stat().st_size
    return costs, size


class _Worker:
    """A worker whose step does nothing."""

    def execute_model(self, plan: object) -> object:
        return plan


def _counting_ms() -> float:
    """Return how much longer a step takes for being counted, in milliseconds, measured in this process."""
    worker, plan = _Worker(), object()
    plain = _seconds(worker, plan)
    steps = Steps(time.monotonic, lambda _: None)
    steps.attach(worker, Notes())
    return max(_seconds(worker, plan) - plain, 0.0) * 1000


def _seconds(worker: _Worker, plan: object) -> float:
    """Return the time of one call, the least of several rounds: what others take of the machine is not the call's."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(CALLS):
            worker.execute_model(plan)
        rounds.append((time.perf_counter() - began) / CALLS)
    return min(rounds)
