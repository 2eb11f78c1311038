"""Verdicts on growth as text."""

from __future__ import annotations

from dataclasses import replace

from highwater.growth.words import growth_line, growth_table
from highwater.model.growth import SeriesGrowth

TOO_FEW = "0 of 6 idle floors so far"
ONE = SeriesGrowth(
    series="EngineCore anonymous_bytes",
    owner="EngineCore",
    measure="anonymous_bytes",
    place="host",
    unit="bytes",
    verdict="not_known",
    text=TOO_FEW,
)


def test_a_sentence_that_many_series_share_is_shown_once():
    many = [replace(ONE, owner=f"worker {rank}") for rank in range(14)]
    shown = growth_table([*many, replace(ONE, verdict="step", text="it rose once")])
    assert shown.count(TOO_FEW) == 1
    assert f"\n14 series: {TOO_FEW}\n" in shown
    assert shown.count("worker 13") == 1
    few = growth_table(many[:2])
    assert few.count(TOO_FEW) == 1
    assert few.splitlines()[-1].count("worker") == 2


def test_a_process_that_has_ended_is_not_counted():
    over, flat = replace(ONE, is_over=True), replace(ONE, is_over=True, verdict="flat", value=1.0)
    shown = growth_table([over, flat])
    assert "not known, over" in shown
    assert "at the last floor" in shown
    assert growth_line([ONE, over, replace(ONE, verdict="flat")]) == "1 flat"
    assert growth_line([ONE, over, flat]) == "", "and of what is not known a line says nothing"
