"""Sources of readings. A new source is one file here and one line in ``all_sources``."""

from __future__ import annotations

from highwater.engine.client import Engine
from highwater.memory.engine_budgets import EngineBudgets
from highwater.memory.sources.engine_metrics import EngineMetrics
from highwater.memory.sources.pause_state import PauseState
from highwater.memory.sources.source import Source
from highwater.memory.sources.workers import Workers


def all_sources(engine: Engine, budgets: EngineBudgets | None = None) -> tuple[Source, ...]:
    """Return them in the order in which they are read; a stuck loop of the engine ends a round, so it comes last."""
    return (EngineMetrics(engine), Workers(engine, budgets), PauseState(engine))
