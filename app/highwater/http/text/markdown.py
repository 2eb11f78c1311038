"""Reports as Markdown, and as an HTML page.

Every text is shown as text, whoever wrote it: ``text`` escapes our own, and ``code`` shows a foreign one (a model's
name, a line of a log) as code, without links, mentions or emphasis. The page runs nothing and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Final

from markdown_it import MarkdownIt
from tabulate import tabulate

from highwater.model.components import component_title
from highwater.model.units import size_text, span_text
from highwater.process.untrusted import plain

# Underscores within a word are no emphasis in Markdown.
_SPECIAL: Final = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# `@name` would notify somebody, `#1` link another issue; an invisible joiner prevents both.
_CALLS: Final = re.compile(r"([@#])(?=\w)")
# The default theme's first line can hardly be seen on white.
_MERMAID: Final = (
    '%%{init: {"xyChart": {"width": 860, "height": 340}, '
    '"themeVariables": {"xyChart": {"plotColorPalette": "#d9622b"}}}}%%'
)
_CHART: Final = re.compile(
    r'title "(?P<title>[^"]*)".*"MiB" (?P<low>\d+) --> (?P<high>\d+).*line \[(?P<line>[^]]+)\]', re.DOTALL
)
_WIDTH, _HEIGHT = 860, 240
CHART_POINTS = 48

STYLE: Final = f"\n{Path(__file__).with_name('page.css').read_text('utf-8')}"
# Only this page's own style: no script, image, font, frame or form, and nothing from elsewhere.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'"
)


# --- pieces of Markdown ---


def text(words: str) -> str:
    safe = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
    return _CALLS.sub("\\1\u2060", _SPECIAL.sub(lambda found: "\\" + found[0], safe))


def code(words: str, most: int = 500) -> str:
    """Return a foreign text as a code span that it cannot leave, in one line, cut to ``most`` letters."""
    shown = plain(words, most)
    if not shown:
        return ""
    fence = _fence(shown, 1)
    padded = f" {shown} " if shown.startswith("`") or shown.endswith("`") else shown
    return f"{fence}{padded}{fence}"


def block(lines: str, language: str = "") -> str:
    fence = _fence(lines, 3)
    return f"{fence}{language}\n{lines}\n{fence}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Return a table of cells that are Markdown already.

    The columns with these indices hold words; the others hold numbers and are set to the right.
    """
    align = ["left" if index in left else "right" for index in range(len(headers))]
    # A row is cut at pipes before anything else is read, code included.
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row] for row in (headers, *rows)]
    return tabulate(cells[1:], cells[0], tablefmt="pipe", colalign=align if rows else None, disable_numparse=True)


def section(title: str, parts: Iterable[str]) -> list[str]:
    filled = [part for part in parts if part]
    return [f"## {title}", *filled] if filled else []


def chart(title: str, points: Sequence[tuple[float, float]]) -> str:
    """Return values in MiB over time as a mermaid chart, which the page draws as a line.

    The points are times in seconds and values, oldest first, over some time; the title must be our own words.
    """
    seconds, values = points[-1][0] - points[0][0], evenly(points, CHART_POINTS)
    low, high = min(values), max(values)
    room = max((high - low) * 0.1, 1.0)
    lines = [
        _MERMAID,
        "xychart-beta",
        f'    title "{title}"',
        f'    x-axis "seconds" 0 --> {seconds:.0f}',
        f'    y-axis "MiB" {max(low - room, 0):.0f} --> {high + room:.0f}',
        f"    line [{', '.join(f'{value:.1f}' for value in values)}]",
    ]
    return block("\n".join(lines), "mermaid")


def evenly(points: Sequence[tuple[float, float]], most: int) -> list[float]:
    """Return at most so many values, evenly spaced: the highest of each step; an empty step repeats the one before."""
    count, start, end = min(most, len(points)), points[0][0], points[-1][0]
    steps: list[float | None] = [None] * count
    for at, value in points:
        index = min(int((at - start) / (end - start) * count), count - 1)
        steps[index] = max(value, steps[index] or value)
    filled = [points[0][1]]
    for step in steps:
        filled.append(filled[-1] if step is None else step)
    return filled[1:]


def _fence(words: str, least: int) -> str:
    return "`" * max(max(map(len, re.findall("`+", words)), default=0) + 1, least)


# --- numbers as text ---


def moment(at: float | None) -> str:
    if at is None:
        return "-"
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # out of the calendar's range
        return f"{at:g}"


def figure(name: str, value: float | str | None) -> str:
    name = "full_in_seconds" if name == "seconds_to_full" else name
    title, shown = name.replace("_", " "), str(value)
    if name == "rank":
        return plain(shown)
    if value is None or isinstance(value, str):
        shown = "not known" if value is None else value
    elif name.endswith("_bytes"):
        title, shown = component_title(name), size_text(value)
    elif name.endswith("bytes_per_second"):
        title, shown = "slope", f"{size_text(value * 60, signed=True)} a minute"
    elif name.endswith("_ratio"):
        title, shown = name.removesuffix("_ratio").replace("_", " "), f"{value:.1%}"
    elif name.endswith("_seconds"):
        title, shown = name.removesuffix("_seconds").replace("_", " "), span_text(value)
    return plain(f"{title} {shown}")


# --- the page ---


def page(markdown: str, *, title: str, above: str = "") -> str:
    """Return a whole page; ``above`` is HTML of our own that stands before the report."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(CONTENT_SECURITY_POLICY, quote=True)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(plain(title))}</title><style>{STYLE}</style></head>\n<body>\n{above}"
        f"{_MARKDOWN.render(markdown)}"
        "</body></html>\n"
    )


def _fence_drawn(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:  # noqa: ANN401 - the library's
    token = tokens[index]
    shown = _CHART.search(token.content) if token.info == "mermaid" else None
    if shown is None:
        as_code: str = renderer.fence(tokens, index, options, env)
        return as_code
    low, high = int(shown["low"]), int(shown["high"])
    values = [float(value) for value in shown["line"].split(",")]
    points = " ".join(
        f"{at / max(len(values) - 1, 1) * _WIDTH:.1f},{(high - value) / (high - low) * _HEIGHT:.1f}"
        for at, value in enumerate(values)
    )
    label = escape(f"{shown['title']}: {min(values):,.0f} to {max(values):,.0f}", quote=True)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"><polyline points="{points}"/>'
        f'<text x="6" y="16">{high:,} MiB</text><text x="6" y="{_HEIGHT - 6}">{low:,} MiB</text></svg>\n'
    )


def _cell_opened(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:  # noqa: ANN401 - the library's
    """Return a table cell aligned by a class: the page allows no style of an element's own."""
    attributes = tokens[index].attrs
    if attributes.pop("style", "") == "text-align:left":
        attributes["class"] = "left"
    opened: str = renderer.renderToken(tokens, index, options, env)
    return opened


# The only HTML in a report is our own block (`<details>`): `text` escapes every other `<`.
_MARKDOWN: Final = MarkdownIt("commonmark", {"html": True}).enable("table")
_MARKDOWN.disable(["html_inline", "link", "image", "autolink", "reference"])
_MARKDOWN.add_render_rule("fence", _fence_drawn)
_MARKDOWN.add_render_rule("th_open", _cell_opened)
_MARKDOWN.add_render_rule("td_open", _cell_opened)
