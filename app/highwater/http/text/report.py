"""The report as an operator reads it at a terminal: the verdict first, sizes in GiB."""

from __future__ import annotations

from collections.abc import Sequence

from highwater.diagnose.verdict import JudgedReport
from highwater.growth.words import growth_line
from highwater.http.text.status import headline
from highwater.model.components import COMPONENTS, component_title
from highwater.model.engine import EngineStatus, missing_text
from highwater.model.policy import WORDS, RuleStatus, signal_text, signal_title, waters_text
from highwater.model.rank import EncoderCacheTotals, RankReading, StartPhase, device_title
from highwater.model.remedies import can_give
from highwater.model.report import DoorState, HostSummary, Report
from highwater.model.units import UNKNOWN, gib, gib_text, share_text, span_text, table


def report_text(report: JudgedReport) -> str:
    verdict = report.verdict
    said = {"grew": verdict.grew, "next": verdict.next, "step": verdict.step}
    parts = [headline(report), *(f"{name}: {fact}" for name, fact in said.items() if fact), _engine(report)]
    if report.ranks_missing and not report.are_workers_hidden:
        parts.append(f"missing: {missing_text(report.ranks_missing)}")
    if report.start_failure is not None:
        failed = report.start_failure.ranks
        parts.append(report.start_failure.summary)
        parts.append(start_table([one.label for one in failed], [one.phases for one in failed]))
    if report.ranks:
        parts.append(_ranks_table(report))
        names = [one.label for one in report.ranks]
        parts.append(start_table(names, [one.start for one in report.ranks]))
        notes = [(name, note) for name, rank in zip(names, report.ranks, strict=True) for note in rank.notes]
        parts.extend(f"note: rank {name}: {note.name}: {note.reason}" for name, note in notes)
    parts += [f"{name}: {fact}" for name, fact in engine_facts(report).items()]
    if report.policy is not None:
        parts.append(f"policy: {WORDS[report.policy.level]} ({report.policy.mode}): {report.policy.summary}")
        parts += [f"rule {rule.name}: {_rule(rule, report.policy.summary)}" for rule in report.policy.rules]
    return "\n".join(part for part in parts if part) + "\n"


def _engine(report: Report) -> str:
    engine = report.engine
    what = f"vLLM {engine.version or '(version unknown)'} {engine.model or ''}".rstrip()
    ranks = f"{report.ranks_reported} of {report.ranks_expected if report.ranks_expected is not None else '?'} ranks"
    age = "never read" if report.age_seconds is None else f"read {report.age_seconds:.1f} s ago"
    if report.stale and report.ranks and engine.traits.is_absent:
        ranks += ", as the engine that ended had them"
    return f"{what} at {engine.url}: {engine.state_text}, {ranks}, {age}{' (STALE)' if report.stale else ''}"


def _ranks_table(report: Report) -> str:
    ranks = report.ranks
    pressures = [report.pressure_of(rank) for rank in ranks]
    # Short titles, so that eight ranks fit 80 columns.
    headers = ["GiB, by rank", *(rank.label for rank in ranks)]
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
    # Without a rule on the device there is none.
    return table(headers, [row for row in rows if row[0] != "acts at, free" or any(pressures)])


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
        rows.append([name, *(_after(phase) for phase in phases), f"{slowest:.1f}"])
    return table(["start: GiB after", *names, "s"], rows) if rows else ""


def _after(phase: StartPhase | None) -> str:
    if phase is None:
        return UNKNOWN
    # On CPU nothing is on a device.
    return (
        "failed" if phase.error is not None else gib(phase.rss_bytes if phase.used_bytes is None else phase.used_bytes)
    )


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
        parts.append(f"{door.requests_waiting} requests wait for room")
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
    return "; ".join([", ".join(parts), *host.warnings])


def _encoder_cache(cache: EncoderCacheTotals | None) -> str:
    if cache is None:
        return ""
    parts = [f"{cache.entries} entries", f"{gib_text(cache.device_bytes)} on devices"]
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


def _rule(rule: RuleStatus, summary: str) -> str:
    waters = waters_text(rule)
    value = f"{signal_title(rule.signal)} {signal_text(rule.signal, rule.value)}"
    shown = f"{WORDS[rule.phase]}, {value}{f' ({waters})' if waters else ''}"
    why = f"; {rule.reason}" if rule.reason and rule.reason not in summary else ""
    short = rule.short_ranks
    gains = ", ".join(f"{name} {gib_text(size)}" for name, size in can_give(short).items())
    return f"{shown}{why}{f'; could give there{together(short)}: {gains}' if gains else ''}"
