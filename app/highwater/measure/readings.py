"""A sidecar's responses as the experiment's values: validated where they enter. Pure.

Raises ``SidecarUnreachable`` where a response is not what a sidecar of this version gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from highwater.accounting.attribution import account
from highwater.accounting.points import MemoryPoint
from highwater.client.answers import understood
from highwater.findings.case import EncoderEntry
from highwater.measure.experiment import CacheReading, Moment
from highwater.readings import Device, EncoderCache, EngineLoad, HostMemory, RankReading, WorkerMemory
from highwater.text.printable import plain

LARGEST = 5
# What of vLLM's configuration bears on memory: its section and key there, and the flag that sets it.
_SETTINGS: Final[Sequence[tuple[str, str, str]]] = (
    ("cache_config", "gpu_memory_utilization", "--gpu-memory-utilization"),
    ("model_config", "max_model_len", "--max-model-len"),
    ("scheduler_config", "max_num_seqs", "--max-num-seqs"),
    ("scheduler_config", "max_num_batched_tokens", "--max-num-batched-tokens"),
    ("model_config", "dtype", "--dtype"),
    ("model_config", "quantization", "--quantization"),
    ("model_config", "enforce_eager", "--enforce-eager"),
    ("model_config", "enable_sleep_mode", "--enable-sleep-mode"),
    ("multimodal_config", "mm_processor_cache_gb", "--mm-processor-cache-gb"),
    ("multimodal_config", "limit_per_prompt", "--limit-mm-per-prompt"),
    ("cache_config", "block_size", "--block-size"),
    ("cache_config", "enable_prefix_caching", "--enable-prefix-caching"),
    ("parallel_config", "tensor_parallel_size", "--tensor-parallel-size"),
    ("parallel_config", "pipeline_parallel_size", "--pipeline-parallel-size"),
    ("parallel_config", "data_parallel_size", "--data-parallel-size"),
)


def history_ranks(readings: Iterable[Mapping[str, Any]]) -> Iterator[RankReading]:
    """Return the rows of ``GET /memory/history``."""
    with understood("/memory/history"):
        for reading in readings:
            for row in reading["ranks"]:
                yield _sampled(row, MemoryPoint.of_row(float(reading["at"]), row))


def recorded_ranks(ranks: Iterable[Mapping[str, Any]], after: Mapping[Any, float]) -> Iterator[RankReading]:
    """Return the recorders' samples that are newer than the last one of each rank, by its key."""
    with understood("/memory/history?recorded=true"):
        for rank in ranks:
            key = (rank["dp_rank"] or 0, rank["rank"] or 0)
            for sample in rank["samples"]:
                if sample["at"] > after.get(key, 0.0):
                    yield _sampled(rank, MemoryPoint.of_row(float(sample["at"]), sample))


def traffic_of(readings: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, EngineLoad]]:
    """Return the engine's counts of requests in ``GET /memory/history``."""
    with understood("/memory/history"):
        for row in readings:
            counted = EngineLoad(requests_running=row["requests_running"], requests_waiting=row["requests_waiting"])
            yield row["at"], counted


def cache_of(title: str, answer: Mapping[str, Any], moment: Moment) -> CacheReading | None:
    """Return ``GET /memory/encoder-cache``: the rank that holds most; ``None`` where there is no such cache."""
    with understood("/memory/encoder-cache"):
        there = [rank for rank in answer["ranks"] if rank.get("present")]
        if not there:
            return None
        fullest = max(there, key=lambda rank: rank["device_bytes"] + rank["host_bytes"])
        reading = moment.rank((fullest.get("dp_rank") or 0, fullest.get("rank") or 0))
        known = reading.encoder_cache if reading is not None else None
        totals = EncoderCache(
            entries=fullest["entries_total"],
            device_bytes=fullest["device_bytes"],
            host_bytes=fullest["host_bytes"],
            capacity_embeds=fullest.get("capacity_embeds") or (known.capacity_embeds if known else None),
        )
        return CacheReading(title=title, totals=totals, largest=tuple(map(_entry, fullest["entries"][:LARGEST])))


def settings_of(answer: object) -> dict[str, str]:
    """Return the settings that bear on memory, of ``GET /server_info``, by their flags; unknown ones are left out."""
    config = answer.get("vllm_config") if isinstance(answer, dict) else None
    if not isinstance(config, dict):
        return {}
    model = config.get("model_config")
    sections = dict(config)
    if isinstance(model, dict) and "multimodal_config" not in sections:
        sections["multimodal_config"] = model.get("multimodal_config")
    found: dict[str, str] = {}
    for section, key, flag in _SETTINGS:
        held = sections.get(section)
        value = held.get(key) if isinstance(held, dict) else None
        if value not in (None, "", {}):
            found[flag] = plain(str(value), 200)
    return found


def _entry(row: Mapping[str, Any]) -> EncoderEntry:
    shape = row.get("shape")
    return EncoderEntry(
        mm_hash=plain(str(row.get("mm_hash")), 128),
        bytes=row.get("bytes"),
        embeds=shape[0] if isinstance(shape, list) and shape and isinstance(shape[0], int) else None,
        residency=row.get("residency"),
        age_seconds=row.get("age_seconds"),
    )


def _sampled(rank: Mapping[str, Any], point: MemoryPoint) -> RankReading:
    """Return what history and recorders keep of a rank as a reading, which has more fields than they keep."""
    worker = WorkerMemory(
        rank=rank["rank"],
        dp_rank=rank["dp_rank"],
        pid=rank["pid"],
        taken_at=point.at,
        device=Device(),
        total_bytes=point.total_bytes,
        free_bytes=point.free_bytes,
        used_bytes=point.used_bytes,
        torch=point.torch,
        host_memory=HostMemory(rss_bytes=point.host_rss_bytes),
    )
    return replace(account(worker, "recorder"), components=point.components)
