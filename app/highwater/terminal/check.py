"""``highwater check``: what the sidecar finds of the set-up, what only its caller sees, and both as text and JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import click
from pydantic import TypeAdapter

from highwater import __version__
from highwater.diagnose.finding import finding
from highwater.diagnose.rules.setup import Answer, NotKnown, SetupCheck, shown
from highwater.model.schema import SCHEMA
from highwater.process.admin_token import FoundToken, find_token, is_loopback
from highwater.process.errors import SidecarRefused
from highwater.process.exit_codes import ATTENTION, CRITICAL, OK
from highwater.process.untrusted import cleaned
from highwater.terminal.asking import ASK_SECONDS, ending_well
from highwater.terminal.client import SidecarClient, understood
from highwater.terminal.options import examples, json_option, url_option

# What lets a caller make control calls, or why they would be denied; "unknown" of a sidecar that does not report it.
ControlAccess: TypeAlias = Literal["token", "loopback", "no_token", "wrong_token", "closed", "unknown"]

_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red", "skip": "bright_black"}
_OPTIONAL_COUNTS = {"note": "could be better", "skip": "could not be checked"}
_CHECKS = TypeAdapter(tuple[SetupCheck, ...])


@click.command(
    epilog=examples(
        "highwater check",
        "highwater check --url https://vllm-7:8001 || exit 1",
        "highwater check --json | jq -r '.findings[] | select(.level == \"fail\") | .change'",
    )
)
@url_option
@json_option
def check(url: str, *, as_json: bool) -> None:
    """Check that engine and sidecar are set up correctly; say what to change.

    Changes nothing. Exits with 0 if all is as it should be, 1 if there is something to look at, 2 if
    something is wrong, 3 if no sidecar answers.
    """
    with ending_well():
        found = gather(
            lambda held: SidecarClient(url, token=held, timeout_seconds=ASK_SECONDS), find_token(url, os.environ)
        )
    # https://no-color.org
    colour = False if os.environ.get("NO_COLOR") else None
    click.echo(json.dumps(check_json(found), indent=1) if as_json else check_text(found), color=colour)
    sys.exit(exit_code(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What only the caller of a sidecar can see.

    Attributes:
        with_token: With the token that was found here; ``None`` if none was found.
        token_source: Where it was found, or why it was not.
        sidecar_version: ``None`` if the sidecar does not report it.
    """

    url: str
    without_token: ControlAccess
    with_token: ControlAccess | None = None
    token_source: str = ""
    sidecar_version: str | None = None


def gather(connect: Callable[[str | None], SidecarClient], token: FoundToken) -> tuple[SetupCheck, ...]:
    """Return every check; ``connect`` takes a token or None. Raises SidecarError without a sidecar."""
    with_token: ControlAccess | None = None
    if token.value is not None:
        with connect(token.value) as sidecar:
            with_token = _access(_optional(sidecar, "/policy"))
    with connect(None) as sidecar:
        sidecar.get("/memory")
        info = _optional(sidecar, "/memory/openapi.json").get("info")
        caller = Caller(
            url=sidecar.url,
            without_token=_access(_optional(sidecar, "/policy")),
            with_token=with_token,
            token_source=token.source,
            sidecar_version=cleaned(info.get("version")) if isinstance(info, dict) else None,
        )
        judged = _optional(sidecar, "/memory/findings")
        with understood("/memory/findings"):
            found = _CHECKS.validate_python(cleaned(judged.get("checks", ())))
    return *caller_checks(caller), *(found or (shown("set-up", NotKnown(f"{sidecar.url} does not judge its set-up")),))


def caller_checks(caller: Caller) -> Iterator[SetupCheck]:
    yield shown("sidecar", _sidecar(caller))
    yield shown("control", _control(caller))
    yield shown("transport", _transport(caller))


def _sidecar(caller: Caller) -> Answer:
    version = caller.sidecar_version
    if version == __version__:
        return f"version {version} at {caller.url}"
    return finding("sidecar_version", version=version, url=caller.url, own_version=__version__)


def _control(caller: Caller) -> Answer:
    if caller.with_token == "wrong_token":  # noqa: S105 - a word, no secret
        return finding("token_wrong", source=caller.token_source)
    if caller.without_token == "closed":  # noqa: S105 - likewise
        return finding("control_closed")
    if caller.without_token == "no_token":  # noqa: S105 - likewise
        if caller.with_token == "token":  # noqa: S105 - likewise
            return "control calls need the admin token, and the one here is right"
        return finding("token_missing", source=caller.token_source)
    if caller.without_token == "loopback":  # noqa: S105 - likewise
        return "trust_loopback is set: callers from the sidecar's machine need no token"
    return NotKnown("it is not known who may make control calls")


def _transport(caller: Caller) -> Answer:
    parts = urlsplit(caller.url)
    if parts.scheme == "https" or is_loopback(parts.hostname or ""):
        return "TLS" if parts.scheme == "https" else "does not leave this machine"
    return "plain HTTP, and no token is sent" if caller.with_token is None else finding("token_in_plain_http")


def _access(policy: Mapping[str, Any]) -> ControlAccess:
    """Return the access that an open path reports: the sidecar would count and log a denied call."""
    return next((known for known in get_args(ControlAccess) if known == policy.get("caller")), "unknown")


def _optional(sidecar: SidecarClient, path: str) -> dict[str, Any]:
    """Return a path's JSON; empty if a sidecar of another version does not have it."""
    try:
        answer = sidecar.get(path)
    except SidecarRefused:
        return {}
    return answer if isinstance(answer, dict) else {}


def exit_code(checks: Sequence[SetupCheck]) -> int:
    levels = {check.level for check in checks}
    return CRITICAL if "fail" in levels else ATTENTION if "warn" in levels else OK


def check_text(checks: Sequence[SetupCheck]) -> str:
    lines = []
    for one in checks:
        lines.append(f"{click.style(f'{one.level:<5}', fg=_COLOURS[one.level])} {one.name:<11} {one.text}")
        if one.change is not None:
            lines.append(f"{'':<17} {click.style('change:', bold=True)} {one.change}")
    counts = {level: sum(one.level == level for one in checks) for level in _COLOURS}
    warnings = "1 warning" if counts["warn"] == 1 else f"{counts['warn']} warnings"
    summary = [f"{counts['fail']} failed", warnings, f"{counts['ok']} ok"]
    summary += [f"{counts[name]} {text}" for name, text in _OPTIONAL_COUNTS.items() if counts[name]]
    return "\n".join([*lines, ", ".join(summary)])


def check_json(checks: Sequence[SetupCheck]) -> dict[str, Any]:
    return {"schema": SCHEMA, "exit_code": exit_code(checks), "findings": [asdict(one) for one in checks]}
