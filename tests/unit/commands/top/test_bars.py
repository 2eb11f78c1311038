"""Bars, sparklines and charts: what stands in which cell."""

from __future__ import annotations

import pytest

from highwater.accounting.attribution import COMPONENTS
from highwater.commands.top.bars import ASCII, PARTS, UNICODE, Pen, binned

LETTERS = Pen(ASCII, colour=False)
PAINT = Pen(UNICODE)


def test_every_component_has_a_letter_and_a_colour_of_its_own():
    """In the order of the accounting."""
    assert tuple(name for name, _, _ in PARTS) == COMPONENTS
    assert len({letter for _, letter, _ in PARTS}) == len({colour for *_, colour in PARTS}) == len(PARTS)


def test_a_bar_shows_each_part_in_its_share():
    """What is free is dots, high water a line."""
    bar = LETTERS.stacked([40, 20, 10, None, 0, 10], 100, 10, mark=0.95)
    assert bar.plain == "WWWWKKEN.|"


def test_a_bar_over_high_water_shows_the_line_in_red():
    """In yellow while it is free up to there."""
    reached = LETTERS.stacked([100], 100, 4, mark=0.5)
    assert reached.plain == "WW|W"
    assert [span.style for span in reached.spans if reached.plain[span.start] == "|"] == ["bold red"]
    free = LETTERS.stacked([0], 100, 4, mark=0.5)
    assert [span.style for span in free.spans if free.plain[span.start] == "|"] == ["bold yellow"]


def test_a_bar_is_never_longer_than_its_width():
    """Also where more is used than there is, or the mark lies outside."""
    assert LETTERS.stacked([300], 100, 5, mark=3.0).plain == "WWWW|"
    assert LETTERS.stacked([], 100, 5, mark=-1.0).cell_len == 5


def test_colours_draw_where_there_are_some():
    """Then parts need no letters."""
    assert PAINT.stacked([50, 50], 100, 4).plain == "████"
    assert [PAINT.legend(0).plain, LETTERS.legend(0).plain] == ["█", "W"]


def test_a_sparkline_goes_from_lowest_to_highest():
    """The newest at the right."""
    assert PAINT.spark([1, 2, 3], 3, least_range=0).plain == "▁▅█"
    assert PAINT.spark([9, 1, 2, 3], 3, least_range=0).plain == "▁▅█"
    assert PAINT.spark([3.0], 3, least_range=0).plain == "  ▁"


def test_noise_looks_like_noise():
    """Movement under the least range is not blown up."""
    assert PAINT.spark([100, 101, 100], 3, least_range=100).plain == "▁▁▁"


@pytest.mark.parametrize("values", [[], [None], [None, None]])
def test_a_sparkline_of_nothing_is_blank(values):
    """And as wide as any other."""
    assert PAINT.spark(values, 4, least_range=1).plain == "    "
    assert PAINT.spark(values, 0, least_range=1).plain == ""


def test_a_gap_stays_a_gap():
    """What nobody knows is not drawn."""
    assert PAINT.spark([1, None, 1], 3, least_range=1).plain == "▁ ▁"


def test_a_chart_fills_its_lines_from_the_bottom():
    """The highest first; values that are not known are blank."""
    lines = [line.plain for line in PAINT.chart([0, 10, None], 4, 2, low=0, high=10)]
    assert lines == ["  █ ", " ▁█ "]


def test_a_chart_of_one_value_is_seen():
    """Also where low and high are the same."""
    assert [line.plain for line in PAINT.chart([5], 1, 2, low=5, high=5)] == [" ", "▁"]


def test_points_fall_into_their_spans():
    """The last of each counts; one without repeats the one before."""
    points = [(0.0, 1.0), (1.0, 2.0), (9.9, 4.0)]
    assert binned(points, 0.0, 10.0, 5, gap_seconds=100) == [2.0, 2.0, 2.0, 2.0, 4.0]


def test_nothing_is_repeated_for_long():
    """While the sidecar was away nobody knows what was."""
    points = [(0.0, 1.0), (99.0, 2.0)]
    assert binned(points, 0.0, 100.0, 10, gap_seconds=20) == [1.0, 1.0, 1.0, None, None, None, None, None, None, 2.0]


@pytest.mark.parametrize(("since", "until", "bins"), [(0.0, 0.0, 3), (5.0, 1.0, 3), (0.0, 1.0, 0)])
def test_a_span_without_length_has_no_values(since, until, bins):
    """Instead of dividing by nothing."""
    assert binned([(0.0, 1.0)], since, until, bins, gap_seconds=1) == [None] * bins
