"""The entries of the workers' encoder caches, read when an operator asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from highwater.engine.client import Engine
from highwater.errors import EngineGarbled

# The whole cache is asked for, so that however many ask in whatever order, the workers are asked once a second at
# most: every worker call holds the engine's step up.
MAX_ENTRIES = 10_000
KEPT_SECONDS = 1.0


class EncoderCacheEntries:
    """Op ``encoder_cache`` on every worker, at most once a second."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._turn = asyncio.Lock()
        self._answers: list[dict[str, Any]] = []
        self._asked_at: float | None = None

    @property
    def known(self) -> tuple[list[dict[str, Any]], float] | None:
        """The answers of the last ``read``, and how many seconds ago that was; ``None`` before the first."""
        return None if self._asked_at is None else (self._answers, self._clock() - self._asked_at)

    async def read(self) -> list[dict[str, Any]]:
        """Each worker's answer (worker_ext/README.md), entries by bytes, largest first.

        Raises:
            EngineError: No good answer.
        """
        async with self._turn:
            now = self._clock()
            if self._asked_at is None or now - self._asked_at >= KEPT_SECONDS:
                answers = await self._engine.rpc("encoder_cache", {"limit": MAX_ENTRIES, "sort": "bytes"})
                for answer in answers:
                    if not answer.get("ok") or not isinstance(answer.get("entries"), list):
                        raise EngineGarbled(f"rank {answer.get('rank')} could not list: {answer.get('error')}")
                self._answers, self._asked_at = answers, now
            return self._answers
