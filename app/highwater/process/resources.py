"""The resources of this process: open files, which bound its connections, and the C library's memory.

Pieces of a large body are 256 KB each. By default glibc maps and unmaps memory of that size at each call, and the
kernel clears every page again: more CPU than everything else that an upload costs. Retained, the same few pages are
used again.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from highwater_worker.kernel import proc
from highwater_worker.kernel.proc import ROOT, read_stat

STOPPED_STATES: Final = frozenset("Tt")  # a process's states while a signal or a debugger has stopped it


class Machine:
    """The clocks (Unix seconds, and ``CLOCK_MONOTONIC``, which all processes share) and processes of this machine."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        root: Path = ROOT,
    ) -> None:
        self.clock = clock
        self.monotonic = monotonic
        self._root = root
        self.boot_id = boot_id(root)
        self._pid_namespace: int | None = None
        with suppress(OSError):
            self._pid_namespace = proc.pid_namespace(root)

    def shares_processes(self, boot_id: str | None, pid_namespace: int | None) -> bool:
        """Return whether a process's number means the same here as where a file that names both was written."""
        return pid_namespace is not None and pid_namespace == self._pid_namespace and self.is_boot(boot_id)

    def is_boot(self, boot_id: str | None) -> bool:
        return boot_id is not None and boot_id == self.boot_id

    def process_state(self, pid: int, started: int | None) -> str | None:
        """Return the letter of a process's state; ``None`` where it does not exist, ``?`` where that is unknown.

        ``started``, in ticks since boot, distinguishes the process from a later one with its number.
        """
        try:
            stat = read_stat(pid, self._root)
            return stat.state if stat.started == started else None
        except (FileNotFoundError, ProcessLookupError):
            return None
        except (OSError, ValueError, IndexError):
            return "?"


def boot_id(root: Path = ROOT) -> str | None:
    try:
        return proc.boot_id(root) or None
    except OSError:
        return None


# Reserved for the control plane's connections, files and logs, and for the sidecar's paths once the connections for the
# engine are used up.
RESERVED = 96
# One core carries no more of them, and each costs memory.
MAX_CONNECTIONS = 16_384
_PER_CONNECTION = 2  # a client's, and the engine's for its request
# To a port that serves the control plane alone: live streams, scrapes, probes, operators. At most an eighth of the
# files.
MAX_CONTROL_CONNECTIONS = 256
_CONTROL_SHARE = 8
# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_HEAP_BLOCK_BYTES = 4 * 1024 * 1024
_RETAINED_AT_HEAP_END_BYTES = 16 * 1024 * 1024


def raise_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS names a hard limit that it does not grant
            return soft
    return hard


def room_at_most(*, has_control_port: bool = False) -> int:
    """Return how many clients may be connected to the data plane, beside a control port's, once the limit is raised."""
    return _room(resource.getrlimit(resource.RLIMIT_NOFILE)[1], has_control_port)


def default_connections(*, has_control_port: bool = False) -> int:
    return min(_room(resource.getrlimit(resource.RLIMIT_NOFILE)[0], has_control_port), MAX_CONNECTIONS)


def control_connections() -> int:
    return _for_control(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _for_control(limit: int) -> int:
    if limit == resource.RLIM_INFINITY:
        return MAX_CONTROL_CONNECTIONS
    return min(max(limit // _CONTROL_SHARE, 1), MAX_CONTROL_CONNECTIONS)


def _room(limit: int, has_control_port: bool) -> int:
    if limit == resource.RLIM_INFINITY:
        return 2**31
    reserved = RESERVED + (_for_control(limit) if has_control_port else 0)
    return max((limit - reserved) // _PER_CONNECTION, 1)


def retain_freed_memory() -> bool:
    """Retain freed pieces of bodies for the next ones; return whether that could be done (only with glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, macOS
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, _RETAINED_AT_HEAP_END_BYTES)
    )
