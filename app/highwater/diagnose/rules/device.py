"""The device: full, had room, held more than planned, or unlike its neighbours. Pure."""

from __future__ import annotations

from typing import Final

from highwater.accounting.components import COMPONENT_NAMES
from highwater.accounting.remedies import reserve_bytes
from highwater.diagnose.advice import ADVICE
from highwater.diagnose.case import NOTABLE_BYTES, Case, RankCase, highest, part_of
from highwater.diagnose.evidence import Evidence
from highwater.diagnose.finding import Finding, finding
from highwater.diagnose.log.messages import KNOWN
from highwater.diagnose.log.story import LogStory
from highwater.policy.waters import derive, slack_bytes
from highwater.text.table import component_title
from highwater.units import MIB

# Below a device counts as full: on the measured machine the benchmark left 1.4 %, and 180 MiB were refused at 0.1 %.
FULL_RATIO = 0.02
ROOM_RATIO = 0.10
SKEW_RATIO, SKEW_BYTES = 0.02, 512 * MIB
_OF_MEMORY: Final = frozenset(known.name for known in KNOWN if known.of_memory)
# Of a running engine's messages of memory those of its device: host memory is no share of it.
_OF_DEVICE_MEMORY: Final = frozenset(
    known.name
    for known in KNOWN
    if known.of_memory and not known.at_start and ADVICE["gpu_memory_utilization"] in known.advice
)


def device_full(case: Case, evidence: Evidence) -> Finding | None:
    """Report that a rank's device had next to nothing free."""
    full = [rank for rank in case.ranks if is_device_full(rank)]
    if not full:
        return None
    worst = min(full, key=lambda rank: rank.free_ratio or 0.0)
    is_cpu = worst.device_type == "cpu"
    return finding(
        "device_full",
        weight="clue" if case.kind == "hung" else "likely",
        advice=_against_full(worst),
        rank=worst,
        age_seconds=case.age_seconds(worst),
        age=case.age_text(worst),
        memory="host memory" if is_cpu else "device",
        is_cpu=is_cpu,
        others=", ".join(rank.name for rank in full if rank is not worst),
    )


def device_had_room(case: Case, evidence: Evidence) -> Finding | None:
    """Report that every rank had much free: the cause lies elsewhere than in the device's memory."""
    if not case.ranks or not all(map(_has_room, case.ranks)):
        return None
    least = min(case.ranks, key=lambda rank: rank.free_ratio or 0.0)
    return finding(
        "device_had_room",
        rank=least,
        age=case.age_text(least),
        is_out_of_memory=case.kind == "out_of_memory" or may_be_of_memory(case.log),
    )


def _has_room(rank: RankCase) -> bool:
    """Return whether a tenth of the device was free, or as much as the policy is satisfied with there."""
    if rank.failed_allocation_bytes is not None:
        return False
    if rank.free_ratio is None or rank.free_ratio >= ROOM_RATIO:
        return rank.free_ratio is not None
    slack = slack_bytes(rank.now, rank.first) if rank.device_type != "cpu" else None
    waters = derive(slack) if slack is not None else None
    return waters is not None and (rank.now.free_bytes or 0) >= waters.low


def _against_full(rank: RankCase) -> tuple[str, ...]:
    if rank.device_type == "cpu":
        return ("cpu_kvcache_space", "memory_limit")
    unused = ("release",) if (reserve_bytes(rank.now) or 0) > NOTABLE_BYTES else ()
    encoder = ("reset_encoder_cache",) if (rank.now.components.encoder_cache_bytes or 0) > NOTABLE_BYTES else ()
    return (*unused, *encoder, "gpu_memory_utilization", "policy_earlier")


def is_device_full(rank: RankCase) -> bool:
    """Return whether next to nothing was free, as far as that is known."""
    return rank.free_ratio is not None and rank.free_ratio < FULL_RATIO


def may_be_of_memory(log: LogStory) -> bool:
    """Return whether the log says that memory was short, or that it may have been."""
    return any(message.name in _OF_MEMORY for message in log.messages)


def has_run_out(case: Case) -> bool:
    """Return whether the device's memory ran out: by the incident, its counters, or what was free at the end."""
    is_killed = case.evidence is not None and case.evidence.oom_kills is not None and case.evidence.oom_kills.count > 0
    is_short = any(is_device_full(rank) or rank.failed_allocation_bytes is not None or rank.ooms for rank in case.ranks)
    is_logged = any(message.name in _OF_DEVICE_MEMORY for message in case.log.messages)
    return not is_killed and (case.kind == "out_of_memory" or is_short or is_logged)


def over_budget(case: Case) -> Finding | None:
    """Report that a rank used more than vLLM had planned with."""
    excess, rank = highest(case.ranks, _excess_bytes) or (0, None)
    if rank is None or excess <= rank.notable_bytes:
        return None
    share = rank.now.budget.gpu_memory_utilization
    of_device = f" ({share:g} of the device)" if share is not None else ""
    return finding("over_budget", rank=rank, excess=excess, share=of_device)


def _excess_bytes(rank: RankCase) -> int | None:
    used, requested = rank.peak.used_bytes, rank.now.budget.requested_bytes
    return used - requested if used and requested else None


def skew(case: Case) -> Finding | None:
    """Report that one rank used much more than another on the same device."""
    used = sorted(
        ((rank.peak.used_bytes, rank) for rank in case.ranks if rank.peak.used_bytes is not None),
        key=lambda each: each[0],
    )
    if len(used) < 2:  # noqa: PLR2004 - one rank is not skewed against anything
        return None
    (low, lightest), (high, heaviest) = used[0], used[-1]
    more, total_bytes = high - low, heaviest.now.total_bytes
    if more <= max(SKEW_BYTES, int(SKEW_RATIO * (total_bytes or 0))) or total_bytes != lightest.now.total_bytes:
        return None
    parts = {
        name: mine - other
        for name in COMPONENT_NAMES
        if (mine := part_of(heaviest.peak, name)) is not None and (other := part_of(lightest.peak, name)) is not None
    }
    most, component = highest(parts, parts.get) or (0, "")
    return finding(
        "skew",
        {f"{rank.name} used_bytes": size for size, rank in used} | {"difference_bytes": more},
        peak="at its peak " if case.is_load else "",
        heaviest=heaviest.name,
        high=high,
        lightest=lightest.name,
        low=low,
        component=component_title(component) if most > 0 else None,
    )
