"""The bar of one card's memory in a terminal's colours."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from highwater.text.budget_bar import LOOKS, OUTSIDE, BudgetBar
from highwater.units import gib_text

_MIN_WIDTH, _MAX_WIDTH = 40, 120


def draw(console: Console, bar: BudgetBar) -> bool:
    """Print it; False where the terminal has no colours, or there is nothing to draw."""
    segments = bar.segments(max(_MIN_WIDTH, min(console.width - 2, _MAX_WIDTH)))
    if console.color_system is None or console.no_color or not segments:
        return False
    cells, legend = Text(), Text()
    for (key, count), (_, title, size) in zip(segments, bar.drawn, strict=True):
        cells.append(("░" if key == OUTSIDE else "█") * count, LOOKS[key][1])
        legend.append("■ ", LOOKS[key][1]).append(f"{title} {gib_text(size)}   ")
    if line := bar.line(segments, f"budget {gib_text(bar.requested_bytes)} ", "▼"):
        console.print(Text(line))
    console.print(cells, no_wrap=True, overflow="crop")
    console.print(legend)
    console.print()
    return True
