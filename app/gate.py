"""Admission to the engine: lets requests through and counts them, holds new ones for a while, sheds what is too much.

Knows nothing of HTTP. A request that was let through is never cut; one that is held goes on in the order in which it
came, or is shed when it has waited too long or too many wait already.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

# While it reopens gradually: the time between two steps, and the most that it takes in all.
STEP_SECONDS = 0.02
REOPEN_SECONDS = 2.0


class Shed(Exception):
    """A request that is not let through.

    Attributes:
        reason: A bounded word, for metrics.
        retry_after: Seconds after which the gate should be open again.
    """

    def __init__(self, reason: str, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class Gate:
    """Counts requests under way, and holds new ones while it is closed.

    Args:
        hold_seconds: A request that waited so long is shed.
        max_held: Requests that may wait at once.
        clock: Seconds that only go forward.
        sleep: Waits between two steps of a gradual opening.
    """

    def __init__(
        self,
        *,
        hold_seconds: float = 30.0,
        max_held: int = 1024,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.in_flight = 0
        self.idle_since = clock()
        self._hold_seconds = hold_seconds
        self._max_held = max_held
        self._clock = clock
        self._sleep = sleep
        self._closed_until: float | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._drained = asyncio.Event()
        self._drained.set()

    @property
    def held(self) -> int:
        """Requests that wait."""
        return sum(not waiter.done() for waiter in self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether new requests pass at once."""
        return self._closed_until is None

    async def enter(self) -> None:
        """Let one request through, now or when the gate opens; ``leave`` must follow.

        Raises:
            Shed: It waited too long, or too many wait.
        """
        if self._closed_until is None:
            self._count()
            return
        if self.held >= self._max_held:
            raise self._shed("gate_full", f"{self._max_held} requests wait already for a cache reset to end")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._hold_seconds):
                await waiter
        except BaseException as exc:
            if waiter.done() and not waiter.cancelled():
                self.leave()  # let through, and gone in the same moment
            waiter.cancel()
            if isinstance(exc, TimeoutError):
                waited = f"held for {self._hold_seconds:g} s for a cache reset that has not ended"
                raise self._shed("held_too_long", waited) from exc
            raise

    def leave(self) -> None:
        """One request that was let through is over."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle_since = self._clock()
            self._drained.set()

    @asynccontextmanager
    async def closed(self, at_most_seconds: float, *, reopen_gradually: bool = False) -> AsyncIterator[None]:
        """Hold new requests until the block ends; it should end within the time that the held are told.

        Args:
            at_most_seconds: That time.
            reopen_gradually: Let the held through one after the other at the end, instead of all at once.
        """
        self._closed_until = self._clock() + at_most_seconds
        try:
            yield
            if reopen_gradually:
                await self._let_through_gradually()
        finally:
            self._closed_until = None
            self._let_through(len(self._waiting))

    async def _let_through_gradually(self) -> None:
        """One at every step, more where there are too many for that; who comes meanwhile joins the end."""
        steps = round(REOPEN_SECONDS / STEP_SECONDS)
        for step in range(steps):
            if not self.held:
                return
            self._let_through(math.ceil(self.held / (steps - step)))
            await self._sleep(STEP_SECONDS)

    def _let_through(self, count: int) -> None:
        while self._waiting and count:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._count()  # here and not when it wakes: the gate may close again in between
                waiter.set_result(None)
                count -= 1

    async def drained(self) -> None:
        """Wait until no request is under way."""
        await self._drained.wait()

    def _count(self) -> None:
        self.in_flight += 1
        self._drained.clear()

    def _shed(self, reason: str, message: str) -> Shed:
        left = (self._closed_until or 0.0) - self._clock()
        return Shed(reason, message, max(1, math.ceil(left)))
