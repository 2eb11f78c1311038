"""One engine's KV pool explained: its parts, the requests that it holds, and the meaning of its headline number. Pure.

The pool's own arithmetic is planned again from the running engine's layers and stands beside the engine's figures: a
difference is shown, never hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from highwater.accounting.engine_budget import EngineLimits
from highwater.plan.budget import RankBudget, block_bytes
from highwater.plan.live_engine import LiveEngine, LiveWorker, live_engine
from highwater.units import size_text
from kvplan.errors import PlanError
from kvplan.flags import Limits
from kvplan.generations import generation_of
from kvplan.pool import KvPool, deciding_workers, plan_pool

LENGTHS: Final = (1_024, 8_192)
"""Lengths of requests that are shown beside the maximum."""
_OF_GROUP: Final = {name: name for name in ("layers", "block_size", "page_bytes")} | {"window": "sliding_window"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Layers that share block tables, as the engine made them; None: not reported."""

    kind: str  # vLLM's class of the layer
    layers: int | None
    block_size: int | None  # tokens a block
    page_bytes: int | None  # that one layer takes of a block
    window: int | None = None  # of sliding window layers, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNeed:
    """The part of the pool that one request of a length takes while it runs, and at most while it stays cached."""

    tokens: int
    blocks: int  # of all groups together
    bytes: int  # on each rank
    requests: int  # that run at once, in the blocks that are not the null block


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One data-parallel engine's KV cache; None: not known."""

    dp_rank: int | None
    blocks: int | None = None  # the engine's own number, the null block included
    block_size: int | None = None  # tokens a block, as configured
    bytes_per_block: int | None = None  # all layers of the rank included
    groups: tuple[GroupView, ...] = ()
    binding_rank: int | None = None  # the rank with the fewest bytes, which decides
    available_bytes: int | None = None  # those bytes
    tokens: int | None = None  # the log's "KV cache size": the engine's own where its workers see it, else as printed
    tokens_grade: str | None = None  # ``engine`` or ``exact``
    tokens_meaning: str | None = None  # the meaning of that number on this version
    max_concurrency: float | None = None  # requests of the maximum length at once, as printed
    # By the arithmetic of this version, from the engine's layers and bytes.
    planned_blocks: int | None = None
    planned_bytes_per_block: int | None = None
    needed_bytes: int | None = None  # the need of one request of the maximum length
    max_model_len_that_fits: int | None = None
    differences: tuple[str, ...] = ()  # where engine and arithmetic disagree, a sentence each
    problem: str | None = None  # why the arithmetic is not possible
    note: str | None = None  # what is uncertain about it
    conversations: tuple[RequestNeed, ...] = ()
    # For the KV cache if everything were counted that is known to be in use, and the blocks and tokens of that.
    fully_counted_bytes: int | None = None
    fully_counted_blocks: int | None = None
    fully_counted_tokens: int | None = None


def pool_view(workers: Sequence[LiveWorker], ranks: Sequence[RankBudget]) -> PoolView:
    first, kv = workers[0].budget, workers[0].budget.kv_cache
    sizes = [(size, rank.rank) for rank in ranks if (size := rank.available_bytes) is not None]
    least, binding = min(sizes, key=lambda one: one[0], default=(None, None))
    view = PoolView(
        dp_rank=ranks[0].dp_rank,
        blocks=kv.blocks,
        block_size=kv.block_size,
        bytes_per_block=block_bytes(first),
        groups=tuple(
            GroupView(
                kind=str(group.get("kind"))[:60],
                **{name: group[own] if type(group.get(own)) is int else None for name, own in _OF_GROUP.items()},
            )
            for group in kv.groups or ()
        ),
        binding_rank=binding,
        available_bytes=least,
        tokens=kv.size_tokens,
        tokens_grade=None if kv.size_tokens is None else "engine",
        max_concurrency=kv.max_concurrency,
    )
    try:
        return _with_arithmetic(view, live_engine(workers), ranks)
    except PlanError as exc:
        return replace(view, problem=str(exc))
    except ArithmeticError as exc:  # numbers of a file that no engine has
        return replace(view, problem=f"what its workers report makes no pool: {exc}")


def _with_arithmetic(view: PoolView, engine: LiveEngine, ranks: Sequence[RankBudget]) -> PoolView:
    generation = generation_of(engine.version)
    deciding = deciding_workers(engine.layers, engine.available_bytes)
    layers = [engine.layers[number] for number in deciding]
    available = [engine.available_bytes[number] for number in deciding]
    plan = partial(plan_pool, layers, available, generation=generation)
    planned, counted = plan(engine.limits), [rank.fully_counted_bytes for rank in ranks]
    missed = [size for size in counted if size is not None]
    least = min(missed) if missed and len(missed) == len(ranks) else None
    fully = None if not least or least < 0 else plan_pool(layers, [least] * len(layers), engine.limits, generation)
    return replace(
        view,
        tokens=planned.tokens if view.tokens is None else view.tokens,
        tokens_grade=view.tokens_grade or (None if planned.tokens is None else "exact"),
        tokens_meaning=_meaning(generation.tokens_printed, planned, engine),
        max_concurrency=planned.max_concurrency if view.max_concurrency is None else view.max_concurrency,
        planned_blocks=planned.blocks,
        planned_bytes_per_block=planned.bytes_per_block,
        needed_bytes=planned.needed_bytes,
        max_model_len_that_fits=planned.max_model_len_that_fits,
        differences=_differences(view, planned, engine),
        note=generation.note,
        conversations=_conversations(view, planned, engine.limits, plan),
        fully_counted_bytes=least,
        fully_counted_blocks=None if fully is None else fully.blocks,
        fully_counted_tokens=None if fully is None else fully.tokens,
    )


def _meaning(printed: str, pool: KvPool, engine: LiveEngine) -> str:
    length, groups = f"{engine.limits.max_model_len:,}", len(pool.groups)
    if printed == "length":
        return (
            f"the maximum concurrency times the maximum length: {pool.blocks:,} blocks / {pool.blocks_per_request:,} "
            f"for each request of {length} tokens, times {length}"
            + ("" if groups == 1 else "; shorter requests of a hybrid model hold fewer tokens than that")
        )
    size = min(group.block_size for group in pool.groups)
    if groups == 1:
        return f"blocks times tokens a block: {pool.blocks:,} x {size:,}"
    return (
        f"blocks divided by {groups} groups, times the smallest block ({pool.blocks:,} // {groups} x {size:,}): as if "
        "every group kept every token, so a hybrid model holds more than that"
    )


def _differences(view: PoolView, planned: KvPool, engine: LiveEngine) -> tuple[str, ...]:
    own, ours = view.max_concurrency, planned.max_concurrency
    pairs = (
        ("blocks", view.blocks, planned.blocks),
        ("bytes a block", view.bytes_per_block, planned.bytes_per_block),
        ("tokens", view.tokens, planned.tokens),
        ("maximum concurrency", None if own is None else round(own, 2), None if ours is None else round(ours, 2)),
    )
    found = [
        f"{what}: the engine has {one:,}, the arithmetic of {engine.version} gives {other:,}"
        for what, one, other in pairs
        if one is not None and other is not None and one != other
    ]
    if found and engine.layers_are_grouped:
        found.append(
            "the layers are as the engine grouped them, because its start was not seen: that may be why "
            "(a recorder that starts with the engine sees it)"
        )
    return tuple(found)


def _conversations(
    view: PoolView, planned: KvPool, limits: Limits, plan: Callable[[Limits], KvPool]
) -> tuple[RequestNeed, ...]:
    rows = []
    for tokens in (*(length for length in LENGTHS if length < limits.max_model_len), limits.max_model_len):
        try:
            need = plan(replace(limits, max_model_len=tokens)).blocks_per_request
        except PlanError:
            continue  # this version refuses the length, so no request can have it
        if need:
            # vLLM's own concurrency counts the null block, which no request gets.
            requests, size = max((view.blocks or planned.blocks) - 1, 0) // need, need * planned.bytes_per_block
            rows.append(RequestNeed(tokens=tokens, blocks=need, bytes=size, requests=requests))
    return tuple(rows)


def pool_sentence(view: PoolView, limits: EngineLimits | None) -> str:
    """Return the pool in one sentence; empty where nothing is known of it."""
    if view.blocks is None or view.bytes_per_block is None:
        return ""
    text = f"The KV cache has {view.blocks:,} blocks of {size_text(view.bytes_per_block)}"
    if view.tokens is not None:
        text += f", which this version prints as {view.tokens:,} tokens"
    whole = view.conversations[-1] if view.conversations else None
    if whole is not None and limits is not None and whole.tokens == limits.max_model_len:
        text += f"; one request of {whole.tokens:,} tokens takes {size_text(whole.bytes)}, so {whole.requests:,} fit"
    return f"{text}."
