"""What one request may take, and who is told about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    idle_seconds: float = 600.0
    """Between two pieces of an answer, of an upload or in a tunnel, whoever keeps the other waiting."""
    slow_body_seconds: float = 300.0
    """Waiting for pieces of an upload may take so long in all, and a second more for each body_bytes_per_second that
    came: a byte now and then buys no time."""
    body_bytes_per_second: int = 512
    """No link that carries images, and no live audio, is slower."""
    keepalive_seconds: float = 4.0
    """Idle engine connections are dropped before uvicorn, the engine's server, drops them after 5 s."""
    client_keepalive_seconds: float = 75.0
    """An idle client's connection is closed; also one whose request head takes so long from its first byte."""
    held_bytes_per_second: int = 8 * 1024
    """A complete answer that waits for its client has client_keepalive_seconds, and a second more for so many bytes: it
    is memory that nobody else gets meanwhile. Answers that still come from the engine are not held, and may be read as
    slowly as the client likes."""
    linger_seconds: float = 5.0
    """After an error that ends a connection, for the client to read it: closing on unread bytes would destroy it."""

    @property
    def tick_seconds(self) -> float:
        """How often times are looked at; no limit is kept more exactly than this."""
        shortest = min(
            self.first_byte_seconds or self.idle_seconds,
            self.idle_seconds,
            self.keepalive_seconds,
            self.client_keepalive_seconds,
            self.linger_seconds,
        )
        return min(max(shortest / 4, 0.005), 1.0)


class ProxyObserver(Protocol):
    """Who counts. Every label it is given comes from a small fixed set."""

    def request_started(self, path_class: str) -> None:
        """A request arrived."""

    def request_ended(self, path_class: str, method: str, code: int, first_byte_seconds: float | None) -> None:
        """It is over; the code is what the client saw, 499 if it left before an answer began."""

    def client_disconnected(self) -> None:
        """The client left before its answer was complete."""

    def upstream_error(self, reason: str) -> None:
        """The engine failed this request."""

    def request_shed(self, reason: str) -> None:
        """This request was not let through: the gate was closed for a cache reset."""


class Unobserved(ProxyObserver):
    """The observer that counts nothing."""
