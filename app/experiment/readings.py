"""What a sidecar tells, as the experiment's values: validated where it enters. Pure.

Raises ``SidecarUnreachable`` where an answer is not what a sidecar of this version gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from app.attribution import host_share, rank_key
from app.errors import SidecarUnreachable
from app.experiment.experiment import (
    CachedOutput,
    CacheSnapshot,
    Happened,
    Moment,
    PolicyRule,
    RankPoint,
    RemedyStep,
    Traffic,
    event_of,
)
from app.incidents.plain import plain
from app.points import MemoryPoint
from app.readings import PolicyStatus, RankReading, Report

LARGEST = 5
_REPORT: Final = TypeAdapter(Report)
_POLICY: Final = TypeAdapter(PolicyStatus)
_RANKS: Final = TypeAdapter(tuple[RankReading, ...])
_OUTCOMES: Final = {"done", "refused", "failed"}
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


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Maps what is missing or of another kind in an answer to one line for people."""
    try:
        yield
    except (ValidationError, KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
        raise SidecarUnreachable(
            f"{what} is not what a sidecar of this version answers; upgrade the older one"
        ) from exc


def report_of(answer: object) -> Report:
    """``GET /memory``."""
    with understood("/memory"):
        return _REPORT.validate_python(answer)


def points_of(ranks: object) -> tuple[RankPoint, ...]:
    """The ranks of a report, or of a remedy's answer."""
    with understood("a reading of the ranks"):
        return tuple(map(point_of, _RANKS.validate_python(ranks)))


def point_of(rank: RankReading) -> RankPoint:
    """What is kept of a full reading."""
    return RankPoint(
        rank=rank.rank,
        dp_rank=rank.dp_rank,
        pid=rank.pid,
        at=rank.taken_at,
        used_bytes=rank.used_bytes,
        free_bytes=rank.free_bytes,
        total_bytes=rank.total_bytes,
        components=rank.components,
        torch=rank.torch,
        budget=rank.budget,
        host_rss_bytes=rank.host_memory.rss_bytes,
        host_used_bytes=host_share(rank)[0],
        encoder_cache=rank.encoder_cache,
    )


def history_points(readings: Iterable[Mapping[str, Any]]) -> Iterator[RankPoint]:
    """The rows of ``GET /memory/history``."""
    with understood("/memory/history"):
        for reading in readings:
            for row in reading["ranks"]:
                yield _of_row(row, float(reading["at"]), row)


def recorded_points(ranks: Iterable[Mapping[str, Any]], after: Mapping[Any, float]) -> Iterator[RankPoint]:
    """The recorders' samples that are newer than the last one of each rank, by its key."""
    with understood("/memory/history?recorded=true"):
        for rank in ranks:
            key = (rank["dp_rank"] or 0, rank["rank"] or 0)
            for sample in rank["samples"]:
                if sample["at"] > after.get(key, 0.0):
                    yield _of_row(rank, float(sample["at"]), sample)


def traffic_of(readings: Iterable[Mapping[str, Any]]) -> Iterator[Traffic]:
    """The engine's counts of requests in ``GET /memory/history``."""
    with understood("/memory/history"):
        for row in readings:
            yield Traffic(at=row["at"], running=row["requests_running"], waiting=row["requests_waiting"])


def events_of(listed: Iterable[Mapping[str, Any]]) -> dict[tuple[int, float], Happened]:
    """Events by what tells them apart, also after a sidecar began to count anew."""
    with understood("an event"):
        return {(told["id"], told["at"]): event_of(told) for told in listed}


def snapshot_of(title: str, answer: Mapping[str, Any], moment: Moment) -> CacheSnapshot | None:
    """``GET /memory/encoder-cache``: the rank that holds most; ``None`` where there is no such cache."""
    with understood("/memory/encoder-cache"):
        there = [rank for rank in answer["ranks"] if rank.get("present")]
        if not there:
            return None
        fullest = max(there, key=lambda rank: rank["device_bytes"] + rank["host_bytes"])
        point = moment.rank((fullest.get("dp_rank") or 0, fullest.get("rank") or 0))
        totals = point.encoder_cache if point is not None else None
        return CacheSnapshot(
            title=title,
            entries=fullest["entries_total"],
            device_bytes=fullest["device_bytes"],
            host_bytes=fullest["host_bytes"],
            capacity_embeds=fullest.get("capacity_embeds") or (totals.capacity_embeds if totals else None),
            largest=tuple(_entry(row) for row in fullest["entries"][:LARGEST]),
        )


def step_of(result: Mapping[str, Any]) -> RemedyStep:
    """One result of ``POST /memory/reclaim``."""
    with understood("/memory/reclaim"):
        freed = result["freed_bytes"]
        outcome = str(result["outcome"])
        return RemedyStep(
            remedy=str(result["remedy"]),
            outcome=outcome if outcome in _OUTCOMES else "failed",  # type: ignore[arg-type]
            reason=result["reason"],
            seconds=float(result["seconds"]),
            freed_bytes=freed["total"],
            freed_components={name: size for name, size in freed["components"].items() if size is not None},
            held_seconds=result["held_seconds"],
            moment=result["moment"],
            frees=str(result["frees"]),
            does_not_free=str(result["does_not_free"]),
        )


def rules_of(answer: Mapping[str, Any]) -> tuple[str | None, tuple[PolicyRule, ...]]:
    """The policy's mode and rules, with where they act on each rank, of ``GET /policy``."""
    with understood("/policy"):
        ranks = {rule.name: rule.ranks for rule in _POLICY.validate_python(answer["status"]).rules}
        rules = (
            PolicyRule(
                name=str(rule["name"]),
                signal=str(rule["signal"]),
                high_water=float(rule["high_water"]) if rule["high_water"] is not None else None,
                remedies=tuple(map(str, rule.get("remedies") or ())),
                high_free={
                    rank_key(one): one.high_free_bytes
                    for one in ranks.get(rule["name"], ())
                    if one.high_free_bytes is not None
                },
            )
            for rule in answer["rules"]
        )
        return answer["mode"], tuple(rules)


def settings_of(answer: object) -> dict[str, str]:
    """The settings that bear on memory, of ``GET /server_info``, by their flags; what is not told is left out."""
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


def _entry(row: Mapping[str, Any]) -> CachedOutput:
    shape = row.get("shape")
    return CachedOutput(
        mm_hash=plain(str(row.get("mm_hash")), 128),
        bytes=row.get("bytes"),
        embeds=shape[0] if isinstance(shape, list) and shape and isinstance(shape[0], int) else None,
        residency=row.get("residency"),
        age_seconds=row.get("age_seconds"),
    )


def _of_row(rank: Mapping[str, Any], at: float, row: Mapping[str, Any]) -> RankPoint:
    point = MemoryPoint.of_row(at, row)
    return RankPoint(
        rank=rank["rank"],
        dp_rank=rank["dp_rank"],
        pid=rank["pid"],
        at=at,
        used_bytes=point.used_bytes,
        free_bytes=point.free_bytes,
        total_bytes=point.total_bytes,
        components=point.components,
        torch=point.torch,
        host_rss_bytes=point.host_rss_bytes,
    )
