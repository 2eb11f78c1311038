"""The engine's API server: whether it and its engine are up."""

from __future__ import annotations

from highwater.memory.sources.source import Observation, Source


class Health(Source):
    """``GET /health``, the cheapest request: made where the engine's counts are not read."""

    name = "health"

    async def read(self) -> Observation:
        await self._engine.get_text("/health")
        return Observation()
