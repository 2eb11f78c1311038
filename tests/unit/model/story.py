"""Workers' memory as the tests of the accounting have it."""

from __future__ import annotations

from dataclasses import replace

from highwater.model.rank import Device, RankReading, WorkerMemory
from tests.fakes.engine import FakeEngine

GIB = 1024**3


def worker(**changes) -> WorkerMemory:
    return replace(WorkerMemory(rank=0, taken_at=100.0, device=Device(type="npu", index=0)), **changes)


def story(*, images: bool = False) -> tuple[RankReading, ...]:
    fake = FakeEngine()
    if images:
        fake.serve_images()
    return fake.readings()


def cpu(**changes) -> WorkerMemory:
    memory = worker(device=Device(type="cpu"), total_bytes=24 * GIB, free_bytes=19 * GIB, used_bytes=2 * GIB)
    return replace(memory, weights_bytes=GIB // 4, kv_cache_bytes=GIB // 2, **changes)
