"""One rank by its recorder file: its newest reading, its progress, and whether it still writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from highwater.model.components import MemoryPoint, account
from highwater.model.engine import StartedRank
from highwater.model.rank import HostMemory, Note, Process, WorkerMemory
from highwater.process.clocks import STOPPED_STATES, Machine
from highwater.process.untrusted import flaw, part
from highwater.watch.recorder.contents import (
    EntryRow,
    EntryTable,
    Identity,
    RankProgress,
    RankStatus,
    count,
    is_within_bounds,
    number,
    parse_progress,
)
from highwater.watch.recorder.ring import Ring

# Three heartbeats of an idle worker.
_LATE_SECONDS = 3.0

_WORKER = TypeAdapter(WorkerMemory)
_HOST_FIGURES = tuple(one.name for one in fields(HostMemory))
# What never changes, and begins every response of a worker.
_IDENTITY_FIELDS = ("rank", "local_rank", "dp_rank", "tp_rank", "pp_rank", "host", "pid", "pid_started", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    identity: Identity
    # Its memory as of the last valid sample, as the worker would report it; `None` before the first. While the worker
    # has done nothing since that sample and still writes, it is of the last heartbeat's time.
    newest: WorkerMemory | None
    progress: RankProgress | None  # its steps and calls as of its last record
    table: EntryTable | None  # the entries of its encoder cache; `None` before the first
    mono: float  # the time of its last record, on its own monotonic clock
    age_seconds: float  # since its last record
    status: RankStatus  # whether it writes, and why not
    reading_age_seconds: float | None = None  # since `newest` held; `None` before the first
    shift_seconds: float = 0.0  # our wall clock less its writer's, by which every time here is on ours

    @property
    def title(self) -> str:
        return self.identity.title

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def process(self) -> Process:
        return Process(self.identity.host, self.identity.pid, self.identity.pid_started)

    @property
    def started(self) -> StartedRank:
        """The progress of its worker's start, as far as its recorder saw it."""
        return StartedRank(
            rank=self.identity.rank,
            dp_rank=self.identity.dp_rank,
            host=self.identity.host,
            pid=self.identity.pid,
            status=self.status,
            phases=() if self.table is None else self.table.start,
        )

    @property
    def is_up(self) -> bool:
        return not self.started.phases or self.started.is_over

    @property
    def entries_total(self) -> int | None:
        return None if self.table is None else self.table.total

    def entry_rows(self) -> Iterator[EntryRow]:
        """Return the entries of its encoder cache, unsorted, one at a time: thousands of them take milliseconds."""
        return iter(()) if self.table is None else self.table.entries(self.mono)


class _Record(NamedTuple):
    """A sample or heartbeat, and when it was written by both of the writer's clocks."""

    at: float
    mono: float
    body: Mapping[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any] | None) -> _Record | None:
        at, mono = (None, None) if body is None else (number(body.get("at")), number(body.get("mono")))
        return None if body is None or at is None or mono is None else cls(at, mono, body)

    def shows_nothing_done_since(self, sample: _Record) -> bool:
        calls, moving = count(self.body.get("calls")), part(self.body, "moving")
        sees_steps = count(moving.get("steps_begun")) is not None  # else it may be in one
        has_begun = calls is None or calls != count(sample.body.get("calls"))
        under_way = (moving.get(name) for name in ("step_seconds", "output_seconds", "rpc", "call"))
        return sees_steps and not has_begun and all(value is None for value in under_way)


class RankFile:
    def __init__(self, ring: Ring, machine: Machine) -> None:
        self.ring = ring
        self._machine = machine
        self._shares_clock = machine.is_boot(ring.identity.boot_id)
        # Where the process was seen, or its PID namespace is ours, its absence means that it has ended; elsewhere a
        # PID namespace may hide it.
        is_shown = ring.identity.pid_started is not None and machine.shares_processes(
            ring.identity.boot_id, ring.identity.pid_namespace
        )
        self._was_seen = is_shown or (self._shares_clock and self._process_state() is not None)
        # On our monotonic clock: when something new was read last, and when the file had been read before that. The
        # last record is no older than the one and no younger than the other, whatever the clocks in it say.
        self._news_at = machine.monotonic()
        self._read_before: float | None = None
        self._read_at: float | None = None
        # By so much another machine's wall clock is behind ours, as far as its records contradict what it says.
        self._shift = 0.0
        self._reading: WorkerMemory | None = None
        self._reading_mono = 0.0
        self._written: _Record | None = None
        self._sample: _Record | None = None
        self._heartbeat: _Record | None = None
        self._table: EntryTable | None = None
        self._is_ended = False
        self._sample_problem: str | None = None

    @property
    def problem(self) -> str | None:
        return self.ring.problem or self._sample_problem

    def read(self, *, whole_file: bool = False) -> RankRecord:
        """Return the rank's record as of now. Raises RingUnusable: it cannot be read any more.

        ``whole_file``: search the whole file for a sample where none is found at once, because there is no second read.
        """
        now, wall = self._machine.monotonic(), self._machine.clock()
        bodies: Iterable[Mapping[str, Any]] = self.ring.read()
        if whole_file:
            bodies = [*bodies] or self.ring.newest()
        self._table = self.ring.table() or self._table
        heartbeat = _Record.of(self.ring.heartbeat())
        if heartbeat is not None:
            self._heartbeat, self._is_ended = heartbeat, heartbeat.body.get("kind") == "stopped"
        has_news = self._take(bodies) or heartbeat is not None
        if has_news:
            self._news_at, self._read_before = now, self._read_at
        self._read_at = now
        told = _later(self._sample, self._heartbeat)
        progress = None if told is None else parse_progress(told.mono, told.body)
        last = _later(self._written, self._heartbeat)
        if last is None:
            age = stated = wall - self.ring.identity.started_at
        else:
            age = stated = now - last.mono if self._shares_clock else wall - last.at - self._shift
        if self._read_before is not None:
            age = min(age, now - self._read_before)
        age = max(age, now - self._news_at, 0.0)
        if has_news and last is not None and not self._shares_clock:
            self._shift += stated - age
        table = self._on_our_clock(self._table)
        newest, newest_mono = self._newest(table)
        if newest is not None:
            newest = replace(newest, taken_at=newest.taken_at + self._shift)
        mono = 0.0 if last is None else last.mono
        return RankRecord(
            identity=self.ring.identity,
            newest=newest,
            progress=progress,
            table=table,
            mono=mono,
            age_seconds=age,
            status=self._status(age, has_news=has_news),
            reading_age_seconds=None if newest is None else age + max(mono - newest_mono, 0.0),
            shift_seconds=self._shift,
        )

    def _on_our_clock(self, table: EntryTable | None) -> EntryTable | None:
        if table is None or not self._shift:
            return table
        return replace(table, start=tuple(replace(phase, at=phase.at + self._shift) for phase in table.start))

    def _take(self, newest_first: Iterable[Mapping[str, Any]]) -> bool:
        """Take the newest sample, and return whether anything at all is new. Those before it are not decoded."""
        has_news = False
        for record in filter(None, map(_Record.of, newest_first)):
            if not has_news:
                has_news, self._written = True, record
            if record.body.get("kind") == "sample":
                break
        else:
            return has_news
        self._sample = record
        try:
            self._reading, self._reading_mono = _reading(self.ring.identity, record), record.mono
            self._sample_problem = None
        except ValueError as exc:
            self._sample_problem = f"corrupt sample: {exc}"
        return has_news

    def _newest(self, table: EntryTable | None) -> tuple[WorkerMemory | None, float]:
        """Return the last valid sample, as of now where nothing can have changed since; and its monotonic time."""
        newest, sample, heartbeat = self._reading, self._sample, self._heartbeat
        if newest is None or sample is None:
            return None, 0.0
        if table is not None:
            notes = (*newest.notes, *table.notes)
            if table.start and not any(phase.name in {"weights", "warm_up"} for phase in table.start):
                # While a worker loads, its runner has no model yet, and that is why its weights are unknown.
                loading = Note(name="weights_bytes", reason="the model is not loaded yet")
                notes = tuple(dict.fromkeys(loading if note.name == loading.name else note for note in notes))
            newest = replace(newest, budget=table.budget, start=table.start, notes=notes)
        # An invalid sample is a call that left no reading: the valid one before it is as old as it is.
        if heartbeat is None or heartbeat.mono < sample.mono or newest.taken_at != sample.at:
            return newest, self._reading_mono
        known = {name: size for name in _HOST_FIGURES if (size := count(heartbeat.body.get(name))) is not None}
        newest = replace(newest, host_memory=replace(newest.host_memory, **known))
        is_host, free_bytes = newest.device.traits.is_host_memory, count(heartbeat.body.get("free_bytes"))
        # What is free of the host's memory changes without the worker.
        is_old = is_host and newest.free_bytes is not None and free_bytes is None
        if is_old or not heartbeat.shows_nothing_done_since(sample):
            return newest, self._reading_mono
        encoder = newest.encoder_cache
        if encoder is not None and encoder.oldest_age_seconds is not None:
            oldest = round(encoder.oldest_age_seconds + heartbeat.mono - sample.mono, 3)
            newest = replace(newest, encoder_cache=replace(encoder, oldest_age_seconds=oldest))
        if is_host:  # its process's memory is its device's
            used_bytes = newest.used_bytes and known.get("rss_bytes", newest.used_bytes)
            newest = replace(newest, free_bytes=free_bytes, used_bytes=used_bytes)
        elif newest.used_bytes is not None:
            as_of = f"as of {sample.at + self._shift:.1f} (Unix seconds)"
            as_of += ": this worker has done nothing since; others on its device may"
            newest = replace(newest, notes=(*newest.notes, Note(name="used_bytes", reason=as_of)))
        newest = replace(newest, taken_at=heartbeat.at)
        return newest, heartbeat.mono if newest.taken_at != sample.at else self._reading_mono

    def _status(self, age_seconds: float, *, has_news: bool) -> RankStatus:
        if self._is_ended:
            return "ended"
        is_late = age_seconds > _LATE_SECONDS
        # The first look at a file shows what was written before it.
        is_old_news = self._read_before is None and self._was_seen and self._process_state() is None
        if has_news and not is_late and not is_old_news:
            return "alive"
        state = self._process_state() if self._was_seen else "?"
        # That a process has ended is a fact; whether it should have written by now is a matter of time.
        if state is None or state in "ZX":
            return "dead"
        if not is_late:
            return "alive"
        return "stopped" if state in STOPPED_STATES else "silent"

    def _process_state(self) -> str | None:
        identity = self.ring.identity
        return self._machine.process_state(identity.pid, identity.pid_started)


def processes_of(records: Iterable[RankRecord]) -> frozenset[Process]:
    return frozenset(one.process for one in records)


def read_samples(ring: Ring, shift_seconds: float, since: float) -> tuple[MemoryPoint, ...]:
    """Return the valid samples since ``since``, on our clock, oldest first. Raises RingUnusable: it cannot be read."""
    points: list[MemoryPoint] = []
    for record in filter(None, map(_Record.of, ring.newest())):
        if record.body.get("kind") != "sample":
            continue
        if (at := record.at + shift_seconds) < since:
            break
        with suppress(ValueError):
            reading = account(_reading(ring.identity, record), "recorder")
            points.append(replace(MemoryPoint.of(reading), at=at))
    return tuple(reversed(points))


def _reading(identity: Identity, sample: _Record) -> WorkerMemory:
    """Raises ValueError: a figure is invalid, or is a number that nothing has."""
    fixed = {name: getattr(identity, name) for name in _IDENTITY_FIELDS}
    try:
        reading = _WORKER.validate_python({**part(sample.body, "memory"), **fixed, "taken_at": sample.at})
    except ValidationError as exc:
        raise ValueError(flaw(exc.errors())) from exc
    if not is_within_bounds(reading):
        raise ValueError("a number that nothing has")
    return reading


def _later(*records: _Record | None) -> _Record | None:
    """Return the latest record: samples and heartbeats are not read in the order in which they were written."""
    known = [record for record in records if record is not None]
    return max(known, key=lambda record: record.mono, default=None)
