"""Clear the multimodal processor caches on the host."""

from __future__ import annotations

from app.capabilities import Capabilities
from app.engine import Engine
from app.readings import EngineStatus, Mode
from app.remedies.remedy import Run, idle, missing, post


class ResetMmCache:
    """The engine's ``/reset_mm_cache``. Its two sides drift apart when a request is rendered in between.

    A later use of an image that only one side knows then fails: vllm/v1/engine/core.py, "we don't attempt to re-sync".
    """

    name = "reset_mm_cache"
    frees = "processed images in the API server's and EngineCore's host memory"
    spares = "device memory: encoder outputs, weights and KV pool stay, and so does the allocator's reserve"
    needs_release = False
    path = "/reset_mm_cache"

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """From 0.28 on a drift heals itself; before, it fails requests; before 0.14 it hangs the engine for ever."""
        if not capabilities.reset_mm_cache:
            return missing(self.path, "0.11.2")
        if capabilities.at_least("0.28"):
            return None
        shown = capabilities.version or "of unknown version"
        if mode == "safe":
            return (
                f"vLLM {shown} fails or hangs requests that use an image from before the reset "
                "(0.28 and newer heal themselves)"
            )
        if not capabilities.at_least("0.14") and not idle(status):
            return (
                f"vLLM {shown} can hang for ever when this is called with requests under way (upstream issue 31404); "
                "wait until it is idle, or say ?force=true"
            )
        return None

    async def run(self, engine: Engine, query: str = "") -> Run:
        """POST it.

        Raises:
            EngineError: The engine gave no good answer.
        """
        return await post(engine, self.path, query)
