"""Reads whether the engine's scheduler is paused."""

from __future__ import annotations

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.errors import EngineGarbled
from highwater.memory.sources.source import Observation, Reach


class PauseState:
    """``GET /is_paused``, which vLLM 0.17 and newer answers from the engine itself."""

    name = "pause_state"
    reach: Reach = "engine"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def available(self, capabilities: Capabilities) -> bool:
        """From vLLM 0.12 on, in development mode."""
        return capabilities.is_paused

    async def read(self) -> Observation:
        """Ask once.

        Raises:
            EngineError: No good answer.
        """
        answer = await self._engine.get_json("/is_paused")
        paused = answer.get("is_paused") if isinstance(answer, dict) else None
        if not isinstance(paused, bool):
            raise EngineGarbled(f"GET /is_paused answered {answer!r}")
        return Observation(paused=paused)
