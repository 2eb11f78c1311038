"""Processes beside this one that write no file: resource trackers, compilers, a front end in another language.

They are found in the container's own group (`cgroup.procs`), so that a machine's other processes cost nothing.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from highwater_worker.devices.cgroup import group_files
from highwater_worker.errors import printable
from highwater_worker.processes.figures import read_figures, read_start

_ROOT = Path("/")
MAX_LOOKED_AT = 128
MAX_LISTED = 8
_MAX_NAME = 48
_KEPT = ("anonymous_bytes", "file_bytes", "shmem_bytes", "swap_bytes", "peak_bytes", "threads")
_STARTED_FIELD = 22


def list_processes(written: set[int], root: Path = _ROOT) -> dict[str, Any]:
    """Return the largest processes of this process's group as `largest`, and how many there are as `total`.

    Args:
        written: The processes that have files of their own.
        root: The file system's root; a test brings its own.
    """
    files = group_files(root)
    pids: list[int] = []
    if files is not None:
        with suppress(OSError, ValueError):
            pids = [int(line) for line in (files.levels[0] / "cgroup.procs").read_text("ascii").split()]
    others = [pid for pid in pids if pid > 0 and pid not in written]
    rows = [row for pid in others[:MAX_LOOKED_AT] if (row := _row(pid, root)) is not None]
    rows.sort(key=lambda row: row.get("anonymous_bytes", 0), reverse=True)
    return {"total": len(others), "largest": rows[:MAX_LISTED]}


def _row(pid: int, root: Path) -> dict[str, Any] | None:
    try:
        figures = read_figures(pid, root)
        words = read_start(f"{root}/proc/{pid}/cmdline", 512).replace(b"\0", b" ").decode("utf-8", "replace")
        stat = read_start(f"{root}/proc/{pid}/stat", 1024).decode("ascii", "replace")
        started = int(stat.rpartition(")")[2].split()[_STARTED_FIELD - 3])
    except (OSError, ValueError, IndexError):  # it has ended meanwhile
        return None
    if not any(name in figures for name in _KEPT[:3]):  # the kernel's own thread, or a process that has ended
        return None
    is_tracker = "multiprocessing.resource_tracker" in words
    name = "resource tracker" if is_tracker else printable(figures.get("command", ""), _MAX_NAME)
    known = {key: figures[key] for key in _KEPT if key in figures}
    return {"pid": pid, "started": started, "name": name, "tracker": is_tracker, **known}
