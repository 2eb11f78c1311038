"""The gate to the engine: admits and counts requests, holds new ones for a while, and sheds those above its limits.

An admitted request is never cut; held requests go on in the order in which they came, or are shed where they have
waited too long or too many wait already. A request counts once the engine can act on it: a caller that sends it piece
by piece enters before the piece that makes it whole.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gated_proxy.failures import Failure, Refused

# How long requests are paced after a closing with `then_pace`.
PACE_SECONDS = 8.0
# The least time between two paced requests, and the most that the next waits for the engine's response to the one
# before: a response that is not streamed begins when it is whole.
STEP_SECONDS = 0.02
ALONE_SECONDS = 0.5

log = logging.getLogger("highwater.gate")


class Admission:
    """One admitted request, ``since`` a time by the gate's clock; it may last as long as its client wants."""

    __slots__ = ("has_response", "is_open_ended", "since")

    def __init__(self, since: float) -> None:
        self.has_response = False
        self.is_open_ended = False
        self.since = since


Later = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


def on_the_loop(seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call)


class Gate:
    """Counts requests under way, and holds new ones while it is closed.

    At most ``max_held`` wait, for ``hold_seconds`` each; then a request is shed. ``clock`` is monotonic seconds;
    ``later`` calls back after so many seconds.
    """

    def __init__(
        self,
        *,
        hold_seconds: float = 30.0,
        max_held: int = 1024,
        clock: Callable[[], float] = time.monotonic,
        later: Later = on_the_loop,
    ) -> None:
        self.idle_since = clock()
        self._hold_seconds = hold_seconds
        self._max_held = max_held
        self._clock = clock
        self._later = later
        self._next: asyncio.TimerHandle | None = None
        self._paced: Admission | None = None  # the last one
        self._paced_until: float | None = None
        self._closed_until: float | None = None
        self._inside: set[Admission] = set()
        # In the order in which they came; a key that leaves is found without a search.
        self._waiting: OrderedDict[asyncio.Future[Admission], None] = OrderedDict()
        self._drained = asyncio.Event()
        self._drained.set()

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    @property
    def held(self) -> int:
        return len(self._waiting)

    @property
    def is_open(self) -> bool:
        return self._closed_until is None

    @property
    def passes_at_once(self) -> bool:
        return self.is_open and self._paced_until is None

    @property
    def open_ended(self) -> int:
        return sum(admission.is_open_ended for admission in self._inside)

    def oldest_seconds(self) -> float | None:
        if not self._inside:
            return None
        return self._clock() - min(admission.since for admission in self._inside)

    def try_enter(self) -> Admission | None:
        """Admit one request if that can be done now; ``leave`` must follow if it was."""
        return self.admit() if self.passes_at_once else None

    def admit(self) -> Admission:
        """Count a request that the engine has already, whether the gate is open or not; ``leave`` must follow."""
        admission = Admission(self._clock())
        self._inside.add(admission)
        self._drained.clear()
        return admission

    async def enter(self) -> Admission:
        """Admit one request, now or later; ``leave`` must follow. Raises Refused."""
        if (admission := self.try_enter()) is not None:
            return admission
        if self.held >= self._max_held:
            if not self.is_open:
                raise self._shed("gate_full", f"{self._max_held} requests wait already for a cache reset to end")
            # The gate is open, and only paces: no request is shed for that.
            if self._admit_waiting(1) is None:
                return self.admit()
        waiter: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            async with asyncio.timeout(self._hold_seconds):
                return await waiter
        except BaseException as exc:
            if waiter.done() and not waiter.cancelled():
                self.leave(waiter.result())  # admitted and cancelled at the same moment
            waiter.cancel()
            self._waiting.pop(waiter, None)
            if isinstance(exc, TimeoutError):
                waited = f"held for {self._hold_seconds:g} s for a cache reset that has not ended"
                raise self._shed("held_too_long", waited) from exc
            raise

    def leave(self, admission: Admission) -> None:
        self._inside.remove(admission)
        if not self._inside:
            self.idle_since = self._clock()
            self._drained.set()

    @contextmanager
    def closed(self, at_most_seconds: float, *, then_pace: bool = False) -> Iterator[None]:
        """Hold new requests until the block ends, and for a bounded time at most.

        Args:
            at_most_seconds: That time, by which ``Retry-After`` is reckoned. Then the gate opens by itself, whatever
                the block waits for.
            then_pace: Admit requests one by one for a while after it, held and new ones: the next when the engine's
                response to the one before has begun, or did not for half a second.
        """
        self._closed_until = self._clock() + at_most_seconds

        def open_overdue() -> None:
            log.warning(
                "requests were held for %g s, the most that was allowed, and are held no longer", at_most_seconds
            )
            self._open(then_pace=then_pace)

        overdue = self._later(at_most_seconds, open_overdue)
        try:
            yield
        except BaseException:
            then_pace = False
            raise
        finally:
            overdue.cancel()
            if not self.is_open:  # else it opened by itself, and requests pass already
                self._open(then_pace=then_pace)

    def _open(self, *, then_pace: bool) -> None:
        self._closed_until = None
        if then_pace:
            self._paced_until = self._clock() + PACE_SECONDS
        self._step()

    def _step(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if not self.is_open:
            return  # closed again: the requests that still wait do so until the next opening
        left = (self._paced_until or 0.0) - self._clock()
        if left <= 0:
            self._paced_until = self._paced = None
            self._admit_waiting(len(self._waiting))
            return
        # Faster where there are so many that they would wait longer than requests are paced.
        if self._engine_has_the_last() or self.held * ALONE_SECONDS > left:
            self._paced = self._admit_waiting(math.ceil(self.held * STEP_SECONDS / left)) or self._paced
        self._next = self._later(STEP_SECONDS, self._step)

    def _engine_has_the_last(self) -> bool:
        """Return whether the request that was admitted last is past the point where another could overtake it.

        vLLM's front-end hands a request to the engine when its response begins, or before.
        """
        last = self._paced
        if last is None or last.has_response or last not in self._inside:
            return True
        return self._clock() - last.since >= ALONE_SECONDS

    def _admit_waiting(self, count: int) -> Admission | None:
        last = None
        while self._waiting and count:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                last = self.admit()
                waiter.set_result(last)  # now and not when it wakes: the gate may close again in between
                count -= 1
        return last

    async def drained(self) -> None:
        await self._drained.wait()

    def _shed(self, reason: str, message: str) -> Refused:
        left = (self._closed_until or 0.0) - self._clock()
        return Refused(Failure(503, reason, message, retry_after=max(1, math.ceil(left))))
