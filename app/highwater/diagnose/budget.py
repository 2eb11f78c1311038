"""The findings on a start's budget: what its profile missed, and which of its settings contradict one another. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from highwater.accounting.engine_budget import EXCLUDED, allocator_options, sets_expandable_segments
from highwater.diagnose.advice import against_fragments
from highwater.diagnose.finding import Finding, finding, weightiest_first
from highwater.diagnose.rules.caches import AGAINST_UNPROFILED, WHY_UNPROFILED
from highwater.plan.budget import RankBudget
from highwater.plan.encoder_view import EncoderView
from highwater.plan.explanation import Explanation
from highwater.readings.schema import SCHEMA
from highwater.units import MIB, size_text

# A smaller difference between the profile and what followed is no risk.
NOTABLE_BYTES = 128 * MIB


class BudgetCase(NamedTuple):
    rank: RankBudget
    encoder: EncoderView | None

    @property
    def name(self) -> str:
        return self.rank.name

    @property
    def kv_cache_advice(self) -> str:
        return "given_kv_cache" if self.rank.counting == "given" else "kv_cache_memory_bytes"


BudgetRule: TypeAlias = Callable[[BudgetCase], Finding | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A running engine explained, as ``GET /memory/budget`` returns it; ``taken_at`` is ``None`` before a reading."""

    schema: int = SCHEMA
    taken_at: float | None = None
    engine_state: str | None = None
    explanation: Explanation
    findings: tuple[Finding, ...] = ()


def not_profiled(case: BudgetCase) -> Finding | None:
    rank = case.rank
    graphs = rank.part("graphs")
    elsewhere = {"others"} if graphs is None or graphs.bytes >= 0 else {"others", "graphs_uncounted"}
    missed = [part for part in rank.uncounted if part.key not in elsewhere]
    size = sum(part.bytes for part in missed)
    if size < NOTABLE_BYTES:
        return None
    return finding(
        "not_profiled",
        weight="clue" if rank.left_bytes is None or rank.left_bytes >= 0 else "likely",
        case=case,
        missed_bytes=size,
        parts=", ".join(f"{part.title} {size_text(part.bytes)}" for part in missed),
        requested=rank.requested_bytes,
    )


def negative_graphs_estimate(case: BudgetCase) -> Finding | None:
    estimate, beyond = case.rank.part("graphs"), case.rank.part("graphs_uncounted")
    if estimate is None or estimate.bytes >= 0:
        return None
    excess = -estimate.bytes if beyond is None else beyond.bytes
    return finding(
        "negative_graphs_estimate",
        advice=("graphs_estimate", case.kv_cache_advice),
        case=case,
        excess=excess,
        estimate=estimate.bytes,
        captured=excess + estimate.bytes,
    )


def activation_above_profile(case: BudgetCase) -> Finding | None:
    row = next((row for row in case.rank.observed if row.key == "activation"), None)
    if row is None or row.risk_bytes is None or row.risk_bytes < NOTABLE_BYTES:
        return None
    return finding(
        "activation_above_profile",
        advice=("max_num_batched_tokens", "limit_mm_per_prompt", case.kv_cache_advice),
        case=case,
        row=row,
        excess=row.risk_bytes,
    )


def encoder_not_profiled(case: BudgetCase) -> Finding | None:
    encoder = case.encoder
    if encoder is None or encoder.is_profiled is not False or encoder.cache_bytes == 0:
        return None
    by = encoder.unprofiled_by
    return finding(
        "encoder_not_profiled",
        weight="likely",
        advice=(
            *(() if by is None else (AGAINST_UNPROFILED[by],)),
            *("max_num_batched_tokens", "limit_mm_per_prompt", case.kv_cache_advice),
        ),
        rank=case.name,
        by=None if by is None else WHY_UNPROFILED[by],
        cache_bytes=encoder.cache_bytes,
        held_bytes=encoder.held_bytes,
        embeddings=encoder.cache_size,
        is_given=case.rank.counting == "given",
        grown=None,
    )


def without_expandable_segments(case: BudgetCase) -> Finding | None:
    launch = case.rank.launch
    if case.rank.device.type != "npu" or case.encoder is None or launch.expandable_segments is not False:
        return None
    return finding(
        "without_expandable_segments",
        weight="clue",
        advice=against_fragments(has_sleep_mode=bool(launch.sleep_mode)),
        is_known=True,
        is_asleep=launch.sleep_mode,
        shared_with=None,
        ranks=case.name,
        grown=0,
        non_torch=0,
    )


def allocator_environment(case: BudgetCase) -> Finding | None:
    problems = contradictions(case.rank.environment, case.rank.device.type)
    if not problems:
        return None
    return finding("allocator_environment", case=case, problems=" ".join(f"{problem}." for problem in problems))


BUDGET_RULES: Final[tuple[BudgetRule, ...]] = (
    not_profiled,
    negative_graphs_estimate,
    activation_above_profile,
    encoder_not_profiled,
    without_expandable_segments,
    allocator_environment,
)


def explained(explanation: Explanation, *, taken_at: float | None = None, engine_state: str | None = None) -> Explained:
    found = budget_findings(explanation)
    return Explained(taken_at=taken_at, engine_state=engine_state, explanation=explanation, findings=found)


def budget_findings(explanation: Explanation) -> tuple[Finding, ...]:
    found: dict[str, Finding] = {}
    for rank in explanation.ranks:
        for rule in BUDGET_RULES:
            if (one := rule(BudgetCase(rank, explanation.encoder))) is not None:
                found.setdefault(one.name, one)
    return tuple(weightiest_first(found.values()))


def contradictions(environment: Mapping[str, str | None], device_type: str | None) -> list[str]:
    names = [name for name in environment if name.endswith("_ALLOC_CONF")]
    found = []
    for name in names:
        options = allocator_options(environment[name])
        found += [f"{name} sets {key} {len(values)} times ({', '.join(values)})"
                  for key, values in options.items() if len(values) > 1]  # fmt: skip
        excluded = [key for key in EXCLUDED if key in options]
        if sets_expandable_segments(environment[name]) and excluded and device_type == "npu":
            found.append(f"{name} sets expandable_segments:True, which excludes {' and '.join(excluded)} on an NPU")
    if device_type == "npu" and {"PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"} <= set(names):
        found.append("PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set, which torch_npu from 2.13 on refuses")
    for name in names[1:]:
        if environment[name] != environment[names[0]]:
            found.append(
                f"{names[0]} and {name} are both set, to different values: which one counts differs by version"
            )
    blocking, queue = environment.get("ASCEND_LAUNCH_BLOCKING"), environment.get("TASK_QUEUE_ENABLE")
    if blocking == "1" and queue in {"1", "2"}:
        found.append(f"ASCEND_LAUNCH_BLOCKING=1 switches the task queue off: TASK_QUEUE_ENABLE={queue} has no effect")
    return found
