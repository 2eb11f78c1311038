"""Read the facts for ``highwater check`` from a sidecar, and show the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import click

from highwater import __version__
from highwater.client.answers import events_of, report_of
from highwater.client.sidecar import SidecarClient
from highwater.commands.setup_checks import ControlAccess, SetupCheck, SetupFacts, exit_code
from highwater.errors import SidecarRefused
from highwater.files.admin_token import FoundToken
from highwater.readings.schema import SCHEMA
from highwater.text.printable import cleaned

_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red", "skip": "bright_black"}
_OPTIONAL_COUNTS = {"note": "could be better", "skip": "could not be checked"}


def gather(connect: Callable[[str | None], SidecarClient], token: FoundToken) -> SetupFacts:
    """Return what the checks judge; ``connect`` takes a token or None. Raises SidecarError without a sidecar."""
    with_token: ControlAccess | None = None
    if token.value is not None:
        with connect(token.value) as sidecar:
            with_token = _access(_optional(sidecar, "/policy"))
    with connect(None) as sidecar:
        report = report_of(sidecar.get("/memory"))
        listed = _optional(sidecar, "/memory/events")
        policy = _optional(sidecar, "/policy")
        info = _optional(sidecar, "/memory/openapi.json").get("info")
        return SetupFacts(
            url=sidecar.url,
            now=_optional(sidecar, "/memory/history", {"since": "9999999999"}).get("now") or time.time(),
            report=report,
            policy=cleaned(policy),
            incidents=cleaned(_optional(sidecar, "/memory/incidents")),
            events=events_of(listed.get("events")),
            without_token=_access(policy),
            with_token=with_token,
            token_source=token.source,
            sidecar_version=cleaned(info.get("version")) if isinstance(info, dict) else None,
            own_version=__version__,
            host=cleaned(_optional(sidecar, "/memory/host")),
            budget=cleaned(_optional(sidecar, "/memory/budget")),
        )


def _access(policy: Mapping[str, Any]) -> ControlAccess:
    """Return the access that an open path reports: the sidecar would count and log a denied call."""
    return next((known for known in get_args(ControlAccess) if known == policy.get("caller")), "unknown")


def _optional(sidecar: SidecarClient, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a path's JSON; empty if a sidecar of another version does not have it."""
    try:
        answer = sidecar.get(path, params)
    except SidecarRefused:
        return {}
    return answer if isinstance(answer, dict) else {}


def check_text(findings: Sequence[SetupCheck]) -> str:
    lines = []
    for finding in findings:
        lines.append(
            f"{click.style(f'{finding.level:<5}', fg=_COLOURS[finding.level])} {finding.name:<11} {finding.text}"
        )
        if finding.change is not None:
            lines.append(f"{'':<17} {click.style('change:', bold=True)} {finding.change}")
    counts = {level: sum(finding.level == level for finding in findings) for level in _COLOURS}
    warnings = "1 warning" if counts["warn"] == 1 else f"{counts['warn']} warnings"
    summary = [f"{counts['fail']} failed", warnings, f"{counts['ok']} ok"]
    summary += [f"{counts[name]} {text}" for name, text in _OPTIONAL_COUNTS.items() if counts[name]]
    return "\n".join([*lines, ", ".join(summary)])


def check_json(findings: Sequence[SetupCheck]) -> dict[str, Any]:
    return {"schema": SCHEMA, "exit_code": exit_code(findings), "findings": [asdict(finding) for finding in findings]}
