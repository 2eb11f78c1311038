"""Host memory at one moment: the processes of the engine, the container as the kernel counts it, ``/dev/shm``.

All sizes are bytes. ``None`` is what could not be read, never 0. The annotations bound what other processes report
(``process_files``); nothing is checked where this process makes a value itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal, TypeAlias, get_args

from pydantic import Field

from highwater.model.rank import Process, rank_title

Role: TypeAlias = Literal[
    "api_server", "launcher", "engine_core", "worker", "coordinator", "resource_tracker", "sidecar", "other"
]
"""The part of the engine that a process is.

``launcher`` starts several API servers, or several engines, and serves no requests itself.
"""
ROLES: tuple[Role, ...] = get_args(Role)

Source: TypeAlias = Literal["file", "proc", "listed"]
"""The origin of a process's figures: its own file, this machine's ``/proc``, or another process's file."""
Observer: TypeAlias = Literal["engine", "sidecar"]
"""The side whose process read the figures."""

SHM: Final = "/dev/shm"  # noqa: S108 - a name to show
ShmState: TypeAlias = Literal["in_use", "unlinked", "left_over", "not_known"]
"""The knowledge of who has files of ``/dev/shm`` open.

``unlinked``: their names are gone, and processes have them mapped. ``left_over``: none has them open. ``not_known``:
not every process that may have them open is seen.
"""

NO_FILES: Final = (
    "no process of the engine writes a file: vLLM needs HIGHWATER_RECORDER_DIR in its environment and the worker "
    "package of this version"
)
"""The problem of a folder that the sidecar has been given and in which nobody has written."""

# From such a share of the limit on a container was short of memory: the last look is up to a second before the kernel's
# kill, and of most processes up to ten.
NEARLY_FULL_RATIO: Final = 0.9

Bytes: TypeAlias = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
Index: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000, strict=True)]
Pid: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Text: TypeAlias = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=2**63 - 1, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process of the engine as its kernel counts it, under its own PID namespace's ``pid``.

    Attributes:
        name: Its display name, unique among those that run: ``API server 0``, ``worker rank 1``.
        started: In the kernel's ticks since boot: distinguishes it from a later process of its pid.
        host: The name of its machine or container.
        anonymous_bytes: Heap, stacks and other private memory in RAM (``RssAnon``). Pages that a forked child shares
            with its parent count in both.
        file_bytes: Mapped files in RAM (``RssFile``): libraries, weights. Shared with others, and page cache as well.
        shmem_bytes: Shared memory in RAM that it has mapped (``RssShmem``). Shared with others.
        swap_bytes: Anonymous memory that is swapped out (``VmSwap``).
        peak_bytes: The most that was resident since its start (``VmHWM``).
        descriptors: Open files, sockets and pipes, of ``descriptors_limit`` (``RLIMIT_NOFILE``) at most; ``None``: no
            limit, or not known.
        container: As ``ContainerMemory.key``.
        run_seconds: How long it had run when it wrote last; ``None``: not known, and negative after a suspension.
    """

    started: Bytes | None = None
    parent_pid: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] | None = None
    host: Text | None = None
    rank: Index | None = None
    dp_rank: Index | None = None
    anonymous_bytes: Bytes | None = None
    file_bytes: Bytes | None = None
    shmem_bytes: Bytes | None = None
    swap_bytes: Bytes | None = None
    peak_bytes: Bytes | None = None
    threads: Bytes | None = None
    descriptors: Bytes | None = None
    descriptors_limit: Bytes | None = None
    role: Role
    name: Text
    pid: Pid
    container: Text | None = None
    age_seconds: float = 0.0
    run_seconds: float | None = None
    source: Source = "file"

    @property
    def process(self) -> Process:
        return Process(self.host, self.pid, self.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureStall:
    """The share of time in which ``some`` or all (``full``) tasks waited for memory (PSI).

    Percent over the last 10, 60 and 300 seconds, and the seconds in total.
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
        version: Of the cgroup file system: 1 or 2.
        used_bytes: Charged (``memory.current``), page cache included.
        limit_bytes: Above which the kernel kills; ``None``: no limit.
        kept_bytes: What is charged to the group that has this limit, the container's own or one above it, without what
            its kernel drops before it kills anything. Without a limit: of the container's own.
        shmem_bytes: ``/dev/shm`` and other shared memory; a tmpfs volume too.
        page_cache_bytes: Pages of files, without shared memory.
        droppable_bytes: The part of the page cache that the kernel drops before it kills anything: pages that are clean
            or can be written back. All of it but what is locked into memory.
        kernel_bytes: The kernel's own for it: slab, page tables, stacks, socket buffers.
        reclaimable_kernel_bytes: Of that, slab that the kernel gives up as well.
        page_tables_bytes: Of the kernel's; likewise ``sock_bytes``, the socket buffers.
        events: The counters of ``memory.events``: ``high``, ``max``, ``oom``, ``oom_kill``, ``oom_group_kill``.
        pressure: ``None`` where the kernel does not count it.
        is_private: Its processes have a PID namespace of their own: it began with them, and so did its counters.
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
    pressure: PressureStall | None = None
    age_seconds: float = 0.0
    sees: Observer = "engine"
    is_private: bool = False

    @property
    def room_bytes(self) -> int | None:
        """The bytes that the container can still take before the kernel kills; ``None`` without a limit."""
        if self.limit_bytes is None or self.kept_bytes is None:
            return None
        return max(0, self.limit_bytes - self.kept_bytes)

    @property
    def kept_ratio(self) -> float | None:
        return self.kept_bytes / self.limit_bytes if self.limit_bytes and self.kept_bytes is not None else None

    @property
    def is_nearly_full(self) -> bool:
        return (self.kept_ratio or 0.0) >= NEARLY_FULL_RATIO

    @property
    def oom_kills(self) -> int:
        return self.events.get("oom_kill", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedProcess(ProcessMemory):
    """A process that has left its file, with the figures of its last write; ``age_seconds`` is since then.

    Attributes:
        is_known: True if it has certainly ended; else it is only silent: it runs in a PID namespace that is not seen.
        last_container: Its container by its own last look, whose age is since then.
    """

    is_known: bool = False
    last_container: ContainerMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmOwner:
    """The files of one owner in ``/dev/shm`` of which the same is known: how many, and their allocated bytes.

    Attributes:
        owner: As the worker package's ``owner_of`` tells it from a file's name.
        promised_bytes: The part of their sizes that is not allocated yet. Writing it needs no further permission, and
            ends the process with SIGBUS where there is no room left.
    """

    owner: str
    state: ShmState = "in_use"
    files: int
    used_bytes: int
    promised_bytes: int = 0

    @property
    def is_in_use(self) -> bool:
        return self.state in {"in_use", "unlinked"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmMemory:
    """``/dev/shm`` of the engine; the largest owner first.

    Attributes:
        size_bytes: ``None``: not known, or no limit; likewise ``used_bytes`` and ``free_bytes``.
        promised_bytes: Of files in use: nobody writes into the others.
    """

    size_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    owners: tuple[ShmOwner, ...] = ()
    promised_bytes: int | None = None
    age_seconds: float = 0.0
    sees: Observer = "engine"

    @property
    def short_bytes(self) -> int:
        """By how much it is too small for what files in use may still allocate; 0 where it is large enough."""
        if self.promised_bytes is None or self.free_bytes is None:
            return 0
        return max(0, self.promised_bytes - self.free_bytes)

    @property
    def left_over_bytes(self) -> int:
        return sum(one.used_bytes for one in self.owners if one.state == "left_over")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """``MemTotal``, ``MemAvailable`` and the pressure of the machine: the room where no container has a limit."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    pressure: PressureStall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemorySettings:
    """The engine's settings that decide about host memory, as a worker reports them. ``None``: not reported.

    Attributes:
        mm_processor_cache_gb: The limit of one processor cache, in GiB; 0: it is off.
        mm_processor_cache_type: ``lru`` or ``shm``.
        data_parallel: How many engines share the work; ``data_parallel_local`` of them run on this machine.
        nodes: Over how many machines one engine runs.
        executor: ``mp``, ``uni``, ``ray`` or another.
        external_lb: Each data-parallel engine has an API server of its own.
        max_chunk_mb: ``VLLM_MQ_MAX_CHUNK_BYTES_MB``.
        grpc: The command line opens a gRPC port.
    """

    version: Text | None = None
    mm_processor_cache_gb: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)] | None = None
    mm_processor_cache_type: Text | None = None
    is_multimodal: bool | None = None
    api_servers: Index | None = None
    data_parallel: Index | None = None
    data_parallel_local: Index | None = None
    tensor_parallel: Index | None = None
    pipeline_parallel: Index | None = None
    nodes: Index | None = None
    executor: Text | None = None
    device: Text | None = None
    external_lb: bool | None = None
    kv_offload: bool | None = None
    max_chunk_mb: Index | None = None
    grpc: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Host memory at one moment.

    Attributes:
        taken_at: By this machine's clock, in Unix seconds.
        processes: Those that run, in the order of their roles.
        ended: Those that have left their files in the last minutes and do not run, or are silent; the freshest first.
        container: The engine's, the one with most of its processes where there are several; ``None`` where unknown.
        other_containers: Those of other processes of the engine, and the sidecar's own where it is another.
        shm: ``None`` where it cannot be seen.
        engine: ``None`` where no worker reports its settings.
        problems: What could not be read, one sentence each.
    """

    taken_at: float
    processes: tuple[ProcessMemory, ...] = ()
    ended: tuple[EndedProcess, ...] = ()
    container: ContainerMemory | None = None
    other_containers: tuple[ContainerMemory, ...] = ()
    shm: ShmMemory | None = None
    machine: MachineMemory = field(default_factory=MachineMemory)
    engine: EngineMemorySettings | None = None
    problems: tuple[str, ...] = ()

    @property
    def containers(self) -> tuple[ContainerMemory, ...]:
        return self.other_containers if self.container is None else (self.container, *self.other_containers)


# --- display names ---

# Of the same container, and of no engine.
_FOREIGN: Final = frozenset({"sidecar", "other"})
# Other roles' titles are their names.
_TITLES: Final[dict[Role, str]] = {
    "api_server": "API server",
    "engine_core": "EngineCore",
    "coordinator": "DP coordinator",
}


def name_of(
    role: Role,
    *,
    index: int | None = None,
    rank: int | None = None,
    dp_rank: int | None = None,
    command: str | None = None,
) -> str:
    """Return a process's name: ``EngineCore 1``, ``worker rank 2.1``, ``other python3``."""
    title = _TITLES.get(role, role.replace("_", " "))
    if role == "worker" and rank is not None:
        return f"{title} rank {rank_title(dp_rank, rank)}"
    if role == "engine_core" and index is None and dp_rank:
        return f"{title} {dp_rank}"
    if role == "other" and command:
        return f"{title} {command}"
    return title if index is None else f"{title} {index}"


def named_apart(processes: Iterable[ProcessMemory]) -> tuple[ProcessMemory, ...]:
    """Return them in the order of their roles, with the pid behind a name that several have."""

    def natural(name: str) -> tuple[object, ...]:
        head, _, tail = name.rpartition(" ")
        numbers = tail.split(".")
        return (head, 0, *map(int, numbers)) if all(one.isascii() and one.isdigit() for one in numbers) else (name, 1)

    ordered = sorted(processes, key=lambda one: (ROLES.index(one.role), natural(one.name), one.host or "", one.pid))
    counts = Counter(one.name for one in ordered)
    return tuple(one if counts[one.name] == 1 else replace(one, name=f"{one.name} (pid {one.pid})") for one in ordered)


def bare_name(name: str) -> str:
    return name.partition(" (pid ")[0]


def of_engine(processes: Iterable[ProcessMemory]) -> int:
    return sum(one.role not in _FOREIGN for one in processes)
