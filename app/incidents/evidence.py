"""Evidence from what the sidecar keeps anyway, for where no flight recorder runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.attribution import COMPONENTS
from app.incidents.incident import Point, RankEvidence
from app.readings import Components, RankReading, TorchMemory


def point(reading: RankReading) -> Point:
    """Return what the series keeps of a reading."""
    return Point(
        at=reading.taken_at,
        used_bytes=reading.used_bytes,
        components=reading.components,
        torch=reading.torch,
    )


def from_history(
    ranks: Sequence[RankReading], readings: Sequence[Mapping[str, Any]], *, status: str = "unknown"
) -> tuple[RankEvidence, ...]:
    """Each rank of a report, with its last minutes.

    Args:
        ranks: Of the last report.
        readings: As ``History.readings`` gives them. Those of other processes under the same rank are left out.
        status: The word for each of them.
    """
    return tuple(
        RankEvidence(
            rank=rank.rank,
            dp_rank=rank.dp_rank,
            host=rank.host,
            pid=rank.pid,
            status=status,
            reading=rank,
            series=tuple(_series(rank, readings)),
        )
        for rank in ranks
    )


def _series(rank: RankReading, readings: Sequence[Mapping[str, Any]]) -> list[Point]:
    mine = (rank.dp_rank, rank.rank, rank.pid)
    return [
        Point(
            at=reading["at"],
            used_bytes=row["used_bytes"],
            components=Components(**{name: row[name] for name in COMPONENTS}),
            torch=TorchMemory(allocated_bytes=row["torch_allocated_bytes"], reserved_bytes=row["torch_reserved_bytes"]),
        )
        for reading in readings
        for row in reading["ranks"]
        if (row["dp_rank"], row["rank"], row["pid"]) == mine
    ]
