"""The demonstration: watches a real engine, and then reproduces the typical case on one whose caches may be reset.

It drives the sidecar over HTTP as an operator would, and every number that it prints comes from the sidecar.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import click

from highwater.accounting.components import COMPONENT_NAMES
from highwater.demo.engine import DemoEngine, EngineOptions
from highwater.demo.environment import EngineEnvironment
from highwater.demo.errors import DemoError
from highwater.demo.sidecar import DemoSidecar
from highwater.demo.traffic import send_images
from highwater.text.table import component_title, rank_title, table
from highwater.units import MIB, mib

CONCURRENCY = 8
READY_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
"""A worker's newest sample, and the sidecar's reading of it, are at most a second old each."""
# The demonstration's own rule: a threshold so low that a few dozen images cross it on any machine.
RULE_HIGH_BYTES = 160 * MIB
RULE = {
    "name": "demo",
    "signal": "encoder_cache_bytes",
    "high_water": RULE_HIGH_BYTES,
    "low_water": 96 * MIB,
    "min_gain_bytes": MIB,
    "cooldown_seconds": 5,
    # Not a trim: this engine's device is the host, and moving from one to the other would show nothing.
    "remedies": ["reset_encoder_cache"],
}
MAX_AUTOMATIC_IMAGES = 240
AUTOMATIC_CONCURRENCY = 2  # traffic that goes on refills the cache while the reset is measured: not too fast here
_ROWS = ("used_bytes", *COMPONENT_NAMES)

Ranks: TypeAlias = list[dict[str, Any]]
"""The ranks of ``GET /memory``."""


@dataclass(slots=True)
class Story:
    """The results of the replay: its moments in order, and the events of the automatic reset, oldest first."""

    images: int
    moments: dict[str, Ranks] = field(default_factory=dict)
    mm_reset: dict[str, Any] = field(default_factory=dict)
    reclaim: dict[str, Any] = field(default_factory=dict)
    automatic: Ranks = field(default_factory=list)


@contextmanager
def _beside(
    environment: EngineEnvironment, options: EngineOptions, port: int | None, *, say: Callable[[str], None]
) -> Iterator[tuple[DemoEngine, DemoSidecar]]:
    """Start an engine with recorders and a sidecar beside it, and say where; both are ended at the end."""
    with tempfile.TemporaryDirectory(prefix="highwater-demo-") as name:
        folder = Path(name)
        recorders = folder / "recorders"
        recorders.mkdir()
        variable = {"HIGHWATER_RECORDER_DIR": str(recorders)}
        recorded = replace(options, plugin=True, extra_env=(*options.extra_env, *variable.items()))
        engine = DemoEngine(environment, recorded, folder=folder / "engine")
        with DemoSidecar(engine.url, folder=folder, port=port, settings=variable) as sidecar:
            say(f"The sidecar is at {sidecar.url} (dashboard: {sidecar.url}/dashboard), vLLM will be at {engine.url}")
            with engine:
                yield engine, sidecar


def watch(environment: EngineEnvironment, options: EngineOptions, *, images: int, say: Callable[[str], None]) -> None:
    """Watch an engine whose flags are unchanged: show its start, send it images, and show what grew.

    The worker package is on its path and a folder is named; there is no development mode, no flag and no call into the
    engine, and requests go to vLLM itself. Raises DemoError where a part did not come up, a request failed, or the
    recorders show nothing.
    """
    watched = replace(options, dev_mode=False, extension=False)
    with _beside(environment, watched, None, say=say) as (engine, sidecar):
        ready = _wait_ready(sidecar, lambda ranks: all(rank["start"] for rank in ranks))
        say(start_table(ready))
        say(f"\n{images} image requests to vLLM itself, at {engine.url}")
        _send(engine, engine.url, range(images))
        time.sleep(_SETTLE_SECONDS)
        say(growth_table(ready, _wait_ready(sidecar, lambda ranks: all(map(_entries, ranks)))))
        say("Each worker wrote this into its file, and the sidecar read it: no worker was called.")


def start_table(ranks: Ranks) -> str:
    parts = []
    for rank in ranks:
        rows: list[list[str]] = []
        before: int | None = None
        for phase in rank["start"]:
            used: int | None = phase["used_bytes"]
            rows.append([phase["name"], f"{phase['seconds']:.1f}", mib(used), _difference(used, before, signed=True)])
            before = used
        parts.append(f"\n{_title(rank)}\n{table(['start', 'seconds', 'MiB in use then', 'added'], rows)}")
    return "\n".join(parts)


def growth_table(ready: Ranks, after: Ranks) -> str:
    parts = []
    for old, new in zip(ready, after, strict=True):
        sizes = [(name, _size(old, name), _size(new, name)) for name in _ROWS]
        rows = [
            [component_title(name), mib(before), mib(now), _difference(now, before, signed=True)]
            for name, before, now in sizes
        ]
        parts.append(f"\n{_title(new)}\n{table(['MiB', 'ready', 'after the images', 'growth'], rows)}")
        parts.append(f"encoder cache: {_entries(new)} entries")
    return "\n".join(parts)


@contextmanager
def stage(
    environment: EngineEnvironment, options: EngineOptions, port: int | None, *, say: Callable[[str], None]
) -> Iterator[tuple[DemoEngine, DemoSidecar]]:
    with _beside(environment, options, port, say=say) as (engine, sidecar):
        _wait_ready(sidecar)
        yield engine, sidecar


def tell(engine: DemoEngine, sidecar: DemoSidecar, *, images: int, say: Callable[[str], None]) -> Story:
    """Reproduce the typical case. Raises DemoError where a request failed, or what must happen did not."""
    story = Story(images)
    story.moments["ready"] = _mark(sidecar, "ready")
    say(f"\n{images} image requests through the sidecar at {sidecar.url}/v1/chat/completions")
    _send(engine, sidecar.url, range(images))
    story.moments["after traffic"] = _mark(sidecar, "after traffic")
    story.mm_reset = sidecar.call("POST", "/reset_mm_cache")
    story.moments["after reset_mm_cache"] = story.mm_reset["after"]
    story.reclaim = sidecar.call("POST", "/memory/reclaim")
    story.moments["after reclaim"] = story.reclaim["results"][-1]["after"]
    say(story_table(story))
    story.automatic = _automatic(engine, sidecar, first_image=images, say=say)
    return story


def story_table(story: Story) -> str:
    headers = ["MiB", "ready", "after traffic", "growth", "reset_mm_cache freed", "reclaim freed", "after reclaim"]
    parts = []
    for ranks in zip(*story.moments.values(), strict=True):
        rows = []
        for name in _ROWS:
            before, grown, after_mm, after = (_size(rank, name) for rank in ranks)
            freed = [_difference(grown, after_mm), _difference(after_mm, after)]
            growth = _difference(grown, before, signed=True)
            rows.append([component_title(name), mib(before), mib(grown), growth, *freed, mib(after)])
        parts.append(f"\n{_title(ranks[0])}\n{table(headers, rows)}")
    return "\n".join([*parts, "", *_sentences(story)])


def _sentences(story: Story) -> Iterator[str]:
    traffic, after_mm = story.moments["after traffic"], story.moments["after reset_mm_cache"]
    yield (
        f"POST /reset_mm_cache returned 200 and freed {mib(story.mm_reset['freed_bytes']['total'])} MiB: the encoder "
        f"cache held {_cached(traffic)} before it and {_cached(after_mm)} after. It frees "
        f"{story.mm_reset['frees']}."
    )
    for result in story.reclaim["results"]:
        yield (
            f"POST /memory/reclaim: {result['remedy']} {result['outcome']}, gave back "
            f"{mib(result['credited_bytes']['total'])} MiB in {result['seconds']:.2f} s"
        )


def _cached(ranks: Ranks) -> str:
    caches = [rank["encoder_cache"] for rank in ranks if rank["encoder_cache"]]
    return f"{sum(c['entries'] for c in caches)} entries, {mib(sum(c['device_bytes'] for c in caches))} MiB"


def _automatic(engine: DemoEngine, sidecar: DemoSidecar, *, first_image: int, say: Callable[[str], None]) -> Ranks:
    """Send traffic until the policy acts by itself; return its events, oldest first."""
    before = sidecar.call("GET", "/policy")
    say(
        f"\nNow by itself: PUT /policy with a rule that acts once the encoder cache holds {mib(RULE_HIGH_BYTES)} MiB, "
        "and traffic until then"
    )
    sidecar.call("PUT", "/policy", {"rules": [RULE]})
    try:
        events = _traffic_until_reset(engine, sidecar, first_image)
    finally:
        sidecar.call("PUT", "/policy", {"mode": before["mode"], "rules": before["rules"]})
    for event in events:
        clock = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        say(f"  {clock} {_event_text(event)}")
    return events


def _traffic_until_reset(engine: DemoEngine, sidecar: DemoSidecar, first_image: int) -> Ranks:
    started = sidecar.call("GET", "/memory/history?step=86400")["now"]
    done = threading.Event()

    def seeds() -> Iterator[int]:
        for seed in range(first_image, first_image + MAX_AUTOMATIC_IMAGES):
            if done.is_set():
                return
            yield seed

    sender = threading.Thread(target=lambda: _send(engine, sidecar.url, seeds()), name="traffic")
    sender.start()
    try:
        while True:
            alive = sender.is_alive()
            listed = sidecar.call("GET", "/memory/events?limit=200")["events"]
            events = [e for e in reversed(listed) if e["at"] >= started and e["rule"] == RULE["name"]]
            if any((event["result"] or {}).get("outcome") == "done" for event in events):
                return events
            if not alive:
                seen = "; ".join(event["summary"] for event in events) or "none"
                raise DemoError(f"no relief by the policy within {MAX_AUTOMATIC_IMAGES} images; its events: {seen}")
            time.sleep(0.2)
    finally:
        done.set()
        sender.join()


def _event_text(event: dict[str, Any]) -> str:
    result = event["result"]
    if result is None or result["outcome"] != "done":
        return str(event["summary"])
    parts = {name: result["credited_components"][name] for name in COMPONENT_NAMES}
    freed = ", ".join(f"{component_title(name)} {mib(size)}" for name, size in parts.items() if size)
    took = f"{mib(result['credited_bytes'])} MiB in {result['seconds']:.2f} s"
    return f"{result['remedy']} gave back {took} ({freed or 'nothing'})"


def _send(engine: DemoEngine, url: str, seeds: range | Iterator[int]) -> None:
    """Send images: a range fast, with a progress bar, others slowly. Raises DemoError where a request failed."""
    total = len(seeds) if isinstance(seeds, range) else None
    concurrency = AUTOMATIC_CONCURRENCY if total is None else CONCURRENCY
    with click.progressbar(length=total or MAX_AUTOMATIC_IMAGES, label="  images", hidden=total is None) as bar:
        sending = send_images(
            url, engine.served_model, images=seeds, concurrency=concurrency, on_done=lambda: bar.update(1)
        )
        result = asyncio.run(sending)
    if result.failed:
        raise DemoError.with_log(f"{result.failed} of {result.sent} requests failed: {result.errors}", engine.log_path)


def _mark(sidecar: DemoSidecar, mark: str) -> Ranks:
    """Set a mark, which takes a new reading, and return the ranks of that reading."""
    sidecar.call("POST", "/memory/marks", {"name": mark})
    report = sidecar.call("GET", "/memory")
    if report["stale"] or not report["ranks"]:
        raise DemoError(f"no reading of the workers at {mark!r}: {report['engine']}")
    ranks: Ranks = report["ranks"]
    return ranks


def _wait_ready(sidecar: DemoSidecar, holds: Callable[[Ranks], bool] = bool) -> Ranks:
    """Return the ranks once the engine is ready, every rank is seen, and `holds` is true of them."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        report = sidecar.call("GET", "/memory")
        ranks: Ranks = report["ranks"]
        is_complete = bool(ranks) and len(ranks) == report["ranks_expected"]
        if report["engine"]["state"] == "ready" and is_complete and holds(ranks):
            return ranks
        time.sleep(0.2)
    raise DemoError.with_log(f"the sidecar does not see what it should: {report['engine']}", sidecar.log_path)


def _title(rank: dict[str, Any]) -> str:
    name = rank_title(rank.get("dp_rank"), rank["rank"])
    return f"rank {name} ({rank['device']['type']}, {rank['device']['name']})"


def _entries(rank: dict[str, Any]) -> int:
    return int((rank["encoder_cache"] or {}).get("entries") or 0)


def _size(rank: dict[str, Any], name: str) -> int | None:
    size: int | None = rank["used_bytes"] if name == "used_bytes" else rank["components"][name]
    return size


def _difference(left: int | None, right: int | None, *, signed: bool = False) -> str:
    return mib(None if left is None or right is None else left - right, signed=signed)
