"""What PyTorch's allocator held in vain, and how often it ran out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from app.incidents import advice as known
from app.incidents.incident import Evidence, Finding
from app.incidents.latest import Latest, baseline_of, rise
from app.units import MIB, mib

# Of total, and in bytes: an allocator keeps less than both in its ordinary course.
UNUSED_RATIO, UNUSED_BYTES = 0.03, 1024 * MIB


def unused_reserve(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether PyTorch's allocator held much in vain: cached or in fragments.

    What captured graphs hold between their runs is no tensor's either, and not in vain. Where it is known what a
    release would have given back, it is left out.
    """
    sizes = [(size, rank) for rank in ranks if (size := _in_vain(rank)) is not None]
    if not sizes:
        return None
    size, rank = max(sizes, key=lambda each: each[0])
    if not _is_much(size, rank):
        return None
    is_full = rank.is_full
    split, releasable = rank.torch.inactive_split_bytes, rank.releasable_bytes
    would_help = releasable is None or _is_much(releasable, rank)
    text = (
        f"PyTorch's allocator held {mib(size)} MiB on {rank.name} that no tensor used: "
        f"{mib(rank.torch.reserved_bytes)} reserved, {mib(rank.torch.allocated_bytes)} allocated."
    )
    if split:
        text += f" {mib(split)} of them lie in pieces beside live tensors: those cannot be given back."
    if releasable is not None:
        text += f" A release would have given {mib(releasable)} MiB back to the device."
    if is_full:
        text += " The device had next to none left for others meanwhile."
    return Finding(
        name="unused_reserve",
        weight="likely" if is_full and would_help and evidence.kind != "hung" else "clue",
        title=f"PyTorch's allocator held {mib(size)} MiB on {rank.name} that no tensor used",
        text=text,
        figures={
            "rank": rank.name,
            "reserved_bytes": rank.torch.reserved_bytes,
            "allocated_bytes": rank.torch.allocated_bytes,
            "inactive_split_bytes": split,
            "releasable_bytes": releasable,
        },
        advice=(
            *((known.RELEASE,) if would_help else ()),
            *known.against_fragmentation(rank.device_type),
            known.POLICY_EARLIER,
        ),
    )


def _in_vain(rank: Latest) -> int | None:
    if rank.releasable_bytes is None:
        return rank.unused_bytes
    return rank.releasable_bytes + (rank.torch.inactive_split_bytes or 0)


def _is_much(size: int, rank: Latest) -> bool:
    return size > max(UNUSED_BYTES, int(UNUSED_RATIO * (rank.total_bytes or 0)))


def alloc_retries(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether it ran out and tried again, in the time that is known."""
    worst = _most_risen(evidence, ranks, "alloc_retries")
    if worst is None:
        return None
    times, rank = worst
    return Finding(
        name="alloc_retries",
        weight="clue",
        title=f"the allocator of {rank.name} ran out and tried again {_times(times)}",
        text=(
            f"{_times(times).capitalize()} PyTorch's allocator on {rank.name} got no memory, gave back what it held in "
            "vain, and tried again. Each time costs a step its pace; it is the early warning before the error."
        ),
        figures={"rank": rank.name, "alloc_retries": rank.torch.alloc_retries, "rise": times},
        advice=(known.POLICY_EARLIER, *known.against_fragmentation(rank.device_type), known.GPU_MEMORY_UTILIZATION),
    )


def ooms(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether it gave up, in the time that is known."""
    worst = _most_risen(evidence, ranks, "ooms")
    if worst is None:
        return None
    times, rank = worst
    return Finding(
        name="ooms",
        weight="likely",
        title=f"PyTorch's allocator on {rank.name} gave up {_times(times)}",
        text=(
            f"PyTorch counted {times} out-of-memory errors on {rank.name}. One in a step ends the engine. Those of the "
            "NPU's workspaces are not in this count."
        ),
        figures={"rank": rank.name, "ooms": rank.torch.ooms, "rise": times},
        advice=(known.GPU_MEMORY_UTILIZATION, known.LIMIT_MM_PER_PROMPT, known.MAX_NUM_BATCHED_TOKENS),
    )


def _most_risen(evidence: Evidence, ranks: Sequence[Latest], counter: str) -> tuple[int, Latest] | None:
    rises = [
        (times, rank)
        for rank in ranks
        if (times := rise(rank.evidence, baseline_of(evidence, rank.evidence), counter)) is not None and times > 0
    ]
    return max(rises, key=lambda each: each[0], default=None)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
