"""The exception tree: everything that this package raises on purpose; what nobody foresaw; and the exit codes.

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
        ├── 422 UnknownName, UnknownKey, CannotPlan, UnreachableWater
        ├── 409 Refused
        ├── 501 NotOffered
        ├── 503 NotAvailable, TooManyWaiting
        └── 507 NoRoom, NotKept

Foreign exceptions (httpx, json, pydantic) are mapped to these once, where they arise, with ``from``.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args


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

    def __init_subclass__(cls, *, reason: str | None = None) -> None:
        cls.reason = reason or cls.reason


class EngineUnreachable(EngineError, reason="unreachable"):
    """No connection to the engine could be made, or it broke before a response."""


class EngineNotListening(EngineUnreachable):
    """Connections are refused: no process has the port, or the socket."""


class EngineUntrusted(EngineUnreachable, reason="untrusted"):
    """The engine listens, but TLS fails: one side does not accept the other's certificate, or speaks no TLS."""


class EngineUnresponsive(EngineError, reason="unresponsive"):
    """The engine took the request and did not respond within the deadline."""


class EngineRefused(EngineError, reason="refused"):
    """The engine responded with an HTTP status that means no."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class EngineGarbled(EngineError, reason="garbled"):
    """The engine's response is not what the contract allows."""


class SidecarError(HighwaterError):
    """A sidecar did not respond as it should. The message is one line: what is wrong, and what to do."""


class SidecarUnreachable(SidecarError):
    """No response from the URL in time, or one that no sidecar sends."""


class SidecarRefused(SidecarError):
    """The sidecar responded with an error.

    ``code`` is for programs, empty where it has none; ``message`` is the sidecar's, without advice; ``body`` is its
    parsed JSON, ``None`` where it is not JSON. A refused reclaim (409) has its results.
    """

    def __init__(self, text: str, *, status: int, code: str, message: str, body: Any = None) -> None:  # noqa: ANN401 - JSON
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


class UnknownKey(RequestError, status=422, code="invalid"):
    """A key that the path does not take; the message names it, its value, and what was probably meant."""


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


def os_reason(exc: OSError) -> str:
    return (exc.strerror or str(exc)).lower()


# --- what nobody foresaw ---

Part: TypeAlias = Literal[
    "poller", "policy", "shared_devices", "host", "incidents", "diagnosis", "growth", "proxy", "http"
]


class InternalErrors:
    def __init__(self) -> None:
        self.counts: Counter[Part] = Counter(dict.fromkeys(get_args(Part), 0))

    def counter(self, part: Part) -> Callable[[], None]:
        return partial(self.counts.update, (part,))


@contextmanager
def contained(
    internal_error: Callable[[], None], log: logging.Logger, message: str, *arguments: object
) -> Iterator[None]:
    """Log and count what is raised inside, and go on after it: a failing part costs one round of itself."""
    try:
        yield
    except Exception:
        # Broad: it is for what nobody foresaw.
        internal_error()
        log.exception(message, *arguments)


# --- exit codes: a name for each meaning, and the table of docs/terminal.md ---

OK: Final = 0
FAILED: Final = 1  # click's, too, for an error that ends a command with one line
INVALID: Final = 2  # click's, too, for a command line that cannot be understood
NO_SIDECAR: Final = 3
CANNOT_BE_ASKED: Final = 4

# What a judgement ends with, beside OK.
ATTENTION: Final = 1
CRITICAL: Final = 2
DOES_NOT_FIT: Final = 1

# In a response of the sidecar: what a command that shows it ends with.
EXIT_STATUS_HEADER: Final = "Highwater-Exit-Status"

# As shells report what they cannot start.
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127


def by_signal(number: int) -> int:
    """Return the code by which shells and container runtimes report the end by a signal."""
    return 128 + number


HUNG_UP: Final = by_signal(signal.SIGHUP)
INTERRUPTED: Final = by_signal(signal.SIGINT)
TERMINATED: Final = by_signal(signal.SIGTERM)

# `highwater measure` ends with its command's own code where that failed.
MEANINGS: Final[Sequence[tuple[Sequence[int], str]]] = (
    ((OK,), "done, or all is well"),
    (
        (FAILED,),
        "refused or failed; `status`, `check`, `host`, `growth`: something to look at; `plan`: it does not fit, or may "
        "not; `serve`: the start failed",
    ),
    (
        (INVALID,),
        "`status`, `check`: memory is very short, or the engine is dead or hangs; `check`: the set-up is wrong; "
        "`plan`: the input is refused; `serve`: invalid settings, or a port that is taken; or an invalid command line",
    ),
    ((NO_SIDECAR,), "no sidecar answers at the URL; stderr says what does, and what to do"),
    ((CANNOT_BE_ASKED,), "`plan`: this vLLM cannot be asked"),
    ((NOT_EXECUTABLE, NOT_FOUND), "`measure`: the command is not executable, or not found"),
    ((HUNG_UP, INTERRUPTED, TERMINATED), "`top`: its terminal was closed; interrupted; terminated"),
)
