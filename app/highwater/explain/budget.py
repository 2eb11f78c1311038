"""One rank's memory budget as a value: the parts that the start counted, and what it counted nowhere. Pure.

The parts sum to the requested bytes exactly: what no figure of the engine explains is a part of its own. The parts
depend on how the version of vLLM counts, which the attributes of its workers show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from highwater.explain.live_engine import available_bytes
from highwater.model.engine_budget import EngineBudget, StartMemory
from highwater.model.rank import Device, Launch, Ranked, RankReading
from highwater.model.units import gib_text
from kvplan import Grade
from kvplan.generations import ASCEND_RESCALES, SUGGESTION_MARGIN, requested_bytes

Counting: TypeAlias = Literal["parts", "consumed", "cpu", "given", "remainder"]

FORMULAS: Final[Mapping[Counting, str]] = {
    # Up to 0.26, and vllm-ascend from 0.15 on.
    "parts": "KV cache = requested - (weights + peak activation + non-torch increase){graphs}",
    # From 0.27 on.
    "consumed": "KV cache = requested - (device use grown since the start + peak headroom){graphs}",
    "cpu": "KV cache = requested - the process's memory after the profile",
    "given": "KV cache = the size that was given; the utilization has no effect",
    # Before 0.15 vllm-ascend's worker keeps the result of its profile alone.
    "remainder": "KV cache = total x utilization - what the profile found (this version keeps the result alone)",
}
# vLLM's own rounding of a share of the device to whole bytes is at most this.
_ROUNDING_BYTES: Final = 16
# By key, or by key and how else the part may be known: title, grade, source and reason.
_PARTS: Final[Mapping[str, tuple[str, Grade, str, str]]] = {
    "weights": ("weights", "engine", "model_memory_usage", "by how much loading the model raised the device's use"),
    "weights:seen": ("weights", "measured", "parameters and buffers", "this engine does not report it"),
    "process": ("rest of the process", "exact", "requested_cpu_memory - rss",
                "interpreter, libraries, heap, and what the profiling pass left: the resident size of the process"),
    "consumed": ("persistent and non-torch", "exact", "total_consumed - weights",
                 "tensors that stay beside the weights, contexts, collectives and workspaces: this version counts one"
                 " sum"),
    "persistent": ("persistent tensors", "measured", "allocated after loading - weights",
                   "allocated before the profile and no weights: buffers and caches that stay"),
    "activation": ("peak activation", "engine", "peak_activation_memory",
                   "what the profiling pass allocated at its highest and gave back again"),
    "non_torch": ("non-torch", "engine", "non_torch_memory", "contexts, collectives and workspaces that came between"
                  " the engine's first look and the profile's end"),
    "non_torch:rest": ("non-torch", "exact", "total_consumed - weights - persistent",
                       "contexts, collectives, workspaces, and blocks that PyTorch kept"),
    "graphs": ("graphs (estimate)", "engine", "cudagraph_memory_estimate",
               "set aside for the graphs that are captured after the profile"),
    "mm_ipc": ("multimodal transfer", "exact", "--mm-ipc-gpu-memory-gb", "taken off the KV cache after the profile:"
               " multimodal inputs that API servers hand over on the device"),
    "rescaled": ("rescaled by vllm-ascend", "exact", "available_kv_cache_memory_bytes", "what the profile left, fitted"
                 " to several groups of layers, shared buffers or offload; which is not reported"),
    "kv_cache": ("KV cache", "exact", "kv_cache_config.num_blocks", "blocks for keys and values"),
    "kv_cache:bytes": ("KV cache", "engine", "available_kv_cache_memory_bytes",
                       "how much of it the blocks take is not reported"),
    "null_block": ("null block", "exact", "BlockPool.null_block",
                   "one block is a placeholder and is never given to a request"),
    "rounding": ("rounding to blocks", "exact", "available - blocks",
                 "less than one block here, or blocks that another rank has no room for"),
    "unprofiled": ("everything else", "exact", "total - the above",
                   "not profiled, because the KV cache's size was given: activation, graphs, non-torch, free"),
    "profiled": ("counted by the profile", "exact", "requested - the above", "activation, persistent tensors, what is"
                 " not PyTorch's, also of others: this version keeps one sum"),
    "bytes": ("whole bytes", "exact", "int()", "vLLM computes with fractions of bytes"),
    "unexplained": ("not explained", "exact", "requested - the above",
                    "the engine's own figures do not sum to what it requested; this is the difference"),
    "non_torch_uncounted": ("non-torch not counted", "measured", "used - reserved", ""),
    "graphs_uncounted": ("graphs beyond that", "engine", "capture_model", ""),
    "others": ("in use before the start", "engine", "init_snapshot", "in use before the engine's first look: other"
               " processes, and this one's contexts, buffers and handles"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPart:
    key: str
    title: str
    bytes: int  # negative where vLLM's own figures sum to more than there is
    grade: Grade  # ``exact``: follows from the engine's own figures; ``measured``: read by the worker package
    source: str  # vLLM's own name for it, or where it was read
    why: str  # its contents, in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    key: str
    title: str
    profiled_bytes: int | None  # as the start counted it; None: not counted, or not known
    observed_bytes: int | None
    risk_bytes: int | None  # the excess of what was observed; 0 where that is less; None where either is not known
    settings: tuple[str, ...]  # the flags and variables that cover it


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """The KV cache's size that vLLM's log suggests as `--kv-cache-memory=`, which has graphs off it twice."""

    bytes: int | None = None  # as printed, within the requested share, and kept by a startup plan
    counted_once_bytes: int | None = None  # the same with the captured graphs off it, and not their estimate too
    lost_bytes: int | None = None
    missing: str | None = None  # what is not known, in a sentence; None: all is


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget(Ranked):
    """One rank's memory; None: not reported."""

    rank: int | None
    dp_rank: int | None = None
    pp_rank: int | None = None
    tp_rank: int | None = None
    device: Device
    total_bytes: int | None = None  # the device; on CPU what the process may have
    init_free_bytes: int | None = None  # free before the engine took any
    utilization: float | None = None  # ``gpu_memory_utilization``
    requested_bytes: int | None = None  # the budget; None also where the KV cache's size was given instead
    counting: Counting | None = None  # the way in which this version counts
    formula: str | None = None  # the same in words
    parts: tuple[BudgetPart, ...] = ()  # they sum to `requested_bytes`, or to the total where no share was requested
    available_bytes: int | None = None  # for the KV cache, as the start found it
    pool_bytes: int | None = None  # what the KV cache takes of them
    outside_bytes: int | None = None  # the device less what was requested
    uncounted: tuple[BudgetPart, ...] = ()  # parts outside the budget that the formula counts nowhere
    left_bytes: int | None = None  # the bytes outside the budget that are left for everything else
    fully_counted_bytes: int | None = None  # for the KV cache if all of this engine's were counted
    suggestion: Suggestion | None = None  # None: this version's has graphs off it once, or nothing is suggested
    observed: tuple[Observed, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)  # variables that change how much is used
    launch: Launch = field(default_factory=Launch)

    def part(self, key: str) -> BudgetPart | None:
        return next((part for part in (*self.parts, *self.uncounted) if part.key == key), None)


def rank_budget(budget: EngineBudget, reading: RankReading) -> RankBudget:
    memory, rank = budget.memory, _Rank(budget, reading)
    counting, total, available = rank.counting, rank.total, available_bytes(budget)
    requested = None if counting == "given" else memory.requested_bytes
    if requested is None and counting == "remainder" and total is not None and memory.utilization is not None:
        requested = requested_bytes(total, memory.utilization, (), "ascend")
    outside, uncounted = None if requested is None or total is None else total - requested, rank.uncounted()
    missed = [part.bytes for part in uncounted if part.key != "others"]
    return RankBudget(
        rank=reading.rank,
        dp_rank=reading.dp_rank,
        pp_rank=reading.pp_rank,
        tp_rank=reading.tp_rank,
        device=reading.device,
        total_bytes=total,
        init_free_bytes=_first(memory.init_free_bytes, rank.at("before", "free_bytes")),
        utilization=memory.utilization,
        requested_bytes=requested,
        counting=counting,
        formula=counting and FORMULAS[counting].format(graphs=" - graphs' estimate" if rank.graphs else ""),
        parts=rank.parts(_first(requested, total)),
        available_bytes=available,
        pool_bytes=budget.kv_cache.tensor_bytes,
        outside_bytes=outside,
        uncounted=uncounted,
        left_bytes=None if outside is None else outside - sum(part.bytes for part in uncounted),
        fully_counted_bytes=available - sum(missed) if available is not None and missed else None,
        suggestion=_suggestion(budget, counting, rank.graphs),
        observed=rank.observed(),
        environment=dict(budget.environment),
        launch=reading.launch,
    )


class _Rank:
    def __init__(self, budget: EngineBudget, reading: RankReading) -> None:
        self._budget, self._memory, self._reading = budget, budget.memory, reading
        self._phases = {phase.name: phase for phase in reading.start}
        self.total = _first(self._memory.total_bytes, self.at("init", "total_bytes"), reading.total_bytes)
        memory, kv, is_cpu = budget.memory, budget.kv_cache, reading.device.traits.platform == "cpu"
        self.counting: Counting | None = None
        if kv.given_bytes is not None or (is_cpu and kv.cpu_space_bytes is not None):
            self.counting = "given"
        elif is_cpu:
            is_known = memory.requested_bytes is not None and memory.returned_bytes is not None
            self.counting = "cpu" if is_known else None
        elif memory.total_consumed_bytes is not None:
            self.counting = "consumed"
        elif memory.non_torch_bytes is not None:
            self.counting = "parts"
        elif available_bytes(budget) is not None:
            self.counting = "remainder"
        self._peak, self.graphs = peak_and_graphs(self._memory)
        allocated, weights = self.at("weights", "allocated_bytes"), self._memory.weights_bytes
        self._persistent = None if allocated is None or weights is None else allocated - weights

    def at(self, phase: str, figure: str) -> int | None:
        return getattr(self._phases.get(phase), figure, None)

    def parts(self, whole: int | None) -> tuple[BudgetPart, ...]:
        counting, memory = self.counting, self._memory
        if counting is None or whole is None:
            return ()
        seen = None if memory.weights_bytes is not None else self._reading.components.weights_bytes
        sizes: dict[str, int | None] = {"weights": memory.weights_bytes, "weights:seen": seen}
        weights = memory.weights_bytes or seen or 0
        if counting == "cpu":
            sizes["process"] = (memory.requested_bytes or 0) - (memory.returned_bytes or 0) - weights
        if counting == "consumed":
            rest, persistent = (memory.total_consumed_bytes or 0) - weights, self._persistent
            if persistent is None:
                sizes["consumed"] = rest
            else:
                sizes |= {"persistent": persistent, "non_torch:rest": rest - persistent}
        if counting in {"parts", "consumed"}:
            sizes["activation"] = self._peak
        if counting == "parts":
            sizes["non_torch"] = memory.non_torch_bytes
        parts = [_part(row, size) for row, size in sizes.items() if size is not None]
        if self.graphs:
            why = "a negative estimate, which the start added to the KV cache" if self.graphs < 0 else None
            parts.append(_part("graphs", self.graphs, why))
        parts += _pool_parts(self._budget)
        rest = whole - sum(part.bytes for part in parts)
        key = {"given": "unprofiled", "remainder": "profiled"}.get(counting)
        if key is None and rest:
            key = "rescaled" if _rescales(self._budget) else "unexplained"
            key = "bytes" if abs(rest) <= _ROUNDING_BYTES else key
        return tuple(parts) if key is None else (*parts, _part(key, rest))

    def uncounted(self) -> tuple[BudgetPart, ...]:
        """Return the parts that the version's formula counts nowhere."""
        if self.counting not in {"parts", "consumed"}:
            return ()
        parts, memory, now = [], self._memory, self._reading.components.non_torch_bytes
        if self.counting == "parts" and self._persistent is not None and self._persistent > 0:
            parts.append(_part("persistent", self._persistent, "allocated before the profile, beside the weights"))
        total, free = memory.total_bytes, memory.init_free_bytes
        others = total - free if total is not None and free is not None else self.at("before", "used_bytes")
        before = _first(memory.init_non_torch_bytes, others)
        if self.counting == "parts" and now is not None and memory.non_torch_bytes is not None:
            # The graphs may lie in there too, and have a line of their own.
            size = now - memory.non_torch_bytes - (memory.graphs_bytes or 0)
            early = f", {gib_text(before)} of it before the engine's first look" if before else ""
            why = f"of {gib_text(now)} now in use the profile counted {gib_text(memory.non_torch_bytes)}{early}"
            parts += [_part("non_torch_uncounted", size, why)] if size > 0 else []
        elif before:
            parts.append(_part("others", before))
        if memory.graphs_bytes is not None and memory.graphs_bytes > self.graphs:
            why = f"captured after the profile, which set {gib_text(self.graphs)} aside for them"
            parts.append(_part("graphs_uncounted", memory.graphs_bytes - self.graphs, why))
        return tuple(parts)

    def observed(self) -> tuple[Observed, ...]:
        budget, memory, now = self._budget, self._memory, self._reading.components
        if self._reading.device.traits.platform == "cpu":
            return ()
        # More than between steps was allocated at once, without weights, KV cache and other tensors; unless the highest
        # was during the start, before the pool was made.
        peak, pool = self._reading.torch.peak_allocated_bytes, budget.kv_cache.tensor_bytes
        rest = _first(self.at("weights", "allocated_bytes"), memory.weights_bytes)
        above = None if peak is None or pool is None or rest is None or peak <= rest + pool else peak - rest - pool
        estimate = memory.graphs_estimate_bytes
        about = "graphs" if estimate is None else f"graphs (estimated {gib_text(estimate)})"
        rows: list[tuple[str, str, int | None, int | None, str]] = [
            ("activation", "peak activation", self._peak, above,
             "--max-num-batched-tokens --max-num-seqs --limit-mm-per-prompt"),
            ("graphs", about, None if estimate is None else self.graphs, memory.graphs_bytes,
             "--gpu-memory-utilization --compilation-config"),
        ]  # fmt: skip
        if self.counting == "parts":
            rows.append(("non_torch", "non-torch", memory.non_torch_bytes, now.non_torch_bytes,
                         "--gpu-memory-utilization --kv-cache-memory-bytes HCCL_BUFFSIZE"))  # fmt: skip
        if budget.encoder is not None and self._reading.encoder_cache is not None:
            rows.append(("encoder_cache", "encoder cache", encoder_bytes(budget, self._reading),
                         now.encoder_cache_bytes, "--max-num-batched-tokens --limit-mm-per-prompt"))  # fmt: skip
        return tuple(
            Observed(
                key=key, title=title, profiled_bytes=profiled, observed_bytes=seen, settings=tuple(settings.split()),
                risk_bytes=None if profiled is None or seen is None else max(seen - profiled, 0),
            )
            for key, title, profiled, seen, settings in rows if profiled is not None or seen is not None
        )  # fmt: skip


def peak_and_graphs(memory: StartMemory) -> tuple[int | None, int]:
    """Return the bytes of the profile's peak, and those that the start set aside for graphs.

    The latter are negative where it gave them to the KV cache: vLLM takes the estimate as it comes, and that of a
    device whose free memory grew meanwhile is below zero. It always makes the estimate, and takes it off where a
    variable says so, whose default differs by version; where the variable cannot be read, the sum of the other parts
    shows it. From 0.27 on the figure of the peak has it too (vllm 0.32.0 v1/worker/gpu_worker.py:736).
    """
    estimate, peak, counted = memory.graphs_estimate_bytes or 0, memory.peak_activation_bytes, 0
    others = (memory.requested_bytes, memory.available_bytes, peak, memory.non_torch_bytes, memory.weights_bytes)
    if memory.graphs_estimate_counted is not None:
        counted = estimate if memory.graphs_estimate_counted else 0
    elif None not in others:
        requested, *taken = (size or 0 for size in others)
        counted = estimate if abs(requested - sum(taken) - estimate) <= _ROUNDING_BYTES else 0
    is_in_it = counted and memory.total_consumed_bytes is not None
    return (peak - counted if is_in_it and peak is not None else peak), counted


def _suggestion(budget: EngineBudget, counting: Counting | None, graphs: int) -> Suggestion | None:
    """Return what the log suggests where its formula takes the estimate and the captured graphs off.

    It takes off the peak that has the estimate in it, and what was captured (vllm 0.32.0 v1/worker/gpu_worker.py:999);
    so did 0.27.0, and 0.26.0 did not. A startup plan keeps the result (vllm 0.32.0 v1/worker/gpu_worker.py:1036).
    """
    memory = budget.memory
    if counting == "given" and budget.environment.get("VLLM_ENABLE_STARTUP_PLAN") not in {None, "", "0"}:
        return Suggestion(
            missing="A startup plan that vLLM from 0.27 on made has graphs off the KV cache's size twice; by how much, "
            "this start did not measure, as the size was given."
        )
    if counting != "consumed" or graphs <= 0:
        return None
    sizes = (memory.requested_bytes, memory.total_consumed_bytes, memory.peak_activation_bytes, memory.graphs_bytes)
    if None in sizes:
        return Suggestion(
            lost_bytes=graphs,
            missing="The size that vLLM's log suggests as --kv-cache-memory has graphs off it twice, once by their "
            f"estimate of {gib_text(graphs)}; the size itself is not known, as nothing saw what was captured.",
        )
    requested, *taken = (size or 0 for size in sizes)
    printed = requested - sum(taken) - SUGGESTION_MARGIN
    return Suggestion(bytes=printed, counted_once_bytes=printed + graphs, lost_bytes=graphs)


def _rescales(budget: EngineBudget) -> bool:
    """Return whether the worker fits what the profile left to its own layout of the KV cache."""
    return tuple(map(int, re.findall(r"\d+", budget.ascend_version or "")[:2])) in ASCEND_RESCALES


def _pool_parts(budget: EngineBudget) -> list[BudgetPart]:
    kv, memory, available = budget.kv_cache, budget.memory, available_bytes(budget)
    if available is None:
        return []
    parts = []
    stored = None if kv.given_bytes is not None or _rescales(budget) else memory.available_bytes
    if stored is not None and stored != available:
        parts.append(_part("mm_ipc", stored - available))
    block = block_bytes(budget)
    if block is None or kv.blocks is None:
        return [*parts, _part("kv_cache:bytes", available)]
    taken, usable = kv.blocks * block, max(kv.blocks - 1, 0) * block
    sizes = {"kv_cache": usable, "null_block": taken - usable, "rounding": available - taken}
    return [*parts, *(_part(key, size) for key, size in sizes.items())]


def block_bytes(budget: EngineBudget) -> int | None:
    """Return the bytes of one block, all layers included; ``None`` where the engine's figures do not show it."""
    kv = budget.kv_cache
    if not kv.blocks or kv.tensor_bytes is None or kv.tensor_bytes % kv.blocks:
        return None
    return kv.tensor_bytes // kv.blocks


def encoder_bytes(budget: EngineBudget, reading: RankReading) -> int | None:
    """Return the encoder cache's budget in bytes: by the entries that it holds, else by the model's width."""
    encoder, held = budget.encoder, reading.encoder_cache
    if encoder is None or encoder.cache_size is None:
        return None
    return _first(None if held is None else held.bytes_of(encoder.cache_size), encoder.cache_bytes)


def _first(*sizes: int | None) -> int | None:
    return next((size for size in sizes if size is not None), None)


def _part(row: str, size: int, why: str | None = None) -> BudgetPart:
    """Return the part of a row of `_PARTS`, of so many bytes; ``why`` replaces the row's reason."""
    title, grade, source, usual = _PARTS[row]
    key, reason = row.partition(":")[0], usual if why is None else why
    return BudgetPart(key=key, title=title, bytes=size, grade=grade, source=source, why=reason)
