"""The entries of the encoder caches, as JSON: from the workers' recorders, or on request from the workers.

Eight ranks of a thousand entries are 1.8 MB of JSON, on the loop that proxies. So a reading is kept for a second, its
JSON is written once, and the loop turns between two pieces of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal

from pydantic_core import to_json

from highwater.engine.client import Engine, WorkerAnswer
from highwater.process.clocks import SYSTEM, Clocks
from highwater.process.errors import EngineGarbled
from highwater.watch.recorder.contents import EntryRow, largest_first
from highwater.watch.recorder.rank import RankRecord

Order = Literal["bytes", "age"]

# The whole cache is read, so that however many clients request it in whatever order, the workers are called once a
# second at most: every worker call holds the engine's step up.
MAX_ENTRIES = 10_000
KEPT_SECONDS = 1.0
# Entries that are written in one go: a tenth of a millisecond.
_PIECE_ENTRIES: Final = 250


class _Rows:
    """Entries in one order, as pieces of a JSON array that are written once."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self._pieces: list[bytes] = []

    async def first(self, limit: int) -> bytes:
        whole, rest = divmod(min(limit, len(self._rows)), _PIECE_ENTRIES)
        while len(self._pieces) < whole:
            self._pieces.append(self._json(len(self._pieces), _PIECE_ENTRIES))
            await asyncio.sleep(0)
        last = [self._json(whole, rest)] if rest else []
        return b"[" + b",".join((*self._pieces[:whole], *last)) + b"]"

    def _json(self, piece: int, count: int) -> bytes:
        begin = piece * _PIECE_ENTRIES
        return to_json(self._rows[begin : begin + count])[1:-1]


@dataclass(frozen=True, slots=True)
class RankEntries:
    head: Mapping[str, Any]  # all about it but its entries
    rows: Sequence[Mapping[str, Any]]  # its entries, largest first
    is_recorded: bool = False  # by its recorder, and not by its worker
    _orders: dict[tuple[Order, bool], _Rows] = field(default_factory=dict, repr=False)

    async def json(self, limit: int, order: Order, alias: Callable[[object], str] | None) -> bytes:
        ordered = self._orders.get((order, alias is None))
        if ordered is None:
            rows = self.rows
            if order == "age":
                rows = sorted(rows, key=lambda row: row.get("age_seconds") or 0.0, reverse=True)
            if alias is not None:
                rows = [{**row, "mm_hash": alias(row.get("mm_hash"))} for row in rows]
            ordered = self._orders[order, alias is None] = _Rows(rows)
        return to_json(self.head)[:-1] + b',"entries":' + await ordered.first(limit) + b"}"


@dataclass(frozen=True, slots=True)
class EntriesReading:
    """Every rank's entries, in rank order; ``age_seconds`` old at ``at`` (monotonic seconds)."""

    ranks: tuple[RankEntries, ...]
    at: float
    age_seconds: float = 0.0


class EncoderCacheEntries:
    """The last readings, and the next: once a second at most."""

    def __init__(self, engine: Engine, *, clocks: Clocks = SYSTEM) -> None:
        self._engine = engine
        self._clock = clocks.monotonic
        self._lock = asyncio.Lock()
        self._recorded: EntriesReading | None = None
        self._answered: EntriesReading | None = None

    def age_seconds(self, reading: EntriesReading) -> float:
        return self._clock() - reading.at + reading.age_seconds

    async def of_workers(self) -> EntriesReading:
        """Call the workers (op ``encoder_cache``; worker_ext/README.md). Raises EngineError: no valid response."""
        async with self._lock:
            if self._answered is None or not self._is_fresh(self._answered):
                now = self._clock()
                responses = await self._engine.rpc("encoder_cache", {"limit": MAX_ENTRIES, "sort": "bytes"})
                self._answered = EntriesReading(tuple(map(_answered, responses)), now)
            return self._answered

    async def of_records(self, records: Sequence[RankRecord]) -> EntriesReading:
        """Return the entries in the workers' recorder files, each of which has a reading: no worker is called."""
        async with self._lock:
            if self._recorded is None or not self._is_fresh(self._recorded):
                now = self._clock()
                ranks = [RankEntries(_head(record), await _rows(record), is_recorded=True) for record in records]
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
        return EntriesReading(tuple(ranks.values()), self._clock(), age)

    def _is_fresh(self, reading: EntriesReading) -> bool:
        return self._clock() - reading.at < KEPT_SECONDS


def _answered(answer: WorkerAnswer) -> RankEntries:
    rows = answer.get("entries")
    if not answer.is_ok or not isinstance(rows, list):
        raise EngineGarbled(f"{answer.rank_name} could not list: {answer.message}")
    dropped = {"ok", "op", "schema", "entries"}
    return RankEntries({key: value for key, value in answer.items() if key not in dropped}, rows)


def _head(record: RankRecord) -> Mapping[str, Any]:
    cache = record.newest.encoder_cache if record.newest is not None else None
    return {
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


async def _rows(record: RankRecord) -> Sequence[Mapping[str, Any]]:
    """Return the entries of a recorder, largest first; not in a thread, which would hold the loop up for longer."""
    rows: list[EntryRow] = []
    entries = record.entry_rows()
    while piece := list(islice(entries, _PIECE_ENTRIES)):
        rows += piece
        await asyncio.sleep(0)
    rows.sort(key=largest_first)
    return rows
