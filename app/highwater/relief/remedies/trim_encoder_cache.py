"""Move encoder outputs to host memory; the next access brings each back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from highwater.engine.capabilities import Capabilities, no_extension
from highwater.engine.client import Engine
from highwater.readings import EngineStatus, Mode
from highwater.relief.remedies.remedy import Ask, Run, connector
from highwater.relief.remedies.rounds import Answers, tell_workers_in_rounds


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
    does_not_free = (
        "weights, KV pool, outputs that a running request needs; on CPU everything: the device is the host there"
    )
    needs_release = True
    path = None
    automatic_since = None
    paces_after = False

    def __init__(self, *, host_budget_bytes: int | None = None) -> None:
        self._host_budget_bytes = host_budget_bytes

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Refuse where the cache is not the workers' own. Each worker refuses for reasons that only it can see."""
        del mode
        if status.state == "sleeping":
            return "the engine is asleep: its pools are unmapped"
        return no_extension(capabilities) or connector(capabilities)

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        """No: it runs between two steps, and what it moves comes back."""
        del capabilities, mode
        return False

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """Op ``trim`` on every worker, with the same target: all ranks hold the same outputs and choose alike.

        In rounds between which the engine steps, until the target is reached.

        Raises:
            EngineError: The engine gave no good answer.
        """
        wanted = {**asdict(ask.target), "host_budget_bytes": self._host_budget_bytes}
        payload = {key: value for key, value in wanted.items() if value is not None}
        return await tell_workers_in_rounds(engine, "trim", payload, again=_for_the_rest)


def _for_the_rest(payload: Mapping[str, Any], answers: Answers) -> Mapping[str, Any]:
    """Bytes to let go become bytes to keep: ranks that came further than others then end where the others do."""
    if "free_bytes" not in payload:
        return payload
    left = [answer for answer in answers if not answer["complete"]]
    keep = max(answer["encoder_cache"]["device_bytes"] - answer["remaining_bytes"] for answer in left)
    return {**{key: value for key, value in payload.items() if key != "free_bytes"}, "keep_bytes": max(0, keep)}
