"""A rank's memory at one moment, and series of such points."""

from __future__ import annotations

import pytest

from highwater.model.components import MemoryPoint, thin


def points(*used: int | None) -> tuple[MemoryPoint, ...]:
    """A second apart."""
    return tuple(MemoryPoint(at=float(index), used_bytes=size) for index, size in enumerate(used))


@pytest.mark.parametrize(
    ("count", "most", "recent"),
    [(0, 10, 5), (5, 10, 5), (10, 10, 5), (11, 10, 5), (1200, 600, 60), (1200, 7, 1), (1200, 1, 1), (3, 2, 1)],
)
def test_thinning_keeps_order_and_end(count, most, recent):
    given = points(*(index % 7 for index in range(count)))
    thinned = thin(given, most, recent=recent)
    assert len(thinned) == min(count, most)
    assert list(thinned) == sorted(thinned, key=lambda point: point.at)
    assert set(thinned) <= set(given)
    assert thinned[-recent:] == given[-recent:]


def test_a_rise_of_one_point_is_kept():
    given = points(*[1] * 40, 9, *[1] * 40)
    assert max(point.used_bytes for point in thin(given, 10)) == 9


def test_unknown_use_is_thinned_like_any_other():
    assert len(thin(points(*[None] * 99), 10)) == 10
