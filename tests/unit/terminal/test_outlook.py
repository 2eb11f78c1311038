"""What follows from a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.readings import Growth, RuleStatus
from app.terminal.outlook import fullest, mark_of, seconds_to_full
from tests.unit.terminal.reports import DEVICE, policy, ranks, report


def test_the_fullest_rank_comes_first():
    """Those of whom nobody knows come last."""
    first, second = ranks()
    unknown, fuller = replace(first, used_ratio=None), replace(second, used_ratio=0.99)
    assert fullest([unknown, first, fuller]) == [fuller, first, unknown]


def test_the_lowest_mark_counts():
    """Of the rules that watch the device; a rule on free bytes is told as a share too."""
    free = RuleStatus(name="free", signal="device_free_bytes", high_water=6.0e9, low_water=7e9, phase="below")
    cache = RuleStatus(name="cache", signal="encoder_cache_bytes", high_water=1.0, low_water=0.0, phase="below")
    assert mark_of(report(policy=policy(DEVICE, cache))) == 0.93
    both = report(policy=policy(DEVICE, free))
    assert mark_of(both) == 0.93
    assert mark_of(both, ranks()[0]) == pytest.approx(1 - 6.0e9 / 65_452_113_920)
    assert mark_of(report(policy=policy(cache))) is None
    assert mark_of(report(policy=None)) is None


def test_each_rank_has_its_share_of_the_pace():
    """The rank with the least free memory is full first."""
    least = min(rank.free_bytes for rank in ranks())
    growing = report(growth=Growth(since_ready_bytes=1, bytes_per_second=2e6))
    assert seconds_to_full(growing) == pytest.approx(least / 1e6)


@pytest.mark.parametrize("pace", [None, 0.0, -1e9, 1000.0])
def test_what_does_not_grow_is_never_full(pace):
    """Nor what grows by noise."""
    assert seconds_to_full(report(growth=Growth(since_ready_bytes=1, bytes_per_second=pace))) is None


def test_nothing_is_foretold_from_old_numbers_or_without_any():
    """A stale report, and one without ranks."""
    growing = Growth(since_ready_bytes=1, bytes_per_second=1e9)
    assert seconds_to_full(report(growth=growing, stale=True)) is None
    assert seconds_to_full(report(growth=growing, ranks=())) is None
