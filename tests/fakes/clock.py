"""The time, which a test sets."""

from __future__ import annotations

from dataclasses import dataclass


class FakeClock:
    """Unix seconds that pass only when a test says so."""

    def __init__(self, now: float = 1_763_660_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeWallClock:
    """Unix seconds, which somebody may set while the machine's other clock goes on."""

    clock: FakeClock
    set_by: float = 0.0

    def __call__(self) -> float:
        return self.clock.now + self.set_by
