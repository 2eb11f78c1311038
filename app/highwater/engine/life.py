"""The lives of the engine: which processes are the same engine, and which facts about it outlive the sidecar.

A broken connection does not end a life: the same processes, by number and start time, are the same life. A start that
ends before any worker was read is a life too (``start_attempts``). The first readings of a life, its baseline, are
kept in the state file, so that a restarted sidecar still knows how much the engine needs by itself. Where no sidecar
saw an engine before it worked, its baseline is unknown: what is in use then may have leaked.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from highwater.engine.start_attempts import EndedStart, StartAttempts
from highwater.errors import NotKept
from highwater.files.state_file import StateFile
from highwater.flaws import flaw
from highwater.readings.engine import Process, ProcessLife
from highwater.readings.rank import RankReading

SECTION = "baseline"
NOT_KNOWN = (
    "baseline not known: the engine had worked before this sidecar saw it, and no state_file holds its first readings"
)

log = logging.getLogger("highwater.life")

_RANKS = TypeAdapter(tuple[RankReading, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLife:
    id: str  # another one after each restart of the engine
    started_at: float | None = None  # when its first process was started, in Unix seconds
    restarts: int = 0  # the number of lives before it that this sidecar has seen
    processes: frozenset[Process] = frozenset()  # its workers' processes, as far as they are known
    # The first readings after the engine became ready; empty where they are unknown.
    baseline: tuple[RankReading, ...] = ()
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
            self.present = replace(self.present, processes=frozenset(), baseline=())
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

    def keep_baseline(self, ranks: Iterable[RankReading]) -> None:
        life = self.present
        known = {rank.key for rank in life.baseline}
        firsts = tuple(replace(rank, notes=()) for rank in ranks if rank.key not in known)
        if life.is_watched and firsts:
            self.present = replace(life, baseline=(*life.baseline, *firsts))
            self.is_unsaved = self._state.configured

    def follow(self, recorder_instance: str | None) -> None:
        if recorder_instance != self.present.recorder_instance:
            self.present = replace(self.present, recorder_instance=recorder_instance)

    def save(self) -> None:
        """Write the baseline into the state file; blocks as long as the disk takes, and may run in a thread."""
        self.is_unsaved = False
        ranks = [asdict(rank) for rank in self.present.baseline]
        try:
            self._state.write(SECTION, {"ranks": ranks})
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
        self.present = replace(
            self.present,
            started_at=min(starts, default=None),
            processes=_processes(ranks),
            baseline=self.present.baseline or self._kept(ranks),
            is_watched=is_watched,
        )

    def _kept(self, ranks: Sequence[RankReading]) -> tuple[RankReading, ...]:
        section: dict[str, Any] = self._state.read(SECTION) or {}
        try:
            kept = _RANKS.validate_python(section.get("ranks", ()))
        except ValidationError as exc:
            log.warning("state_file: the baseline in it is not understood, and not used: %s", flaw(exc.errors()))
            return ()
        now = {rank.key: _process(rank) for rank in ranks}
        return tuple(rank for rank in kept if rank.pid_started is not None and now.get(rank.key) == _process(rank))


def local_start(proc: Path = Path("/proc")) -> Callable[[RankReading], float | None]:
    """Return a function for the start time of a process of this machine, in Unix seconds; of others it is unknown."""
    host, ticks = socket.gethostname(), os.sysconf("SC_CLK_TCK")
    booted_at = _booted_at(proc)

    def started_at(rank: RankReading) -> float | None:
        if booted_at is None or rank.pid_started is None or rank.host != host:
            return None
        return booted_at + rank.pid_started / ticks

    return started_at


def _booted_at(proc: Path) -> float | None:
    try:
        lines = (proc / "stat").read_text(encoding="ascii", errors="replace").splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("btime ")))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _process(rank: RankReading) -> Process:
    return Process(rank.host, rank.pid, rank.pid_started)


def _processes(ranks: Iterable[RankReading]) -> frozenset[Process]:
    return frozenset(_process(rank) for rank in ranks if rank.pid is not None)


def _new_id() -> str:
    return secrets.token_hex(4)
