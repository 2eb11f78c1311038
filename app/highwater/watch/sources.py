"""What is read of the engine and its workers: at each poll, at a start, and on request.

A new source of each poll is a class here and its place in ``polled_sources``; a new figure is a field of
``Observation`` and of ``Round``, which ``Round.take`` passes on. Of the workers' starts and of their encoder caches'
entries the recorder files tell, or else a call.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, Final, Literal, TypeAlias

from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine, WorkerAnswer
from highwater.model.engine import EngineLoad, WorkCounts
from highwater.model.engine_budget import EngineBudget
from highwater.model.rank import Process, RankReading, StartPhase, WorkerMemory
from highwater.model.report import SCHEMA
from highwater.process.clocks import Clocks
from highwater.process.errors import EngineError, EngineGarbled
from highwater.process.untrusted import cleaned, flaw, plain
from highwater.watch.recorder.contents import EntryRow, largest_first
from highwater.watch.recorder.rank import RankRecord
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

    @classmethod
    def of(cls, response: WorkerAnswer) -> Started | None:
        """``None`` from an older package, which does not know the operation, or where it is not valid."""
        reported = {key: response.get(key) for key in ("engine_budget", "start")}
        with suppress(ValidationError):
            return _STARTED.validate_python(cleaned(reported)) if response.is_ok else None
        return None


_STARTED = TypeAdapter(Started)


class EngineBudgets:
    """The workers' reports on their start: from recorder files; a worker without one is called for it once."""

    def __init__(self, engine: Engine, recorders: Recorders | None) -> None:
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
        self._known = dict.fromkeys(present) | {response.process: Started.of(response) for response in responses}


class Workers(Source):
    """Op ``memory`` on every worker that the API server reaches; ``budgets`` then calls new workers for their start."""

    name = "workers"
    reach = "workers"

    def __init__(self, engine: Engine, budgets: EngineBudgets) -> None:
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
        await self._budgets.learn(workers)
        return Observation(workers=workers)


def polled_sources(engine: Engine, budgets: EngineBudgets) -> tuple[Source, ...]:
    """Return those of each poll in the order in which they are read.

    The last one may hang with the engine's loop, which ends the round. `Health` is not among them: `Rounds` reads it
    only where the first does not show an engine that works.
    """
    return (EngineMetrics(engine), Workers(engine, budgets), PauseState(engine))


# --- the entries of the encoder caches, as JSON ---

# Eight ranks of a thousand entries are 1.8 MB of JSON, on the loop that proxies. So a reading is kept for a second, its
# JSON is written once, and the loop turns between two pieces of it.

Order = Literal["bytes", "age"]

# The whole cache is read, so that however many clients request it in whatever order, the workers are called once a
# second at most: every worker call holds the engine's step up.
MAX_ENTRIES = 10_000
KEPT_SECONDS = 1.0
# Entries that are written in one go: a tenth of a millisecond.
_PIECE_ENTRIES: Final = 250


@dataclass(frozen=True, slots=True)
class RankEntries:
    head: Mapping[str, Any]  # all about it but its entries
    rows: Sequence[Mapping[str, Any]]  # its entries, largest first
    is_recorded: bool = False  # by its recorder, and not by its worker
    # By order, and whether under other names: its entries, and the pieces of a JSON array that are written once.
    _written: dict[tuple[Order, bool], tuple[Sequence[Mapping[str, Any]], list[bytes]]] = field(
        default_factory=dict, repr=False
    )

    async def json(self, limit: int, order: Order, alias: Callable[[object], str] | None) -> bytes:
        if (order, alias is None) not in self._written:
            ordered = self.rows
            if order == "age":
                ordered = sorted(ordered, key=lambda row: row.get("age_seconds") or 0.0, reverse=True)
            if alias is not None:
                ordered = [{**row, "mm_hash": alias(row.get("mm_hash"))} for row in ordered]
            self._written[order, alias is None] = ordered, []
        rows, pieces = self._written[order, alias is None]
        limit = min(limit, len(rows))
        whole = limit // _PIECE_ENTRIES
        while (begin := len(pieces) * _PIECE_ENTRIES) < whole * _PIECE_ENTRIES:
            pieces.append(to_json(rows[begin : begin + _PIECE_ENTRIES])[1:-1])
            await asyncio.sleep(0)
        rest = to_json(rows[whole * _PIECE_ENTRIES : limit])[1:-1]
        entries = b",".join(piece for piece in (*pieces[:whole], rest) if piece)
        return to_json(self.head)[:-1] + b',"entries":[' + entries + b"]}"


@dataclass(frozen=True, slots=True)
class EntriesReading:
    """Every rank's entries, in rank order; ``age_seconds`` old at ``at`` (monotonic seconds)."""

    ranks: tuple[RankEntries, ...]
    at: float
    age_seconds: float = 0.0


class EncoderCacheEntries:
    """The last readings, and the next: once a second at most."""

    def __init__(self, engine: Engine, *, clocks: Clocks) -> None:
        self._engine = engine
        self._monotonic = clocks.monotonic
        self._lock = asyncio.Lock()
        self._recorded: EntriesReading | None = None
        self._answered: EntriesReading | None = None

    def age_seconds(self, reading: EntriesReading) -> float:
        return self._monotonic() - reading.at + reading.age_seconds

    async def of_workers(self) -> EntriesReading:
        """Call the workers (op ``encoder_cache``; worker_ext/README.md). Raises EngineError: no valid response."""
        async with self._lock:
            if self._answered is None or not self._is_fresh(self._answered):
                now = self._monotonic()
                responses = await self._engine.rpc("encoder_cache", {"limit": MAX_ENTRIES, "sort": "bytes"})
                self._answered = EntriesReading(tuple(map(_answered, responses)), now)
            return self._answered

    async def of_records(self, records: Sequence[RankRecord]) -> EntriesReading:
        """Return the entries in the workers' recorder files, each of which has a reading: no worker is called."""
        async with self._lock:
            if self._recorded is None or not self._is_fresh(self._recorded):
                now = self._monotonic()
                ranks = [await _recorded(record) for record in records]
                age = max((rank.head["age_seconds"] for rank in ranks), default=0.0)
                self._recorded = EntriesReading(tuple(ranks), now, age)
            return self._recorded

    async def as_known(self, records: Sequence[RankRecord]) -> EntriesReading | None:
        """Return the recorders' entries and, of other ranks, the workers' last response: no worker is called.

        A record without a table of entries has only their sums. ``None`` where nothing is known.
        """
        recorded = await self.of_records(records) if records else None
        if recorded is None or self._answered is None:
            return recorded or self._answered
        ranks = {rank.head.get("pid"): rank for rank in self._answered.ranks}
        for rank in recorded.ranks:
            if rank.head["entries_total"] is not None or rank.head["pid"] not in ranks:
                ranks[rank.head["pid"]] = rank
        if all(rank.is_recorded for rank in ranks.values()):
            return recorded
        age = max(self.age_seconds(recorded), self.age_seconds(self._answered))
        return EntriesReading(tuple(ranks.values()), self._monotonic(), age)

    def _is_fresh(self, reading: EntriesReading) -> bool:
        return self._monotonic() - reading.at < KEPT_SECONDS


def _answered(answer: WorkerAnswer) -> RankEntries:
    rows = answer.get("entries")
    if not answer.is_ok or not isinstance(rows, list):
        raise EngineGarbled(f"{answer.rank_name} could not list: {answer.message}")
    dropped = {"ok", "op", "schema", "entries"}
    return RankEntries({key: value for key, value in answer.items() if key not in dropped}, rows)


async def _recorded(record: RankRecord) -> RankEntries:
    cache = record.newest.encoder_cache if record.newest is not None else None
    head = {
        "rank": record.identity.rank,
        "dp_rank": record.identity.dp_rank,
        "host": record.identity.host,
        "pid": record.identity.pid,
        "present": cache is not None,
        "entries_total": record.entries_total,
        "device_bytes": cache.device_bytes if cache is not None else 0,
        "host_bytes": cache.host_bytes if cache is not None else 0,
        "capacity_embeds": cache.capacity_embeds if cache is not None else None,
        "age_seconds": round(record.reading_age_seconds or 0.0, 3),
    }
    rows: list[EntryRow] = []
    entries = record.entry_rows()
    # Not in a thread, which would hold the loop up for longer.
    while piece := list(islice(entries, _PIECE_ENTRIES)):
        rows += piece
        await asyncio.sleep(0)
    rows.sort(key=largest_first)
    return RankEntries(head, rows, is_recorded=True)
