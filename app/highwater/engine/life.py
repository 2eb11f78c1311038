"""The lives of the engine: which processes are the same engine, which starts ended, which facts outlive the sidecar.

A broken connection does not end a life: the same processes, by number and start time, are the same life. A start that
ends before any worker was read is a life too (``StartAttempts``). The first readings of a life, its baseline, are
kept in the state file, so that a restarted sidecar still knows how much the engine needs by itself. Where no sidecar
saw an engine before it worked, its baseline is unknown: what is in use then may have leaked.

Of a start its processes' files, its recorders and the log tell; each kind of fact may be missing:

::

    nothing ──► a process writes a file: under way ──┬── the engine responds ───────────► over; its end is a death
       │                                             ├── every process ended or silent ─► ended without a word
       │                                             ├── its files were removed ────────► stopped or failed
       └─────────────────────────────────────────────┴── recorders or log say so ───────► failed, as they say

The files of what is over stay for minutes, and count no more. Files and log tell the same end at different times: a
message of the log within a minute of an end that it had not confirmed is of that end. An API server that raises removes
its file as one that is stopped does, which does not end so again within minutes. A log that only begins again tells of
an end when the next start has begun, minutes later: of a life whose files show it, they decide.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from highwater.model.engine import EndedLife, ProcessLife
from highwater.model.rank import Process, RankReading
from highwater.process.errors import NotKept
from highwater.process.state_file import StateFile
from highwater.process.untrusted import flaw

SECTION = "baseline"
NOT_KNOWN = (
    "baseline not known: the engine had worked before this sidecar saw it, and no state_file holds its first readings"
)
SAME_END_SECONDS = 60.0
# One that begins so soon after another has ended is of a loop. A kubelet waits for up to five minutes.
LOOP_SECONDS = 600.0
# A process writes once a second, and its file counts as current for longer.
SILENT_AT_FIRST_SECONDS = 5.0
# Files are read every five seconds, and a process writes its first one a second after it has loaded vLLM.
LAG_SECONDS = 6.0
# A file that is just being written cannot be read for once.
MISSING_LOOKS = 2
_MAX_UNCONFIRMED, _MAX_OVER = 64, 4096
_FAILED: Final = EndedLife(how="failed")
_SILENT: Final = EndedLife(how="ended without a word")
_BY_ITSELF: Final = EndedLife(how="ended")  # its API server removed its own file: it was stopped, or failed

log = logging.getLogger("highwater.life")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The baseline in the state file; an older sidecar's is as old as its ranks say."""

    ranks: tuple[RankReading, ...] = ()
    at: float | None = None


_KEPT = TypeAdapter(_Kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedStart:
    """A start that ended before the engine responded, with an ``id`` of its own; ``is_again``: soon after another."""

    id: str
    at: float
    end: EndedLife
    is_again: bool = False

    @property
    def is_by_itself(self) -> bool:
        return self.end.how == _BY_ITSELF.how

    @property
    def may_be_planned(self) -> bool:
        return self.is_by_itself and not self.end.processes and not self.is_again


@dataclass(frozen=True, slots=True)
class _UnderWay:
    life: ProcessLife
    since: float
    missing: int = 0
    is_told: bool = False  # by the log, which has begun again


class StartAttempts:
    """Notices each start that ended before the engine responded, once; the times are in Unix seconds.

    Attributes:
        failed: How many did since the engine responded last.
        last: The last one of them.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.last: EndedStart | None = None
        self._has_looked = False
        self._looked_at: float | None = None
        self._under_way: tuple[_UnderWay, ...] = ()  # oldest first
        self._over: dict[Process, None] = {}  # the last ones
        # What wrote last before that, and was not seen to run, is of what was over already.
        self._over_at = float("-inf")
        self._unconfirmed: deque[float] = deque(maxlen=_MAX_UNCONFIRMED)

    def responded(self, lives: Iterable[ProcessLife]) -> None:
        """None of these processes is of a start any more."""
        self.failed, self.last = 0, None
        self._has_looked = True
        self._close(lives)

    def ended_after(self, at: float) -> None:
        self._over_at = at + LAG_SECONDS

    def see(self, lives: Sequence[ProcessLife], at: float) -> tuple[EndedStart, ...]:
        """Take what a look at the files at ``at`` showed while no engine responds; return the starts that ended."""
        if at == self._looked_at:
            return ()
        if not self._has_looked:  # what ended before, or had fallen silent, this sidecar has not seen run
            self._close(life for life in lives if not life.is_running or at - life.last_at > SILENT_AT_FIRST_SECONDS)
        self._has_looked, self._looked_at = True, at
        self._close([life for life in lives if life.processes & self._over.keys()])
        if sum(life.is_serving for life in lives) > 1:
            # Several engines share the folder: which of them this sidecar's is, nothing says.
            self._close(life for life in lives if life.is_serving)
        ended = []
        for life in lives:
            if life.processes & self._over.keys():
                continue
            known = next((one for one in self._under_way if one.life.processes & life.processes), None)
            if known is None and not life.is_serving and life.last_at <= self._over_at:
                self._close([life])
            elif not life.is_running:
                self._close([life])
                self._over_at = max(self._over_at, life.last_at)
                was_served = known is not None and known.life.has_server and not life.has_server
                end = replace(life.end, how=_BY_ITSELF.how) if was_served and life.end.how == _SILENT.how else life.end
                start = _UnderWay(life, life.last_at) if known is None else replace(known, life=life)
                ended.append(self._count(start, end))
            elif known is None:
                self._under_way += (_UnderWay(life, at),)
            else:
                joined = replace(life, has_server=life.has_server or known.life.has_server)
                now = replace(known, life=joined, missing=0)
                self._under_way = tuple(now if one is known else one for one in self._under_way)
        present = _processes_of(lives)
        looked = [
            replace(one, missing=0 if one.life.processes & present else one.missing + 1) for one in self._under_way
        ]
        self._under_way = tuple(one for one in looked if one.missing < MISSING_LOOKS)
        return (*ended, *(self._count(one, _BY_ITSELF) for one in looked if one.missing >= MISSING_LOOKS))

    def recorders_told(self, workers: frozenset[Process], at: float) -> bool:
        if self._over.keys() & workers:
            return False
        self._told([one.life for one in self._under_way if one.life.processes & workers], at)
        self._end(workers)
        self._unconfirmed.append(at)
        return True

    def log_told(self, workers: frozenset[Process], at: float, *, is_silent: bool = False) -> bool:
        """Note that a start failed, by the engine's log; return whether that was not known.

        ``workers``: those that were read of it; ``is_silent``: the log has no message of it, and begins again.
        """
        while not is_silent and self._unconfirmed and at - self._unconfirmed[0] > SAME_END_SECONDS:
            self._unconfirmed.popleft()
        if self._unconfirmed:
            self._unconfirmed.popleft()
            return False
        if is_silent and self._under_way and at - self._under_way[0].since > LAG_SECONDS:
            self._under_way = (replace(self._under_way[0], is_told=True), *self._under_way[1:])
            return False
        self._told((), at, _SILENT if is_silent else _FAILED)
        self._end(workers)
        return True

    @property
    def is_under_way(self) -> bool:
        """True if the processes of a start run that began after all that has ended."""
        return bool(self._under_way)

    @property
    def since(self) -> float | None:
        """When the start that is under way began, or was seen first."""
        known = (one.since if one.life.started_at is None else one.life.started_at for one in self._under_way)
        return next(known, None)

    def _told(self, lives: Sequence[ProcessLife], at: float, end: EndedLife = _FAILED) -> None:
        # Without a process in common it is the oldest: the next one may have begun before the log was read.
        self._close(lives or [one.life for one in self._under_way[:1]])
        self._over_at = at + LAG_SECONDS
        self.failed, self.last = self.failed + 1, EndedStart(id="", at=at, end=end)

    def _count(self, start: _UnderWay, end: EndedLife) -> EndedStart:
        is_again = self.last is not None and start.since - self.last.at < LOOP_SECONDS
        first = min(start.life.processes, key=lambda one: (one.pid_started or 0, one.pid or 0))
        ended = EndedStart(
            id=f"process-{first.pid}-{first.pid_started}", at=start.life.last_at, end=end, is_again=is_again
        )
        self.failed, self.last = self.failed + 1, ended
        if not start.is_told:
            self._unconfirmed.append(ended.at)
        return ended

    def _close(self, lives: Iterable[ProcessLife]) -> None:
        closed = _processes_of(lives)
        self._end(closed)
        self._under_way = tuple(one for one in self._under_way if not one.life.processes & closed)

    def _end(self, processes: frozenset[Process]) -> None:
        kept = [one for one in self._over if one not in processes]
        self._over = dict.fromkeys([*kept, *processes][-_MAX_OVER:])


def _processes_of(lives: Iterable[ProcessLife]) -> frozenset[Process]:
    return frozenset(process for life in lives for process in life.processes)


# --- lives ---


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLife:
    id: str  # another one after each restart of the engine
    started_at: float | None = None  # when its first process was started, in Unix seconds
    restarts: int = 0  # the number of lives before it that this sidecar has seen
    processes: frozenset[Process] = frozenset()  # its workers' processes, as far as they are known
    # The first readings after the engine became ready; empty where they are unknown.
    baseline: tuple[RankReading, ...] = ()
    baseline_at: float | None = None  # when it was taken, by this machine's clock, in Unix seconds
    is_watched: bool = False  # whether this sidecar saw it before it did any work
    recorder_instance: str | None = None  # the name of its recorders' files

    @property
    def baseline_problem(self) -> str | None:
        """The reason why growth is unknown; ``None`` where it is known, or where nothing is known yet."""
        return None if self.baseline or not self.processes or self.is_watched else NOT_KNOWN


class Lives:
    """Distinguishes the engine's lives, and keeps what belongs to the present one.

    ``started_at`` returns when a rank's process was started, in Unix seconds. Times are Unix seconds.

    Attributes:
        attempts: The starts that ended before the engine responded.
    """

    def __init__(self, state: StateFile, started_at: Callable[[RankReading], float | None]) -> None:
        self.present = EngineLife(id=_new_id())
        self.attempts = StartAttempts()
        self._state = state
        self._started_at = started_at
        self._has_ended = False
        self.is_unsaved = False
        self._problem: str | None = None

    def end(self, at: float) -> None:
        """Note that the engine has ended: the next one is another, unless its processes are the same."""
        self._has_ended = True
        self.attempts.ended_after(at)

    def see(self, lives: Sequence[ProcessLife], at: float, *, is_absent: bool) -> tuple[EndedStart, ...]:
        """Return the starts that have ended by their processes' files, each once; ``is_absent``: no engine responds."""
        if not is_absent:
            self.attempts.responded(lives)
            return ()
        ended = self.attempts.see(lives, at)
        for _ in ended:
            self._end_start()
        return ended

    def start_ended(self, workers: frozenset[Process], at: float) -> bool:
        """Note that the workers of an engine that loaded have ended; return whether that was not known."""
        is_new = self.attempts.recorders_told(workers, at)
        if is_new:
            self._end_start()
        elif self.present.processes & workers:  # read again before their recorders said so
            self.present = replace(self.present, processes=frozenset(), baseline=(), baseline_at=None)
        return is_new

    def start_failed(self, at: float, *, is_silent: bool = False) -> bool:
        """Note that a start failed, by the engine's log, or a silent log; return whether that was not known."""
        is_new = self.attempts.log_told(self.present.processes, at, is_silent=is_silent)
        if is_new:
            self._end_start()
        return is_new

    def _end_start(self) -> None:
        """Count the life that has ended, and that of an engine before it whose end was only noted."""
        instance, ended = self.present.recorder_instance, 1 + self._has_ended
        self.present = EngineLife(id=_new_id(), restarts=self.present.restarts + ended, is_watched=True)
        self._has_ended = False
        self.follow(instance)

    def came_back(self) -> None:
        """Note that an engine responds that reports nothing of its processes."""
        if self._has_ended:
            self._begin((), is_watched=True)

    def observe(self, ranks: Sequence[RankReading], *, is_watched: bool) -> bool:
        """Return whether these readings are of another engine, in place of the known one whose end was not seen.

        ``is_watched``: their workers have done no work yet, or were seen to start.
        """
        processes, life = _processes(ranks), self.present
        if life.processes and not any(process.is_same(known) for process in processes for known in life.processes):
            was_running = not self._has_ended
            self._begin(ranks, is_watched=is_watched)
            return was_running
        if not life.processes:
            # Without known processes nothing shows that an engine after an end is the same.
            if self._has_ended:
                self._begin(ranks, is_watched=True)
            else:
                self._adopt(ranks, is_watched=is_watched or life.is_watched)
        elif not processes <= life.processes:
            new = processes - life.processes
            places = {process[:2] for process in new}
            others = {known for known in life.processes if known[:2] not in places}
            self.present = replace(life, processes=frozenset(others | new))
        self._has_ended = False
        return False

    def keep_baseline(self, ranks: Iterable[RankReading], at: float) -> None:
        """``at``: when they came, by this machine's clock; a rank's own ``taken_at`` is by that of its machine."""
        life = self.present
        known = {rank.key for rank in life.baseline}
        firsts = tuple(replace(rank, notes=(), age_seconds=0.0) for rank in ranks if rank.key not in known)
        if life.is_watched and firsts:
            baseline_at = at if life.baseline_at is None else life.baseline_at
            self.present = replace(life, baseline=(*life.baseline, *firsts), baseline_at=baseline_at)
            self.is_unsaved = self._state.configured

    def follow(self, recorder_instance: str | None) -> None:
        if recorder_instance != self.present.recorder_instance:
            self.present = replace(self.present, recorder_instance=recorder_instance)

    def save(self) -> None:
        """Write the baseline into the state file; blocks as long as the disk takes, and may run in a thread."""
        self.is_unsaved = False
        ranks = [asdict(rank) for rank in self.present.baseline]
        try:
            self._state.write(SECTION, {"ranks": ranks, "at": self.present.baseline_at})
        except NotKept as exc:
            if str(exc) != self._problem:
                log.warning("the baseline is lost when the sidecar restarts: %s", exc)
            self._problem = str(exc)
        else:
            self._problem = None

    def _begin(self, ranks: Sequence[RankReading], *, is_watched: bool) -> None:
        self.present = EngineLife(id=_new_id(), restarts=self.present.restarts + 1)
        self._has_ended = False
        self._adopt(ranks, is_watched=is_watched)

    def _adopt(self, ranks: Sequence[RankReading], *, is_watched: bool) -> None:
        starts = [at for at in map(self._started_at, ranks) if at is not None]
        baseline, baseline_at = self.present.baseline, self.present.baseline_at
        if not baseline:
            kept = self._kept()
            now = {rank.key: rank.process for rank in ranks}
            same = (rank for rank in kept.ranks if rank.pid_started is not None and now.get(rank.key) == rank.process)
            baseline = tuple(same)
            baseline_at = min((kept.at or rank.taken_at for rank in baseline), default=None)
        self.present = replace(
            self.present,
            started_at=min(starts, default=None),
            processes=_processes(ranks),
            baseline=baseline,
            baseline_at=baseline_at,
            is_watched=is_watched,
        )

    def _kept(self) -> _Kept:
        try:
            return _KEPT.validate_python(self._state.read(SECTION) or {})
        except ValidationError as exc:
            log.warning("state_file: the baseline in it is not understood, and not used: %s", flaw(exc.errors()))
            return _Kept()


def local_start() -> Callable[[RankReading], float | None]:
    """Return a function for the start time of a process of this machine, in Unix seconds; of others it is unknown."""
    host, ticks = socket.gethostname(), os.sysconf("SC_CLK_TCK")
    booted_at: float | None = None
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/stat").read_text(encoding="ascii", errors="replace").splitlines()
        booted_at = float(next(line.split()[1] for line in lines if line.startswith("btime ")))

    def started_at(rank: RankReading) -> float | None:
        if booted_at is None or rank.pid_started is None or rank.host != host:
            return None
        return booted_at + rank.pid_started / ticks

    return started_at


def _processes(ranks: Iterable[RankReading]) -> frozenset[Process]:
    return frozenset(rank.process for rank in ranks if rank.pid is not None)


def _new_id() -> str:
    return secrets.token_hex(4)
