"""The time that a client has for taking a complete response."""

from __future__ import annotations


class UnreadWatch:
    """Judges, tick by tick, a client that does not take a complete response: it holds memory meanwhile.

    It has ``wait_ticks``, and one more for each ``held_bytes_per_tick``; in ``wait_ticks`` it must take something.
    """

    def __init__(self, wait_ticks: float, held_bytes_per_tick: float) -> None:
        self._wait_ticks = wait_ticks
        self._held_bytes_per_tick = held_bytes_per_tick
        self._unsent = 0  # bytes at the last tick
        self._ticks = 0.0  # for which they have waited
        self._patience = 0.0  # ticks for which they may wait
        self._untaken_ticks = 0  # in which the client took none of them

    def restart(self) -> None:
        self._ticks = 0.0

    def is_over(self, unsent: int) -> bool:
        """Count one tick with so many bytes unsent, and return whether the time has passed."""
        if not unsent:
            self._unsent = self._untaken_ticks = 0
            self._ticks = 0.0
            return False
        if not self._ticks:
            self._patience = self._wait_ticks + unsent / self._held_bytes_per_tick
        self._ticks += 1
        self._untaken_ticks = self._untaken_ticks + 1 if unsent == self._unsent else 0
        self._unsent = unsent
        return self._untaken_ticks > self._wait_ticks or self._ticks > self._patience
