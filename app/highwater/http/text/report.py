"""The report as text: at most eight answers for `highwater status` and what stands behind them, and all of it. Pure.

The verdict comes first, and sizes are in GiB.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from highwater.diagnose.engine_verdict import worst_rank
from highwater.diagnose.finding import FoundFinding
from highwater.diagnose.rules.setup import NEEDS_SIDECAR
from highwater.diagnose.verdict import Deed, JudgedReport
from highwater.growth.words import growth_line
from highwater.model.components import COMPONENT_NAMES, COMPONENTS, component_title
from highwater.model.engine import EngineStatus, missing_text
from highwater.model.policy import WORDS, signal_text, signal_title, waters_text
from highwater.model.rank import EncoderCacheTotals, RankReading, StartPhase, device_title, names_text, rank_title
from highwater.model.remedies import can_give
from highwater.model.report import DoorState, Event, HostSummary, Report
from highwater.model.units import GIB, UNKNOWN, counted, gib, gib_text, narrow_table, share_text, span_text, table
from highwater.process.errors import OK

_MOST_FINDINGS: Final = 6


def wrapped(text: str, width: int, *, indent: int = 0) -> str:
    """Return the text in lines of at most ``width`` columns, all but the first indented; no word is cut."""
    return textwrap.fill(
        text,
        max(width, 40),
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def headline(report: JudgedReport) -> str:
    verdict = report.verdict
    return f"{verdict.state.replace('_', ' ').upper()}: {verdict.sentence}"


def status_text(
    report: JudgedReport, events: Sequence[Event], *, url: str, now: float, width: int, is_alone: bool = False
) -> str:
    """Return at most eight answers; ``is_alone``: the engine was asked at ``url`` itself, and no sidecar is there.

    Then no policy runs: what one would do, or somebody by it, is not said.
    """
    verdict, again = report.verdict, f"--engine-url {shlex.quote(url)}"
    page = "dashboard" if verdict.do is not None and verdict.do.path == verdict.runbook else verdict.runbook
    if is_alone:
        ways = [f"highwater status {again} --why or --ranks", f"highwater check {again}"]
    else:
        ways = [f"{url}/{page or 'dashboard'}", "highwater status --why or --ranks"]
        ways += [f"highwater incidents {one.incident}" for one in events if one.incident is not None][:1]
    worst, rank = "no rank was read yet", worst_rank(report)
    if rank is not None:
        waters = None if is_alone or report.stale else report.pressure_of(rank)
        acts = "as last read" if report.stale else "no rule watches it"
        if waters is not None:
            acts = f"acts at {gib_text(waters.high_free_bytes)}, stops at {gib_text(waters.low_free_bytes)}"
        worst = f"{rank.name}: {gib_text(rank.free_bytes)} free of {gib_text(rank.total_bytes)}; {acts}"
    last, act = "none that the sidecar remembers", last_act(events)
    if act is not None:
        by = f"rule {act.rule}" if act.rule else act.trigger or "?"
        if act.caller is not None:
            by += f" from {act.caller.address or 'an unknown address'}"
        why = "" if act.why is None or act.why in act.summary else f". Why: {act.why}"
        last = f"{span_text(max(now - act.at, 0.0))} ago by {by}: {act.summary}{why}"
    start_one = f"highwater serve {again}: a sidecar knows the past, and gives memory back"
    facts = {
        "worst": worst,
        "grew": NEEDS_SIDECAR if is_alone else verdict.grew or "nothing that is known",
        "next": NEEDS_SIDECAR if is_alone else verdict.next or "nothing by itself",
        "do": start_one if is_alone else _deed(verdict.do, url),
        "step": verdict.step or "none is needed",
        "last": NEEDS_SIDECAR if is_alone else last,
        "look": ", ".join(ways),
    }
    # Where all is well nobody needs the memory back: what could be given back is said in `next`.
    if verdict.exit_status == OK and not is_alone:
        del facts["do"]
    first = wrapped(headline(report), width)
    return "\n".join([first, *(wrapped(f"{name:<6} {fact}", width, indent=7) for name, fact in facts.items())])


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


def ranks_text(report: Report) -> str:
    """Return a row for each rank, the worst off first, equal ones in one; sizes in GiB."""
    if not report.ranks:
        return "no rank was read yet"
    rows: dict[tuple[str, ...], list[str]] = {}
    for rank in report.worst_first:
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


def why_text(report: Report, findings: Sequence[FoundFinding], width: int, *, engine_url: str | None = None) -> str:
    """Return what the ranks do, what grows, and each finding of `growth` and `explain` with the first thing to change.

    ``engine_url``: that engine was asked itself, and no sidecar is there.
    """
    lines = [] if report.progress is None else [f"ranks  {report.progress.summary}"]
    lines.append(f"grows  {growth_line(report.growth.series) or 'nothing was judged yet: that takes some minutes'}")
    found = [one for one in findings if one.where in ("running", "start")]
    for one in islice(found, _MOST_FINDINGS):
        change = "".join(f"; {advice.text.partition('. ')[0].rstrip('.')}" for advice in one.advice[:1])
        lines.append(f"why    {one.title}{change}")
    lines += [] if found else ["why    no known cause was found"]
    lines += [f"       and {len(found) - _MOST_FINDINGS} more"] if len(found) > _MOST_FINDINGS else []
    look = "highwater growth, highwater explain"
    lines.append(f"look   {look if engine_url is None else f'highwater check --engine-url {shlex.quote(engine_url)}'}")
    return "\n".join(wrapped(line, width, indent=7) for line in lines)


def since_text(mark: str, since: Any) -> str:  # noqa: ANN401 - JSON, cleaned
    ranks = since.get("ranks", []) if isinstance(since, dict) else []
    if not ranks:
        return f"nothing is known of what changed since {mark!r}: no rank was read then and now"
    rows: dict[tuple[str, ...], list[str]] = {}
    for rank in ranks:
        sizes = (rank.get("used_bytes"), *(rank.get("components", {}).get(name) for name in COMPONENT_NAMES))
        texts = tuple(UNKNOWN if size is None else f"{size / GIB:+.2f}" for size in sizes)
        rows.setdefault(texts, []).append(rank_title(rank.get("dp_rank"), rank.get("rank")))
    return f"since {mark!r}\n" + _folded(["used"], rows)


# --- all of it ---


def report_text(report: JudgedReport) -> str:
    verdict, engine = report.verdict, report.engine
    said = {"grew": verdict.grew, "next": verdict.next, "step": verdict.step}
    parts = [headline(report), *(f"{name}: {fact}" for name, fact in said.items() if fact)]
    reported = f"{report.ranks_reported} of {report.ranks_expected if report.ranks_expected is not None else '?'} ranks"
    if report.stale and report.ranks and engine.traits.is_absent:
        reported += ", as the engine that ended had them"
    age = "never read" if report.age_seconds is None else f"read {report.age_seconds:.1f} s ago"
    state = f"{engine.state_text}, {reported}, {age}{' (STALE)' if report.stale else ''}"
    parts.append(f"{engine.named} at {engine.url}: {state}")
    if report.ranks_missing and not report.are_workers_hidden:
        parts.append(f"missing: {missing_text(report.ranks_missing)}")
    if report.start_failure is not None:
        failed = report.start_failure.ranks
        parts.append(report.start_failure.summary)
        parts.append(start_table([one.label for one in failed], [one.phases for one in failed]))
    if report.ranks:
        names, ranks = [one.label for one in report.ranks], report.ranks
        pressures = [report.pressure_of(rank) for rank in ranks]
        kinds = {rank.device.type for rank in ranks}
        rows = [
            [f"device {kinds.pop()}", *(str(rank.device.index) for rank in ranks)]
            if len(kinds) == 1 and all(rank.device.index is not None for rank in ranks)
            else ["device", *(device_title(rank.device) for rank in ranks)],
            *memory_rows(ranks, "- "),
            ["releasable", *(gib(rank.releasable_bytes) for rank in ranks)],
            ["free", *(gib(rank.free_bytes) for rank in ranks)],
            ["acts at, free", *(gib(one.high_free_bytes if one is not None else None) for one in pressures)],
            ["used ratio", *(UNKNOWN if rank.used_ratio is None else f"{rank.used_ratio:.3f}" for rank in ranks)],
        ]
        # Short titles, so that eight ranks fit 80 columns; without a rule on the device nothing acts.
        shown = [row for row in rows if row[0] != "acts at, free" or any(pressures)]
        parts.append(table(["GiB, by rank", *names], shown))
        parts.append(start_table(names, [one.start for one in ranks]))
        notes = [(name, note) for name, rank in zip(names, ranks, strict=True) for note in rank.notes]
        parts.extend(f"note: rank {name}: {note.name}: {note.reason}" for name, note in notes)
    parts += [f"{name}: {fact}" for name, fact in engine_facts(report).items()]
    if (policy := report.policy) is not None:
        parts.append(f"policy: {WORDS[policy.shown_level]} ({policy.mode}): {policy.summary}")
        for rule in policy.rules:
            waters, short = waters_text(rule), rule.short_ranks
            stands = f"{WORDS[rule.phase]}, {signal_title(rule.signal)} {signal_text(rule.signal, rule.value)}"
            stands += f" ({waters})" if waters else ""
            stands += f"; {rule.reason}" if rule.reason and rule.reason not in policy.summary else ""
            gains = ", ".join(f"{name} {gib_text(size)}" for name, size in can_give(short).items())
            stands += f"; could give there{together(short)}: {gains}" if gains else ""
            parts.append(f"rule {rule.name}: {stands}")
    return "\n".join(part for part in parts if part) + "\n"


def memory_rows(ranks: Sequence[RankReading], indent: str = "") -> list[list[str]]:
    return [
        ["total", *(gib(rank.total_bytes) for rank in ranks)],
        ["used", *(gib(rank.used_bytes) for rank in ranks)],
        *([f"{indent}{row.title}", *(gib(getattr(rank.components, row.name)) for rank in ranks)] for row in COMPONENTS),
    ]


def start_table(names: Sequence[str], starts: Sequence[Sequence[StartPhase]]) -> str:
    """Return the used memory after each phase of the ranks' starts, in GiB, and the slowest rank's seconds for it."""
    by_rank = [{phase.name: phase for phase in start} for start in starts]
    order = list(dict.fromkeys(phase.name for start in starts for phase in start))
    rows = []
    for name in order:
        phases = [phases.get(name) for phases in by_rank]
        slowest = max(phase.seconds for phase in phases if phase is not None)
        cells = []
        for phase in phases:
            if phase is None or phase.error is not None:
                cells.append(UNKNOWN if phase is None else "failed")
            else:  # on CPU nothing is on a device
                cells.append(gib(phase.rss_bytes if phase.used_bytes is None else phase.used_bytes))
        rows.append([name, *cells, f"{slowest:.1f}"])
    return table(["start: GiB after", *names, "s"], rows) if rows else ""


def engine_facts(report: Report) -> dict[str, str]:
    facts = {
        "encoder cache": _encoder_cache(report.encoder_cache),
        "growth": _growth(report),
        "verdicts": growth_line(report.growth.series),
        "requests": requests_text(report.engine),
        "progress": "" if report.progress is None else report.progress.summary,
        "host": "" if report.host is None else _host(report.host),
        "images": "" if report.door is None else _door(report.door),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _door(door: DoorState) -> str:
    """Return nothing where no request has had an image yet."""
    if not door.requests_total:
        return ""
    of = "" if door.decoded_bytes.limit is None else f" of {gib_text(door.decoded_bytes.limit)}"
    parts = [f"{door.items.taken} in flight, {gib_text(door.decoded_bytes.taken)}{of} once decoded"]
    if door.requests_waiting:
        parts.append(f"{counted(door.requests_waiting, 'request')} waiting for room")
    if door.held_for is not None:
        parts.append(f"nobody is let in: {door.held_for}")
    if door.refused_total:
        parts.append(f"{door.refused_total} refused{'' if door.mode == 'on' else ' if the door were on'}")
    return f"door {door.mode}: {'; '.join(parts)}"


def _host(host: HostSummary) -> str:
    parts = [] if host.used_bytes is None else [f"{gib_text(host.used_bytes)} in the engine's container"]
    if host.limit_bytes and host.kept_bytes is not None:
        share = share_text(host.kept_bytes / host.limit_bytes)
        parts.append(f"{gib_text(host.kept_bytes)} of it stays, {share} of {gib_text(host.limit_bytes)}")
    if host.seconds_to_limit is not None:
        parts.append(f"full in {span_text(host.seconds_to_limit)}")
    if host.largest is not None:
        parts.append(f"most: {host.largest} {gib_text(host.largest_bytes)}")
    if host.shm_size_bytes is not None:
        parts.append(f"shared memory {gib_text(host.shm_used_bytes)} of {gib_text(host.shm_size_bytes)}")
    return "; ".join(filter(None, [", ".join(parts), *host.warnings]))


def _encoder_cache(cache: EncoderCacheTotals | None) -> str:
    if cache is None:
        return ""
    parts = [counted(cache.entries, "entry"), f"{gib_text(cache.device_bytes)} on devices"]
    if cache.host_bytes:
        parts.append(f"{gib_text(cache.host_bytes)} on the host")
    if cache.capacity_embeds is not None:
        parts.append(f"capacity {cache.capacity_embeds:,} embeddings")
    if cache.oldest_age_seconds is not None:
        parts.append(f"oldest {span_text(cache.oldest_age_seconds)}")
    if cache.spills or cache.restores:
        parts.append(f"{cache.spills} moved out, {cache.restores} back")
    return ", ".join(parts)


def _growth(report: Report) -> str:
    growth = report.growth
    grown = growth.since_ready_bytes
    parts = [] if grown is None else [f"{gib_text(grown, signed=True)} since ready"]
    ends = {"high water": report.seconds_to_high_water, "full": growth.seconds_to_full}
    filled = ", ".join(f"{what} in {span_text(seconds)}" for what, seconds in ends.items() if seconds is not None)
    if filled:
        parts.append(filled if growth.component is None else f"{filled} ({component_title(growth.component)})")
    if growth.refill_seconds is not None:
        parts.append(f"fills each {span_text(growth.refill_seconds)}, given back each time")
    if growth.bytes_per_second is not None:
        parts.append(f"{gib_text(growth.bytes_per_second, signed=True)}/s now{together(report.ranks)}")
    return ", ".join(parts)


def together(ranks: Sequence[object]) -> str:
    return f" ({len(ranks)} ranks together)" if len(ranks) > 1 else ""


def requests_text(engine: EngineStatus) -> str:
    running, waiting, usage = engine.requests_running, engine.requests_waiting, engine.kv_cache_usage_ratio
    parts = [] if running is None else [f"{running} running, {waiting or 0} waiting"]
    parts += [] if usage is None else [f"KV cache {share_text(usage)} used"]
    return ", ".join(parts)
