"""What every remedy has in common: when it is refused, what it says to the engine, what it can and cannot free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.capabilities import Capabilities
from app.engine import Engine, EngineAnswer
from app.readings import EngineStatus, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the engine took it.

    Attributes:
        ok: Whether the engine did it, as far as it tells.
        reason: What went wrong, or what it did not tell.
        answer: The engine's own answer, for the drop-in paths.
    """

    ok: bool
    reason: str | None = None
    answer: EngineAnswer | None = None


class Remedy(Protocol):
    """One way of giving memory back."""

    @property
    def name(self) -> str:
        """As in rules, requests, events and metrics."""

    @property
    def frees(self) -> str:
        """What it can free, in words."""

    @property
    def spares(self) -> str:
        """What it cannot free, in words."""

    @property
    def needs_release(self) -> bool:
        """Whether the device sees the bytes only after the allocator's cached blocks were released."""

    @property
    def path(self) -> str | None:
        """The drop-in path, or ``None`` where vLLM has none."""

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Why it must not run now, or ``None``.

        Args:
            capabilities: What the engine can do.
            status: The engine as the last poll found it.
            mode: ``safe``: must harm no request; ``now``: the operator wants it, and only what can hang or kill the
                engine is refused.
        """

    async def run(self, engine: Engine, query: str = "") -> Run:
        """Do it once.

        Args:
            engine: The engine.
            query: Passed on as it is, on the drop-in paths.

        Raises:
            EngineError: The engine gave no good answer.
        """


def idle(status: EngineStatus) -> bool:
    """Whether the engine is known to have no request running or waiting."""
    return status.requests_running == 0 and status.requests_waiting == 0


def missing(path: str, since: str) -> str:
    """The refusal where a route is not there."""
    return f"this engine has no {path}; vLLM {since} and newer with VLLM_SERVER_DEV_MODE=1 have it"


async def post(engine: Engine, path: str, query: str) -> Run:
    """POST a reset and take the engine's word for it."""
    answer = await engine.post(path, query)
    if answer.status >= 400:  # noqa: PLR2004 - HTTP's errors
        return Run(ok=False, reason=f"the engine answered {answer.status}", answer=answer)
    return Run(ok=True, answer=answer)
