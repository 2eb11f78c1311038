"""The engine's API server: whether it and its engine are up."""

from __future__ import annotations

from highwater.memory.sources.source import Observation, Source


class Health(Source):
    """``GET /health``: 503 beside other responses is a dead engine (vllm 0.32.0 serve/instrumentator/health.py:32)."""

    name = "health"

    async def read(self) -> Observation:
        await self._engine.get_text("/health")
        return Observation()
