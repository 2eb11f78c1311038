"""The growth since the engine became ready."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.accounting.growth import growth_since_ready
from highwater.accounting.pace import Track
from tests.unit.accounting.story import story


def test_growth_is_counted_from_the_baseline():
    """The sum counts from ready, over all ranks."""
    grown = growth_since_ready(story(), story(images=True))
    assert grown.since_ready_bytes == 2 * 3_965_714_432
    assert (grown.bytes_per_second, grown.host_since_ready_bytes) == (None, 0)


def test_the_first_device_that_is_full_counts():
    """The others' forecasts stand with their ranks."""
    ranks = tuple(replace(rank, free_bytes=4096 * 1024**2) for rank in story())
    tracks = {
        rank.key: Track([float(at) for at in range(20)], [float(size * 1024**2 * at) for at in range(20)])
        for rank, size in zip(ranks, (64, 128), strict=True)
    }
    grown = growth_since_ready((), ranks, tracks)
    assert [round(one.seconds_to_full or 0) for one in grown.ranks] == [64, 32]
    assert grown.seconds_to_full == pytest.approx(32.0)
    assert grown.bytes_per_second == pytest.approx(192 * 1024**2)


def test_the_pace_of_all_is_unknown_where_that_of_one_is():
    ranks = story()
    still = Track([float(at) for at in range(20)], [5.0] * 20)
    assert growth_since_ready((), ranks, {ranks[0].key: still}).bytes_per_second is None
    assert growth_since_ready((), ranks, {rank.key: still for rank in ranks}).bytes_per_second == 0.0


def test_the_baseline_is_as_old_as_its_first_reading():
    """Ranks become ready one after the other."""
    baseline = [replace(rank, taken_at=at) for rank, at in zip(story(), (20.0, 10.0), strict=True)]
    assert growth_since_ready(baseline, story()).baseline_taken_at == 10.0
