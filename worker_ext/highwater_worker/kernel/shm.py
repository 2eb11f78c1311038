"""`/dev/shm`: its size, and the files in it by owner and by whether a process has them open."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from highwater_worker.kernel.proc import MACHINES_PID_NAMESPACE

T = TypeVar("T")

MAX_FILES = 4096
MAX_DEPTH = 2
MAX_PROCESSES = 4096
MAX_MAPS_BYTES = 4 << 20
MAX_DESCRIPTORS = 4096
_BLOCK = 512
SPARED = 500.0
"""The least time until the next look, as a multiple of the CPU time that one takes."""
_NEW_SECONDS = 10.0
"""A file that was made since then may be mapped by a process that was looked at before."""
# The kernel's PROC_IPC_INIT_INO: the same on every machine.
_MACHINES_IPC = 0xEFFFFFFF

OWNERS = (
    ("psm_", "rpc_rings"),
    ("vllm_shm_arena", "rpc_rings"),
    ("VLLM_OBJECT_STORAGE_SHM_BUFFER", "processor_cache"),
    ("vllm_offload_", "kv_offload"),
    ("vllm_ec_", "encoder_offload"),
    ("lmcache", "kv_offload"),
    ("mooncake", "kv_offload"),
    ("nccl-", "nccl"),
    ("rccl-", "nccl"),
    ("hccl", "hccl"),
    ("HCCL", "hccl"),
    ("torch_", "torch"),
    ("shm_torch", "torch"),
    ("plasma", "ray"),
    ("ray", "ray"),
    ("highwater", "recorder"),
    ("sem.", "semaphores"),
    ("__KMP_REGISTERED_LIB_", "openmp"),
)
"""The beginnings of files' names, and the files' owners; the first that fits counts.

Python's SharedMemory, on which vLLM's MessageQueue lies: vllm 0.12.0
distributed/device_communicators/shm_broadcast.py:168, vllm 0.32.0
distributed/device_communicators/shm_broadcast.py:337. The processor cache of type shm: vllm 0.12.0 envs.py:222, vllm
0.32.0 envs.py:290. Offloaded KV blocks: vllm 0.32.0 v1/kv_offload/cpu/shared_offload_region.py:110. Offloaded encoder
outputs: vllm 0.32.0 distributed/ec_transfer/ec_connector/cpu/ec_shared_region.py:93.
"""
OTHER = "other"
KINDS = ("owners", "unlinked", "left_over", "not_known")
_KEPT_CLOSED = frozenset({"recorder", "openmp"})
"""Nobody has their files open all the time: recorders are read again, and OpenMP only looks whether its file exists."""


def owner_of(name: str) -> str:
    if "-cpushm" in name:  # the CPU backend's collectives
        return "cpu_collectives"
    return next((owner for start, owner in OWNERS if name.startswith(start)), OTHER)


class _File(NamedTuple):
    owner: str
    name: str
    status: os.stat_result


def read_shm(
    folder: str = "/dev/shm",  # noqa: S108 - looked at, never written to
    proc: str = "/proc",
    clock: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """Return `size`, `used`, `free`, the file system's number, and `[files, allocated, promised]` of owners.

    `promised` is what the files may still allocate: a sparse file takes its pages when they are written, and a write
    that finds no room ends the process with SIGBUS. Files that are in use or new are in `owners`. Those of `unlinked`
    have no name any more and are mapped all the same; the sum of their allocated bytes is exact, and divided by their
    sizes. No process has those of `left_over` open. Of those of `not_known` that is not known: not every process that
    may have them open can be seen. At most `MAX_FILES` files are looked at; `is_cut` says that there are more. Raises
    OSError where the folder is missing.
    """
    device, long_ago = os.stat(folder).st_dev, clock() - _NEW_SECONDS
    entries = list(islice(_entries(folder), MAX_FILES))
    files = [one for one in entries if stat.S_ISREG(one.status.st_mode) and one.status.st_dev == device]
    space = os.statvfs(folder)
    blocks = (space.f_blocks, space.f_blocks - space.f_bfree, space.f_bavail)
    size, used, free = (count * space.f_frsize for count in blocks)
    users = _Users(proc)
    mapped = users.mapped(device)
    closed = {
        one.status.st_ino: one.name
        for one in files
        if one.status.st_ino not in mapped and one.status.st_ctime < long_ago and one.owner not in _KEPT_CLOSED
    }
    opened = set(closed.values()).intersection(users.each(_opened) if closed else ())
    kinds: dict[str, dict[str, list[int]]] = {name: {} for name in KINDS}
    rest = used
    for owner, _, status in files:
        is_used = status.st_ino not in closed or closed[status.st_ino] in opened
        kind = "owners" if is_used else "left_over" if users.are_all_seen else "not_known"
        _count(kinds[kind], owner, status.st_blocks * _BLOCK, status.st_size)
        rest -= status.st_blocks * _BLOCK
        mapped.pop(status.st_ino, None)
    regions = [region for region in mapped.values() if region[0].endswith(" (deleted)")]
    total = sum(length for _, length in regions)
    for path, length in regions:
        first = path[len(folder) :].lstrip("/") if path.startswith(f"{folder}/") else path.rpartition("/")[2]
        _count(kinds["unlinked"], owner_of(first), length * min(max(rest, 0), total) // total, length)
    sizes = {"size": size, "used": used, "free": free} if size else {}  # without a limit it counts nothing
    return {"device": device, **sizes, **kinds, "is_cut": len(entries) >= MAX_FILES}


def _entries(folder: str, owner: str | None = None, depth: int = 0) -> Iterator[_File]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                one = _File(owner or owner_of(entry.name), entry.name, entry.stat(follow_symlinks=False))
                yield one
                if stat.S_ISDIR(one.status.st_mode) and depth < MAX_DEPTH:
                    yield from _entries(entry.path, one.owner, depth + 1)


def _count(rows: dict[str, list[int]], owner: str, allocated: int, size: int) -> None:
    row = rows.setdefault(owner, [0, 0, 0])
    row[0] += 1
    row[1] += allocated
    row[2] += max(0, size - allocated)


class _Users:
    """The processes that this `/proc` shows, and what they have open.

    Attributes:
        are_all_seen: Whether these are all that may have a file of `/dev/shm` open, and each could be looked at.
            Another container that has it mounted as well is not known of.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        pids = [name for name in os.listdir(proc) if name.isdigit()]
        self._pids = pids[:MAX_PROCESSES]
        self.are_all_seen = False
        with suppress(OSError):
            # A container's `/dev/shm` may be the whole machine's, and a process may be hidden here.
            is_machine = os.stat(f"{proc}/self/ns/pid").st_ino == MACHINES_PID_NAMESPACE
            is_shared = not is_machine and os.stat(f"{proc}/self/ns/ipc").st_ino == _MACHINES_IPC
            is_hidden = "hidepid=" in Path(f"{proc}/self/mountinfo").read_text("utf-8", "replace")
            self.are_all_seen = len(pids) <= MAX_PROCESSES and not is_hidden and not is_shared

    def mapped(self, device: int) -> dict[int, tuple[str, int]]:
        number = b"%02x:%02x" % (os.major(device), os.minor(device))
        found: dict[int, tuple[str, int]] = {}
        for inode, size, path in self.each(lambda folder: _maps(folder, number)):
            found[inode] = path, max(size, found.get(inode, ("", 0))[1])
        return found

    def each(self, look: Callable[[str], Iterator[T]]) -> Iterator[T]:
        for pid in self._pids:
            try:
                yield from look(f"{self._proc}/{pid}")
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            except OSError:
                self.are_all_seen = self.are_all_seen and _has_nothing_open(f"{self._proc}/{pid}")


def _has_nothing_open(folder: str) -> bool:
    """Return whether a process that may not be looked at is a zombie or the kernel's own: it has no address space."""
    # Not by RssShmem: an open file that is not mapped, or whose pages were not touched, counts nothing there.
    try:
        status = Path(f"{folder}/status").read_text("ascii", "replace")
        return "\nVmSize:" not in status and "\nThreads:\t1\n" in status  # others may outlive a process's first one
    except OSError:
        return False


def _maps(folder: str, device: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield inode, end within the file and path of each file of a device that is mapped; raises OSError."""
    with open(f"{folder}/maps", "rb") as file:
        content = file.read(MAX_MAPS_BYTES)
    for line in content.split(b"\n"):
        if device in line:
            # first-last permissions offset device inode path (proc_pid_maps(5))
            fields = line.split(None, 5)
            if len(fields) > 5 and fields[3] == device:  # noqa: PLR2004 - with a path
                first, _, last = fields[0].partition(b"-")
                end = int(fields[2], 16) + int(last, 16) - int(first, 16)
                yield int(fields[4]), end, os.fsdecode(fields[5])
    if len(content) >= MAX_MAPS_BYTES:
        raise OSError(f"{folder}/maps: only its beginning was read")


def _opened(folder: str) -> Iterator[str]:
    """Yield the last part of the path of each open file; raises OSError."""
    with os.scandir(f"{folder}/fd") as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_DESCRIPTORS:
                raise OSError(f"{folder}/fd: only its beginning was read")
            with suppress(FileNotFoundError):  # closed meanwhile
                yield os.readlink(entry.path).rpartition("/")[2]
