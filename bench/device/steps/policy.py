"""Step 6: the policy with a real allocator: an engine that dies of its own reserve, and lives beside a sidecar."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.device.beside import EngineProcess, sidecar_with_defaults
from bench.device.results import Findings
from bench.device.torch_device import NO_DEVICE, TorchDevice

SAYS = "the policy: an engine that fragments and needs workspaces lives with the sidecar, and dies without"
CHECKS: Mapping[str, str] = {
    "dies_without": "without a sidecar the engine dies, for PyTorch keeps what a workspace needs",
    "lives_with": "beside a sidecar with its default settings the same engine lives four times as long",
    "relief_done": "because the policy had memory released",
    "is_read": "the sidecar reads the worker, and its figures are fresh",
    "held_on_cpu": "where no device is, the default rule does nothing",
}
WITHOUT_SECONDS = 120.0
TIMES_AS_LONG = 4
CPU_SECONDS = 5.0
FRESH_SECONDS = 60.0


def run(on: TorchDevice, found: Findings) -> None:
    """Run the engine without a sidecar, then with one."""
    if on.is_cpu:
        found.skip(NO_DEVICE, "dies_without", "lives_with", "relief_done")
        with tempfile.TemporaryDirectory() as folder:
            _calm(on, Path(folder), found)
        return
    found.skip("this run is on a device", "held_on_cpu")
    with tempfile.TemporaryDirectory() as folder:
        seconds = _without(on, Path(folder), found)
    with tempfile.TemporaryDirectory() as folder:
        _with(on, Path(folder), min(TIMES_AS_LONG * seconds, 200.0), found)


def _without(on: TorchDevice, folder: Path, found: Findings) -> float:
    with EngineProcess(on, folder, "grow") as engine:
        began = time.monotonic()
        engine.begin()
        has_died = engine.wait_for_its_end(WITHOUT_SECONDS)
        seconds = time.monotonic() - began
        found.holds("dies_without", has_died, f"it ran for {WITHOUT_SECONDS:g} s", value=round(seconds, 1))
        found.figure("without_seconds", seconds, "s")
    return seconds


def _with(on: TorchDevice, folder: Path, seconds: float, found: Findings) -> None:
    with EngineProcess(on, folder, "grow") as engine:
        try:
            with sidecar_with_defaults(engine.url, folder) as sidecar:
                engine.begin()
                has_died = engine.wait_for_its_end(seconds)
                found.holds("lives_with", not has_died, engine.log_end()[-300:], value=round(seconds, 1))
                found.figure("steps_with", engine.steps() or 0, "steps")
                _judge(sidecar, found)
        except ImportError as missing:
            why = f"the sidecar needs {missing.name}, which is not installed here"
            found.skip(why, "lives_with", "relief_done", "is_read")


def _judge(sidecar: Any, found: Findings) -> None:  # noqa: ANN401 - the demonstration's sidecar, imported late
    report, policy = _fresh(sidecar), sidecar.call("GET", "/policy")
    found.holds("is_read", not report["stale"] and len(report["ranks"]) == 1, f"stale: {report['stale']}")
    status = policy["status"]
    remedies = [remedy for rule in status["rules"] for remedy in rule["remedies"]]
    outcomes = {remedy["name"]: remedy["last_outcome"] for remedy in remedies}
    found.holds("relief_done", outcomes.get("release") == "done", f"{outcomes}: {status['summary']}")
    found.figure("reliefs", status["actions_last_hour"], "actions")


def _fresh(sidecar: Any) -> Mapping[str, Any]:  # noqa: ANN401 - the demonstration's sidecar, imported late
    """Return a report whose figures are fresh; the last one, where none comes: it may have stood still just now."""
    deadline = time.monotonic() + FRESH_SECONDS
    while (report := sidecar.call("GET", "/memory"))["stale"] and time.monotonic() < deadline:
        time.sleep(0.5)
    return dict(report)


def _calm(on: TorchDevice, folder: Path, found: Findings) -> None:
    with EngineProcess(on, folder, "calm") as engine:
        try:
            with sidecar_with_defaults(engine.url, folder) as sidecar:
                engine.begin()
                time.sleep(CPU_SECONDS)
                report = _fresh(sidecar)
                status = sidecar.call("GET", "/policy")["status"]
        except ImportError as missing:
            found.skip(f"the sidecar needs {missing.name}, which is not installed here", "is_read", "held_on_cpu")
            return
    found.holds("is_read", not report["stale"] and len(report["ranks"]) == 1, f"stale: {report['stale']}")
    phases = [f"{rule['name']}: {rule['phase']}: {rule['reason']}" for rule in status["rules"]]
    is_held = all(rule["phase"] == "held" for rule in status["rules"]) and status["actions_last_hour"] == 0
    found.holds("held_on_cpu", is_held, "; ".join(phases), value="; ".join(phases))
