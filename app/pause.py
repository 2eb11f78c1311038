"""Pauses the engine and sees to it that it is resumed, also when this process dies in between.

Three hold that promise: the block that paused it; a small process beside us that resumes as soon as we are gone or too
late (``resume_guard``); and a line in the state file, by which the next sidecar finds what the last one left paused,
where the whole container went. Without a state file nothing is paused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from app.engine import Engine
from app.errors import EngineError, EngineRefused, EngineUnreachable, EngineUnresponsive, NotKept
from app.history import History
from app.resume_guard import arm
from app.state_file import StateFile

SECTION = "pause"
RESUME_SECONDS = 30.0
# Beyond the wait for requests under way: the reset itself, and the resumption.
GUARD_MARGIN_SECONDS = 30.0

log = logging.getLogger("highwater.pause")


class CannotPause(Exception):
    """The engine could not be paused, or its requests did not finish in time; it is not paused any more.

    Attributes:
        nothing_happened: It was never asked to pause.
    """

    def __init__(self, message: str, *, nothing_happened: bool) -> None:
        super().__init__(message)
        self.nothing_happened = nothing_happened


class Armed(Protocol):
    """What resumes the engine if we do not."""

    async def disarm(self) -> None:
        """The engine is resumed; nothing more to do."""

    def take_over(self) -> None:
        """We have given up; resume it as soon as it can be reached."""


class Pause:
    """Pauses and resumes.

    Args:
        engine: The engine.
        state: Remembers a pause across our own death.
        history: Where it is told what was found and done.
        arm: Starts what resumes the engine at ``url`` after so many seconds, or when we die.
    """

    def __init__(
        self,
        engine: Engine,
        state: StateFile,
        history: History,
        *,
        arm: Callable[[str, float], Awaitable[Armed]] = arm,
    ) -> None:
        self._engine = engine
        self._state = state
        self._history = history
        self._arm = arm
        self._turn = asyncio.Lock()

    @property
    def possible(self) -> bool:
        """Whether a pause would be undone whatever happens to us."""
        return self._state.configured

    @asynccontextmanager
    async def paused(self, seconds: float) -> AsyncIterator[None]:
        """The engine without running requests, new ones waiting in it, for as long as the block lasts.

        Args:
            seconds: How long its requests may take to finish.

        Raises:
            CannotPause: Not to be had, or not in time; it is not paused.
            EngineError: The engine is not there.
        """
        if self._turn.locked():
            raise CannotPause("not paused, as an earlier pause is still to be undone", nothing_happened=True)
        async with self._turn:
            guard = await self._make_sure(seconds)
            try:
                await self._pause(seconds)
                yield
            finally:
                # Also when we are cancelled: nobody else would, until the guard's time is up.
                await asyncio.shield(self._undo(guard))

    async def recover(self) -> None:
        """Resume what an earlier sidecar left paused; returns when there is nothing (more) to do."""
        async with self._turn:
            left = self._state.read(SECTION)
            if left is None:
                return
            if left.get("engine_url") != self._engine.url:
                self._history.record("recovery", f"a pause of another engine ({left.get('engine_url')}) was forgotten")
                await self._forget()
                return
            # The engine may be long in coming; it may be a new one, to which this does no harm.
            until_it_answers = AsyncRetrying(
                retry=retry_if_exception_type((EngineUnreachable, EngineUnresponsive)), wait=wait_fixed(1.0)
            )
            try:
                await until_it_answers(self._engine.resume)
                told = "resumed the engine: an earlier sidecar ended while it held it paused"
            except EngineRefused as exc:
                # One that has no such path cannot have been paused since it started.
                told = f"an earlier sidecar ended while it held the engine paused, and it will not resume: {exc}"
            self._history.record("recovery", told)
            log.warning("%s", told)
            await self._forget()

    async def _make_sure(self, seconds: float) -> Armed:
        """Before anything is paused: write it down, and arm what resumes it.

        Raises:
            CannotPause: One of the two was not to be had.
        """
        try:
            await self._write({"engine_url": self._engine.url, "at": time.time()})
        except NotKept as exc:
            raise CannotPause(f"not paused, as it could not be written down: {exc}", nothing_happened=True) from exc
        try:
            return await self._arm(self._engine.url, seconds + GUARD_MARGIN_SECONDS)
        except (OSError, TimeoutError) as exc:
            await self._forget()
            raise CannotPause(f"not paused, as no guard could be started: {exc}", nothing_happened=True) from exc

    async def _pause(self, seconds: float) -> None:
        try:
            await self._engine.pause(seconds)
        except EngineUnresponsive as exc:
            message = f"requests were still running after {seconds:g} s (gate.drain_seconds); the engine was resumed"
            raise CannotPause(message, nothing_happened=False) from exc
        except EngineRefused as exc:
            raise CannotPause(str(exc), nothing_happened=True) from exc

    async def _undo(self, guard: Armed) -> None:
        # An engine that cannot be reached is most likely gone, and its pause with it: not worth the wait.
        patience = AsyncRetrying(
            retry=retry_if_exception_type((EngineRefused, EngineUnresponsive)),
            wait=wait_fixed(0.5),
            stop=stop_after_delay(RESUME_SECONDS),
            reraise=True,
        )
        try:
            await patience(self._engine.resume)
        except EngineError as exc:
            # The state file keeps it, and the guard goes on.
            guard.take_over()
            self._history.record("recovery", f"the engine was not resumed and may still be paused: {exc}")
            log.warning("the engine was not resumed: %s", exc)
            return
        await self._forget()
        await guard.disarm()

    async def _forget(self) -> None:
        # If it cannot be written, the next start resumes once more, which does no harm.
        with suppress(NotKept):
            await self._write(None)

    async def _write(self, value: Mapping[str, Any] | None) -> None:
        # Not on the loop: a disk that takes its time must not hold up every stream.
        await asyncio.to_thread(self._state.write, SECTION, value)
