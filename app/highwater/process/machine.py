"""The machine as its clocks and ``/proc`` show it: the present boot, and the processes of this PID namespace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

# Fields of /proc/<pid>/stat, counted from behind the command's name; proc(5).
_STATE, _PARENT, _STARTED = 0, 1, 19
STOPPED_STATES: Final = frozenset("Tt")  # a process's states while a signal or a debugger has stopped it


class Machine:
    """The clocks (Unix seconds, and ``CLOCK_MONOTONIC``, which all processes share) and processes of this machine."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self.clock = clock
        self.monotonic = monotonic
        self.proc = proc
        self.boot_id = boot_id(proc)
        self._pid_namespace: int | None = None
        with suppress(OSError):
            self._pid_namespace = os.stat(proc / "self/ns/pid").st_ino

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
            fields = _stat_fields(self.proc, pid)
            return fields[_STATE] if int(fields[_STARTED]) == started else None
        except (FileNotFoundError, ProcessLookupError):
            return None
        except (OSError, ValueError, IndexError):
            return "?"


def boot_id(proc: Path = Path("/proc")) -> str | None:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def parent_and_start(proc: Path, pid: int) -> tuple[int, int]:
    """Return a process's parent, and its start in ticks since boot.

    Raises OSError (it does not exist, or is hidden); ValueError or IndexError for a line that is not understood.
    """
    fields = _stat_fields(proc, pid)
    return int(fields[_PARENT]), int(fields[_STARTED])


def _stat_fields(proc: Path, pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` behind the command's name, which may hold any character."""
    text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
