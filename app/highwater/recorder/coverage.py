"""The part of an engine that its workers' recorders show: decides whether every rank is recorded. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from highwater.readings.rank import WorkerMemory
from highwater.recorder.rank import RankRecord


@dataclass(frozen=True, slots=True)
class Coverage:
    """The recorders at one moment, compared with the ranks that there should be."""

    writing: tuple[RankRecord, ...] = ()  # the records of ranks that write and have a reading
    is_complete: bool = False  # every expected rank writes, and shows as much as its worker would report
    has_entries: bool = False  # and the entries of its encoder cache
    offers_calls: bool = False  # every expected rank writes that our operations may be called on its worker


def coverage(records: Sequence[RankRecord], expected: int | None) -> Coverage:
    alive = [record for record in records if record.status == "alive"]
    writing = tuple(record for record in alive if record.newest is not None)
    is_complete = expected is not None and sum(_shows_all(record.newest) for record in writing) >= expected
    # Either number may be too low; a call of a worker without our operations ends the engine.
    most = max(expected or 0, ranks_expected(records) or 0)
    return Coverage(
        writing,
        is_complete=is_complete,
        has_entries=is_complete and all(record.table is not None for record in writing),
        offers_calls=most > 0 and sum(bool(record.identity.rpc) for record in alive) >= most,
    )


def ranks_expected(records: Sequence[RankRecord]) -> int | None:
    return max((record.identity.ranks_expected or 0 for record in records), default=0) or None


def _shows_all(newest: WorkerMemory | None) -> bool:
    # A worker whose steps run where they cannot be seen has a recorder that shows little (worker_ext/README.md).
    return newest is not None and (newest.device.type == "cpu" or newest.torch.allocated_bytes is not None)
