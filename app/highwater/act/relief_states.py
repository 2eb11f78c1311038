"""The states of a relief: it is in one at a time, and each has a deadline, so that every wait is bounded.

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

From any state a relief that is refused, fails or is cancelled goes back to idle, and the gate opens. The gate also
opens by itself once the deadlines of its three states have passed. So requests are held in this process alone and for a
bounded time, and nothing has to be undone when the process dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["idle", "reading", "closing", "drained", "calling", "releasing", "measuring"]


class StateTraits(NamedTuple):
    doing: str  # what the relief does in it, in words
    followed_by: frozenset[State] = frozenset()


# A relief skips `reading` where the last one is recent; a restore is measured afterwards only.
STATES: Final[Mapping[State, StateTraits]] = {
    "idle": StateTraits("{remedy} begins", frozenset({"reading", "closing", "calling"})),
    "reading": StateTraits("reads the memory before", frozenset({"closing", "calling"})),
    "closing": StateTraits("waits for {requests}", frozenset({"drained"})),
    "drained": StateTraits("waits until the engine has no request", frozenset({"calling"})),
    "calling": StateTraits("{remedy} runs", frozenset({"releasing", "measuring"})),
    "releasing": StateTraits("the allocator gives the bytes to the device", frozenset({"measuring"})),
    "measuring": StateTraits("reads what came back"),
}


class States:
    """Lets one relief after the other through; ``now`` is the state that the one under way is in."""

    def __init__(self) -> None:
        self.now: State = "idle"
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    @asynccontextmanager
    async def one_relief(self) -> AsyncIterator[None]:
        async with self._turn:
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
        if state not in STATES[self.now].followed_by:
            raise RuntimeError(f"a relief does not go from {self.now} to {state}")
        self.now = state
        async with asyncio.timeout(seconds):
            yield
