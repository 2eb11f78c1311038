"""Sums and differences of sizes, of which any may be unknown."""

from __future__ import annotations

from collections.abc import Iterable


def difference(now: int | None, was: int | None) -> int | None:
    return None if now is None or was is None else now - was


def sum_known(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None
