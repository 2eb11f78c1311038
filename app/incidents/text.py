"""Incidents for a terminal. Formats, and decides nothing; every text that is not ours is made plain first."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from app.attribution import COMPONENTS
from app.incidents.incident import Advice, Figure, Finding, Happened, Headline, Incident, RankEvidence
from app.incidents.latest import Latest, latest
from app.incidents.plain import plain
from app.table import component_title, table
from app.units import mib

WIDTH = 100
KIND_WORDS: Mapping[str, str] = {
    "died": "died",
    "hung": "hung",
    "out_of_memory": "out of memory",
    "start_failed": "start failed",
}
WEIGHT_WORDS: Mapping[str, str] = {"likely": "most likely", "clue": "a clue", "note": "good to know"}
_INDENT = "   "


def moment(at: float | None) -> str:
    """Unix seconds as UTC, to the second."""
    if at is None:
        return "-"
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # of no year that there is
        return f"{at:g}"


def duration(seconds: float) -> str:
    """Seconds as an operator says them."""
    if not math.isfinite(seconds):
        return "an unknown time"
    whole = max(int(seconds), 0)
    if whole < 120:  # noqa: PLR2004 - up to two minutes in seconds
        return f"{whole} s"
    if whole < 7200:  # noqa: PLR2004 - up to two hours in minutes
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def figure(name: str, value: Figure) -> str:
    """A number with its name, in the unit that the name tells."""
    title, shown = name.replace("_", " "), str(value)
    if name == "rank":
        return plain(shown)
    if value is None or isinstance(value, str):
        shown = "not known" if value is None else value
    elif name.endswith("_bytes"):
        title, shown = component_title(name), f"{mib(value)} MiB"
    elif name.endswith("bytes_per_second"):
        title, shown = "slope", f"{mib(value * 60, signed=True)} MiB a minute"
    elif name.endswith("_ratio"):
        title, shown = name.removesuffix("_ratio").replace("_", " "), f"{value:.1%}"
    elif name.endswith("_seconds"):
        title, shown = name.removesuffix("_seconds").replace("_", " "), f"{value:.1f} s"
    return plain(f"{title} {shown}")


def state(headline: Headline | Incident) -> str:
    """Since when, how often, until when."""
    parts = [moment(headline.at)]
    if headline.count > 1:
        parts.append(f"{headline.count} times until {moment(headline.last_at)}")
    if headline.ended_at is None:
        parts.append("not ended")
    else:
        lasted = "" if headline.at is None else f" (after {duration(headline.ended_at - headline.at)})"
        parts.append(f"ready again {moment(headline.ended_at)}{lasted}")
    return ", ".join(parts)


def all_advice(incident: Incident) -> tuple[Advice, ...]:
    """Every piece of advice once: of the log's messages, then of the numbers, the weightiest first; not of notes."""
    given = [advice for message in incident.messages for advice in message.advice]
    given += [advice for finding in incident.findings if finding.weight != "note" for advice in finding.advice]
    return tuple(dict.fromkeys(given))


def headlines_text(headlines: Sequence[Headline], *, problem: str | None = None) -> str:
    """The list, newest first."""
    lines = [f"problem: {plain(problem)}", ""] if problem else []
    if not headlines:
        return "\n".join([*lines, "no incidents"]) + "\n"
    for headline in headlines:
        lines.append(plain(headline.id))
        if headline.problem:
            lines += [f"{_INDENT}it {plain(headline.problem)}", ""]
            continue
        lines += [f"{_INDENT}{state(headline)}", *_wrapped(headline.summary), ""]
    return "\n".join(lines)


def incident_text(incident: Incident) -> str:
    """One incident as an operator reads it at a terminal."""
    engine = incident.engine
    who = f"vLLM {engine.version or '(version unknown)'} {engine.model or ''}".rstrip()
    parts: list[str] = [
        plain(incident.id),
        *_wrapped(incident.summary, indent=""),
        "",
        f"when    {state(incident)}",
        f"engine  {plain(who)} at {plain(engine.url)}: {plain(engine.state)}",
        f"load    {load(incident)}",
    ]
    if engine.hint:
        parts.append(f"hint    {plain(engine.hint)}")
    parts += _section("What the log says", _messages(incident))
    parts += _section("What the numbers say", _findings(incident.findings))
    parts += _section("What to change", _advice(all_advice(incident)))
    parts += _section("The ranks", _ranks(incident.ranks))
    parts += _section("What happened before", happened(incident.events))
    parts += _section("The policy", _policy(incident))
    parts += _section("Not known, or not kept", [f"{_INDENT}{plain(note)}" for note in incident.notes])
    return "\n".join(parts) + "\n"


def load(incident: Incident) -> str:
    """What the engine told of its requests last."""
    engine = incident.engine
    if engine.requests_running is None and engine.kv_cache_usage_ratio is None:
        return "not known"
    running = "?" if engine.requests_running is None else engine.requests_running
    waiting = "?" if engine.requests_waiting is None else engine.requests_waiting
    usage = "" if engine.kv_cache_usage_ratio is None else f", KV cache {engine.kv_cache_usage_ratio:.0%} used"
    return f"{running} requests running, {waiting} waiting{usage}"


def ranks_table(ranks: Sequence[RankEvidence]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: each rank as it stood last, in MiB."""
    stood = [latest(rank) for rank in ranks]
    headers = ["MiB", *(plain(rank.name) for rank in stood)]
    rows = [
        ["status", *(plain(rank.evidence.status, 20) for rank in stood)],
        ["read", *(moment(rank.at).rpartition(" ")[2] for rank in stood)],
        ["total", *(mib(rank.total_bytes) for rank in stood)],
        ["used", *(mib(rank.used_bytes) for rank in stood)],
        *([f"- {component_title(name)}", *(_part(rank, name) for rank in stood)] for name in COMPONENTS),
        ["free", *(mib(rank.free_bytes) for rank in stood)],
        ["torch reserved", *(mib(rank.torch.reserved_bytes) for rank in stood)],
        ["torch allocated", *(mib(rank.torch.allocated_bytes) for rank in stood)],
    ]
    return headers, rows


def happened(events: Iterable[Happened]) -> list[str]:
    """One line for each event, oldest first."""
    return [
        f"{_INDENT}{moment(event.at).rpartition(' ')[2]}  {plain(event.kind, 20):9} {plain(event.summary)}"
        + (f" (asked for by {plain(event.caller.address, 60)})" if event.caller is not None else "")
        for event in events
    ]


def _part(rank: Latest, name: str) -> str:
    return mib(getattr(rank.components, name))


def _section(title: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    return ["", title.upper(), *lines] if lines else []


def _wrapped(text: str, *, indent: str = _INDENT) -> list[str]:
    return textwrap.wrap(plain(text, 2000), WIDTH, initial_indent=indent, subsequent_indent=indent)


def _messages(incident: Incident) -> Iterator[str]:
    for message in incident.messages:
        often = f" ({message.count} lines)" if message.count > 1 else ""
        yield f" * {plain(message.title)}{often}"
        yield from _wrapped(message.meaning)
        yield from (f"{_INDENT}| {plain(line)}" for line in message.lines)


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f" * {WEIGHT_WORDS.get(finding.weight, finding.weight)}: {plain(finding.title)}"
        yield from _wrapped(finding.text)
        if finding.figures:
            yield from _wrapped(f"[{', '.join(figure(name, value) for name, value in finding.figures.items())}]")


def _advice(advice: Sequence[Advice]) -> Iterator[str]:
    for each in advice:
        yield f" * {plain(each.setting)}"
        yield from _wrapped(each.change)
        yield from _wrapped(f"Costs: {each.cost}")


def _ranks(ranks: Sequence[RankEvidence]) -> Iterator[str]:
    if not ranks:
        return
    yield table(*ranks_table(ranks))
    for rank in ranks:
        if rank.doing or rank.stack:
            yield ""
            yield f"{plain(rank.name)}, {plain(rank.status, 20)}: {plain(rank.doing) or 'it was last in'}"
            yield from (f"{_INDENT}{plain(line)}" for line in rank.stack)
        if rank.entries:
            yield f"{plain(rank.name)}: largest encoder outputs"
            yield from (
                f"{_INDENT}{mib(entry.bytes):>10} MiB  {plain(entry.residency or '', 10):7} {plain(entry.mm_hash, 64)}"
                for entry in rank.entries
            )


def _policy(incident: Incident) -> Iterator[str]:
    policy = incident.policy
    if policy is not None:
        yield f"{_INDENT}{plain(str(policy.get('level')))} (mode {plain(str(policy.get('mode')))})"
    yield from happened(incident.decisions)
