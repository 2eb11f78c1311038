"""The ways in which a request can fail, and the error response that a client gets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    431: "request_too_large",
    501: "invalid_request_error",
    508: "loop_detected",
    503: "service_unavailable_error",
}
SERVER_ERRORS = range(500, 600)
# The request's body is too large, too slow, or not HTTP: the connection ends with the response.
UNREADABLE = frozenset({400, 408, 413, 431})
# What the engine did or did not do; every other error is the sidecar's refusal.
ENGINE_FAULTS = frozenset({502, 504})


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a request: the status for the client, a label for the observer, a sentence for both logs."""

    status: int
    reason: str
    message: str
    retry_after: int | None = None  # seconds after which the same request may succeed


class Refused(Exception):
    """The request is malformed, or gate or door refuse it; ``failure`` is the client's answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


LOOP_STATUS = 508


def loop(engine: str) -> Failure:
    return Failure(
        LOOP_STATUS,
        "loop",
        f"engine_url ({engine}) leads back to this sidecar itself; set engine_url to vLLM's own address",
    )


CLIENT_LEFT = Failure(499, "client_left", "the client left")
RETRY_AFTER_SECONDS = 5
"""For an engine that starts, sleeps or is busy. Starting takes long: a client's first retry must not be its last."""
CONNECT_TIMEOUT = Failure(
    504,
    "connect_timeout",
    "no connection to the engine in time (proxy.connect_seconds)",
    retry_after=RETRY_AFTER_SECONDS,
)
CONNECT = Failure(502, "connect", "the engine does not accept connections", retry_after=RETRY_AFTER_SECONDS)
# Without retry_after: the same request would take as long again.
NO_RESPONSE = Failure(
    504,
    "first_byte_timeout",
    "no response from the engine in time (proxy.first_byte_seconds); one that is not streamed begins when it is whole",
)
DISCONNECTED = Failure(
    502, "disconnected", "the engine closed the connection without a response", retry_after=RETRY_AFTER_SECONDS
)
MALFORMED = Failure(502, "malformed", "the engine's response is not HTTP")
BROKEN_OFF = Failure(502, "truncated", "the engine closed the connection in the middle of its response")
UPLOAD_STALLED = Failure(
    504,
    "upload_stalled",
    "the engine stopped taking the request body (proxy.idle_seconds)",
    retry_after=RETRY_AFTER_SECONDS,
)
RESPONSE_STALLED = Failure(504, "idle_timeout", "the engine's response stopped coming (proxy.idle_seconds)")
CLIENT_STALLED = Failure(408, "client_stalled", "the request body stopped coming (proxy.idle_seconds)")
BODY_LATE = Failure(408, "client_stalled", "the request body took too long")
CLIENT_NOT_READING = Failure(499, "client_left", "the client stopped reading its response (proxy.idle_seconds)")
STOPPING = Failure(503, "shutting_down", "the sidecar is stopping", retry_after=1)
NO_DESCRIPTORS = Failure(
    503,
    "file_descriptors",
    "the sidecar may open no more files and connections; raise its limit (ulimit -n) or lower proxy.max_connections",
    retry_after=1,
)


def too_many_connections(limit: int, where: str) -> Failure:
    return Failure(503, "too_many_connections", f"more than {limit} clients are connected {where}", retry_after=1)


def bad_request(message: str) -> Failure:
    return Failure(400, "bad_request", message)


def body_too_slow(bytes_per_second: int) -> Failure:
    return Failure(408, "client_stalled", f"the request body came too slowly (under {bytes_per_second} bytes/s)")


def body_too_large(limit: int) -> Failure:
    return Failure(413, "body_too_large", f"the request body is larger than {limit} bytes (proxy.max_body_bytes)")


def head_too_large(limit: int) -> Failure:
    message = f"the request's head or trailers are larger than {limit} bytes (proxy.max_header_bytes)"
    return Failure(431, "head_too_large", message)


def error_body(status: int, code: str, message: str) -> dict[str, object]:
    """Return the one body that errors have, in the OpenAI API's shape: ``code`` is a word for programs."""
    kind = _KINDS.get(status, "upstream_error" if status in SERVER_ERRORS else "request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_response(failure: Failure, request_id: bytes, *, close: bool, without_body: bool) -> bytes:
    body = json.dumps(error_body(failure.status, failure.reason, failure.message)).encode()
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
