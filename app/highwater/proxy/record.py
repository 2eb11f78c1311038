"""The figures of one request, for the counters and the access log."""

from __future__ import annotations

import time

from highwater.process.limited_log import printable
from highwater.proxy.access_log import EndedRequest
from highwater.proxy.request_head import RequestHead
from highwater.proxy.traffic import Result


class RequestRecord:
    """The figures of one request, which grow until it ends; `EndedRequest` says what each of them is.

    ``head`` is empty where it could not be read; ``started`` is by ``time.perf_counter``; ``request_bytes`` are the
    body's alone.
    """

    # Defaults here and not in __init__: a plain request changes few of them.
    status: int | None = None
    result: Result = "complete"
    reason: str | None = None
    request_bytes = 0
    response_bytes = 0
    first_byte_seconds: float | None = None
    held_seconds = 0.0
    was_reused: bool | None = None

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.started = time.perf_counter()

    def note_first_byte(self) -> None:
        self.first_byte_seconds = time.perf_counter() - self.started

    def ended(self, peer: str, path_class: str | None, status: int, seconds: float) -> EndedRequest:
        return EndedRequest(
            peer=peer,
            method=printable(self.head.method) or None,
            path=printable(self.head.path) or None,
            path_class=path_class,
            status=status,
            result=self.result,
            reason=self.reason,
            request_id=self.head.request_id().decode(),
            request_bytes=len(self.head.raw) + self.request_bytes,
            response_bytes=self.response_bytes,
            duration_seconds=seconds,
            time_to_first_byte_seconds=self.first_byte_seconds,
            held_seconds=self.held_seconds,
            engine_connection_reused=self.was_reused,
        )
