"""The engine's own counts, from its ``/metrics``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from highwater.errors import EngineGarbled
from highwater.memory.sources.source import Observation, Source
from highwater.readings.engine import EngineLoad, WorkCounts
from highwater.text.printable import plain

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = f"{WAITING}_by_reason"  # wanted by its prefix
KV_USAGE = "vllm:kv_cache_usage_perc"
KV_USAGE_BEFORE_0_12 = "vllm:gpu_cache_usage_perc"
SLEEP_STATE = "vllm:engine_sleep_state"
TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
REQUESTS = "vllm:request_success_total"
# Of the processor cache in the API servers: one query for each image, video or audio of a request.
MM_CACHE_QUERIES = "vllm:mm_cache_queries_total"
MM_CACHE_HITS = "vllm:mm_cache_hits_total"
# Parsing the whole page (a thousand lines) every second would cost more than all else that the sidecar does.
_WANTED = (
    *(RUNNING, WAITING, KV_USAGE, KV_USAGE_BEFORE_0_12, SLEEP_STATE),
    *(*TOKENS, REQUESTS, MM_CACHE_QUERIES, MM_CACHE_HITS),
)

_INDEX = re.compile(r"[0-9]{1,6}", re.ASCII)  # of a data-parallel engine
_MOST_OF_A_REASON = 40

_Sample: TypeAlias = tuple[str, Mapping[str, str], float]


class EngineMetrics(Source):
    """Requests running and waiting, KV usage, sleep state. Needs no development mode."""

    name = "engine_metrics"

    async def read(self) -> Observation:
        return Observation(load=parse_load(await self._engine.get_text("/metrics")))


def parse_load(text: str) -> EngineLoad:
    """Sums over the engines; the KV usage is the fullest engine's. Raises EngineGarbled: it is no exposition."""
    try:
        # Beyond that a float counts no single request or token.
        samples = [sample for sample in _samples(text.splitlines()) if abs(sample[2]) <= 2.0**53]
    except ValueError as exc:
        raise EngineGarbled(f"GET /metrics is no Prometheus exposition: {exc}") from exc
    names = sorted({labels["engine"] for _, labels, _ in samples if _INDEX.fullmatch(labels.get("engine", ""))})
    each = {name: _load([one for one in samples if one[1].get("engine") == name]) for name in names}
    return replace(_load(samples), engines=each if len(each) > 1 else {})


def _load(samples: Sequence[_Sample]) -> EngineLoad:
    def total(*names: str) -> float | None:
        values = [value for name, _, value in samples if name in names]
        return sum(values) if values else None

    asleep = [value for name, labels, value in samples if name == SLEEP_STATE and labels.get("sleep_state") != "awake"]
    reasons = Counter[str]()
    for name, labels, value in samples:
        if name == WAITING_BY_REASON:
            reasons[plain(labels.get("reason", ""), _MOST_OF_A_REASON)] += int(value)
    queries, hits = total(MM_CACHE_QUERIES), total(MM_CACHE_HITS)
    return EngineLoad(
        requests_running=_whole(total(RUNNING)),
        requests_waiting=_whole(total(WAITING)),
        waiting_by_reason=reasons,
        kv_cache_usage_ratio=max(
            (value for name, _, value in samples if name in {KV_USAGE, KV_USAGE_BEFORE_0_12}), default=None
        ),
        sleeping=any(asleep) if asleep else None,
        work_done=total(*TOKENS, REQUESTS),
        mm_cache_queries=_whole(queries),
        mm_cache_hits=_whole(hits),
        work=WorkCounts(
            requests=total(REQUESTS),
            images=queries,
            new_images=None if queries is None or hits is None else max(queries - hits, 0.0),
            tokens=total(*TOKENS),
        ),
    )


def _samples(lines: Iterable[str]) -> Iterator[_Sample]:
    wanted = "\n".join(line for line in lines if line.startswith(_WANTED))
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
