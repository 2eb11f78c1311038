"""The record that a vLLM process writes of itself: every field bounded on entry, unknown fields ignored.

It reads no file. Sizes are bytes; docs/recorder-file.md is the contract.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import Field

from highwater.host.names import name_of
from highwater.host.reading import ROLES, Bytes, EngineMemorySettings, Index, Pid, ProcessFigures, Role, Text

_Seconds: TypeAlias = Annotated[float, Field(ge=0, le=2**63 - 1, allow_inf_nan=False)]
_Key: TypeAlias = Annotated[str, Field(max_length=48, pattern=r"^[a-z0-9_]+$")]
_ShmFiles: TypeAlias = Annotated[dict[_Key, tuple[Bytes, Bytes, Bytes]], Field(max_length=32)]
_Averages: TypeAlias = Annotated[tuple[_Seconds, ...], Field(min_length=4, max_length=4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCgroup:
    """A memory cgroup's counters as its kernel writes them, in bytes, at a time of the machine's monotonic clock.

    Attributes:
        inode: Of the group's folder: distinguishes containers of one machine.
        used: ``memory.current`` or ``memory.usage_in_bytes``.
        limit: The one with the least room, from the group upwards; ``kept`` is what its group cannot drop.
        pressure: ``some`` and ``full``: averages of 10, 60 and 300 s in percent, and the sum in microseconds.
        kernel: Version 1's ``memory.kmem.usage_in_bytes``.
    """

    version: Annotated[int, Field(ge=1, le=2, strict=True)]
    inode: Bytes | None = None
    path: Text = ""
    used: Bytes | None = None
    limit: Bytes | None = None
    kept: Bytes | None = None
    peak: Bytes | None = None
    kernel: Bytes | None = None
    sock: Bytes | None = None
    swap: Bytes | None = None
    swap_limit: Bytes | None = None
    stat: Annotated[dict[_Key, Bytes], Field(max_length=64)] = field(default_factory=dict)
    events: Annotated[dict[_Key, Bytes], Field(max_length=16)] = field(default_factory=dict)
    pressure: Annotated[dict[_Key, _Averages], Field(max_length=2)] | None = None
    mono: _Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RawShm:
    """``/dev/shm`` as a process sees it: by ``ShmState``, owners' files, their allocated and their promised bytes."""

    device: Bytes | None = None
    size: Bytes | None = None
    used: Bytes | None = None
    free: Bytes | None = None
    owners: _ShmFiles = field(default_factory=dict)
    unlinked: _ShmFiles = field(default_factory=dict)
    left_over: _ShmFiles = field(default_factory=dict)
    not_known: _ShmFiles = field(default_factory=dict)
    mono: _Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedProcess(ProcessFigures):
    """A process without a file of its own, as another one sees it."""

    pid: Pid
    name: Text = ""
    tracker: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    largest: Annotated[tuple[ListedProcess, ...], Field(max_length=32)] = ()
    mono: _Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord(ProcessFigures):
    """The record of one process.

    Attributes:
        at: Unix seconds; ``mono`` is the same moment on the machine's monotonic clock.
        pid_namespace: The inode of its PID namespace: in another one its ``pid`` means another process.
        index: Which of several processes of its role.
        others: Processes beside it that write no file.
        cpu_seconds: The CPU time of writing the records so far.
        age_seconds: By the best clock that is shared with the writer; set by the reader.
    """

    schema: Annotated[int, Field(ge=1, le=1, strict=True)]
    at: _Seconds
    mono: _Seconds
    pid: Pid
    boot_id: Text | None = None
    pid_namespace: Bytes | None = None
    vllm: Text | None = None
    role: Annotated[str, Field(max_length=32, pattern=r"^[a-z_]+$")]
    index: Index | None = None
    command: Text | None = None
    cgroup: RawCgroup | None = None
    shm: RawShm | None = None
    others: Listed | None = None
    engine: EngineMemorySettings | None = None
    cpu_seconds: _Seconds | None = None
    age_seconds: float = 0.0

    @property
    def known_role(self) -> Role:
        """Its role; ``other`` for the roles of a newer worker package."""
        return self.role if self.role in ROLES else "other"

    @property
    def name(self) -> str:
        return name_of(self.known_role, index=self.index, rank=self.rank, dp_rank=self.dp_rank, command=self.command)
