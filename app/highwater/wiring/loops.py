"""The tasks that run as long as the sidecar does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Loops:
    """Starts and ends them together.

    Args:
        loops: Coroutine functions that run until cancelled.
    """

    def __init__(self, *loops: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loops = loops
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every loop."""
        self._tasks = [asyncio.create_task(loop(), name=loop.__qualname__) for loop in self._loops]

    async def stop(self) -> None:
        """Cancel every loop, and return when all have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def alive(self) -> bool:
        """Return whether none has ended."""
        return not any(task.done() for task in self._tasks)
