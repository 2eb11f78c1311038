"""The story of the mission, replayed on a real engine: growth, the reset that frees nothing, the one that does.

It drives the sidecar over HTTP as an operator would, and every number that it prints comes from the sidecar.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from highwater.accounting.attribution import COMPONENTS
from highwater.demo.engine import Engine, EngineOptions
from highwater.demo.environment import EngineEnvironment
from highwater.demo.errors import DemoError
from highwater.demo.sidecar import DemoSidecar
from highwater.demo.traffic import TrafficResult, send_images
from highwater.text.table import component_title, table
from highwater.units import MIB, mib

CONCURRENCY = 8
READY_SECONDS = 60.0
# The demonstration's own rule: a threshold so low that a few dozen images cross it, whatever the machine.
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
_ROWS = ("used_bytes", *COMPONENTS)


@dataclass(slots=True)
class Story:
    """The findings of the replay, for the printed table and for tests.

    Attributes:
        images: How many were sent.
        moments: The ranks' readings at each moment, in order.
        mm_reset: The sidecar's answer to ``POST /reset_mm_cache``.
        reclaim: Its answer to ``POST /memory/reclaim``.
        automatic: The events of the automatic reset, oldest first.
    """

    images: int
    moments: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    mm_reset: dict[str, Any] = field(default_factory=dict)
    reclaim: dict[str, Any] = field(default_factory=dict)
    automatic: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def stage(
    environment: EngineEnvironment, options: EngineOptions, port: int | None
) -> Iterator[tuple[Engine, DemoSidecar]]:
    """An engine and a sidecar beside it, both ready; both ended at the end."""
    with tempfile.TemporaryDirectory(prefix="highwater-demo-") as name:
        folder = Path(name)
        engine = Engine(environment, options, folder=folder / "engine")
        with DemoSidecar(engine.url, folder=folder, port=port) as sidecar, engine:
            _wait_ready(sidecar)
            yield engine, sidecar


def tell(engine: Engine, sidecar: DemoSidecar, *, images: int, say: Callable[[str], None]) -> Story:
    """Replay the story.

    Raises:
        DemoError: A request failed, or what must happen did not.
    """
    story = Story(images)
    story.moments["ready"] = _now(sidecar, "ready")
    say(f"\n{images} image requests through the sidecar at {sidecar.url}/v1/chat/completions")
    _send(engine, sidecar, range(images), label="  images")
    story.moments["after traffic"] = _now(sidecar, "after traffic")
    story.mm_reset = sidecar.call("POST", "/reset_mm_cache")
    story.moments["after reset_mm_cache"] = story.mm_reset["after"]
    story.reclaim = sidecar.call("POST", "/memory/reclaim")
    story.moments["after reclaim"] = story.reclaim["results"][-1]["after"]
    say(story_table(story))
    story.automatic = _automatic(engine, sidecar, first_image=images, say=say)
    return story


def story_table(story: Story) -> str:
    """The table that an operator would want: per rank and component, what grew and what each reset gave back."""
    ready, traffic, mm, reclaimed = story.moments.values()
    parts = []
    headers = ["MiB", "ready", "after traffic", "growth", "reset_mm_cache freed", "reclaim freed", "after reclaim"]
    for index, rank in enumerate(ready):
        rows = []
        for name in _ROWS:
            sizes = [_size(moment[index], name) for moment in (ready, traffic, mm, reclaimed)]
            before, grown, after_mm, after = sizes
            shown = [
                mib(before),
                mib(grown),
                _difference(grown, before, signed=True),
                _difference(grown, after_mm),
                _difference(after_mm, after),
                mib(after),
            ]
            rows.append([component_title(name), *shown])
        parts.append(
            f"\nrank {rank['rank']} ({rank['device']['type']}, {rank['device']['name']})\n{table(headers, rows)}"
        )
    return "\n".join([*parts, "", *_sentences(story)])


def _sentences(story: Story) -> Iterator[str]:
    traffic, mm = story.moments["after traffic"], story.moments["after reset_mm_cache"]
    yield (
        f"POST /reset_mm_cache answered 200 and freed {mib(story.mm_reset['freed_bytes']['total'])} MiB: the encoder "
        f"cache held {_cached(traffic)} before it and {_cached(mm)} after. It frees "
        f"{story.mm_reset['frees']}."
    )
    for result in story.reclaim["results"]:
        yield (
            f"POST /memory/reclaim: {result['remedy']} {result['outcome']}, freed "
            f"{mib(result['freed_bytes']['total'])} MiB in {result['seconds']:.2f} s"
        )


def _cached(ranks: Sequence[dict[str, Any]]) -> str:
    caches = [rank["encoder_cache"] for rank in ranks if rank["encoder_cache"]]
    return f"{sum(c['entries'] for c in caches)} entries, {mib(sum(c['device_bytes'] for c in caches))} MiB"


def _automatic(
    engine: Engine, sidecar: DemoSidecar, *, first_image: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Traffic until the policy acts by itself; returns the events of it, oldest first."""
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


def _traffic_until_reset(engine: Engine, sidecar: DemoSidecar, first_image: int) -> list[dict[str, Any]]:
    started = sidecar.call("GET", "/memory/history?step=86400")["now"]
    done = threading.Event()

    def seeds() -> Iterator[int]:
        for seed in range(first_image, first_image + MAX_AUTOMATIC_IMAGES):
            if done.is_set():
                return
            yield seed

    sender = threading.Thread(target=lambda: _send(engine, sidecar, seeds(), label=None), name="traffic")
    sender.start()
    try:
        while True:
            alive = sender.is_alive()
            listed = sidecar.call("GET", "/memory/events?limit=200")["events"]
            ours = [e for e in reversed(listed) if e["at"] >= started and e["rule"] == RULE["name"]]
            if any(_relieved(event) for event in ours):
                return ours
            if not alive:
                seen = "; ".join(event["summary"] for event in ours) or "none"
                raise DemoError(f"no relief by the policy within {MAX_AUTOMATIC_IMAGES} images; its events: {seen}")
            time.sleep(0.2)
    finally:
        done.set()
        sender.join()


def _relieved(event: dict[str, Any]) -> bool:
    return (event["result"] or {}).get("outcome") == "done"


def _event_text(event: dict[str, Any]) -> str:
    result = event["result"]
    if result is None or result["outcome"] != "done":
        return str(event["summary"])
    parts = {name: result["freed_components"][name] for name in COMPONENTS}
    freed = ", ".join(f"{component_title(name)} {mib(size)}" for name, size in parts.items() if size)
    return (
        f"{result['remedy']} freed {mib(result['freed_bytes'])} MiB in {result['seconds']:.2f} s ({freed or 'nothing'})"
    )


def _send(engine: Engine, sidecar: DemoSidecar, seeds: Any, *, label: str | None) -> None:  # noqa: ANN401 - seeds
    """Send images, with a progress bar where there is a label.

    Raises:
        DemoError: A request failed.
    """

    def run(on_done: Callable[[], None] | None) -> TrafficResult:
        return asyncio.run(
            send_images(sidecar.url, engine.served_model, images=seeds, concurrency=concurrency, on_done=on_done)
        )

    concurrency = CONCURRENCY if label else AUTOMATIC_CONCURRENCY
    if label is None:
        result = run(None)
    else:
        with click.progressbar(length=len(seeds), label=label) as bar:
            result = run(lambda: bar.update(1))
    if result.failed:
        raise DemoError.with_log(f"{result.failed} of {result.sent} requests failed: {result.errors}", engine.log_path)


def _now(sidecar: DemoSidecar, mark: str) -> list[dict[str, Any]]:
    """Name the moment, which takes a fresh reading, and return the ranks of that reading."""
    sidecar.call("POST", "/memory/marks", {"name": mark})
    report = sidecar.call("GET", "/memory")
    if report["stale"] or not report["ranks"]:
        raise DemoError(f"no reading of the workers at {mark!r}: {report['engine']}")
    ranks: list[dict[str, Any]] = report["ranks"]
    return ranks


def _wait_ready(sidecar: DemoSidecar) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        report = sidecar.call("GET", "/memory")
        if report["engine"]["state"] == "ready" and report["ranks"]:
            return
        time.sleep(0.2)
    raise DemoError.with_log(f"the sidecar does not see the engine: {report['engine']}", sidecar.log_path)


def _size(rank: dict[str, Any], name: str) -> int | None:
    size: int | None = rank["used_bytes"] if name == "used_bytes" else rank["components"][name]
    return size


def _difference(left: int | None, right: int | None, *, signed: bool = False) -> str:
    return mib(None if left is None or right is None else left - right, signed=signed)
