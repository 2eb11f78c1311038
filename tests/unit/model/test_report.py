"""What follows from a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.model.engine import EngineStatus
from highwater.model.policy import RuleStatus
from highwater.model.remedies import can_give
from tests.fakes.engine import MIB
from tests.unit.terminal.reports import DEVICE, HIGH, policy, pressure, ranks, report


def test_the_rank_that_is_short_of_most_comes_first_then_the_one_with_the_least_free():
    sizes = zip(ranks(4), (None, 9, 3, 7), strict=True)
    unknown, roomy, fuller, short = (replace(rank, free_bytes=free) for rank, free in sizes)
    shown = report(ranks=(unknown, roomy, fuller, short), policy=None)
    assert shown.worst_first == [fuller, short, roomy, unknown]
    rule = replace(DEVICE, ranks=(pressure(2), pressure(3, short_bytes=5)))
    assert replace(shown, policy=policy(rule)).worst_first == [short, fuller, roomy, unknown]


def test_the_rule_that_acts_first_on_a_rank_sets_its_mark():
    first, second = ranks()
    earlier = replace(DEVICE, name="own", ranks=(pressure(1, high_free_bytes=6 * 1024 * MIB),))
    cache = RuleStatus(name="cache", signal="encoder_cache_bytes", high_water=1.0, low_water=0.0, phase="calm")
    told = report(policy=policy(cache, DEVICE, earlier))
    assert told.pressure_of(first) == pressure(0)
    assert told.high_water_of(first) == pytest.approx(1 - HIGH / first.total_bytes)
    assert told.high_water_of(second) == pytest.approx(1 - 6 * 1024 * MIB / second.total_bytes)
    assert report(policy=policy(cache)).high_water_of(first) is None
    assert report(policy=None).high_water_of(first) is None


def test_ranks_of_several_engines_are_told_apart():
    other = replace(ranks()[0], dp_rank=1)
    rule = replace(DEVICE, ranks=(pressure(0), pressure(0, dp_rank=1, high_free_bytes=7)))
    assert report(policy=policy(rule)).pressure_of(other).high_free_bytes == 7


def test_what_remedies_could_give_is_summed_over_the_ranks_that_are_short():
    short = [pressure(0, short_bytes=5, can_release_bytes=None), pressure(1, short_bytes=9, can_trim_bytes=7)]
    found = replace(DEVICE, ranks=(*short, pressure(2))).short_ranks
    assert [one.rank for one in found] == [1, 0]
    assert can_give(found) == {"release": 282 * MIB, "trim_encoder_cache": 7}
    assert can_give([pressure(can_release_bytes=None)]) == {}


def test_high_water_comes_first_on_the_rank_that_fills_fastest():
    rule = replace(DEVICE, ranks=(pressure(0, seconds_to_high_water=90.0), pressure(1, seconds_to_high_water=None)))
    assert report(policy=policy(rule)).seconds_to_high_water == 90.0
    assert report(policy=policy(rule), stale=True).seconds_to_high_water is None
    assert report(policy=None).seconds_to_high_water is None


def test_high_water_that_is_reached_is_no_forecast():
    rule = replace(DEVICE, ranks=(pressure(0, seconds_to_high_water=90.0), pressure(1, short_bytes=1)))
    assert report(policy=policy(rule)).seconds_to_high_water is None


def test_an_engine_that_was_stopped_in_order_is_nothing_bad():
    gone = EngineStatus(url="http://engine", state="gone")
    stopped = replace(gone, stopped_at=5.0, hint="stopped by SIGTERM")
    assert (gone.traits.level, stopped.traits) == ("bad", replace(gone.traits, level="warn"))
    assert (gone.in_words, stopped.in_words) == ("the engine is gone", "the engine was stopped by SIGTERM")
