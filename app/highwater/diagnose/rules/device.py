"""The device: full, had room, held more than planned, or unlike its neighbours; and PyTorch's allocator on it. Pure.

The message of a failed allocation has figures, and they say what helps: more was asked for than the device has;
PyTorch's reserve would have been enough; others hold the device; or the engine's share leaves too little beside it. A
sleeping engine has no claim on what it gave back to the device: it lives on when it cannot take it again, so that no
incident opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from highwater.act.pressure import derive, slack_bytes
from highwater.diagnose.case import NOTABLE_BYTES, Case, RankCase
from highwater.diagnose.evidence import highest, part_of, risen
from highwater.diagnose.finding import COMPONENT_MEANING, Finding, against_fragmentation, finding, times
from highwater.diagnose.log.messages import BY_NAME, FailedAllocation
from highwater.diagnose.log.story import LogStory
from highwater.model.components import COMPONENT_NAMES, component_title
from highwater.model.rank import RankReading
from highwater.model.remedies import reserve_bytes
from highwater.model.units import GIB, MIB, span_text

# Below a device counts as full: on the measured machine the benchmark left 1.4 %, and 180 MiB were refused at 0.1 %.
FULL_RATIO = 0.02
ROOM_RATIO = 0.10
FRESH_SECONDS = 60.0  # what was free longer before the end says nothing of it
SKEW_RATIO, SKEW_BYTES = 0.02, 512 * MIB


def device_full(case: Case) -> Finding | None:
    full = [rank for rank in case.ranks if is_device_full(rank)]
    if not full:
        return None
    worst = min(full, key=lambda rank: rank.free_ratio or 0.0)
    is_cpu = worst.now.device.traits.is_host_memory
    is_reason = any(filled_up(case, rank) for rank in full)
    was_full = not is_reason and case.kind != "hung" and worst.first is not None
    unused = ("release",) if (reserve_bytes(worst.now) or 0) > NOTABLE_BYTES else ()
    encoder = ("reset_encoder_cache",) if (worst.now.components.encoder_cache_bytes or 0) > NOTABLE_BYTES else ()
    against = (*unused, *encoder, "gpu_memory_utilization", "policy_earlier")
    return finding(
        "device_full",
        weight="likely" if is_reason else "clue",
        advice=() if was_full else ("cpu_kvcache_space", "memory_limit") if is_cpu else against,
        rank=worst,
        age_seconds=case.age_seconds(worst),
        age=case.age_text(worst),
        memory="host memory" if is_cpu else "device",
        is_cpu=is_cpu,
        was_full=was_full,
        others=", ".join(rank.name for rank in full if rank is not worst),
    )


def device_had_room(case: Case) -> Finding | None:
    if not case.ranks or case.log.names_memory("device") or not all(map(_has_room, case.ranks)):
        return None
    least = min(case.ranks, key=lambda rank: rank.free_ratio or 0.0)
    missing, oldest = _unseen(case)
    is_cpu = least.now.device.traits.is_host_memory
    ranks = f"{len(case.ranks)} of {len(case.ranks) + missing} ranks" if missing else "every rank"
    return finding(
        "device_had_room",
        rank=least,
        ranks="the host" if is_cpu else ranks,
        of_known="" if is_cpu or missing is not None else " that was read",
        before=f", {span_text(oldest)} before" if oldest > FRESH_SECONDS else "",
        is_shown=missing == 0 and oldest <= FRESH_SECONDS,
        age=case.age_text(least),
        is_out_of_memory=case.kind == "out_of_memory",
        unheard=case.log.unheard,
        is_acquitted=is_acquitted(case),
    )


def is_acquitted(case: Case) -> bool:
    """Return whether room that the readings show says that the device's memory was not short.

    Not old ones, nor those of some ranks. A log that nobody understood is silent about everything. On CPU the device
    is the host, whose free memory says nothing of a container's limit.
    """
    has_failed = case.kind == "out_of_memory" or any(rank.ooms for rank in case.ranks)
    is_cpu, (missing, oldest) = any(rank.now.device.traits.is_host_memory for rank in case.ranks), _unseen(case)
    return not has_failed and not is_cpu and case.log.is_silent and missing == 0 and oldest <= FRESH_SECONDS


def _unseen(case: Case) -> tuple[int | None, float]:
    """Return how many ranks have no reading, ``None`` if that is not known, and how old the oldest reading is."""
    known = case.evidence
    expected = 0 if known is None else max(known.ranks_expected or 0, len({rank.key for rank in known.baseline}))
    return max(expected - len(case.ranks), 0) if expected else None, max(map(case.age_seconds, case.ranks), default=0.0)


def filled_up(case: Case, rank: RankCase) -> bool:
    """Return whether a full device explains an end: memory failed there, or the device was not so full before.

    A share may be planned to leave next to nothing: such a device is full from its start on, and that ends no engine.
    """
    if case.kind == "hung":
        return False
    if case.kind == "out_of_memory" or rank.failed_allocation_bytes is not None or case.log.names_memory("device"):
        return True
    if rank.first is None:
        return bool(rank.ooms) or case.has_grown
    taken = -(risen(rank.first, rank.now, lambda reading: reading.free_bytes) or 0)
    return bool(rank.ooms) or taken > rank.notable_bytes


def _has_room(rank: RankCase) -> bool:
    """Return whether a tenth of the device was free, or as much as the policy is satisfied with there."""
    if rank.failed_allocation_bytes is not None:
        return False
    if rank.free_ratio is None or rank.free_ratio >= ROOM_RATIO:
        return rank.free_ratio is not None
    slack = None if rank.now.device.traits.is_host_memory else slack_bytes(rank.now, rank.first)
    waters = derive(slack) if slack is not None else None
    return waters is not None and (rank.now.free_bytes or 0) >= waters.low


def is_device_full(rank: RankCase) -> bool:
    return rank.free_ratio is not None and rank.free_ratio < FULL_RATIO


def has_run_out(case: Case) -> bool:
    is_short = any(is_device_full(rank) or rank.failed_allocation_bytes is not None or rank.ooms for rank in case.ranks)
    return not case.is_killed_by_kernel and (
        case.kind == "out_of_memory" or is_short or case.log.names_memory("device")
    )


def over_budget(case: Case) -> Finding | None:
    def excess_bytes(rank: RankCase) -> int | None:
        used, requested = rank.peak.used_bytes, rank.now.budget.requested_bytes
        return used - requested if used and requested and not rank.now.launch.kv_cache_given else None

    excess, rank = highest(case.ranks, excess_bytes) or (0, None)
    if rank is None or excess <= rank.notable_bytes:
        return None
    share = rank.now.budget.gpu_memory_utilization
    of_device = f" ({share:g} of the device)" if share is not None else ""
    return finding("over_budget", rank=rank, excess=excess, share=of_device)


def skew(case: Case) -> Finding | None:
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


# --- PyTorch's allocator: what it could not get, and what it keeps that no tensor uses ---

# Of total, and in bytes: an allocator keeps less than both in its ordinary course.
UNUSED_RATIO, UNUSED_BYTES = 0.03, 1024 * MIB


def ooms(case: Case) -> Finding | None:
    rise, rank = highest(case.ranks, lambda each: each.ooms) or (0, None)
    return finding("ooms", rank=rank, rise=rise) if rank is not None and rise else None


def alloc_retries(case: Case) -> Finding | None:
    rise, rank = highest(case.ranks, lambda each: each.alloc_retries) or (0, None)
    if rank is None or not rise:
        return None
    return finding(
        "alloc_retries",
        weight="likely" if case.is_load else "clue",
        advice=("policy_earlier", *against_fragmentation(rank.device_type), "gpu_memory_utilization"),
        rank=rank,
        rise=rise,
        often=times(rise),
    )


def unused_reserve(case: Case) -> Finding | None:
    """Report that PyTorch's allocator held much that no tensor used: cached, or in fragments.

    What captured graphs hold between their runs is no tensor's either, and is needed. Where it is known what a release
    would have given back, it is left out.
    """

    def unused_bytes(rank: RankCase) -> int | None:
        if rank.now.releasable_bytes is None:
            return rank.unused_bytes
        return rank.now.releasable_bytes + (rank.now.torch.inactive_split_bytes or 0)

    unused, rank = highest(case.ranks, unused_bytes) or (0, None)
    if rank is None or not _is_much(unused, rank):
        return None
    releasable = rank.now.releasable_bytes
    would_help = releasable is None or _is_much(releasable, rank)
    is_full = is_device_full(rank)
    is_reason = is_full and would_help and not case.is_load and filled_up(case, rank)
    return finding(
        "unused_reserve",
        weight="likely" if is_reason else "clue",
        advice=(
            *(("release",) if would_help else ()),
            *against_fragmentation(rank.device_type),
            *(() if case.is_load else ("policy_earlier",)),
        ),
        rank=rank,
        unused=unused,
        is_full=is_full,
        is_load=case.is_load,
        meaning=COMPONENT_MEANING["torch_cached_bytes"],
    )


def _is_much(unused: int, rank: RankCase) -> bool:
    return unused > max(UNUSED_BYTES, int(UNUSED_RATIO * (rank.now.total_bytes or 0)))


# --- a failed allocation, by the figures of its message in the log ---

# What others hold counts as large, in bytes and of the device: where the message says what its process has in use, and
# where it says only what PyTorch has. The rest is then also the process's own contexts, graphs and buffers.
_OTHERS: Final = (GIB, 0.05)
_OTHERS_UNCOUNTED: Final = (4 * GIB, 0.15)
# Of a device: PyTorch always holds a little that no tensor uses, also where the share leaves too little beside it.
_SCATTERED: Final = 0.01
# A start that has less of its device allocated has no KV cache yet: what it has is no share's to make smaller.
_BEFORE_KV_CACHE: Final = 0.7


def failed_allocation(case: Case) -> Finding | None:
    failed = next((one for one in case.log.failed if one.memory == "device"), None)
    if failed is None or failed.tried_bytes is None or failed.total_bytes is None or case.kind == "hung":
        return None
    rank = next((one for one in case.ranks if one.failed_allocation_bytes == failed.tried_bytes), None)
    unused, others = None if rank is None else rank.unused_bytes, _others(failed)
    if failed.reserved_bytes is not None and failed.allocated_bytes is not None:
        unused = failed.reserved_bytes - failed.allocated_bytes
    room = (failed.free_bytes or 0) + (unused or 0)
    held, pool = failed.allocated_bytes or 0, None if rank is None else rank.now.components.kv_cache_bytes
    if case.kind != "start_failed" or held >= _BEFORE_KV_CACHE * failed.total_bytes:
        held = 0 if pool is None else max(held - pool, 0)
    is_larger = failed.tried_bytes + held > failed.total_bytes
    is_refused = failed.free_bytes is not None and failed.tried_bytes <= failed.free_bytes
    is_scattered = failed.tried_bytes <= room and (unused or 0) >= max(others or 0, _SCATTERED * failed.total_bytes)
    is_fragmented = is_scattered and not is_larger and not is_refused
    is_others = not (is_larger or is_refused or is_fragmented) and others is not None
    if is_larger:
        advice: tuple[str, ...] = (
            "cap_image_size",
            "mm_encoder_attn_backend",
            "skip_mm_profiling",
            "limit_mm_per_prompt",
        )
    elif is_fragmented:
        advice = (*against_fragmentation(failed.platform), "release", "max_num_batched_tokens")
    elif is_others or is_refused:
        advice = ("other_processes", "gpu_memory_utilization")
    else:
        advice = ("gpu_memory_utilization", "limit_mm_per_prompt", "max_num_batched_tokens", "policy_earlier")
    return finding(
        "failed_allocation",
        advice=advice,
        failed=failed,
        held=held if failed.tried_bytes <= failed.total_bytes else 0,
        unused=unused,
        others=others,
        is_counted=bool(failed.in_use_bytes),
        is_larger=is_larger,
        is_fragmented=is_fragmented,
        is_others=is_others,
        is_refused=is_refused and not is_larger,
        is_share=not (is_larger or is_fragmented or is_others or is_refused),
        writer=f"process {failed.pid}" if failed.pid is not None else "a process that it does not name",
    )


def _others(failed: FailedAllocation) -> int | None:
    if failed.total_bytes is None or failed.free_bytes is None or failed.reserved_bytes is None:
        return None
    others = failed.total_bytes - failed.free_bytes - max(failed.reserved_bytes, failed.in_use_bytes or 0)
    size, share = _OTHERS if failed.in_use_bytes else _OTHERS_UNCOUNTED
    return others if others > max(size, share * failed.total_bytes) else None


# --- a wake-up that failed ---


class _Need(NamedTuple):
    rank: str
    bytes: int
    free_bytes: int
    taken_bytes: int | None  # by others, since the engine fell asleep


@dataclass(slots=True)
class Sleep:
    """The readings around the last time that the engine fell asleep: the last one before, and the first one after."""

    before: tuple[RankReading, ...] = ()
    after: tuple[RankReading, ...] = ()

    def note(self, ranks: tuple[RankReading, ...]) -> None:
        if not any(rank.asleep_tags for rank in ranks):
            self.before, self.after = ranks, ()
        elif not self.after:
            self.after = ranks


def wake_up_failed(heard: LogStory, now: Sequence[RankReading], sleep: Sleep) -> Finding | None:
    is_short = heard.names_memory("device")
    if not is_short and all(message.name != "wake_up_failed" for message in heard.messages):
        return None
    needs: list[_Need] = []
    for rank in now:
        # What the sleep gave back, by the readings of the same process before and after.
        was, fell = (
            next((one.used_bytes for one in ranks if (one.key, one.pid) == (rank.key, rank.pid)), None)
            for ranks in (sleep.before, sleep.after)
        )
        if was is not None and fell is not None and rank.used_bytes is not None and rank.free_bytes is not None:
            taken = rank.used_bytes - fell
            needs.append(_Need(rank.name, was - fell, rank.free_bytes, taken if taken > NOTABLE_BYTES else None))
    worst = max(needs, key=lambda need: need.bytes - need.free_bytes, default=None)
    return finding("wake_up_failed", is_short=is_short, worst=worst, said=BY_NAME["wake_up_failed"].title)
