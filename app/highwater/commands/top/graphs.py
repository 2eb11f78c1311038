"""Bars, sparklines and charts out of characters, as rich's renderables: each fills the width that a table leaves it.

Rich has none of these: its progress bar has one part, and here several parts share a bar with a mark.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from highwater.accounting.components import COMPONENTS

# When, and how much; None is what is not known. Oldest first.
Points: TypeAlias = Sequence[tuple[float, float | None]]

# A value is repeated for so long while no new one comes: after that nobody knows.
GAP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a terminal.

    Attributes:
        levels: From empty to full, by which a sparkline shows heights.
        free: A cell of a bar that nothing holds.
        mark: High water.
        dot: Stands before the engine's state.
        reset: Beneath a chart, where something was reset.
    """

    levels: str
    free: str
    mark: str
    dot: str
    reset: str


_UNICODE = Glyphs(levels=" ▁▂▃▄▅▆▇█", free="·", mark="┃", dot="●", reset="▲")
_ASCII = Glyphs(levels=" .:-=+*#@", free=".", mark="|", dot="*", reset="^")


def glyphs_of(options: ConsoleOptions) -> Glyphs:
    """Return the characters that this terminal can show."""
    return _ASCII if options.ascii_only else _UNICODE


def component_cell(console: Console, options: ConsoleOptions, index: int) -> Text:
    """Return one cell of a component: in its colour, or its letter where the terminal has no colours."""
    component = COMPONENTS[index]
    has_colours = console.color_system is not None and not console.no_color
    return Text(glyphs_of(options).levels[-1] if has_colours else component.letter, component.terminal)


@dataclass(frozen=True, slots=True)
class StackedBar:
    """Each part in its colour, free memory as dots, high water as a line.

    Attributes:
        sizes: Of the components, in their order.
        total: The size that the whole bar stands for.
        mark: The place of high water, as a share of the total.
    """

    sizes: Sequence[int | None]
    total: float
    mark: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
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
    """An area over time, from the lowest value to the highest; of one line it is a sparkline.

    Attributes:
        points: The values over time.
        since: The time at its left end.
        until: The time at its right end.
        least_range: Less movement than this is not drawn at full height, so that noise looks like noise.
        height: In lines.
        style: Its colour.
    """

    points: Points
    since: float
    until: float
    least_range: float
    height: int = 1
    style: str = ""

    @property
    def bounds(self) -> tuple[float, float]:
        """The values at the lower and at the upper end."""
        known = [value for at, value in self.points if value is not None and self.since <= at <= self.until]
        low = min(known, default=0.0)
        return low, max(max(known, default=0.0), low + self.least_range)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it, the highest line first."""
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
    """A line with a character at each of some times.

    Attributes:
        times: The times.
        since: The time at its left end.
        until: The time at its right end.
    """

    times: Iterable[float]
    since: float
    until: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
        width = options.max_width
        cells = [" "] * width
        for at in self.times:
            if self.since <= at <= self.until:
                share = (at - self.since) / ((self.until - self.since) or 1.0)
                cells[min(int(share * width), width - 1)] = glyphs_of(options).reset
        yield Text("".join(cells), "green", no_wrap=True)


def binned(points: Points, since: float, until: float, bins: int) -> list[float | None]:
    """Return the last value of each of ``bins`` equal spans of time; one without a value repeats the one before it.

    Args:
        points: The values over time.
        since: The beginning of the first span.
        until: The end of the last one.
        bins: The number of spans.
    """
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
