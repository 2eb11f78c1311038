"""``highwater status``: the verdict on a report, and both on one screen."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import click

from highwater.engine.hints import stopped_text
from highwater.growth.words import leak_line, leaks
from highwater.http.text.report import report_text
from highwater.model.components import COMPONENT_NAMES
from highwater.model.policy import PolicyLevel, RuleStatus
from highwater.model.rank import rank_title
from highwater.model.report import Event, Report
from highwater.model.schema import SCHEMA
from highwater.model.titles import component_title, table
from highwater.model.units import UNKNOWN, size_text, span_text
from highwater.process.exit_codes import ATTENTION, CRITICAL, OK
from highwater.process.untrusted import cleaned
from highwater.terminal.asking import sidecar_at
from highwater.terminal.client import events_of, report_of
from highwater.terminal.options import examples, json_option, url_option

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

    def ago(event: Event) -> str:
        return f"{span_text(max(now - event.at, 0.0))} ago"

    reset, incident = "none that the sidecar remembers", ""
    if last_reset is not None:
        by = f"rule {last_reset.rule}" if last_reset.rule else last_reset.trigger or "?"
        if last_reset.caller is not None:
            by += f" from {last_reset.caller.address or 'an unknown address'}"
        reset = f"{ago(last_reset)} by {by}: {last_reset.summary}"
    if last_incident is not None:
        which = last_incident.summary.removeprefix("incident ").partition(" ")[0].rstrip(":,")
        change = f"what to change: highwater incidents {which}"
        incident = f"\nlast incident: {ago(last_incident)}: {last_incident.summary} ({change})"
    return (
        f"{WORDS[verdict.code]}: {'; '.join(verdict.reasons) or ready}\n{report_text(report)}"
        f"last reset: {reset}{incident}"
    )


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


@click.command(
    epilog=examples(
        "highwater status",
        "highwater status >/dev/null || echo 'look at it'",
        "highwater status --since 'before bench'   what changed since that mark",
        "highwater status --json | jq -r '.reasons[]'",
    )
)
@url_option
@click.option("--since", metavar="MARK", help="adds what changed since that mark")
@json_option
def status(url: str, since: str | None, *, as_json: bool) -> None:
    """Show where the memory is, on one screen, and whether all is well.

    Exits with 0 if it is, 1 if something needs attention, 2 if the engine is unreachable or hung, 3 if no sidecar
    answers.
    """
    with sidecar_at(url) as sidecar:
        answer = sidecar.get("/memory", {} if since is None else {"since": since})
        report = report_of(answer)
        listed = sidecar.get("/memory/events", {"limit": "1000"})
    events = events_of(listed.get("events") if isinstance(listed, dict) else [])
    last_reset = next((event for event in events if event.kind == "reset" and event.result is not None), None)
    last_incident = next((event for event in events if event.kind == "incident"), None)
    verdict = judged(report)
    if as_json:
        click.echo(json.dumps(status_json(verdict, answer, last_reset), indent=1))
    else:
        click.echo(status_text(report, verdict, last_reset, now=time.time(), last_incident=last_incident))
        if since is not None:
            click.echo("\n" + since_text(since, cleaned(answer.get("since"))))
    sys.exit(verdict.code)
