"""The bar of one rank's budget with its budget line, in a terminal's colours."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from highwater.api.budget_text import bar_segments
from highwater.plan.budget import RankBudget
from highwater.units import gib_text

# Of the bar, by the parts' keys; the same meaning has the same colour as on the dashboard.
_COLOURS: Final = {
    "weights": "blue",
    "process": "magenta",
    "persistent": "cyan",
    "consumed": "cyan",
    "activation": "yellow",
    "non_torch": "magenta",
    "graphs": "bright_blue",
    "profiled": "yellow",
    "mm_ipc": "bright_yellow",
    "rescaled": "bright_yellow",
    "kv_cache": "green",
    "unexplained": "red",
}
_MIN_BAR, _MAX_BAR = 40, 120


def draw(console: Console, rank: RankBudget) -> bool:
    """Print the bar and its legend; False where the terminal has no colours, or no part is known."""
    segments = bar_segments(rank, max(_MIN_BAR, min(console.width - 2, _MAX_BAR)))
    if console.color_system is None or console.no_color or not segments:
        return False
    bar, legend, inside = Text(), Text(), 0
    for key, cells in segments:
        style = _COLOURS.get(key, "bright_black")
        bar.append(("█" if key != "outside" else "░") * cells, style)
        inside += cells if key != "outside" else 0
        part = rank.part(key)
        title, size = ("outside the budget", rank.outside_bytes) if part is None else (part.title, part.bytes)
        legend.append("■ ", style).append(f"{title} {gib_text(size)}   ")
    if rank.requested_bytes is not None:
        console.print(Text(f"{'budget ' + gib_text(rank.requested_bytes) + ' ▼':>{inside}}"))
    console.print(bar, no_wrap=True, overflow="crop")
    console.print(legend)
    console.print()
    return True
