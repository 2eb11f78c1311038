"""Reports for the terminal's tests: the story's machine, as a sidecar tells of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from app.capabilities import Capabilities
from app.readings import (
    ActionBudget,
    Components,
    EncoderCacheTotals,
    EngineStatus,
    Event,
    Growth,
    PolicyStatus,
    RankReading,
    RemedyResult,
    Report,
    RuleStatus,
)
from tests.fakes.engine import FakeEngine

NOW = 1_763_660_000.0
CAPABILITIES = Capabilities(
    dev_mode=True,
    collective_rpc=True,
    extension="worker_ext.MemoryExtension",
    reset_mm_cache=True,
    reset_prefix_cache=True,
    reset_encoder_cache=True,
    data_parallel=1,
).public()
DEVICE = RuleStatus(
    name="device", signal="device_used_ratio", high_water=0.93, low_water=0.9, phase="below", value=0.925
)


def ranks(count: int = 2, *, images: int = 0) -> tuple[RankReading, ...]:
    """The ranks of the story's machine, after so many images."""
    fake = FakeEngine(tensor_parallel=count, clock=lambda: NOW)
    if images:
        fake.serve_images(images)
    return fake.readings()


def report(**changed: Any) -> Report:
    """A report of two ranks with all well; `state` and other parts of the engine's status may be given too."""
    parts = {name: changed.pop(name) for name in ("state", "hint", "version", "capabilities", "url") if name in changed}
    engine = EngineStatus(
        url="http://127.0.0.1:8000",
        state="ready",
        version="0.32.0",
        model="Qwen/Qwen3-VL-32B-Instruct",
        requests_running=3,
        requests_waiting=1,
        kv_cache_usage_ratio=0.41,
        capabilities=CAPABILITIES,
    )
    made = Report(
        taken_at=NOW,
        age_seconds=0.4,
        stale=False,
        engine=replace(engine, **parts),
        ranks_expected=2,
        ranks_reported=2,
        ranks=ranks(),
        encoder_cache=EncoderCacheTotals(entries=31, device_bytes=7_931_428_864, host_bytes=0),
        growth=Growth(since_ready_bytes=3_965_517_824, bytes_per_second=1_048_576.0),
        policy=policy(),
    )
    return replace(made, **changed)


def policy(*rules: RuleStatus, **changed: Any) -> PolicyStatus:
    """A policy that acts, below high water."""
    budget = ActionBudget(max_actions_per_hour=60, started_last_hour=1, used_up=False)
    made = PolicyStatus(state="below", mode="act", rules=rules or (DEVICE,), budget=budget)
    return replace(made, **changed)


def event(summary: str = "reset_encoder_cache done", *, id_: int = 1, at: float = NOW, kind: str = "reset") -> Event:
    """Something that happened; a reset has a result."""
    result = RemedyResult(remedy="reset_encoder_cache", outcome="done") if kind == "reset" else None
    return Event(id=id_, at=at, kind=kind, summary=summary, trigger="reclaim" if result else None, result=result)


def as_json(value: Any) -> Any:
    """As it comes over the wire."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def with_components(rank: RankReading, **sizes: int) -> RankReading:
    """The rank with other components."""
    return replace(rank, components=Components(**sizes))
