"""A start: what its profile missed, and which of its settings contradict one another. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from highwater.diagnose.case import Case, given
from highwater.diagnose.finding import Finding, finding
from highwater.model.engine_budget import EXCLUDED, allocator_options, sets_expandable_segments
from highwater.model.units import MIB, size_text

# A smaller difference between the profile and what followed is no risk.
NOTABLE_BYTES: Final = 128 * MIB


def not_profiled(case: Case) -> Finding | None:
    for rank in given(case.explanation).ranks:
        graphs = rank.part("graphs")
        elsewhere = {"others"} if graphs is None or graphs.bytes >= 0 else {"others", "graphs_uncounted"}
        missed = [part for part in rank.uncounted if part.key not in elsewhere]
        size = sum(part.bytes for part in missed)
        if size >= NOTABLE_BYTES:
            return finding(
                "not_profiled",
                weight="clue" if rank.left_bytes is None or rank.left_bytes >= 0 else "likely",
                name=rank.name,
                missed_bytes=size,
                outside_bytes=rank.outside_bytes,
                parts=", ".join(f"{part.title} {size_text(part.bytes)}" for part in missed),
                requested=rank.requested_bytes,
            )
    return None


def negative_graphs_estimate(case: Case) -> Finding | None:
    for rank in given(case.explanation).ranks:
        estimate, beyond = rank.part("graphs"), rank.part("graphs_uncounted")
        if estimate is not None and estimate.bytes < 0:
            excess = -estimate.bytes if beyond is None else beyond.bytes
            return finding(
                "negative_graphs_estimate",
                name=rank.name,
                excess=excess,
                estimate=estimate.bytes,
                captured=excess + estimate.bytes,
                fully_counted_bytes=rank.fully_counted_bytes,
            )
    return None


def activation_above_profile(case: Case) -> Finding | None:
    for rank in given(case.explanation).ranks:
        row = next((row for row in rank.observed if row.key == "activation"), None)
        if row is not None and row.risk_bytes is not None and row.risk_bytes >= NOTABLE_BYTES:
            return finding("activation_above_profile", name=rank.name, row=row, excess=row.risk_bytes)
    return None


def allocator_environment(case: Case) -> Finding | None:
    for rank in given(case.explanation).ranks:
        if problems := contradictions(rank.environment, rank.device.type):
            told = " ".join(f"{problem}." for problem in problems)
            return finding("allocator_environment", name=rank.name, problems=told)
    return None


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
