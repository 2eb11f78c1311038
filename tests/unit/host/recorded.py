"""Process files and kernel texts as tests make them; the texts were recorded on real machines."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from highwater.host.reading import ContainerMemory, HostReading, ProcessMemory, ShmMemory, ShmOwner
from highwater.model.units import MIB

BOOT = "71a42b98-df73-4ad1-8233-e2ac8930d9e0"

V2_STAT = """anon 3221225472
file 1677721600
kernel 209715200
kernel_stack 5242880
pagetables 31457280
sec_pagetables 0
percpu 1048576
sock 4096
vmalloc 65536
shmem 629145600
zswap 0
file_mapped 738197504
file_dirty 0
swapcached 0
inactive_anon 3850371072
active_anon 4096
inactive_file 524288000
active_file 524288000
unevictable 0
slab_reclaimable 104857600
slab_unreclaimable 62914560
slab 167772160
"""
V2_PRESSURE = """some avg10=12.50 avg60=11.00 avg300=2.25 total=2500000
full avg10=1.00 avg60=0.50 avg300=0.10 total=1500000
"""
V1_STAT = """cache 774959104
rss 1105920
total_cache 1677721600
total_rss 3221225472
total_shmem 629145600
total_mapped_file 11124736
total_swap 4096
total_inactive_file 524288000
total_active_file 524288000
total_unevictable 0
"""


def framed(body: bytes, sequence: int = 1) -> bytes:
    """A process file's bytes."""
    head = struct.pack("<8sII", b"HWPROC01", sequence, len(body))
    return (head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body).ljust(4096, b"\0")


def record(**changes: Any) -> dict[str, Any]:
    """A process's record as it is written."""
    return {
        "schema": 1,
        "at": 1000.0,
        "mono": 500.0,
        "pid": 4242,
        "started": 99,
        "boot_id": BOOT,
        "host": "pod",
        "pid_namespace": 1,
        "vllm": "0.32.0",
        "role": "api_server",
        "index": None,
        "command": "vllm",
        "parent_pid": 1,
        "anonymous_bytes": 700 * MIB,
        "file_bytes": 200 * MIB,
        "shmem_bytes": 10 * MIB,
        "swap_bytes": 0,
        "peak_bytes": 900 * MIB,
        "threads": 40,
        "descriptors": 60,
        "cgroup": {
            "version": 2,
            "inode": 77,
            "path": "/",
            "used": 5_108_662_272 + 4096,
            "limit": 6 * 1024 * MIB,
            "kept": 3_955_228_672,
            "stat": {
                "anon": 3_221_225_472,
                "file": 1_677_721_600,
                "shmem": 629_145_600,
                "kernel": 209_715_200,
                "sock": 4096,
                "inactive_file": 524_288_000,
                "active_file": 524_288_000,
                "slab_reclaimable": 104_857_600,
                "pagetables": 31_457_280,
            },
            "events": {"oom_kill": 0, "max": 3},
            "mono": 500.0,
        },
    } | changes


def write(folder: Path, content: dict[str, Any] | bytes, name: str | None = None) -> Path:
    """Write a process file, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        name = name or f"highwater-{content['pid']}-{content.get('started') or 0}.process"
        content = framed(json.dumps(content).encode("ascii"))
    path = folder / (name or "highwater-1-1.process")
    path.write_bytes(content)
    return path


def machine(root: Path, **files: str) -> Path:
    """A file system's root with `/proc`; `files` are more of them, with `__` for a slash."""
    texts = {
        "proc/sys/kernel/random/boot_id": BOOT + "\n",
        "proc/meminfo": "MemTotal: 65536000 kB\nMemFree: 1 kB\nMemAvailable: 32768000 kB\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    } | {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(root: Path, path: str, *, limit: str = "max", current: int = 5_108_666_368) -> None:
    """Make a memory cgroup of version 2."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "memory.current": f"{current}\n",
        "memory.max": f"{limit}\n",
        "memory.stat": V2_STAT,
        "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n",
        "memory.pressure": V2_PRESSURE,
        "memory.peak": f"{current}\n",
        "memory.swap.current": "0\n",
        "memory.swap.max": "max\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)


def reading(**changes: Any) -> HostReading:
    """A reading of three processes in a container with a limit."""
    container = ContainerMemory(
        key="c",
        version=2,
        used_bytes=10_000 * MIB,
        limit_bytes=20_000 * MIB,
        kept_bytes=8_000 * MIB,
        anonymous_bytes=6_000 * MIB,
        shmem_bytes=1_500 * MIB,
        page_cache_bytes=2_000 * MIB,
        droppable_bytes=2_000 * MIB,
        kernel_bytes=400 * MIB,
        page_tables_bytes=100 * MIB,
    )
    processes = tuple(
        ProcessMemory(role=role, name=name, pid=pid, started=pid, container="c", anonymous_bytes=size * MIB)
        for role, name, pid, size in (
            ("api_server", "API server", 10, 2_000),
            ("engine_core", "EngineCore", 11, 1_000),
            ("worker", "worker rank 0", 12, 2_900),
        )
    )
    shm = ShmMemory(
        size_bytes=2_000 * MIB,
        used_bytes=1_400 * MIB,
        free_bytes=600 * MIB,
        owners=(ShmOwner(owner="rpc_rings", files=2, used_bytes=1_400 * MIB, promised_bytes=300 * MIB),),
        promised_bytes=300 * MIB,
    )
    given: dict[str, Any] = {"taken_at": 1.0, "container": container, "processes": processes, "shm": shm} | changes
    return HostReading(**given)
