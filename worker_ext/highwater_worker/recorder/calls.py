"""The operation of this package that is running, and the number that have begun."""

from __future__ import annotations

import time
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Call(NamedTuple):
    """An operation that is running."""

    op: str
    since: float
    thread: int


def _nothing() -> None:
    pass


class Calls:
    """The operations of one worker.

    Args:
        clock: Seconds that only grow.
        began: Called when one has begun.
        ended: Called when one has ended.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        began: Callable[[], None] = _nothing,
        ended: Callable[[], None] = _nothing,
    ) -> None:
        self._clock = clock
        self._has_begun = began
        self._has_ended = ended
        self.current: Call | None = None
        """The one that is running."""
        self.begun = 0
        """The number that have begun."""

    @contextmanager
    def running(self, op: str) -> Iterator[None]:
        """Show an operation while it runs."""
        before, self.current = self.current, Call(op, self._clock(), get_ident())
        self.begun += 1
        self._has_begun()
        try:
            yield
        finally:
            self.current = before
            self._has_ended()
