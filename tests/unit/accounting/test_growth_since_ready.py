"""The growth since the engine became ready."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.accounting.growth_since_ready import growth_since_ready
from highwater.accounting.rank_key import rank_key
from tests.unit.accounting.story import story


def test_growth_is_counted_from_the_baseline():
    """The sum counts from ready, over all ranks; the slope is taken from the recent points."""
    recent = [(10.0 + second, 1000.0 + 64 * second) for second in range(10)]
    grown = growth_since_ready(story(), story(images=True), recent)
    assert grown.since_ready_bytes == 2 * 3_965_714_432
    assert grown.bytes_per_second == pytest.approx(64.0)
    assert grown.host_since_ready_bytes == 0


def test_the_first_device_that_is_full_counts():
    """The others' forecasts stand with their ranks."""
    ranks = tuple(replace(rank, free_bytes=4096 * 1024**2) for rank in story())
    paces = {
        rank_key(rank): [(float(second), size * 1024**2 * second) for second in range(20)]
        for rank, size in zip(ranks, (64, 128), strict=True)
    }
    grown = growth_since_ready((), ranks, [], paces)
    assert [round(one.seconds_to_full or 0) for one in grown.ranks] == [64, 32]
    assert grown.seconds_to_full == pytest.approx(32.0)


def test_the_baseline_is_as_old_as_its_first_reading():
    """Ranks become ready one after the other."""
    baseline = [replace(rank, taken_at=at) for rank, at in zip(story(), (20.0, 10.0), strict=True)]
    assert growth_since_ready(baseline, story(), []).baseline_taken_at == 10.0


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (2.0, 9.0)], [(1.0, 1.0)] * 3])
def test_too_few_points_have_no_slope(points):
    """Two points, or none apart in time, would only show noise."""
    assert growth_since_ready((), (), points).bytes_per_second is None
