"""One life of the engine: its processes, and what is remembered of them and of nobody after them."""

from __future__ import annotations

from dataclasses import dataclass

from app.readings import RankReading


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLife:
    """One life of the engine, from its start to its end.

    Attributes:
        id: Another one after each restart of the engine.
        started_at: When its processes were started, in Unix seconds; ``None`` where that is not known.
        restarts: How many lives before it this sidecar has seen.
        baseline: The first readings after the engine became ready; empty where they are not known.
    """

    id: str
    started_at: float | None = None
    restarts: int = 0
    baseline: tuple[RankReading, ...] = ()
