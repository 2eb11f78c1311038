"""Sixteen clients that ask one engine for the same few images again and again, with nothing between it and them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Self

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.traffic import TrafficResult, send_images

CLIENTS = 16
START_SECONDS = 120.0
POOL = range(24)
"""The images' seeds: few, so that every cache knows each of them after a few seconds."""


class Clients:
    """They ask from `start` to `send_no_more`."""

    UNDER_WAY = 100
    """Requests after whose end every cache knows each image."""

    def __init__(self, engine: DemoEngine) -> None:
        self.ended = 0
        """Requests that have come to an end, good or bad."""
        self._engine = engine
        self._stopping = False
        self._under_way = asyncio.Event()
        self._task: asyncio.Task[TrafficResult] | None = None

    async def start(self) -> Self:
        sending = send_images(
            self._engine.url,
            self._engine.served_model,
            images=self._seeds(),
            concurrency=CLIENTS,
            on_done=self._count,
        )
        self._task = asyncio.create_task(sending)
        async with asyncio.timeout(START_SECONDS):
            await self._under_way.wait()
        return self

    def send_no_more(self) -> None:
        self._stopping = True

    async def result(self) -> TrafficResult:
        assert self._task is not None
        return await self._task

    def _seeds(self) -> Iterator[int]:
        draw = random.Random(0)  # noqa: S311 - nothing secret: the same order every time
        while not self._stopping:
            yield draw.choice(POOL)

    def _count(self) -> None:
        self.ended += 1
        if self.ended >= self.UNDER_WAY:
            self._under_way.set()
