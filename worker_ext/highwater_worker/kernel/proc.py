"""`/proc`: a process's memory, start and command line, the machine's memory and boot, and what a path lies on.

`/proc/PID/status` is read and not `smaps_rollup`, which walks every page table entry with the address space locked.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path("/")
"""The default of every `root`: the file system's root, which a test replaces by a folder of its own."""
MACHINES_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the machine's own PID namespace: PROC_PID_INIT_INO, the same on every machine."""
STATUS_BYTES = 8192
TITLE_BYTES = 512
_KIB = 1024
_SIZES = {
    b"RssAnon": "anonymous_bytes",
    b"RssFile": "file_bytes",
    b"RssShmem": "shmem_bytes",
    b"VmSwap": "swap_bytes",
    b"VmHWM": "peak_bytes",
    b"VmPTE": "page_tables_bytes",
}
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_REMOTE = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "ocfs2"),
        *("gfs2", "autofs"),  # to touch autofs mounts it
    )
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs"})
_ESCAPE = re.compile(r"\\([0-7]{3})")


def lines_of(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux, not mounted, or not readable: as if absent
        return []


def read_start(path: str, limit: int) -> bytes:
    """Return a file's first bytes with three system calls (a file object makes seven); raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


# --- the machine ---


def boot_id(root: Path = ROOT) -> str:
    """Return the kernel's name of this boot of the machine; raises OSError where the kernel does not report it."""
    return (root / "proc/sys/kernel/random/boot_id").read_text("ascii", "replace").strip()[:64]


def pid_namespace(root: Path = ROOT) -> int:
    """Return the inode of this process's PID namespace, in which its pid counts; raises OSError as above."""
    return os.stat(root / "proc/self/ns/pid").st_ino


def read_machine(root: Path = ROOT) -> dict[str, int]:
    """Return the machine's `total_bytes` and `available_bytes`, if shown. Raises OSError where there is no /proc."""
    lines = [line.split() for line in read_start(f"{root}/proc/meminfo", 1024).decode("ascii", "replace").splitlines()]
    sizes = {words[0]: int(words[1]) * _KIB for words in lines if words[2:] == ["kB"] and words[1].isdigit()}
    names = {"MemTotal:": "total_bytes", "MemAvailable:": "available_bytes"}
    return {name: sizes[key] for key, name in names.items() if key in sizes}


# --- one process ---


class Stat(NamedTuple):
    """`/proc/PID/stat`, as far as it is read; `started` is in the kernel's ticks since boot."""

    state: str
    parent: int
    started: int


def read_stat(pid: int | str = "self", root: Path = ROOT) -> Stat:
    """Raises OSError (it does not exist, or is hidden), ValueError or IndexError where the line is not understood."""
    # The second field is the program's name, in brackets, with whatever it likes between them (proc_pid_stat(5)).
    fields = (root / f"proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def pid_started(root: Path = ROOT) -> int:
    """Return this process's start: it differs from that of a later process of its pid. Raises as `read_stat`."""
    return read_stat("self", root).started


def rss_bytes(root: Path = ROOT) -> int:
    """Return this process's resident size; raises OSError where there is no /proc."""
    return int(read_start(f"{root}/proc/self/statm", mmap.PAGESIZE).split()[1]) * mmap.PAGESIZE


SHOWN = ("anonymous_bytes", "file_bytes", "shmem_bytes", "swap_bytes", "peak_bytes", "threads")
"""Of `read_figures`, what is shown of a process."""


def read_figures(pid: int | str = "self", root: Path = ROOT) -> dict[str, Any]:
    """Return sizes in bytes, `threads`, `parent_pid`, `command` (15 characters), as far as shown. Raises OSError."""
    figures: dict[str, Any] = {}
    for line in read_start(f"{root}/proc/{pid}/status", STATUS_BYTES).split(b"\n"):
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


def title_of(pid: int | str, root: Path = ROOT) -> str:
    """Return the beginning of a process's command line, which the process can set; raises OSError."""
    return read_start(f"{root}/proc/{pid}/cmdline", TITLE_BYTES).replace(b"\0", b" ").decode("utf-8", "replace").strip()


def count_descriptors(root: Path = ROOT, pid: int | str = "self") -> int:
    """Return how many files a process has open; raises OSError where the kernel does not show it."""
    folder = f"{root}/proc/{pid}/fd"
    # Since Linux 6.2 the folder's size is their number; before, each has to be listed, with our own of the folder.
    size = os.stat(folder).st_size
    return size if size > 0 else len(os.listdir(folder)) - (pid == "self")


def descriptors_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


# --- mounts ---


class Mount(NamedTuple):
    """One line of /proc/PID/mountinfo."""

    device: str  # the file system's number, `major:minor`
    group: str  # the directory of the file system that is mounted; of a cgroup file system, a group
    point: str
    kind: str
    options: str


def read_mounts(root: Path = ROOT, pid: int | str = "self") -> Iterator[Mount]:
    """Yield the file systems that a process sees; of several on one point the last one lies on top."""
    for line in lines_of(root / f"proc/{pid}/mountinfo"):
        # id parent major:minor group mount-point options [tags] - kind source options (proc_pid_mountinfo(5))
        before, _, after = line.partition(" - ")
        place, rest = before.split(), after.split()
        if len(place) > 4 and rest:  # noqa: PLR2004 - the fields read below
            point = _ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), place[4])
            yield Mount(place[2], place[3], point, rest[0], rest[2] if len(rest) > 2 else "")  # noqa: PLR2004 - as above


def mount_of(path: Path | str, root: Path = ROOT, pid: int | str = "self") -> Mount | None:
    """Return the mount that an absolute path lies on, None where the kernel does not show it.

    The path need not exist, and is not touched: an unreachable server would hold the caller. So links on the way are
    not followed.
    """
    wanted, best = os.path.normpath(path) + "/", None
    for mount in read_mounts(root, pid):
        is_closer = best is None or len(mount.point) >= len(best.point)
        if is_closer and wanted.startswith(mount.point.rstrip("/") + "/"):
            best = mount
    return best


def file_system_of(path: Path, root: Path = ROOT) -> str | None:
    mount = mount_of(path, root)
    return None if mount is None else mount.kind


def is_in_memory(kind: str | None) -> bool:
    """Return whether a write to this type of file system waits for no disk."""
    return kind in _IN_MEMORY


def is_remote(kind: str | None) -> bool:
    """Return whether a call may wait for another machine, or for another process, without a bound."""
    return kind is not None and (kind in _REMOTE or (kind.startswith("fuse") and kind not in _LOCAL_FUSE))
