"""The bytes for the KV cache of a running engine under other flags: its own measurements carried over.

Activation, graphs and non-torch memory are those of the start that was measured; where a flag changes them, the bytes
are an estimate with bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from highwater.accounting.engine_budget import StartMemory
from highwater.plan.card import OnCard, fullest, judge_card
from highwater.plan.estimates import requested_bytes
from highwater.plan.kv_view import OFFLINE, LiveEngine
from kvplan.errors import PlanError
from kvplan.figure import Grade, estimated, measured
from kvplan.flags import EngineFlags
from kvplan.generations import generation_of

# Flags whose KV cache vLLM makes without a look at the card.
_GIVEN: Final = ("kv_cache_memory_bytes", "num_gpu_blocks_override")


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


def bytes_under(engine: LiveEngine, changed: Mapping[str, Any], workers: int, *, images_changed: bool) -> LiveBytes:
    """Return the bytes of each of so many workers with some flags ``changed``, by the names of `EngineFlags`.

    Raises PlanError: the start did not report what a flag needs, or vLLM would refuse to start.
    """
    if "kv_cache_memory_bytes" in changed:
        return LiveBytes(each=(changed["kv_cache_memory_bytes"],) * workers, grade="exact")
    have = engine.available_bytes
    # Of ranks that do not run yet, nothing is known but the fewest bytes of those that do.
    each = have if len(have) == workers else (min(have),) * workers
    if engine.flags.kv_cache_memory_bytes is not None and "gpu_memory_utilization" not in changed:
        return LiveBytes(each=each)
    carried = _Carried(engine, each)
    if "gpu_memory_utilization" in changed:
        carried.request(changed["gpu_memory_utilization"])
    if "tensor_parallel_size" in changed:
        carried.split_weights(engine.flags.tensor_parallel_size / changed["tensor_parallel_size"])
    ratios = {
        key: changed[key] / max(1, getattr(engine.limits, key))
        for key in ("max_num_batched_tokens", "max_num_seqs")
        if key in changed
    }
    if ratios or images_changed:
        carried.change_activation(ratios.get("max_num_batched_tokens", 1.0), ratios.get("max_num_seqs", 1.0))
    return carried.bytes()


def card_under(
    engine: LiveEngine,
    flags: EngineFlags,
    changed: Mapping[str, Any],
    caches: Mapping[int, int],
    *,
    images_changed: bool,
) -> OnCard | None:
    """Judge the cards with a KV cache of given bytes or blocks, by what the start measured beside its own.

    ``caches`` are the KV cache's bytes by the worker's number. ``None``: vLLM sizes the KV cache by its share of the
    card, or the engine runs with as much.
    """
    is_given = flags.kv_cache_memory_bytes is not None or flags.num_gpu_blocks_override is not None
    is_as_much = not images_changed and flags.tensor_parallel_size == engine.flags.tensor_parallel_size
    steps = all(
        changed.get(key, 0) <= getattr(engine.limits, key) for key in ("max_num_batched_tokens", "max_num_seqs")
    )
    if not is_given or (is_as_much and steps and all(cache <= _made(engine, one) for one, cache in caches.items())):
        return None
    left, why = None, "the engine's start did not measure it"
    try:
        if engine.flags.kv_cache_memory_bytes is None:
            shared = {key: value for key, value in changed.items() if key not in _GIVEN}
            left = bytes_under(engine, shared, max(caches) + 1, images_changed=images_changed)
    except PlanError as exc:
        why = str(exc)
    split, cards = engine.flags.tensor_parallel_size / flags.tensor_parallel_size, []
    for number, cache in caches.items():
        worker = engine.workers[min(number, len(engine.workers) - 1)]
        start, seen, rest = worker.budget.memory, worker.reading.components.weights_bytes, None
        total = start.total_bytes or worker.reading.total_bytes
        if total is None:
            return OnCard(fits=None, why="The engine does not report the bytes of its device: nothing was compared.")
        whole = seen if start.weights_bytes is None else start.weights_bytes
        part = None if whole is None else round(whole * split)
        # Some weights stay whole on each rank.
        weights = None if part is None or whole is None else estimated(min(whole, part), part, whole, "")
        if part is not None and part == whole:
            weights = measured(part, "")
        if left is not None and part is not None and start.requested_bytes is not None and start.init_free_bytes:
            beside, likely = start.requested_bytes - part, left.each[number]
            high, low = (likely if one is None else one for one in (left.high, left.low))
            rest = estimated(beside - high, beside - likely, beside - low, "")
        used = 0 if start.init_free_bytes is None else max(total - start.init_free_bytes, 0)
        cards.append(judge_card(total, used, cache, weights, rest, why_unknown=None if rest else why))
    return fullest(cards)


def _made(engine: LiveEngine, number: int) -> int:
    """Return the bytes of the KV cache that a worker has allocated."""
    made = engine.workers[number].budget.kv_cache.tensor_bytes
    return engine.available_bytes[number] if made is None else made


class _Carried:
    """The measured bytes, changed step by step to what other flags would need."""

    def __init__(self, engine: LiveEngine, each: tuple[int, ...]) -> None:
        self._starts = [worker.budget.memory for worker in engine.workers]
        self._limits = engine.limits
        self._release = generation_of(engine.version).release[:2]
        self._platform = engine.flags.platform
        self._each = each
        self._less = 0  # by how much the lower bound lies under the estimate
        self._more = 0
        self._is_bounded = True
        self._grade: Grade = "engine"
        self._notes: list[str] = []

    def request(self, share: float) -> None:
        """Request another share of the device; what is used beside the KV cache stays."""
        gains = [self._gain(start, share) for start in self._starts]
        if len(gains) == len(self._each):
            self._each = tuple(size + gain for size, gain in zip(self._each, gains, strict=True))
        else:
            self._each = tuple(size + min(gains) for size in self._each)
        self._grade = "measured"
        self._notes.append("Weights, activation, graphs and non-torch memory are those of the running engine's start.")

    def split_weights(self, ratio: float) -> None:
        weights = [_reported(start.weights_bytes, "tensor_parallel_size", "weights_bytes") for start in self._starts]
        # The rank that loses least, or takes on most. Norms and other small layers are on every rank, whole.
        gain = round((min(weights) if ratio < 1 else max(weights)) * (1 - ratio))
        self._each = tuple(size + gain for size in self._each)
        if ratio < 1:
            self._less += gain
        else:
            self._more -= gain
        self._grade = "estimated"
        self._notes.append(
            "The weights of a rank are estimated by the ratio of the ranks; activation, graphs and the buffers of the "
            "communication library are those of the running engine."
        )

    def change_activation(self, tokens: float, sequences: float) -> None:
        """Let the peak of activation grow with a step's tokens and sequences, multiples of those of the measured start.

        Fewer are not taken to free anything. With the sequences only the sampler's part grows, which is small.
        """
        self._grade = "estimated"
        peaks = [start.peak_activation_bytes for start in self._starts if start.peak_activation_bytes is not None]
        if not peaks:
            if tokens > 1:
                raise PlanError(
                    "max_num_batched_tokens: more of them take memory (the peak of activation) that this engine's "
                    "start did not report; give kv_cache_memory_bytes beside it"
                )
            self._is_bounded = False
            self._notes.append(
                "These flags change the peak of activation a little, which the start did not report: not counted."
            )
            return
        peak = max(0, *peaks)
        growth = round(peak * (max(1.0, tokens) - 1))
        self._each = tuple(size - growth for size in self._each)
        self._less += round(peak * (max(1.0, tokens, sequences) - 1)) - growth
        self._more += growth + round(peak * (1 - min(1.0, tokens, sequences)))
        self._notes.append(
            f"The peak of activation was measured with {self._limits.max_num_batched_tokens} batched tokens and "
            f"{self._limits.max_num_seqs} sequences. It is taken to grow in proportion to the tokens, and not to "
            "shrink; by the lower bound it grows in proportion to the sequences too. Graphs are as they are now."
        )

    def bytes(self) -> LiveBytes:
        each = tuple(max(0, size) for size in self._each)
        is_bounded = self._is_bounded and self._grade == "estimated"
        return LiveBytes(
            each=each,
            grade=self._grade,
            low=max(0, min(self._each) - self._less) if is_bounded else None,
            high=max(0, min(self._each) + self._more) if is_bounded else None,
            notes=tuple(self._notes),
        )

    def _gain(self, start: StartMemory, share: float) -> int:
        total = _reported(start.total_bytes, "gpu_memory_utilization", "total_bytes")
        requested = _reported(start.requested_bytes, "gpu_memory_utilization", "requested_bytes")
        wanted = requested_bytes(total, share, self._release, self._platform)
        if start.init_free_bytes is not None and wanted > start.init_free_bytes:
            most = math.floor(100 * start.init_free_bytes / total) / 100
            raise PlanError(
                f"gpu_memory_utilization: {share} is {wanted} bytes, and {start.init_free_bytes} were free when the "
                f"engine started, so that vLLM would refuse to start; at most {most}"
            )
        return wanted - requested


def _reported(value: int | None, key: str, name: str) -> int:
    if value is None:
        raise PlanError(f"{key}: cannot be planned from this engine, whose start did not report {name}; {OFFLINE}")
    return value
