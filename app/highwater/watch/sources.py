"""The sources of readings: a new one is a class here and its place in ``all_sources``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter, ValidationError

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine, WorkerAnswer
from highwater.model.engine import EngineLoad, WorkCounts
from highwater.model.engine_budget import EngineBudget
from highwater.model.rank import Process, RankReading, StartPhase, WorkerMemory
from highwater.model.report import SCHEMA
from highwater.process.errors import EngineError, EngineGarbled
from highwater.process.untrusted import cleaned, flaw, plain
from highwater.watch.recorder.recorders import Recorders
from highwater.watch.round import Observation, Reach

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
_WIRE = TypeAdapter(tuple[WorkerMemory, ...])


class Source(ABC):
    """A source of readings. A source that fails costs only itself."""

    name: ClassVar[str]  # the `source` label of `highwater_poll_failures_total`
    reach: ClassVar[Reach] = "api_server"  # the part of the engine that has to respond

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def available(self, capabilities: Capabilities) -> bool:
        del capabilities
        return True

    @abstractmethod
    async def read(self) -> Observation:
        """Read it once. Raises EngineError: no valid response."""


# --- the API server ---


class EngineMetrics(Source):
    """Requests running and waiting, KV usage, sleep state. Needs no development mode."""

    name = "engine_metrics"

    async def read(self) -> Observation:
        return Observation(load=await read_load(self._engine))


async def read_load(engine: Engine) -> EngineLoad:
    """Raises EngineError: no response, or it is no exposition."""
    return parse_load(await engine.get_text("/metrics"))


def parse_load(text: str) -> EngineLoad:
    """Sums over the engines; the KV usage is the fullest engine's. Raises EngineGarbled: it is no exposition."""
    try:
        wanted = "\n".join(line for line in text.splitlines() if line.startswith(_WANTED))
        parsed = (sample for family in text_string_to_metric_families(wanted + "\n") for sample in family.samples)
        # Beyond that a float counts no single request or token.
        samples = [(one.name, one.labels, one.value) for one in parsed if abs(one.value) <= 2.0**53]
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
        work=WorkCounts(
            requests=total(REQUESTS),
            images=queries,
            new_images=None if queries is None or hits is None else max(queries - hits, 0.0),
            tokens=total(*TOKENS),
        ),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


class Health(Source):
    """``GET /health``: 503 beside other responses is a dead engine (vllm 0.32.0 serve/instrumentator/health.py:32)."""

    name = "health"

    async def read(self) -> Observation:
        await self._engine.get_text("/health")
        return Observation()


# --- the engine's loop ---


class PauseState(Source):
    """``GET /is_paused`` of vLLM 0.12 and newer, in development mode; from 0.17 on the engine itself responds."""

    name = "pause_state"
    reach = "engine"

    def available(self, capabilities: Capabilities) -> bool:
        return capabilities.is_paused

    async def read(self) -> Observation:
        response = await self._engine.get_json("/is_paused")
        paused = response.get("is_paused") if isinstance(response, dict) else None
        if not isinstance(paused, bool):
            raise EngineGarbled(f"GET /is_paused answered {response!r}")
        return Observation(paused=paused)


# --- the workers ---


@dataclass(frozen=True, slots=True)
class Started:
    """One worker's start; without phases where none were recorded."""

    engine_budget: EngineBudget
    start: tuple[StartPhase, ...] = ()


_STARTED = TypeAdapter(Started)


class EngineBudgets:
    """The workers' reports on their start: from recorder files; a worker without one is called for it once."""

    def __init__(self, engine: Engine, recorders: Recorders | None = None) -> None:
        self._engine = engine
        self._recorders = recorders
        self._known: Mapping[Process, Started | None] = {}

    def of(self, process: Process) -> Started | None:
        return self._known.get(process)

    def budget_of(self, reading: RankReading) -> EngineBudget | None:
        for record in self._recorders.records if self._recorders is not None else ():
            is_this = record.identity.pid == reading.pid and record.identity.host == reading.host
            if is_this and record.table is not None and record.table.engine_budget is not None:
                return record.table.engine_budget
        reported = self.of(reading.process)
        return None if reported is None else reported.engine_budget

    async def learn(self, workers: Sequence[WorkerMemory]) -> None:
        """Call the workers (op ``budget``) if any of these, which have just responded, is new."""
        present = {worker.process for worker in workers}
        if not present - self._known.keys():
            return
        try:
            responses = await self._engine.rpc("budget")
        except EngineError:
            return  # it is reported where its memory is read, and tried again at the next poll
        self._known = dict.fromkeys(present) | dict(map(_started, responses))


def _started(response: WorkerAnswer) -> tuple[Process, Started | None]:
    process = Process(response.get("host"), response.get("pid"), response.get("pid_started"))
    try:
        reported = {key: response.get(key) for key in ("engine_budget", "start")}
        # An older package does not know the operation.
        return process, _STARTED.validate_python(cleaned(reported)) if response.is_ok else None
    except ValidationError:
        return process, None


class Workers(Source):
    """Op ``memory`` on every worker that the API server reaches; ``budgets`` then calls new workers for their start."""

    name = "workers"
    reach = "workers"

    def __init__(self, engine: Engine, budgets: EngineBudgets | None = None) -> None:
        super().__init__(engine)
        self._budgets = budgets

    def available(self, capabilities: Capabilities) -> bool:
        return capabilities.collective_rpc

    async def read(self) -> Observation:
        responses = await self._engine.rpc("memory")
        for response in responses:
            if not response.is_ok:
                raise EngineGarbled(f"{response.rank_name} could not read its memory: {response.message}")
            if response.get("schema") != SCHEMA:
                raise EngineGarbled(
                    f"the worker extension speaks schema {response.get('schema')}, the sidecar {SCHEMA}"
                )
        try:
            workers = _WIRE.validate_python(cleaned(responses))
        except ValidationError as exc:
            raise EngineGarbled(f"worker call memory: {flaw(exc.errors())}") from exc
        if self._budgets is not None:
            await self._budgets.learn(workers)
        return Observation(workers=workers)


def all_sources(engine: Engine, budgets: EngineBudgets | None = None) -> tuple[Source, ...]:
    """Return them in the order in which they are read; a stuck loop of the engine ends a round, so it comes last."""
    return (EngineMetrics(engine), Workers(engine, budgets), PauseState(engine))
