"""The first half of the demonstration: a real engine is watched, with nothing changed about it.

The worker package is on its path and a folder is named; there is no development mode, no flag and no call into the
engine, and requests go to vLLM itself. Every number that is printed comes from the sidecar.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from highwater.accounting.attribution import COMPONENTS
from highwater.demo.engine import Engine, EngineOptions
from highwater.demo.environment import EngineEnvironment
from highwater.demo.errors import DemoError
from highwater.demo.sidecar import DemoSidecar
from highwater.demo.traffic import send_images
from highwater.text.table import component_title, table
from highwater.units import mib

CONCURRENCY = 8
READY_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
"""A worker's newest sample, and the sidecar's reading of it, are at most a second old each."""
_ROWS = ("used_bytes", *COMPONENTS)


def watch(
    environment: EngineEnvironment, options: EngineOptions, *, images: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Start an engine, show its start, send it images, show what grew, and end it.

    Args:
        environment: Where vLLM is installed.
        options: What kind of engine; how it is watched is decided here.
        images: How many to send.
        say: Prints.

    Returns:
        The ranks' readings after the images.

    Raises:
        DemoError: The engine or the sidecar did not come up, a request failed, or the recorders show nothing.
    """
    with tempfile.TemporaryDirectory(prefix="highwater-demo-") as name:
        folder = Path(name)
        rings = folder / "recorders"
        watched = replace(
            options,
            dev_mode=False,
            extension=False,
            plugin=True,
            extra_env=(*options.extra_env, ("HIGHWATER_RECORDER_DIR", str(rings))),
        )
        engine = Engine(environment, watched, folder=folder / "engine")
        settings = {"HIGHWATER_RECORDER_DIR": str(rings)}
        with DemoSidecar(engine.url, folder=folder, settings=settings) as sidecar, engine:
            ready = _wait(sidecar, lambda ranks: all(rank["start"] for rank in ranks), READY_SECONDS)
            say(start_table(ready))
            say(f"\n{images} image requests to vLLM itself, at {engine.url}")
            _send(engine, range(images))
            time.sleep(_SETTLE_SECONDS)
            after = _wait(sidecar, lambda ranks: all(map(_entries, ranks)), READY_SECONDS)
            say(growth_table(ready, after))
            say("Each worker wrote this into its file, and the sidecar read it: no worker was called.")
            return after


def start_table(ranks: Sequence[dict[str, Any]]) -> str:
    """Return each rank's start: how long each phase took, what was in use when it ended, and what it added."""
    parts = []
    for rank in ranks:
        rows: list[list[str]] = []
        before: int | None = None
        for phase in rank["start"]:
            used: int | None = phase["used_bytes"]
            added = None if used is None or before is None else used - before
            rows.append([phase["name"], f"{phase['seconds']:.1f}", mib(used), mib(added, signed=True)])
            before = used
        parts.append(f"\n{_title(rank)}\n{table(['start', 'seconds', 'MiB in use then', 'added'], rows)}")
    return "\n".join(parts)


def growth_table(ready: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """Return what each component of each rank was and is."""
    parts = []
    for old, new in zip(ready, after, strict=True):
        rows = []
        for name in _ROWS:
            before, now = _size(old, name), _size(new, name)
            grown = None if before is None or now is None else now - before
            rows.append([component_title(name), mib(before), mib(now), mib(grown, signed=True)])
        parts.append(f"\n{_title(new)}\n{table(['MiB', 'ready', 'after the images', 'growth'], rows)}")
        parts.append(f"encoder cache: {_entries(new)} entries")
    return "\n".join(parts)


def _title(rank: dict[str, Any]) -> str:
    return f"rank {rank['rank']} ({rank['device']['type']}, {rank['device']['name']})"


def _size(rank: dict[str, Any], name: str) -> int | None:
    size: int | None = rank["used_bytes"] if name == "used_bytes" else rank["components"][name]
    return size


def _entries(rank: dict[str, Any]) -> int:
    return int((rank["encoder_cache"] or {}).get("entries") or 0)


def _wait(sidecar: DemoSidecar, holds: Callable[[list[dict[str, Any]]], bool], seconds: float) -> list[dict[str, Any]]:
    """Return the ranks once the engine is ready, every rank is seen, and `holds` of them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        report = sidecar.call("GET", "/memory")
        ranks: list[dict[str, Any]] = report["ranks"]
        is_whole = bool(ranks) and len(ranks) == report["ranks_expected"]
        if report["engine"]["state"] == "ready" and is_whole and holds(ranks):
            return ranks
        time.sleep(0.2)
    raise DemoError.with_log(f"the recorders do not show what they should: {report['engine']}", sidecar.log_path)


def _send(engine: Engine, images: range) -> None:
    with click.progressbar(length=len(images), label="  images") as bar:
        result = asyncio.run(
            send_images(
                engine.url,
                engine.served_model,
                images=images,
                concurrency=CONCURRENCY,
                on_done=lambda: bar.update(1),
            )
        )
    if result.failed:
        raise DemoError.with_log(f"{result.failed} of {result.sent} requests failed: {result.errors}", engine.log_path)
