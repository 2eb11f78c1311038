"""A sidecar's responses as the experiment's values, validated where they enter. Pure.

Raises ``SidecarUnreachable`` for a response that is not one of a sidecar of this version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from highwater.accounting.points import MemoryPoint
from highwater.client.answers import understood
from highwater.diagnose.evidence import EncoderEntry
from highwater.measure.experiment import CacheReading, Moment
from highwater.readings.engine import EngineLoad
from highwater.readings.rank import Device, EncoderCache, HostMemory, RankKey, RankReading, key_of
from highwater.text.printable import plain

LARGEST = 5
# The settings of vLLM that affect memory, by the section of its configuration.
_SETTINGS: Final[Sequence[tuple[str, str]]] = (
    ("cache_config", "gpu_memory_utilization"),
    ("model_config", "max_model_len"),
    ("scheduler_config", "max_num_seqs"),
    ("scheduler_config", "max_num_batched_tokens"),
    ("model_config", "dtype"),
    ("model_config", "quantization"),
    ("model_config", "enforce_eager"),
    ("model_config", "enable_sleep_mode"),
    ("multimodal_config", "mm_processor_cache_gb"),
    ("multimodal_config", "limit_per_prompt"),
    ("cache_config", "block_size"),
    ("cache_config", "enable_prefix_caching"),
    ("parallel_config", "tensor_parallel_size"),
    ("parallel_config", "pipeline_parallel_size"),
    ("parallel_config", "data_parallel_size"),
)
# The other flags have the keys' names.
_OTHER_FLAGS: Final = {"limit_per_prompt": "--limit-mm-per-prompt"}


def history_ranks(readings: Iterable[Mapping[str, Any]]) -> Iterator[RankReading]:
    with understood("/memory/history"):
        for reading in readings:
            for row in reading["ranks"]:
                yield _sampled(row, reading["at"], row)


def recorded_ranks(ranks: Iterable[Mapping[str, Any]], after: Mapping[RankKey, float]) -> Iterator[RankReading]:
    with understood("/memory/history?recorded=true"):
        for rank in ranks:
            key = key_of(rank["dp_rank"], rank["rank"])
            for sample in rank["samples"]:
                if sample["at"] > after.get(key, 0.0):
                    yield _sampled(rank, sample["at"], sample)


def _sampled(rank: Mapping[str, Any], at: float, row: Mapping[str, Any]) -> RankReading:
    point = MemoryPoint.of_row(float(at), row)
    return RankReading(
        rank=rank["rank"],
        dp_rank=rank["dp_rank"],
        pid=rank["pid"],
        taken_at=point.at,
        device=Device(),
        total_bytes=point.total_bytes,
        free_bytes=point.free_bytes,
        used_bytes=point.used_bytes,
        used_ratio=point.used_ratio,
        components=point.components,
        torch=point.torch,
        host_memory=HostMemory(rss_bytes=point.host_rss_bytes),
        source="recorder",
    )


def traffic_of(readings: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, EngineLoad]]:
    with understood("/memory/history"):
        for row in readings:
            counted = EngineLoad(requests_running=row["requests_running"], requests_waiting=row["requests_waiting"])
            yield row["at"], counted


def cache_of(title: str, response: Mapping[str, Any], moment: Moment) -> CacheReading | None:
    with understood("/memory/encoder-cache"):
        present = [rank for rank in response["ranks"] if rank.get("present")]
        if not present:
            return None
        fullest = max(present, key=lambda rank: rank["device_bytes"] + rank["host_bytes"])
        reading = moment.rank(key_of(fullest.get("dp_rank"), fullest.get("rank")))
        known = reading.encoder_cache if reading is not None else None
        totals = EncoderCache(
            entries=fullest["entries_total"],
            device_bytes=fullest["device_bytes"],
            host_bytes=fullest["host_bytes"],
            capacity_embeds=fullest.get("capacity_embeds") or (known.capacity_embeds if known else None),
        )
        return CacheReading(title=title, totals=totals, largest=tuple(map(_entry, fullest["entries"][:LARGEST])))


def _entry(row: Mapping[str, Any]) -> EncoderEntry:
    shape = row.get("shape")
    return EncoderEntry(
        mm_hash=plain(str(row.get("mm_hash")), 128),
        bytes=row.get("bytes"),
        embeds=shape[0] if isinstance(shape, list) and shape and isinstance(shape[0], int) else None,
        residency=row.get("residency"),
        age_seconds=row.get("age_seconds"),
    )


def settings_of(response: object) -> dict[str, str]:
    config = response.get("vllm_config") if isinstance(response, dict) else None
    if not isinstance(config, dict):
        return {}
    model = config.get("model_config")
    if isinstance(model, dict):
        config = {"multimodal_config": model.get("multimodal_config"), **config}
    found: dict[str, str] = {}
    for section, key in _SETTINGS:
        held = config.get(section)
        value = held.get(key) if isinstance(held, dict) else None
        if value not in (None, "", {}):
            found[_OTHER_FLAGS.get(key, f"--{key.replace('_', '-')}")] = plain(str(value), 200)
    return found
