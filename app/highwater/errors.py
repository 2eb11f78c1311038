"""The exception tree: everything that this package raises on purpose.

::

    HighwaterError
    ├── SettingsError
    ├── EngineError                   the engine did not respond as it should
    │   ├── EngineUnreachable
    │   │   └── EngineNotListening, EngineUntrusted
    │   └── EngineUnresponsive, EngineRefused, EngineGarbled
    ├── SidecarError                  a command's sidecar did not respond as it should
    │   └── SidecarUnreachable, SidecarRefused
    └── RequestError                  an operator's request that cannot be served, by HTTP status
        ├── 422 UnknownName, CannotPlan, UnreachableWater
        ├── 409 Refused
        ├── 501 NotOffered
        ├── 503 NotAvailable, TooManyWaiting
        └── 507 NoRoom, NotKept

Foreign exceptions (httpx, json, pydantic) are mapped to these once, where they arise, with ``from``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_SHOWN_LENGTH = 120
_LIKE_A_URL = re.compile("://|:.*(@|%40|%2540|\uff20)", re.DOTALL)


class HighwaterError(Exception):
    """The root of everything that Highwater raises on purpose."""


class SettingsError(HighwaterError):
    """One or more settings are wrong; each of ``problems`` names the key, the value and what would be right."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class EngineError(HighwaterError):
    """The engine did not respond as it should. ``reason`` is a label of metrics."""

    reason = "error"


class EngineUnreachable(EngineError):
    """No connection to the engine could be made, or it broke before a response."""

    reason = "unreachable"


class EngineNotListening(EngineUnreachable):
    """Connections are refused: no process has the port, or the socket."""


class EngineUntrusted(EngineUnreachable):
    """The engine listens, but TLS fails: one side does not accept the other's certificate, or speaks no TLS."""

    reason = "untrusted"


class EngineUnresponsive(EngineError):
    """The engine took the request and did not respond within the deadline."""

    reason = "unresponsive"


class EngineRefused(EngineError):
    """The engine responded with an HTTP status that means no."""

    reason = "refused"

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class EngineGarbled(EngineError):
    """The engine's response is not what the contract allows."""

    reason = "garbled"


class SidecarError(HighwaterError):
    """A sidecar did not respond as it should. The message is one line: what is wrong, and what to do."""


class SidecarUnreachable(SidecarError):
    """No response from the URL in time, or one that no sidecar sends."""


class SidecarRefused(SidecarError):
    """The sidecar responded with an error.

    Attributes:
        status: The HTTP status.
        code: The error's code, for programs; empty where it has none.
        message: The sidecar's, without advice.
        body: The response as parsed JSON; ``None`` where it is not JSON. A refused reclaim (409) has its results.
    """

    def __init__(self, text: str, *, status: int, code: str, message: str, body: Any = None) -> None:  # noqa: ANN401
        self.status = status
        self.code = code
        self.message = message
        self.body = body
        super().__init__(text)


class RequestError(HighwaterError):
    """An operator's request that cannot be served; subclasses name the HTTP status, and a code for programs."""

    status = 400
    code = "bad_request"

    def __init_subclass__(cls, *, status: int, code: str) -> None:
        cls.status, cls.code = status, code


class UnknownName(RequestError, status=422, code="unknown_name"):
    """A name or value that does not exist; the message lists the ones that do."""

    def __init__(self, key: str, value: object, allowed: Iterable[str]) -> None:
        choices = ", ".join(allowed) or "none yet"
        super().__init__(f"{key}: {value!r} is not known; allowed: {choices}")


class CannotPlan(RequestError, status=422, code="cannot_plan"):
    """No plan can satisfy these flags or wishes; the message names the key, the value and what would be right."""


class UnreachableWater(RequestError, status=422, code="unreachable_water"):
    """A rule's high or low water is at or beyond what the idle engine uses: it would act without end."""


class Refused(RequestError, status=409, code="refused"):
    """It would put the engine or its traffic at risk, or cannot help."""


class NotAvailable(RequestError, status=503, code="engine_not_available"):
    """The engine cannot do it in its present state."""


class TooManyWaiting(RequestError, status=503, code="too_many_waiting"):
    """The limit of requests that may wait for the same thing is reached."""


class NotOffered(RequestError, status=501, code="not_offered"):
    """This engine cannot do it in any state."""


class NoRoom(RequestError, status=507, code="no_room"):
    """The disk has too little room for the file."""


class NotKept(RequestError, status=507, code="not_kept"):
    """The state file could not be written; its last content remains."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"state_file: {path} could not be written: {reason}; what was kept before still is")


# Where pydantic names a Python type, and not what an operator writes.
_PLAIN = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "tuple_type": "must be a JSON list",
}


def os_reason(exc: OSError) -> str:
    """Return the operating system's reason, as the middle of a sentence."""
    return (exc.strerror or str(exc)).lower()


def flaw(errors: Iterable[Mapping[str, Any]]) -> str:
    """Return the first of a pydantic error list, of a value from outside: where, and what is wrong, never the value."""
    first = next(iter(errors))
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}".removeprefix(": ")


def without_credentials(url: object) -> object:
    """Return what may be shown of a URL, with ``***`` for what may hold a password: user, query and fragment.

    Nothing is shown of a list or a section, nor of a URL in which a query and a password cannot be told apart.
    """
    if not isinstance(url, str):
        return url if url is None or isinstance(url, int | float) else "***"
    # A URL that was encoded as a whole writes an @ as %40; a full-width one is an @ to those who normalize it.
    *before, rest = re.split("@|%40|%2540|\uff20", url)
    if any(mark in part for part in before for mark in "?#"):
        return "***"
    masked = re.sub("([?#]).*", r"\1***", rest, flags=re.DOTALL)
    return f"***@{masked}" if before else masked


@dataclass(frozen=True, slots=True)
class MayHoldSecret:
    """Marks the type of a field whose value may hold a secret: ``Annotated[str, MayHoldSecret(...)]``.

    ``shown`` returns what of an invalid value an error may show; without it nothing is shown.
    """

    shown: Callable[[object], object] | None = None


def sentences(
    errors: Iterable[Mapping[str, Any]],
    nearest: Callable[[str], str | None] = lambda _: None,
    *,
    fields: Mapping[str, FieldInfo] = MappingProxyType({}),
) -> Iterator[str]:
    """Return a pydantic error list as one sentence a problem: key, value, and what would be right. Shows no secret.

    ``nearest`` returns the known key that is most like an unknown one. ``fields`` are those of the model by dotted key:
    what is `MayHoldSecret` among them is shown as that says.
    """
    for error in errors:
        key = ".".join(str(masked(part)) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            near = nearest(key)
            yield f"{key}: there is no such key" + (f"; did you mean {near}?" if near else "")
            continue
        shown = "" if error["type"] == "missing" or not key else _shown(error["input"], fields.get(key))
        message = _PLAIN.get(error["type"]) or error["msg"].removeprefix("Value error, ")
        if shown and error["type"] == "tuple_type" and str(error["input"]).startswith("/"):
            message += f", such as {json.dumps([error['input']])}"
        yield f"{key}: {shown if len(shown) <= _SHOWN_LENGTH else ''}{message}".removeprefix(": ")


def _shown(given: object, field: FieldInfo | None) -> str:
    for mark in () if field is None else field.metadata:
        if isinstance(mark, MayHoldSecret):
            return "" if mark.shown is None else f"{mark.shown(given)!r} "
    return f"{masked(given)!r} "


def masked(given: object) -> object:
    """Return a refused value without the credentials of its URLs: one may be given where none belongs, also as key."""
    if isinstance(given, str):
        return without_credentials(given) if _LIKE_A_URL.search(given) else given
    if isinstance(given, Mapping):
        return {masked(key): masked(value) for key, value in given.items()}
    if isinstance(given, list | tuple):
        parts = [masked(each) for each in given]
        return parts if isinstance(given, list) else tuple(parts)
    return given
