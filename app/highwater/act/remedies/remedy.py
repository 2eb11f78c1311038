"""The base of every remedy: when it is refused, and what it sends to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine, EngineResponse
from highwater.model.engine import EngineStatus
from highwater.model.remedies import UNNEEDED, Mode, RemedyTraits, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of one run.

    Attributes:
        query: The client's query string, passed on unchanged on the drop-in paths.
        target: The end of a trim; other remedies ignore it.
        patience_seconds: The time for which a remedy that the engine puts off may be repeated.
        kv_connector: As ``Capabilities``.
    """

    query: str = ""
    target: Target = UNNEEDED
    patience_seconds: float = 0.0
    kv_connector: str | None = None


NO_OPTIONS = RunOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of one run.

    Attributes:
        ok: True if the engine did it, as far as it reports that.
        reason: What went wrong, or what the engine did not report.
        refused: True if nothing was done, on purpose.
        answer: The engine's own response, for the drop-in paths.
        detail: Each worker's answer, in rank order.
    """

    ok: bool
    reason: str | None = None
    refused: bool = False
    answer: EngineResponse | None = None
    detail: tuple[Mapping[str, Any], ...] = ()


class Remedy:
    """One way of giving memory back.

    Attributes:
        traits: What it frees, and what it is credited with.
        automatic_since: The vLLM version from which on the policy may run it; ``None``: every version.
        paces_after: True if requests are let through one by one for a while after they were held for it.
    """

    traits: RemedyTraits
    automatic_since: str | None = None
    paces_after: bool = False

    @property
    def name(self) -> str:
        return self.traits.name

    @property
    def path(self) -> str | None:
        return None

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Return why it must not run now, or ``None``.

        ``safe`` must harm no request; with ``now`` an operator wants it, and only what can hang or kill the engine is
        refused.
        """
        raise NotImplementedError

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        del capabilities, mode
        return False

    async def run(self, engine: Engine, options: RunOptions) -> RunResult:
        """Do it once. Raises EngineError where the engine gave no usable response."""
        raise NotImplementedError


def operators_only(remedy: Remedy, capabilities: Capabilities, status: EngineStatus) -> str | None:
    since = remedy.automatic_since
    if status.state == "sleeping":
        return "the engine is asleep: rules leave it alone, and an operator may ask for a release"
    if since is None or capabilities.at_least(since):
        return None
    return f"before vLLM {since} only an operator may ask for it: a request that does not pass here would be harmed"


def connector_refusal(capabilities: Capabilities) -> str | None:
    if not capabilities.ec_connector:
        return None
    return "an encoder-cache connector is configured, which keeps references into the cache"
