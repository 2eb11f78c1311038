"""One worker's memory, as it reports it (op ``memory``; worker_ext/README.md is the contract), and accounted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, Self, TypeAlias

from kvplan import Platform

# A rank's reading comes from its response to our call, or from its recorder.
ReadingSource: TypeAlias = Literal["rpc", "recorder"]
EncoderUnprofiledBy: TypeAlias = Literal["skip_mm_profiling", "vllm_ascend", "runner_v2"]
RankKey: TypeAlias = tuple[int, int]

MAX_NUMBER: Final = 2**63 - 1
"""The largest number that is taken from another process: beyond it, sums in floats and in C would go wrong."""
RESPONSE_SCHEMA: Final = {"json_schema_serialization_defaults_required": True}
"""For pydantic: a response has every field, and its schema says so, also of fields that a default fills in."""


def key_of(dp_rank: int | None, rank: int | None) -> RankKey:
    """Return what identifies a worker across readings; an unknown number counts as 0."""
    return (dp_rank or 0, rank or 0)


def rank_title(dp_rank: int | None, rank: int | None, unknown: str = "?") -> str:
    """``1``, or ``2.1`` in data-parallel engine 2: each engine numbers its ranks from 0."""
    number = unknown if rank is None else str(rank)
    return f"{dp_rank}.{number}" if dp_rank else number


class Process(NamedTuple):
    """A process of the engine. A container gives a new process the number of the old one, not its start time."""

    host: str | None
    pid: int | None
    pid_started: int | None  # in the kernel's ticks since boot; `None` where it is unknown

    def is_same(self, other: Process) -> bool:
        if (self.host, self.pid) != (other.host, other.pid):
            return False
        return self.pid_started == other.pid_started or None in (self.pid_started, other.pid_started)


def names_text(labels: Sequence[str]) -> str:
    """Return the names of equal ranks: ``3``, ``0-3 6 (x5)``."""
    runs: list[list[str]] = []
    for label in labels:
        follows = bool(runs) and label.isdecimal() and runs[-1][-1].isdecimal() and int(label) == int(runs[-1][-1]) + 1
        runs[-1:] = [[*runs[-1], label]] if follows else [*runs[-1:], [label]]
    few = " ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:3])
    return f"{few}{' ..' if len(runs) > 3 else ''}{f' x{len(labels)}' if len(labels) > 1 else ''}"  # noqa: PLR2004


class _HasRank(Protocol):
    @property
    def rank(self) -> int | None: ...

    @property
    def dp_rank(self) -> int | None: ...


class Ranked:
    """The identity and the name of a value of one rank."""

    __slots__ = ()

    @property
    def key(self: _HasRank) -> RankKey:
        return key_of(self.dp_rank, self.rank)

    @property
    def label(self: _HasRank) -> str:
        return rank_title(self.dp_rank, self.rank)

    @property
    def name(self: _HasRank) -> str:
        return f"rank {rank_title(self.dp_rank, self.rank)}"


class Collectives(NamedTuple):
    """The collective library of a device family; its ranks share memory in /dev/shm."""

    name: str
    owner: str  # of its files there
    why_unsized: str  # why it is not known how much it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """What follows from a device's type. Advice is named as in ``advice.toml``."""

    platform: Platform | None = None  # by whose rules vLLM counts its memory; None: those were not read
    pretended_card: str | None = None  # which a plan pretends, whatever the device's name
    collectives: Collectives | None = None
    is_host_memory: bool = False  # its memory is its machine's, of which a rank counts its own process's
    fragments_below_allocator: bool = False  # images may, unless PyTorch's allocator has expandable segments
    has_nvml: bool = False  # which lists the processes on it
    release_frees: tuple[str, ...] = ("torch_cached_bytes",)  # the components, the last of which has what none has
    against_fragmentation: tuple[str, ...] = ()  # advice
    against_non_torch: tuple[str, ...] = ()  # advice, beside that for all devices


DEVICES: Final[Mapping[str, DeviceTraits]] = MappingProxyType(
    {
        "npu": DeviceTraits(
            platform="ascend",
            pretended_card="910B",
            collectives=Collectives("HCCL", "hccl", "CANN does not document it"),
            fragments_below_allocator=True,
            # empty_cache drops the operators' workspaces too.
            release_frees=("torch_cached_bytes", "non_torch_bytes"),
            against_fragmentation=("npu_expandable_segments", "npu_max_split"),
            against_non_torch=("hccl_buffsize",),
        ),
        "cuda": DeviceTraits(
            platform="cuda",
            collectives=Collectives(
                "NCCL", "nccl", "by topology: tens of MiB for each pair of GPUs without peer access"
            ),
            has_nvml=True,
            against_fragmentation=("cuda_expandable_segments",),
        ),
        "cpu": DeviceTraits(
            platform="cpu",
            # vllm 0.32.0 distributed/device_communicators/cpu_communicator.py:41.
            collectives=Collectives(
                "collectives of the CPU backend", "cpu_collectives", "with AVX-512 alone, by the threads"
            ),
            is_host_memory=True,
            release_frees=("non_torch_bytes",),  # the heap's free pages
        ),
    }
)
"""By the type of device, as PyTorch calls it: another family is a row here, and a class in the worker's ``devices``.

A plan of one whose vLLM has rules of its own needs those in ``kvplan`` too; until then it is refused.
"""
_UNKNOWN_DEVICE: Final = DeviceTraits()


def device_traits(device_type: str | None) -> DeviceTraits:
    return DEVICES.get(device_type or "", _UNKNOWN_DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    type: str | None = None  # one of `DEVICES`; `None` where the worker does not name its device
    index: int | None = None  # as the worker's process numbers it; `None` on CPU
    physical_index: int | None = None  # as the machine numbers it
    name: str | None = None
    uuid: str | None = None  # the vendor's own identity of it

    @property
    def traits(self) -> DeviceTraits:
        return device_traits(self.type)


def device_title(device: Device) -> str:
    kind = device.type or "unknown"
    return kind if device.index is None else f"{kind}:{device.index}"


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
    # Summed over the ranks, as `host_bytes`. A rank's own is what its entries hold, with which its budget is compared;
    # the component `encoder_cache_bytes`, for policy and charts, is as much of that as fits into what is in use.
    device_bytes: int
    host_bytes: int = 0
    capacity_embeds: int | None = None  # the scheduler's budget, in embeddings; vLLM evicts lazily and stays near it
    oldest_age_seconds: float | None = None  # since the oldest entry of any rank was first seen by us: a lower bound
    # Of the rank with the most: entries moved to host memory so far, each as often as it moved, and moved back.
    spills: int = 0
    restores: int = 0
    restore_seconds: float = 0.0  # the time that the latter took

    @property
    def held_bytes(self) -> int:
        """Bytes on device and host together; the fullest cache is the one with the most."""
        return self.device_bytes + self.host_bytes

    @classmethod
    def of(cls, ranks: Sequence[RankMemory]) -> Self | None:
        caches = [rank.encoder_cache for rank in ranks if rank.encoder_cache is not None]
        if not caches:
            return None

        def over_all(name: str) -> Any:  # noqa: ANN401 - a field's value
            values = [value for cache in caches if (value := getattr(cache, name)) is not None]
            return sum(values) if name in {"device_bytes", "host_bytes"} else max(values, default=None)

        return cls(**{field.name: over_all(field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCache(EncoderCacheTotals):
    """One worker's encoder cache; storages shared by several entries count once."""

    host_entries: int = 0  # entries in host memory
    embeds: int | None = None  # the number of cached embeddings, also on the host; `None` from older worker extensions

    @property
    def budget_bytes(self) -> int | None:
        """The size that it can grow to, device and host, by the bytes that it holds now for each embedding."""
        return self.bytes_of(self.capacity_embeds)

    def bytes_of(self, embeds: int | None) -> int | None:
        """Return the bytes of so many embeddings, by those that it holds now; ``None`` where it holds none."""
        return embeds * self.held_bytes // self.embeds if embeds and self.embeds and self.held_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """vLLM's share of the device, which it took at start: ``gpu_memory_utilization`` times total."""

    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    headroom_bytes: int | None = None  # the device's free bytes, of a reading that is accounted for


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

    @property
    def share(self) -> tuple[int | None, int | None]:
        """The used and the total bytes, of its control group or else of the node."""
        if self.cgroup_limit_bytes and self.cgroup_used_bytes is not None:
            return self.cgroup_used_bytes, self.cgroup_limit_bytes
        if self.node_total_bytes and self.node_available_bytes is not None:
            return self.node_total_bytes - self.node_available_bytes, self.node_total_bytes
        return None, None

    @property
    def used_ratio(self) -> float | None:
        used, total = self.share
        return used / total if used is not None and total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory(Ranked):
    """One rank's memory at one moment; ``WorkerMemory`` is it as reported, ``RankReading`` as accounted for."""

    rank: int | None = None
    local_rank: int | None = None
    dp_rank: int | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    pid_started: int | None = None  # when its process was started, in the kernel's ticks since boot
    taken_at: float  # Unix seconds; by the clock of the rank's own machine only as its worker responds
    device: Device
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    torch: TorchMemory = TorchMemory()
    releasable_bytes: int | None = None  # the device would gain so much by a `release` now
    # And so much by a trim without a target; `None` also where the worker would refuse to trim.
    trimmable_bytes: int | None = None
    asleep_tags: tuple[str, ...] | None = None  # the parts of the engine that are asleep (`weights`, `kv_cache`)
    encoder_cache: EncoderCache | None = None
    start: tuple[StartPhase, ...] = ()  # the phases of its start; empty where nobody saw them
    host_memory: HostMemory = HostMemory()
    notes: tuple[Note, ...] = ()

    @property
    def process(self) -> Process:
        return Process(self.host, self.pid, self.pid_started)

    @property
    def device_id(self) -> str | None:
        """The device's identity on its machine; ``None`` where it is unknown, and on CPU."""
        if self.device.uuid is not None:
            return f"{self.host}/{self.device.uuid}"
        if self.device.physical_index is not None:
            return f"{self.host}/{self.device.type}:{self.device.physical_index}"
        return None

    @property
    def card(self) -> str:
        """A key that two ranks have in common if they are on one device, and only then.

        On CPU each rank counts its own process's memory, so that no two of them share any. Where a device's identity
        and number on its machine are unknown, two of the same index may be two devices: in two engines each sees its
        own as 0.
        """
        return self.device_id or "rank {}.{}".format(*self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory(RankMemory):
    """One worker's response to op ``memory``."""

    rank: int | None
    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    budget: Budget = Budget()


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Exclusive parts of ``used_bytes``; the known ones sum to it exactly. Their meanings: components.py."""

    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    encoder_cache_bytes: int | None = None
    other_tensors_bytes: int | None = None
    torch_cached_bytes: int | None = None
    non_torch_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading(RankMemory):
    """One rank's memory, accounted for."""

    __pydantic_config__ = RESPONSE_SCHEMA

    used_ratio: float | None = None
    components: Components = Components()
    budget: Budget = Budget()
    launch: Launch = Launch()
    shared_with: str | None = None  # who else uses its device, as far as that is known
    age_seconds: float = 0.0  # at the time of the report
    source: ReadingSource = "rpc"

    @property
    def may_fragment(self) -> bool:
        """True if images may fragment the memory below PyTorch's allocator, so that what is not its grows.

        On an NPU that is not known to have expandable segments (vllm-ascend issue 5339 and pull request 5855).
        """
        serves_images = self.device.traits.fragments_below_allocator and self.encoder_cache is not None
        return serves_images and self.launch.expandable_segments is not True


def are_recorded(ranks: Sequence[RankReading]) -> bool:
    return bool(ranks) and all(rank.source == "recorder" for rank in ranks)
