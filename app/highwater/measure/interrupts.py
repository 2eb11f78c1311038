"""Ctrl-C, a kill, a terminal that goes away: the first ends the load in order, the second all but the report."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the signals to stop, and raises ``KeyboardInterrupt`` for those that nobody is patient with.

    A context manager; only the main thread may enter it.

    Attributes:
        count: How many came.
        last: Which came last.
        is_patient: Whether the next one is only counted. A second one never is.
        ignores_signals: Whether none matters any more, as while the report is written.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: signal.Signals | None = None
        self.is_patient = False
        self.ignores_signals = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # What is ignored stays so: `nohup` means it.
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._came) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        self.last = signal.Signals(number)
        if self.ignores_signals or (self.is_patient and self.count == 1):
            return
        raise KeyboardInterrupt
