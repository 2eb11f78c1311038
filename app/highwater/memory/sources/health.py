"""The engine's API server: whether it and its engine are up."""

from __future__ import annotations

from highwater.memory.sources.source import Observation, Source


class Health(Source):
    """``GET /health``: 503 beside other responses is a dead engine; while vLLM scales every path has it.

    vllm 0.32.0 entrypoints/serve/instrumentator/health.py:32, entrypoints/serve/elastic_ep/middleware.py:37
    """

    name = "health"

    async def read(self) -> Observation:
        await self._engine.get_text("/health")
        return Observation()
