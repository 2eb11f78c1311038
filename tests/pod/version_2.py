"""A control group of version 2 as files, for a kernel that counts memory by version 1; not the kernel's own.

The files are written after Documentation/admin-guide/cgroup-v2.rst ("Memory Interface Files"), with what the kernel
counts by version 1. With `memory.oom.group`, which Kubernetes sets, a kill ends every process of the group at once:
here it ends them a moment after the kernel has killed the first.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.pod.container import counter
from tests.pod.pod import Container

LOOK_SECONDS = 0.02
WRITE_EVERY = 5
_STAT = {
    "anon": "total_rss",
    "file": "total_cache",
    "shmem": "total_shmem",
    "active_file": "total_active_file",
    "inactive_file": "total_inactive_file",
}


class Version2:
    """Shows a container its group as one of version 2, and ends it whole; a context manager.

    Args:
        container: Not started yet.
        folder: Gets the files, in a folder for each life.
    """

    def __init__(self, container: Container, folder: Path) -> None:
        self._container, self._folder = container, folder
        self._is_done = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="version 2")

    def __enter__(self) -> Self:
        self._container.shown = self._folder
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._show()
        except Exception as exc:  # noqa: BLE001 - raised by `__exit__`: a thread's would fail no test
            self._failure = exc

    def _show(self) -> None:
        looks = 0
        while not self._is_done.wait(LOOK_SECONDS):
            group = self._container.group
            if counter(group, "memory.oom_control", "oom_kill"):
                self._container.kill()
            if (looks := looks + 1) % WRITE_EVERY == 0 and (self._folder / group.name).exists():
                self._write(group)

    def _write(self, group: Path) -> None:
        stat = {name: counter(group, "memory.stat", theirs) or 0 for name, theirs in _STAT.items()}
        kernel = counter(group, "memory.kmem.usage_in_bytes") or 0
        files = {
            "memory.current": f"{counter(group, 'memory.usage_in_bytes') or 0}\n",
            "memory.max": f"{self._container.limit_bytes or 'max'}\n",
            "memory.peak": f"{counter(group, 'memory.max_usage_in_bytes') or 0}\n",
            "memory.swap.current": "0\n",
            "memory.swap.max": "max\n",
            "memory.oom.group": "1\n",
            # Nobody in the group outlives a kill to read that it was counted.
            "memory.events": f"low 0\nhigh 0\nmax {counter(group, 'memory.failcnt') or 0}\noom 0\noom_kill 0\n",
            "memory.stat": "".join(f"{name} {value}\n" for name, value in {**stat, "kernel": kernel}.items()),
            "cgroup.procs": "".join(f"{pid}\n" for pid in self._pids_within()),
        }
        for name, text in files.items():
            draft = self._folder / group.name / f".{name}"
            draft.write_text(text)
            draft.replace(draft.with_name(name))

    def _pids_within(self) -> list[str]:
        """Return the processes by their numbers in the container."""
        found = []
        for pid in self._container.pids():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                (numbers,) = (line.split()[1:] for line in lines if line.startswith("NSpid:"))
                found += numbers[1:][-1:]  # `nsenter` itself has no number in it
        return found
