"""Makes the moment in which a remedy harms nobody, and ends it whatever happens.

::

    any     nothing to do
    pause   the engine lets its requests finish and makes new ones wait; resumed afterwards (``pause``)
    gate    new requests are held here, those under way finish, the engine's own counts agree; opened afterwards

A moment that cannot be made in time is refused: requests are not cut short, and what was held goes on. Nothing is held
at all where something under way has already taken longer than requests are given to finish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_fixed

from app.capabilities import Capabilities
from app.engine import Engine
from app.gate import Gate
from app.pause import CannotPause, Pause
from app.readings import EngineLoad, Moment, Report
from app.safety import Need, choose_moment
from app.sources.engine_metrics import EngineMetrics

# The engine's counts lag behind its answers by a step; requests that others sent stay longer.
SETTLE_SECONDS = 2.0
LOOK_SECONDS = 0.1
# For so long after the engine was seen to work on what did not pass the gate, the gate is no proof of anything.
BYPASS_SECONDS = 60.0
# What a reset itself may take at most, beyond the wait for it.
RESET_SECONDS = 10.0


class NoMoment(Exception):
    """No safe moment came; nothing was done. The message says why, and what would help.

    Attributes:
        held_seconds: How long new requests waited in vain, where any moment was tried.
    """

    held_seconds: float | None = None


@dataclass(slots=True)
class Made:
    """The moment that was made.

    Attributes:
        kind: How.
        held_seconds: How long new requests waited, known when it is over.
    """

    kind: Moment
    held_seconds: float | None = None


class Moments:
    """Makes moments.

    Args:
        engine: The engine.
        gate: Where the data plane's requests pass.
        pause: Pauses the engine.
        drain_seconds: How long requests under way may take to finish.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        pause: Pause,
        *,
        drain_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = EngineMetrics(engine)
        self._gate = gate
        self._pause = pause
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._bypassed_at: float | None = None

    @property
    def drain_seconds(self) -> float:
        """How long requests under way may take to finish."""
        return self._drain_seconds

    def notice(self, report: Report) -> None:
        """Look out for requests that the engine has and the gate has not seen."""
        running = (report.engine.requests_running or 0) + (report.engine.requests_waiting or 0)
        quiet = not self._gate.in_flight and self._clock() - self._gate.idle_since > SETTLE_SECONDS
        if running and quiet:
            self._bypassed_at = self._clock()

    def plan(self, need: Need, capabilities: Capabilities) -> str:
        """What would be done, for a dry run."""
        kind = choose_moment(need, capabilities, may_pause=self._pause.possible)
        if kind == "gate" and (reason := self._takes_too_long()) is not None:
            return f"would be refused now: {reason}"
        return {
            "any": "needs no special moment",
            "pause": f"would pause the engine for at most {self._drain_seconds:g} s until its requests are done",
            "gate": f"would hold new requests for at most {self._drain_seconds:g} s until those under way are done",
        }[kind]

    @asynccontextmanager
    async def when(self, need: Need, capabilities: Capabilities) -> AsyncIterator[Made]:
        """The moment, for as long as the block lasts.

        Args:
            need: What must be still.
            capabilities: What the engine can do.

        Raises:
            NoMoment: It could not be made. Nothing is held or paused any more.
            EngineError: The engine could not be asked.
        """
        kind = choose_moment(need, capabilities, may_pause=self._pause.possible)
        if kind == "pause":
            began, made = self._clock(), Made("pause")
            try:
                async with self._pause.paused(self._drain_seconds):
                    yield made
                    return
            except CannotPause as exc:
                if not exc.nothing_happened:
                    raise self._in_vain(str(exc), began) from exc
            finally:
                made.held_seconds = self._clock() - began
            kind = "gate"  # the pause was not to be had; requests can still be held here
        if kind == "gate":
            async with self._held(then_pace=need == "idle path") as made:
                yield made
        else:
            yield Made("any")

    @asynccontextmanager
    async def _held(self, *, then_pace: bool) -> AsyncIterator[Made]:
        if self._bypassed_at is not None and (ago := self._clock() - self._bypassed_at) < BYPASS_SECONDS:
            raise NoMoment(
                f"{ago:.0f} s ago the engine had requests that are none of this sidecar's (or whose clients had left); "
                "they cannot be held here. Send all traffic through the sidecar"
            )
        if (reason := self._takes_too_long()) is not None:
            raise NoMoment(reason)
        began, made = self._clock(), Made("gate")
        # Paced, as what an idle path was needed for may have emptied the processor caches: vLLM then fails a request
        # that overtakes another one with the same image, as requests do that come together.
        with self._gate.closed(self._drain_seconds + RESET_SECONDS, then_pace=then_pace):
            try:
                async with asyncio.timeout(self._drain_seconds):
                    await self._gate.drained()
            except TimeoutError as exc:
                raise self._in_vain(
                    f"{self._gate.in_flight} requests were still under way after {self._drain_seconds:g} s "
                    "(gate.drain_seconds); they were left alone, and new ones were held no longer",
                    began,
                ) from exc
            await self._engine_is_idle()
            try:
                yield made
            finally:
                made.held_seconds = self._clock() - began

    def _takes_too_long(self) -> str | None:
        """Why requests would be held in vain, if that can be known before."""
        if lasting := self._gate.open_ended:
            sessions = (
                "1 WebSocket is open, which ends" if lasting == 1 else f"{lasting} WebSockets are open, which end"
            )
            return f"{sessions} when the client wants; no request was held. Try again when none is open"
        seconds = self._gate.oldest_seconds()
        if seconds is None or seconds <= self._drain_seconds:
            return None
        return (
            f"a request has been under way for {seconds:.0f} s, longer than requests are given to finish "
            f"(gate.drain_seconds, {self._drain_seconds:g} s); no request was held. Try again when it has ended, or "
            "set gate.drain_seconds to more than it takes"
        )

    def _in_vain(self, message: str, began: float) -> NoMoment:
        refusal = NoMoment(message)
        refusal.held_seconds = self._clock() - began
        return refusal

    async def _engine_is_idle(self) -> None:
        """The engine's own counts say the same.

        Raises:
            NoMoment: It has requests that did not pass the gate, or does not tell.
            EngineError: It could not be asked.
        """
        looks = AsyncRetrying(
            retry=retry_if_result(lambda load: not load.is_idle),
            stop=stop_after_delay(SETTLE_SECONDS),
            wait=wait_fixed(LOOK_SECONDS),
        )
        try:
            await looks(self._look)
        except RetryError as exc:
            load: EngineLoad = exc.last_attempt.result()
            self._bypassed_at = self._clock()
            raise NoMoment(
                f"the engine has {load.requests_running} requests running and {load.requests_waiting} waiting that are "
                "none of this sidecar's (or whose clients have left); they cannot be held here. Send all traffic "
                "through the sidecar"
            ) from exc

    async def _look(self) -> EngineLoad:
        load = (await self._load.read()).load
        if load is None or load.requests_running is None or load.requests_waiting is None:
            raise NoMoment("the engine does not tell its requests (was it started with --disable-log-stats?)")
        return load
