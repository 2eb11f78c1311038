"""The start that a config.json and a command line make, by the newest version's defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplan.errors import PlanError
from kvplan.figure import Figure
from kvplan.flags import EngineFlags
from kvplan.limits import Limits
from kvplan.specs import Layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    architecture: str
    layers: int
    max_position_embeddings: int | None
    flags: EngineFlags
    limits: Limits
    workers: Sequence[Layers]
    weights: tuple[Figure, ...]
    activation: Figure | None
    why_unknown: str | None = None
    has_experts: bool = False
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def read_start(config: Mapping[str, Any], flags: EngineFlags, *, checkpoint_bytes: int | None = None) -> Start:
    """Raise PlanError: this is the interface alone."""
    del flags, checkpoint_bytes
    raise PlanError(f"architectures: {config.get('architectures')!r} is not planned by the built-in")
