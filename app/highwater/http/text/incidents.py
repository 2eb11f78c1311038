"""Incidents as Markdown, which a terminal shows as it is and ``highwater.http.text.markdown.page`` turns into a page.

Formats, and decides nothing. Every foreign text is made plain first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from highwater.diagnose.case import known_points, latest
from highwater.diagnose.evidence import Headline, Incident, RankEvidence
from highwater.diagnose.finding import advices, all_advice, without_effect
from highwater.diagnose.incidents.diagnosis import exception_title
from highwater.diagnose.rules.book import KNOWN_CAUSE_NAMES
from highwater.http.text.markdown import block, chart, code, figure, moment, section, table, text
from highwater.http.text.report import memory_rows, requests_text
from highwater.model.policy import WORDS
from highwater.model.report import Event
from highwater.model.units import MIB, gib, mib, size_text, span_text
from highwater.process.untrusted import plain

WIDTH = 100
MAX_SHOWN = 3  # images of a request
WEIGHT_WORDS: Mapping[str, str] = {"likely": "most likely", "clue": "a clue", "note": "good to know"}


def state(headline: Headline) -> str:
    parts = [moment(headline.at)]
    if headline.count > 1:
        parts.append(f"{headline.count} times until {moment(headline.last_at)}")
    if headline.ended_at is None:
        parts.append("still open")
    else:
        lasted = "" if headline.at is None else f" (after {span_text(headline.ended_at - headline.at)})"
        parts.append(f"ready again {moment(headline.ended_at)}{lasted}")
    return ", ".join(parts)


def headlines_text(
    headlines: Sequence[Headline], *, problem: str | None = None, command: str = "highwater incidents"
) -> str:
    lines = [f"problem: {plain(problem)}", ""] if problem else []
    if not headlines:
        return "\n".join([*lines, "no incidents"]) + "\n"
    for headline in headlines:
        kind = f"  ({plain(headline.kind.replace('_', ' '))})" if headline.kind else ""
        lines.append(f"{plain(headline.id)}{kind}")
        if headline.problem:
            lines += [f"   it {plain(headline.problem)}", ""]
            continue
        lines += [
            f"   {state(headline)}",
            textwrap.indent(_wrapped(plain(headline.summary, 2000), width=97), "   "),
            "",
        ]
    newest = next((f" {plain(one.id)}" for one in headlines if not one.problem), " ID")
    return "\n".join([*lines, f"`{command}{newest}` shows what to change; so does each ID", ""])


def incident_markdown(incident: Incident, *, charts: bool = False) -> str:
    engine = incident.engine
    kind = (incident.kind or "").replace("_", " ")
    facts = {
        "when": state(incident),
        "engine": code(f"{engine.named} at {engine.url}: {engine.state}"),
        "load": requests_text(engine) or "not known",
        "hint": code(engine.hint or ""),
    }
    if incident.kind and incident.kind != incident.first_kind:
        facts["id"] = "it keeps the kind that the incident began with"
    causes = [each for each in incident.findings if each.weight == "likely" and each.name in KNOWN_CAUSE_NAMES]
    pointless = advices(without_effect(rank.reading for rank in incident.ranks if rank.reading is not None))
    of_messages = (each for message in incident.messages for each in message.advice if each not in pointless)
    given = dict.fromkeys((*all_advice(causes), *of_messages, *all_advice(incident.findings)))
    raised, messages, findings = "", [], []
    for message in incident.messages:
        often = f" ({message.count} lines)" if message.count > 1 else ""
        item = _item(f"**{text(plain(message.title))}**{often}", text(plain(message.meaning, 2000)))
        messages.append(f"{item}\n\n{textwrap.indent(_lines(map(plain, message.lines)), '  ')}")
    if incident.exception is not None:
        lines = textwrap.indent(_lines([plain(incident.exception.text)]), "  ")
        raised = f"{_item(f'**{text(plain(exception_title(incident.exception)))}**')}\n\n{lines}"
    for one in incident.findings:
        figures = ", ".join(text(figure(name, value)) for name, value in one.figures.items())
        title = f"{WEIGHT_WORDS[one.weight]}: **{text(plain(one.title))}**"
        findings.append(_item(title, text(plain(one.text, 2000)), figures and f"({figures})"))
    requests = (
        f"{plain(one.request_id, 40)}  {plain(one.client or 'no key', 12):12}  {plain(one.state, 8):8}"
        f"  {one.cost.items} of {size_text(one.cost.decoded_bytes)}, {one.cost.encoder_tokens} tokens: "
        + ", ".join(f"{plain(each.form, 8)} {each.width} x {each.height}" for each in one.largest[:MAX_SHOWN])
        for one in incident.requests
    )
    status = incident.policy
    # Another version's may be none of ours.
    level = "" if status is None else WORDS.get(status.shown_level, status.shown_level)
    policy = "" if status is None else code(f"{level} (mode {status.mode}): {status.summary}")
    parts = [
        f"# {text(kind)}: {code(incident.id)}",
        _wrapped(f"**{text(plain(incident.summary, 2000))}**"),
        "\n".join(f"- {name}: {value}" for name, value in facts.items() if value),
        *section("What the log says", (*messages, raised)),
        *section("What the numbers say", findings),
        *section(
            "What to change",
            (
                _item(code(one.setting), text(plain(one.change, 2000)), text(plain(f"Costs: {one.cost}", 2000)))
                for one in given
            ),
        ),
        *section("The ranks", _ranks(incident.ranks, charts=charts)),
        *section("Requests with images or videos, the largest first", [_lines(requests)]),
        *section("What happened before", [_events(incident.events)]),
        *section("The policy", [policy, _events(incident.decisions)]),
        *section("Not known, or not kept", [f"- {text(plain(note))}" for note in incident.notes]),
    ]
    return "\n\n".join(parts) + "\n"


def _wrapped(words: str, *, indent: str = "", width: int = WIDTH) -> str:
    return textwrap.fill(words, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _item(head: str, *sentences: str) -> str:
    lines = (f"- {head}", *(f"  {each}" for each in sentences if each))
    return "\n".join(_wrapped(line, indent="  ") for line in lines)


def _events(events: Sequence[Event]) -> str:
    return _lines(
        f"{moment(event.at).rpartition(' ')[2]}  {plain(event.kind, 20):9} {plain(event.summary)}"
        + (f" (asked for by {plain(event.caller.address, 60)})" if event.caller is not None else "")
        for event in events
    )


def _ranks(ranks: Sequence[RankEvidence], *, charts: bool) -> Iterator[str]:
    if not ranks:
        return
    stood = [latest(rank) for rank in ranks]
    rows = [
        ["status", *(code(rank.status, 20) for rank in ranks)],
        ["read", *(moment(rank.taken_at or None).rpartition(" ")[2] for rank in stood)],
        *memory_rows(stood),
        ["free", *(gib(rank.free_bytes) for rank in stood)],
        ["torch reserved", *(gib(rank.torch.reserved_bytes) for rank in stood)],
        ["torch allocated", *(gib(rank.torch.allocated_bytes) for rank in stood)],
    ]
    yield table(["GiB", *(text(rank.name) for rank in ranks)], rows)
    for rank in ranks:
        used = [(point.at, point.used_bytes) for point in known_points(rank) if point.used_bytes is not None]
        if used:
            sizes, seconds = [size for _, size in used], used[-1][0] - used[0][0]
            span = f"{size_text(min(sizes))} to {size_text(max(sizes))} in {span_text(seconds)}"
            words = text(f"{rank.name} used {span}, {size_text(sizes[-1])} at the end.")
            yield words
            if charts and seconds > 0:
                yield chart(f"MiB in use, {rank.name}", [(at, size / MIB) for at, size in used])
        if rank.doing or rank.stack:
            yield text(f"{rank.name}, {plain(rank.status, 20)}: {plain(rank.doing) or 'it was last in'}")
            yield _lines(plain(line) for line in rank.stack)
        if rank.entries:
            yield f"{rank.name}, its largest encoder outputs:"
            yield _lines(
                f"{mib(entry.bytes):>10} MiB  {plain(entry.residency or '', 10):7} {plain(entry.mm_hash, 64)}"
                for entry in rank.entries
            )


def _lines(lines: Iterable[str]) -> str:
    shown = "\n".join(lines)
    return block(shown) if shown else ""
