"""Checks of the set-up as the caller of a sidecar sees it: its version, the token, the transport. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from highwater import __version__
from highwater.diagnose.finding import finding
from highwater.diagnose.rules.setup import Answer, NotKnown, SetupCheck, shown
from highwater.process.admin_token import is_loopback
from highwater.process.errors import ATTENTION, CRITICAL, OK

# What lets a caller make control calls, or why they would be denied; "unknown" of a sidecar that does not report it.
ControlAccess: TypeAlias = Literal["token", "loopback", "no_token", "wrong_token", "closed", "unknown"]


NEEDS_SIDECAR: Final = "needs a sidecar"
_OF_SIDECAR: Final = ("sidecar", "control", "transport", "thresholds", "policy", "state file", "incidents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The set-up as the caller of a sidecar sees it.

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


def without_sidecar(checks: Sequence[SetupCheck]) -> tuple[SetupCheck, ...]:
    """Return the checks of an engine that has no sidecar; what asks about one is not answered, and stands last."""
    needs = NotKnown(NEEDS_SIDECAR)
    found = {one.name: one for one in checks} | {name: shown(name, needs) for name in _OF_SIDECAR}
    return tuple(sorted(found.values(), key=lambda one: one.text == needs))


def exit_code(checks: Sequence[SetupCheck], verdict: int) -> int:
    """``verdict``: its exit status; the worse of both counts, so that no command calls well what another does not."""
    levels = {check.level for check in checks}
    return max(verdict, CRITICAL if "fail" in levels else ATTENTION if "warn" in levels else OK)
