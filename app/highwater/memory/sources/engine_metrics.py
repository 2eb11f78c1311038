"""The engine's own counts, from its ``/metrics``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.parser import text_string_to_metric_families

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.errors import EngineGarbled
from highwater.memory.sources.source import Observation, Reach
from highwater.readings import EngineLoad, WorkCounts

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
KV_USAGE_BEFORE_0_12 = "vllm:gpu_cache_usage_perc"
SLEEP_STATE = "vllm:engine_sleep_state"
TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
REQUESTS = "vllm:request_success_total"
WORK_DONE = (*TOKENS, REQUESTS)
# Of the processor cache in the API servers: one query for each image, video or audio of a request.
MM_CACHE_QUERIES = "vllm:mm_cache_queries_total"
MM_CACHE_HITS = "vllm:mm_cache_hits_total"
# Parsing the whole page (a thousand lines) every second would cost more than all else that the sidecar does.
_WANTED = (RUNNING, WAITING, KV_USAGE, KV_USAGE_BEFORE_0_12, SLEEP_STATE, *WORK_DONE, MM_CACHE_QUERIES, MM_CACHE_HITS)


class EngineMetrics:
    """Requests running and waiting, KV usage, sleep state. Needs no development mode."""

    name = "engine_metrics"
    reach: Reach = "api_server"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def available(self, capabilities: Capabilities) -> bool:
        """Every vLLM has it."""
        del capabilities
        return True

    async def read(self) -> Observation:
        """Ask once.

        Raises:
            EngineError: No good answer.
        """
        return Observation(load=parse_load(await self._engine.get_text("/metrics")))


def parse_load(text: str) -> EngineLoad:
    """The load that an exposition shows, summed over its engines; the KV usage is the fullest engine's.

    Raises:
        EngineGarbled: It is no exposition.
    """
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    try:
        samples = [sample for sample in _samples(lines) if math.isfinite(sample[2])]
    except ValueError as exc:
        raise EngineGarbled(f"GET /metrics is no Prometheus exposition: {exc}") from exc
    running = [value for name, _, value in samples if name == RUNNING]
    waiting = [value for name, _, value in samples if name == WAITING]
    usage = [value for name, _, value in samples if name in {KV_USAGE, KV_USAGE_BEFORE_0_12}]
    asleep = [value for name, state, value in samples if name == SLEEP_STATE and state != "awake"]
    work = [value for name, _, value in samples if name in WORK_DONE]
    queries = [value for name, _, value in samples if name == MM_CACHE_QUERIES]
    hits = [value for name, _, value in samples if name == MM_CACHE_HITS]
    return EngineLoad(
        requests_running=int(sum(running)) if running else None,
        requests_waiting=int(sum(waiting)) if waiting else None,
        kv_cache_usage_ratio=max(usage, default=None),
        sleeping=any(asleep) if asleep else None,
        work_done=sum(work) if work else None,
        mm_cache_queries=int(sum(queries)) if queries else None,
        mm_cache_hits=int(sum(hits)) if hits else None,
        work=_work(samples),
    )


def _work(samples: Sequence[tuple[str, str, float]]) -> WorkCounts:
    def total(*names: str) -> float | None:
        values = [value for name, _, value in samples if name in names]
        return sum(values) if values else None

    images, hits = total(MM_CACHE_QUERIES), total(MM_CACHE_HITS)
    return WorkCounts(
        requests=total(REQUESTS),
        images=images,
        new_images=None if images is None or hits is None else max(images - hits, 0.0),
        tokens=total(*TOKENS),
    )


def _samples(lines: Iterable[str]) -> Iterator[tuple[str, str, float]]:
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels.get("sleep_state", ""), sample.value
