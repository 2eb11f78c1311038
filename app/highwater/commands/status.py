"""The verdict on a report, and both as text for ``highwater status``. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from highwater.accounting.components import COMPONENT_NAMES
from highwater.engine.hints import stopped_text
from highwater.exit_codes import ATTENTION, CRITICAL, OK
from highwater.readings.event import Event
from highwater.readings.policy import PolicyLevel, RuleStatus
from highwater.readings.rank import rank_title
from highwater.readings.report import Report
from highwater.readings.schema import SCHEMA
from highwater.text.growth import leak_line, leaks
from highwater.text.report import report_text
from highwater.text.table import component_title, table
from highwater.units import UNKNOWN, size_text, span_text

WORDS: Final = {OK: "OK", ATTENTION: "ATTENTION", CRITICAL: "CRITICAL"}


@dataclass(frozen=True, slots=True)
class Verdict:
    code: int
    reasons: tuple[str, ...] = ()


def judged(report: Report) -> Verdict:
    state, policy, stopped_at = report.engine.state, report.policy, report.engine.stopped_at
    if stopped_at is not None:
        return Verdict(ATTENTION, (f"the engine {stopped_text(stopped_at)}",))
    worries = []
    if state == "starting" and report.start_failure is not None:
        if report.engine.is_loading:
            worries.append("the engine is starting")
        worries.append(report.start_failure.summary)
    elif state != "ready":
        worries.append(f"the engine is {report.engine.state_text}")
    worries += report.engine.starved
    if report.stale:
        worries.append("the readings are stale" if report.taken_at else "no worker was read yet")
    if report.are_workers_hidden and report.engine.traits.answers:
        worries.append("the workers cannot be read: no worker extension, no recorders")
    elif not report.engine.traits.is_absent and report.ranks_expected is not None:
        # The last readings may be of ranks that are missing now.
        missing = len(report.ranks_missing) if report.stale else report.ranks_expected - report.ranks_reported
        worries += [f"{missing} of {report.ranks_expected} ranks are missing"] * (missing > 0)
    if policy is not None:
        worries += [worry for rule in policy.rules if (worry := _worry(rule, policy.level)) is not None]
    worries += [] if report.host is None else report.host.warnings
    worries += [leak_line(one) for one in leaks(report.growth.series) if not one.is_over]
    if not worries:
        return Verdict(OK)
    return Verdict(CRITICAL if report.engine.traits.level == "bad" else ATTENTION, tuple(worries))


def _worry(rule: RuleStatus, level: PolicyLevel) -> str | None:
    why = f": {rule.reason}" if rule.reason else ""
    # A cooldown after a relief that did not reach low water is a worry only while memory is still short.
    if rule.is_short(level):
        return f"rule {rule.name} is {rule.phase}{why}"
    return f"rule {rule.name} cannot act{why}" if rule.is_dormant else None


def status_json(verdict: Verdict, report: Any, last_reset: Event | None) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {
        "schema": SCHEMA,
        "status": WORDS[verdict.code].lower(),
        "exit_code": verdict.code,
        "reasons": list(verdict.reasons),
        "last_reset": None if last_reset is None else asdict(last_reset),
        "report": report,
    }


def status_text(
    report: Report, verdict: Verdict, last_reset: Event | None, *, now: float, last_incident: Event | None = None
) -> str:
    count = f"{report.ranks_reported} rank{'' if report.ranks_reported == 1 else 's'}"
    ready = f"the engine is ready, {count}, policy {report.policy.level if report.policy else UNKNOWN}"
    return (
        f"{WORDS[verdict.code]}: {'; '.join(verdict.reasons) or ready}\n"
        f"{report_text(report)}last reset: {_last_reset(last_reset, now)}{_last_incident(last_incident, now)}"
    )


def _last_reset(event: Event | None, now: float) -> str:
    if event is None:
        return "none that the sidecar remembers"
    by = f"rule {event.rule}" if event.rule else event.trigger or "?"
    if event.caller is not None:
        by += f" from {event.caller.address or 'an unknown address'}"
    return f"{span_text(max(now - event.at, 0.0))} ago by {by}: {event.summary}"


def _last_incident(event: Event | None, now: float) -> str:
    if event is None:
        return ""
    which = event.summary.removeprefix("incident ").partition(" ")[0].rstrip(":,")
    ago = f"{span_text(max(now - event.at, 0.0))} ago"
    return f"\nlast incident: {ago}: {event.summary} (what to change: highwater incidents {which})"


def since_text(mark: str, since: Any) -> str:  # noqa: ANN401 - JSON, cleaned
    ranks = since.get("ranks", []) if isinstance(since, dict) else []
    if not ranks:
        return f"nothing is known of what changed since {mark!r}: no rank was read then and now"
    headers = [f"since {mark!r}", *(f"rank {rank_title(rank.get('dp_rank'), rank.get('rank'))}" for rank in ranks)]
    rows = [["used", *(size_text(rank.get("used_bytes"), signed=True) for rank in ranks)]]
    for name in COMPONENT_NAMES:
        sizes = (rank.get("components", {}).get(name) for rank in ranks)
        rows.append([f"- {component_title(name)}", *(size_text(size, signed=True) for size in sizes)])
    return table(headers, rows)
