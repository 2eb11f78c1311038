"""Waiting, with limits that a busy machine does not use up: they are counted in turns of the loop that waits.

A limit is there so that a test which waits for what never comes ends; it decides nothing else. Whatever is waited for
may stand still for seconds, and so may the test: others share the cores. So there is one limit for all, a minute, and
no test has a shorter one of its own (ruff's TID251 refuses the usual ways); what is measured by the clock says why on
its line.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

LIMIT_SECONDS = 60.0
TURN_SECONDS = 0.01
T = TypeVar("T")


@contextlib.asynccontextmanager
async def patience(seconds: float | None = None) -> AsyncIterator[None]:
    """Raise TimeoutError when so much time is up; while the machine has none for this loop, none is counted.

    What is waited for mostly runs beside it, in this process or in another, and is held up as this loop is.

    Args:
        seconds: `LIMIT_SECONDS` where None.
    """
    async with asyncio.timeout(None) as limit:  # noqa: TID251 - it has no limit until turns are used up

        async def count() -> None:
            for _ in range(round((LIMIT_SECONDS if seconds is None else seconds) / TURN_SECONDS)):
                await asyncio.sleep(TURN_SECONDS)
            limit.reschedule(0)

        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()


async def patiently(awaited: Awaitable[T]) -> T:
    """Wait for it as `asyncio.wait_for` does, with `patience`."""
    async with patience():
        return await awaited


async def until(condition: Callable[[], object], *, pause_seconds: float = 0.001) -> None:
    """Wait until a condition holds for which there is no event.

    Args:
        condition: Returns something true once it holds, or an awaitable of that.
        pause_seconds: Between one look and the next; longer for what another process must answer.

    Raises:
        TimeoutError: It did not hold for `LIMIT_SECONDS`, counted as `patience` does.
    """
    async with patience():
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(pause_seconds)


def wait_until(condition: Callable[[], object], *, pause_seconds: float = 0.01) -> None:
    """Wait as `until` does, without a loop.

    Raises:
        TimeoutError: It did not hold for `LIMIT_SECONDS`, counted in looks: a look that took long counts as one. The
            message has the condition's source.
    """
    for _ in range(round(LIMIT_SECONDS / pause_seconds)):
        if condition():
            return
        time.sleep(pause_seconds)
    raise TimeoutError(f"not true for {LIMIT_SECONDS:g} s: {_source(condition)}")


def _source(condition: Callable[[], object]) -> str:
    """Return the statement that defines the condition; its name where there is no source."""
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):  # typed at a prompt, or written in C
        return repr(condition)
