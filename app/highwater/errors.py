"""The exception tree: everything that this package raises on purpose.

::

    HighwaterError
    ├── SettingsError            a setting is wrong; carries every problem found
    ├── EngineError              a word said to the engine got no good answer
    │   ├── EngineUnreachable    no connection: it is down, starting, or the URL is wrong
    │   │   ├── EngineNotListening  connections are refused: no process has the port, or the socket
    │   │   └── EngineUntrusted  no TLS with it: a certificate that one side does not accept
    │   ├── EngineUnresponsive   connected, but no answer within the deadline
    │   ├── EngineRefused        an HTTP status that is not the one hoped for
    │   └── EngineGarbled        an answer that is not what the contract says
    ├── SidecarError             a command of ours got no good answer from a sidecar
    │   ├── SidecarUnreachable   nobody answers at the URL, or what answers is no sidecar
    │   └── SidecarRefused       it answered with an error; carries the status and what it said
    └── RequestError             an operator's request that cannot be served; carries the HTTP status
        ├── UnknownName          a remedy, rule, mark or value that does not exist (422)
        ├── CannotPlan           flags or a wish that no plan can be made of (422)
        ├── UnreachableWater     a rule's water that the engine cannot reach at rest (422)
        ├── Refused              would be unsafe or cannot help (409)
        ├── NotAvailable         the engine cannot do it now (503)
        ├── TooManyWaiting       so many wait for the same that one more is refused at once (503)
        ├── NotOffered           this engine's devices have nothing of the kind (501)
        ├── NoRoom               a disk has too little room for it (507)
        └── NotKept              it could not be written to the state file, and so was not done (507)

Foreign exceptions (httpx, json, pydantic) are mapped to these once, at the door where they arise, with ``from``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_SHOWN_LENGTH = 120


class HighwaterError(Exception):
    """The root of everything that Highwater raises on purpose."""


class SettingsError(HighwaterError):
    """One or more settings are wrong.

    Attributes:
        problems: One sentence each, naming the key, the value and what would be right.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class EngineError(HighwaterError):
    """The engine gave no good answer. ``reason`` is a bounded word for metrics."""

    reason = "error"


class EngineUnreachable(EngineError):
    """No connection to the engine could be made, or it broke before an answer."""

    reason = "unreachable"


class EngineNotListening(EngineUnreachable):
    """Connections are refused: no process has the port, or the socket."""


class EngineUntrusted(EngineUnreachable):
    """There is an engine, and no TLS with it: one side does not accept the other's certificate, or speaks none."""

    reason = "untrusted"


class EngineUnresponsive(EngineError):
    """The engine took the request and has not answered within the deadline."""

    reason = "unresponsive"


class EngineRefused(EngineError):
    """The engine answered with a status that means no.

    Attributes:
        status: The HTTP status.
    """

    reason = "refused"

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class EngineGarbled(EngineError):
    """The engine answered something that the contract does not allow."""

    reason = "garbled"


class SidecarError(HighwaterError):
    """A sidecar gave no good answer. The message is one line: what is wrong, and what to do."""


class SidecarUnreachable(SidecarError):
    """Nobody answers at the URL in time, or what answers there is no sidecar."""


class SidecarRefused(SidecarError):
    """The sidecar answered with an error.

    Attributes:
        status: The HTTP status.
        code: Its word for programs, as in the answer; empty where it has none.
        message: What the sidecar said, without advice.
        body: The answer as parsed JSON; ``None`` where it is not JSON. A reclaim that is refused (409) has its results.
    """

    def __init__(self, text: str, *, status: int, code: str, message: str, body: Any = None) -> None:  # noqa: ANN401
        self.status = status
        self.code = code
        self.message = message
        self.body = body
        super().__init__(text)


class RequestError(HighwaterError):
    """An operator's request that cannot be served.

    Attributes:
        status: The HTTP status that says so.
        code: A word for programs.
    """

    status = 400
    code = "bad_request"


class UnknownName(RequestError):
    """A name or value that does not exist; the message lists the ones that do."""

    status = 422
    code = "unknown_name"

    def __init__(self, key: str, value: object, allowed: Iterable[str]) -> None:
        choices = ", ".join(allowed) or "none yet"
        super().__init__(f"{key}: {value!r} is not known; allowed: {choices}")


class CannotPlan(RequestError):
    """Flags or a wish that no plan can be made of; the message names the key, the value and what would be right."""

    status = 422
    code = "cannot_plan"


class UnreachableWater(RequestError):
    """A rule's high or low water lies where the engine is at rest, or beyond: it would act for ever."""

    status = 422
    code = "unreachable_water"


class Refused(RequestError):
    """Doing it would put the engine or its traffic at risk, or cannot help."""

    status = 409
    code = "refused"


class NotAvailable(RequestError):
    """The engine cannot do it in its present state."""

    status = 503
    code = "engine_not_available"


class TooManyWaiting(RequestError):
    """As many requests as may wait for the same thing do so already."""

    status = 503
    code = "too_many_waiting"


class NotOffered(RequestError):
    """This engine cannot do it in any state."""

    status = 501
    code = "not_offered"


class NoRoom(RequestError):
    """A disk has too little room for what would be written."""

    status = 507
    code = "no_room"


class NotKept(RequestError):
    """It could not be written to the state file; what was kept before still is."""

    status = 507
    code = "not_kept"

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"state_file: {path} could not be written: {reason}; what was kept before still is")


# Where pydantic's own words say what Python would want, and not what an operator writes.
_PLAIN = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "tuple_type": "must be a JSON list",
}


def os_reason(exc: OSError) -> str:
    """Return the operating system's reason, as the middle of a sentence."""
    return (exc.strerror or str(exc)).lower()


def flaw(errors: Iterable[Mapping[str, Any]]) -> str:
    """The first of a pydantic error list, of a value that somebody else wrote: where, and what is wrong, never what."""
    first = next(iter(errors))
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}".removeprefix(": ")


def sentences(
    errors: Iterable[Mapping[str, Any]], nearest: Callable[[str], str | None] = lambda _: None
) -> Iterator[str]:
    """A pydantic error list as one sentence a problem: key, value, and what would be right. Never shows a token.

    Args:
        errors: As pydantic returns it.
        nearest: Returns the known key that is most like one that is not known; ``None`` where none is.
    """
    for error in errors:
        key = ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            near = nearest(key)
            yield f"{key}: there is no such key" + (f"; did you mean {near}?" if near else "")
            continue
        # A file that holds the token may be named; the token itself never is.
        is_secret = "token" in key and key != "admin_token_file"
        shown = "" if is_secret or error["type"] == "missing" or not key else f"{error['input']!r} "
        message = _PLAIN.get(error["type"]) or error["msg"].removeprefix("Value error, ")
        if error["type"] == "tuple_type" and not is_secret and str(error["input"]).startswith("/"):
            message += f", such as {json.dumps([error['input']])}"
        yield f"{key}: {shown if len(shown) <= _SHOWN_LENGTH else ''}{message}".removeprefix(": ")
