"""`/dev/shm`: its size, and the files in it by owner, as their names show it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Any

MAX_FILES = 4096
MAX_DEPTH = 2
_BLOCK = 512

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


def owner_of(name: str) -> str:
    if name.endswith("-cpushm") or "-cpushm" in name:  # the CPU backend's collectives
        return "cpu_collectives"
    return next((owner for start, owner in OWNERS if name.startswith(start)), OTHER)


def read_shm(folder: str = "/dev/shm") -> dict[str, Any]:  # noqa: S108 - looked at, never written to
    """Return `size`, `used`, `free`, the file system's number, and for each owner `[files, allocated, promised]`.

    `promised` is what its files may still allocate: a sparse file takes its pages when they are written, and a write
    that finds no room ends the process with SIGBUS. More than `MAX_FILES` files are not looked at; `is_cut` says so.

    Raises:
        OSError: The folder is missing.
    """
    space, status = os.statvfs(folder), os.stat(folder)
    owners: dict[str, list[int]] = {}
    counted = _add(folder, owners, None, 0, 0)
    figures: dict[str, Any] = {
        "device": status.st_dev,
        "size": space.f_blocks * space.f_frsize,
        "used": (space.f_blocks - space.f_bfree) * space.f_frsize,
        "free": space.f_bavail * space.f_frsize,
        "owners": owners,
    }
    return {**figures, "is_cut": True} if counted >= MAX_FILES else figures


def _add(folder: str, owners: dict[str, list[int]], owner: str | None, depth: int, counted: int) -> int:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            counted += 1
            if counted >= MAX_FILES:
                break
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                kind = owner or owner_of(entry.name)
                if stat.S_ISDIR(status.st_mode) and depth < MAX_DEPTH:
                    counted = _add(entry.path, owners, kind, depth + 1, counted)
                elif stat.S_ISREG(status.st_mode):
                    allocated = status.st_blocks * _BLOCK
                    row = owners.setdefault(kind, [0, 0, 0])
                    row[0] += 1
                    row[1] += allocated
                    row[2] += max(0, status.st_size - allocated)
    return counted
