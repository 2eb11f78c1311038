"""What follows from a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.readings import Growth, RuleStatus
from app.terminal.outlook import (
    can_give,
    fullest,
    is_dormant,
    mark_of,
    pressure_of,
    seconds_to_full,
    seconds_to_high_water,
    short_ranks,
)
from tests.fakes.engine import MIB
from tests.unit.terminal.reports import DEVICE, HELD, HIGH, policy, pressure, ranks, report


def test_the_fullest_rank_comes_first():
    """Those of whom nobody knows come last."""
    first, second = ranks()
    unknown, fuller = replace(first, used_ratio=None), replace(second, used_ratio=0.99)
    assert fullest([unknown, first, fuller]) == [fuller, first, unknown]


def test_the_rule_that_acts_first_on_a_rank_sets_its_mark():
    """Each rank has waters of its own; a rule that is not about device memory has none."""
    first, second = ranks()
    earlier = replace(DEVICE, name="own", ranks=(pressure(1, high_free_bytes=6 * 1024 * MIB),))
    cache = RuleStatus(name="cache", signal="encoder_cache_bytes", high_water=1.0, low_water=0.0, phase="calm")
    told = report(policy=policy(cache, DEVICE, earlier))
    assert pressure_of(told, first) == pressure(0)
    assert mark_of(told, first) == pytest.approx(1 - HIGH / first.total_bytes)
    assert mark_of(told, second) == pytest.approx(1 - 6 * 1024 * MIB / second.total_bytes)
    assert mark_of(report(policy=policy(cache)), first) is None
    assert mark_of(report(policy=None), first) is None


def test_ranks_of_several_engines_are_told_apart():
    """Data-parallel engines number their ranks from 0 each."""
    other = replace(ranks()[0], dp_rank=1)
    rule = replace(DEVICE, ranks=(pressure(0), pressure(0, dp_rank=1, high_free_bytes=7)))
    assert pressure_of(report(policy=policy(rule)), other).high_free_bytes == 7


def test_what_remedies_could_give_is_summed_over_the_ranks_that_are_short():
    """The one that misses most comes first; what could give nothing is left out."""
    short = [pressure(0, short_bytes=5, can_release_bytes=None), pressure(1, short_bytes=9, can_trim_bytes=7)]
    found = short_ranks(replace(DEVICE, ranks=(*short, pressure(2))))
    assert [one.rank for one in found] == [1, 0]
    assert can_give(found) == {"release": 282 * MIB, "trim_encoder_cache": 7}
    assert can_give([pressure(can_release_bytes=None)]) == {}


def test_a_rule_is_dormant_where_the_engine_is_at_work_and_it_is_held():
    """Not while the engine sleeps or nobody knows; nor on CPU, where the default rule has nothing to watch."""
    derived = replace(HELD, high_water=None, low_water=None)
    assert is_dormant(HELD, report())
    assert is_dormant(derived, report())
    assert not is_dormant(DEVICE, report())
    assert not is_dormant(HELD, report(state="sleeping"))
    assert not is_dormant(HELD, report(stale=True))
    cpu = tuple(replace(rank, device=replace(rank.device, type="cpu")) for rank in ranks())
    assert not is_dormant(derived, report(ranks=cpu))
    assert is_dormant(HELD, report(ranks=cpu))


def test_each_rank_has_its_share_of_the_pace():
    """The rank with the least free memory is full first."""
    least = min(rank.free_bytes for rank in ranks())
    growing = report(growth=Growth(since_ready_bytes=1, bytes_per_second=2e6))
    assert seconds_to_full(growing) == pytest.approx(least / 1e6)
    assert seconds_to_high_water(growing) == pytest.approx((least - HIGH) / 1e6)


def test_high_water_that_is_reached_is_no_forecast():
    """One that is under it already is short, and that is said elsewhere."""
    growing = report(growth=Growth(since_ready_bytes=1, bytes_per_second=2e6), ranks=ranks(images=60))
    assert seconds_to_full(growing) is not None
    assert seconds_to_high_water(growing) is None
    assert seconds_to_high_water(replace(growing, policy=None)) is None


@pytest.mark.parametrize("pace", [None, 0.0, -1e9, 1000.0])
def test_what_does_not_grow_is_never_full(pace):
    """Nor what grows by noise."""
    assert seconds_to_full(report(growth=Growth(since_ready_bytes=1, bytes_per_second=pace))) is None


def test_nothing_is_foretold_from_old_numbers_or_without_any():
    """A stale report, and one without ranks."""
    growing = Growth(since_ready_bytes=1, bytes_per_second=1e9)
    assert seconds_to_full(report(growth=growing, stale=True)) is None
    assert seconds_to_full(report(growth=growing, ranks=())) is None
