"""The engine's starts by its processes' files, its recorders and its log: which of these facts are of one start. Pure.

A start that ends before any rank was read is a life of the engine too. Each kind of fact may be missing.

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

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from highwater.readings.engine import EndedLife, Process, ProcessLife

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
        """Note that the engine responds: none of these processes is of a start any more."""
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
            elif life.is_running:
                self._go_on(known, life, at)
            else:
                ended.append(self._ended(life, known))
        return (*ended, *self._vanished(lives))

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

    def _told(self, lives: Sequence[ProcessLife], at: float, end: EndedLife = _FAILED) -> None:
        # Without a process in common it is the oldest: the next one may have begun before the log was read.
        self._close(lives or [one.life for one in self._under_way[:1]])
        self._over_at = at + LAG_SECONDS
        self.failed, self.last = self.failed + 1, EndedStart(id="", at=at, end=end)

    def _go_on(self, known: _UnderWay | None, life: ProcessLife, at: float) -> None:
        if known is None:
            self._under_way += (_UnderWay(life, at),)
            return
        joined = replace(life, has_server=life.has_server or known.life.has_server)
        now = replace(known, life=joined, missing=0)
        self._under_way = tuple(now if one is known else one for one in self._under_way)

    def _ended(self, life: ProcessLife, known: _UnderWay | None) -> EndedStart:
        self._close([life])
        self._over_at = max(self._over_at, life.last_at)
        was_served = known is not None and known.life.has_server and not life.has_server
        end = replace(life.end, how=_BY_ITSELF.how) if was_served and life.end.how == _SILENT.how else life.end
        return self._count(_UnderWay(life, life.last_at) if known is None else replace(known, life=life), end)

    def _vanished(self, lives: Sequence[ProcessLife]) -> list[EndedStart]:
        present = _processes(lives)
        looked = [
            replace(one, missing=0 if one.life.processes & present else one.missing + 1) for one in self._under_way
        ]
        self._under_way = tuple(one for one in looked if one.missing < MISSING_LOOKS)
        return [self._count(one, _BY_ITSELF) for one in looked if one.missing >= MISSING_LOOKS]

    def _count(self, start: _UnderWay, end: EndedLife) -> EndedStart:
        is_again = self.last is not None and start.since - self.last.at < LOOP_SECONDS
        ended = EndedStart(id=_id(start.life), at=start.life.last_at, end=end, is_again=is_again)
        self.failed, self.last = self.failed + 1, ended
        if not start.is_told:
            self._unconfirmed.append(ended.at)
        return ended

    def _close(self, lives: Iterable[ProcessLife]) -> None:
        closed = _processes(lives)
        self._end(closed)
        self._under_way = tuple(one for one in self._under_way if not one.life.processes & closed)

    def _end(self, processes: frozenset[Process]) -> None:
        kept = [one for one in self._over if one not in processes]
        self._over = dict.fromkeys([*kept, *processes][-_MAX_OVER:])


def _processes(lives: Iterable[ProcessLife]) -> frozenset[Process]:
    return frozenset(process for life in lives for process in life.processes)


def _id(life: ProcessLife) -> str:
    first = min(life.processes, key=lambda one: (one.pid_started or 0, one.pid or 0))
    return f"process-{first.pid}-{first.pid_started}"
