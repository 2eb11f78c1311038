"""An event loop whose time passes only while nobody has anything to do.

Sidecar and model engine run in one such loop. When no callback is ready, no socket has anything and no job runs on
another thread, the clock jumps to the next timer: a day of an engine's life takes as long as the work in it.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from unittest.mock import patch

T = TypeVar("T")
START = 1000.0
"""Seconds on the loop's clock when it begins; not 0, as no machine's monotonic clock stands there."""
EPOCH = 1_763_660_000.0
STUCK_SECONDS = 120.0
"""Real seconds after which a loop that waits for what does not come is a mistake of the situation's."""
_LOOK_SECONDS = 0.02


class StuckError(RuntimeError):
    """Nothing will happen any more: no timer, no socket, no thread."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector loop on virtual time."""

    def __init__(self) -> None:
        self._now = START
        self.wall_offset = 0.0  # what the machine's wall clock is set forward by, in seconds
        self._jobs = 0
        super().__init__(cast("selectors.BaseSelector", _Selector(self)))

    def time(self) -> float:
        return self._now

    def wall_time(self) -> float:
        return EPOCH + self._now - START + self.wall_offset

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """As asyncio's; time stands still until the job is done."""
        self._jobs += 1
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, _: asyncio.Future[Any]) -> None:
        self._jobs -= 1

    @property
    def must_wait(self) -> bool:
        return self._jobs > 0

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Selector:
    """A selector that lets virtual time pass instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._inner = loop, selectors.DefaultSelector()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._inner.select(0)
        if events or timeout == 0:
            return events
        waited_from = time.perf_counter()
        while self._loop.must_wait or timeout is None:
            events = self._inner.select(_LOOK_SECONDS)
            if events:
                return events
            if time.perf_counter() - waited_from > STUCK_SECONDS:
                raise StuckError(f"nothing came for {STUCK_SECONDS:g} s of real time")
        self._loop.jump(max(timeout or 0.0, 0.0))
        return []


@contextmanager
def virtual_clocks(loop: VirtualLoop) -> Iterator[None]:
    """Give Python's two clocks virtual time: some parts ask them and take no clock from outside."""
    with patch("time.monotonic", loop.time), patch("time.time", loop.wall_time):
        yield


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a loop of its own, on virtual time, and return its result."""
    loop = VirtualLoop()
    try:
        with virtual_clocks(loop):
            return loop.run_until_complete(main(loop))
    finally:
        try:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
            gc.unfreeze()
