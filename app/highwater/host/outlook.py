"""When the container is at its limit, at the pace of the last minutes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from highwater.host.reading import ContainerMemory
from highwater.units import MIB

WINDOW_SECONDS = 300.0
MIN_WINDOW_SECONDS = 60.0
MIN_SLOPE = MIB / 60.0
"""Bytes a second; what grows slower is no reason to name a time."""
MAX_SECONDS = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The pace of what the container must keep.

    Attributes:
        bytes_per_second: Its slope over the window; ``None`` where that is too short.
        seconds_to_limit: When it is at its limit; ``None`` where that is not within a week, or there is no limit.
        window_seconds: Between the first and the last value.
    """

    bytes_per_second: float | None = None
    seconds_to_limit: float | None = None
    window_seconds: float = 0.0


NO_OUTLOOK: Final = Outlook()


class OutlookWindow:
    """The values of the last minutes, of one container."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._values: deque[tuple[float, int]] = deque()

    def add(self, now: float, container: ContainerMemory | None) -> Outlook:
        """Add a value, and return what follows; another container starts anew.

        Args:
            now: Monotonic seconds.
            container: As it is; ``None``: unknown.
        """
        if container is None or container.kept_bytes is None:
            return NO_OUTLOOK
        if container.key != self._key:
            self._key = container.key
            self._values.clear()
        self._values.append((now, container.kept_bytes))
        while now - self._values[0][0] > WINDOW_SECONDS:
            self._values.popleft()
        window = now - self._values[0][0]
        if window < MIN_WINDOW_SECONDS:
            return Outlook(window_seconds=window)
        slope = _slope(list(self._values))
        room = container.room_bytes
        seconds = room / slope if room is not None and slope >= MIN_SLOPE else None
        return Outlook(
            bytes_per_second=slope,
            seconds_to_limit=seconds if seconds is not None and seconds <= MAX_SECONDS else None,
            window_seconds=window,
        )


def _slope(values: list[tuple[float, int]]) -> float:
    """Return the slope of the line with the least squares."""
    mean_x = sum(x for x, _ in values) / len(values)
    mean_y = sum(y for _, y in values) / len(values)
    spread = sum((x - mean_x) ** 2 for x, _ in values)
    return sum((x - mean_x) * (y - mean_y) for x, y in values) / spread if spread else 0.0
