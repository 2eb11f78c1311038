"""A document as one HTML file: it needs nothing but itself, runs nothing, fetches nothing, and shows text as text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from app.experiment.chart import svg
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
from app.experiment.report import NOTHING
from app.units import UNKNOWN

WEIGHTS: Final[Mapping[str, str]] = {"act": "act on it", "look": "worth a look", "note": "good to know"}

_NOTHING: Final = frozenset({NOTHING, UNKNOWN})
_STYLE: Final = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
# No script, no image, no font, no frame, no form, nothing from elsewhere: this page's own style and no other.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'"
)


def page(document: Document) -> str:
    """The whole file."""
    title = _plain(document.title)
    body = [
        f"<header><h1>{_text(title)}</h1>",
        f'<p class="subtitle">{_inline(document.subtitle)}</p></header>',
        "<main>",
        *map(_block, document.blocks),
        "</main>",
        f"<footer>{_text(document.made_by)}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(CONTENT_SECURITY_POLICY, quote=True)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(text, quote=True)


def _plain(part: Inline) -> str:
    return part.text if isinstance(part, Foreign) else part


def _cell(part: Inline) -> str:
    return f"<code>{_text(part.text)}</code>" if isinstance(part, Foreign) else _text(part)


def _inline(parts: Iterable[Inline]) -> str:
    return "".join(map(_cell, parts))


def _block(block: Block) -> str:
    return _RENDERERS[type(block)](block)


def _heading(block: Heading) -> str:
    return f"<h2>{_text(block.text)}</h2>"


def _paragraph(block: Paragraph) -> str:
    return f"<p>{_inline(block.parts)}</p>"


def _figures(block: Figures) -> str:
    items = (
        f"<li><span>{_text(title)}</span><strong>{_text(number)}</strong><span>{_text(word)}</span></li>"
        for title, number, word in block.items
    )
    return f'<ul class="figures">{"".join(items)}</ul>'


def _facts(block: Facts) -> str:
    rows = (f"<dt>{_cell(name)}</dt><dd>{_cell(value)}</dd>" for name, value in block.rows)
    return f"<dl>{''.join(rows)}</dl>"


def _command(block: Command) -> str:
    return f"<pre>{_text(block.text)}</pre>"


def _table(block: Table) -> str:
    head = "".join(
        f'<th scope="col"{_left(block, index)}>{_head(cell)}</th>' for index, cell in enumerate(block.headers)
    )
    body = "".join(_row(block, index, row) for index, row in enumerate(block.rows))
    caption = _text(block.caption)
    table = (
        # On a narrow screen a table is scrolled by itself, by keys too.
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    if not block.folded:
        return table
    return f"<details><summary>{caption}</summary>{table}</details>"


def _row(block: Table, index: int, row: Sequence[Inline]) -> str:
    strong = ' class="strong"' if index in block.strong else ""
    colour = block.colours[index] if index < len(block.colours) else ""
    swatch = f'<span class="swatch c-{_text(colour)}"></span>' if colour and colour != "used_bytes" else ""
    first, *others = row
    cells = "".join(f"<td{_class(block, at, cell)}>{_cell(cell)}</td>" for at, cell in enumerate(others, 1))
    return f'<tr{strong}><th scope="row" class="left">{swatch}{_cell(first)}</th>{cells}</tr>'


def _head(cell: Inline) -> str:
    # A remedy's name is longer than what stands below it.
    return _cell(cell).replace("_", "_<wbr>")


def _class(block: Table, index: int, cell: Inline) -> str:
    # What did not move steps back behind what did.
    return ' class="nothing"' if cell in _NOTHING else _left(block, index)


def _left(block: Table, index: int) -> str:
    return ' class="left"' if index in block.wide else ""


def _findings(block: Findings) -> str:
    return "".join(map(_finding, block.findings)) or "<p>Nothing that is known stands out.</p>"


def _finding(finding: Finding) -> str:
    settings = ", ".join(f"<code>{_text(each.setting)}</code>" for each in finding.advice)
    see = f'<p class="see">See: {settings}</p>' if settings else ""
    return (
        f'<article class="{finding.weight}"><h3>{_text(finding.sentence)} '
        f'<span class="weight">{WEIGHTS[finding.weight]}</span></h3><p>{_text(finding.text)}</p>{see}</article>'
    )


def _changes(block: Changes) -> str:
    items = (
        f'<li class="change"><code>{_text(each.setting)}</code><p>{_text(each.change)}</p>'
        f'<p class="cost">Costs: {_text(each.cost)}</p></li>'
        for each in block.advice
    )
    return f'<ul class="changes">{"".join(items)}</ul>'


def _timeline(block: Timeline) -> str:
    legend = "".join(
        f'<li><span class="swatch c-{_text(line.component)}"></span>{_text(line.name)}</li>'
        for line in reversed(block.lines)
    )
    key = " · ".join(f"{number} {name}" for number, name in enumerate(block.key, 1))
    seconds = f"{block.seconds:,.0f} s from left to right, MiB"
    return (
        f'<figure><figcaption>{_text(block.caption)}</figcaption><ul class="legend">{legend}</ul>{svg(block)}'
        f'<p class="key">{_text(key)}{" · " if key else ""}{_text(seconds)}</p></figure>'
    )


_RENDERERS: Final[Mapping[type, Callable[[Any], str]]] = {
    Heading: _heading,
    Paragraph: _paragraph,
    Figures: _figures,
    Facts: _facts,
    Table: _table,
    Command: _command,
    Findings: _findings,
    Changes: _changes,
    Timeline: _timeline,
}
