"""A report judged, and on one screen of plain text. Pure; ``highwater status`` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from app.attribution import COMPONENTS
from app.readings import Event, Report, RuleStatus
from app.table import component_title, device_title, missing_text, table
from app.terminal.outlook import (
    can_give,
    fullest,
    pressure_of,
    seconds_to_high_water,
    short_ranks,
)
from app.terminal.sizes import signal_text, waters_text
from app.units import UNKNOWN, share_text, size_text, span_text

OK, ATTENTION, CRITICAL = 0, 1, 2
WORDS: Final = {OK: "OK", ATTENTION: "ATTENTION", CRITICAL: "CRITICAL"}
_SHORT: Final = frozenset({"short", "urgent"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to make of a report: an exit status, and why it is not 0."""

    code: int
    reasons: tuple[str, ...] = ()


def judged(report: Report) -> Verdict:
    """Whether all is well: the engine ready, every rank heard of just now, memory not short, every rule at work."""
    state, policy = report.engine.state, report.policy
    worries = []
    if state != "ready":
        worries.append(f"the engine is {state.replace('_', ' ')}")
    if report.stale:
        worries.append("the readings are stale" if report.taken_at else "no worker was read yet")
    if report.ranks_expected is not None and report.ranks_reported < report.ranks_expected:
        worries.append(f"{report.ranks_expected - report.ranks_reported} of {report.ranks_expected} ranks are missing")
    if policy is not None:
        worries += [worry for rule in policy.rules if (worry := _worry(rule, report)) is not None]
    if not worries:
        return Verdict(OK)
    return Verdict(CRITICAL if report.engine.traits.level == "bad" else ATTENTION, tuple(worries))


def _worry(rule: RuleStatus, report: Report) -> str | None:
    """Why somebody should look after the rule; ``None`` where nobody need."""
    why = f": {rule.reason}" if rule.reason else ""
    if rule.phase in _SHORT or rule.phase == "acting":
        return f"rule {rule.name} is {rule.phase}{why}"
    # A rest after a relief that fell short of low water is a worry only where memory is short all the same.
    if rule.phase == "resting" and report.policy is not None and report.policy.level in _SHORT:
        return f"rule {rule.name} is resting{why}"
    return f"rule {rule.name} cannot act{why}" if rule.is_dormant else None


def is_relief(event: Event) -> bool:
    """Whether something was given back, or tried to be."""
    return event.kind == "reset" and event.result is not None


def status_json(verdict: Verdict, report: Any, last_reset: Event | None) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """The verdict for programs, with the report as the sidecar told it."""
    return {
        "schema": 1,
        "status": WORDS[verdict.code].lower(),
        "exit_code": verdict.code,
        "reasons": list(verdict.reasons),
        "last_reset": None if last_reset is None else asdict(last_reset),
        "report": report,
    }


def status_lines(report: Report, verdict: Verdict, last_reset: Event | None, *, now: float) -> list[str]:
    """The screen, without its end of line."""
    engine = report.engine
    count = f"{report.ranks_reported} rank{'' if report.ranks_reported == 1 else 's'}"
    ready = f"the engine is ready, {count}, policy {report.policy.level if report.policy else UNKNOWN}"
    rows = {
        "engine": f"vLLM {engine.version or '(version unknown)'} {engine.model or ''} at {engine.url}: {engine.state}",
        "hint": engine.hint,
        "ranks": _ranks(report),
        "progress": report.progress.summary if report.progress is not None else None,
        **_memory(report),
        **_policy(report),
        "last reset": _last_reset(last_reset, now),
    }
    return [
        f"{WORDS[verdict.code]}: {'; '.join(verdict.reasons) or ready}",
        *(f"{name:<13} {text}" for name, text in rows.items() if text),
    ]


def _ranks(report: Report) -> str:
    expected = "?" if report.ranks_expected is None else report.ranks_expected
    age = "never read" if report.age_seconds is None else f"read {span_text(report.age_seconds)} ago"
    missing = missing_text(report.ranks_missing)
    return f"{report.ranks_reported} of {expected}, {age}{' (STALE)' if report.stale else ''}" + (
        f"; missing: {missing}" if missing else ""
    )


def _memory(report: Report) -> Mapping[str, str | None]:
    rows: dict[str, str | None] = {}
    for rank in fullest(report.ranks)[:1]:
        what = f"rank {rank.rank if rank.rank is not None else '?'} {device_title(rank.device)}"
        used = f"{size_text(rank.used_bytes)} of {size_text(rank.total_bytes)} used ({share_text(rank.used_ratio)})"
        pressure = pressure_of(report, rank)
        water = "" if pressure is None else f" (high water {size_text(pressure.high_free_bytes)})"
        rows["fullest"] = f"{what}: {used}, {size_text(rank.free_bytes)} free{water}"
        parts = ((component_title(name), getattr(rank.components, name)) for name in COMPONENTS)
        rows["components"] = ", ".join(f"{name} {size_text(size)}" for name, size in parts if size)
    cache, growth, engine = report.encoder_cache, report.growth, report.engine
    if cache is not None:
        rows["encoder cache"] = (
            f"{cache.entries} entries, {size_text(cache.device_bytes)} on devices, "
            f"{size_text(cache.host_bytes)} on the host"
        )
    if growth.since_ready_bytes is not None:
        pace = "" if growth.bytes_per_second is None else f", {size_text(growth.bytes_per_second, signed=True)}/s"
        ends = {"high water": seconds_to_high_water(report), "full": growth.seconds_to_full}
        left = "".join(f", {what} in {span_text(seconds)}" for what, seconds in ends.items() if seconds is not None)
        left += " at this pace" if left else ""
        rows["growth"] = f"{size_text(growth.since_ready_bytes, signed=True)} since ready{pace}{left}"
    if engine.requests_running is not None:
        rows["requests"] = (
            f"{engine.requests_running} running, {engine.requests_waiting or 0} waiting, "
            f"KV cache {share_text(engine.kv_cache_usage_ratio)} used"
        )
    return rows


def _policy(report: Report) -> Mapping[str, str | None]:
    policy = report.policy
    if policy is None:
        return {}
    rows: dict[str, str | None] = {"policy": f"{policy.level} (mode {policy.mode}); {policy.summary}"}
    for rule in policy.rules:
        waters = waters_text(rule.signal, rule.high_water, rule.low_water)
        shown = f"{rule.signal} {signal_text(rule.signal, rule.value)}{f' ({waters})' if waters else ''}"
        why = f"; {rule.reason}" if rule.reason and rule.reason not in policy.summary else ""
        gains = ", ".join(f"{name} {size_text(size)}" for name, size in can_give(short_ranks(rule)).items())
        could = f"; could give there: {gains}" if gains else ""
        rows[f"rule {rule.name}"] = f"{rule.phase}, {shown}{why}{could}"
    return rows


def _last_reset(event: Event | None, now: float) -> str:
    if event is None:
        return "none that the sidecar remembers"
    by = f"rule {event.rule}" if event.rule else event.trigger or "?"
    if event.caller is not None:
        by += f" from {event.caller.address or 'an unknown address'}"
    return f"{span_text(max(now - event.at, 0.0))} ago by {by}: {event.summary}"


def since_text(mark: str, since: Any) -> str:  # noqa: ANN401 - JSON, cleaned
    """What changed since a mark, rank by rank, as a table."""
    ranks = since.get("ranks", []) if isinstance(since, dict) else []
    if not ranks:
        return f"nothing is known of what changed since {mark!r}: no rank was read then and now"
    headers = [f"since {mark!r}", *(f"rank {rank.get('rank')}" for rank in ranks)]
    rows = [["used", *(size_text(rank.get("used_bytes"), signed=True) for rank in ranks)]]
    for name in COMPONENTS:
        sizes = (rank.get("components", {}).get(name) for rank in ranks)
        rows.append([f"- {component_title(name)}", *(size_text(size, signed=True) for size in sizes)])
    return table(headers, rows)
