"""The growth since the engine became ready."""

from __future__ import annotations

import pytest

from highwater.accounting.growth import growth
from tests.unit.accounting.story import story


def test_growth_is_counted_from_the_baseline():
    """The sum counts from ready, over all ranks; the slope is taken from the recent points."""
    recent = [(10.0 + second, 1000.0 + 64 * second) for second in range(10)]
    grown = growth(story(), story(images=True), recent)
    assert grown.since_ready_bytes == 2 * 3_965_714_432
    assert grown.bytes_per_second == pytest.approx(64.0)
    assert grown.host_since_ready_bytes == 0


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (2.0, 9.0)], [(1.0, 1.0)] * 3])
def test_too_few_points_have_no_slope(points):
    """Two points, or none apart in time, would only show noise."""
    assert growth((), (), points).bytes_per_second is None
