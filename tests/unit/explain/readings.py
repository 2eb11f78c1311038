"""Ranks as they stood after known starts, for tests of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter

from highwater.model.engine_budget import EngineBudget
from highwater.model.rank import (
    Budget,
    Components,
    Device,
    EncoderCache,
    HostMemory,
    RankReading,
    StartPhase,
    TorchMemory,
)
from tests.fakes.incident import reading
from tests.fakes.started import GIB, gemma, larger_story, qwen3_next, story, wire

_BUDGET = TypeAdapter(EngineBudget)
STORY_TOTAL = int(60.96 * GIB)
# The story's: 9.45 GiB were allocated before the profile, and 1.06 GiB are in use that are not PyTorch's.
STORY_START = (StartPhase(name="weights", at=0.0, seconds=30.0, allocated_bytes=int(9.45 * GIB)),)
STORY_NON_TORCH = int(1.062 * GIB)


def budget_of(worker: SimpleNamespace, version: str, returned: int | None = None, **changes: Any) -> EngineBudget:
    return _BUDGET.validate_python(wire(worker, version=version, returned=returned, **changes))


def other(
    engine: EngineBudget,
    *,
    blocks: int | None = None,
    block_bytes: int = 9 * 2**20,
    given: int | None = None,
    **memory: Any,
) -> EngineBudget:
    """Return a start with other figures of its memory, a pool of so many blocks, or a pool of given bytes."""
    made = {} if blocks is None else {"blocks": blocks, "tensor_bytes": blocks * block_bytes}
    cache = replace(engine.kv_cache, **made, given_bytes=given)
    return replace(engine, memory=replace(engine.memory, **memory), kv_cache=cache)


def rank(
    number: int = 0,
    *,
    kind: str = "npu",
    total: int | None = STORY_TOTAL,
    start: Sequence[StartPhase] = (),
    encoder: EncoderCache | None = None,
    **changes: Any,
) -> RankReading:
    """Return a rank of which nothing more is known than what is given."""
    unknown = {"torch": TorchMemory(), "components": Components(), "budget": Budget(), "host_memory": HostMemory()}
    given = {"device": Device(type=kind, index=number), "total_bytes": total, "encoder_cache": encoder}
    return reading(number, used=None, **{**unknown, **given, "start": tuple(start), **changes})


def story_rank(number: int = 0) -> RankReading:
    return rank(number, components=Components(non_torch_bytes=STORY_NON_TORCH), start=STORY_START)


STORY = budget_of(story(), "0.12.0")
LARGER = budget_of(larger_story(), "0.12.0", 21_540_531_712)
GEMMA = budget_of(gemma(), "0.19.0")
QWEN3_NEXT = budget_of(qwen3_next(), "0.12.0")
