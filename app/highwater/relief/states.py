"""The states of a relief: one at a time, each with a deadline, so that no wait is without a bound.

::

                              the gate is closed
                         ┌──────────┴──────────────────┐
    idle ──► reading ──► closing ──► drained ──► calling ──► releasing ──► measuring ──► idle
                │                                   ▲
                └── where requests need not wait ───┘

    state      what happens                                     whose     at most
    reading    one poll, the reading before                     Relief    the worker deadline and 20 s
    closing    new requests wait, running ones finish           Quiescer  gate.drain_seconds
    drained    the engine's own counts must agree               Quiescer  3 s
    calling    the remedy calls the engine                      Relief    10 s while the gate is closed, else 31 s
                                                                          and two worker deadlines
    releasing  the allocator gives the bytes to the device      Relief    two worker deadlines and 1 s
    measuring  one poll, the reading after                      Relief    the worker deadline and 20 s

From every state a relief that is refused, fails or is cancelled goes back to idle, and the gate opens. The gate also
opens by itself when the deadlines of the three states in which it is closed are over. So requests are held in this
process alone, for a bounded time, and nothing has to be undone when the process dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Literal, TypeAlias

State: TypeAlias = Literal["idle", "reading", "closing", "drained", "calling", "releasing", "measuring"]

# A recent reading serves as well, and a restore is measured afterwards only. A relief that fails is idle at once.
_NEXT: Mapping[State, frozenset[State]] = {
    "idle": frozenset({"reading", "closing", "calling"}),
    "reading": frozenset({"closing", "calling"}),
    "closing": frozenset({"drained"}),
    "drained": frozenset({"calling"}),
    "calling": frozenset({"releasing", "measuring"}),
    "releasing": frozenset({"measuring"}),
    "measuring": frozenset(),
}


class States:
    """The state that the one relief under way is in, ``now``."""

    def __init__(self) -> None:
        self.now: State = "idle"

    @contextmanager
    def one_relief(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.now = "idle"

    @asynccontextmanager
    async def enter(self, state: State, seconds: float) -> AsyncIterator[None]:
        """Enter a state, which must be one that follows the present one, for as long as the block lasts.

        Raises:
            TimeoutError: The deadline is over; what the block waited for was cancelled.
        """
        if state not in _NEXT[self.now]:
            raise RuntimeError(f"a relief does not go from {self.now} to {state}")
        self.now = state
        async with asyncio.timeout(seconds):
            yield
