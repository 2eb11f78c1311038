"""Waiting, with limits that a busy machine does not use up: they are counted in turns of the loop that waits."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

TURN_SECONDS = 0.01
T = TypeVar("T")


@contextlib.asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError when so much time is up; while the machine has none for this loop, none is counted.

    What is waited for mostly runs beside it, in this process or in another, and is held up as this loop is.
    """
    async with asyncio.timeout(None) as limit:

        async def count() -> None:
            for _ in range(round(seconds / TURN_SECONDS)):
                await asyncio.sleep(TURN_SECONDS)
            limit.reschedule(0)

        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()


async def patiently(awaited: Awaitable[T], seconds: float) -> T:
    """Wait for it as `asyncio.wait_for` does, with `patience`."""
    async with patience(seconds):
        return await awaited


async def until(condition: Callable[[], object], seconds: float = 60.0, *, pause_seconds: float = 0.001) -> None:
    """Wait until a condition holds for which there is no event.

    Args:
        condition: Returns something true once it holds, or an awaitable of that.
        seconds: TimeoutError after so many, counted as `patience` does.
        pause_seconds: Between one look and the next; longer for what another process must answer.
    """
    async with patience(seconds):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(pause_seconds)
