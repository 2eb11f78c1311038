"""The cost of watching by the recorders' files: the engine beside one that nobody watches, and the sidecar."""

from __future__ import annotations

import time

from bench.figure import Figure, Goal, number
from bench.idle import SETTLE_SECONDS, cpu_shares
from bench.sidecar import process_id, sidecar_beside
from bench.simulated_engine import RANKS, RECORDED_ENTRIES, Activity, SimulatedEngine
from bench.stage import Stage
from highwater.terminal.demo.engine import DemoEngine, EngineOptions

ENGINE_GOAL = Goal("at most", 0.5)
SIDECAR_GOAL = Goal("at most", 1.0)
RECORDER_DIR = "HIGHWATER_RECORDER_DIR"


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """Shares of a core."""
    seconds = 30.0 if short else 120.0
    return [
        _engine(stage, seconds),
        _sidecar(stage, "idle", seconds),
        _sidecar(stage, "work", seconds),
    ]


def _engine(stage: Stage, seconds: float) -> Figure:
    """Two engines over the same time: one with the plugin, its recorder and a sidecar, one without."""
    folder = stage.folder / "watched"
    rings = folder / "rings"
    options = EngineOptions(dev_mode=False, extension=False, plugin=True, extra_env=((RECORDER_DIR, str(rings)),))
    without = stage.engine.pids()
    with (
        DemoEngine(stage.environment, options, folder=folder / "engine") as engine,
        sidecar_beside(engine.url, folder, recorder_dir=str(rings)),
    ):
        watched = engine.pids()
        time.sleep(SETTLE_SECONDS)
        shares = cpu_shares([*watched, *without], seconds)
        calls = engine.log_path.read_text().count("/collective_rpc")
    with_all, alone = sum(shares[: len(watched)]), sum(shares[len(watched) :])
    return Figure(
        what="Engine's CPU for being watched, idle",
        value=with_all - alone,
        unit="% of a core",
        goal=ENGINE_GOAL,
        spread=f"all its processes: {number(with_all)} with, {number(alone)} without; {calls} worker calls",
        method=f"the engine: two idle real engines of one rank over {seconds:.0f} s, with and without recorder and "
        "sidecar",
    )


def _sidecar(stage: Stage, activity: Activity, seconds: float) -> Figure:
    folder = stage.folder / f"watching-{activity}"
    folder.mkdir()
    rings = folder / "rings"
    with (
        SimulatedEngine(folder, recorded=(rings, activity)) as engine,
        sidecar_beside(engine.url, folder, recorder_dir=str(rings)) as sidecar,
    ):
        time.sleep(SETTLE_SECONDS)
        (share,) = cpu_shares([process_id(sidecar)], seconds)
        ranks = sidecar.call("GET", "/memory")["ranks"]
    sources = {rank["source"] for rank in ranks}
    if (len(ranks), sources) != (RANKS, {"recorder"}):
        raise RuntimeError(f"{len(ranks)} ranks were watched, by {sorted(sources)}: it must be {RANKS}, by recorder")
    doing = {"idle": "idle", "work": "at work"}[activity]
    return Figure(
        what=f"Sidecar's CPU, watching {RANKS} ranks, the engine {doing}",
        value=share,
        unit="% of a core",
        goal=SIDECAR_GOAL,
        spread=f"{number(share * 10)} ms a second, all included",
        method="the sidecar: recorders of a simulated engine write a heartbeat (idle) or ten samples (at work) a "
        f"second, with {RECORDED_ENTRIES} encoder cache entries each; over {seconds:.0f} s",
    )
