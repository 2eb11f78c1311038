"""The states of a relief, each with a deadline, so that every wait is bounded; in two of them requests are held.

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

New requests wait at the gate until the running ones have finished and the engine's own counts agree. If that takes too
long the remedy is refused: no request is cut short, and those that waited go on. If a running request has already taken
longer than requests are given to finish, none is held in the first place.

The engine itself is never paused: a pause would outlive this process, and the gate cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_fixed

from gated_proxy.gate import Gate
from highwater.engine.client import Engine
from highwater.model.engine import EngineLoad
from highwater.model.remedies import QuiescedBy
from highwater.model.report import Report
from highwater.model.units import counted
from highwater.watch.sources import read_load

# The engine's counts lag behind its responses by a step; requests that others sent stay longer.
COUNTS_LAG_SECONDS = 2.0
LOOK_SECONDS = 0.1
# The same, and one late response of the engine.
DRAINED_SECONDS = 3.0
# For this long after the engine worked on requests that did not pass the gate, an idle gate proves nothing.
BYPASS_SECONDS = 60.0
# The longest that a remedy may take while requests are held for it.
CALL_SECONDS = 10.0
# The gate's own deadline comes after those of the states in which it is closed, so that they report what went wrong.
GATE_MARGIN_SECONDS = 1.0
_BYPASSED = (
    "that did not pass through this sidecar (or whose clients {have} left); they cannot be held here. Send all traffic "
    "through the sidecar"
)


# --- the states ---

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


# --- requests held ---


class CannotQuiesce(Exception):
    """Requests cannot be held, or did not finish in time; nothing was done. The message says what would help."""

    held_seconds: float | None = None  # how long new requests waited for nothing; None where none had to


@dataclass(slots=True)
class Quiesced:
    """An engine without requests."""

    by: QuiescedBy  # what kept them away
    held_seconds: float | None = None  # how long new ones waited, known when it is over; None where none had to


class Quiescer:
    """Holds requests for remedies until running ones finish; ``impossible`` is why none can ever be held here."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        *,
        drain_seconds: float,
        impossible: str | None,
        clock: Callable[[], float],
    ) -> None:
        self.impossible = impossible
        self._engine = engine
        self.gate = gate
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._bypassed_at: float | None = None

    def notice(self, report: Report) -> None:
        requests = (report.engine.requests_running or 0) + (report.engine.requests_waiting or 0)
        is_gate_idle = not self.gate.in_flight and self._clock() - self.gate.idle_since > COUNTS_LAG_SECONDS
        if requests and is_gate_idle:
            self._bypassed_at = self._clock()

    def refusal(self) -> str | None:
        """Return why requests would not be held now, as far as that shows beforehand; no dry run promises more."""
        bypassed = None
        if self._bypassed_at is not None and (ago := self._clock() - self._bypassed_at) < BYPASS_SECONDS:
            bypassed = f"{ago:.0f} s ago the engine had requests {_BYPASSED.format(have='had')}"
        return self.impossible or bypassed or self._takes_too_long()

    def plan(self) -> str:
        return f"would hold new requests for at most {self._drain_seconds:g} s until running requests are done"

    @asynccontextmanager
    async def quiet(self, states: States, *, then_pace: bool) -> AsyncIterator[Quiesced]:
        """Hold new requests, with none running, for as long as the block lasts.

        Args:
            states: Those of the relief that needs it.
            then_pace: Let requests through one by one for a while afterwards: those that come together would overtake
                each other in vLLM, and it fails a request that overtakes another with the same new image.

        Raises:
            CannotQuiesce: Requests cannot be held, or did not finish in time; none is held any more.
            EngineError: The engine's counts could not be read.
        """
        if (reason := self.refusal()) is not None:
            raise CannotQuiesce(reason)
        began, quiesced = self._clock(), Quiesced("gate")
        at_most = self._drain_seconds + DRAINED_SECONDS + CALL_SECONDS + GATE_MARGIN_SECONDS
        with self.gate.closed(at_most, then_pace=then_pace):
            try:
                async with states.enter("closing", self._drain_seconds):
                    await self.gate.drained()
            except TimeoutError as exc:
                raise self._in_vain(
                    f"{counted(self.gate.in_flight, 'request')} had not ended after {self._drain_seconds:g} s "
                    "(gate.drain_seconds); what was under way was left alone, and new ones were held no longer",
                    began,
                ) from exc
            try:
                async with states.enter("drained", DRAINED_SECONDS):
                    await self._engine_is_idle(began)
            except TimeoutError as exc:
                late = f"the engine did not report within {DRAINED_SECONDS:g} s whether requests run"
                raise self._in_vain(late, began) from exc
            try:
                yield quiesced
            finally:
                quiesced.held_seconds = self._clock() - began

    def _takes_too_long(self) -> str | None:
        if count := self.gate.open_ended:
            sockets = "1 WebSocket is open, which ends" if count == 1 else f"{count} WebSockets are open, which end"
            return f"{sockets} when the client wants; no request was held. Try again when none is open"
        seconds = self.gate.oldest_seconds()
        if seconds is None or seconds <= self._drain_seconds:
            return None
        return (
            f"a request has been under way for {seconds:.0f} s, longer than requests are given to finish "
            f"(gate.drain_seconds, {self._drain_seconds:g} s); no request was held. Try again when it has ended, or "
            "set gate.drain_seconds to more than it takes"
        )

    def _in_vain(self, message: str, began: float) -> CannotQuiesce:
        refusal = CannotQuiesce(message)
        refusal.held_seconds = self._clock() - began
        return refusal

    async def _engine_is_idle(self, began: float) -> None:
        async def look() -> EngineLoad:
            load = await read_load(self._engine)
            if load.requests_running is None or load.requests_waiting is None:
                unknown = "the engine does not report its request counts (was it started with --disable-log-stats?)"
                raise self._in_vain(unknown, began)
            return load

        looks = AsyncRetrying(
            retry=retry_if_result(lambda load: not load.is_idle),
            stop=stop_after_delay(COUNTS_LAG_SECONDS),
            wait=wait_fixed(LOOK_SECONDS),
        )
        try:
            await looks(look)
        except RetryError as exc:
            load: EngineLoad = exc.last_attempt.result()
            self._bypassed_at = self._clock()
            counts = f"{counted(load.requests_running or 0, 'request')} running and {load.requests_waiting} waiting"
            raise self._in_vain(f"the engine has {counts} {_BYPASSED.format(have='have')}", began) from exc
