"""The end of a request that failed, as its client sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from highwater.proxy.failures import CLIENT_LEFT, SERVER_ERRORS, Failure
from highwater.proxy.traffic import Result

# The request's body is too large, too slow, or not HTTP: the connection ends with the response.
_UNREADABLE = frozenset({400, 408, 413, 431})


@dataclass(frozen=True, slots=True)
class Ending:
    """The way in which a request that failed ends for its client.

    The connection ``closes`` after the error response, or is reset by the cut.
    """

    result: Result
    action: Literal["nothing", "cut", "error"]
    closes: bool = False


def ending_before_response(failure: Failure, *, closes: bool, body_missing: bool, is_awaited: bool) -> Ending:
    """Decide how the client sees a failure before any response.

    The connection ``closes`` after this response in any case; the client sends a body that ``is_awaited`` after a 100
    only.
    """
    if failure.status == CLIENT_LEFT.status:
        return _left(failure)
    # The rest of the body is read and dropped, and the connection goes on, unless the body itself was the fault.
    unread = body_missing and (is_awaited or failure.status in _UNREADABLE)
    return Ending("refused", "error", closes=closes or unread)


def ending_within_response(failure: Failure, *, is_unframed: bool) -> Ending:
    """Decide how the client sees a failure within a response; ``is_unframed``: the connection's end would end it."""
    if failure.status == CLIENT_LEFT.status:
        return _left(failure)
    # Within a response only the client's own body can still be refused; any other failure cuts it short.
    return Ending("truncated" if failure.status in SERVER_ERRORS else "refused", "cut", closes=is_unframed)


def _left(failure: Failure) -> Ending:
    return Ending("client_left", "nothing") if failure is CLIENT_LEFT else Ending("client_left", "cut", closes=True)
