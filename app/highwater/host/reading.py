"""Host memory at one moment: the processes of the engine, the container as the kernel counts it, ``/dev/shm``.

All sizes are bytes. ``None`` is what could not be read, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Role: TypeAlias = Literal[
    "api_server", "launcher", "engine_core", "worker", "coordinator", "resource_tracker", "sidecar", "other"
]
"""What a process of the engine is.

``launcher`` is the process that starts several API servers, or several engines, and serves none itself.
"""

ROLES: tuple[Role, ...] = (
    "api_server",
    "launcher",
    "engine_core",
    "worker",
    "coordinator",
    "resource_tracker",
    "sidecar",
    "other",
)

Source: TypeAlias = Literal["file", "proc", "listed"]
"""Where the figures of a process are from: its own file, this machine's ``/proc``, or another process's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process.

    Attributes:
        role: What it is.
        name: What an operator calls it, unique among those that run: ``API server 0``, ``worker rank 1``.
        pid: As its own PID namespace numbers it.
        started: When it started, in the kernel's ticks since boot: distinguishes it from a later one of its pid.
        parent_pid: Of the process that started it.
        host: The name of its machine or container.
        container: The key of its container, as in ``ContainerMemory.key``.
        anonymous_bytes: Heap, stacks and other private memory in RAM (``RssAnon``). Pages that a forked child shares
            with its parent count in both.
        file_bytes: Mapped files in RAM (``RssFile``): libraries, weights. Shared with others, and page cache as well.
        shmem_bytes: Shared memory in RAM that it has mapped (``RssShmem``). Shared with others.
        swap_bytes: Anonymous memory that is swapped out (``VmSwap``).
        peak_bytes: The most that was resident since its start (``VmHWM``).
        threads: How many it has.
        descriptors: How many files, sockets and pipes it has open.
        descriptors_limit: How many it may have open at once (``RLIMIT_NOFILE``); ``None`` where that is not known.
        age_seconds: How old these figures are.
        source: Where they are from.
    """

    role: Role
    name: str
    pid: int
    started: int | None = None
    parent_pid: int | None = None
    host: str | None = None
    container: str | None = None
    rank: int | None = None
    dp_rank: int | None = None
    anonymous_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None
    swap_bytes: int | None = None
    peak_bytes: int | None = None
    threads: int | None = None
    descriptors: int | None = None
    descriptors_limit: int | None = None
    age_seconds: float = 0.0
    source: Source = "file"

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What a series of its figures hangs on: role, name and start."""
        return self.role, self.name, self.started

    @property
    def resident_bytes(self) -> int | None:
        """The part of it that is in RAM, as ``ps`` and ``top`` show it."""
        parts = [self.anonymous_bytes, self.file_bytes, self.shmem_bytes]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """The share of time in which tasks of the container waited for memory (PSI), in percent, and in total.

    Attributes:
        some_avg10: At least one task waited, over the last ten seconds; likewise 60 and 300.
        full_avg10: All tasks waited.
        some_seconds: In total; likewise full.
    """

    some_avg10: float | None = None
    some_avg60: float | None = None
    some_avg300: float | None = None
    full_avg10: float | None = None
    full_avg60: float | None = None
    full_avg300: float | None = None
    some_seconds: float | None = None
    full_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerMemory:
    """A container's memory as its kernel counts it: its memory cgroup.

    The kinds are exclusive: ``anonymous + shmem + page_cache + kernel + other = used``, where ``other`` is what the
    kernel charged and names nowhere.

    Attributes:
        key: Distinguishes it from other containers of the machine.
        host: The name by which it calls itself.
        version: Of the cgroup file system: 1 or 2.
        used_bytes: Charged (``memory.current``), page cache included.
        limit_bytes: Above which the kernel kills; ``None``: no limit.
        kept_bytes: What is charged to the group that has this limit, the container's own or one above it, without what
            its kernel drops before it kills anything. Without a limit: of the container's own.
        peak_bytes: The most that was charged.
        anonymous_bytes: Heap and other private memory.
        shmem_bytes: ``/dev/shm`` and other shared memory; a tmpfs volume too.
        page_cache_bytes: Pages of files, without shared memory.
        droppable_bytes: Of the page cache, what the kernel drops before it kills anything: pages that are clean or can
            be written back. All of it but what is locked into memory.
        kernel_bytes: The kernel's own for it: slab, page tables, stacks, socket buffers.
        reclaimable_kernel_bytes: Of that, slab that the kernel gives up as well.
        page_tables_bytes: Of the kernel's.
        sock_bytes: Of the kernel's: socket buffers.
        swap_bytes: Swapped out.
        swap_limit_bytes: How much may be; ``None``: no limit.
        events: The counters of ``memory.events``: ``high``, ``max``, ``oom``, ``oom_kill``, ``oom_group_kill``.
        pressure: Of the container; ``None`` where the kernel does not count it.
        age_seconds: How old these figures are.
        sees: Which process has read it: ``engine`` or ``sidecar``.
    """

    key: str
    host: str | None = None
    version: int | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    anonymous_bytes: int | None = None
    shmem_bytes: int | None = None
    page_cache_bytes: int | None = None
    droppable_bytes: int | None = None
    kernel_bytes: int | None = None
    reclaimable_kernel_bytes: int | None = None
    page_tables_bytes: int | None = None
    sock_bytes: int | None = None
    swap_bytes: int | None = None
    swap_limit_bytes: int | None = None
    events: dict[str, int] = field(default_factory=dict)
    pressure: Pressure | None = None
    age_seconds: float = 0.0
    sees: Literal["engine", "sidecar"] = "engine"

    @property
    def room_bytes(self) -> int | None:
        """How much more the container can take before the kernel kills; ``None`` without a limit."""
        if self.limit_bytes is None or self.kept_bytes is None:
            return None
        return max(0, self.limit_bytes - self.kept_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmOwner:
    """What the files of one owner take of ``/dev/shm``.

    Attributes:
        owner: ``rpc_rings``, ``processor_cache``, ``kv_offload``, ``nccl``, ``hccl``, ``torch``, ``ray``,
            ``recorder``, ``semaphores``, ``other``.
        files: How many there are.
        used_bytes: Allocated: what has been written.
        promised_bytes: Of their sizes, what is not allocated yet. Writing it needs no further permission, and ends the
            process with SIGBUS where there is no room left.
    """

    owner: str
    files: int
    used_bytes: int
    promised_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmMemory:
    """``/dev/shm`` of the engine.

    Attributes:
        size_bytes: The most that it holds.
        used_bytes: Allocated, of all owners.
        free_bytes: What can still be written.
        owners: The largest first.
        promised_bytes: What existing files may still allocate.
        age_seconds: How old these figures are.
        sees: Which process has read it: ``engine`` or ``sidecar``.
    """

    size_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    owners: tuple[ShmOwner, ...] = ()
    promised_bytes: int | None = None
    age_seconds: float = 0.0
    sees: Literal["engine", "sidecar"] = "engine"

    @property
    def short_bytes(self) -> int:
        """By how much it is too small for what existing files may still allocate; 0 where it is large enough."""
        if self.promised_bytes is None or self.free_bytes is None:
            return 0
        return max(0, self.promised_bytes - self.free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """The machine's memory: the room there is where no container has a limit.

    Attributes:
        total_bytes: ``MemTotal``.
        available_bytes: ``MemAvailable``: what can be had without swapping.
        pressure: Of the whole machine; ``None`` where the kernel does not count it.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    pressure: Pressure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemorySettings:
    """The engine's settings that decide about host memory, as a worker reports them. ``None``: not reported.

    Attributes:
        version: vLLM's.
        mm_processor_cache_gb: The limit of one processor cache, in GiB; 0: there is none.
        mm_processor_cache_type: ``lru`` or ``shm``.
        is_multimodal: Whether the model takes images, audio or video.
        api_servers: How many API servers there are.
        data_parallel: How many engines share the work; ``data_parallel_local`` of them on this machine.
        tensor_parallel: In how many parts each layer is computed.
        pipeline_parallel: How many stages one engine has.
        nodes: Over how many machines one engine runs.
        executor: ``mp``, ``uni``, ``ray`` or another.
        device: ``cpu``, ``cuda``, ``npu``.
        external_lb: Whether each data-parallel engine has an API server of its own.
        kv_offload: Whether KV blocks are kept in host memory.
        max_chunk_mb: ``VLLM_MQ_MAX_CHUNK_BYTES_MB``.
    """

    version: str | None = None
    mm_processor_cache_gb: float | None = None
    mm_processor_cache_type: str | None = None
    is_multimodal: bool | None = None
    api_servers: int | None = None
    data_parallel: int | None = None
    data_parallel_local: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    nodes: int | None = None
    executor: str | None = None
    device: str | None = None
    external_lb: bool | None = None
    kv_offload: bool | None = None
    max_chunk_mb: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Host memory at one moment.

    Attributes:
        taken_at: Unix seconds.
        processes: Those that run, in the order of their roles.
        container: The engine's, the one with most of its processes where there are several; ``None`` where unknown.
        other_containers: Those of other processes of the engine, and the sidecar's own where it is another.
        shm: ``/dev/shm`` of the engine; ``None`` where it cannot be seen.
        machine: The machine's memory.
        engine: The settings that decide about host memory; ``None`` where no worker reports them.
        problems: What could not be read, one sentence each.
    """

    taken_at: float
    processes: tuple[ProcessMemory, ...] = ()
    container: ContainerMemory | None = None
    other_containers: tuple[ContainerMemory, ...] = ()
    shm: ShmMemory | None = None
    machine: MachineMemory = field(default_factory=MachineMemory)
    engine: EngineMemorySettings | None = None
    problems: tuple[str, ...] = ()
