"""The forecast on shapes of memory: right where it is given, and absent where nothing is foretold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.situations import busy
from tests.situations.forecast import SEEDS, Outcome, outcome_of
from tests.situations.shapes import SHAPES

# Every fourth seed is of eight ranks, which take eight times as long.
OF_EIGHT_RANKS = ("ramp", "saw")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_forecast_comes_true_and_is_given_where_it_must_be(shape):
    assert outcome_of(shape, (0, 3) if shape in OF_EIGHT_RANKS else (0,)).missed == []


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES)
def test_it_does_so_with_other_devices_and_paces(shape):
    assert outcome_of(shape, range(SEEDS)).missed == []


@pytest.mark.parametrize(
    ("shape", "said", "due"),
    [("steps", 50.0, 100.0), ("steps", 50.0, math.inf), ("ramp", None, 9.0), ("saw", 9.0, 9.0)],
)
def test_each_bound_can_be_missed(shape, said, due):
    outcome = Outcome(shape)
    outcome.judge(said, due, step=1.0, turned_ago=math.inf, where="here")
    assert len(outcome.missed) == 1


def test_what_a_change_undid_is_counted_apart():
    """It was right as memory went then; what would have come before the change is no part of it."""
    outcome = Outcome("load that stops")
    for turns_in in (5.0, 50.0):
        outcome.judge(10.0, 10.0, step=1.0, turned_ago=math.inf, turns_in=turns_in, where="here")
    assert (outcome.undone, outcome.wrong) == (1, [])


def test_a_growth_that_quickens_gets_no_forecast():
    assert outcome_of("accelerating", (0, 3)).given == 0


def test_the_page_counts_the_shapes_that_there_are():
    page = " ".join(Path("docs/growth.md").read_text(encoding="utf-8").split())
    assert f"readings of {len(SHAPES)} shapes" in page
    assert f"verdicts on {len(busy.SHAPES)} kinds of load" in page
    assert [shape for shape in busy.INDISTINCT if f"*{shape}*" not in page] == []


@pytest.mark.parametrize("shape", busy.SHAPES)
def test_under_a_load_that_never_ends_nothing_is_called_a_leak_that_is_none(shape):
    rates = busy.rates_of(shape, (0, 1))
    assert rates.missed == []
    assert rates.right > 0


@pytest.mark.soak
@pytest.mark.parametrize("shape", busy.SHAPES)
def test_nor_with_other_loads_and_sizes(shape):
    assert busy.rates_of(shape, range(SEEDS)).missed == []
