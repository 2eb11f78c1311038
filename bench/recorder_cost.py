"""What the flight recorder costs the engine: tokens a second with it and without, and the time of a sample."""

from __future__ import annotations

import json
import secrets
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from app.demo.errors import DemoError
from app.engine import RPC_METHOD
from app.sources.recorder import Recorder
from bench.figure import Figure, Goal, number, percentile
from bench.stage import Stage
from bench.throughput import rates_of, ratio_figure

CALL_SECONDS = 60.0
SECONDS = 120
# Samples a second to the goal for tokens a second.
RATES = {10: Goal("at least", 0.99), 100: None}


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """A ratio for each rate; no sidecar runs, so that nothing but the recorder is in it."""
    folder = stage.folder / "rings"
    rates = rates_of(stage, {str(rate): partial(_recording, stage, folder, rate) for rate in RATES}, short=short)
    costs, size = _samples(folder)
    ratios = [
        ratio_figure(
            f"Engine's tokens/s with the flight recorder at {rate} samples a second, over that without",
            str(rate),
            rates,
            goal,
            "slices without a recorder, with one at each rate, and without again",
        )
        for rate, goal in RATES.items()
    ]
    cost = Figure(
        what="One sample of a worker's flight recorder, median",
        value=statistics.median(costs),
        unit="ms",
        goal=None,
        spread=f"p99 {number(percentile(costs, 99))}; a file of {number(size / 1e6)} MB for {SECONDS} s at 10 a second",
        method=f"the recorder's own `cost_ms` of {len(costs)} samples of the slices above, the engine under load; what "
        "another thread of the worker had of the interpreter meanwhile is in it",
    )
    return [*ratios, cost]


@contextmanager
def _recording(stage: Stage, folder: Path, rate: int) -> Iterator[None]:
    payload = {"directory": str(folder), "instance": secrets.token_hex(8), "rate": rate, "seconds": SECONDS}
    _call(stage, "recorder_start", payload)
    try:
        yield
    finally:
        _call(stage, "recorder_stop", {})


def _call(stage: Stage, op: str, payload: dict[str, Any]) -> None:
    body = {"method": RPC_METHOD, "args": [op, json.dumps(payload)]}
    with httpx.Client(base_url=stage.engine.url, timeout=CALL_SECONDS, trust_env=False) as client:
        answer = json.loads(client.post("/collective_rpc", json=body).raise_for_status().json()["results"][0])
    if not answer["ok"]:
        raise DemoError(f"{op}: {answer['error']}")


def _samples(folder: Path) -> tuple[list[float], int]:
    """Every sample's cost in milliseconds, and the size of a file at ten a second."""
    recorder, costs, size = Recorder(folder), list[float](), 0
    for ring in recorder.others():
        costs += [record["cost_ms"] for record in recorder.last_records(ring.path) if record["kind"] == "sample"]
        if ring.identity is not None and ring.identity.rate == 10:
            size = ring.path.stat().st_size
    return costs, size
