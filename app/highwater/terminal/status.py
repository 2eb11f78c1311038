"""``highwater status`` and ``check``: the verdict, and what is not set up right, for people or programs."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, get_args

import click
from pydantic import TypeAdapter

from highwater.diagnose.finding import FoundFinding
from highwater.diagnose.rules.setup import (
    Caller,
    ControlAccess,
    NotKnown,
    SetupCheck,
    caller_checks,
    exit_code,
    shown,
    without_sidecar,
)
from highwater.diagnose.verdict import JudgedReport
from highwater.http.text.report import headline, last_act, ranks_text, since_text, status_text, why_text, wrapped
from highwater.model.report import SCHEMA, Event
from highwater.process.admin_token import find_token
from highwater.process.errors import ATTENTION, CRITICAL, OK, SidecarRefused
from highwater.process.untrusted import cleaned
from highwater.terminal.asking import ASK_SECONDS, Asked, asked_at
from highwater.terminal.cli import engine_option, examples, json_option, url_option
from highwater.terminal.client import SidecarClient, events_of, report_of, understood
from highwater.watch.history import EVENTS_KEPT

WORDS: Final = {OK: "ok", ATTENTION: "attention", CRITICAL: "critical"}
_FOUND: Final = TypeAdapter(tuple[FoundFinding, ...])


def status_json(report: JudgedReport, answer: Any, events: Sequence[Event]) -> dict[str, Any]:  # noqa: ANN401 - JSON
    verdict = report.verdict
    last_reset = last_act(events)
    return {
        "schema": SCHEMA,
        "status": WORDS[verdict.exit_status],
        "exit_code": verdict.exit_status,
        "reasons": [verdict.sentence] if verdict.exit_status else [],
        "verdict": asdict(verdict),
        "last_reset": None if last_reset is None else asdict(last_reset),
        "report": answer,
    }


@click.command(
    epilog=examples(
        "highwater status",
        "highwater status >/dev/null || echo 'look at it'",
        "highwater status --why                     what grows, and the known causes",
        "highwater status --since 'before bench'    what changed since that mark",
        "highwater status --engine-url http://gpu-7:8000   no sidecar runs there yet",
        "highwater status --json | jq -r .verdict.sentence",
    )
)
@url_option
@engine_option
@click.option("--ranks", is_flag=True, help="adds a row for each rank, the worst off first")
@click.option("--why", is_flag=True, help="adds what `growth` and `explain` find, in short")
@click.option("--since", metavar="MARK", help="adds what changed since that mark")
@json_option
def status(url: str, engine_url: str | None, since: str | None, *, ranks: bool, why: bool, as_json: bool) -> None:
    """Show on one screen whether all is well: what fills the memory, what happens next, and what to do.

    Exits with 0 if all is well, 1 if something needs attention, 2 if memory is very short or the engine is dead or
    hangs, 3 if no sidecar answers.
    """
    if since is not None and engine_url is not None:
        raise click.UsageError("--since: only a sidecar remembers marks; leave --engine-url out")
    with asked_at(url, engine_url) as asked:
        answer = asked.get("/memory", {} if since is None else {"since": since})
        if engine_url is not None and isinstance(answer.get("verdict"), dict):
            answer["verdict"] |= {"next": None, "do": None}  # of a policy that nobody runs, and a sidecar's
        report = report_of(answer)
        listed = asked.get("/memory/events", {"limit": str(EVENTS_KEPT)})
        found = asked.get("/memory/findings") if why else {"findings": []}
        with understood("/memory/findings"):
            known = _FOUND.validate_python(cleaned(found["findings"]))
    events = events_of(listed.get("events") if isinstance(listed, dict) else [])
    width, is_alone = shutil.get_terminal_size().columns, engine_url is not None

    def parts() -> Iterator[str]:
        yield status_text(report, events, url=engine_url or asked.url, now=time.time(), width=width, is_alone=is_alone)
        if ranks:
            yield ranks_text(report)
        if why:
            yield why_text(report, known, width, engine_url=engine_url)
        if since is not None:
            yield since_text(since, cleaned(answer.get("since")))

    click.echo(json.dumps(status_json(report, answer, events), indent=1) if as_json else "\n\n".join(parts()))
    sys.exit(report.verdict.exit_status)


# --- check: what the sidecar finds of the set-up, and what only its caller sees ---

_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red", "skip": "bright_black"}
_OPTIONAL_COUNTS = {"note": "could be better", "skip": "could not be checked"}
_CHECKS: Final = TypeAdapter(tuple[SetupCheck, ...])


@click.command(
    epilog=examples(
        "highwater check",
        "highwater check --url https://vllm-7:8001 || exit 1",
        "highwater check --engine-url http://vllm-7:8000      before there is a sidecar",
        "highwater check --json | jq -r '.findings[] | select(.level == \"fail\") | .change'",
    )
)
@url_option
@engine_option
@json_option
def check(url: str, engine_url: str | None, *, as_json: bool) -> None:
    """Check that engine and sidecar are set up correctly; say what to change.

    Changes nothing. Exits with 0 if all is as it should be, 1 if there is something to look at, 2 if
    something is wrong, 3 if no sidecar answers; never better than `highwater status`.
    """
    with asked_at(url, engine_url) as asked:
        report = report_of(asked.get("/memory"))
        with understood("/memory/findings"):
            own = _CHECKS.validate_python(cleaned(_optional(asked, "/memory/findings").get("checks", ())))
        if engine_url is not None:
            found = without_sidecar(own)
        else:
            token, with_token = find_token(asked.url, os.environ), None
            if token.value is not None:
                with SidecarClient(asked.url, token=token.value, timeout_seconds=ASK_SECONDS) as sidecar:
                    with_token = _access(_optional(sidecar, "/policy"))
            info = _optional(asked, "/memory/openapi.json").get("info")
            caller = Caller(
                url=asked.url,
                without_token=_access(_optional(asked, "/policy")),
                with_token=with_token,
                token_source=token.source,
                sidecar_version=cleaned(info.get("version")) if isinstance(info, dict) else None,
            )
            not_judged = shown("set-up", NotKnown(f"{asked.url} does not judge its set-up"))
            found = (*caller_checks(caller), *(own or (not_judged,)))
    ends_with = exit_code(found, report.verdict.exit_status)
    # https://no-color.org
    colour = False if os.environ.get("NO_COLOR") else None
    width = shutil.get_terminal_size().columns
    text = json.dumps(check_json(found, ends_with), indent=1) if as_json else check_text(found, headline(report), width)
    click.echo(text, color=colour)
    sys.exit(ends_with)


def _access(policy: Mapping[str, Any]) -> ControlAccess:
    """Return the access that an open path reports: the sidecar would count and log a denied call."""
    return next((known for known in get_args(ControlAccess) if known == policy.get("caller")), "unknown")


def _optional(sidecar: Asked, path: str) -> dict[str, Any]:
    """Return a path's JSON; empty if a sidecar of another version does not have it."""
    try:
        answer = sidecar.get(path)
    except SidecarRefused:
        return {}
    return answer if isinstance(answer, dict) else {}


def check_text(checks: Sequence[SetupCheck], first: str, width: int) -> str:
    lines = []
    for one in checks:
        text = wrapped(f"{one.level:<5} {one.name:<11} {one.text}", width, indent=18)
        lines.append(click.style(text[:5], fg=_COLOURS[one.level]) + text[5:])
        if one.change is not None:
            lines.append(wrapped(f"{'':<17} change: {one.change}", width, indent=18))
    counts = {level: sum(one.level == level for one in checks) for level in _COLOURS}
    warnings = "1 warning" if counts["warn"] == 1 else f"{counts['warn']} warnings"
    summary = [f"{counts['fail']} failed", warnings, f"{counts['ok']} ok"]
    summary += [f"{counts[name]} {text}" for name, text in _OPTIONAL_COUNTS.items() if counts[name]]
    return "\n".join([wrapped(first, width), ", ".join(summary), *lines])


def check_json(checks: Sequence[SetupCheck], ends_with: int) -> dict[str, Any]:
    return {"schema": SCHEMA, "exit_code": ends_with, "findings": [asdict(one) for one in checks]}
