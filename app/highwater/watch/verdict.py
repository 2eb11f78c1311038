"""Decides in which state the engine is, from what each poll has seen. Pure; no I/O, no clock.

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

from dataclasses import dataclass, replace
from typing import TypeAlias

from highwater.model.engine import EngineState, Progress
from highwater.watch.round import ProcessSigns, Round

BUSY_SECONDS = 10.0
"""A step or a call that lasts longer is a state of its own: every long prompt makes steps of a second or two."""
REFUSED_ROUNDS = 2
"""After so many rounds with refused connections the engine has ended, where nothing else shows it."""
SILENT_SECONDS = 10.0
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
    if is_late or silent_seconds >= SILENT_SECONDS:
        lasts = _joined(f"it has answered no call for {late_seconds:.0f} s", signs.failure_text)
        return "not_answering", _joined(lasts, progress.summary if progress is not None else None)
    if held is not None:
        return held, signs.failure_text
    return _up(progress, seen, signs)


def _up(progress: Progress | None, seen: Round, signs: ProcessSigns) -> _Finding:
    is_answered, summary = seen.contact == "answered", progress.summary if progress is not None else None
    reason = None if is_answered else _joined(signs.failure_text or "", summary)
    is_long = progress is not None and (progress.since_seconds or 0.0) >= BUSY_SECONDS
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
