"""The record that a vLLM process writes of itself, validated on entry: every field bounded, unknown ones ignored.

It reads no file. Sizes are bytes; docs/recorder.md is the contract.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, TypeAlias

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_MAX_NUMBER = 2**63 - 1

_Bytes: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_NUMBER, strict=True)]
_Index: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000, strict=True)]
_Seconds: TypeAlias = Annotated[float, Field(ge=0, le=_MAX_NUMBER, allow_inf_nan=False)]
_Word: TypeAlias = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]
_Key: TypeAlias = Annotated[str, Field(max_length=48, pattern=r"^[a-z0-9_]+$")]
_Pid: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
_CONFIG = ConfigDict(extra="ignore")


@dataclass(config=_CONFIG, frozen=True, slots=True, kw_only=True)
class RawCgroup:
    """A memory cgroup's counters as its kernel writes them, in bytes.

    Attributes:
        version: Of the cgroup file system.
        inode: Of the group's folder: distinguishes containers of one machine.
        path: As the process sees it.
        used: ``memory.current`` or ``memory.usage_in_bytes``.
        limit: The one with the least room, from the group upwards; ``kept`` is what its group cannot drop.
        stat: Of ``memory.stat``.
        events: Of ``memory.events``, or the same from version 1's files.
        pressure: ``some`` and ``full``: averages of 10, 60 and 300 s in percent, and the sum in microseconds.
        kernel: Version 1's ``memory.kmem.usage_in_bytes``.
        mono: When it was read.
    """

    version: Annotated[int, Field(ge=1, le=2, strict=True)]
    inode: _Bytes | None = None
    path: _Word = ""
    used: _Bytes | None = None
    limit: _Bytes | None = None
    kept: _Bytes | None = None
    peak: _Bytes | None = None
    kernel: _Bytes | None = None
    sock: _Bytes | None = None
    swap: _Bytes | None = None
    swap_limit: _Bytes | None = None
    stat: Annotated[dict[_Key, _Bytes], Field(max_length=64)] = field(default_factory=dict)
    events: Annotated[dict[_Key, _Bytes], Field(max_length=16)] = field(default_factory=dict)
    pressure: (
        Annotated[dict[_Key, Annotated[tuple[_Seconds, ...], Field(min_length=4, max_length=4)]], Field(max_length=2)]
        | None
    ) = None
    mono: _Seconds = 0.0


@dataclass(config=_CONFIG, frozen=True, slots=True, kw_only=True)
class RawShm:
    """``/dev/shm`` as a process sees it; for each owner the files, their allocated bytes, and those still promised."""

    device: _Bytes | None = None
    size: _Bytes | None = None
    used: _Bytes | None = None
    free: _Bytes | None = None
    owners: Annotated[dict[_Key, tuple[_Bytes, _Bytes, _Bytes]], Field(max_length=32)] = field(default_factory=dict)
    is_cut: bool = False
    mono: _Seconds = 0.0


@dataclass(config=_CONFIG, frozen=True, slots=True, kw_only=True)
class ListedProcess:
    """A process without a file of its own, as another one sees it."""

    pid: _Pid
    started: _Bytes | None = None
    name: _Word = ""
    tracker: bool = False
    anonymous_bytes: _Bytes | None = None
    file_bytes: _Bytes | None = None
    shmem_bytes: _Bytes | None = None
    swap_bytes: _Bytes | None = None
    peak_bytes: _Bytes | None = None
    threads: _Bytes | None = None


@dataclass(config=_CONFIG, frozen=True, slots=True, kw_only=True)
class Listed:
    """The largest processes without files, and how many there are."""

    total: _Bytes = 0
    largest: Annotated[tuple[ListedProcess, ...], Field(max_length=32)] = ()
    mono: _Seconds = 0.0


@dataclass(config=_CONFIG, frozen=True, slots=True, kw_only=True)
class RawMachine:
    """The machine's memory."""

    total_bytes: _Bytes | None = None
    available_bytes: _Bytes | None = None


@dataclass(config=_CONFIG, frozen=True, slots=True, kw_only=True)
class RawEngine:
    """The engine's settings that decide about host memory; names as in ``EngineMemorySettings``."""

    mm_processor_cache_gb: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)] | None = None
    mm_processor_cache_type: _Word | None = None
    is_multimodal: bool | None = None
    api_servers: _Index | None = None
    data_parallel: _Index | None = None
    data_parallel_local: _Index | None = None
    tensor_parallel: _Index | None = None
    pipeline_parallel: _Index | None = None
    nodes: _Index | None = None
    executor: _Word | None = None
    device: _Word | None = None
    external_lb: bool | None = None
    kv_offload: bool | None = None
    max_chunk_mb: _Index | None = None


@dataclass(config=_CONFIG, frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """The record of one process.

    Attributes:
        at: Unix seconds; ``mono`` on the machine's monotonic clock.
        pid_namespace: The inode of its PID namespace: in another one its ``pid`` means another process.
        index: Which of several of its role.
        others: Processes beside it that write no file.
    """

    schema: Annotated[int, Field(ge=1, le=1, strict=True)]
    at: _Seconds
    mono: _Seconds
    pid: _Pid
    started: _Bytes | None = None
    boot_id: _Word | None = None
    host: _Word | None = None
    pid_namespace: _Bytes | None = None
    vllm: _Word | None = None
    role: Annotated[str, Field(max_length=32, pattern=r"^[a-z_]+$")]
    index: _Index | None = None
    rank: _Index | None = None
    dp_rank: _Index | None = None
    command: _Word | None = None
    parent_pid: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] | None = None
    anonymous_bytes: _Bytes | None = None
    file_bytes: _Bytes | None = None
    shmem_bytes: _Bytes | None = None
    swap_bytes: _Bytes | None = None
    peak_bytes: _Bytes | None = None
    threads: _Bytes | None = None
    descriptors: _Bytes | None = None
    descriptors_limit: _Bytes | None = None
    cgroup: RawCgroup | None = None
    shm: RawShm | None = None
    machine: RawMachine | None = None
    others: Listed | None = None
    engine: RawEngine | None = None
    cost_ms: _Seconds | None = None
    cpu_seconds: _Seconds | None = None
