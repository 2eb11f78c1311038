"""``/dev/shm`` by owner: read here where it is the engine's too, else as the engine's processes report it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from highwater.host.process_record import RawShm
from highwater.host.reading import Observer, ShmMemory, ShmOwner

SHM: Final = Path("/dev/shm")  # noqa: S108 - read, never written to
MAX_FILES = 4096
MAX_DEPTH = 2
_BLOCK = 512

OWNERS: Final = (
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
"""The beginnings of files' names, and their owners: the same table as the worker package's, which has the sources."""


def owner_of(name: str) -> str:
    if "-cpushm" in name:
        return "cpu_collectives"
    return next((owner for start, owner in OWNERS if name.startswith(start)), "other")


def read_shm(folder: Path = SHM) -> RawShm | None:
    """Return size and owners of the shared memory here; ``None`` where it does not exist."""
    try:
        space, device = os.statvfs(folder), os.stat(folder).st_dev
    except OSError:
        return None
    owners: dict[str, tuple[int, int, int]] = {}
    for owner, status in islice(_files(folder), MAX_FILES):
        allocated = status.st_blocks * _BLOCK
        files, used, promised = owners.get(owner, (0, 0, 0))
        owners[owner] = files + 1, used + allocated, promised + max(0, status.st_size - allocated)
    return RawShm(
        device=device,
        size=space.f_blocks * space.f_frsize,
        used=(space.f_blocks - space.f_bfree) * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
        owners=owners,
    )


def _files(folder: Path | str, owner: str | None = None, depth: int = 0) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            whose = owner or owner_of(entry.name)
            if stat.S_ISDIR(status.st_mode) and depth < MAX_DEPTH:
                yield from _files(entry.path, whose, depth + 1)
            elif stat.S_ISREG(status.st_mode):
                yield whose, status


def shm_of(raw: RawShm, *, age_seconds: float = 0.0, sees: Observer = "engine") -> ShmMemory:
    """Return raw figures by owner, the largest first."""
    owners = tuple(
        ShmOwner(owner=owner, files=files, used_bytes=used, promised_bytes=promised)
        for owner, (files, used, promised) in sorted(raw.owners.items(), key=lambda item: (-item[1][1], item[0]))
    )
    return ShmMemory(
        size_bytes=raw.size,
        used_bytes=raw.used,
        free_bytes=raw.free,
        owners=owners,
        promised_bytes=sum(one.promised_bytes for one in owners),
        age_seconds=age_seconds,
        sees=sees,
    )
