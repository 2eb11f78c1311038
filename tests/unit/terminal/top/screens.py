"""What rich draws of a renderable, as lines of text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.segment import Segment


def terminal(*, colours: bool = False) -> Console:
    """A terminal of letters alone in ASCII, or one with colours that knows Unicode."""
    return Console(
        file=io.TextIOWrapper(io.BytesIO(), "utf-8" if colours else "ascii"),
        color_system="truecolor" if colours else None, force_terminal=colours, no_color=not colours, _environ={},
    )  # fmt: skip


def segments(
    shown: RenderableType, width: int, height: int | None = None, *, colours: bool = False
) -> list[list[Segment]]:
    """The lines as rich's segments, each with its style; rich pads and cuts nothing of it."""
    console = terminal(colours=colours)
    options = (
        console.options.update(width=width).update_height(height) if height else console.options.update(width=width)
    )
    return list(Segment.split_lines(console.render(shown, options.reset_height() if height is None else options)))


def drawn(shown: RenderableType, width: int, height: int | None = None, *, colours: bool = False) -> list[str]:
    """The lines as text; none is longer than the width, and there are no more than the height."""
    lines = segments(shown, width, height, colours=colours)
    assert all(Segment.get_line_length(line) <= width for line in lines)
    assert height is None or len(lines) <= height
    return ["".join(segment.text for segment in line) for line in lines]
