"""The memory of one card as a bar with its budget line, in letters to paste, or as segments for colours.

Apart from the tables of an explanation: `highwater plan` draws it too, and loads no part of the sidecar.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from highwater.model.units import gib_text

LETTERS_WIDTH: Final = 72
_WRAPPED: Final = 100
OUTSIDE: Final = "outside"
# In the order in which they are stacked: a letter, and the colour that it has on the dashboard.
LOOKS: Final[Mapping[str, tuple[str, str]]] = {
    "weights": ("W", "blue"),
    "process": ("P", "magenta"),
    "persistent": ("T", "cyan"),
    "consumed": ("C", "cyan"),
    "activation": ("A", "yellow"),
    "non_torch": ("N", "magenta"),
    "graphs": ("G", "bright_blue"),
    "profiled": ("M", "yellow"),
    "mm_ipc": ("I", "bright_yellow"),
    "rescaled": ("S", "bright_yellow"),
    "kv_cache": ("K", "green"),
    "unprofiled": (".", "bright_black"),
    "unexplained": ("?", "red"),
    OUTSIDE: (".", "bright_black"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetBar:
    title: str
    parts: Sequence[tuple[str, str, int]]  # each part's key, title and bytes; those without a letter are not drawn
    requested_bytes: int | None  # the budget; None: the KV cache's size was given instead
    outside_bytes: int | None

    @property
    def drawn(self) -> list[tuple[str, str, int]]:
        outside = (OUTSIDE, "outside the budget", self.outside_bytes or 0)
        return [part for part in (*self.parts, outside) if part[0] in LOOKS and part[2] > 0]

    def segments(self, width: int) -> list[tuple[str, int]]:
        """Return keys of parts and their cells, which fill the width exactly; empty: there is nothing to draw.

        Cells are shared out by largest remainder; a part that is there has at least one.
        """
        sizes = [size for _, _, size in self.drawn]
        if not sizes or width < len(sizes):
            return []
        shares = [size * (width - len(sizes)) / sum(sizes) for size in sizes]
        cells = [1 + int(share) for share in shares]
        for index in sorted(range(len(sizes)), key=lambda one: int(shares[one]) - shares[one])[: width - sum(cells)]:
            cells[index] += 1
        return [(key, count) for (key, _, _), count in zip(self.drawn, cells, strict=True)]

    def text(self, *, with_sizes: bool = False) -> str:
        """Return it in letters, with a legend; empty where there is nothing to draw."""
        if not (segments := self.segments(LETTERS_WIDTH)):
            return ""
        legend = [
            f"{LOOKS[key][0]} {title}{f' {gib_text(size)}' if with_sizes else ''}" for key, title, size in self.drawn
        ]
        budget = self.line(segments, f"budget {gib_text(self.requested_bytes)}", "|")
        bar = "".join(LOOKS[key][0] * cells for key, cells in segments)
        shown = ", ".join(legend)
        return "\n".join(
            filter(None, (self.title, budget, bar, textwrap.fill(shown, _WRAPPED) if with_sizes else shown))
        )

    def line(self, segments: Sequence[tuple[str, int]], text: str, mark: str) -> str:
        """Return the budget line above the bar, with its mark at the budget's end; empty where there is no budget."""
        inside = sum(cells for key, cells in segments if key != OUTSIDE)
        return "" if self.requested_bytes is None else f"{text:>{inside - (mark == '▼')}}{mark}"
