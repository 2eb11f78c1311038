"""Log lines that clients can cause, at a bounded rate: an attack must not fill the disk with its own trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOGGED_CHARACTERS = 200


def printable(text: bytes | str) -> str:
    """Return a client's text fit for one line of a log: cut, and with escapes for all but printable ASCII."""
    cut = text[:LOGGED_CHARACTERS]
    shown = cut.decode("latin-1") if isinstance(cut, bytes) else cut
    escaped = shown.encode("unicode_escape").decode("ascii")
    return escaped if len(text) <= LOGGED_CHARACTERS else f"{escaped}..."


class LimitedLog:
    """Passes a few lines per kind and period on to a logger; the next period's first line counts those left out."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        lines: int = 5,
        period_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._lines = lines
        self._period_seconds = period_seconds
        self._clock = clock
        self._periods: dict[str, tuple[float, int]] = {}  # kind: (start of its period, lines seen in it)

    def warning(self, kind: str, message: str, *arguments: object) -> None:
        """Log a line of a kind, of a bounded set, at its rate; a client's argument must go through ``printable``."""
        now = self._clock()
        start, seen = self._periods.get(kind, (float("-inf"), 0))
        if now - start >= self._period_seconds:
            if seen > self._lines:
                left_out = seen - self._lines
                self._logger.warning("%d more lines of kind %s were left out in the last period", left_out, kind)
            start, seen = now, 0
        self._periods[kind] = (start, seen + 1)
        if seen < self._lines:
            self._logger.warning(message, *arguments)
