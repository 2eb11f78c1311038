"""Move encoder outputs to host memory; the next access brings each back."""

from __future__ import annotations

from dataclasses import asdict

from app.capabilities import Capabilities
from app.engine import Engine
from app.readings import EngineStatus, Mode
from app.remedies.remedy import Ask, Run, connector, no_extension, tell_workers
from app.safety import Need


class TrimEncoderCache:
    """Spills least recently used encoder outputs on every worker; the scheduler never notices.

    Args:
        host_budget_bytes: Host memory that the spilled may take, per rank; ``None``: half of what the host has free.
    """

    name = "trim_encoder_cache"
    frees = (
        "encoder outputs on the device, moved to host memory; they go back to PyTorch's allocator, and with release to "
        "the device"
    )
    spares = "weights, KV pool, outputs that a running request needs; on CPU everything: the device is the host there"
    needs_release = True
    path = None
    automatic_since = None

    def __init__(self, *, host_budget_bytes: int | None = None) -> None:
        self._host_budget_bytes = host_budget_bytes

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Where the cache is not the workers' own, or steps may run beside the call."""
        del mode
        if status.state == "sleeping":
            return "the engine is asleep: its pools are unmapped"
        if capabilities.executor == "ray":
            return "under the Ray executor a step may run beside a worker call"
        return no_extension(capabilities) or connector(capabilities)

    def need(self, capabilities: Capabilities, mode: Mode) -> Need:
        """Nothing: it runs between two steps, and what it moves comes back."""
        del capabilities, mode
        return "nothing"

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """Op ``trim`` on every worker, with the same target: all ranks hold the same outputs and choose alike.

        Raises:
            EngineError: The engine gave no good answer.
        """
        wanted = {**asdict(ask.target), "host_budget_bytes": self._host_budget_bytes}
        return await tell_workers(engine, "trim", {key: value for key, value in wanted.items() if value is not None})
