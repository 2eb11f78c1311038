"""Resident bytes are measured seldom, and a whole allocation only once."""

from __future__ import annotations

import ctypes
import mmap

from highwater_worker.memory.storages import Residency, Storage, resident_bytes
from tests.fakes.clock import FakeClock


class Measure:
    """Answers `part` of every allocation after `cost` seconds."""

    def __init__(self, clock: FakeClock, part: float, cost: float) -> None:
        self.clock, self.part, self.cost, self.calls = clock, part, cost, 0

    def __call__(self, _pointer: int, nbytes: int) -> int | None:
        self.calls += 1
        self.clock.now += self.cost
        return int(nbytes * self.part) if self.part >= 0 else None


def measured(part: float = 1.0, cost: float = 0.001) -> tuple[FakeClock, Measure, Residency]:
    clock = FakeClock(0.0)
    measure = Measure(clock, part, cost)
    return clock, measure, Residency(measure, clock)


STORAGES = [Storage(4096, 1000, "cpu"), Storage(8192, 500, "cpu")]


def test_a_whole_allocation_is_never_measured_again():
    """vLLM gives no page of its KV cache back."""
    clock, measure, residency = measured()
    assert residency.total(STORAGES) == 1500
    clock.now += 1e6
    assert residency.total(STORAGES) == 1500
    assert measure.calls == 2


def test_a_partial_measurement_holds_for_two_seconds_at_least():
    clock, measure, residency = measured(part=0.5, cost=0.0)
    assert residency.total(STORAGES[:1]) == 500
    clock.now, measure.part = 1.9, 0.75
    assert residency.total(STORAGES[:1]) == 500
    clock.now = 2.0
    assert residency.total(STORAGES[:1]) == 750


def test_a_dear_measurement_holds_longer():
    """A thousand times its cost: 20 ms are paid once in 20 s."""
    clock, measure, residency = measured(part=0.5, cost=0.02)
    residency.total(STORAGES[:1])
    clock.now += 19
    residency.total(STORAGES[:1])
    assert measure.calls == 1
    clock.now += 2
    residency.total(STORAGES[:1])
    assert measure.calls == 2


def test_what_cannot_be_measured_is_not_known():
    _, _, residency = measured(part=-1)
    assert residency.total(STORAGES) is None


def test_untouched_pages_are_not_resident():
    pages = 64
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        for page in range(8):
            memory[page * mmap.PAGESIZE] = 1
        assert resident_bytes(start, pages * mmap.PAGESIZE) == 8 * mmap.PAGESIZE
        assert resident_bytes(start + 10, 3 * mmap.PAGESIZE) == 3 * mmap.PAGESIZE
        del view


def test_an_address_that_is_not_mapped_is_not_known():
    assert resident_bytes(mmap.PAGESIZE, mmap.PAGESIZE) is None


def test_a_c_library_without_mincore_is_not_known(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert resident_bytes(4096, 4096) is None
