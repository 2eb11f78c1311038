"""The engine's lives as its processes' files show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Process(NamedTuple):
    """A process of the engine. A container gives a new process the number of the old one, not its start time."""

    host: str | None
    pid: int | None
    pid_started: int | None  # in the kernel's ticks since boot; `None` where it is unknown

    def is_same(self, other: Process) -> bool:
        if (self.host, self.pid) != (other.host, other.pid):
            return False
        return self.pid_started == other.pid_started or None in (self.pid_started, other.pid_started)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLife:
    """The end of a life of the engine that was never ready, in words that a sentence goes on with.

    Attributes:
        how: ``was killed by the kernel for memory``, ``ended without a word``.
        memory: The container's memory against its limit: ``1,250.0 of 1,250.0 MiB``; empty where it is not known.
        processes: Those that it left, with the most that each had resident; empty where none is known.
        oom_kills: The kills for memory that the kernel counted in its container while it ran.
    """

    how: str
    memory: str = ""
    processes: str = ""
    oom_kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLife:
    """One life of the engine by its processes' files.

    Attributes:
        processes: All that are known of it, whether they run or not.
        last_at: When one of them wrote last, in Unix seconds.
        is_running: One of them runs, as far as is known, and not only what a killed API server left.
        has_server: One of them, ended or not, is an API server, a launcher or a container's first process.
        is_serving: Such a process wrote just now; of a life without one, any process did.
        end: How it ended, if it has.
    """

    processes: frozenset[Process]
    last_at: float
    is_running: bool
    has_server: bool
    is_serving: bool
    end: EndedLife
