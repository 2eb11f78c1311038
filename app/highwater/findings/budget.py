"""The rule book's questions about a start: what its profile missed, and what its settings contradict. Pure.

Each rule gives a finding for one rank, or nothing; what is not known answers no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from highwater.findings import advice as known
from highwater.findings.finding import Advice, Finding, weightiest_first
from highwater.plan.budget import RankBudget
from highwater.plan.encoder_view import EncoderView
from highwater.plan.explanation import Explanation
from highwater.units import MIB, gib_text

# Less than this between profile and life is no risk.
NOTABLE_BYTES = 128 * MIB

KV_CACHE_MEMORY_BYTES: Final = Advice(
    setting="--kv-cache-memory-bytes",
    change=(
        "Give the KV cache's size itself, with what the profile missed taken off. From 0.11 on; the utilization has no "
        "effect then."
    ),
    cost="KV cache. The number holds for this device and these flags only. Needs a restart.",
)
GIVEN_KV_CACHE: Final = Advice(
    setting="--kv-cache-memory-bytes",
    change="The KV cache's size was given (on CPU maybe with VLLM_CPU_KVCACHE_SPACE): give less, by what is missed.",
    cost="KV cache. Needs a restart.",
)
ALLOCATOR_CONF: Final = Advice(
    setting="PYTORCH_CUDA_ALLOC_CONF, PYTORCH_NPU_ALLOC_CONF, PYTORCH_ALLOC_CONF",
    change="Set one of them, once, with options that go together.",
    cost="Nothing. Needs a restart.",
)

RankRule: TypeAlias = Callable[[RankBudget, EncoderView | None], Finding | None]


def not_profiled(rank: RankBudget, encoder: EncoderView | None) -> Finding | None:  # noqa: ARG001 - the seam's
    """Report what this start needs and its formula counts nowhere."""
    missed = [part for part in rank.uncounted if part.key != "others"]
    size = sum(part.bytes for part in missed)
    if size < NOTABLE_BYTES:
        return None
    listed = ", ".join(f"{part.title} {gib_text(part.bytes)}" for part in missed)
    fits = rank.left_bytes is None or rank.left_bytes >= 0
    return Finding(
        name="not_profiled",
        weight="clue" if fits else "likely",
        title=f"the profile of {_name(rank)} did not count {gib_text(size)}",
        text=(
            f"{listed}. It lives outside the budget of {gib_text(rank.requested_bytes)}, where "
            f"{gib_text(rank.outside_bytes)} of the device are for it and everything else."
        ),
        figures={"rank": _name(rank), "missed_bytes": size, "outside_bytes": rank.outside_bytes},
        advice=(KV_CACHE_MEMORY_BYTES, known.GPU_MEMORY_UTILIZATION),
    )


def activation_above_profile(rank: RankBudget, encoder: EncoderView | None) -> Finding | None:  # noqa: ARG001
    """Report that a step took more than the profiling pass."""
    row = next((row for row in rank.observed if row.key == "activation"), None)
    if row is None or row.risk_bytes is None or row.risk_bytes < NOTABLE_BYTES:
        return None
    return Finding(
        name="activation_above_profile",
        weight="likely",
        title=f"steps of {_name(rank)} took {gib_text(row.risk_bytes)} more than its profile",
        text=(
            f"The profiling pass took {gib_text(row.profiled_bytes)} at its highest; since then "
            f"{gib_text(row.observed_bytes)} were allocated at once beside weights and KV cache, cached encoder "
            "outputs included."
        ),
        figures={"rank": _name(rank), "profiled_bytes": row.profiled_bytes, "observed_bytes": row.observed_bytes},
        advice=(known.MAX_NUM_BATCHED_TOKENS, known.LIMIT_MM_PER_PROMPT, _kv_cache_advice(rank)),
    )


def encoder_not_profiled(rank: RankBudget, encoder: EncoderView | None) -> Finding | None:
    """Report a start that did not take the encoder into account, and what its cache may come to."""
    if encoder is None or encoder.is_profiled is not False or not encoder.cache_bytes:
        return None
    return Finding(
        name="encoder_not_profiled",
        weight="likely",
        title=f"the start did not profile the encoder, whose cache may take about {gib_text(encoder.cache_bytes)}",
        text=(
            f"Its budget is {encoder.cache_size:,} embeddings, on every rank; it climbs to about that and stays. A "
            "smaller budget is the durable remedy; trimming gives back what is over."
        ),
        figures={"rank": _name(rank), "cache_bytes": encoder.cache_bytes, "held_bytes": encoder.held_bytes},
        advice=(known.MAX_NUM_BATCHED_TOKENS, known.LIMIT_MM_PER_PROMPT, _kv_cache_advice(rank)),
    )


def allocator_environment(rank: RankBudget, encoder: EncoderView | None) -> Finding | None:  # noqa: ARG001
    """Report variables of the worker's process that are set twice or contradict one another."""
    problems = contradictions(rank.environment, rank.device.type)
    if not problems:
        return None
    return Finding(
        name="allocator_environment",
        weight="clue",
        title=f"{_name(rank)} runs with settings that contradict one another",
        text=" ".join(f"{problem}." for problem in problems),
        figures={"rank": _name(rank)},
        advice=(ALLOCATOR_CONF,),
    )


BUDGET_RULES: Final[tuple[RankRule, ...]] = (
    not_profiled,
    activation_above_profile,
    encoder_not_profiled,
    allocator_environment,
)


def budget_findings(explanation: Explanation) -> tuple[Finding, ...]:
    """Ask every rule of every rank; one finding for each rule, of the rank that comes first with it."""
    found: dict[str, Finding] = {}
    for rank in explanation.ranks:
        for rule in BUDGET_RULES:
            finding = rule(rank, explanation.encoder)
            if finding is not None:
                found.setdefault(finding.name, finding)
    return tuple(weightiest_first(found.values()))


def contradictions(environment: Mapping[str, str | None], device_type: str | None) -> list[str]:
    """Return what is wrong with the variables, a clause each.

    Args:
        environment: The variables that are set.
        device_type: ``npu``, ``cuda``, ...
    """
    names = [name for name in environment if name.endswith("_ALLOC_CONF")]
    found = []
    for name in names:
        options = _options(environment[name])
        found += [f"{name} sets {key} {len(values)} times ({', '.join(values)})"
                  for key, values in options.items() if len(values) > 1]  # fmt: skip
        expands = options.get("expandable_segments", [""])[-1].lower() == "true"
        excluded = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in options]
        if expands and excluded and device_type == "npu":
            found.append(f"{name} sets expandable_segments:True, which excludes {' and '.join(excluded)} on an NPU")
    for name in names[1:]:
        if environment[name] != environment[names[0]]:
            found.append(
                f"{names[0]} and {name} are both set, to different values: which one counts differs by version"
            )
    blocking, queue = environment.get("ASCEND_LAUNCH_BLOCKING"), environment.get("TASK_QUEUE_ENABLE")
    if blocking == "1" and queue in {"1", "2"}:
        found.append(f"ASCEND_LAUNCH_BLOCKING=1 switches the task queue off: TASK_QUEUE_ENABLE={queue} has no effect")
    return found


def _options(text: str | None) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for part in (text or "").split(","):
        key, _, value = part.partition(":")
        if key.strip():
            options.setdefault(key.strip(), []).append(value.strip())
    return options


def _kv_cache_advice(rank: RankBudget) -> Advice:
    return GIVEN_KV_CACHE if rank.counting == "given" else KV_CACHE_MEMORY_BYTES


def _name(rank: RankBudget) -> str:
    return f"rank {'-' if rank.rank is None else rank.rank}"
