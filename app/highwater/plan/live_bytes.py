"""The bytes of a running engine under other flags: what its start measured, and how much more another would take.

Activation, graphs and non-torch memory are those of the start that was measured; where a flag changes them, the bytes
are an estimate with bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from highwater.plan.budget import peak_and_graphs
from highwater.plan.card import OnCard, fullest, judge_card
from highwater.plan.live_engine import OFFLINE, LiveEngine
from kvplan.errors import PlanError
from kvplan.figure import Figure, Grade, add, estimated, measured
from kvplan.flags import EngineFlags
from kvplan.generations import generation_of, requested_bytes

Changed: TypeAlias = Mapping[str, Any]
"""The flags that change, by the names of `EngineFlags`."""
_SAME = measured(0, "as measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """The bytes for the KV cache of each worker, and how well they are known."""

    each: tuple[int, ...]  # by worker
    # ``engine``: as the engine has them now; ``exact``: given; ``measured``: follow from the measured start;
    # ``estimated``: within the bounds.
    grade: Grade = "engine"
    # The least and the most that the binding worker has; None where there is nothing to bound.
    low: int | None = None
    high: int | None = None
    notes: tuple[str, ...] = ()  # assumptions, in sentences


def bytes_under(engine: LiveEngine, changed: Changed, images: float = 1.0) -> LiveBytes:
    """Return the bytes of each worker with some flags changed, and so many times the images in a prompt.

    Raises PlanError: the start did not report what a flag needs, or vLLM would refuse to start.
    """
    numbers = _standing_in(engine, changed)
    if "kv_cache_memory_bytes" in changed:
        return LiveBytes(each=(changed["kv_cache_memory_bytes"],) * len(numbers), grade="exact")
    each = tuple(engine.available_bytes[number] for number in numbers)
    if engine.flags.kv_cache_memory_bytes is not None:
        return LiveBytes(each=each)
    sizes = [engine.workers[number].budget.memory.weights_bytes for number in numbers]
    weights = [_more_weights(engine, size, changed) for size in sizes]
    activation = [_more_activation(engine, number, changed, images) for number in numbers]
    taken = [add((one, another or _SAME), "") for one, another in zip(weights, activation, strict=True)]
    gains = [_more_requested(engine, number, changed) for number in numbers]
    grade: Grade = "measured" if "gpu_memory_utilization" in changed else "engine"
    if weights[0] is not _SAME or activation[0] is not _SAME:
        grade = "estimated"
    left = [(size + gain, part) for size, gain, part in zip(each, gains, taken, strict=True)]
    is_bounded = grade == "estimated" and None not in activation
    return LiveBytes(
        each=tuple(max(0, size - part.bytes) for size, part in left),
        grade=grade,
        low=max(0, min(size - part.high for size, part in left)) if is_bounded else None,
        high=max(0, min(size - part.low for size, part in left)) if is_bounded else None,
        notes=_notes(engine, changed, activation[0]),
    )


def card_under(
    engine: LiveEngine, flags: EngineFlags, changed: Changed, caches: Mapping[int, int], images: float
) -> OnCard | None:
    """Judge the cards with a KV cache of given bytes or blocks, by what the start measured beside its own.

    ``caches`` are the KV cache's bytes by the worker's number. ``None``: vLLM sizes the KV cache by its share of the
    card, or the engine runs with as much.
    """
    if flags.kv_cache_memory_bytes is None and flags.num_gpu_blocks_override is None:
        return None
    standing_in = _standing_in(engine, changed)
    numbers = {number: standing_in[number] for number in caches}
    made = {number: engine.workers[one].budget.kv_cache.tensor_bytes for number, one in numbers.items()}
    is_as_much = all(
        cache <= (engine.available_bytes[numbers[number]] if made[number] is None else made[number] or 0)
        for number, cache in caches.items()
    )
    steps = max(_ratio(engine, changed, name) for name in ("max_num_batched_tokens", "max_num_seqs"))
    if is_as_much and steps <= 1 and images == 1 and "tensor_parallel_size" not in changed:
        return None
    cards = []
    for number, cache in caches.items():
        worker, why = engine.workers[numbers[number]], "the engine's start did not measure it"
        start, seen, rest, more = worker.budget.memory, worker.reading.components.weights_bytes, None, None
        total = start.total_bytes or worker.reading.total_bytes
        if total is None:
            return OnCard(fits=None, why="The engine does not report the bytes of its device: nothing was compared.")
        try:
            more = _more_activation(engine, numbers[number], changed, images)
        except PlanError as exc:
            why = str(exc)
        whole = seen if start.weights_bytes is None else start.weights_bytes
        weights = None if whole is None else add((measured(whole, ""), _more_weights(engine, whole, changed)), "")
        is_measured = engine.flags.kv_cache_memory_bytes is None and start.init_free_bytes and more is not None
        if is_measured and start.requested_bytes is not None and whole is not None:
            beside = start.requested_bytes - whole - engine.available_bytes[numbers[number]]
            rest = add((measured(beside, ""), more or _SAME), "")
        used = 0 if start.init_free_bytes is None else max(total - start.init_free_bytes, 0)
        cards.append(judge_card(total, used, cache, weights, rest, why_unknown=None if rest else why))
    return fullest(cards)


def _standing_in(engine: LiveEngine, changed: Changed) -> list[int]:
    """Return for each worker the number of the running one that stands for it.

    Of ranks that do not run yet, nothing is known but those of their stage: the one with the fewest bytes stands for
    them.
    """
    now, have = engine.flags.tensor_parallel_size, engine.available_bytes
    if "tensor_parallel_size" not in changed:
        return list(range(len(have)))
    stages = [range(first, first + now) for first in range(0, len(have), now)]
    return [min(stage, key=have.__getitem__) for stage in stages for _ in range(changed["tensor_parallel_size"])]


def _ratio(engine: LiveEngine, changed: Changed, name: str) -> float:
    return float(changed[name] / max(1, getattr(engine.limits, name))) if name in changed else 1.0


def _more_requested(engine: LiveEngine, number: int, changed: Changed) -> int:
    if "gpu_memory_utilization" not in changed:
        return 0
    start, share = engine.workers[number].budget.memory, changed["gpu_memory_utilization"]
    total = _reported(start.total_bytes, "gpu_memory_utilization", "total_bytes")
    requested = _reported(start.requested_bytes, "gpu_memory_utilization", "requested_bytes")
    wanted = requested_bytes(total, share, generation_of(engine.version).release[:2], engine.flags.platform)
    if start.init_free_bytes is not None and wanted > start.init_free_bytes:
        most = math.floor(100 * start.init_free_bytes / total) / 100
        raise PlanError(
            f"gpu_memory_utilization: {share} is {wanted} bytes, and {start.init_free_bytes} were free when the "
            f"engine started, so that vLLM would refuse to start; at most {most}"
        )
    return wanted - requested


def _more_weights(engine: LiveEngine, size: int | None, changed: Changed) -> Figure:
    """Return how many more bytes of weights a rank has, by the ratio of the ranks; some of them stay whole on each."""
    if "tensor_parallel_size" not in changed:
        return _SAME
    more = _reported(size, "tensor_parallel_size", "weights_bytes")
    more = round(more * (engine.flags.tensor_parallel_size / changed["tensor_parallel_size"] - 1))
    return estimated(min(more, 0), more, max(more, 0), "")


def _more_activation(engine: LiveEngine, number: int, changed: Changed, images: float) -> Figure | None:
    """Return how many more bytes activation and graphs take; None: a little, as fewer tokens or requests do.

    The peak grows with a step's tokens. By the upper bound it grows with the requests and images too, and the graphs
    with the requests, for whose numbers they are captured; by the lower bound fewer of them free as much.
    """
    tokens, sequences = (_ratio(engine, changed, name) for name in ("max_num_batched_tokens", "max_num_seqs"))
    if tokens == sequences == images == 1:
        return _SAME
    peak, graphs = peak_and_graphs(engine.workers[number].budget.memory)
    if peak is None:
        if tokens > 1:
            raise PlanError(
                "max_num_batched_tokens: more of them take memory (the peak of activation) that this engine's "
                "start did not report; give kv_cache_memory_bytes beside it"
            )
        return None
    peak, graphs, likely = max(0, peak), max(0, graphs), max(0, peak) * (max(1.0, tokens) - 1)
    low, high = min(1.0, tokens, sequences, images) - 1, max(1.0, tokens, sequences, images) - 1
    return estimated(
        round(peak * low + graphs * (min(1.0, sequences) - 1)),
        round(likely),
        round(peak * high + graphs * (max(1.0, sequences) - 1)),
        "",
    )


def _notes(engine: LiveEngine, changed: Changed, activation: Figure | None) -> tuple[str, ...]:
    notes = []
    if "gpu_memory_utilization" in changed:
        notes.append("Weights, activation, graphs and non-torch memory are those of the running engine's start.")
    if "tensor_parallel_size" in changed:
        notes.append(
            "The weights of a rank are estimated by the ratio of the ranks; activation, graphs and the buffers of the "
            "communication library are those of the running engine."
        )
    if activation is None:
        notes.append("These flags change the peak of activation a little, which the start did not report: not counted.")
    elif activation is not _SAME:
        notes.append(
            f"The peak of activation was measured with {engine.limits.max_num_batched_tokens} batched tokens and "
            f"{engine.limits.max_num_seqs} sequences. It is taken to grow in proportion to the tokens, and not to "
            "shrink; by the lower bound it grows in proportion to the sequences and images too, and the graphs do to "
            "the sequences."
        )
    return tuple(notes)


def _reported(value: int | None, key: str, name: str) -> int:
    if value is None:
        raise PlanError(f"{key}: cannot be planned from this engine, whose start did not report {name}; {OFFLINE}")
    return value
