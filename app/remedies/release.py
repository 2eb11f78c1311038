"""Return the allocator's cached blocks to the device."""

from __future__ import annotations

from app.capabilities import EXTENSION, Capabilities
from app.engine import Engine
from app.readings import EngineStatus, Mode
from app.remedies.remedy import Run


class Release:
    """Garbage collection, then ``empty_cache`` on every worker (on CPU: free heap back to the system)."""

    name = "release"
    frees = "blocks that PyTorch's allocator keeps and nobody uses (on CPU: free heap)"
    spares = "anything still referenced: weights, KV pool, encoder cache entries"
    needs_release = False
    path = None

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Needs our extension; harmless to traffic, but not while the pools are unmapped."""
        del mode
        if not capabilities.collective_rpc:
            return f"the worker extension is not loaded; start vLLM with --worker-extension-cls {EXTENSION}"
        if status.state == "sleeping":
            return "the engine is asleep: its pools are unmapped"
        return None

    async def run(self, engine: Engine, query: str = "") -> Run:
        """Op ``release`` on every worker.

        Raises:
            EngineError: The engine gave no good answer.
        """
        del query
        answers = await engine.rpc("release")
        failed = [answer for answer in answers if not answer.get("ok")]
        if failed:
            return Run(ok=False, reason=f"{len(failed)} of {len(answers)} ranks failed: {failed[0].get('error')}")
        return Run(ok=True)
