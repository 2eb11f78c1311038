"""What one request may take, and what is counted of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from app.traffic import Result


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Sizes in bytes, times in seconds."""

    max_header_bytes: int = 64 * 1024
    """A larger request head gets 431."""
    max_body_bytes: int = 256 * 1024 * 1024
    """A larger request body gets 413."""
    connect_seconds: float = 5.0
    first_byte_seconds: float | None = 600.0
    """From the request's last byte to the answer's head: prefill behind a queue takes minutes. None waits for ever."""
    idle_seconds: float | None = 600.0
    """Between two pieces of an answer, of an upload or in a tunnel, whoever keeps the other waiting. None waits for
    ever."""
    slow_body_seconds: float = 300.0
    """Waiting for pieces of an upload may take so long in all, and a second more for each body_bytes_per_second that
    came: a byte now and then buys no time."""
    body_bytes_per_second: int = 512
    """No link that carries images, and no live audio, is slower."""
    keepalive_seconds: float = 4.0
    """Idle engine connections are dropped before uvicorn, the engine's server, drops them after 5 s."""
    client_keepalive_seconds: float = 620.0
    """A client's connection on which nothing happens is closed."""
    client_wait_seconds: float = 75.0
    """For a request's head from its first byte, for the whole body of one for our own paths, and for an answer of ours
    to be taken."""
    held_bytes_per_second: int = 8 * 1024
    """A complete answer that waits for its client has client_wait_seconds, and a second more for so many bytes: it is
    memory that nobody else gets meanwhile. Answers that still come from the engine are not held, and may be read as
    slowly as the client likes."""
    max_unread_bytes: int = 64 * 1024 * 1024
    """Of answers that clients have not read, all together: beyond it those go that leave most."""
    max_connections: int | None = None
    """Clients connected at once that may ask the engine; None: any number."""
    linger_seconds: float = 5.0
    """After an error that ends a connection, for the client to read it: closing on unread bytes would destroy it."""

    @property
    def tick_seconds(self) -> float:
        """How often times are looked at; no limit is kept more exactly than this."""
        shortest = min(
            self.first_byte_seconds or math.inf,
            self.idle_seconds or math.inf,
            self.keepalive_seconds,
            self.client_keepalive_seconds,
            self.client_wait_seconds,
            self.linger_seconds,
        )
        return min(max(shortest / 4, 0.005), 1.0)


class ProxyObserver(Protocol):
    """Counts requests. Every label it is given comes from a small fixed set."""

    def request_started(self) -> None:
        """A request for the engine arrived."""

    def request_ended(
        self,
        path_class: str,
        method: str,
        code: int,
        result: Result,
        *,
        seconds: float,
        first_byte_seconds: float | None,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """It is over; the code is what the client saw, 499 if it left before an answer began."""

    def upstream_error(self, reason: str) -> None:
        """The engine failed a request."""

    def request_refused(self, reason: str) -> None:
        """The sidecar refused a request: it was not passed on, or not to its end."""


class Unobserved(ProxyObserver):
    """The observer that counts nothing."""
