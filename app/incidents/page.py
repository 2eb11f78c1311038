"""One incident as a page for a browser: it needs nothing but itself, runs nothing, and shows foreign text as text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from app.incidents.incident import Advice, Finding, Incident, LogMessage, RankEvidence
from app.incidents.latest import known_points
from app.incidents.plain import plain
from app.incidents.text import (
    KIND_WORDS,
    WEIGHT_WORDS,
    all_advice,
    duration,
    figure,
    happened,
    load,
    ranks_table,
    state,
)
from app.units import mib

LINE_WIDTH, LINE_HEIGHT = 640, 80

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 1rem 0 0; }
p, ul { margin: .3rem 0; } pre, code, td, th { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; background: #f5f6f8; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { padding: .1rem .7rem; text-align: right; border-top: 1px solid #dde1e6; }
td:first-child, th:first-child { text-align: left; }
div { border-left: 4px solid #9aa3ad; padding-left: .7rem; }
div.likely { border-color: #c0392b; } div.clue { border-color: #d9902f; }
.figures, .weight { color: #5b6570; font-size: 13px; }
svg { display: block; width: 100%; max-width: 640px; height: auto; background: #f5f6f8; }
"""
# No script, no image, no font, no frame, no form, nothing from elsewhere: this page's own style and no other.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; sandbox"
)


def incident_page(incident: Incident) -> str:
    """One incident as a whole HTML document. Serve it with ``CONTENT_SECURITY_POLICY``."""
    engine = incident.engine
    who = f"vLLM {engine.version or '(version unknown)'} {engine.model or ''} at {engine.url}: {engine.state}"
    facts = [("When", state(incident)), ("Engine", who), ("Load", load(incident)), ("Hint", engine.hint or "")]
    body = [
        f"<h1>{_text(KIND_WORDS.get(incident.kind, incident.kind))}: {_text(incident.id)}</h1>",
        f"<p><strong>{_text(incident.summary, 2000)}</strong></p>",
        *(f"<p>{name}: {_text(value)}</p>" for name, value in facts if value),
        *_section("What the log says", (_message(message) for message in incident.messages)),
        *_section("What the numbers say", (_finding(finding) for finding in incident.findings)),
        *_section("What to change", (_advice(advice) for advice in all_advice(incident))),
        *_section("Used bytes of each rank", (_line(rank) for rank in incident.ranks if known_points(rank))),
        *_section("The ranks", [_table(incident.ranks), *map(_rank, incident.ranks)] if incident.ranks else ()),
        *_section("What happened before", _lines(happened(incident.events))),
        *_section("What the policy decided", _lines(happened(incident.decisions))),
        *_section("Not known, or not kept", (f"<p>{_text(note)}</p>" for note in incident.notes)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(incident.id)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _text(text: str, most: int = 500) -> str:
    return escape(plain(text, most), quote=True)


def _section(title: str, parts: Iterable[str]) -> list[str]:
    parts = list(parts)
    return [f"<h2>{title}</h2>", *parts] if parts else []


def _lines(lines: Sequence[str]) -> list[str]:
    shown = "\n".join(escape(line.strip(), quote=True) for line in lines)
    return [f"<pre>{shown}</pre>"] if lines else []


def _message(message: LogMessage) -> str:
    often = f" ({message.count} lines)" if message.count > 1 else ""
    lines = "\n".join(_text(line) for line in message.lines)
    return f"<h3>{_text(message.title)}{often}</h3><p>{_text(message.meaning, 2000)}</p><pre>{lines}</pre>"


def _finding(finding: Finding) -> str:
    figures = ", ".join(_text(figure(name, value)) for name, value in finding.figures.items())
    weight = finding.weight if finding.weight in WEIGHT_WORDS else "note"
    return (
        f'<div class="{weight}"><h3>{_text(finding.title)} <span class="weight">{WEIGHT_WORDS[weight]}</span></h3>'
        f'<p>{_text(finding.text, 2000)}</p><p class="figures">{figures}</p></div>'
    )


def _advice(advice: Advice) -> str:
    return (
        f"<h3><code>{_text(advice.setting)}</code></h3><p>{_text(advice.change, 2000)}</p>"
        f"<p>Costs: {_text(advice.cost, 2000)}</p>"
    )


def _line(rank: RankEvidence) -> str:
    """Used bytes over time as one line, from the least to the most."""
    known = [(point.at, point.used_bytes) for point in known_points(rank) if point.used_bytes is not None]
    if not known:
        return ""
    start, end = known[0][0], known[-1][0]
    least, most = (pick(used for _, used in known) for pick in (min, max))
    across, up = (end - start) or 1.0, (most - least) or 1
    places = " ".join(
        f"{(at - start) / across * LINE_WIDTH:.1f},{(1 - (used - least) / up) * (LINE_HEIGHT - 8) + 4:.1f}"
        for at, used in known
    )
    span = f"{mib(least)} to {mib(most)} MiB in {duration(end - start)}"
    told = f"{plain(rank.name)}: {span}, {mib(known[-1][1])} at the end"
    return (
        f'<h3>{escape(told)}</h3><svg viewBox="0 0 {LINE_WIDTH} {LINE_HEIGHT}" role="img" aria-label="{escape(told)}">'
        f'<polyline fill="none" stroke="#2b6cb0" stroke-width="1.5" points="{places}"/></svg>'
    )


def _table(ranks: Sequence[RankEvidence]) -> str:
    headers, rows = ranks_table(ranks)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _rank(rank: RankEvidence) -> str:
    lines = [plain(rank.doing)] if rank.doing else []
    lines += [f"  {plain(line)}" for line in rank.stack]
    lines += [
        f"{mib(entry.bytes):>10} MiB  {plain(entry.residency or '', 10)}  {plain(entry.mm_hash, 64)}"
        for entry in rank.entries
    ]
    shown = "\n".join(escape(line, quote=True) for line in lines)
    return f"<h3>{_text(rank.name)}</h3><pre>{shown}</pre>" if lines else ""
