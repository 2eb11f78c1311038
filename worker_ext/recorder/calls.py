"""Which of our own operations is running, for the recorder's thread to see; and who may read the encoder cache now.

The recorder refuses to look at the engine's cache while an operation runs: `trim` puts another dict in its place once
nobody but the engine holds the old one, and a thread in the middle of reading it would be such a holder.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_READING_SECONDS = 0.2
"""How long an operation waits for the thread to have read the cache: many times what ten thousand entries take."""


class Call(NamedTuple):
    """An operation that is running."""

    op: str
    since: float
    thread: int


class Calls:
    """The operations of one worker.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cache = Lock()
        self.current: Call | None = None
        """The one that is running."""
        self.ended = 0
        """How many have run."""

    @contextmanager
    def running(self, op: str) -> Iterator[None]:
        """Show an operation while it runs, and keep the recorder's thread from the cache meanwhile."""
        before, self.current = self.current, Call(op, self._clock(), get_ident())
        is_ours = self._cache.acquire(timeout=_READING_SECONDS)
        try:
            yield
        finally:
            if is_ours:
                self._cache.release()
            self.ended += 1
            self.current = before

    @contextmanager
    def reading(self) -> Iterator[bool]:
        """Say whether the cache may be read now, without waiting; no operation begins before it was read."""
        may_read = self._cache.acquire(blocking=False)
        try:
            yield may_read
        finally:
            if may_read:
                self._cache.release()
