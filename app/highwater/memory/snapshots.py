"""PyTorch's own memory snapshots, for its viewer (https://docs.pytorch.org/memory_viz).

The workers write them into the folder that they share with us (``SnapshotFolder``). They are taken on request only:
every worker walks all blocks of its allocator, and the engine stands still.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from highwater.engine.capabilities import no_extension
from highwater.engine.client import Engine
from highwater.engine.verdict import in_words
from highwater.errors import EngineError, EngineUnresponsive, NoRoom, NotAvailable, NotOffered, Refused, RequestError
from highwater.flaws import flaw
from highwater.memory.history import History
from highwater.memory.poller import Poller
from highwater.memory.snapshot_folder import SnapshotFolder
from highwater.readings.event import Caller
from highwater.units import mib

# As in the workers: the disk must have room for twice the file (worker_ext/README.md, "snapshot").
ROOM = 2
# A worker's refusal by its code; other errors are the engine's.
_ERRORS: dict[object, type[RequestError]] = {"unavailable": NotOffered, "no_space": NoRoom, "refused": Refused}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One worker's response to op ``snapshot``."""

    rank: int | None
    dp_rank: int | None
    host: str | None
    path: str | None  # `None` after a dry run
    bytes: int  # the file's size, or what it would be now
    segments: int  # of the allocator; `blocks`: in them
    blocks: int
    trace_entries: int  # of the allocator's history; 0 where none is recorded
    free_bytes: int | None  # of the disk, before
    elapsed_ms: float  # for how long the worker stood still

    @property
    def file_name(self) -> str | None:
        return None if self.path is None else self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Taken:
    snapshot: str | None  # as in the names of its files; `None` after a dry run
    ranks: tuple[RankSnapshot, ...]  # the workers' responses, in rank order
    # The names of the files that are in our folder: a worker on another machine wrote into its own.
    here: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks:
    """One worker's response to op ``record_stacks``."""

    rank: int | None
    dp_rank: int | None
    recording: bool  # whether the history is on; `was_recording`: whether it was before this call
    was_recording: bool
    seconds_left: float | None  # after which it ends
    entries: int | None  # the number that is kept, the newest


_SNAPSHOTS = TypeAdapter(tuple[RankSnapshot, ...])
_STACKS = TypeAdapter(tuple[RankStacks, ...])
_Response = TypeVar("_Response")


class Snapshots:
    """The snapshots of one engine's workers, in the ``folder`` that they share; ``None``: none can be taken."""

    def __init__(
        self,
        engine: Engine,
        poller: Poller,
        history: History,
        folder: Path | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.files = SnapshotFolder(folder, clock=clock)
        self._engine = engine
        self._poller = poller
        self._history = history
        self._clock = clock
        self._lock = asyncio.Lock()

    # --- taking ---

    async def take(self, *, dry_run: bool, caller: Caller | None = None) -> Taken:
        """Have every worker write a snapshot, or only return how large it would be.

        Raises:
            Refused: There is no folder, a snapshot is being taken, or the workers refuse.
            NotOffered: The devices have none.
            NoRoom: The disk has too little room.
            NotAvailable: No response, or a worker failed.
        """
        if self.files.folder is None and not dry_run:
            raise Refused(
                "recorder_dir is not set (HIGHWATER_RECORDER_DIR): it names the folder that the workers share, "
                "into which they write snapshots"
            )
        if self._lock.locked():
            raise Refused("a snapshot is being taken; one at a time, because the engine stands still meanwhile")
        self._check_engine()
        async with self._lock:
            payload = {} if self.files.folder is None else {"directory": str(self.files.folder)}
            measured = await self._write(payload | {"dry_run": True})
            if dry_run:
                return Taken(None, measured)
            _check_room(measured)
            return await self._take(payload, caller)

    async def _take(self, payload: dict[str, Any], caller: Caller | None) -> Taken:
        snapshot = _name(self._clock())
        try:
            ranks = await self._write(payload | {"name": snapshot})
        except RequestError as exc:
            self._history.record("snapshot", f"memory snapshot {snapshot} failed: {exc}", caller=caller)
            raise
        await asyncio.to_thread(self.files.remove_older, snapshot)
        files, _ = await self.files.listed()
        size, seconds = sum(rank.bytes for rank in ranks), max(rank.elapsed_ms for rank in ranks) / 1000
        summary = f"memory snapshot {snapshot}: {len(ranks)} ranks, {mib(size)} MiB; the engine stood still for"
        self._history.record("snapshot", f"{summary} {seconds:.2f} s", caller=caller)
        return Taken(snapshot, ranks, frozenset(file.name for file in files))

    async def record_stacks(
        self, minutes: float, entries: int, *, caller: Caller | None = None
    ) -> tuple[RankStacks, ...]:
        """Have every allocator record stacks for so many minutes; 0 ends it. Raises RequestError: as ``take``."""
        if self._lock.locked():
            raise Refused("a snapshot is being taken; the history of allocations is turned on or off after it")
        self._check_engine()
        async with self._lock:
            payload = {"minutes": minutes, "entries": entries}
            ranks = await self._call(_STACKS, "record_stacks", payload, late="the workers do it as soon as they can")
        what = f"turned on for {minutes:g} min" if minutes else "turned off"
        self._history.record("snapshot", f"history of allocations {what} on {len(ranks)} ranks", caller=caller)
        return ranks

    def _check_engine(self) -> None:
        engine = self._poller.current().engine
        problem = no_extension(self._poller.capabilities) if engine.traits.is_up else in_words(engine)
        if problem is not None:
            raise NotAvailable(problem)

    async def _write(self, payload: dict[str, Any]) -> tuple[RankSnapshot, ...]:
        late = "a snapshot that is late is written all the same, and GET /memory/snapshots lists it then"
        return await self._call(_SNAPSHOTS, "snapshot", payload, late=late)

    async def _call(self, wire: TypeAdapter[_Response], op: str, payload: dict[str, Any], *, late: str) -> _Response:
        try:
            responses = await self._engine.rpc(op, payload)
        except EngineUnresponsive as exc:
            raise NotAvailable(f"{exc}; {late}") from exc
        except EngineError as exc:
            raise NotAvailable(str(exc)) from exc
        _check_responses(responses)
        try:
            return wire.validate_python(responses)
        except ValidationError as exc:
            raise NotAvailable(f"worker call {op}: {flaw(exc.errors())}") from exc


def _name(now: float) -> str:
    milliseconds = int(now * 1000)
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(milliseconds // 1000)) + f"{milliseconds % 1000:03d}Z"


def _check_responses(responses: list[dict[str, Any]]) -> None:
    failed = [response for response in responses if not response.get("ok")]
    if not failed:
        return
    reported = failed[0].get("error")
    error = reported if isinstance(reported, dict) else {}
    message = str(error.get("message", "no reason given"))
    if len(failed) < len(responses):
        message = f"{len(failed)} of {len(responses)} ranks failed; the first error: {message}"
    raise _ERRORS.get(error.get("code"), NotAvailable)(message)


def _check_room(ranks: tuple[RankSnapshot, ...]) -> None:
    """Every worker checks the room for its own file, but they write at the same time."""
    by_host: defaultdict[str | None, list[RankSnapshot]] = defaultdict(list)
    for rank in ranks:
        by_host[rank.host].append(rank)
    for host, there in by_host.items():
        needed = ROOM * sum(rank.bytes for rank in there)
        free = min((rank.free_bytes for rank in there if rank.free_bytes is not None), default=needed)
        if free < needed:
            raise NoRoom(
                f"recorder_dir has {mib(free)} MiB free on {host}; the snapshots of {len(there)} ranks are written "
                f"where {mib(needed)} MiB are: twice their size"
            )
