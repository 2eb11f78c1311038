"""The clocks that every part reads, handed on as one thing; and the machine's boot and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from highwater_worker.kernel import proc
from highwater_worker.kernel.proc import ROOT, read_stat

STOPPED_STATES: Final = frozenset("Tt")  # a process's states while a signal or a debugger has stopped it


@dataclass(frozen=True, slots=True)
class Clocks:
    """``wall``, Unix seconds, is for everything that people read; ``monotonic`` for everything that waits or measures.

    Where the recorders' files are read ``monotonic`` must be ``CLOCK_MONOTONIC``, which the workers of this machine
    share.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


SYSTEM: Final = Clocks()


class Machine:
    """The clocks and processes of this machine, whose ``/proc`` lies in ``root``."""

    def __init__(self, clocks: Clocks = SYSTEM, root: Path = ROOT) -> None:
        self.clock, self.monotonic = clocks.wall, clocks.monotonic
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


def local_time_text(at: float) -> str:
    """Return Unix seconds in this machine's time zone: ``2026-01-31 14:05:09``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
