"""One worker's memory, as it reports it (op ``memory``; worker_ext/README.md is the contract), and accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from highwater.readings.schema import RESPONSE_SCHEMA

# A rank's reading comes from its response to our call, or from its recorder.
ReadingSource: TypeAlias = Literal["rpc", "recorder"]
EncoderUnprofiledBy: TypeAlias = Literal["skip_mm_profiling", "vllm_ascend", "runner_v2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    type: str | None = None  # `npu`, `cuda` or `cpu`; `None` where the worker does not name its device
    index: int | None = None  # as the worker's process numbers it; `None` on CPU
    physical_index: int | None = None  # as the machine numbers it
    name: str | None = None
    uuid: str | None = None  # the vendor's own identity of it


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMemory:
    """The caching allocator's own statistics (``torch.<device>.memory_stats``); all ``None`` on CPU."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCacheTotals:
    __pydantic_config__ = RESPONSE_SCHEMA

    entries: int  # images and other items of the rank that holds most: every tensor-parallel rank holds a full copy
    device_bytes: int  # summed over the ranks, as `host_bytes`
    host_bytes: int = 0
    capacity_embeds: int | None = None  # the scheduler's budget, in embeddings; vLLM evicts lazily and stays near it
    oldest_age_seconds: float | None = None  # since the oldest entry of any rank was first seen by us: a lower bound
    # Entries moved to host memory so far, of the rank with the most, one that moved twice counted twice; likewise
    # `restores` and the time that they took.
    spills: int = 0
    restores: int = 0
    restore_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCache(EncoderCacheTotals):
    """One worker's encoder cache; storages shared by several entries count once."""

    host_entries: int = 0  # entries in host memory
    embeds: int | None = None  # the number of cached embeddings, also on the host; `None` from older worker extensions


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBudget:
    """The memory that vLLM took for itself at start (``gpu_memory_utilization`` times total)."""

    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    init_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPhase:
    """One phase of a worker's start, as the worker package's plugin saw it; bytes are as of its end."""

    name: str  # `before`, `init`, `weights`, `profile`, `kv_cache`, `graphs` or `warm_up`
    at: float  # when it began, in Unix seconds
    seconds: float
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None
    error: str | None = None  # the exception that ended it, in one line; `None` where it succeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The settings of a worker's start that its memory depends on later; ``None``: not known."""

    # Whether its allocator has expandable segments, on an NPU; `sleep_mode` excludes them there.
    expandable_segments: bool | None = None
    sleep_mode: bool | None = None
    kv_cache_given: bool | None = None  # whether the KV cache's size was given: the utilization has no effect then
    # Why the start did not count the multimodal encoder; `None` also where it did, and without an encoder.
    encoder_unprofiled_by: EncoderUnprofiledBy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    rss_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    node_total_bytes: int | None = None
    node_available_bytes: int | None = None
    pinned_bytes: int | None = None  # locked in place for copies to and from the device
    cgroup_oom_kills: int | None = None  # the processes of its container that the kernel has killed for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory at one moment; ``WorkerMemory`` is it as reported, ``RankReading`` as accounted for."""

    rank: int | None = None
    local_rank: int | None = None
    dp_rank: int | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    pid_started: int | None = None  # when its process was started, in the kernel's ticks since boot
    taken_at: float  # by the clock of the rank's own machine, which may differ from ours
    device: Device
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    torch: TorchMemory = TorchMemory()
    releasable_bytes: int | None = None  # the device would gain so much by a `release` now
    # Likewise by a trim without a target; `None` also where the worker would refuse to trim.
    trimmable_bytes: int | None = None
    asleep_tags: tuple[str, ...] | None = None  # the parts of the engine that are asleep (`weights`, `kv_cache`)
    encoder_cache: EncoderCache | None = None
    start: tuple[StartPhase, ...] = ()  # the phases of its start; empty where nobody saw them
    host_memory: HostMemory = HostMemory()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory(RankMemory):
    """One worker's response to op ``memory``."""

    rank: int | None
    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    budget: WorkerBudget = WorkerBudget()


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Exclusive parts of ``used_bytes``; the known ones sum to it exactly. Their meanings: accounting/components.py."""

    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    encoder_cache_bytes: int | None = None
    other_tensors_bytes: int | None = None
    torch_cached_bytes: int | None = None
    non_torch_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """vLLM's share of the device."""

    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    headroom_bytes: int | None = None  # the device's free bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading(RankMemory):
    """One rank's memory, accounted for."""

    __pydantic_config__ = RESPONSE_SCHEMA

    used_ratio: float | None = None
    components: Components = Components()
    budget: Budget = Budget()
    launch: Launch = Launch()
    shared_with: str | None = None  # who else uses its device, as far as that is known
    age_seconds: float = 0.0  # at the time of the report, whatever the rank's clock says
    source: ReadingSource = "rpc"


def are_recorded(ranks: Sequence[RankReading]) -> bool:
    return bool(ranks) and all(rank.source == "recorder" for rank in ranks)
