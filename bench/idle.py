"""The cost of an idle sidecar: memory, and CPU at one poll a second, on both sides."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.figure import Figure, Goal, number
from bench.machine import cpu_seconds
from bench.sidecar import MIB, process_id, process_memory, sidecar_beside
from bench.stage import Stage

SETTLE_SECONDS = 5.0


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """Resident size, and shares of a core."""
    seconds = 30.0 if short else 60.0
    engine = stage.engine.pids()
    time.sleep(SETTLE_SECONDS)
    alone = cpu_shares(engine, seconds)
    with sidecar_beside(stage.engine.url, stage.folder, poll_seconds="1") as sidecar:
        pid = process_id(sidecar)
        time.sleep(SETTLE_SECONDS)
        share, *polled = cpu_shares([pid, *engine], seconds)
        memory = process_memory(pid)
    where = "beside the real engine, one rank, one poll a second, no request, without recorders"
    return [
        Figure(
            what="Sidecar's resident memory (RSS), idle",
            value=memory.rss_bytes / MIB,
            unit="MiB",
            goal=Goal("under", 90.0),
            spread=f"PSS {number(memory.pss_bytes / MIB)} MiB",
            method=f"{where}; memory after {SETTLE_SECONDS + seconds:.0f} s; CPU over {seconds:.0f} s",
        ),
        Figure(
            what="Sidecar's CPU, idle",
            value=share,
            unit="% of a core",
            goal=Goal("under", 2.0),
            spread=f"{number(share * 10)} ms a poll, all included",
            method=f"{where}; memory after {SETTLE_SECONDS + seconds:.0f} s; CPU over {seconds:.0f} s",
        ),
        Figure(
            what="Engine's CPU for one poll a second",
            value=sum(polled) - sum(alone),
            unit="% of a core",
            goal=None,
            spread=f"all its processes, idle: {number(sum(polled))} with, {number(sum(alone))} without",
            method="the engine's CPU: a worker of vLLM spins for a second after each message",
        ),
    ]


def cpu_shares(pids: Sequence[int], seconds: float) -> list[float]:
    """Each process's CPU over the next `seconds`, in percent of a core."""
    began, before = time.monotonic(), [cpu_seconds(pid) for pid in pids]
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    return [(cpu_seconds(pid) - cpu) / elapsed * 100 for pid, cpu in zip(pids, before, strict=True)]
