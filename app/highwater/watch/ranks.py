"""The ranks that are present, those that are missing, and data-parallel engines that are starved. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

from highwater.engine.capabilities import Capabilities
from highwater.model.components import account
from highwater.model.engine import EngineLoad, MissingRank, missing_text
from highwater.model.rank import RankReading
from highwater.watch.recorder.contents import MAX_RANKS, Identity
from highwater.watch.recorder.progress import NO_STEP_SECONDS
from highwater.watch.recorder.rank import RankRecord


def best_readings(
    answered: Sequence[RankReading],
    records: Sequence[RankRecord],
    *,
    kept: Sequence[RankReading],
    fuller_for_seconds: float,
) -> tuple[RankReading, ...] | None:
    """Return every rank's best reading, in the ranks' order; ``None`` without any.

    ``kept`` are the workers' last responses, where they still hold; not used of a rank whose recorder does not write.
    For ``fuller_for_seconds`` a response is preferred to a newer record that shows less.
    """
    readings = {reading.key: reading for reading in answered}
    alive = [record.newest for record in records if record.status == "alive" and record.newest is not None]
    if not readings and not alive:
        return None
    lost = {record.identity.key for record in records if record.status != "alive"}
    if records:
        readings = {rank.key: rank for rank in kept if rank.key not in lost} | readings
    for reading in (account(newest, "recorder") for newest in alive):
        known = readings.get(reading.key)
        if known is not None:
            shows_less = reading.torch.allocated_bytes is None and known.torch.allocated_bytes is not None
            if reading.taken_at - known.taken_at <= (fuller_for_seconds if shows_less else 0.0):
                continue
        readings[reading.key] = reading
    return tuple(readings[key] for key in sorted(readings)) if records else tuple(answered)


def workers_left(records: Sequence[RankRecord], expected: int | None) -> Literal["dead", "ended"] | None:
    """Return how the last worker ended: ``dead``: every process is gone; ``ended``: or has announced its end."""
    statuses = {record.status for record in records}
    if not records or len(records) < (expected or 1) or not statuses <= {"dead", "ended"}:
        return None
    return "dead" if statuses == {"dead"} else "ended"


class Sizes(NamedTuple):
    data_parallel: int
    pipeline_parallel: int
    tensor_parallel: int

    @classmethod
    def of(cls, source: Capabilities | Identity) -> Sizes | None:
        sizes = (source.data_parallel, source.pipeline_parallel, source.tensor_parallel)
        known = [size for size in sizes if size]
        return cls(*known) if len(known) == len(sizes) else None

    @classmethod
    def recorded(cls, records: Sequence[RankRecord]) -> Sizes | None:
        return next((sizes for record in records if (sizes := cls.of(record.identity)) is not None), None)


def missing_ranks(
    sizes: Sizes | None,
    ranks: Sequence[RankReading],
    records: Sequence[RankRecord],
    before: Sequence[MissingRank] = (),
    was: Sequence[RankReading] = (),
) -> tuple[MissingRank, ...]:
    """Return them with their last known figures; ``before`` were missing at the last poll, ``was`` were there then."""
    if sizes is None or not len(ranks) < math.prod(sizes) <= MAX_RANKS:
        return ()
    tensor_parallel = sizes.tensor_parallel
    there = {_place(rank, tensor_parallel) for rank in ranks}
    silent = {_place(record.identity, tensor_parallel): record for record in records}
    last = {_place(rank, tensor_parallel): rank for rank in was}
    known = {_place(rank, tensor_parallel): rank for rank in before}
    numbers = {dp_rank for dp_rank, _, _ in (*there, *silent, *last)}
    # Behind an external load balancer a server has a range of all replicas.
    is_first = max(numbers, default=0) < sizes.data_parallel
    first = 0 if is_first else min(numbers) // sizes.data_parallel * sizes.data_parallel
    replicas = range(first, first + sizes.data_parallel)
    return tuple(
        _missing(place, silent.get(place), last.get(place), known.get(place))
        for place in product(replicas, range(sizes.pipeline_parallel), range(tensor_parallel))
        if place not in there
    )


_Place: TypeAlias = tuple[int, int, int]


def _place(rank: RankReading | MissingRank | Identity, tensor_parallel: int) -> _Place:
    pp_rank, tp_rank = rank.pp_rank, rank.tp_rank
    if pp_rank is None or tp_rank is None:
        pp_rank, tp_rank = divmod(rank.rank or 0, tensor_parallel)
    return rank.dp_rank or 0, pp_rank, tp_rank


def _missing(
    place: _Place, record: RankRecord | None, last: RankReading | None, known: MissingRank | None
) -> MissingRank:
    dp_rank, pp_rank, tp_rank = place
    who = record.identity if record is not None else last
    if who is None:
        return known or MissingRank(dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank, status="never seen")
    readings = [reading for reading in (record.newest if record is not None else None, last) if reading is not None]
    newest = max(readings, key=lambda reading: reading.taken_at, default=None)
    return MissingRank(
        dp_rank=dp_rank,
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        rank=who.rank,
        host=who.host,
        pid=who.pid,
        status=record.status if record is not None and record.status != "alive" else "unheard",
        last_seen_at=newest.taken_at if newest is not None else None,
        used_bytes=newest.used_bytes if newest is not None else None,
    )


def missing_hint(missing: Sequence[MissingRank], expected: int, recorders_problem: str | None) -> str:
    """Return a sentence on the missing ranks; ``recorders_problem``: empty if none, ``None`` without recorders."""
    there = f"{expected - len(missing)} of {expected} ranks"
    if recorders_problem is None:
        return (
            f"{there} answer: vLLM's collective_rpc returns only the first data-parallel engine's results; with "
            "recorder_dir the others report too"
        )
    problem = f"; {recorders_problem}" if recorders_problem else ""
    return f"{there} report; missing: {missing_text(missing)}{problem}"


# --- data-parallel engines ---


class _Count(NamedTuple):
    """An engine's count, and when it was seen to change last, on the caller's monotonic clock."""

    work_done: float
    at: float
    has_moved: bool  # or it was only seen for the first time


class Replicas:
    """Notices a data-parallel engine that is starved among others that work, by vLLM's own counts.

    It has requests that wait, and none that runs, and counts no token: its loop makes steps without tokens, or none.
    The recorders' verdict is of all ranks together. No probe restarts it: the others work, and it may go on by itself.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def starved(self, engines: Mapping[str, EngineLoad], records: Iterable[RankRecord], now: float) -> tuple[str, ...]:
        """Return a sentence on each engine that has scheduled nothing while another one did, just now.

        Counts stay where they were when the last requests are aborted: where an engine's recorders show that its loop
        makes no step, nothing waits in it.
        """
        steps = [(str(one.identity.dp_rank), makes_steps(one)) for one in records]
        before, self._counts = self._counts, {}
        for name, load in engines.items():
            done, last = load.work_done or 0.0, before.get(name)
            is_same = last is not None and last.work_done == done
            self._counts[name] = last if last is not None and is_same else _Count(done, now, last is not None)
        working = {name for name, one in self._counts.items() if one.has_moved and now - one.at < NO_STEP_SECONDS}
        sentences = []
        for name, load in engines.items():
            waiting, deferred = load.requests_waiting or 0, load.waiting_by_reason.get("deferred", 0)
            seconds = now - self._counts[name].at
            own = {is_made for engine, is_made in steps if engine == name}
            # What vLLM has put off may wait for its client.
            is_idle = load.requests_running != 0 or waiting <= deferred or own == {False}
            if is_idle or seconds < NO_STEP_SECONDS or not working:
                continue
            reasons = ", ".join(f"{reason} {count}" for reason, count in load.waiting_by_reason.items() if count)
            sentences.append(
                f"data-parallel engine {name} (of {len(engines)}) has scheduled nothing for {seconds:.0f} s while "
                f"others work: {waiting} waiting, none running{reasons and f' (vLLM: {reasons})'}"
                + ("" if own else "; no recorder shows its steps, and after an abort its counts may be old")
            )
        return tuple(sentences)


def makes_steps(record: RankRecord) -> bool:
    """Return whether a rank's loop has stepped lately, or may have: it does wherever a request waits."""
    progress = record.progress
    age = None if progress is None else progress.last_step_age_seconds
    return progress is None or not progress.is_out_of_work or (age is not None and age < NO_STEP_SECONDS)
