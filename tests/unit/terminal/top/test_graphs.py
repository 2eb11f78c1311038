"""Bars, sparklines and charts: what stands in which cell."""

from __future__ import annotations

import pytest

from highwater.model.components import COMPONENT_NAMES, COMPONENTS
from highwater.terminal.top.graphs import AreaChart, Marks, StackedBar, binned, component_cell
from tests.unit.terminal.top.screens import drawn, segments, terminal


def bar(sizes, total=100, width=10, mark=None, **terminal) -> str:
    return "".join(drawn(StackedBar(sizes, total, mark), width, **terminal))


def spark(values, width, least_range=0.0) -> str:
    """Of values a second apart, on a terminal with colours."""
    points = [(float(at), value) for at, value in enumerate(values)]
    return "".join(drawn(AreaChart(points, 0.0, len(values) - 0.5, least_range), width, colours=True))


def test_every_component_has_a_letter_and_a_colour_of_its_own():
    assert tuple(component.name for component in COMPONENTS) == COMPONENT_NAMES
    assert len({each.letter for each in COMPONENTS}) == len({each.terminal for each in COMPONENTS}) == len(COMPONENTS)


def test_a_bar_shows_each_part_in_its_share():
    assert bar([40, 20, 10, None, 0, 10], mark=0.95) == "WWWWKKEN.|"


@pytest.mark.parametrize(("used", "cells", "style"), [(100, "WW|W", "bold red"), (0, "..|.", "bold yellow")])
def test_a_bar_over_high_water_shows_the_line_in_red(used, cells, style):
    (line,) = segments(StackedBar([used], 100, 0.5), 4)
    assert "".join(segment.text for segment in line) == cells
    assert [str(segment.style) for segment in line if segment.text == "|"] == [style]


def test_a_bar_is_never_longer_than_its_width():
    assert bar([300], width=5, mark=3.0) == "WWWW|"
    assert len(bar([], width=5, mark=-1.0)) == 5


def test_colours_draw_where_there_are_some():
    assert bar([50, 50], width=4, colours=True) == "████"
    for colours, cell in ((True, "█"), (False, "W")):
        console = terminal(colours=colours)
        assert component_cell(console, console.options, 0).plain == cell


@pytest.mark.parametrize(
    ("values", "least_range", "cells"),
    [([1, 2, 3], 0, "▁▅█"), ([100, 101, 100], 100, "▁▁▁"), ([3.0, 3.0], 0, "▁▁"), ([None, None], 1, "  ")],
    ids=["from lowest to highest", "noise looks like noise", "nothing moved", "nothing is known"],
)
def test_a_sparkline_goes_from_lowest_to_highest(values, least_range, cells):
    assert spark(values, len(values), least_range) == cells


def test_a_chart_fills_its_lines_from_the_bottom():
    points = [(0.0, 0.0), (1.0, 10.0)]
    assert drawn(AreaChart(points, 0.0, 1.5, 0.0, height=2), 2, colours=True) == [" █", "▁█"]


def test_resets_stand_beneath_their_time():
    assert drawn(Marks([-1.0, 0.0, 9.9, 11.0], 0.0, 10.0), 5) == ["^   ^"]


def test_points_fall_into_their_spans():
    points = [(0.0, 1.0), (1.0, 2.0), (9.9, 4.0)]
    assert binned(points, 0.0, 10.0, 5) == [2.0, 2.0, 2.0, 2.0, 4.0]


def test_nothing_is_repeated_for_long():
    """While the sidecar was away nobody knows what was."""
    points = [(0.0, 1.0), (99.0, 2.0)]
    assert binned(points, 0.0, 100.0, 10) == [1.0, 1.0, 1.0, None, None, None, None, None, None, 2.0]


@pytest.mark.parametrize(("since", "until", "bins"), [(0.0, 0.0, 3), (5.0, 1.0, 3), (0.0, 1.0, 0)])
def test_a_span_without_length_has_no_values(since, until, bins):
    """Instead of dividing by nothing."""
    assert binned([(0.0, 1.0)], since, until, bins) == [None] * bins
