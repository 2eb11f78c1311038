"""Host memory of this process, and of those beside it that write no file, as kernel and C library count it.

`/proc/self/status` is read and not `smaps_rollup`, which walks every page table entry with the address space locked.
"""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from highwater_worker.devices.cgroup import group_files
from highwater_worker.errors import printable
from highwater_worker.files import ROOT, read_start
from highwater_worker.identity import pid_started

_STATUS_BYTES = 8192
_MAX_READ, _MAX_LISTED = 128, 8
_MAX_NAME = 48
_LISTED = ("anonymous_bytes", "file_bytes", "shmem_bytes", "swap_bytes", "peak_bytes", "threads")
_KIB = 1024
_SIZES = {
    b"RssAnon": "anonymous_bytes",
    b"RssFile": "file_bytes",
    b"RssShmem": "shmem_bytes",
    b"VmSwap": "swap_bytes",
    b"VmHWM": "peak_bytes",
    b"VmPTE": "page_tables_bytes",
}


def read_figures(pid: int | str = "self", root: Path = ROOT) -> dict[str, Any]:
    """Return sizes in bytes, `threads`, `parent_pid`, `command` (15 characters), as far as shown. Raises OSError."""
    figures: dict[str, Any] = {}
    for line in read_start(f"{root}/proc/{pid}/status", _STATUS_BYTES).split(b"\n"):
        key, _, value = line.partition(b":")
        words = value.split()
        if key in _SIZES and words[1:] == [b"kB"] and words[0].isdigit():
            figures[_SIZES[key]] = int(words[0]) * _KIB
        elif key in (b"Threads", b"PPid") and len(words) == 1 and words[0].isdigit():
            figures["threads" if key == b"Threads" else "parent_pid"] = int(words[0])
        elif key == b"Name":
            # A process may call itself anything; what reads this takes printable ASCII alone.
            figures["command"] = re.sub(rb"[^ -~]", b"?", value.strip()).decode("ascii")
    return figures


def count_descriptors(root: Path = ROOT) -> int:
    """Return how many files this process has open; raises OSError where the kernel does not show it."""
    folder = f"{root}/proc/self/fd"
    # Since Linux 6.2 the folder's size is their number; before, each has to be listed, with the folder's own.
    size = os.stat(folder).st_size
    return size if size > 0 else max(0, len(os.listdir(folder)) - 1)


def descriptors_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def list_processes(written: set[int], root: Path = ROOT) -> dict[str, Any]:
    """Return the largest processes of this process's group as `largest`, and their number as `total`.

    They are found in the container's own group, so that a machine's other processes cost nothing. `written` are the
    processes that have files of their own.
    """
    files = group_files(root)
    pids: list[int] = []
    if files is not None:
        with suppress(OSError, ValueError):
            pids = [int(line) for line in (files.levels[0] / "cgroup.procs").read_text("ascii").split()]
    others = [pid for pid in pids if pid > 0 and pid not in written]
    rows = [row for pid in others[:_MAX_READ] if (row := _row(pid, root)) is not None]
    rows.sort(key=lambda row: row.get("anonymous_bytes", 0), reverse=True)
    return {"total": len(others), "largest": rows[:_MAX_LISTED]}


def _row(pid: int, root: Path) -> dict[str, Any] | None:
    try:
        figures = read_figures(pid, root)
        words = read_start(f"{root}/proc/{pid}/cmdline", 512).replace(b"\0", b" ").decode("utf-8", "replace")
        started = pid_started(root, pid)
    except (OSError, ValueError, IndexError):  # it has ended meanwhile
        return None
    if not any(name in figures for name in _LISTED[:3]):  # the kernel's own thread, or a process that has ended
        return None
    is_tracker = "multiprocessing.resource_tracker" in words
    name = "resource tracker" if is_tracker else printable(figures.get("command", ""), _MAX_NAME)
    known = {key: figures[key] for key in _LISTED if key in figures}
    return {"pid": pid, "started": started, "name": name, "tracker": is_tracker, **known}
