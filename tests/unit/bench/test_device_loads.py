"""What the small engine's steps do to a device's memory, on a stand-in for PyTorch's caching allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from bench.device.small_engine import LOADS, PHASE_STEPS, SLACK_BYTES, WORKSPACE_BYTES
from bench.device.torch_device import GIB, MIB, ON_DEVICE

TOTAL = 24 * GIB
HIGH_WATER = 1 * GIB


class Workspace:
    def give_back(self) -> None:
        """The driver has it again at once."""


class Tensor:
    """Goes back to the allocator with its last reference."""

    def __init__(self, device: Device, segment: int) -> None:
        self._device, self._segment = device, segment

    def __del__(self) -> None:
        self._device.cached[self._segment] += 1

    def zero_(self) -> None:
        pass


class Device:
    """A segment for each allocation; a freed one is used again for what fits into it, and else kept."""

    is_cpu = False
    sizes = ON_DEVICE

    def __init__(self) -> None:
        self.free = TOTAL
        self.cached: Counter[int] = Counter()
        self.cached_retries = 0

    def space(self) -> tuple[int, int]:
        return self.free, TOTAL

    def wait(self) -> None:
        pass

    def empty(self, nbytes: int) -> Tensor:
        fitting = min((size for size, count in self.cached.items() if count and size >= nbytes), default=None)
        if fitting is not None:
            self.cached[fitting] -= 1
            return Tensor(self, fitting)
        if self.free < nbytes:
            self.release()
            self.cached_retries += 1
        if self.free < nbytes:
            raise RuntimeError("CUDA out of memory")
        self.free -= nbytes
        return Tensor(self, nbytes)

    def release(self) -> None:
        self.free += sum(size * count for size, count in self.cached.items())
        self.cached.clear()

    def driver_allocation(self, nbytes: int) -> Workspace:
        if self.free < nbytes:
            raise RuntimeError("out of memory")
        return Workspace()


def run_until_it_dies(step: Callable[[int], None], device: Device) -> tuple[str, list[int]]:
    """Return what the last step raised, and the free bytes after each one before."""
    free: list[int] = []
    try:
        for number in range(3 * PHASE_STEPS):
            step(number)
            free.append(device.free)
    except RuntimeError as error:
        return str(error), free
    return "nothing", free


def test_the_growing_load_dies_of_its_own_reserve():
    """Not of what is in use, and not where PyTorch would have helped itself: the workspace is the driver's."""
    device, hog = Device(), []
    step = LOADS["grow"](device, hog)
    assert device.space()[0] == SLACK_BYTES
    raised, free = run_until_it_dies(step, device)
    kept = sum(size * count for size, count in device.cached.items())
    assert raised == "out of memory"
    assert PHASE_STEPS < len(free) < 2 * PHASE_STEPS
    assert device.cached_retries == 0
    assert kept > 4 * WORKSPACE_BYTES


def test_the_growing_load_lives_where_its_reserve_is_released_in_time():
    """With the default rule's high water for so much slack."""
    device, hog = Device(), []
    step = LOADS["grow"](device, hog)
    releases = 0
    for number in range(4 * PHASE_STEPS):
        step(number)
        if device.free < HIGH_WATER:
            device.release()
            releases += 1
    assert 1 <= releases <= 8
    assert device.cached_retries == 0


def test_the_growing_load_leaves_time_to_release():
    """Between high water and death there are several readings of a sidecar that reads once a second."""
    device, hog = Device(), []
    step = LOADS["grow"](device, hog)
    raised, free = run_until_it_dies(step, device)
    assert raised == "out of memory"
    assert sum(one < HIGH_WATER for one in free) > 30  # ten a second


def test_the_filling_load_dies_of_what_is_in_use():
    """Nothing could be released."""
    device, hog = Device(), []
    step = LOADS["fill"](device, hog)
    raised, _ = run_until_it_dies(step, device)
    assert raised == "CUDA out of memory"
    assert sum(device.cached.values()) == 0


def test_the_fragmenting_load_dies_beside_memory_that_nobody_uses():
    """Every other piece is free, and none is large enough."""
    device, hog = Device(), []
    # Two pieces share a segment of PyTorch's, so that a free one cannot go: here none is given back.
    device.release = lambda: None
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        LOADS["fragment"](device, hog)(0)
    assert sum(size * count for size, count in device.cached.items()) > TOTAL // 2 - 64 * MIB
