"""The time at which the container is at its limit, at the pace of the last minutes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import linear_regression
from typing import Final

from highwater.accounting.growth import seconds_until
from highwater.host.reading import ContainerMemory
from highwater.units import MIB

WINDOW_SECONDS = 300.0
MIN_WINDOW_SECONDS = 60.0
MIN_SLOPE = MIB / 60.0
"""Bytes a second; for slower growth no time is named."""
MAX_SECONDS = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The pace of what the container must keep.

    Attributes:
        bytes_per_second: The slope over the window; ``None`` where the window is too short.
        seconds_to_limit: ``None`` without a limit, or where it is not reached within a week.
        window_seconds: The time between the first and the last value.
    """

    bytes_per_second: float | None = None
    seconds_to_limit: float | None = None
    window_seconds: float = 0.0


NO_OUTLOOK: Final = Outlook()


class OutlookWindow:
    def __init__(self) -> None:
        self._key: str | None = None
        self._values: deque[tuple[float, int]] = deque()

    def begin(self) -> None:
        self._values.clear()

    def add(self, now: float, container: ContainerMemory | None) -> Outlook:
        """Add a container's value at a monotonic time, and return the outlook; another container starts anew."""
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
        slope = linear_regression(*zip(*self._values, strict=True)).slope
        return Outlook(
            bytes_per_second=slope,
            seconds_to_limit=seconds_until(container.room_bytes, slope, slowest=MIN_SLOPE, horizon=MAX_SECONDS),
            window_seconds=window,
        )
