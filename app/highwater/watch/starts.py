"""The engine's starts and ends, by the files of its workers and processes and by its log.

What ``StartAttempts`` and ``Lives`` count is put together here with the recorders' files: how the last start failed,
since when an engine that ended in order is stopped, and why nothing answers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from highwater.engine.life import EndedStart, Lives
from highwater.model.engine import STATES, ProcessLife, SeenProcess, StartFailure
from highwater.model.rank import RankReading, StartPhase
from highwater.model.units import span_text
from highwater.process.clocks import Clocks, local_time_text
from highwater.process.errors import (
    EngineError,
    EngineNotListening,
    EngineUnreachable,
    EngineUnresponsive,
    EngineUntrusted,
)
from highwater.watch.history import History
from highwater.watch.ranks import workers_left
from highwater.watch.recorder.progress import UNHEARD_SECONDS, SilentCore
from highwater.watch.recorder.rank import RankRecord, processes_of
from highwater.watch.recorder.recorders import Recorders
from highwater.watch.round import EngineVerdict, Round

MAX_ENDED_STARTS = 64
PREFIX = "the engine did not start: "
NOT_KNOWN_WHY: Final = "whether it was stopped or failed is not known without engine_log"

log = logging.getLogger("highwater.poller")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcesses:
    """The engine's processes beside its workers, as far as they are seen.

    Attributes:
        one: Returns a process of the engine that runs, as far as one is seen.
        lives: Returns the engine's lives as its processes' files show them, and when they were read, in Unix seconds;
            ``None`` where they are still to be read.
        stopped: Returns which processes of the engine, workers aside, have been stopped for long, in one sentence;
            ``None`` if none. Called once in each poll.
        silent_core: Returns an EngineCore that is silent beside an API server that is not; ``None`` if none.
        unseen_starts: What would show a start that ends, where nothing does: the end of a sentence, or empty.
    """

    one: Callable[[], SeenProcess | None] = lambda: None
    lives: Callable[[], tuple[float, Sequence[ProcessLife]] | None] = lambda: (0.0, ())
    stopped: Callable[[], str | None] = lambda: None
    silent_core: Callable[[], SilentCore | None] = lambda: None
    unseen_starts: str = ""


class Starts:
    """Notes each start that failed and each end, once; the history gets an event for it.

    Attributes:
        failure: How the last start failed; ``None`` once the engine is up.
        stopped_at: When the engine ended in order, in Unix seconds; ``None`` where it did not, or is up again.
        loading_process: As in ``EngineStatus``, by what ``why`` said of this round; likewise ``ended_starts``.
    """

    def __init__(
        self,
        url: str,
        clocks: Clocks,
        recorders: Recorders | None,
        lives: Lives,
        *,
        history: History,
        processes: EngineProcesses,
    ) -> None:
        self.failure: StartFailure | None = None
        self.stopped_at: float | None = None
        self.loading_process: str | None = None
        self.ended_starts: str | None = None
        self._loading: SeenProcess | None = None
        self._seen_at: float | None = None  # when the start began that is under way, as far as is seen, in Unix seconds
        self._began_at: float | None = None  # the same of the engine that is up
        self._url = url
        self._clocks = clocks
        self._recorders = recorders
        self._lives = lives
        self._history = history
        self._processes = processes
        self._ended: deque[EndedStart] = deque(maxlen=MAX_ENDED_STARTS)  # that no report has yet

    @property
    def is_under_way(self) -> bool:
        return self._lives.attempts.is_under_way

    def since(self, records: Sequence[RankRecord], *, is_loading: bool) -> float | None:
        """Return when the start began that is seen: by its processes, else when it was seen first."""
        if not (is_loading or self.is_under_way or self._loading is not None):
            self._seen_at = None
            return None
        known = self._loading.started_at if self._loading is not None else None
        first = [phase.at for phase in phases_done(records if is_loading else ())[:1]]
        seen = min([*first, self._seen_at or self._clocks.wall()])
        self._seen_at = self._lives.attempts.since or known or seen
        return self._seen_at

    def took_seconds(self, ranks: Sequence[RankReading]) -> float | None:
        """Return how long the start took of an engine that is up; ``None`` where no rank has phases."""
        starts = [rank.start for rank in ranks if rank.start]
        if not starts:
            return None
        workers = frozenset(rank.process for rank in ranks)
        _, lives = self._processes.lives() or (0.0, ())
        began = [life.started_at for life in lives if life.processes & workers] or [self._began_at]
        # By the first one that was ready: a rank may join hours later.
        ready_at, at = min((start[-1].at + start[-1].seconds, start[0].at) for start in starts)
        return ready_at - min(filter(None, (*began, at)))

    def came_up(self) -> None:
        self.failure = self.stopped_at = None
        self._began_at, self._seen_at = self._seen_at, None
        self._ended.clear()

    def note(self, seen: Round, verdict: EngineVerdict) -> tuple[Round, float | None]:
        """Note the starts that have ended, before the hint, which says so; a report has one of them.

        ``verdict`` is that of the round before. Return the round, in which nothing loads whose API server was killed,
        and ``ProcessSigns.ended_seconds``.
        """
        self.loading_process = self.ended_starts = self._loading = None
        failed = self._lives.attempts.failed
        read, ended = self._processes.lives(), None
        if read is not None:
            at, lives = read
            is_absent = STATES[verdict.state].is_absent and not seen.has_responded
            self._ended.extend(self._lives.see(lives, at, is_absent=is_absent))
            workers = processes_of(seen.records)
            if any(not life.is_running and life.processes & workers for life in lives):
                seen = replace(seen, is_loading=False)
            ended = self._ended_seconds(seen, verdict, lives)
        if seen.ended_workers and self._lives.start_ended(seen.ended_workers, self._clocks.wall()):
            self._note_failure(seen.start_failure)
        elif self._ended:
            start = self._ended.popleft()
            failure = _silent_start(start)
            if start.may_be_planned:
                self.failure = None  # of one before it
                self._history.record("state", failure.summary)
            else:
                self._note_failure(failure)
        if self._lives.attempts.failed != failed:
            self._seen_at = None
        return seen, ended

    def _ended_seconds(self, seen: Round, verdict: EngineVerdict, lives: Sequence[ProcessLife]) -> float | None:
        recorders = self._recorders
        if recorders is None or verdict.has_answered or verdict.has_ended or seen.contact != "refused":
            return None
        # A start that this sidecar has followed to its end is another matter.
        records = seen.records or recorders.left
        if not recorders.are_here(records):
            return None  # another container's, or another pod's
        is_unseen = {record.identity.instance for record in records} != {seen.before.recorder_instance}
        if seen.records:
            is_unseen = workers_left(records, 0) is None and all(record.is_up for record in records)
        ended = ended_seconds(records, lives) if is_unseen else None
        if ended is not None and all(record.status == "ended" and record.is_up for record in records):
            self.stopped_at = self._clocks.wall() - ended
        return ended

    def _note_failure(self, failure: StartFailure | None) -> None:
        if failure is not None:
            self.failure, self.stopped_at = failure, None
            self._history.record("state", failure.summary)
            log.warning("%s", failure.summary)

    def note_failed_by_log(self, is_silent: bool) -> bool:
        """Note a start that failed by the engine's log, and return whether nothing else has shown it or will."""
        is_another = self._lives.start_failed(self._clocks.wall(), is_silent=is_silent)
        if is_another:
            self.failure = self._seen_at = None  # of one before it
        return is_another

    def note_stop(self) -> None:
        if self.stopped_at is None:
            self.stopped_at = self._clocks.wall()

    def why(self, failure: EngineError, seen: Round, verdict: EngineVerdict, ended: float | None) -> str:
        """Return why nothing answers, or not as it should; ``verdict`` and ``ended`` as of ``note``."""
        attempts, url = self._lives.attempts, self._url
        earlier = "" if attempts.last is None else ended_starts_text(attempts.last, attempts.failed)
        before = f"; before, {earlier}" if earlier else ""
        if seen.is_loading:
            self.ended_starts = earlier or None
            done = ", ".join(phase.name for phase in phases_done(seen.records))
            said = f"phases done: {done}" if done else "no phase is done yet"
            return f"the engine is loading ({said}); nothing answers yet at {url}{before}"
        was_seen = verdict.has_answered or bool(self._lives.present.processes)
        known = was_seen or verdict.has_ended or ended is not None
        is_loading = attempts.is_under_way if verdict.has_ended else verdict.state == "starting" and ended is None
        is_refused = isinstance(failure, EngineNotListening)
        # On a machine that is starved connections may even be made, and nothing comes of them.
        is_silent = isinstance(failure, EngineUnreachable | EngineUnresponsive) and not isinstance(
            failure, EngineUntrusted
        )
        # Of an engine that was there, a process that is left says nothing of a start: it may outlive the engine.
        may_load = is_loading and is_silent and (attempts.is_under_way or not known)
        process = self._processes.one() if may_load else None
        if process is not None and not self._is_left(process):
            self._loading, self.loading_process, self.ended_starts = process, process.name, earlier or None
            doubt = before or "; if that lasts, is engine_url right?"
            text = (
                f"the engine seems to be loading: a process of it runs ({process.name}). Nothing answers yet at {url}"
            )
            return f"{text} ({failure}){doubt}"
        now = self._clocks.monotonic()
        dead_seconds = now - (verdict.since or 0.0) if verdict.state == "gone" else ended
        if dead_seconds is not None:
            # A quick restart begins before the end is sure.
            unanswered_seconds = max(dead_seconds, now - (verdict.late_since or now))
            self.loading_process = self._newer_process(self._clocks.wall() - unanswered_seconds)
        if self.stopped_at is not None and not attempts.is_under_way:
            return f"{stopped_text(self.stopped_at)}. Nothing answers at {url} ({failure})"
        if earlier and is_silent:
            self.ended_starts = earlier
            return f"{earlier}. Nothing answers at {url} ({failure})"
        text = failure_text(failure, url, is_up=STATES[verdict.state].is_up, was_there=known)
        if dead_seconds is not None:
            left = "" if was_seen else " by the files that it left"
            return f"dead for {span_text(dead_seconds)}{left}, and {restart_text(self.loading_process)}: {text}"
        return text + (self._processes.unseen_starts if is_loading and is_refused and not known else "")

    def _newer_process(self, than: float) -> str | None:
        process = self._processes.one()
        is_newer = process is not None and process.started_at is not None and process.started_at > than
        return process.name if process is not None and is_newer and not self._is_left(process) else None

    def _is_left(self, process: SeenProcess) -> bool:
        """Return whether it began before the last start ended: it is of that one, and ends too."""
        last = self._lives.attempts.last
        return last is not None and process.started_at is not None and process.started_at <= last.at


def failure_text(failure: EngineError, url: str, *, is_up: bool, was_there: bool) -> str:
    """``is_up``: at the poll before; ``was_there``: an engine has responded at the URL before."""
    is_absent = isinstance(failure, EngineUnreachable) and not isinstance(failure, EngineUntrusted)
    if not is_absent or (is_up and not isinstance(failure, EngineNotListening)):
        return str(failure)
    if was_there:
        return f"nothing answers any more at {url} ({failure})"
    return f"nothing answers yet at {url} ({failure}); is vLLM running there, and is engine_url right?"


def restart_text(process: str | None) -> str:
    """``process``: one of an engine that began after the end; it may be another engine's."""
    return "no restart of it is seen" if process is None else f"a newer process of an engine runs ({process})"


def stopped_text(at: float) -> str:
    """``at``: when the engine was seen to have ended in order, in Unix seconds."""
    return f"stopped in order at {local_time_text(at)}; start it again"


def ended_starts_text(last: EndedStart, count: int) -> str:
    """Return it with a time and no age: an incident keeps it."""
    memory = f", with {last.end.memory}" if last.end.memory else ""
    doubt = f"; {NOT_KNOWN_WHY}" if last.is_by_itself else ""
    end = f"{last.end.how} at {local_time_text(last.at)}{memory}{doubt}"
    several = f"{count} starts ended before it was ready; the last one"
    return f"the engine's last {'start' if count == 1 else several} {end}"


# What a worker does after a phase of its start (`model.rank.StartPhase`).
_NEXT_PHASE: Final = {
    "before": "setting up the device",
    "init": "loading weights",
    "weights": "measuring what a step needs",
    "profile": "allocating the KV cache",
    "kv_cache": "capturing graphs",
    "graphs": "warming up",
}


def loading_phase(done: Sequence[StartPhase]) -> str:
    return _NEXT_PHASE.get(done[-1].name, "starting its API server") if done else "starting its processes"


def phases_done(records: Iterable[RankRecord]) -> tuple[StartPhase, ...]:
    """Those that the slowest worker has done."""
    starts = [record.table.start for record in records if record.table is not None]
    return min(starts, key=len, default=())


def start_failure(records: Sequence[RankRecord], at: float) -> StartFailure | None:
    """Return how a start failed whose workers have all ended, seen at ``at``; ``None`` where they had completed it."""
    ranks = tuple(record.started for record in records)
    broken = [rank for rank in ranks if rank.error is not None]
    if not broken and all(rank.status == "ended" and rank.is_over for rank in ranks):
        return None
    # One worker's failure ends the others: it is the one whose phase ended first, or that did not end in order.
    unfinished = sorted(ranks, key=lambda rank: (rank.status != "dead", rank.is_over))
    first = min(broken, key=lambda rank: rank.phases[-1].at + rank.phases[-1].seconds, default=unfinished[0])
    title = next(record.title for record in records if record.pid == first.pid)
    last = first.phases[-1] if first.phases else None
    if last is not None and last.error is not None:
        what = f"{title} failed in phase {last.name} after {last.seconds:.1f} s: {last.error}"
    else:
        after = f"after phase {last.name}" if last is not None else "before its first phase was over"
        what = f"the process of {title} ended {after}"
    return StartFailure(at=at, recorder_instance=records[0].identity.instance, summary=f"{PREFIX}{what}", ranks=ranks)


def _silent_start(ended: EndedStart) -> StartFailure:
    """Return how a start ended that did so before its workers were read, or without a word of theirs."""
    end = ended.end
    parts = [end.processes, end.memory and f"container at {end.memory}", end.oom_kills and f"oom_kill {end.oom_kills}"]
    figures = "; ".join(str(part) for part in parts if part)
    how = f"{end.how} while it started"
    if ended.is_by_itself:
        how = f"ended before it was ready; {NOT_KNOWN_WHY}" + "; ended from outside or by a crash" * bool(end.processes)
    summary = f"{PREFIX}it {how}{': ' * bool(figures)}{figures}"
    return StartFailure(at=ended.at, recorder_instance=ended.id, summary=summary, ranks=(), is_silent=True)


def ended_seconds(records: Sequence[RankRecord], lives: Sequence[ProcessLife]) -> float | None:
    """Return how long ago the last of these workers wrote, where all of them have ended and no process loads.

    ``lives``: by the processes' files; what an API server that was killed left has ended with it. ``None``: not known.
    """
    over = frozenset(process for life in lives for process in life.processes)

    def has_ended(record: RankRecord) -> bool:
        # A start may be held up for as long.
        is_silent = record.status == "silent" and record.age_seconds >= UNHEARD_SECONDS and record.is_up
        return record.status in {"dead", "ended"} or is_silent or record.process in over

    if not records or any(life.is_running for life in lives) or not all(map(has_ended, records)):
        return None
    return min(record.age_seconds for record in records)
