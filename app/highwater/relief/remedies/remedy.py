"""The interface of every remedy: when it is refused, what it sends to the engine, what it can and cannot free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine, EngineAnswer
from highwater.readings import UNNEEDED, EngineStatus, Mode, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How a remedy is asked for.

    Attributes:
        query: The client's query string, passed on as it is on the drop-in paths.
        target: How far a trim goes; nobody else looks at it.
        patience_seconds: How long a remedy that the engine puts off may be tried again.
    """

    query: str = ""
    target: Target = UNNEEDED
    patience_seconds: float = 0.0


PLAIN = Ask()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the engine took it.

    Attributes:
        ok: Whether the engine did it, as far as it reports that.
        reason: What went wrong, or what it did not report.
        refused: Whether nothing was done, on purpose.
        answer: The engine's own answer, for the drop-in paths.
        detail: What each worker said, in rank order.
    """

    ok: bool
    reason: str | None = None
    refused: bool = False
    answer: EngineAnswer | None = None
    detail: tuple[Mapping[str, Any], ...] = ()


class Remedy(Protocol):
    """One way of giving memory back."""

    @property
    def name(self) -> str:
        """As in rules, requests, events and metrics."""

    @property
    def frees(self) -> str:
        """The memory that it can free, in words."""

    @property
    def does_not_free(self) -> str:
        """The memory that it cannot free, in words."""

    @property
    def needs_release(self) -> bool:
        """True if the device sees the bytes only after the allocator's cached blocks were released."""

    @property
    def path(self) -> str | None:
        """The drop-in path, or ``None`` where vLLM has none."""

    @property
    def paces_after(self) -> bool:
        """True if requests are let through one by one for a while after they were held for it."""

    @property
    def automatic_since(self) -> str | None:
        """The vLLM version from which on the policy may run it by itself, or ``None`` for every version."""

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Why it must not run now, or ``None``.

        Args:
            capabilities: What the engine can do.
            status: The engine as the last poll found it.
            mode: ``safe``: must harm no request; ``now``: the operator wants it, and only what can hang or kill the
                engine is refused.
        """

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        """Return whether it needs the gate to harm no request; called only where it is not refused."""

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """Do it once.

        Args:
            engine: The engine.
            ask: How it is asked for.

        Raises:
            EngineError: The engine gave no good answer.
        """


def missing(path: str, since: str) -> str:
    """The refusal where a route is not there."""
    return f"this engine has no {path}; vLLM {since} and newer with VLLM_SERVER_DEV_MODE=1 have it"


def operators_only(remedy: Remedy, capabilities: Capabilities) -> str | None:
    """Why the policy must leave it to an operator on this vLLM, or ``None``."""
    since = remedy.automatic_since
    if since is None or capabilities.at_least(since):
        return None
    return f"before vLLM {since} only an operator may ask for it: a request that does not pass here would be harmed"


def connector(capabilities: Capabilities) -> str | None:
    """The refusal where something else keeps references into the encoder cache, or ``None``."""
    if not capabilities.ec_connector:
        return None
    return "an encoder-cache connector is configured, which keeps references into the cache"


async def tell_workers(engine: Engine, op: str, payload: Mapping[str, Any] | None = None) -> Run:
    """One operation on every worker; their answers are the detail.

    Raises:
        EngineError: The engine gave no good answer.
    """
    answers = await engine.rpc(op, payload)
    failed = [answer for answer in answers if not answer.get("ok")]
    if not failed:
        return Run(ok=True, detail=tuple(answers))
    errors = [error if isinstance(error := answer.get("error"), dict) else {} for answer in failed]
    return Run(
        ok=False,
        reason=f"{len(failed)} of {len(answers)} ranks: {errors[0].get('message', 'no reason given')}",
        # With one rank that did it, something was done.
        refused=len(failed) == len(answers) and all(error.get("code") == "refused" for error in errors),
        detail=tuple(answers),
    )


async def post(engine: Engine, path: str, query: str) -> Run:
    """POST a reset and take the engine's word for it."""
    answer = await engine.post(path, query)
    if answer.status >= 400:  # noqa: PLR2004 - HTTP's errors
        return Run(ok=False, reason=f"the engine answered {answer.status}", answer=answer)
    return Run(ok=True, answer=answer)
