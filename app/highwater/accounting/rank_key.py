"""The key of a worker across readings."""

from __future__ import annotations

from typing import Protocol, TypeAlias

RankKey: TypeAlias = tuple[int, int]


class Ranked(Protocol):
    """A value of one rank; ``dp_rank`` is the data-parallel engine that numbers it."""

    @property
    def rank(self) -> int | None: ...

    @property
    def dp_rank(self) -> int | None: ...


def rank_key(reading: Ranked) -> RankKey:
    """Return what identifies a worker across readings; data-parallel engines number their ranks from 0 each."""
    return key_of(reading.dp_rank, reading.rank)


def key_of(dp_rank: int | None, rank: int | None) -> RankKey:
    """Return the same of the two numbers, for rows that are not values yet; an unknown number counts as 0."""
    return (dp_rank or 0, rank or 0)
