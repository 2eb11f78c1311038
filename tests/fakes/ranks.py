"""Readings and reports for the pure policy, built from what is in use; bytes are mem_get_info's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from highwater.model.engine import EngineStatus, MissingRank
from highwater.model.rank import Budget, Components, Device, EncoderCache, HostMemory, RankReading, TorchMemory
from highwater.model.report import Report

MIB = 1024**2
GIB = 1024**3
NO_HOST = HostMemory()
H100 = int(79.1 * GIB)
ASCEND = 65_452_113_920


def reading(
    rank: int = 0,
    *,
    total: int | None = H100,
    rest: int = 64 * GIB,
    encoder: int = 0,
    cached: int = 0,
    other: int = 0,
    requested: int | None = None,
    utilization: float | None = None,
    releasable: int | None = -1,
    trimmable: int | None = -1,
    retries: int | None = 0,
    split: int = 0,
    taken_at: float = 0.0,
    age_seconds: float = 0.0,
    device: str = "cuda",
    name: str | None = None,
    asleep: tuple[str, ...] | None = None,
    non_torch: int = GIB,
    host: HostMemory = NO_HOST,
    dp_rank: int = 0,
) -> RankReading:
    """One rank with so much in use; -1: as the worker would say it, all cached blocks and all encoder outputs."""
    used = rest + encoder + cached + other
    return RankReading(
        rank=rank,
        local_rank=rank,
        dp_rank=dp_rank,
        tp_rank=rank,
        pp_rank=0,
        host="node-a",
        pid=4242 + rank,
        taken_at=taken_at,
        age_seconds=age_seconds,
        device=Device(type=device, index=rank, physical_index=rank, name=name, uuid=f"gpu-{dp_rank}-{rank}"),
        total_bytes=total,
        free_bytes=total - used if total is not None else None,
        used_bytes=used,
        used_ratio=used / total if total else None,
        torch=TorchMemory(alloc_retries=retries, inactive_split_bytes=split),
        components=Components(
            weights_bytes=0,
            kv_cache_bytes=rest - non_torch,
            encoder_cache_bytes=encoder,
            other_tensors_bytes=other,
            torch_cached_bytes=cached,
            non_torch_bytes=non_torch,
        ),
        releasable_bytes=cached if releasable == -1 else releasable,
        trimmable_bytes=encoder if trimmable == -1 else trimmable,
        asleep_tags=asleep,
        encoder_cache=EncoderCache(entries=1, device_bytes=encoder) if encoder else None,
        budget=Budget(requested_bytes=requested, gpu_memory_utilization=utilization),
        host_memory=host,
    )


def report(
    *ranks: RankReading,
    state: Any = "ready",
    stale: bool = False,
    running: int | None = 1,
    waiting: int | None = 0,
    work_done: float | None = None,
    missing: Sequence[MissingRank] = (),
    **more: Any,
) -> Report:
    """A report of an engine at work."""
    return Report(
        taken_at=min((rank.taken_at for rank in ranks), default=None),
        stale=stale,
        engine=EngineStatus(
            url="http://engine",
            state=state,
            requests_running=running,
            requests_waiting=waiting,
            work_done=work_done,
        ),
        ranks=ranks,
        ranks_reported=len(ranks),
        ranks_missing=tuple(missing),
        **more,
    )
