"""Events, and the callers of control paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from highwater.readings.remedy import RemedyResult

EventKind: TypeAlias = Literal[
    "reset", "refusal", "mark", "state", "policy", "baseline", "recovery", "incident", "snapshot", "growth"
]
Trigger: TypeAlias = Literal["policy", "reclaim", "drop-in"]
# The reason why a control call was allowed: the admin token, or a loopback address where trust_loopback is set.
Credential: TypeAlias = Literal["token", "loopback"]


@dataclass(frozen=True, slots=True)
class Caller:
    address: str  # the peer's, as the socket shows it: a reverse proxy's own, where the call came through one
    by: Credential  # why the call was allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event; ``caller``: whose control call it was, ``None`` where the sidecar acted, or saw it, by itself."""

    id: int
    at: float
    kind: EventKind
    summary: str
    trigger: Trigger | None = None
    rule: str | None = None
    result: RemedyResult | None = None
    caller: Caller | None = None
