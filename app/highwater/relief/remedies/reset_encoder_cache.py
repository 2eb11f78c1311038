"""Empty the encoder cache, scheduler and workers together."""

from __future__ import annotations

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.readings import EngineStatus, Mode
from highwater.relief.remedies.remedy import Ask, Run, connector, missing, post


class ResetEncoderCache:
    """The engine's ``/reset_encoder_cache``: the scheduler forgets first, in order with its queued steps.

    That makes it consistent under live traffic (vllm/v1/core/encoder_cache_manager.py ``reset``).
    """

    name = "reset_encoder_cache"
    frees = "encoder outputs on the device; they go back to PyTorch's allocator, and with release to the device"
    does_not_free = "weights, KV pool, processor caches on the host"
    needs_release = True
    path = "/reset_encoder_cache"
    automatic_since = None
    paces_after = False

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Only where the engine clears both sides itself: clearing the workers' side alone kills it."""
        if not capabilities.reset_encoder_cache:
            return missing(self.path, "0.16")
        if status.state == "sleeping":
            return "the engine is asleep"
        return connector(capabilities) if mode == "safe" else None

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        """Only where a decoder attends to the encoder's outputs throughout: their budget would go wrong."""
        return capabilities.encoder_decoder and mode == "safe"

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """POST it.

        Raises:
            EngineError: The engine gave no good answer.
        """
        return await post(engine, self.path, ask.query)
