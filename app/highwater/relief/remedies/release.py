"""Return the allocator's cached blocks to the device."""

from __future__ import annotations

from highwater.engine.capabilities import Capabilities, no_extension
from highwater.engine.client import Engine
from highwater.readings import EngineStatus, Mode
from highwater.relief.remedies.remedy import Ask, Run, tell_workers


class Release:
    """Garbage collection, then ``empty_cache`` on every worker (on CPU: free heap back to the system)."""

    name = "release"
    frees = "blocks that PyTorch's allocator keeps and nobody uses (on CPU: free heap)"
    does_not_free = "anything still referenced: weights, KV pool, encoder cache entries"
    needs_release = False
    path = None
    automatic_since = None
    paces_after = False

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Needs our extension; harmless to traffic, but not while the pools are unmapped."""
        del mode
        if status.state == "sleeping":
            return "the engine is asleep: its pools are unmapped"
        return no_extension(capabilities)

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        """No: it runs between two steps."""
        del capabilities, mode
        return False

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """Op ``release`` on every worker.

        Raises:
            EngineError: The engine gave no good answer.
        """
        del ask
        return await tell_workers(engine, "release")
