"""``highwater check``: what the sidecar finds of the set-up, what only its caller sees, and both as text and JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import click
from pydantic import TypeAdapter

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
from highwater.http.text.status import headline, wrapped
from highwater.model.report import SCHEMA
from highwater.process.admin_token import find_token
from highwater.process.errors import SidecarRefused
from highwater.process.untrusted import cleaned
from highwater.terminal.asking import ASK_SECONDS, Asked, asked_at
from highwater.terminal.client import SidecarClient, report_of, understood
from highwater.terminal.options import engine_option, examples, json_option, url_option

_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red", "skip": "bright_black"}
_OPTIONAL_COUNTS = {"note": "could be better", "skip": "could not be checked"}
_CHECKS = TypeAdapter(tuple[SetupCheck, ...])


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
        report, own = report_of(asked.get("/memory")), _checks(_optional(asked, "/memory/findings"))
        if engine_url is not None:
            found = without_sidecar(own)
        else:
            not_judged = shown("set-up", NotKnown(f"{asked.url} does not judge its set-up"))
            found = (*caller_checks(_caller(asked)), *(own or (not_judged,)))
    ends_with = exit_code(found, report.verdict.exit_status)
    # https://no-color.org
    colour = False if os.environ.get("NO_COLOR") else None
    width = shutil.get_terminal_size().columns
    text = json.dumps(check_json(found, ends_with), indent=1) if as_json else check_text(found, headline(report), width)
    click.echo(text, color=colour)
    sys.exit(ends_with)


def _checks(judged: Any) -> tuple[SetupCheck, ...]:  # noqa: ANN401 - JSON
    with understood("/memory/findings"):
        return _CHECKS.validate_python(cleaned(judged.get("checks", ())))


def _caller(asked: Asked) -> Caller:
    token, with_token = find_token(asked.url, os.environ), None
    if token.value is not None:
        with SidecarClient(asked.url, token=token.value, timeout_seconds=ASK_SECONDS) as sidecar:
            with_token = _access(_optional(sidecar, "/policy"))
    info = _optional(asked, "/memory/openapi.json").get("info")
    return Caller(
        url=asked.url,
        without_token=_access(_optional(asked, "/policy")),
        with_token=with_token,
        token_source=token.source,
        sidecar_version=cleaned(info.get("version")) if isinstance(info, dict) else None,
    )


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
