"""The engine's own words in its log: what they say of memory, and what their silence says. Pure.

Silence says something only of a log that was read and understood. A message of a failed allocation has figures, and
they say what helps: more was asked for than the device has; PyTorch's reserve would have been enough; others hold the
device; or the engine's share leaves too little beside it. A sleeping engine has no claim on what it gave back to the
device: it lives on when it cannot take it again, so that no incident opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from highwater.diagnose.case import NOTABLE_BYTES, Case
from highwater.diagnose.finding import Finding, against_fragmentation, finding
from highwater.diagnose.log.failed_allocation import FailedAllocation
from highwater.diagnose.log.messages import KNOWN, LogMessage, WhichMemory, may_be_of_memory
from highwater.diagnose.log.story import LogStory
from highwater.model.rank import RankReading
from highwater.model.units import GIB

_OF_MEMORY: Final = {known.name: known.of_memory for known in KNOWN if known.of_memory is not None}
# What others hold counts as large, in bytes and of the device: where the message says what its process has in use, and
# where it says only what PyTorch has. The rest is then also the process's own contexts, graphs and buffers.
_OTHERS: Final = (GIB, 0.05)
_OTHERS_UNCOUNTED: Final = (4 * GIB, 0.15)
# Of a device: PyTorch always holds a little that no tensor uses, also where the share leaves too little beside it.
_SCATTERED: Final = 0.01
# A start that has less of its device allocated has no KV cache yet: what it has is no share's to make smaller.
_BEFORE_KV_CACHE: Final = 0.7


def names_memory(log: LogStory, which: WhichMemory | None = None) -> bool:
    found = {_OF_MEMORY[message.name] for message in log.messages if message.name in _OF_MEMORY}
    return which in found if which is not None else bool(found)


def is_silent(log: LogStory) -> bool:
    """Return whether the log was read and understood, and has no word, nor lacks one, that may be of memory."""
    raised = "nothing" if log.exception is None else log.exception.text
    is_heard = log.was_understood and raised != "" and not may_be_of_memory(raised)
    return is_heard and not names_memory(log) and not log.failed


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


def host_shortage(case: Case) -> Finding | None:
    failed = next((one for one in case.log.failed if one.memory != "device"), None)
    if failed is None:
        return None
    used, whole = failed.node_gb or (None, None)
    return finding(
        "host_shortage",
        failed=failed,
        used=used,
        whole=whole,
        ratio=used / whole if used and whole else None,
        is_shm=failed.memory == "shm",
    )


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


def wake_up_failed(messages: Iterable[LogMessage], now: Sequence[RankReading], sleep: Sleep) -> Finding | None:
    heard = LogStory(messages=tuple(messages))
    is_short = names_memory(heard, "device")
    if not is_short and all(message.name != "wake_up_failed" for message in heard.messages):
        return None
    needs = [need for rank in now if (need := _need(rank, sleep)) is not None]
    worst = max(needs, key=lambda need: need.bytes - need.free_bytes, default=None)
    said = next(known.title for known in KNOWN if known.name == "wake_up_failed")
    return finding("wake_up_failed", is_short=is_short, worst=worst, said=said)


def _need(rank: RankReading, sleep: Sleep) -> _Need | None:
    """Return what a rank's wake-up needs: what the sleep gave back, by its readings before and after."""
    was, fell = (
        next((one for one in ranks if (one.key, one.pid) == (rank.key, rank.pid)), None)
        for ranks in (sleep.before, sleep.after)
    )
    before, after = (None if one is None else one.used_bytes for one in (was, fell))
    if before is None or after is None or rank.used_bytes is None or rank.free_bytes is None:
        return None
    taken = rank.used_bytes - after
    return _Need(rank.name, before - after, rank.free_bytes, taken if taken > NOTABLE_BYTES else None)
