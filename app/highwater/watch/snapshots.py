"""PyTorch's own memory snapshots, for its viewer (https://docs.pytorch.org/memory_viz).

The workers write them into the folder that they share with us (``SnapshotFolder``). They are taken on request only:
every worker walks all blocks of its allocator, and the engine stands still. Others may write into the folder: nothing
is opened or removed but regular files with a name of ours.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from highwater.engine.capabilities import no_extension
from highwater.engine.client import Engine
from highwater.model.rank import Ranked, key_of
from highwater.model.report import Caller
from highwater.model.units import mib
from highwater.process.clocks import Clocks
from highwater.process.errors import (
    EngineError,
    EngineUnresponsive,
    NoRoom,
    NotAvailable,
    NotOffered,
    Refused,
    RequestError,
)
from highwater.process.regular import first_names, open_regular, status_of
from highwater.process.untrusted import flaw
from highwater.watch.history import History
from highwater.watch.poller import Poller

KEPT = 4
# Unfinished files are removed after so long: their workers have died.
UNFINISHED_SECONDS = 3600.0
MAX_ENTRIES = 10_000
FILE_NAME = re.compile(
    r"highwater-snapshot-(?P<snapshot>[0-9]{8}T[0-9]{9}Z)"
    r"-(?P<dp_rank>[0-9]{1,6}|x)-(?P<rank>[0-9]{1,6}|x)-(?P<pid>[0-9]{1,10})\.pickle"
)
_UNFINISHED = re.compile(rf"\.{FILE_NAME.pattern}\.tmp")

# As in the workers: the disk must have room for twice the file (worker_ext/README.md, "snapshot").
ROOM = 2
# A worker's refusal by its code; other errors are the engine's.
_ERRORS: dict[object, type[RequestError]] = {"unavailable": NotOffered, "no_space": NoRoom, "refused": Refused}

log = logging.getLogger("highwater.snapshots")


# --- the folder ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    name: str
    snapshot: str  # the part of the name that the files of one request share
    dp_rank: int | None  # from the name; `None` where the worker did not know it, as `rank`
    rank: int | None
    pid: int
    bytes: int
    written_at: float  # Unix seconds

    @classmethod
    def of(cls, match: re.Match[str], status: os.stat_result) -> SnapshotFile:
        """Of a match of ``FILE_NAME``."""
        dp_rank, rank = (None if number == "x" else int(number) for number in match.group("dp_rank", "rank"))
        return cls(
            name=match[0],
            snapshot=match["snapshot"],
            dp_rank=dp_rank,
            rank=rank,
            pid=int(match["pid"]),
            bytes=status.st_size,
            written_at=status.st_mtime,
        )


class SnapshotFolder:
    """The files of all engines that write into ``folder``, if there is one."""

    def __init__(self, folder: Path | None, clocks: Clocks) -> None:
        self.folder = folder
        self._wall = clocks.wall

    async def listed(self) -> tuple[list[SnapshotFile], str | None]:
        return await asyncio.to_thread(self._listed)

    async def open(self, name: str) -> tuple[BinaryIO, int] | None:
        """Return an open file, which the caller closes, and its size. Raises Refused: our user may not read it."""
        if self.folder is None or FILE_NAME.fullmatch(name) is None:
            return None
        return await asyncio.to_thread(_opened, self.folder / name)

    def _listed(self) -> tuple[list[SnapshotFile], str | None]:
        try:
            files = [
                SnapshotFile.of(match, status)
                for name in self._names()
                if (match := FILE_NAME.fullmatch(name)) and (status := self._regular(name))
            ]
        except FileNotFoundError:  # nothing was written yet
            return [], None
        except OSError as exc:
            return [], f"recorder_dir: {self.folder} cannot be listed: {exc.strerror or exc}"
        files.sort(key=lambda file: (*key_of(file.dp_rank, file.rank), file.pid))
        files.sort(key=lambda file: file.snapshot, reverse=True)
        return files, None

    def _names(self) -> list[str]:
        return [] if self.folder is None else first_names(self.folder, MAX_ENTRIES)

    def _regular(self, name: str) -> os.stat_result | None:
        status = status_of(f"{self.folder}/{name}")
        return status if status is not None and stat.S_ISREG(status.st_mode) else None

    def remove_older(self, newest: str) -> None:
        """Keep this and the newest of the others; by name, so that a clock set back does not cost the new one."""
        files, _ = self._listed()
        others = sorted({file.snapshot for file in files} - {newest}, reverse=True)
        kept = {newest, *others[: KEPT - 1]}
        gone = [file.name for file in files if file.snapshot not in kept]
        before = self._wall() - UNFINISHED_SECONDS
        with suppress(OSError):
            drafts = ((name, self._regular(name)) for name in self._names() if _UNFINISHED.fullmatch(name))
            gone += [name for name, status in drafts if status is not None and status.st_mtime < before]
        for name in gone:
            try:
                os.unlink(f"{self.folder}/{name}")
            except FileNotFoundError:
                continue
            except OSError as exc:
                log.warning("recorder_dir: %s/%s could not be removed: %s", self.folder, name, exc.strerror)


def pieces(file: BinaryIO, size: int, most: int = 256 * 1024) -> Iterator[bytes]:
    with file:
        while size > 0 and (piece := file.read(min(size, most))):
            size -= len(piece)
            yield piece


def _opened(path: Path) -> tuple[BinaryIO, int] | None:
    try:
        descriptor = open_regular(path)
    except PermissionError as exc:
        raise Refused(
            f"{path.name} may be read by the engine's user and by the folder's group, and the sidecar's user "
            f"({os.geteuid()}) is neither: run both as one user, or share a group (docs/http.md)"
        ) from exc
    except OSError:
        return None
    return os.fdopen(descriptor, "rb"), os.fstat(descriptor).st_size


# --- taking them ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot(Ranked):
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
class RankStacks(Ranked):
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
        clocks: Clocks,
    ) -> None:
        self.files = SnapshotFolder(folder, clocks)
        self._engine = engine
        self._poller = poller
        self._history = history
        self._wall = clocks.wall
        self._lock = asyncio.Lock()

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
            # Every worker checks the room for its own file, but they write at the same time.
            by_host: defaultdict[str | None, list[RankSnapshot]] = defaultdict(list)
            for rank in measured:
                by_host[rank.host].append(rank)
            for host, there in by_host.items():
                needed = ROOM * sum(rank.bytes for rank in there)
                free = min((rank.free_bytes for rank in there if rank.free_bytes is not None), default=needed)
                if free < needed:
                    raise NoRoom(
                        f"recorder_dir has {mib(free)} MiB free on {host}; the snapshots of {len(there)} ranks are "
                        f"written where {mib(needed)} MiB are: twice their size"
                    )
            milliseconds = int(self._wall() * 1000)
            second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(milliseconds // 1000))
            snapshot = f"{second}{milliseconds % 1000:03d}Z"
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

    async def record_stacks(self, minutes: float, entries: int, *, caller: Caller | None) -> tuple[RankStacks, ...]:
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
        problem = no_extension(self._poller.capabilities) if engine.traits.is_up else engine.in_words
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
        failed = [response for response in responses if not response.is_ok]
        if failed:
            message = failed[0].message
            if len(failed) < len(responses):
                message = f"{len(failed)} of {len(responses)} ranks failed; the first error: {message}"
            raise _ERRORS.get(failed[0].code or "", NotAvailable)(message)
        try:
            return wire.validate_python(responses)
        except ValidationError as exc:
            raise NotAvailable(f"worker call {op}: {flaw(exc.errors())}") from exc
