"""The workers' recorder files: what each rank wrote of itself, also while the engine answers nothing.

The files are read, and those of former lives removed when asked; nothing here writes one, and nothing in one is
believed unchecked. A file that is no good costs only itself, and is named in ``problems``. Many ranks take milliseconds
to read: any thread may call, one has its turn at a time.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from pydantic import TypeAdapter, ValidationError

from highwater.accounting.attribution import account, rank_key
from highwater.accounting.points import MemoryPoint
from highwater.errors import flaw, os_reason
from highwater.readings import Device, EncoderCache, HostMemory, Note, TorchMemory, WorkerMemory
from highwater.recorder.progress import RankProgress, RankStatus
from highwater.recorder.ring import (
    RING_NAME,
    EntryTable,
    Identity,
    Ring,
    RingUnusable,
    WatchdogDump,
    has_magic,
    is_within_bounds,
)
from highwater.text.printable import printable

SCAN_SECONDS = 1.0
MAX_FILES = 256
MAX_ENTRIES = 4096
"""Of the folder, whatever their names: it may hold what is not ours."""
MAX_RECORDS = 4096

# Three heartbeats of an idle worker.
_SILENT_SECONDS = 3.0
_MAX_STACK = 8
_MAX_TEXT = 200
_MAX_NUMBER = 2**63 - 1
_TMP_NAME = re.compile(rf"\.({RING_NAME.pattern})\.tmp", re.ASCII)
_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat, counted from behind the command's name; proc(5)

# A frame as Python's faulthandler writes it: `  File "/usr/lib/python3/a.py", line 12 in run`.
_FRAME = re.compile(r'  File "(?:.*/)?([^"]*)", line ([0-9]+) in (.*)')

# Functions in which a step makes what it runs next: torch.compile (torch/_dynamo/convert_frame.py, _inductor), Triton's
# compiler and its tuning, and the capture of graphs (vLLM's model runners).
_COMPILES = frozenset({"_compile", "compile", "compile_fx", "do_bench", "capture_model", "_capture_cudagraphs"})

_WORKER = TypeAdapter(WorkerMemory)


class EntryRow(TypedDict):
    """One entry of a rank's encoder cache, as JSON has it.

    Attributes:
        mm_hash: Its first 64 characters.
        bytes: What it takes.
        residency: ``device`` or ``host``.
        age_seconds: A lower bound.
    """

    mm_hash: str
    bytes: int
    residency: str
    age_seconds: float


def largest_first(row: EntryRow) -> tuple[int, str]:
    """The key that sorts entries."""
    return -row["bytes"], row["mm_hash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The record of one rank's recorder.

    Attributes:
        identity: Who it is.
        newest: Its memory as of the last good sample, as the worker would answer; ``None`` before the first. While the
            worker has done nothing since that sample and still writes, it is of the last heartbeat's time.
        progress: Its steps and calls as of its last word.
        table: The entries of its encoder cache; ``None`` before the first.
        mono: Its last word, on its own monotonic clock.
        age_seconds: Since its last word.
        reading_age_seconds: Since ``newest`` held; ``None`` before the first.
        status: Whether it writes, and why not.
    """

    identity: Identity
    newest: WorkerMemory | None
    progress: RankProgress | None
    table: EntryTable | None
    mono: float
    age_seconds: float
    status: RankStatus
    reading_age_seconds: float | None = None

    @property
    def name(self) -> str:
        """The rank as an operator calls it."""
        return self.identity.name

    @property
    def entries_total(self) -> int | None:
        """How many entries its encoder cache has; ``None`` where that is not known."""
        return None if self.table is None else self.table.total

    def entry_rows(self) -> Iterator[EntryRow]:
        """The entries of its encoder cache, unsorted, one at a time: thousands of them take milliseconds."""
        for entry in () if self.table is None else self.table.entries():
            age = round(max(self.mono - entry.seen_mono, 0.0), 3)
            yield EntryRow(mm_hash=entry.mm_hash, bytes=entry.bytes, residency=entry.residency, age_seconds=age)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRing:
    """A file of another life of the engine, or of another engine.

    Attributes:
        path: The file.
        instance: As its name says.
        identity: Who wrote it; ``None`` where it cannot be read.
        age_seconds: Since its last record, or where it has none since its last change.
        status: Whether its writer still writes.
        newest: Its memory as of the last good sample; ``None`` where there is none.
        problem: Why it cannot be read.
    """

    path: Path
    instance: str
    identity: Identity | None = None
    newest: WorkerMemory | None = None
    age_seconds: float | None = None
    status: RankStatus | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """The outcome of ``remove_stale``.

    Attributes:
        removed: The names of the files that are gone.
        problems: One sentence for each that should be and is not, or that was left alone for being odd.
    """

    removed: tuple[str, ...]
    problems: tuple[str, ...]


class _Word(NamedTuple):
    """A record, and when it was written by both of the writer's clocks."""

    at: float
    mono: float
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Here:
    """The clocks and the processes of this machine."""

    clock: Callable[[], float]
    monotonic: Callable[[], float]
    proc: Path
    boot_id: str | None

    def has_clock_of(self, identity: Identity) -> bool:
        return self.boot_id is not None and identity.boot_id == self.boot_id

    def process_state(self, identity: Identity) -> str | None:
        """The letter of its state; ``None`` where there is no such process, ``?`` where that is unknown."""
        try:
            text = (self.proc / str(identity.pid) / "stat").read_text(encoding="utf-8", errors="replace")
            fields = text.rpartition(")")[2].split()
            return fields[_STATE] if int(fields[_STARTED]) == identity.pid_started else None
        except (FileNotFoundError, ProcessLookupError):
            return None
        except (OSError, ValueError, IndexError):
            return "?"


class RecorderFolder:
    """The folder, and the rings of one life of the engine in it.

    Args:
        folder: Where the workers write.
        instance: The life of the engine that is followed; ``None``: none yet.
        clock: Unix seconds.
        monotonic: ``CLOCK_MONOTONIC``, which the workers of this machine share.
        proc: The folder in which the kernel shows processes.
    """

    def __init__(
        self,
        folder: Path,
        instance: str | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self.folder = folder
        self._instance = instance
        self._here = _Here(clock, monotonic, proc, _boot_id(proc))
        self._writers: dict[str, _Writer] = {}
        self._unusable: dict[str, tuple[tuple[int, ...] | None, str]] = {}
        self._folder_problem: str | None = None
        self._duplicates: tuple[str, ...] = ()
        self._scanned_at: float | None = None
        self._turn = threading.RLock()

    @property
    def instance(self) -> str | None:
        """The life of the engine that is followed."""
        return self._instance

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems of the folder and of files of this life, one sentence each, as of the last read."""
        with self._turn:
            folder = () if self._folder_problem is None else (self._folder_problem,)
            unusable = (f"{name}: {reason}" for name, (_, reason) in self._unusable.items())
            damaged = (f"{name}: {w.problem}" for name, w in self._writers.items() if w.problem is not None)
            return (*folder, *unusable, *damaged, *self._duplicates)

    def follow(self, instance: str | None) -> None:
        """Turn to another life of the engine; what was known of the former is forgotten."""
        with self._turn:
            if instance != self._instance:
                self.close()
                self._instance = instance

    def close(self) -> None:
        """Let go of all files."""
        with self._turn:
            for writer in self._writers.values():
                writer.ring.close()
            self._writers.clear()
            self._unusable.clear()
            self._duplicates = ()
            self._scanned_at = None

    # --- reading ---

    def scan(self, now: float) -> None:
        """Look for new files of this life and for those that are gone, once a second at most.

        Args:
            now: On the monotonic clock.
        """
        with self._turn:
            if self._scanned_at is None or not 0 <= now - self._scanned_at < SCAN_SECONDS:
                self._scanned_at = now
                self._scan(now)

    def read(self) -> tuple[RankRecord, ...]:
        """Return every rank's record of this life, in the ranks' order."""
        with self._turn:
            now, wall = self._here.monotonic(), self._here.clock()
            self.scan(now)
            return self._read(now, wall)

    def _scan(self, now: float) -> None:
        for name, writer in tuple(self._writers.items()):
            stamp = _stamp(writer.ring.path)
            if stamp is None or stamp[:2] != writer.ring.inode:
                self._drop(name)
        own = [name for name, instance in self._names() if instance == self._instance]
        self._unusable = {name: kept for name, kept in self._unusable.items() if name in own}
        for name in own:
            if name not in self._writers:
                self._open(name, now)

    def _read(self, now: float, wall: float) -> tuple[RankRecord, ...]:
        records: list[RankRecord] = []
        for name, writer in tuple(self._writers.items()):
            try:
                records.append(writer.read(now, wall))
            except RingUnusable as exc:
                self._drop(name)
                self._unusable[name] = (None, exc.reason)
        records.sort(key=_newest_last)
        ranks = {_key(record.identity): record for record in records}
        self._duplicates = tuple(
            f"{record.name} is also written by pid {ranks[_key(record.identity)].identity.pid}, which counts"
            for record in records
            if record is not ranks[_key(record.identity)]
        )
        return tuple(sorted(ranks.values(), key=_rank_order))

    # --- other lives ---

    def others(self) -> tuple[OtherRing, ...]:
        """The files of other lives, each opened for it: not for every poll."""
        now, wall = self._here.monotonic(), self._here.clock()
        with self._turn:
            names = self._names()
        return tuple(
            self._other(self.folder / name, instance, now, wall)
            for name, instance in names
            if instance != self._instance
        )

    def last_samples(self, path: Path) -> tuple[Identity, tuple[MemoryPoint, ...]]:
        """Return the writer of a file, and its samples, oldest first. Reads the whole file.

        Args:
            path: One of this folder, of whatever life.

        Raises:
            RingUnusable: It cannot be read.
        """
        ring = Ring(path)
        try:
            bodies = ring.newest(MAX_RECORDS)
        finally:
            ring.close()
        timed = ((_number(body.get("at")), body) for body in bodies if body.get("kind") == "sample")
        return ring.identity, tuple(_point(at, body) for at, body in timed if at is not None)

    def remove_stale(self, keep_instances: Collection[str], older_than_seconds: float) -> Removal:
        """Remove the rings of other lives whose writers are silent, and what was left of making one.

        Nothing is removed that is not a regular file with a name and, but for what was never finished, a beginning of
        ours; nor a ring of a version that is not known here.

        Args:
            keep_instances: Lives whose files stay, beside the one that is followed.
            older_than_seconds: For how long they must have been silent.
        """
        removed: list[str] = []
        problems: list[str] = []
        with self._turn:
            names, keep = self._names(with_unfinished=True), {*keep_instances, self._instance}
        for name, instance in names:
            if instance in keep:
                continue
            path = self.folder / name
            stamp = _stamp(path)
            try:
                age = self._silent_seconds(path)
                # Looked at again: what is removed must be what was judged.
                if age is not None and age >= older_than_seconds and stamp is not None and _stamp(path) == stamp:
                    path.unlink()
                    removed.append(name)
            except RingUnusable as exc:
                problems.append(f"{name} was left alone: {exc.reason}")
            except OSError as exc:
                problems.append(f"{name} could not be removed: {os_reason(exc)}")
        return Removal(tuple(removed), tuple(problems))

    # --- files ---

    def _names(self, *, with_unfinished: bool = False) -> list[tuple[str, str]]:
        """Return names of rings and their instances; of too many, those of this life first, then the newest."""
        try:
            with os.scandir(self.folder) as entries:
                listed = [entry.name for entry in islice(entries, MAX_ENTRIES)]
        except OSError as exc:
            self._folder_problem = f"recorder_dir: {self.folder} cannot be listed: {os_reason(exc)}"
            return []
        found = [(match.group(), match.group(1)) for match in map(RING_NAME.fullmatch, listed) if match]
        if with_unfinished:
            found += [(match.group(), match.group(2)) for match in map(_TMP_NAME.fullmatch, listed) if match]
        written = {name: _stamp(self.folder / name) for name, _ in found} if len(found) > MAX_FILES else {}
        ages = {name: -stamp[3] for name, stamp in written.items() if stamp is not None}
        found.sort(key=lambda entry: (entry[1] != self._instance, ages.get(entry[0], 0), entry))
        self._folder_problem = None
        if len(found) > MAX_FILES or len(listed) == MAX_ENTRIES:
            looked_at = f"{MAX_FILES} rings among {MAX_ENTRIES} files"
            self._folder_problem = f"recorder_dir: {self.folder} holds more than the {looked_at} that are looked at"
        return found[:MAX_FILES]

    def _open(self, name: str, now: float) -> None:
        path = self.folder / name
        stamp = _stamp(path)
        if stamp is None or self._unusable.get(name, (None, ""))[0] == stamp:
            return
        try:
            self._writers[name] = _Writer(Ring(path), self._here, now)
        except RingUnusable as exc:
            self._unusable[name] = (stamp, exc.reason)
        else:
            self._unusable.pop(name, None)

    def _drop(self, name: str) -> None:
        self._writers.pop(name).ring.close()

    def _other(self, path: Path, instance: str, now: float, wall: float) -> OtherRing:
        try:
            writer = _Writer(Ring(path), self._here, now)
        except RingUnusable as exc:
            return OtherRing(path=path, instance=instance, problem=exc.reason)
        try:
            record = writer.read_once(now, wall)
        except RingUnusable as exc:
            return OtherRing(path=path, instance=instance, identity=writer.ring.identity, problem=exc.reason)
        finally:
            writer.ring.close()
        return OtherRing(
            path=path,
            instance=instance,
            identity=record.identity,
            newest=record.newest,
            age_seconds=record.age_seconds,
            status=record.status,
            problem=writer.problem,
        )

    def _silent_seconds(self, path: Path) -> float | None:
        """How long nothing was written into a file; ``None``: somebody writes it, or it is gone.

        Raises:
            RingUnusable: It is not ours to judge.
        """
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise RingUnusable("not a regular file")
        unchanged = self._here.clock() - status.st_mtime
        if _TMP_NAME.fullmatch(path.name):
            return unchanged
        instance = RING_NAME.fullmatch(path.name)
        other = self._other(path, instance.group(1) if instance else "", self._here.monotonic(), self._here.clock())
        if other.identity is None:
            # Damaged, but ours: then only the file system shows how old it is.
            if (other.problem or "").startswith("version") or not has_magic(path):
                raise RingUnusable(other.problem or "unreadable")
            return unchanged
        if other.status == "alive" or other.age_seconds is None:
            return None
        # Both must say so: the writer's wall clock may be another machine's.
        return min(other.age_seconds, unchanged)


class _Writer:
    """One ring of this life, and what is known of who writes it."""

    def __init__(self, ring: Ring, here: _Here, now: float) -> None:
        self.ring = ring
        self._here = here
        self._head = _head(ring.identity)
        self._shares_clock = here.has_clock_of(ring.identity)
        # Where the process was seen, its absence means that it is gone; elsewhere it may be hidden by a PID namespace.
        self._was_seen = self._shares_clock and here.process_state(ring.identity) is not None
        # On our monotonic clock: when the last news came, and when we had looked before. The last record is no older
        # than the one and no younger than the other, whatever the clocks in it say.
        self._news_at = now
        self._looked_before: float | None = None
        self._looked_at: float | None = None
        self._newest: WorkerMemory | None = None
        self._newest_mono = 0.0
        self._written: _Word | None = None
        self._sampled: _Word | None = None
        self._beaten: _Word | None = None
        self._table: EntryTable | None = None
        self._is_ended = False
        self._odd_sample: str | None = None

    @property
    def problem(self) -> str | None:
        """The problem of the file, or of its content."""
        return self.ring.problem or self._odd_sample

    def read(self, now: float, wall: float) -> RankRecord:
        """Return its record now.

        Raises:
            RingUnusable: It cannot be read any more.
        """
        return self._record(self.ring.read(), now, wall)

    def read_once(self, now: float, wall: float) -> RankRecord:
        """The same, a sample sought in the whole file where none is found at once.

        Raises:
            RingUnusable: It cannot be read.
        """
        return self._record([*self.ring.read()] or self.ring.newest(1), now, wall)

    # --- records ---

    def _record(self, bodies: Iterable[Mapping[str, Any]], now: float, wall: float) -> RankRecord:
        self._table = self.ring.table() or self._table
        heartbeat = self.ring.heartbeat()
        has_samples = self._take(bodies)
        has_news = self._take_heartbeat(heartbeat) or has_samples
        if has_news:
            self._news_at, self._looked_before = now, self._looked_at
        self._looked_at = now
        age = self._age_seconds(now, wall)
        newest, mono = self._reading(), last.mono if (last := self._last) is not None else 0.0
        return RankRecord(
            identity=self.ring.identity,
            newest=newest,
            progress=self._progress(self.ring.dump()),
            table=self._table,
            mono=mono,
            age_seconds=age,
            status=self._status(age, has_news=has_news),
            reading_age_seconds=None if newest is None else age + max(mono - self._mono_of(newest), 0.0),
        )

    @property
    def _last(self) -> _Word | None:
        """The last record: samples and heartbeats are read one after the other, not as they were written."""
        words = [word for word in (self._written, self._beaten) if word is not None]
        return max(words, key=lambda word: word.mono, default=None)

    def _take(self, newest_first: Iterable[Mapping[str, Any]]) -> bool:
        """Take the newest sample, and return whether anything at all is new. Those behind it are not looked at."""
        has_news = False
        for body in newest_first:
            word = _word(body)
            if word is None:
                continue
            if not has_news:
                has_news, self._written = True, word
            if body.get("kind") == "sample":
                self._take_newest(word)
                break
        return has_news

    def _take_heartbeat(self, body: Mapping[str, Any] | None) -> bool:
        """Keep a heartbeat, and return whether it is one."""
        word = None if body is None else _word(body)
        if word is None:
            return False
        self._beaten = word
        self._is_ended = word.body.get("kind") == "stopped"
        return True

    def _take_newest(self, word: _Word) -> None:
        self._sampled = word
        try:
            newest = _WORKER.validate_python({**_part(word.body, "memory"), **self._head, "taken_at": word.at})
        except ValidationError as exc:
            self._odd_sample = f"corrupt sample: {flaw(exc.errors(include_url=False, include_input=False))}"
            return
        if not is_within_bounds(newest):
            self._odd_sample = "corrupt sample: a number that nothing has"
            return
        self._newest, self._newest_mono, self._odd_sample = newest, word.mono, None

    # --- what they come to ---

    def _reading(self) -> WorkerMemory | None:
        """The last good sample, as of now where nothing can have changed since."""
        newest, sampled, beaten = self._newest, self._sampled, self._beaten
        if newest is None or sampled is None:
            return None
        table = self._table
        if table is not None:
            newest = replace(newest, budget=table.budget, start=table.start, notes=(*newest.notes, *table.notes))
        # A sample that is no good is a call that was not looked at: the good one before it is as old as it is.
        if beaten is None or beaten.mono < sampled.mono or newest.taken_at != sampled.at:
            return newest
        rss = _whole(beaten.body.get("rss_bytes"))
        if rss is not None:
            newest = replace(newest, host_memory=replace(newest.host_memory, rss_bytes=rss))
        kills = _whole(beaten.body.get("cgroup_oom_kills"))
        if kills is not None:
            newest = replace(newest, host_memory=replace(newest.host_memory, cgroup_oom_kills=kills))
        if not _is_at_rest(beaten, since=sampled):
            return newest
        encoder = newest.encoder_cache
        if encoder is not None and encoder.oldest_age_seconds is not None:
            oldest = round(encoder.oldest_age_seconds + beaten.mono - sampled.mono, 3)
            newest = replace(newest, encoder_cache=replace(encoder, oldest_age_seconds=oldest))
        if newest.device.type == "cpu" and rss is not None and newest.used_bytes is not None:
            newest = replace(newest, used_bytes=rss)  # its process's memory is its device's
        if newest.device.type != "cpu" and newest.used_bytes is not None:
            as_of = (
                f"as of {sampled.at:.1f} (Unix seconds): this worker has done nothing since; others on its device may"
            )
            newest = replace(newest, notes=(*newest.notes, Note(name="used_bytes", reason=as_of)))
        return replace(newest, taken_at=beaten.at)

    def _mono_of(self, reading: WorkerMemory) -> float:
        """When a reading held, on the writer's monotonic clock: of its last sample, or of the heartbeat after it."""
        beaten, newest = self._beaten, self._newest
        is_confirmed = beaten is not None and newest is not None and reading.taken_at != newest.taken_at
        return beaten.mono if beaten is not None and is_confirmed else self._newest_mono

    def _progress(self, dump: WatchdogDump | None) -> RankProgress | None:
        words = [word for word in (self._sampled, self._beaten) if word is not None]
        last = max(words, key=lambda word: word.mono, default=None)
        progress = None if last is None else _progress(last)
        if dump is None or (last is not None and last.mono >= dump.armed_mono + dump.seconds):
            return progress
        return replace(progress or RankProgress(), stack=_stack(dump.text, self.ring.identity.main_thread))

    # --- whether it writes ---

    def _age_seconds(self, now: float, wall: float) -> float:
        last = self._last
        if last is None:
            age = wall - self.ring.identity.started_at
        else:
            age = now - last.mono if self._shares_clock else wall - last.at
        if self._looked_before is not None:
            age = min(age, now - self._looked_before)
        return max(age, now - self._news_at, 0.0)

    def _status(self, age_seconds: float, *, has_news: bool) -> RankStatus:
        if self._is_ended:
            return "ended"
        is_late = age_seconds > _SILENT_SECONDS
        if has_news and not is_late:
            return "alive"
        state = self._here.process_state(self.ring.identity) if self._was_seen else "?"
        # That it is gone is a fact; whether it should have written by now is a matter of time.
        if state is None or state in "ZX":
            return "dead"
        if not is_late:
            return "alive"
        return "stopped" if state in "Tt" else "silent"


# --- who is who ---


def _key(identity: Identity) -> tuple[object, ...]:
    """Return what two writers cannot both be. Those that do not know their rank are distinguished by their process."""
    told_apart_by = identity.pid if identity.rank is None else None
    return identity.host, identity.dp_rank, identity.pp_rank, identity.tp_rank, identity.rank, told_apart_by


def _newest_last(record: RankRecord) -> tuple[bool, float, int]:
    return record.status == "alive", record.identity.started_at, record.identity.pid


def _rank_order(record: RankRecord) -> tuple[int, int, int]:
    return *rank_key(record.identity), record.identity.pid


def _head(identity: Identity) -> dict[str, Any]:
    """Return what every answer of a worker begins with, and what never changes."""
    names = ("rank", "local_rank", "dp_rank", "tp_rank", "pp_rank", "host", "pid", "pid_started", "device")
    return {name: getattr(identity, name) for name in names}


# --- bodies: whatever is not as it should be is not known ---


def _point(at: float, body: Mapping[str, Any]) -> MemoryPoint:
    memory = _part(body, "memory")
    torch, encoder = _part(memory, "torch"), _part(memory, "encoder_cache")
    cached = _whole(encoder.get("device_bytes"))
    worker = WorkerMemory(
        rank=None,
        taken_at=at,
        device=Device(),
        total_bytes=_whole(memory.get("total_bytes")),
        used_bytes=_whole(memory.get("used_bytes")),
        free_bytes=_whole(memory.get("free_bytes")),
        weights_bytes=_whole(memory.get("weights_bytes")),
        kv_cache_bytes=_whole(memory.get("kv_cache_bytes")),
        torch=TorchMemory(
            allocated_bytes=_whole(torch.get("allocated_bytes")), reserved_bytes=_whole(torch.get("reserved_bytes"))
        ),
        encoder_cache=None
        if cached is None
        else EncoderCache(entries=_whole(encoder.get("entries")) or 0, device_bytes=cached),
        host_memory=HostMemory(rss_bytes=_whole(_part(memory, "host_memory").get("rss_bytes"))),
    )
    return MemoryPoint.of(account(worker, "recorder"))


def _word(body: Mapping[str, Any]) -> _Word | None:
    """A record with when it was written; ``None`` where it does not say so."""
    at, mono = _number(body.get("at")), _number(body.get("mono"))
    return None if at is None or mono is None else _Word(at, mono, body)


def _is_at_rest(heartbeat: _Word, *, since: _Word) -> bool:
    """Return whether the worker has begun nothing since a sample, and has nothing under way."""
    calls, moving = _whole(heartbeat.body.get("calls")), _part(heartbeat.body, "moving")
    under_way = [moving.get(name) for name in ("step_seconds", "output_seconds", "rpc", "call")]
    sees_steps = _whole(moving.get("steps_begun")) is not None  # else it may be in one
    has_begun = calls is None or calls != _whole(since.body.get("calls"))
    return sees_steps and not has_begun and under_way == [None] * len(under_way)


def _progress(word: _Word) -> RankProgress | None:
    moving, dump = word.body.get("moving"), word.body.get("dump")
    if not isinstance(moving, dict):
        return None
    last_step, is_out_of_work = _number(moving.get("last_step_mono")), moving.get("last_step_empty")
    return RankProgress(
        steps_begun=_whole(moving.get("steps_begun")) or 0,
        steps_ended=_whole(moving.get("steps_ended")) or 0,
        calls=_whole(word.body.get("calls")) or 0,
        is_out_of_work=is_out_of_work if isinstance(is_out_of_work, bool) else None,
        step_seconds=_number(moving.get("step_seconds")),
        last_step_age_seconds=None if last_step is None else max(word.mono - last_step, 0.0),
        output_seconds=_number(moving.get("output_seconds")),
        rpc=_text(moving.get("rpc")),
        rpc_seconds=_number(moving.get("rpc_seconds")),
        call=_text(moving.get("call")),
        call_seconds=_number(moving.get("call_seconds")),
        is_compiling=isinstance(dump, str) and _is_compiling(dump),
        stack=_stack(dump, None) if isinstance(dump, str) else (),
    )


def _stack(dump: str, thread: int | None) -> tuple[str, ...]:
    """One thread's innermost frames as ``file.py:line function``.

    Args:
        dump: As Python's ``faulthandler`` writes it, threads one after the other.
        thread: Its number; where there is none like that, the first is taken.
    """
    parts = dump.split("\n\n")
    mark = "" if thread is None else f"0x{thread:016x}"
    part = next((part for part in parts if mark in part), parts[0])
    found = islice((match for line in part.splitlines() if (match := _FRAME.fullmatch(line))), _MAX_STACK)
    return tuple(line for match in found if (line := _text(f"{match[1]}:{match[2]} {match[3]}")))


def _is_compiling(dump: str) -> bool:
    """Return whether the first thread of a dump, the one that lasts longest, compiles or captures graphs."""
    frames = map(_FRAME.fullmatch, dump.partition("\n\n")[0].splitlines())
    return any(frame is not None and frame[3] in _COMPILES for frame in frames)


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, dict) else {}


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None


def _number(value: object) -> float | None:
    """A finite number that is not negative: NaN is in no range. JSON's true is a Python integer, and no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if 0 <= value <= _MAX_NUMBER else None


def _text(value: object) -> str | None:
    """Text that a terminal and UTF-8 can take: a JSON text may hold control characters and halves of characters."""
    if not isinstance(value, str):
        return None
    return printable(value[:_MAX_TEXT], instead="?")


# --- the machine ---


def _boot_id(proc: Path) -> str | None:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    """Return what changes when a file does; the first two are ``Ring.inode``. ``None`` where there is no file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
