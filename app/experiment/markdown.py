"""A document as GitHub's Markdown: tables, a mermaid chart, and every text shown as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from app.experiment.document import (
    Block,
    Changes,
    Command,
    Document,
    Facts,
    Figures,
    Findings,
    Foreign,
    Heading,
    Inline,
    Paragraph,
    Table,
    Timeline,
)
from app.experiment.findings import Finding
from app.experiment.page import WEIGHTS

CHART_POINTS = 48
# Letters within a word keep their underscores: Markdown sees no emphasis there.
_SPECIAL: Final = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# `@name` would call somebody, `#1` link another issue; an invisible joiner between keeps both from it.
_CALLS: Final = re.compile(r"([@#])(?=\w)")
# The default theme's first line can hardly be seen on white.
_MERMAID: Final = (
    '%%{init: {"xyChart": {"width": 860, "height": 340}, '
    '"themeVariables": {"xyChart": {"plotColorPalette": "#d9622b"}}}}%%'
)


def markdown(document: Document, line: tuple[str, float, Sequence[float]] | None = None) -> str:
    """The whole file.

    Args:
        document: What to say.
        line: The fullest rank's used bytes over time, evenly spaced, for the chart: its name, the seconds, MiB.
    """
    title = document.title.text if isinstance(document.title, Foreign) else document.title
    parts = [f"# {_text(title)}", _inline(document.subtitle)]
    charted = False
    for block in document.blocks:
        if isinstance(block, Timeline):
            if line is not None and not charted:
                charted = True
                parts.append(_chart(*line, key=block.key))
            continue
        parts.append(_block(block))
    return "\n\n".join([*(part for part in parts if part), "---", _text(document.made_by)]) + "\n"


def _text(text: str) -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = _SPECIAL.sub(lambda found: "\\" + found[0], safe)
    return _CALLS.sub("\\1\u2060", safe).replace("\n", " ")


def _code(text: str) -> str:
    """A code span that its text cannot leave."""
    if not text:
        return ""
    run = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (run + 1)
    padded = f" {text} " if text.startswith("`") or text.endswith("`") else text
    return f"{fence}{padded}{fence}"


def _cell(part: Inline) -> str:
    return _code(part.text) if isinstance(part, Foreign) else _text(part)


def _inline(parts: Iterable[Inline]) -> str:
    return "".join(map(_cell, parts))


def _in_table(part: Inline) -> str:
    # A table's cells are cut at pipes before anything else is read, code spans included.
    return _code(part.text).replace("|", "\\|") if isinstance(part, Foreign) else _text(part)


def _block(block: Block) -> str:
    return _RENDERERS[type(block)](block)


def _heading(block: Heading) -> str:
    return f"## {_text(block.text)}"


def _paragraph(block: Paragraph) -> str:
    return _inline(block.parts)


def _figures(block: Figures) -> str:
    rows = [[f"**{_text(number)}**" for _, number, _ in block.items], [_text(word) for _, _, word in block.items]]
    return _grid([_text(title) for title, _, _ in block.items], rows, left=frozenset(range(len(block.items))))


def _facts(block: Facts) -> str:
    return "\n".join(f"- {_cell(name)}: {_cell(value)}" for name, value in block.rows)


def _command(block: Command) -> str:
    run = max(map(len, re.findall("`+", block.text)), default=0)
    fence = "`" * max(run + 1, 3)
    return f"{fence}sh\n{block.text}\n{fence}"


def _table(block: Table) -> str:
    rows = [
        [f"**{_in_table(cell)}**" if index in block.strong else _in_table(cell) for cell in row]
        for index, row in enumerate(block.rows)
    ]
    grid = _grid([_in_table(cell) for cell in block.headers], rows, left=block.wide)
    if block.folded:
        return f"<details><summary>{_text(block.caption)}</summary>\n\n{grid}\n\n</details>"
    return f"{_text(block.caption)}:\n\n{grid}"


def _grid(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: frozenset[int]) -> str:
    rule = [":--" if index in left else "--:" for index in range(len(headers))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, rule, *rows))


def _findings(block: Findings) -> str:
    return "\n".join(map(_finding, block.findings)) or "Nothing that is known stands out."


def _finding(finding: Finding) -> str:
    settings = ", ".join(_code(each.setting) for each in finding.advice)
    see = f" See: {settings}." if settings else ""
    head = f"- **{_text(finding.sentence)}** ({WEIGHTS[finding.weight]})."
    return f"{head} {_text(finding.text)}{see}"


def _changes(block: Changes) -> str:
    return "\n".join(
        f"- {_code(each.setting)}: {_text(each.change)} *Costs:* {_text(each.cost)}" for each in block.advice
    )


def _chart(name: str, seconds: float, values: Sequence[float], *, key: Sequence[str]) -> str:
    low, high = min(values), max(values)
    room = max((high - low) * 0.1, 1.0)
    lines = [
        "```mermaid",
        _MERMAID,
        "xychart-beta",
        f'    title "MiB in use, {name}"',
        f'    x-axis "seconds" 0 --> {seconds:.0f}',
        f'    y-axis "MiB" {max(low - room, 0):.0f} --> {high + room:.0f}',
        f"    line [{', '.join(f'{value:.1f}' for value in values)}]",
        "```",
    ]
    return "\n".join(lines) + f"\n\nThe moments in it: {_text(', '.join(key))}. The axis upwards does not begin at 0."


_RENDERERS: Final[Mapping[type, Callable[[Any], str]]] = {
    Heading: _heading,
    Paragraph: _paragraph,
    Figures: _figures,
    Facts: _facts,
    Table: _table,
    Command: _command,
    Findings: _findings,
    Changes: _changes,
}
