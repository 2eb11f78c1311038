"""Everything that can go wrong with a request, and how a client is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

_KINDS = {
    400: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    431: "request_too_large",
    501: "invalid_request_error",
    503: "service_unavailable_error",
}
SERVER_ERRORS = range(500, 600)
# What the engine did or did not do; every other error is the sidecar's refusal.
ENGINE_FAULTS = frozenset({502, 504})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request cannot go on: the status for the client, a label for the observer, a sentence for both logs."""

    status: int
    reason: str
    message: str
    retry_after: int | None = None
    """Seconds, where the same request may do better then."""


CLIENT_LEFT = Failure(499, "client_left", "the client left")
# An engine that is away is away for as long as it takes to start: a client's first retry is not to be its last.
_ENGINE_AWAY_SECONDS = 5
CONNECT_TIMEOUT = Failure(
    504,
    "connect_timeout",
    "no connection to the engine in time (proxy.connect_seconds)",
    retry_after=_ENGINE_AWAY_SECONDS,
)
CONNECT = Failure(502, "connect", "the engine does not accept connections", retry_after=_ENGINE_AWAY_SECONDS)
# It would take as long again.
NO_ANSWER = Failure(
    504,
    "first_byte_timeout",
    "no answer from the engine in time (proxy.first_byte_seconds); one that is not streamed begins when it is whole",
)
DISCONNECTED = Failure(
    502, "disconnected", "the engine closed the connection without an answer", retry_after=_ENGINE_AWAY_SECONDS
)
MALFORMED = Failure(502, "malformed", "the engine's answer is not HTTP")
BROKEN_OFF = Failure(502, "truncated", "the engine broke off within its answer")
UPLOAD_STALLED = Failure(
    504,
    "upload_stalled",
    "the engine stopped taking the request body (proxy.idle_seconds)",
    retry_after=_ENGINE_AWAY_SECONDS,
)
ANSWER_STALLED = Failure(504, "idle_timeout", "the engine's answer stood still (proxy.idle_seconds)")
CLIENT_STALLED = Failure(408, "client_stalled", "the request body stood still (proxy.idle_seconds)")
CLIENT_SLOW = Failure(408, "client_stalled", "the request body came too slowly (under 512 bytes/s)")
BODY_LATE = Failure(408, "client_stalled", "the request body took too long")
CLIENT_DEAF = Failure(499, "client_left", "the client stopped taking its answer (proxy.idle_seconds)")
STOPPING = Failure(503, "shutting_down", "the sidecar is stopping", retry_after=1)
NO_DESCRIPTORS = Failure(
    503,
    "file_descriptors",
    "the sidecar may open no more files and connections; raise its limit (ulimit -n) or lower proxy.max_connections",
    retry_after=1,
)


def too_many_connections(limit: int) -> Failure:
    """More clients are connected than may be."""
    message = f"more than {limit} clients are connected (proxy.max_connections)"
    return Failure(503, "too_many_connections", message, retry_after=1)


def bad_request(message: str) -> Failure:
    """What the client sent is not a request that may be passed on."""
    return Failure(400, "bad_request", message)


def body_too_large(limit: int) -> Failure:
    """A request body over the limit, in bytes."""
    return Failure(413, "body_too_large", f"the request body is larger than {limit} bytes (proxy.max_body_bytes)")


def head_too_large(limit: int) -> Failure:
    """A request head over the limit, in bytes; or what stands between the chunks of a body."""
    message = f"the request's head or trailers are larger than {limit} bytes (proxy.max_header_bytes)"
    return Failure(431, "head_too_large", message)


def error_answer(failure: Failure, request_id: bytes, *, close: bool, without_body: bool = False) -> bytes:
    """A whole HTTP answer, its body an error in the OpenAI API's shape."""
    kind = _KINDS.get(failure.status, "upstream_error" if failure.status in SERVER_ERRORS else "request_error")
    error = {"message": failure.message, "type": kind, "param": None, "code": failure.status}
    body = json.dumps({"error": error}).encode()
    lines = [
        b"HTTP/1.1 %d %b" % (failure.status, HTTPStatus(failure.status).phrase.encode()),
        b"date: %b" % formatdate(usegmt=True).encode(),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"x-request-id: %b" % request_id,
    ]
    if failure.retry_after is not None:
        lines.append(b"retry-after: %d" % failure.retry_after)
    if close:
        lines.append(b"connection: close")
    return b"\r\n".join([*lines, b"", b"" if without_body else body])
