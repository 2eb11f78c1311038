"""Whether the device was full, and what had been planned for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from app.attribution import rank_key
from app.capabilities import parse_version
from app.incidents import advice as known
from app.incidents.incident import Advice, Evidence, Finding
from app.incidents.latest import NOTABLE_BYTES, Latest
from app.policy.waters import derive, slack_bytes
from app.readings import RankReading
from app.units import mib

ROOM_RATIO = 0.10
# vllm-ascend of these sizes the KV pool as if the multimodal encoder needed nothing.
_UNPROFILED: Final = ("0.11.0", "0.12.0")


def device_full(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether a rank's device had next to nothing free."""
    full = [rank for rank in ranks if rank.is_full]
    if not full:
        return None
    worst = min(full, key=lambda rank: rank.free_ratio or 0.0)
    others = ", ".join(rank.name for rank in full if rank is not worst)
    what = "host memory" if worst.device_type == "cpu" else "device"
    text = (
        f"The last that is known of {worst.name}{worst.age_words(evidence.at)}: of {mib(worst.total_bytes)} MiB of its "
        f"{what} {mib(worst.free_bytes)} were free. Whoever asks for more than that gets none."
    )
    if worst.device_type != "cpu":
        text += " That is PyTorch's allocator, and also what it does not manage: workspaces, collectives, graphs."
    if others:
        text += f" No better: {others}."
    return Finding(
        name="device_full",
        weight="clue" if evidence.kind == "hung" else "likely",
        title=f"{worst.name} had {mib(worst.free_bytes)} MiB free of {mib(worst.total_bytes)}",
        text=text,
        figures={
            "rank": worst.name,
            "free_bytes": worst.free_bytes,
            "total_bytes": worst.total_bytes,
            "used_bytes": worst.used_bytes,
            "age_seconds": worst.age_seconds(evidence.at),
        },
        advice=_against_full(worst),
    )


def device_had_room(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether every rank had much free: then the device's memory is not where to look."""
    baseline = {rank_key(reading): reading for reading in evidence.baseline}
    if not ranks or not all(_has_room(rank, baseline) for rank in ranks):
        return None
    least = min(ranks, key=lambda rank: rank.free_ratio or 0.0)
    text = (
        f"Of all ranks {least.name} had the least free{least.age_words(evidence.at)}: {mib(least.free_bytes)} MiB of "
        f"{mib(least.total_bytes)}. "
    )
    if evidence.kind == "out_of_memory":
        text += "So it was one very large piece, a rise between two readings, fragments, or not the device's memory."
    else:
        text += "As far as readings can tell, the device's memory is not what ended it."
    return Finding(
        name="device_had_room",
        weight="note",
        title=f"every rank had at least {mib(least.free_bytes)} MiB free",
        text=text,
        figures={"rank": least.name, "free_bytes": least.free_bytes, "total_bytes": least.total_bytes},
    )


def _has_room(rank: Latest, baseline: Mapping[tuple[int, int], RankReading]) -> bool:
    """Whether a tenth of the device was free, or as much as the policy is satisfied with there."""
    if rank.free_ratio is None or rank.free_ratio >= ROOM_RATIO:
        return rank.free_ratio is not None
    reading = rank.evidence.reading
    if reading is None or rank.device_type == "cpu":
        return False
    slack = slack_bytes(reading, baseline.get(rank_key(reading)))
    waters = derive(slack) if slack is not None else None
    return waters is not None and (rank.free_bytes or 0) >= waters.low


def over_budget(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether a rank used more than vLLM had planned with."""
    del evidence
    over = [(used - budget, rank) for rank in ranks if (budget := rank.requested_bytes) and (used := rank.used_bytes)]
    if not over:
        return None
    excess, rank = max(over, key=lambda each: each[0])
    if excess <= rank.notable_bytes:
        return None
    reading = rank.evidence.reading
    share = reading.budget.gpu_memory_utilization if reading is not None else None
    of_share = f" ({share:g} of the device)" if share is not None else ""
    return Finding(
        name="over_budget",
        weight="clue",
        title=f"{rank.name} used {mib(excess)} MiB more than vLLM had budgeted",
        text=(
            f"At start vLLM planned {rank.name} with {mib(rank.requested_bytes)} MiB{of_share}; "
            f"{mib(rank.used_bytes)} were in use. The rest of the device is for what profiling does not see, and for "
            "other processes: it was being used up."
        ),
        figures={
            "rank": rank.name,
            "used_bytes": rank.used_bytes,
            "requested_bytes": rank.requested_bytes,
            "gpu_memory_utilization": share,
        },
        advice=(known.GPU_MEMORY_UTILIZATION, known.OTHER_PROCESSES),
    )


def unprofiled_encoder(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether this version plans without the multimodal encoder."""
    version = evidence.engine.version
    is_multimodal = any(rank.evidence.reading and rank.evidence.reading.encoder_cache for rank in ranks)
    is_one_of_them = str(parse_version(version)) in _UNPROFILED
    if not (is_one_of_them and is_multimodal and any(rank.device_type == "npu" for rank in ranks)):
        return None
    return Finding(
        name="unprofiled_encoder",
        weight="clue",
        title="this version sizes the KV cache as if the multimodal encoder needed no memory",
        text=(
            f"vLLM {version} on the NPU: vllm-ascend 0.11.0 and 0.12.0rc1 profile neither the encoder nor its cache. "
            "Both, the graphs and the workspaces have to fit into what gpu_memory_utilization leaves over."
        ),
        figures={"version": version},
        advice=(known.GPU_MEMORY_UTILIZATION, known.UPGRADE_ASCEND),
    )


def _against_full(rank: Latest) -> tuple[Advice, ...]:
    if rank.device_type == "cpu":
        return (known.CPU_KVCACHE_SPACE, known.MEMORY_LIMIT)
    unused = (known.RELEASE,) if rank.unused_bytes is not None and rank.unused_bytes > NOTABLE_BYTES else ()
    cached = rank.components.encoder_cache_bytes
    encoder = (known.RESET_ENCODER_CACHE,) if cached is not None and cached > NOTABLE_BYTES else ()
    return (*unused, *encoder, known.GPU_MEMORY_UTILIZATION, known.POLICY_EARLIER)
