"""Drop the cached prefixes from the KV pool."""

from __future__ import annotations

from app.capabilities import Capabilities
from app.engine import Engine
from app.readings import EngineStatus, Mode
from app.remedies.remedy import Run, missing, post


class ResetPrefixCache:
    """The engine's ``/reset_prefix_cache``. It fails silently while any block is in use; 0.26 and newer say so."""

    name = "reset_prefix_cache"
    frees = "KV blocks that hold cached prefixes, for new requests"
    spares = "device memory: the KV pool is preallocated and keeps its size"
    needs_release = False
    path = "/reset_prefix_cache"

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Harmless to traffic on every version."""
        del status, mode
        return None if capabilities.reset_prefix_cache else missing(self.path, "0.11")

    async def run(self, engine: Engine, query: str = "") -> Run:
        """POST it, and believe the engine where it tells.

        Raises:
            EngineError: The engine gave no good answer.
        """
        run = await post(engine, self.path, query)
        if not run.ok or run.answer is None:
            return run
        success = run.answer.json_object().get("success")
        if success is False:
            return Run(ok=False, reason="refused by the engine: blocks are in use", answer=run.answer)
        if success is None:
            return Run(ok=True, reason="this vLLM does not tell whether it worked (0.26 does)", answer=run.answer)
        return run
