"""One rank's memory budget as a pure value: the parts that the start counted, and what it counted nowhere.

The parts sum to what was requested exactly: what no figure of the engine explains is a part of its own. Which parts
there are depends on how the version of vLLM counts, and that is seen by the attributes that its workers have:

    ``parts``      up to 0.26: requested - (weights + peak activation + non-torch increase) - graphs' estimate
    ``consumed``   from 0.27:  requested - (what the device's use grew by + peak headroom) - graphs' estimate
    ``cpu``        the requested share of the machine - the process's memory after the profile
    ``given``      the KV cache's size was given: nothing else is counted
    ``remainder``  the worker keeps only the result of its profile (vllm-ascend before 0.15)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from highwater.accounting.engine_budget import EngineBudget, StartMemory
from highwater.plan.estimates import requested_bytes
from highwater.plan.figure import Grade
from highwater.plan.kv_view import available_bytes
from highwater.readings import Device, RankReading, StartPhase
from highwater.units import gib_text

Counting: TypeAlias = Literal["parts", "consumed", "cpu", "given", "remainder"]

FORMULAS: Final[Mapping[Counting, str]] = {
    "parts": "KV cache = requested - (weights + peak activation + non-torch increase){graphs}",
    "consumed": "KV cache = requested - (device use grown since the start + peak headroom){graphs}",
    "cpu": "KV cache = requested - the process's memory after the profile",
    "given": "KV cache = the size that was given; the utilization has no effect",
    "remainder": "KV cache = total x utilization - what the profile found (this version keeps the result alone)",
}
# Up to this much is vLLM's own rounding of a share of the device to whole bytes.
_ROUNDING_BYTES = 16
# The last vllm-ascend whose workers keep the result of the profile alone.
_LAST_REMAINDER = (0, 14)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a budget.

    Attributes:
        key: A word for programs.
        title: What people call it.
        bytes: Its size; negative where vLLM's own figures sum to more than there is.
        grade: ``engine``: the engine's own figure. ``exact``: follows from such figures. ``measured``: seen by us.
            ``estimated``: within bounds.
        source: vLLM's own name for it, or where it was seen.
        why: What it is, in a sentence.
    """

    key: str
    title: str
    bytes: int
    grade: Grade
    source: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A figure of the profile beside the same as it is now.

    Attributes:
        key: A word for programs; ``title``: for people.
        profiled_bytes: What the start counted for it; ``None``: nothing, or not known.
        observed_bytes: What was seen since.
        risk_bytes: By how much more that is; 0 where it is less; ``None`` where either is not known.
        settings: What covers it: flags and variables.
    """

    key: str
    title: str
    profiled_bytes: int | None
    observed_bytes: int | None
    risk_bytes: int | None
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """One rank.

    Attributes:
        total_bytes: The device; on CPU what the process may have.
        init_free_bytes: Free before the engine took any.
        utilization: ``gpu_memory_utilization``.
        requested_bytes: The budget; ``None`` where the KV cache's size was given instead, or nothing says it.
        counting: How this version counts; ``None`` where nothing shows it.
        formula: The same in words.
        parts: They sum to ``requested_bytes``, or to the total where no share was requested.
        available_bytes: For the KV cache, as the start found it.
        pool_bytes: What the KV cache takes of them.
        outside_bytes: The device less what was requested.
        uncounted: What the formula counts nowhere, and lives outside the budget.
        left_bytes: What is left outside for everything else.
        fully_counted_bytes: The bytes for the KV cache if all of this engine's were counted; ``None`` where none is
            known.
        observed: The profile's figures beside those seen since.
        environment: The variables of the worker's process that change how much memory is used.
    """

    rank: int | None
    dp_rank: int | None = None
    pp_rank: int | None = None
    tp_rank: int | None = None
    device: Device
    total_bytes: int | None = None
    init_free_bytes: int | None = None
    utilization: float | None = None
    requested_bytes: int | None = None
    counting: Counting | None = None
    formula: str | None = None
    parts: tuple[Part, ...] = ()
    available_bytes: int | None = None
    pool_bytes: int | None = None
    outside_bytes: int | None = None
    uncounted: tuple[Part, ...] = ()
    left_bytes: int | None = None
    fully_counted_bytes: int | None = None
    observed: tuple[Observed, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)

    def part(self, key: str) -> Part | None:
        """Return a part by its key."""
        return next((part for part in (*self.parts, *self.uncounted) if part.key == key), None)


def rank_budget(budget: EngineBudget, reading: RankReading, start: Sequence[StartPhase] = ()) -> RankBudget:
    """Explain one rank's memory.

    Args:
        budget: What its worker reports of the start.
        reading: Its memory now.
        start: The phases of its start, where they were seen.
    """
    phases = {phase.name: phase for phase in start}
    memory, device = budget.memory, reading.device
    total = _first(memory.total_bytes, _of(phases, "init", "total_bytes"), reading.total_bytes)
    counting = _counting(budget, device)
    available = available_bytes(budget)
    requested = None if counting == "given" else memory.requested_bytes
    if requested is None and counting == "remainder" and total is not None and memory.utilization is not None:
        requested = requested_bytes(total, memory.utilization, _LAST_REMAINDER, "ascend")
    counted = [] if counting is None else _counted(memory, counting, reading, phases)
    parts = _parts(counting, _first(requested, total), counted, _pool_parts(budget, available))
    outside = None if requested is None or total is None else total - requested
    uncounted = _uncounted(budget, counting, reading, phases)
    missed = [part.bytes for part in uncounted if part.key != "others"]
    return RankBudget(
        rank=reading.rank,
        dp_rank=reading.dp_rank,
        pp_rank=reading.pp_rank,
        tp_rank=reading.tp_rank,
        device=device,
        total_bytes=total,
        init_free_bytes=_first(memory.init_free_bytes, _of(phases, "before", "free_bytes")),
        utilization=memory.utilization,
        requested_bytes=requested,
        counting=counting,
        formula=None if counting is None else _formula(counting, memory),
        parts=parts,
        available_bytes=available,
        pool_bytes=budget.kv_cache.tensor_bytes,
        outside_bytes=outside,
        uncounted=uncounted,
        left_bytes=None if outside is None else outside - sum(part.bytes for part in uncounted),
        fully_counted_bytes=available - sum(missed) if available is not None and missed else None,
        observed=_observed(budget, counting, reading, phases),
        environment=dict(budget.environment),
    )


def _counting(budget: EngineBudget, device: Device) -> Counting | None:
    memory, kv = budget.memory, budget.kv_cache
    if kv.given_bytes is not None or (device.type == "cpu" and kv.cpu_space_bytes is not None):
        return "given"
    if device.type == "cpu":
        return "cpu" if memory.requested_bytes is not None and memory.returned_bytes is not None else None
    if memory.total_consumed_bytes is not None:
        return "consumed"
    if memory.non_torch_bytes is not None:
        return "parts"
    return "remainder" if available_bytes(budget) is not None else None


def _formula(counting: Counting, memory: StartMemory) -> str:
    graphs = " - graphs' estimate" if _counted_graphs(memory) else ""
    return FORMULAS[counting].format(graphs=graphs)


def _counted_graphs(memory: StartMemory) -> int:
    """Return how much of the budget the start set aside for graphs.

    vLLM makes the estimate in any case, and takes it off where a variable says so, whose default differs by version;
    where the variable cannot be read, the sum of the other parts shows it.
    """
    estimate = memory.graphs_estimate_bytes
    if not estimate or estimate < 0:
        return 0
    if memory.graphs_estimate_counted is not None:
        return estimate if memory.graphs_estimate_counted else 0
    others = (memory.requested_bytes, memory.available_bytes, memory.peak_activation_bytes)
    if memory.non_torch_bytes is None or memory.weights_bytes is None or None in others:
        return 0
    requested, available, peak = (size or 0 for size in others)
    rest = requested - available - peak - memory.non_torch_bytes - memory.weights_bytes
    return estimate if abs(rest - estimate) <= _ROUNDING_BYTES else 0


def _parts(
    counting: Counting | None, whole: int | None, counted: Sequence[Part], pool: Sequence[Part]
) -> tuple[Part, ...]:
    if counting is None or whole is None:
        return ()
    parts = (*counted, *pool)
    return (*parts, *_rest(whole - sum(part.bytes for part in parts), counting, has_budget=counting != "given"))


def _counted(
    memory: StartMemory, counting: Counting, reading: RankReading, phases: Mapping[str, StartPhase]
) -> list[Part]:
    """Return what is not the KV cache's."""
    weights = _weights(memory, reading)
    parts = [] if weights is None else [weights]
    graphs = _counted_graphs(memory)
    if counting == "cpu" and memory.requested_bytes is not None and memory.returned_bytes is not None:
        taken = memory.requested_bytes - memory.returned_bytes
        why = "interpreter, libraries, heap, and what the profiling pass left: the resident size of the process"
        own = 0 if weights is None else weights.bytes
        parts.append(_part("process", "rest of the process", taken - own, "exact", "requested_cpu_memory - rss", why))
    if counting == "consumed" and memory.total_consumed_bytes is not None:
        parts += _consumed_parts(memory, memory.total_consumed_bytes, weights, phases)
    peak = memory.peak_activation_bytes
    if counting in {"parts", "consumed"} and peak is not None:
        peak -= graphs if counting == "consumed" else 0
        why = "what the profiling pass allocated at its highest and gave back again"
        parts.append(_part("activation", "peak activation", peak, "engine", "peak_activation_memory", why))
    if counting == "parts" and memory.non_torch_bytes is not None:
        why = "contexts, collectives and workspaces that came between the engine's first look and the profile's end"
        parts.append(_part("non_torch", "non-torch", memory.non_torch_bytes, "engine", "non_torch_memory", why))
    if graphs:
        why = "set aside for the graphs that are captured after the profile"
        parts.append(_part("graphs", "graphs (estimate)", graphs, "engine", "cudagraph_memory_estimate", why))
    return parts


def _consumed_parts(
    memory: StartMemory, consumed: int, weights: Part | None, phases: Mapping[str, StartPhase]
) -> list[Part]:
    persistent = _persistent_bytes(memory, phases)
    rest = consumed - (0 if weights is None else weights.bytes)
    if persistent is None:
        why = "tensors that stay beside the weights, contexts, collectives and workspaces: this version counts one sum"
        return [_part("consumed", "persistent and non-torch", rest, "exact", "total_consumed - weights", why)]
    return [
        _part("persistent", "persistent tensors", persistent, "measured", "allocated after loading - weights",
              "allocated before the profile and no weights: buffers and caches that stay"),
        _part("non_torch", "non-torch", rest - persistent, "exact", "total_consumed - weights - persistent",
              "contexts, collectives, workspaces, and blocks that PyTorch kept"),
    ]  # fmt: skip


def _weights(memory: StartMemory, reading: RankReading) -> Part | None:
    if memory.weights_bytes is not None:
        why = "by how much loading the model raised the device's use"
        return _part("weights", "weights", memory.weights_bytes, "engine", "model_memory_usage", why)
    seen = reading.components.weights_bytes
    if seen is None:
        return None
    return _part("weights", "weights", seen, "measured", "parameters and buffers", "this engine does not say it itself")


def _pool_parts(budget: EngineBudget, available: int | None) -> list[Part]:
    kv, memory = budget.kv_cache, budget.memory
    if available is None:
        return []
    parts = []
    if memory.available_bytes is not None and memory.available_bytes != available and kv.given_bytes is None:
        taken = memory.available_bytes - available
        why = "taken off the KV cache after the profile: multimodal inputs that API servers hand over on the device"
        parts.append(_part("mm_ipc", "multimodal transfer", taken, "exact", "--mm-ipc-gpu-memory-gb", why))
    block = block_bytes(budget)
    if block is None or kv.blocks is None:
        why = "how much of it the blocks take is not reported"
        return [*parts, _part("kv_cache", "KV cache", available, "engine", "available_kv_cache_memory_bytes", why)]
    usable = max(kv.blocks - 1, 0) * block
    parts += [
        _part("kv_cache", "KV cache", usable, "exact", "kv_cache_config.num_blocks", "blocks for keys and values"),
        _part("null_block", "null block", kv.blocks * block - usable, "exact", "BlockPool.null_block",
              "one block stands for the missing and is never given to a request"),
        _part("rounding", "rounding to blocks", available - kv.blocks * block, "exact", "available - blocks",
              "less than one block here, or blocks that another rank has no room for"),
    ]  # fmt: skip
    return parts


def _rest(rest: int, counting: Counting, *, has_budget: bool) -> list[Part]:
    if not has_budget:
        why = "not profiled, because the KV cache's size was given: activation, graphs, non-torch, free"
        return [_part("unprofiled", "everything else", rest, "exact", "total - the above", why)]
    if counting == "remainder":
        why = "activation, persistent tensors, what is not PyTorch's, also of others: this version keeps one sum"
        return [_part("profiled", "counted by the profile", rest, "exact", "requested - the above", why)]
    if not rest:
        return []
    if abs(rest) <= _ROUNDING_BYTES:
        return [_part("bytes", "whole bytes", rest, "exact", "int()", "vLLM computes with fractions of bytes")]
    why = "the engine's own figures do not sum to what it requested; this is the difference"
    return [_part("unexplained", "not explained", rest, "exact", "requested - the above", why)]


def block_bytes(budget: EngineBudget) -> int | None:
    """Return what one block takes, all layers included; ``None`` where the engine's figures do not show it."""
    kv = budget.kv_cache
    if not kv.blocks or kv.tensor_bytes is None or kv.tensor_bytes % kv.blocks:
        return None
    return kv.tensor_bytes // kv.blocks


# --- what is counted nowhere ---


def _uncounted(
    budget: EngineBudget, counting: Counting | None, reading: RankReading, phases: Mapping[str, StartPhase]
) -> tuple[Part, ...]:
    memory = budget.memory
    if counting not in {"parts", "consumed"}:
        return ()
    found = []
    persistent = _persistent_bytes(memory, phases) if counting == "parts" else None
    if persistent is not None and persistent > 0:
        why = "allocated before the profile, beside the weights"
        found.append(
            _part("persistent", "persistent tensors", persistent, "measured", "allocated after loading - weights", why)
        )
    found += _uncounted_non_torch(memory, counting, reading, phases)
    graphs = memory.graphs_bytes
    counted = _counted_graphs(memory)
    if graphs is not None and graphs > counted:
        why = f"captured after the profile, which set {gib_text(counted)} aside for them"
        found.append(_part("graphs_uncounted", "graphs beyond that", graphs - counted, "engine", "capture_model", why))
    return tuple(found)


def _uncounted_non_torch(
    memory: StartMemory, counting: Counting, reading: RankReading, phases: Mapping[str, StartPhase]
) -> list[Part]:
    before = _first(memory.init_non_torch_bytes, _others_before(memory, phases))
    now = reading.components.non_torch_bytes
    if counting == "parts" and now is not None and memory.non_torch_bytes is not None:
        # What graphs took may lie in there too, and has a line of its own.
        size = now - memory.non_torch_bytes - (memory.graphs_bytes or 0)
        if size > 0:
            early = f", {gib_text(before)} of it before the engine's first look" if before else ""
            why = f"of {gib_text(now)} now in use the profile counted {gib_text(memory.non_torch_bytes)}{early}"
            return [_part("non_torch_uncounted", "non-torch not counted", size, "measured", "used - reserved", why)]
        return []
    if not before:
        return []
    why = "in use before the engine's first look: other processes, and this one's own contexts"
    return [_part("others", "in use before the start", before, "engine", "init_snapshot", why)]


def _others_before(memory: StartMemory, phases: Mapping[str, StartPhase]) -> int | None:
    total, free = memory.total_bytes, memory.init_free_bytes
    return total - free if total is not None and free is not None else _of(phases, "before", "used_bytes")


def _persistent_bytes(memory: StartMemory, phases: Mapping[str, StartPhase]) -> int | None:
    allocated = _of(phases, "weights", "allocated_bytes")
    return None if allocated is None or memory.weights_bytes is None else allocated - memory.weights_bytes


# --- observed against profiled ---


def _observed(
    budget: EngineBudget,
    counting: Counting | None,
    reading: RankReading,
    phases: Mapping[str, StartPhase],
) -> tuple[Observed, ...]:
    memory, now = budget.memory, reading.components
    if reading.device.type == "cpu":
        return ()
    graphs, estimate = _counted_graphs(memory), memory.graphs_estimate_bytes
    about = "graphs" if estimate is None else f"graphs (estimated {gib_text(estimate)})"
    peak = memory.peak_activation_bytes
    profiled = None if peak is None else peak - (graphs if counting == "consumed" else 0)
    rows = [
        _row("activation", "peak activation", profiled, _observed_peak(budget, reading, phases),
             "--max-num-batched-tokens", "--max-num-seqs", "--limit-mm-per-prompt"),
        _row("graphs", about, graphs if estimate is not None else None, memory.graphs_bytes,
             "--gpu-memory-utilization", "--compilation-config"),
    ]  # fmt: skip
    if counting == "parts":
        rows.append(
            _row("non_torch", "non-torch", memory.non_torch_bytes, now.non_torch_bytes,
                 "--gpu-memory-utilization", "--kv-cache-memory-bytes", "HCCL_BUFFSIZE")
        )  # fmt: skip
    encoder = budget.encoder
    if encoder is not None and reading.encoder_cache is not None:
        whole = encoder_bytes(budget, reading)
        rows.append(
            _row("encoder_cache", "encoder cache", whole, now.encoder_cache_bytes,
                 "--max-num-batched-tokens", "--limit-mm-per-prompt")
        )  # fmt: skip
    return tuple(row for row in rows if row.profiled_bytes is not None or row.observed_bytes is not None)


def _observed_peak(budget: EngineBudget, reading: RankReading, phases: Mapping[str, StartPhase]) -> int | None:
    """Return how much more than at rest was allocated at once: weights, KV cache and persistent tensors taken off."""
    peak, pool = reading.torch.peak_allocated_bytes, budget.kv_cache.tensor_bytes
    rest = _first(_of(phases, "weights", "allocated_bytes"), budget.memory.weights_bytes)
    if peak is None or pool is None or rest is None or peak <= rest + pool:
        return None  # the highest was while the engine started: before the pool was made
    return peak - rest - pool


def encoder_bytes(budget: EngineBudget, reading: RankReading) -> int | None:
    """Return the encoder cache's budget in bytes: by the entries that it holds, else by the model's width."""
    encoder, held = budget.encoder, reading.encoder_cache
    if encoder is None or encoder.cache_size is None:
        return None
    if held is not None and held.embeds and held.device_bytes + held.host_bytes:
        return encoder.cache_size * (held.device_bytes + held.host_bytes) // held.embeds
    if encoder.embed_width is None or encoder.embed_bytes is None:
        return None
    return encoder.cache_size * encoder.embed_width * encoder.embed_bytes


def _row(key: str, title: str, profiled: int | None, observed: int | None, *settings: str) -> Observed:
    risk = None if profiled is None or observed is None else max(observed - profiled, 0)
    return Observed(
        key=key, title=title, profiled_bytes=profiled, observed_bytes=observed, risk_bytes=risk, settings=settings
    )


def _part(key: str, title: str, size: int, grade: Grade, *words: str) -> Part:
    source, why = words
    return Part(key=key, title=title, bytes=size, grade=grade, source=source, why=why)


def _of(phases: Mapping[str, StartPhase], name: str, figure: str) -> int | None:
    phase = phases.get(name)
    return None if phase is None else getattr(phase, figure)


def _first(*sizes: int | None) -> int | None:
    return next((size for size in sizes if size is not None), None)
