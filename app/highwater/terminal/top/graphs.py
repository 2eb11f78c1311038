"""Bars, sparklines and charts out of characters, as rich's renderables: each fills the width that a table leaves it.

Rich has none of these: its progress bar has one part, and here several parts share a bar with a mark.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from highwater.model.components import COMPONENTS

# Times and values, oldest first; None: not known.
Points: TypeAlias = Sequence[tuple[float, float | None]]

# A value is repeated for so long while no new one comes: afterwards it is not known.
GAP_SECONDS = 20.0


class Glyphs(NamedTuple):
    """The characters of a terminal: ``levels`` from empty to full, the others by what they mark."""

    levels: str
    free: str
    mark: str
    dot: str
    reset: str
    bar: str


_UNICODE = Glyphs(levels=" ▁▂▃▄▅▆▇█", free="·", mark="┃", dot="●", reset="▲", bar="▌")
_ASCII = Glyphs(levels=" .:-=+*#@", free=".", mark="|", dot="*", reset="^", bar="")


def glyphs_of(options: ConsoleOptions) -> Glyphs:
    return _ASCII if options.ascii_only else _UNICODE


def component_cell(console: Console, options: ConsoleOptions, index: int) -> Text:
    component = COMPONENTS[index]
    has_colours = console.color_system is not None and not console.no_color
    return Text(glyphs_of(options).levels[-1] if has_colours else component.letter, component.terminal)


@dataclass(frozen=True, slots=True)
class StackedBar:
    """A bar with each component in its colour, free memory as dots, and high water, a share of the total, as a line."""

    sizes: Sequence[int | None]
    total: float
    mark: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        ends = list(accumulate(size or 0 for size in self.sizes))
        parts = [bisect_right(ends, (cell + 0.5) * self.total / width) for cell in range(width)]
        marked = -1 if self.mark is None else min(int(self.mark * width), width - 1)
        glyphs, cells = glyphs_of(options), [component_cell(console, options, part) for part in range(len(ends))]
        bar = Text(no_wrap=True)
        for (part, is_mark), run in groupby((part, cell == marked) for cell, part in enumerate(parts)):
            is_used, count = part < len(ends), len(list(run))
            if is_mark:
                bar.append(glyphs.mark, "bold red" if is_used else "bold yellow")
            elif is_used:
                bar.append(cells[part].plain * count, cells[part].style)
            else:
                bar.append(glyphs.free * count, "bright_black")
        yield bar


@dataclass(frozen=True, slots=True)
class AreaChart:
    """An area over time (of one line: a sparkline); movement below ``least_range`` is not drawn at full height."""

    points: Points
    since: float
    until: float
    least_range: float  # so that noise looks like noise
    height: int = 1
    style: str = ""

    @property
    def bounds(self) -> tuple[float, float]:
        known = [value for at, value in self.points if value is not None and self.since <= at <= self.until]
        low = min(known, default=0.0)
        return low, max(max(known, default=0.0), low + self.least_range)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        levels = glyphs_of(options).levels
        steps = len(levels) - 1
        (low, high), values = self.bounds, binned(self.points, self.since, self.until, options.max_width)
        # The lowest value is still seen as one step.
        reach = (self.height * steps - 1) / ((high - low) or 1.0)
        filled = [0 if value is None else 1 + round((value - low) * reach) for value in values]
        for row in reversed(range(self.height)):
            cells = (levels[min(max(fill - row * steps, 0), steps)] for fill in filled)
            yield Text("".join(cells), self.style, no_wrap=True)


@dataclass(frozen=True, slots=True)
class Marks:
    times: Iterable[float]
    since: float
    until: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        span = (self.until - self.since) or 1.0
        shares = ((at - self.since) / span for at in self.times if self.since <= at <= self.until)
        marked = {min(int(share * width), width - 1) for share in shares}
        cells = (glyphs_of(options).reset if cell in marked else " " for cell in range(width))
        yield Text("".join(cells), "green", no_wrap=True)


def binned(points: Points, since: float, until: float, bins: int) -> list[float | None]:
    """Return the last value of each of ``bins`` equal spans; without a value the last one is repeated for a while."""
    values: list[float | None] = [None] * max(bins, 0)
    if bins <= 0 or until <= since:
        return values
    width = (until - since) / bins
    for at, value in points:
        if since <= at <= until:
            values[min(int((at - since) / width), bins - 1)] = value
    longest, last, repeated = math.floor(max(GAP_SECONDS / width, 1.0)), None, 0
    for index, value in enumerate(values):
        repeated = 0 if value is not None else repeated + 1
        last = value if value is not None else last
        if repeated <= longest:
            values[index] = last
    return values
