"""Evidence for tests: an engine of two NPUs with much room, of which a test changes what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from highwater.diagnose.case import of_incident
from highwater.diagnose.evidence import EncoderEntry, Evidence, Incident, RankEvidence
from highwater.diagnose.finding import Finding
from highwater.diagnose.incidents.diagnosis import diagnose, summarize
from highwater.diagnose.log.story import NO_LOG, LogStory
from highwater.model.components import MemoryPoint
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.rank import Budget, Components, Device, EncoderCache, HostMemory, RankReading, TorchMemory
from highwater.model.report import Event

MIB = 1024 * 1024
TOTAL = 62_420 * MIB
AT = 1_795_271_553.0  # 2026-11-21 14:32:33Z
ID = "20261121T143233Z-died"


def reading(rank: int | None = 0, *, used: int | None = 40_000 * MIB, **changes: Any) -> RankReading:
    """One rank with a third of its device free."""
    given: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "dp_rank": 0,
        "tp_rank": rank,
        "pp_rank": 0,
        "host": "node-a",
        "pid": 4242 + (rank or 0),
        "taken_at": AT - 0.5,
        "device": Device(type="npu", index=rank, name="Ascend910B3"),
        "total_bytes": TOTAL,
        "free_bytes": None if used is None else TOTAL - used,
        "used_bytes": used,
        "used_ratio": None if used is None else used / TOTAL,
        "torch": TorchMemory(
            allocated_bytes=38_000 * MIB, reserved_bytes=38_400 * MIB, inactive_split_bytes=0, alloc_retries=0, ooms=0
        ),
        "components": Components(
            weights_bytes=20_000 * MIB,
            kv_cache_bytes=17_900 * MIB,
            encoder_cache_bytes=100 * MIB,
            other_tensors_bytes=0,
            torch_cached_bytes=400 * MIB,
            non_torch_bytes=1_600 * MIB,
        ),
        "encoder_cache": EncoderCache(entries=3, device_bytes=100 * MIB, capacity_embeds=16_384),
        "budget": Budget(gpu_memory_utilization=0.9, requested_bytes=56_178 * MIB),
        "host_memory": HostMemory(
            rss_bytes=6_000 * MIB, cgroup_used_bytes=20_000 * MIB, cgroup_limit_bytes=64_000 * MIB
        ),
    }
    return RankReading(**given | changes)


def unknown(rank: int | None = 0) -> RankReading:
    """A rank of which nothing is known but that it is there."""
    return reading(
        rank,
        used=None,
        total_bytes=None,
        device=Device(),
        torch=TorchMemory(),
        components=Components(),
        encoder_cache=None,
        budget=Budget(),
        host_memory=HostMemory(),
        host=None,
        pid=None,
        dp_rank=None,
    )


def rank(known: RankReading | None = None, **changes: Any) -> RankEvidence:
    """One rank as evidence; without a reading rank 0 of this engine."""
    known = known or reading()
    given: dict[str, Any] = {"rank": known.rank, "dp_rank": known.dp_rank, "host": known.host, "pid": known.pid}
    return RankEvidence(**given | {"status": "alive", "reading": known} | changes)


def series(known: RankReading, used: Sequence[int], step: float = 0.1) -> tuple[MemoryPoint, ...]:
    """Used bytes over time, up to shortly before the reading."""
    last = MemoryPoint.of(known)
    start = known.taken_at - step * len(used)
    return tuple(replace(last, at=start + step * index, used_bytes=size) for index, size in enumerate(used))


def entry(mm_hash: str = "ab" * 32, size: int = 8 * MIB, **changes: Any) -> EncoderEntry:
    return EncoderEntry(mm_hash=mm_hash, bytes=size, **{"residency": "device", "age_seconds": 12.0} | changes)


def event(summary: str = "engine ready -> down", at: float = AT - 1, **changes: Any) -> Event:
    return Event(**{"id": 1, "at": at, "kind": "state", "summary": summary} | changes)


LOAD = EngineLoad(requests_running=3, requests_waiting=0, kv_cache_usage_ratio=0.41)


def evidence(kind: str = "died", *ranks: RankEvidence, load: EngineLoad = LOAD, **changes: Any) -> Evidence:
    """An engine that is gone, with its last load; of two ranks where none are given."""
    given: dict[str, Any] = {
        "kind": kind,
        "at": AT,
        "engine": EngineStatus(
            url="http://127.0.0.1:8000", state="gone", version="0.32.0", model="Qwen/Qwen3-VL-32B-Instruct"
        ),
        "ranks": ranks or (rank(reading(0)), rank(reading(1))),
    } | changes
    given.setdefault("ranks_expected", len(given["ranks"]))
    figures = {name: getattr(load, name) for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio")}
    known = {name: value for name, value in figures.items() if value is not None}
    return Evidence(**given | {"engine": replace(given["engine"], **known)})


def incident(incident_id: str = ID, **changes: Any) -> Incident:
    """One that was opened, with one rank and nothing made of it."""
    given: dict[str, Any] = {
        "id": incident_id,
        "kind": "died",
        "at": AT,
        "last_at": AT,
        "summary": "it died",
        "engine": EngineStatus(
            url="http://127.0.0.1:8000", state="gone", version="0.32.0", model="Qwen/Qwen3-VL-8B-Instruct"
        ),
        "ranks": (rank(),),
    }
    return Incident(**given | changes)


def numbered(number: int) -> str:
    """An id; the greater the number, the newer."""
    return f"20261121T{number:06d}Z-died"


def diagnosed(given: Evidence, log: LogStory = NO_LOG) -> tuple[Finding, ...]:
    return diagnose(of_incident(given, log))


def summarized(given: Evidence, log: LogStory = NO_LOG) -> str:
    case = of_incident(given, log)
    return summarize(case, diagnose(case))
