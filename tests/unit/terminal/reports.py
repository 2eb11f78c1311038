"""Reports for the terminal's tests: the story's machine, as a sidecar tells of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from highwater.diagnose.verdict import JudgedReport
from highwater.engine.capabilities import Capabilities
from highwater.model.engine import EngineStatus
from highwater.model.growth import Growth
from highwater.model.policy import PolicyStatus, RankPressure, RemedyState, RuleStatus
from highwater.model.rank import EncoderCacheTotals, Launch, RankReading
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event, Report
from tests.fakes.engine import MIB, FakeEngine
from tests.golden import golden

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_763_660_000.0
CAPABILITIES = Capabilities(
    dev_mode=True,
    collective_rpc=True,
    extension="highwater_worker.MemoryExtension",
    reset_mm_cache=True,
    reset_prefix_cache=True,
    reset_encoder_cache=True,
    data_parallel=1,
).public()
HIGH, LOW = 1560 * MIB, 3120 * MIB
FREE = 7770 * MIB


def pressure(rank: int = 0, **changed: Any) -> RankPressure:
    """A rank of the story's machine, as the default rule sees it; with nothing missing unless a test says so."""
    made = RankPressure(
        rank=rank,
        dp_rank=0,
        free_bytes=FREE,
        high_free_bytes=HIGH,
        low_free_bytes=LOW,
        short_bytes=0,
        can_release_bytes=282 * MIB,
        can_trim_bytes=0,
    )
    return replace(made, **changed)


DEVICE = RuleStatus(
    name="device",
    signal="device_free_bytes",
    phase="calm",
    value=FREE,
    high_water=HIGH,
    low_water=LOW,
    ranks=(pressure(0), pressure(1)),
    remedies=tuple(RemedyState(name=name) for name in ("release", "trim_encoder_cache", "reset_encoder_cache")),
)


def ranks(count: int = 2, *, images: int = 0) -> tuple[RankReading, ...]:
    """The ranks of the story's machine, after so many images."""
    fake = FakeEngine(tensor_parallel=count, clock=lambda: NOW)
    if images:
        fake.serve_images(images)
    return tuple(replace(rank, launch=Launch(expandable_segments=True)) for rank in fake.readings())


def report(**changed: Any) -> JudgedReport:
    """A report of two ranks with all well; `state` and other parts of the engine's status may be given too."""
    engines = ("state", "hint", "version", "capabilities", "url", "stopped_at")
    parts = {name: changed.pop(name) for name in engines if name in changed}
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
    return JudgedReport.of(replace(made, **changed))


def policy(*rules: RuleStatus, **changed: Any) -> PolicyStatus:
    """A policy that acts, with all calm."""
    calm = "rank 0 has 7,770 MiB free, the least of all for its size; below 1,560 MiB memory is given back"
    made = PolicyStatus(mode="act", level="calm", summary=calm, rules=rules or (DEVICE,), actions_last_hour=1)
    return replace(made, **changed)


def short_policy(phase: str = "short", *, can_release: int = 0, can_trim: int = 0, **changed: Any) -> PolicyStatus:
    """The same with rank 1 short by 620 MiB; nothing can be given back unless a test says so."""
    free = LOW - 620 * MIB if phase == "resting" else HIGH - 100 * MIB
    one = pressure(1, free_bytes=free, short_bytes=620 * MIB, can_release_bytes=can_release, can_trim_bytes=can_trim)
    reason = "short by 620 MiB on rank 1" + ("" if can_release or can_trim else "; nothing here to give back")
    hindrance = None if can_release or can_trim else ""
    rule = replace(DEVICE, phase=phase, value=free, reason=reason, hindrance=hindrance, ranks=(pressure(0), one))
    return policy(rule, **{"level": "urgent" if phase == "urgent" else "short", "summary": reason, **changed})


HELD = replace(
    DEVICE,
    signal="device_used_ratio",
    phase="held",
    value=None,
    high_water=0.5,
    low_water=0.4,
    reason="device.low_water: 0.4 of device_used_ratio cannot be reached: rank 0 uses 0.81 at rest",
    is_dormant=True,
)


def event(summary: str = "reset_encoder_cache done", *, id_: int = 1, at: float = NOW, kind: str = "reset") -> Event:
    """Something that happened; a reset has a result."""
    result = RemedyResult(remedy="reset_encoder_cache", outcome="done") if kind == "reset" else None
    return Event(id=id_, at=at, kind=kind, summary=summary, trigger="reclaim" if result else None, result=result)


def as_json(value: Any) -> Any:
    """As it comes over the wire."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def is_golden(name: str, shown: str) -> bool:
    """Whether a screen is the one that was read."""
    return golden(GOLDEN / f"{name}.txt", f"{shown}\n") == f"{shown}\n"
