"""The engine's scheduler: whether it is paused."""

from __future__ import annotations

from highwater.engine.capabilities import Capabilities
from highwater.errors import EngineGarbled
from highwater.memory.sources.source import Observation, Source


class PauseState(Source):
    """``GET /is_paused`` of vLLM 0.12 and newer, in development mode; from 0.17 on the engine itself responds."""

    name = "pause_state"
    reach = "engine"

    def available(self, capabilities: Capabilities) -> bool:
        return capabilities.is_paused

    async def read(self) -> Observation:
        response = await self._engine.get_json("/is_paused")
        paused = response.get("is_paused") if isinstance(response, dict) else None
        if not isinstance(paused, bool):
            raise EngineGarbled(f"GET /is_paused answered {response!r}")
        return Observation(paused=paused)
