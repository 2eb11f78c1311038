"""``/dev/shm`` by owner: as the engine's processes report it, and read here where they write no files."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

from highwater.host.parts import SHM
from highwater.host.process_record import RawShm
from highwater.host.reading import Observer, ShmMemory, ShmOwner, ShmState
from highwater_worker.kernel.shm import read_shm

_RAW = TypeAdapter(RawShm)


def own_shm(folder: str, proc: str) -> ShmMemory | None:
    try:
        return shm_of(_RAW.validate_python(read_shm(folder, proc)), sees="sidecar")
    except OSError:
        return None


def shm_mount(proc: Path, pid: int | str) -> str | None:
    """Return the number of the file system that a process has at ``/dev/shm``, as proc(5) has it; ``None``: unknown."""
    try:
        lines = (proc / str(pid) / "mountinfo").read_text("utf-8", "replace").splitlines()
        mounts = [(fields[4].rstrip("/"), fields[2]) for fields in map(str.split, lines)]
    except (OSError, IndexError):
        return None
    above = sorted((one for one in mounts if f"{SHM}/".startswith(f"{one[0]}/")), key=lambda one: len(one[0]))
    return above[-1][1] if above else None  # of several in one place the last covers the others


def shm_of(raw: RawShm, *, age_seconds: float = 0.0, sees: Observer = "engine") -> ShmMemory:
    owners = [
        ShmOwner(owner=owner, state=state, files=files, used_bytes=used, promised_bytes=promised)
        for state in get_args(ShmState)
        for owner, (files, used, promised) in getattr(raw, "owners" if state == "in_use" else state).items()
    ]
    return ShmMemory(
        size_bytes=raw.size,
        used_bytes=raw.used,
        free_bytes=raw.free,
        owners=tuple(sorted(owners, key=lambda one: (-one.used_bytes, one.owner))),
        promised_bytes=sum(one.promised_bytes for one in owners if one.is_in_use),
        age_seconds=age_seconds,
        sees=sees,
    )
