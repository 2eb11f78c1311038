"""A start of the engine that failed, or an engine that has ended, by the files of its workers and processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from highwater.engine.hints import NOT_KNOWN_WHY
from highwater.engine.start_attempts import EndedStart
from highwater.readings.engine import StartedRank, StartFailure
from highwater.readings.life import ProcessLife
from highwater.recorder.progress import SILENT_SECONDS
from highwater.recorder.rank import RankRecord, processes_of

PREFIX = "the engine did not start: "


def start_failure(records: Sequence[RankRecord], at: float) -> StartFailure | None:
    """Return how a start failed whose workers have all ended, seen at ``at``; ``None`` where they had completed it."""
    ranks = tuple(_started(record) for record in records)
    broken = [rank for rank in ranks if rank.error is not None]
    if not broken and all(rank.status == "ended" and rank.is_over for rank in ranks):
        return None
    # One worker's failure ends the others: it is the one whose phase ended first, or that did not end in order.
    unfinished = sorted(ranks, key=lambda rank: (rank.status != "dead", rank.is_over))
    first = min(broken, key=lambda rank: rank.phases[-1].at + rank.phases[-1].seconds, default=unfinished[0])
    return StartFailure(
        at=at,
        recorder_instance=records[0].identity.instance,
        summary=f"{PREFIX}{_failure(first, records)}",
        ranks=ranks,
    )


def silent_start(ended: EndedStart) -> StartFailure:
    """Return how a start ended that did so before its workers were read, or without a word of theirs."""
    end = ended.end
    parts = [end.processes, end.memory and f"container at {end.memory}", end.oom_kills and f"oom_kill {end.oom_kills}"]
    figures = "; ".join(str(part) for part in parts if part)
    how = f"{end.how} while it started"
    if ended.is_by_itself:
        how = f"ended before it was ready; {NOT_KNOWN_WHY}" + "; ended from outside or by a crash" * bool(end.processes)
    summary = f"{PREFIX}it {how}{': ' * bool(figures)}{figures}"
    return StartFailure(at=ended.at, recorder_instance=ended.id, summary=summary, ranks=(), is_silent=True)


def is_up_by_recorder(record: RankRecord) -> bool:
    started = _started(record)
    return not started.phases or started.is_over


def ended_seconds(records: Sequence[RankRecord], lives: Sequence[ProcessLife]) -> float | None:
    """Return how long ago the last of these workers wrote, where all of them have ended and no process loads.

    ``lives``: by the processes' files; what an API server that was killed left has ended with it. ``None``: not known.
    """
    over = frozenset(process for life in lives for process in life.processes)

    def has_ended(record: RankRecord) -> bool:
        # A start may be held up for as long.
        is_silent = record.status == "silent" and record.age_seconds >= SILENT_SECONDS and is_up_by_recorder(record)
        return record.status in {"dead", "ended"} or is_silent or not over.isdisjoint(processes_of([record]))

    if not records or any(life.is_running for life in lives) or not all(map(has_ended, records)):
        return None
    return min(record.age_seconds for record in records)


def ready_at(records: Sequence[RankRecord]) -> float | None:
    """Return when the last of these workers was ready, in Unix seconds; ``None`` where one's recorder does not say."""
    ends = [
        [phase.at + phase.seconds for phase in _started(record).phases if phase.name == "warm_up"] for record in records
    ]
    return max((end[-1] for end in ends if end), default=None) if all(ends) else None


def _started(record: RankRecord) -> StartedRank:
    identity = record.identity
    return StartedRank(
        rank=identity.rank,
        dp_rank=identity.dp_rank,
        host=identity.host,
        pid=identity.pid,
        status=record.status,
        phases=() if record.table is None else record.table.start,
    )


def _failure(rank: StartedRank, records: Sequence[RankRecord]) -> str:
    name = next(record.name for record in records if record.identity.pid == rank.pid)
    last = rank.phases[-1] if rank.phases else None
    if last is not None and last.error is not None:
        return f"{name} failed in phase {last.name} after {last.seconds:.1f} s: {last.error}"
    after = f"after phase {last.name}" if last is not None else "before its first phase was over"
    return f"the process of {name} ended {after}"
