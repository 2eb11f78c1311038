"""The verdict as `highwater status` prints it: at most eight lines, and what stands behind them. Pure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from highwater.diagnose.engine_verdict import worst_rank
from highwater.diagnose.rules.setup import NEEDS_SIDECAR
from highwater.diagnose.verdict import Deed, JudgedReport
from highwater.growth.words import growth_line
from highwater.http.findings import FoundFinding
from highwater.model.components import COMPONENT_NAMES, COMPONENTS
from highwater.model.rank import RankReading, names_text, rank_title
from highwater.model.report import Event, Report
from highwater.model.units import GIB, UNKNOWN, gib, gib_text, narrow_table, span_text
from highwater.process.errors import OK

_MOST_FINDINGS: Final = 6


def wrapped(text: str, width: int, *, indent: int = 0) -> str:
    """Return the text in lines of at most ``width`` columns, all but the first indented; no word is cut."""
    lines = textwrap.wrap(
        text,
        max(width, 40),
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def headline(report: JudgedReport) -> str:
    verdict = report.verdict
    return f"{verdict.state.replace('_', ' ').upper()}: {verdict.sentence}"


def status_text(
    report: JudgedReport, events: Sequence[Event], *, url: str, now: float, width: int, is_alone: bool = False
) -> str:
    """Return at most eight lines; ``is_alone``: the engine was asked at ``url`` itself, with no sidecar."""
    verdict = report.verdict
    page = "dashboard" if verdict.do is not None and verdict.do.path == verdict.runbook else verdict.runbook
    ways = [] if is_alone else [f"{url}/{page or 'dashboard'}"]
    ways += ["highwater status --why or --ranks"]
    ways += [f"highwater incidents {_incident(one)}" for one in events if one.kind == "incident"][:1]
    facts = {
        "worst": _worst(report),
        "grew": NEEDS_SIDECAR if is_alone else verdict.grew or "nothing that is known",
        "next": NEEDS_SIDECAR if is_alone else verdict.next or "nothing by itself",
        "do": _start_one(url) if is_alone else _deed(verdict.do, url),
        "step": verdict.step or "none is needed",
        "last": NEEDS_SIDECAR if is_alone else _last_act_text(events, now),
        "look": ", ".join(ways),
    }
    # Where all is well nobody needs the memory back: what could be given back is said in `next`.
    if verdict.exit_status == OK and not is_alone:
        del facts["do"]
    first = wrapped(headline(report), width)
    return "\n".join([first, *(wrapped(f"{name:<6} {fact}", width, indent=7) for name, fact in facts.items())])


def _start_one(engine_url: str) -> str:
    return f"highwater serve --engine-url {shlex.quote(engine_url)}: a sidecar knows the past, and gives memory back"


def _worst(report: Report) -> str:
    rank = worst_rank(report)
    if rank is None:
        return "no rank was read yet"
    waters = report.pressure_of(rank)
    acts = "as last read" if report.stale else "no rule watches it"
    if waters is not None and not report.stale:
        acts = f"acts at {gib_text(waters.high_free_bytes)}, stops at {gib_text(waters.low_free_bytes)}"
    return f"{rank.name}: {gib_text(rank.free_bytes)} free of {gib_text(rank.total_bytes)}; {acts}"


def _free(rank: RankReading) -> float:
    return float("inf") if rank.free_bytes is None else rank.free_bytes


def _deed(deed: Deed | None, url: str) -> str:
    if deed is None or deed.path is None:
        return "nothing" if deed is None else deed.text
    if deed.path == "memory/reclaim" and deed.body is not None:
        return f"{deed.text}: {shlex.join(['highwater', 'reclaim', *(deed.body.get('remedies') or ())])}"
    if deed.path.startswith("memory/incidents/"):
        return f"{deed.text}: highwater incidents {deed.path.rpartition('/')[2]}"
    return f"{deed.text}: {url}/{deed.path}"


def last_act(events: Sequence[Event]) -> Event | None:
    return next((one for one in events if one.kind == "reset" and one.result is not None), None)


def _last_act_text(events: Sequence[Event], now: float) -> str:
    """Return what was done last, by whom, why, and what came of it."""
    act = last_act(events)
    if act is None:
        return "none that the sidecar remembers"
    by = f"rule {act.rule}" if act.rule else act.trigger or "?"
    if act.caller is not None:
        by += f" from {act.caller.address or 'an unknown address'}"
    why = "" if act.why is None or act.why in act.summary else f". Why: {act.why}"
    return f"{span_text(max(now - act.at, 0.0))} ago by {by}: {act.summary}{why}"


def _incident(event: Event) -> str:
    return event.summary.removeprefix("incident ").partition(" ")[0].rstrip(":,")


def ranks_text(report: Report) -> str:
    """Return a row for each rank, the worst off first, equal ones in one; sizes in GiB."""
    if not report.ranks:
        return "no rank was read yet"
    rows: dict[tuple[str, ...], list[str]] = {}
    for rank in sorted(report.ranks, key=_free):
        sizes = (rank.total_bytes, rank.free_bytes, *(getattr(rank.components, name) for name in COMPONENT_NAMES))
        rows.setdefault(tuple(map(gib, sizes)), []).append(rank.label)
    return _folded(["of", "free"], rows)


def _folded(first: Sequence[str], rows: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    """Return the rows by their ranks, without columns of which nothing is known, in 80 columns."""
    parts = (component.title.replace("-", "- ").partition(" ") for component in COMPONENTS)
    titles = [("GiB", ""), *((name, "") for name in first), *((above, below) for above, _, below in parts)]
    named = [[names_text(labels), *sizes] for sizes, labels in rows.items()]
    known = [column for column in range(len(titles)) if any(row[column] != UNKNOWN for row in named)]
    lines = [[row[column] for column in known] for row in (*map(list, zip(*titles, strict=True)), *named)]
    return narrow_table(lines)


def why_text(report: Report, findings: Sequence[FoundFinding], width: int) -> str:
    """Return what `growth` and `explain` find: what grows, and each finding with the first thing to change."""
    lines = [f"grows  {growth_line(report.growth.series) or 'nothing was judged yet: that takes some minutes'}"]
    found = [one for one in findings if one.where in ("running", "start")]
    for one in islice(found, _MOST_FINDINGS):
        change = "".join(f"; {_first_sentence(advice.text)}" for advice in one.advice[:1])
        lines.append(f"why    {one.title}{change}")
    lines += [] if found else ["why    no known cause was found"]
    lines += [f"       and {len(found) - _MOST_FINDINGS} more"] if len(found) > _MOST_FINDINGS else []
    lines.append("look   highwater growth, highwater explain")
    return "\n".join(wrapped(line, width, indent=7) for line in lines)


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def since_text(mark: str, since: Any) -> str:  # noqa: ANN401 - JSON, cleaned
    """Return what changed since a mark, a row for each rank, equal ones in one."""
    ranks = since.get("ranks", []) if isinstance(since, dict) else []
    if not ranks:
        return f"nothing is known of what changed since {mark!r}: no rank was read then and now"
    rows: dict[tuple[str, ...], list[str]] = {}
    for rank in ranks:
        sizes = (rank.get("used_bytes"), *(rank.get("components", {}).get(name) for name in COMPONENT_NAMES))
        texts = tuple(UNKNOWN if size is None else f"{size / GIB:+.2f}" for size in sizes)
        rows.setdefault(texts, []).append(rank_title(rank.get("dp_rank"), rank.get("rank")))
    return f"since {mark!r}\n" + _folded(["used"], rows)
