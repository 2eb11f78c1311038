"""The bar of a card's memory: every part that is there is seen, and the budget line stands at the budget's end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from highwater.http.text.budget_bar import BudgetBar
from highwater.terminal.plan.text import in_colours

GIB = 1 << 30
BAR = BudgetBar(
    title="rank 0, 80.00 GiB",
    parts=[
        ("weights", "weights", 40 * GIB),
        ("graphs", "graphs", 1),
        ("kv_cache", "KV cache", 32 * GIB),
        ("x", "x", 9),
    ],
    requested_bytes=72 * GIB,
    outside_bytes=8 * GIB,
)


@pytest.mark.parametrize("width", [4, 40, 72, 121])
def test_parts_fill_the_width_and_each_has_a_cell(width: int) -> None:
    segments = BAR.segments(width)
    assert [key for key, _ in segments] == ["weights", "graphs", "kv_cache", "outside"]
    assert sum(cells for _, cells in segments) == width
    assert min(cells for _, cells in segments) >= 1


def test_in_letters_the_budget_line_ends_where_the_budget_does() -> None:
    title, line, bar, legend = BAR.text(with_sizes=True).splitlines()
    assert (title, line.endswith("budget 72.00 GiB|")) == ("rank 0, 80.00 GiB", True)
    assert bar[len(line) - 1 :].strip(".") == ""
    assert legend.startswith("W weights 40.00 GiB, G graphs 1 B, K KV cache 32.00 GiB")


def test_without_a_share_there_is_no_line_and_without_parts_no_bar() -> None:
    given = BudgetBar(title="t", parts=BAR.parts, requested_bytes=None, outside_bytes=None)
    assert len(given.text().splitlines()) == 3
    assert BudgetBar(title="t", parts=[], requested_bytes=None, outside_bytes=None).text() == ""


def test_colours_are_drawn_where_the_terminal_has_them() -> None:
    coloured, plain = (
        Console(file=io.StringIO(), width=100, force_terminal=True, color_system=system, no_color=system is None)
        for system in ("truecolor", None)
    )
    assert in_colours(BAR, plain) == ""
    shown = in_colours(BAR, coloured)
    assert "budget 72.00 GiB ▼" in shown
    assert "\x1b[34m" in shown
