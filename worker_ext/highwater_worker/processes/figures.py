"""A process's own memory, threads and open files, as its kernel counts them.

`/proc/self/status` is read and not `smaps_rollup`, which walks every page table entry with the address space locked.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOT = Path("/")
_STATUS_BYTES = 8192
_KIB = 1024
_SIZES = {
    b"RssAnon": "anonymous_bytes",
    b"RssFile": "file_bytes",
    b"RssShmem": "shmem_bytes",
    b"VmSwap": "swap_bytes",
    b"VmHWM": "peak_bytes",
    b"VmPTE": "page_tables_bytes",
}


def read_figures(pid: int | str = "self", root: Path = _ROOT) -> dict[str, Any]:
    """Return sizes in bytes, `threads`, `parent_pid` and `command` (15 characters); what is not shown is missing.

    Args:
        pid: Of the process.
        root: The file system's root; a test brings its own.

    Raises:
        OSError: There is no such process.
    """
    found: dict[str, Any] = {}
    for line in read_start(f"{root}/proc/{pid}/status", _STATUS_BYTES).split(b"\n"):
        key, _, value = line.partition(b":")
        words = value.split()
        if key in _SIZES and words[1:] == [b"kB"] and words[0].isdigit():
            found[_SIZES[key]] = int(words[0]) * _KIB
        elif key in (b"Threads", b"PPid") and len(words) == 1 and words[0].isdigit():
            found["threads" if key == b"Threads" else "parent_pid"] = int(words[0])
        elif key == b"Name":
            # A process may call itself anything; what reads this takes printable ASCII alone.
            found["command"] = re.sub(rb"[^ -~]", b"?", value.strip()).decode("ascii")
    return found


def count_descriptors(root: Path = _ROOT) -> int:
    """Return how many files this process has open.

    Raises:
        OSError: The kernel does not show it.
    """
    folder = f"{root}/proc/self/fd"
    # Since Linux 6.2 the folder's size is their number; before, each has to be listed, with the folder's own.
    size = os.stat(folder).st_size
    return size if size > 0 else max(0, len(os.listdir(folder)) - 1)


def descriptors_limit() -> int | None:
    """Return how many files this process may have open at once now; ``None`` without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def read_machine(root: Path = _ROOT) -> Mapping[str, int]:
    """Return `total_bytes` and `available_bytes` of the machine, as far as the kernel shows them.

    Raises:
        OSError: There is no /proc.
    """
    names = {b"MemTotal": "total_bytes", b"MemAvailable": "available_bytes"}
    found = {}
    for line in read_start(f"{root}/proc/meminfo", _KIB).split(b"\n"):
        key, _, value = line.partition(b":")
        words = value.split()
        if key in names and words[1:] == [b"kB"]:
            found[names[key]] = int(words[0]) * _KIB
    return found


def read_start(path: str, limit: int) -> bytes:
    """Return a file's first bytes: Python's file objects would make seven system calls of it.

    Raises:
        OSError: It cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)
