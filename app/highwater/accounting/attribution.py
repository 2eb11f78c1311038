"""Accounting of a worker's memory: exclusive components that sum to the used bytes.

The parts are placed one after another into ``used_bytes`` and never overfill it: a part that does not fit
(PyTorch's statistics and the driver's are not read at the same instant; a sleeping engine has unmapped pools that
PyTorch still counts) is cut, and a note says so.
"""

from __future__ import annotations

from dataclasses import fields

from highwater.readings.rank import Budget, Components, Note, RankMemory, RankReading, ReadingSource, WorkerMemory

_SHARED = tuple(field.name for field in fields(RankMemory))


def account(worker: WorkerMemory, source: ReadingSource = "rpc") -> RankReading:
    components, notes = _place(worker)
    shared = {name: getattr(worker, name) for name in _SHARED}
    has_ratio = worker.used_bytes is not None and worker.total_bytes
    return RankReading(
        **shared | {"notes": worker.notes + notes},
        used_ratio=(worker.used_bytes or 0) / (worker.total_bytes or 1) if has_ratio else None,
        components=components,
        budget=Budget(
            gpu_memory_utilization=worker.budget.gpu_memory_utilization,
            requested_bytes=worker.budget.requested_bytes,
            headroom_bytes=worker.free_bytes,
        ),
        source=source,
    )


def _place(worker: WorkerMemory) -> tuple[Components, tuple[Note, ...]]:
    encoder = worker.encoder_cache.device_bytes if worker.encoder_cache is not None else None
    known = {
        "weights_bytes": worker.weights_bytes,
        "encoder_cache_bytes": encoder,
        "kv_cache_bytes": worker.kv_cache_bytes,
    }
    if worker.used_bytes is None:
        return Components(**known), (Note(name="used_bytes", reason="not known, so the components cannot be summed"),)

    unknown = [name for name in ("weights_bytes", "kv_cache_bytes") if known[name] is None]
    parts = dict(known) | _allocator_parts(worker, sum(size or 0 for size in known.values()), placed_all=not unknown)
    why = "not known for this worker; its bytes are counted in non_torch_bytes"
    notes = [Note(name=name, reason=why) for name in unknown]
    placed: dict[str, int | None] = {}
    left = worker.used_bytes
    for name, size in parts.items():
        if size is None:
            placed[name] = None
            continue
        placed[name] = min(max(size, 0), left)
        left -= placed[name] or 0
        if size > (placed[name] or 0):
            notes.append(Note(name=name, reason=f"{size} bytes counted, of which only {placed[name]} fit into used"))
    return Components(**placed, non_torch_bytes=left), tuple(notes)


def _allocator_parts(worker: WorkerMemory, placed: int, *, placed_all: bool) -> dict[str, int | None]:
    allocated, reserved = worker.torch.allocated_bytes, worker.torch.reserved_bytes
    if allocated is None or reserved is None:
        return {"other_tensors_bytes": None, "torch_cached_bytes": None}
    return {
        "other_tensors_bytes": max(allocated - placed, 0) if placed_all else None,
        "torch_cached_bytes": max(reserved - allocated, 0),
    }
