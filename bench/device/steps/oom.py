"""Step 5: out of memory for real, in three ways: the message that the device's software writes, and the incident."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.device.beside import EngineProcess, sidecar_with_defaults
from bench.device.results import Findings
from bench.device.torch_device import TorchDevice

SAYS = "out of memory for real: full, in fragments, in a workspace; message recognised, incident written"
CHECKS: Mapping[str, str] = {
    "died": "an engine whose step finds no memory ends",
    "recognised": "the message is one that the product knows, of memory",
    "full": "a full device's message is known, and names no fragmentation",
    "fragment": "a fragmented device's message is known, and the incident finds memory that nobody uses",
    "workspace": "a library's message is known",
    "incident": "an incident is written",
    "verdict": "the incident says that the engine died, and why by its log",
}
DEATH_SECONDS = 240.0
INCIDENT_SECONDS = 120.0
RIGHT_KINDS = ("died", "out_of_memory")
RECORDED_SECONDS = 4.0
LOADS = ("full", "fragment", "workspace")
_LOAD_OF = {"full": "fill", "fragment": "fragment", "workspace": "workspace"}
_UNUSED = {"unused_reserve"}


def run(on: TorchDevice, found: Findings) -> None:
    """Let an engine die in each way; on a CPU in one."""
    ways = ("full",) if on.is_cpu else LOADS
    if on.is_cpu:
        found.skip("PyTorch's message for a CPU is none that an engine on a device writes", "recognised", *LOADS)
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            _die(on, way, Path(folder), found)


def _die(on: TorchDevice, way: str, folder: Path, found: Findings) -> None:
    (folder / "recorder").mkdir()
    with EngineProcess(on, folder, _LOAD_OF[way]) as engine:
        try:
            settings = {"recorder_dir": str(folder / "recorder"), "engine_log": str(engine.log_path)}
            with sidecar_with_defaults(engine.url, folder, **settings) as sidecar:
                time.sleep(RECORDED_SECONDS)
                engine.begin()
                _judge_death(engine, way, found)
                incident = _incident(sidecar)
        except ImportError as missing:
            found.skip(f"the sidecar needs {missing.name}, which is not installed here", "incident", "verdict")
            engine.begin()
            _judge_death(engine, way, found)
            incident = None
        _judge_message(on, engine, way, found)
    if incident is not None:
        _judge_incident(on, way, incident, found)


def _judge_death(engine: EngineProcess, way: str, found: Findings) -> None:
    has_ended = engine.wait_for_its_end(DEATH_SECONDS)
    found.holds("died", has_ended, f"{way}: it ran for {DEATH_SECONDS:g} s more")


def _judge_message(on: TorchDevice, engine: EngineProcess, way: str, found: Findings) -> None:
    if on.is_cpu:
        return
    try:
        log = import_module("highwater.diagnose.log.story")
    except ImportError as missing:
        found.skip(f"needs {missing.name}, which is not installed here", "recognised", *LOADS)
        return
    messages = log.story_of(engine.log_path.read_text(encoding="utf-8", errors="replace").splitlines()).messages
    names = [message.name for message in messages]
    is_known = any("out_of_memory" in name or name in _CANN for name in names)
    why = f"{way}: {names or engine.log_end()[-300:]}"
    found.holds("recognised", is_known, why)
    lines = [line for message in messages for line in message.lines[:1]]
    found.holds(way, is_known, why, value=", ".join([*names, *lines]))


_CANN = {"memory_allocation_failure_el0004", "runtime_result_207001", "pta_memory_error"}


def _incident(sidecar: Any) -> dict[str, Any] | None:  # noqa: ANN401 - the demonstration's sidecar, imported late
    """Return the incident that says that the engine died; after a while the newest, empty where there is none."""
    deadline = time.monotonic() + INCIDENT_SECONDS
    while True:
        # The engine may count as hung for a moment, until it is known that nothing listens any more.
        listed = sidecar.call("GET", "/memory/incidents")["incidents"]
        right = next((headline for headline in listed if headline["kind"] in RIGHT_KINDS), None)
        if right is not None or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    chosen = right or next(iter(listed), None)
    incident: dict[str, Any] = {} if chosen is None else sidecar.call("GET", f"/memory/incidents/{chosen['id']}")
    return incident


def _judge_incident(on: TorchDevice, way: str, incident: dict[str, Any], found: Findings) -> None:
    found.holds("incident", bool(incident), f"{way}: none within {INCIDENT_SECONDS:g} s")
    if not incident:
        found.holds("verdict", False, f"{way}: there is no incident")
        return
    kind, summary = incident["kind"], incident["summary"]
    is_right = kind in RIGHT_KINDS and (on.is_cpu or bool(incident["messages"]))
    found.holds("verdict", is_right, f"{way}: {kind}: {summary}", value=summary)
    names = {finding["name"] for finding in incident["findings"]}
    if way == "fragment":
        found.holds("fragment", bool(names & _UNUSED), f"findings: {', '.join(sorted(names))}", value=summary)
