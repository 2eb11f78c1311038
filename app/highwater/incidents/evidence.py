"""Evidence from what the sidecar keeps anyway, for where no recorder runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from highwater.accounting.points import MemoryPoint
from highwater.incidents.incident import RankEvidence
from highwater.readings import RankReading


def from_history(ranks: Sequence[RankReading], readings: Sequence[Mapping[str, Any]]) -> tuple[RankEvidence, ...]:
    """Each rank of a report, with its last minutes.

    Args:
        ranks: Of the last report.
        readings: As ``History.readings`` gives them. Those of other processes under the same rank are left out.
    """
    return tuple(
        RankEvidence(
            rank=rank.rank,
            dp_rank=rank.dp_rank,
            host=rank.host,
            pid=rank.pid,
            reading=rank,
            series=tuple(_series(rank, readings)),
        )
        for rank in ranks
    )


def _series(rank: RankReading, readings: Sequence[Mapping[str, Any]]) -> list[MemoryPoint]:
    mine = (rank.dp_rank, rank.rank, rank.pid)
    return [
        MemoryPoint.of_row(reading["at"], row)
        for reading in readings
        for row in reading["ranks"]
        if (row["dp_rank"], row["rank"], row["pid"]) == mine
    ]
