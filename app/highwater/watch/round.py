"""One poll: which requests it makes, what they show, and the engine's state that follows. Pure; no I/O, no clock.

No more is requested than it takes to know the state:

==================  =======================================  =======================================================
request             every rank is recorded                   else
==================  =======================================  =======================================================
``/metrics``        every round; while idle every 15 s, and  every round
                    ``/health`` in the others
workers' memory     never: their recorders say it all        every round; without work every ``idle_poll_seconds``
``/is_paused``      never while steps progress; while idle   every round; without work every ``idle_poll_seconds``
                    every 15 s, paused or asleep every
                    ``idle_poll_seconds``; else every round
==================  =======================================  =======================================================

In a long step, and while recorded ranks are stuck in one, only the API server is called: the engine's loop cannot
respond. A loop that has left a request without a response is called until it responds, or the ranks move.

======================================================= ============== ======= ============ =======
observation                                             state          readyz  health/deep  reported as
======================================================= ============== ======= ============ =======
nothing has responded yet, and no files are of one that
has ended; or it has ended, and files of processes or
recorders, or a port that listens anew, show that the
next one loads                                          starting       503     200          alert after half an hour
it responds                                             ready          200     200
it responds that it is paused                           paused         503     200          alert after 5 min
it responds that it sleeps                              sleeping       503     200
recorders: a long step, another's worker call, a
compilation, or a silent EngineCore that nobody waits
for; without recorders: a worker call is late           busy           200     200
the API server is late, or gives only errors, and
nothing says that the engine does not move              slow           200     200
recorders: it will not go on by itself; EngineCore or
all API servers are stopped from outside                stuck          503     503          alert, incident
recorders: steps without tokens, while requests wait    stuck          503     200          alert, incident
no recorder shows it, and for ``max_step_seconds`` no
call was answered, or for 15 s nothing but ``/health``,
or with that at 503 nothing without an error            not_answering  503     200          warning, incident
connections are refused, twice or with the workers'
processes gone, or ``/health`` says that it is dead;
until something shows that the next one loads           gone           503     503          alert, incident
the same of one that had ended before the sidecar
began: connections are refused, and its files show it   gone           503     503          alert
======================================================= ============== ======= ============ =======

A starved engine may go on by itself: no probe restarts it. Without recorders one that loads again looks as the dead one
does, ``gone``; a kubelet that restarts a container asks its startup probe first, and the liveness probe not until then.

``slow`` and ``busy`` stay ready on purpose: the engine goes on with what it has, and a pod that leaves its Service for
a few seconds pushes its load onto the others, which are slow next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from highwater.model.engine import EngineLoad, EngineState, Progress, ProgressVerdict, StartFailure
from highwater.model.rank import Process, WorkerMemory
from highwater.model.report import Report
from highwater.process.errors import EngineError, EngineNotListening, EngineRefused, EngineUnresponsive
from highwater.watch.ranks import workers_left
from highwater.watch.recorder.rank import RankRecord
from highwater.watch.recorder.recorders import Coverage

# The part of the engine that has to respond: the API server alone; the engine's loop too, between two steps; or the
# workers, which spin on a core for a second after each call.
Reach: TypeAlias = Literal["api_server", "engine", "workers"]
# `answered`: all that was requested. `worker_call_late`: the API server responds, a worker call has not come back.
# `late`: the API server did not respond in time. `broken`: connections broke, or could not be made in time.
# `refused`: no process listens. `dead`: the API server says that its engine is.
Contact: TypeAlias = Literal["answered", "worker_call_late", "late", "broken", "refused", "dead"]

IDLE_REQUEST_SECONDS = 15.0
"""The time between two requests to an engine that its recorders show to be idle."""
COUNTS_SETTLE_SECONDS = 3.0
"""For so long after a worker's last call the API server's counts may still be older than the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The observations of one source; ``None`` where it reports nothing."""

    workers: tuple[WorkerMemory, ...] | None = None  # each worker's memory, in rank order
    load: EngineLoad | None = None  # the engine's own counts
    paused: bool | None = None  # whether the scheduler is paused


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBefore:
    """What is known before a round."""

    last: Report  # the report of the round before it
    recorder_instance: str | None = None  # the name of the recorders of the engine's present life, or of its last one
    load: EngineLoad = field(default_factory=EngineLoad)
    work_done: float | None = None  # when the workers responded last
    was_answered: bool = True  # whether the round before it got every response


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSigns:
    """What the engine's processes, workers aside, show beside a round."""

    failure_text: str | None = None  # why the round failed, in one sentence
    stopped: str | None = None  # the processes that have been stopped for long, in one sentence
    is_start_under_way: bool = False  # whether processes of a start write
    # How long ago an engine ended that has never responded to this sidecar, while connections are refused.
    ended_seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class Round:
    """``Rounds`` alone fills it, source by source; the engine's state (``decide``) and the report are made of it."""

    before: KnownBefore
    requests_under_way: int = 0  # through this sidecar
    # --- what the sources returned; of a source that was not read, what still holds ---
    workers: tuple[WorkerMemory, ...] | None = None
    load: EngineLoad | None = None
    paused: bool | None = None
    # --- what the recorders show ---
    records: tuple[RankRecord, ...] = ()
    ranks_expected: int | None = None
    coverage: Coverage = field(default_factory=Coverage)
    progress: Progress | None = None
    still_seconds: float = 0.0  # since a worker was last seen to begin a call of the engine
    is_loading: bool = False  # whether the workers' recorders write though the API server does not respond yet
    start_failure: StartFailure | None = None  # how a start that was followed failed
    ended_workers: frozenset[Process] = frozenset()  # those of a start that was followed and is over, failed or not
    # --- how it went ---
    failure: EngineError | None = None  # what ended the round; `contact`: how far it came
    contact: Contact = "answered"
    first_failure: str | None = None  # the first source that failed, and why; `failed`: the names of all that did
    failed: set[str] = field(default_factory=set)
    server_error: EngineRefused | None = None  # the API server's own error, where it responded with one
    requests: int = 0  # the number of sources that were read; `responses`: the number of those that did not fail
    responses: int = 0
    serves_models: bool = False  # whether the API server listed its models, after a round that it left unanswered
    rested: bool = False  # whether the engine or its workers were left alone
    is_unanswered: bool = False  # whether the engine's loop has not responded to the last request that needed it
    at: float = 0.0  # when it was over, in Unix seconds

    def take(self, seen: Observation) -> None:
        self.workers = self.workers if seen.workers is None else seen.workers
        self.load = seen.load or self.load
        self.paused = self.paused if seen.paused is None else seen.paused

    def end(self, failure: EngineError, reach: Reach) -> None:
        self.failure = failure
        if isinstance(failure, EngineNotListening):
            self.contact = "refused"
        elif isinstance(failure, EngineUnresponsive | EngineRefused):
            self.contact = "late" if reach == "api_server" else "worker_call_late"
        else:
            self.contact = "broken"

    # --- what is due in it ---

    @property
    def known_load(self) -> EngineLoad:
        return self.load or self.before.load

    @property
    def workers_left(self) -> Literal["dead", "ended"] | None:
        return workers_left(self.records, self.ranks_expected)

    @property
    def step_verdict(self) -> ProgressVerdict | None:
        """The recorders' verdict on steps: the loop of a starved engine responds, and says whether it is paused."""
        return None if self.progress is None or self.progress.is_starved else self.progress.verdict

    @property
    def is_sure(self) -> bool:
        """True if the last poll got every response, its report is fresh, and no worker has ended since."""
        return self.before.was_answered and not self.before.last.stale and self.workers_left is None

    @property
    def is_idle(self) -> bool:
        load = self.known_load
        has_requests = load.requests_running or load.requests_waiting or self.requests_under_way
        is_still = self.still_seconds >= COUNTS_SETTLE_SECONDS and not has_requests
        return self.coverage.is_complete and self.step_verdict == "idle" and is_still and self.is_sure

    @property
    def is_without_work(self) -> bool:
        """True if the API server counts no work since the workers responded last."""
        load = self.load
        return (
            load is not None and load.is_idle and load.work_done is not None and load.work_done == self.before.work_done
        )

    def is_due(
        self, reach: Reach, answered_seconds_ago: float | None, *, idle_poll_seconds: float, slack: float
    ) -> bool:
        """Return whether a request is to be made in this poll, which may come ``slack`` seconds before its time.

        ``answered_seconds_ago`` is ``None`` without a response in this life of the engine.
        """

        def has_passed(seconds: float) -> bool:
            return answered_seconds_ago is None or answered_seconds_ago >= seconds - slack

        is_recorded, verdict = self.coverage.is_complete, self.step_verdict
        is_held = self.before.last.engine.traits.is_held
        if reach == "api_server":
            return not self.is_idle or has_passed(IDLE_REQUEST_SECONDS)
        if verdict == "busy" or (verdict == "stuck" and is_recorded and not self.is_unanswered):
            return False
        if self.is_idle:
            return reach == "engine" and has_passed(idle_poll_seconds if is_held else IDLE_REQUEST_SECONDS)
        if is_recorded:
            is_progressing = verdict == "progressing" and self.still_seconds < COUNTS_SETTLE_SECONDS
            return reach == "engine" and (is_held or not is_progressing)
        return not (self.is_sure and self.is_without_work) or has_passed(idle_poll_seconds)

    # --- what the engine's state follows from ---

    @property
    def has_responded(self) -> bool:
        return self.contact in {"answered", "worker_call_late"}

    @property
    def is_silent(self) -> bool:
        """True if the API server responds to nothing, but perhaps to /health."""
        return self.contact == "late" and not self.serves_models

    @property
    def no_worker_left(self) -> Literal["dead", "ended"] | None:
        """The end of the last worker; workers that responded in this round are not those whose files show an end."""
        return self.workers_left if self.workers is None else None

    @property
    def is_asleep(self) -> bool | None:
        """``None`` where the engine did not say, as ``is_paused``."""
        return None if self.load is None else bool(self.load.sleeping)

    @property
    def is_paused(self) -> bool | None:
        return False if self.paused is None and self.failure is None and not self.rested else self.paused

    @property
    def ready_seconds(self) -> float | None:
        """For how long the last of the workers has been ready; ``None`` where one's recorder does not say."""
        ends = [
            [phase.at + phase.seconds for phase in record.started.phases if phase.name == "warm_up"]
            for record in self.records
        ]
        return self.at - max(end[-1] for end in ends) if ends and all(ends) else None


LONG_STEP_SECONDS = 10.0
"""A step or a call that lasts longer is a state of its own: every long prompt makes steps of a second or two."""
REFUSED_ROUNDS = 2
"""After so many rounds with refused connections the engine has ended, where nothing else shows it."""
SILENT_API_SECONDS = 10.0
"""After a first deadline of 5 s; then no more requests are sent there, unless recorders show what the engine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVerdict:
    state: EngineState = "starting"
    # When the state began, on the caller's clock, before the first round too where files show that; `None` before it.
    since: float | None = None
    reason: str | None = "not asked yet"  # why, in one sentence; `None` where there is nothing to say
    has_answered: bool = False  # whether this engine has ever responded: only then can it end
    has_ended: bool = False  # whether it has ended, and nothing has responded since
    was_refused: bool = False  # whether no process has listened since then
    refused_rounds: int = 0  # the number of rounds in a row in which no process listened
    late_since: float | None = None  # since when no round got all its responses
    silent_since: float | None = None  # since when `is_silent` has been so


_Finding: TypeAlias = tuple[EngineState, str | None]


def decide(
    before: EngineVerdict, seen: Round, signs: ProcessSigns, now: float, *, max_step_seconds: float
) -> EngineVerdict:
    """Return the next verdict from one round; ``now`` is of any monotonic clock."""
    late_since = now if before.late_since is None else before.late_since
    silent_since = now if before.silent_since is None else before.silent_since
    counted = replace(
        before,
        has_answered=before.has_answered or seen.has_responded,
        refused_rounds=before.refused_rounds + 1 if seen.contact == "refused" else 0,
        late_since=None if seen.contact == "answered" else late_since,
        silent_since=silent_since if seen.is_silent else None,
    )
    state, reason = _without_engine(counted, seen, signs) or _with_engine(counted, seen, signs, now, max_step_seconds)
    if state == "starting":
        counted = replace(counted, has_answered=False, late_since=None)
    has_ended = state == "gone" or (before.has_ended and not seen.has_responded)
    since = before.since if state == before.state else None
    if since is None:
        is_first = state == "ready" and before.since is None
        seconds = seen.ready_seconds if is_first else signs.ended_seconds if state == "gone" else None
        if state == "not_answering":  # its sentence gives this age, and no second one
            seconds = now - late_since
        since = now - (seconds or 0.0)
    was_refused = has_ended and (before.was_refused or seen.contact == "refused")
    return replace(counted, state=state, reason=reason, has_ended=has_ended, was_refused=was_refused, since=since)


def _without_engine(counted: EngineVerdict, seen: Round, signs: ProcessSigns) -> _Finding | None:
    if seen.has_responded:
        return None
    if counted.has_ended or seen.contact == "dead":
        # A process that listens, though it does not respond, is not the one that ended if none did in between.
        is_another = (seen.contact == "late" and counted.was_refused) or seen.is_loading or signs.is_start_under_way
        is_starting = seen.contact != "dead" and is_another
        return "starting" if is_starting else "gone", signs.failure_text
    if not counted.has_answered:
        return "starting" if signs.ended_seconds is None else "gone", signs.failure_text
    if seen.contact != "refused":
        return None
    if seen.no_worker_left is not None or counted.refused_rounds >= REFUSED_ROUNDS:
        return "gone", signs.failure_text
    return counted.state, f"{signs.failure_text}; it is polled once more before it counts as gone"


def _with_engine(
    counted: EngineVerdict, seen: Round, signs: ProcessSigns, now: float, max_step_seconds: float
) -> _Finding:
    progress, before = seen.progress, counted.state
    held: EngineState | None = None
    if seen.is_asleep or (seen.is_asleep is None and before == "sleeping"):
        held = "sleeping"
    elif seen.is_paused or (seen.is_paused is None and before == "paused"):
        held = "paused"
    late_seconds = 0.0 if counted.late_since is None else now - counted.late_since
    if seen.no_worker_left == "dead":
        return "stuck", _joined("the process of every worker is gone", signs.failure_text)
    is_stuck = progress is not None and progress.verdict == "stuck"
    is_moving = progress is not None and progress.verdict == "progressing"
    if signs.stopped is not None and not is_moving and (held is None or is_stuck):
        return "stuck", _joined(
            signs.stopped, progress.summary if progress is not None and is_stuck else signs.failure_text
        )
    if progress is not None and is_stuck:
        return "stuck", _joined(progress.summary, signs.failure_text)
    silent_seconds = 0.0 if counted.silent_since is None or _is_known(progress) else now - counted.silent_since
    is_late = late_seconds >= max_step_seconds and not (_is_known(progress) and seen.contact == "worker_call_late")
    if is_late or silent_seconds >= SILENT_API_SECONDS:
        lasts = _joined(f"it has answered no call for {late_seconds:.0f} s", signs.failure_text)
        return "not_answering", _joined(lasts, progress.summary if progress is not None else None)
    if held is not None:
        return held, signs.failure_text
    return _up(progress, seen, signs)


def _up(progress: Progress | None, seen: Round, signs: ProcessSigns) -> _Finding:
    is_answered, summary = seen.contact == "answered", progress.summary if progress is not None else None
    reason = None if is_answered else _joined(signs.failure_text or "", summary)
    is_long = progress is not None and (progress.since_seconds or 0.0) >= LONG_STEP_SECONDS
    if progress is not None and progress.verdict == "busy" and (is_long or not is_answered):
        return "busy", reason or summary
    if is_answered:
        return "ready", None
    if seen.contact != "worker_call_late":
        return "slow", reason
    if progress is not None and progress.verdict == "progressing":
        return "ready", reason  # the call waits for its turn
    return ("slow" if _is_known(progress) else "busy"), reason


def _is_known(progress: Progress | None) -> bool:
    return progress is not None and progress.verdict != "unknown"


def _joined(reason: str, beside: str | None) -> str:
    return f"{reason} ({beside})" if beside else reason
