"""Bars, sparklines and charts out of characters. Numbers go in, rich texts come out; decides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from highwater.accounting.components import COMPONENTS


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What is drawn with.

    Attributes:
        levels: From empty to full, by which a sparkline tells heights.
        free: A cell of a bar that nothing holds.
        mark: High water.
        line: For section titles.
        dot: For states.
        reset: Beneath a chart, where something was reset.
    """

    levels: str
    free: str
    mark: str
    line: str
    dot: str
    reset: str


UNICODE = Glyphs(levels=" ▁▂▃▄▅▆▇█", free="·", mark="┃", line="─", dot="●", reset="▲")
ASCII = Glyphs(levels=" .:-=+*#@", free=".", mark="|", line="-", dot="*", reset="^")

# Component, letter and colour. The letter draws the bar where there is no colour, and stands in every legend.
PARTS: tuple[tuple[str, str, str], ...] = tuple((row.name, row.letter, row.terminal) for row in COMPONENTS)


@dataclass(frozen=True, slots=True)
class Pen:
    """How this terminal can be drawn on.

    Attributes:
        glyphs: Unicode's, or ASCII's.
        colour: Whether colours are seen; else parts are told apart by their letters.
    """

    glyphs: Glyphs = UNICODE
    colour: bool = True

    def stacked(self, sizes: Sequence[int | None], total: float, width: int, mark: float | None = None) -> Text:
        """A bar of ``width`` cells: each part in its colour, what is free as dots, high water as a line.

        Args:
            sizes: Of the parts, in the order of ``PARTS``.
            total: What the whole bar stands for.
            width: In cells.
            mark: Where high water stands, as a share of the total.
        """
        ends, end = [], 0.0
        for size in sizes:
            end += size or 0
            ends.append(end)
        bar = Text()
        marked = None if mark is None else min(int(mark * width), width - 1)
        for cell in range(width):
            at = (cell + 0.5) * total / width
            part = next((index for index, end in enumerate(ends) if at < end), None)
            if cell == marked:
                bar.append(self.glyphs.mark, "bold red" if part is not None else "bold yellow")
            elif part is None:
                bar.append(self.glyphs.free, "bright_black")
            else:
                _, letter, colour = PARTS[part]
                bar.append(self.glyphs.levels[-1] if self.colour else letter, colour)
        return bar

    def legend(self, part: int) -> Text:
        """The part's colour and letter, as its bar shows it."""
        _, letter, colour = PARTS[part]
        return Text(f"{self.glyphs.levels[-1]}" if self.colour else letter, colour)

    def spark(self, values: Sequence[float | None], width: int, *, least_range: float, style: str = "") -> Text:
        """A sparkline of the newest ``width`` values, from their lowest to their highest.

        Args:
            values: Oldest first; None leaves a gap.
            width: In cells; fewer values stand at the right.
            least_range: Less movement than this is drawn as such, and not blown up to full height.
            style: Its colour.
        """
        shown = list(values)[-width:] if width > 0 else []
        known = [value for value in shown if value is not None]
        low = min(known, default=0.0)
        reach = max(max(known, default=0.0) - low, least_range) or 1.0
        levels = self.glyphs.levels
        text = "".join(
            " " if value is None else levels[1 + round((value - low) / reach * (len(levels) - 2))] for value in shown
        )
        return Text(text.rjust(max(width, 0)), style)

    def chart(
        self, values: Sequence[float | None], width: int, height: int, *, low: float, high: float, style: str = ""
    ) -> list[Text]:
        """An area of ``height`` lines over time, the highest line first; fewer values than cells stand at the right."""
        shown: list[float | None] = [None] * max(width - len(values), 0)
        shown += values[-width:]
        levels, steps = self.glyphs.levels, len(self.glyphs.levels) - 1
        reach = (high - low) or 1.0
        # The lowest value is still seen as one step.
        filled = [None if value is None else 1 + (value - low) / reach * (height * steps - 1) for value in shown]
        lines = []
        for row in reversed(range(height)):
            cells = (0 if fill is None else math.floor(min(max(fill - row * steps, 0), steps)) for fill in filled)
            lines.append(Text("".join(levels[cell] for cell in cells), style))
        return lines


def binned(
    points: Sequence[tuple[float, float | None]], since: float, until: float, bins: int, *, gap_seconds: float
) -> list[float | None]:
    """The last value of each of ``bins`` equal spans of time; a span without one repeats the value before it.

    Args:
        points: ``(at, value)``, oldest first.
        since: Where the first span begins.
        until: Where the last one ends.
        bins: How many.
        gap_seconds: A value is not repeated for longer: then nobody knows.
    """
    made: list[float | None] = [None] * max(bins, 0)
    if bins <= 0 or until <= since:
        return made
    width = (until - since) / bins
    for at, value in points:
        if since <= at <= until:
            made[min(int((at - since) / width), bins - 1)] = value
    last, repeated = None, 0
    for index, value in enumerate(made):
        repeated = 0 if value is not None else repeated + 1
        last = value if value is not None else last
        if value is None and repeated * width <= max(gap_seconds, width):
            made[index] = last
    return made
