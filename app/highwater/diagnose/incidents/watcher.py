"""Notices what is worth an incident, and gathers the evidence. Decides nothing about the engine.

::

                  up                  gone, or every worker dead
    unknown ──────────────► lives ───────────────────────────────► ended: `died`, unless in order
                            │  ▲                                      │
                            │  └─ answers in time, or another life ───┘
                            ├── does not move: `hung`, once until it moves again
                            ├── an allocator counts one more failure: `out_of_memory`
                            └── ready, and an incident may be open: all are closed, once

A life that another replaces unseen has ended too. Failed starts: ``failed_starts``. The workers' recorder files outlive
them, so their last minutes are read afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gated_proxy.door_items import RequestItems
from highwater.diagnose.evidence import EncoderEntry, Evidence, IncidentKind, RankEvidence
from highwater.diagnose.incidents.failed_starts import FailedStarts
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.rules.device import Sleep, wake_up_failed
from highwater.diagnose.rules.life import NOTHING_KNOWN
from highwater.engine.life import EngineLife
from highwater.host.past import HostFacts, OomKillWatch
from highwater.host.reading import ProcessMemory
from highwater.model.components import MemoryPoint, account
from highwater.model.engine import LOAD_FIGURES
from highwater.model.growth import Growth, SeriesGrowth
from highwater.model.policy import PolicyStatus
from highwater.model.rank import RankReading, rank_title
from highwater.model.report import Report
from highwater.model.units import span_text
from highwater.process.errors import contained
from highwater.watch.history import History
from highwater.watch.ranks import workers_left
from highwater.watch.recorder.contents import largest_first
from highwater.watch.recorder.progress import LOST, activity
from highwater.watch.recorder.rank import RankRecord
from highwater.watch.recorder.recorders import Recorders
from highwater.watch.starts import Starts

SPAN_SECONDS = 600.0
MAX_EVENTS = 50
# Requests with images that ended so shortly before may have left their memory behind.
RECENT_SECONDS, MAX_REQUESTS = 60.0, 20
BACKLOG = 16
FINISH_SECONDS = 3.0
# Between two looks at the log of an engine that sleeps.
HEAR_SECONDS = 5.0
ENDED_IN_ORDER = "the engine ended in order, as its log says"
CLOSED_IN_ORDER = "the engine ended in order: every worker closed its recorder"

log = logging.getLogger("highwater.diagnose.incidents")


@dataclass(slots=True)
class _LifeKnown:
    engine_life: str = ""
    instance: str | None = None
    records: tuple[RankRecord, ...] = ()
    ranks: tuple[RankReading, ...] = ()
    baseline: tuple[RankReading, ...] = ()
    ranks_expected: int | None = None
    growth: Growth = field(default_factory=Growth)
    sleep: Sleep = field(default_factory=Sleep)
    load: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None  # where recorders name it, no report has it after the end
    policy: PolicyStatus | None = None
    has_ended: bool = False  # its end is recorded, and it has not answered in time since


class IncidentWatcher:
    """Opens and closes incidents, by the state of the engine that the poller found.

    ``internal_error`` counts an internal error, ``ended_in_order`` notes an end that is no incident, and ``read_host``
    reads host memory once more. The other callables return the present state of their parts.
    """

    def __init__(
        self,
        incidents: Incidents,
        history: History,
        *,
        recorders: Recorders | None,
        starts: Starts,
        life: Callable[[], EngineLife],
        policy: Callable[[], PolicyStatus],
        verdicts: Callable[[], tuple[SeriesGrowth, ...]] = tuple,
        stopped_processes: Callable[[], Sequence[ProcessMemory]] = tuple,
        oom_kills: OomKillWatch | None = None,
        requests: Callable[[], Iterable[RequestItems]] = tuple,
        read_host: Callable[[], Awaitable[HostFacts]] | None = None,
        ended_in_order: Callable[[], None] = lambda: None,
        internal_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._incidents = incidents
        self._history = history
        self._recorders = recorders
        self._engine_life = life
        self._policy = policy
        self._verdicts = verdicts
        self._stopped_processes = stopped_processes
        self._requests = requests
        self._oom_kills = oom_kills or OomKillWatch()
        self._read_host = read_host
        self._ended_in_order = ended_in_order
        self._internal_error = internal_error
        self._starts = FailedStarts(incidents, history, starts, self._of_start)
        self._last: Report | None = None
        self._life: _LifeKnown | None = None
        # By rank: the process that counts, and its count.
        self._ooms: dict[tuple[int, int], tuple[int | None, int]] = {}
        # Whether an end is still to be queued; at first that of an incident that an earlier sidecar left.
        self._may_be_open = True
        # Whether the log must learn that another life of the engine began; tried again until there was room.
        self._has_begun = False
        self._is_looking = False  # at the log, for failed starts
        self._heard_at = 0.0
        # Reports beyond this backlog are part of the same storm.
        self._waiting: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue(BACKLOG)

    def notice(self, report: Report) -> None:
        """Take a new report. Never blocks the poller."""
        self._judge(report)
        if self._incidents.is_late_due:
            self._put(self._complete)
        if self._incidents.has_log:
            if self._has_begun:
                self._has_begun = not self._put(self._incidents.begin_life)
            if self._starts.is_look_due(report) and not self._is_looking:
                self._is_looking = self._put(partial(self._look_for_failed_starts, report))
            if report.engine.state == "sleeping" and self._history.now() - self._heard_at >= HEAR_SECONDS:
                self._heard_at = self._history.now()
                self._put(partial(self._hear, report, self._life))

    async def run(self) -> None:
        while True:
            work = await self._waiting.get()
            try:
                with contained(self._internal_error, log, "an incident could not be handled"):
                    await work()
            finally:
                self._waiting.task_done()

    async def finish(self) -> None:
        """Wait a little until all that was noticed is written: the sidecar often ends with its engine."""
        self._put(partial(self._complete, at_once=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                await self._waiting.join()

    # --- noticing ---

    def _judge(self, report: Report) -> None:
        before, self._last = self._last, report
        more_ooms = self._more_ooms(report)
        self._oom_kills.notice(() if report.stale else report.ranks)
        failed = self._starts.notice(report, before)
        if failed is not None:
            self._open_with(partial(self._write, *failed))
        life = self._remember(report)
        if life is None:
            return
        if report.engine.state == "gone":
            self._end_of(life, report)
        elif report.engine.traits.is_hung and not (before is not None and before.engine.traits.is_hung):
            if workers_left(life.records, life.ranks_expected) == "dead":
                self._end_of(life, report)
            else:
                self._open("hung", life, report)
        elif more_ooms:
            ranks = ", ".join(f"rank {rank_title(dp, rank)}" for dp, rank in more_ooms)
            reason = f"PyTorch's allocator on {ranks} could not get what it asked for"
            self._open("out_of_memory", life, report, reason)
        elif report.engine.state == "ready" and self._may_be_open:
            # Once: while a disk stalls, one more with each report would leave no room for the next death.
            self._may_be_open = not self._put(self._end_all)

    def _end_of(self, life: _LifeKnown, report: Report, reason: str | None = None) -> None:
        if life.has_ended:
            return
        life.has_ended = True
        if life.records and all(record.status == "ended" for record in life.records):
            self._has_ended_in_order(CLOSED_IN_ORDER)
        else:
            self._open("died", life, report, reason)

    def _has_ended_in_order(self, how: str) -> None:
        self._history.record("state", how)
        self._ended_in_order()

    def _more_ooms(self, report: Report) -> list[tuple[int, int]]:
        more = []
        for rank in () if report.stale else report.ranks:
            key, count = rank.key, rank.torch.ooms
            if count is None:
                continue  # not every reading has it
            pid, before = self._ooms.get(key, (rank.pid, count))
            if pid == rank.pid and count > before:
                more.append(key)
            self._ooms[key] = rank.pid, count
        return more

    def _remember(self, report: Report) -> _LifeKnown | None:
        engine, life = report.engine, self._life
        if engine.traits.is_up and (life is None or life.engine_life != self._engine_life().id):
            if life is not None:
                # Nobody saw its end. Later log lines are another life's.
                self._end_of(life, report, "other processes answer in its place")
            life = self._life = _LifeKnown(engine_life=self._engine_life().id)
            self._has_begun = True
        if life is None or (life.has_ended and not engine.traits.answers):
            return None  # what is left of an engine that has ended may take calls for a while
        life.has_ended = False
        recorders = self._recorders
        if recorders is not None and recorders.files.instance is not None:
            life.records, life.instance = recorders.records, recorders.files.instance
        elif recorders is not None and life.instance is not None and engine.state == "gone":
            life.records = recorders.records  # the last records of workers that are followed no more
        life.ranks_expected = report.ranks_expected or life.ranks_expected
        if not report.stale:
            life.ranks, life.growth = report.ranks, report.growth
            life.sleep.note(report.ranks)
            life.baseline = self._engine_life().baseline or life.baseline
            policy = self._policy()
            life.policy = life.policy if policy.level in NOTHING_KNOWN else policy
        if engine.requests_running is not None:
            load = {name: getattr(engine, name) for name in LOAD_FIGURES}
            life.load = {name: value for name, value in load.items() if value is not None}
        life.model = engine.model or life.model
        return life

    def _open(self, kind: IncidentKind, life: _LifeKnown, report: Report, reason: str | None = None) -> None:
        evidence = self._evidence(kind, life, report, (report.engine.hint or "") if reason is None else reason)
        self._open_with(partial(self._write, evidence, life.instance))

    def _open_with(self, write: Callable[[], Awaitable[None]]) -> None:
        self._may_be_open = True
        if not self._put(write):
            log.warning("an incident is not written: %d before it wait for the disk", BACKLOG)

    def _evidence(self, kind: IncidentKind, life: _LifeKnown, report: Report, reason: str) -> Evidence:
        at = self._history.now()
        # Oldest first, also those of the same time.
        events = tuple(reversed(self._history.events(since=at - SPAN_SECONDS, limit=MAX_EVENTS)))
        (_, readings), stuck = self._history.readings(at - SPAN_SECONDS, 0), report.progress
        ranks = _with_records(from_history(life.ranks, readings), life.records)
        # An end that nobody saw, since others answer already, was after the last reading.
        unseen = [rank.taken_at for rank in life.ranks] if kind == "died" and report.engine.traits.is_up else []
        recent = (one for one in self._requests() if one.ended_at is None or one.ended_at > at - RECENT_SECONDS)
        # A rank that outlived a kill may have reported it after the last report.
        self._oom_kills.notice(rank.reading for rank in ranks if rank.reading is not None)
        return Evidence(
            kind=kind,
            at=min(max(unseen, default=at), at),
            engine=replace(report.engine, model=report.engine.model or life.model, **life.load),
            ranks=ranks,
            ranks_expected=life.ranks_expected,
            baseline=life.baseline,
            growth=replace(life.growth, series=self._verdicts()),
            policy=self._policy(),
            policy_before=life.policy,
            events=events,
            reason=reason,
            still_seconds=stuck.since_seconds or 0.0 if stuck is not None and stuck.verdict == "stuck" else 0.0,
            stopped=tuple(self._stopped_processes()),
            requests=tuple(sorted(recent, key=lambda one: one.cost.decoded_bytes, reverse=True)[:MAX_REQUESTS]),
        )

    def _of_start(self, report: Report, reason: str, model: str | None) -> Evidence:
        """Return the evidence of a failed start, without the ranks of an earlier engine, whose end was reported."""
        started = () if report.start_failure is None else report.start_failure.ranks
        pids = {rank.pid for rank in started}
        ranks = tuple(rank for rank in report.ranks if rank.pid in pids)
        life = _LifeKnown(ranks=ranks, ranks_expected=report.ranks_expected, model=model)
        return self._evidence("start_failed", life, report, reason)

    async def _with_host(self, evidence: Evidence) -> Evidence:
        host = None
        with contained(self._internal_error, log, "host memory could not be read for an incident"):
            host = None if self._read_host is None else await self._read_host()
        # While all are alive, none is known to have reported its counter after the end.
        is_one_lost = any(rank.status in LOST for rank in evidence.ranks)
        alive = [rank.reading for rank in evidence.ranks if rank.status == "alive" and rank.reading is not None]
        kills = self._oom_kills.recent(None if host is None else host.reading, alive if is_one_lost else ())
        return replace(evidence, host=host, oom_kills=kills)

    def _put(self, work: Callable[[], Awaitable[None]]) -> bool:
        if self._waiting.full():
            return False
        self._waiting.put_nowait(work)
        return True

    # --- writing ---

    async def _end_all(self) -> None:
        for ended in await self._incidents.close_all():
            self._history.record("incident", f"incident {ended.id} ended: the engine is ready", incident=ended.id)

    async def _hear(self, report: Report, life: _LifeKnown | None) -> None:
        """Record that a sleeping engine could not be woken up: it lives on, and nothing else shows it."""
        failure = wake_up_failed(await self._incidents.heard(), report.ranks, Sleep() if life is None else life.sleep)
        if failure is not None:
            self._history.record("state", failure.sentence)
            log.warning("%s", failure.sentence)

    async def _look_for_failed_starts(self, report: Report, *, at_once: bool = False) -> None:
        self._is_looking = False
        async for evidence, instance in self._starts.look(report, at_once=at_once):
            self._may_be_open = True
            await self._write(evidence, instance)

    async def _complete(self, *, at_once: bool = False) -> None:
        if at_once and self._last is not None and self._starts.is_look_due(self._last):
            await self._look_for_failed_starts(self._last, at_once=True)
        kills = self._oom_kills.recent()

        def again(evidence: Evidence) -> Evidence:
            is_more = kills is not None and kills.count > (
                0 if evidence.oom_kills is None else evidence.oom_kills.count
            )
            evidence = replace(evidence, oom_kills=kills) if is_more else evidence
            return replace(evidence, are_closed=self._are_closed(evidence.instance))

        for ended in await self._incidents.complete(at_once=at_once, again=again):
            self._has_ended_in_order(f"{ENDED_IN_ORDER}; incident {ended.id} is withdrawn")

    def _are_closed(self, instance: str | None) -> bool:
        """Return whether every worker closed its recorder: vLLM first stops to listen, and then ends them."""
        if self._recorders is None or instance is None:
            return False
        records = [other.record for other in self._recorders.files.others() if other.instance == instance]
        return bool(records) and all(record is not None and record.status == "ended" for record in records)

    async def _write(self, evidence: Evidence, instance: str | None) -> None:
        if self._recorders is not None and instance is not None:
            evidence = replace(evidence, instance=instance)
            # The incident is written without the series then: its evidence is nowhere else.
            with contained(self._internal_error, log, "the recorders could not be read for an incident"):
                last_minutes = await asyncio.to_thread(self._recorders.last_minutes, instance)
                ranks = tuple(_with_series(rank, last_minutes) for rank in evidence.ranks)
                are_closed = evidence.kind == "died" and await asyncio.to_thread(self._are_closed, instance)
                evidence = replace(evidence, ranks=ranks, are_closed=are_closed)
        evidence = await self._with_host(evidence)
        opened = await self._incidents.open_incident(evidence)
        if opened is None:
            self._has_ended_in_order(CLOSED_IN_ORDER if evidence.are_closed else ENDED_IN_ORDER)
            return
        headline, is_new = opened
        if is_new:
            self._history.record("incident", f"incident {headline.id}: {headline.summary}", incident=headline.id)
            log.warning("incident %s: %s", headline.id, headline.summary)
        elif headline.kind == "start_failed":  # each takes as long as a start: no storm
            summary = f"incident {headline.id}, {headline.count} times: {headline.summary}"
            self._history.record("incident", summary, incident=headline.id)
        if self._incidents.problem is not None:
            log.warning("%s", self._incidents.problem)


def from_history(ranks: Sequence[RankReading], readings: Sequence[Mapping[str, Any]]) -> tuple[RankEvidence, ...]:
    """Return each rank of a report with its last minutes, of ``History.readings``.

    Readings of other processes under the same rank are left out.
    """
    return tuple(
        RankEvidence(
            rank=rank.rank,
            dp_rank=rank.dp_rank,
            host=rank.host,
            pid=rank.pid,
            reading=rank,
            series=tuple(
                MemoryPoint.of_row(reading["at"], row)
                for reading in readings
                for row in reading["ranks"]
                if (row["dp_rank"], row["rank"], row["pid"]) == (rank.dp_rank, rank.rank, rank.pid)
            ),
        )
        for rank in ranks
    )


def _with_records(ranks: tuple[RankEvidence, ...], records: tuple[RankRecord, ...]) -> tuple[RankEvidence, ...]:
    if not records:
        return ranks
    known = {rank.key: rank for rank in ranks}
    for record in records:
        identity, progress, newest = record.identity, record.progress, record.newest
        rank = known.get(identity.key) or RankEvidence(
            rank=identity.rank, dp_rank=identity.dp_rank, host=identity.host, pid=identity.pid
        )
        reading = rank.reading
        if newest is not None and (reading is None or reading.taken_at < newest.taken_at):
            reading = account(newest, "recorder")
        # What a lost one was in, and for how long, is as of its last word.
        since = f"it wrote last {span_text(record.age_seconds)} ago, " if record.status in LOST else ""
        known[identity.key] = replace(
            rank,
            status=record.status,
            reading=reading,
            doing="" if progress is None else f"{since}{activity(progress)}",
            step_seconds=progress.step_seconds if progress is not None else None,
            stack=progress.stack if progress is not None else (),
            entries=tuple(EncoderEntry(**row) for row in sorted(record.entry_rows(), key=largest_first)),
        )
    return tuple(known[key] for key in sorted(known))


def _with_series(rank: RankEvidence, last_minutes: Mapping[int, tuple[MemoryPoint, ...]]) -> RankEvidence:
    samples = last_minutes.get(rank.pid or -1)
    if not samples or rank.reading is None:
        return rank
    # An idle worker writes no samples: from then on there are the sidecar's own readings.
    later = (point for point in rank.series if point.at > samples[-1].at)
    return replace(rank, series=(*samples, *later))
