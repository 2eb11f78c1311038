"""The limits of one request."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Sizes in bytes, times in seconds."""

    max_header_bytes: int = 64 * 1024  # a larger request head gets 431
    max_body_bytes: int = 256 * 1024 * 1024  # a larger request body gets 413
    connect_seconds: float = 5.0
    first_byte_seconds: float = 600.0
    """From the request's last byte to the response's head: prefill behind a queue takes minutes. 0: no limit."""
    idle_seconds: float = 600.0
    """Between two pieces of a response, of an upload or in a tunnel, whichever side is waited for. 0: no limit."""
    slow_body_seconds: float = 300.0
    """The longest wait for all pieces of an upload, and a second more for each body_bytes_per_second that came: a byte
    now and then buys no time."""
    body_bytes_per_second: int = 512  # no link that carries images, and no live audio, is slower
    keepalive_seconds: float = 4.0
    """Idle engine connections are dropped before uvicorn, the engine's server, drops them after 5 s."""
    client_keepalive_seconds: float = 620.0  # a client's connection on which nothing happens is closed
    client_wait_seconds: float = 75.0
    """For a request's head from its first byte, for the whole body of a request to a sidecar path, and for a client to
    take a response that the sidecar made."""
    held_bytes_per_second: int = 8 * 1024
    """A complete response that waits for its client has client_wait_seconds, and a second more for so many bytes: it
    holds memory. Responses that still come from the engine are not held, and may be read as slowly as the client
    likes."""
    max_unread_bytes: int = 64 * 1024 * 1024
    """Response bytes that all clients of a port have not read; above it the clients with the most unread are cut."""
    max_connections: int | None = None
    """Clients connected at once that may send requests to the engine. None: no limit."""
    max_control_connections: int | None = None
    """Clients connected at once to a port that serves the control plane alone. None: no limit."""
    linger_seconds: float = 5.0
    """After an error that ends a connection, for the client to read it: closing on unread bytes would destroy it."""

    @property
    def tick_seconds(self) -> float:
        """The time between two checks of all clocks; no limit is kept more exactly than this."""
        shortest = min(
            self.first_byte_seconds or math.inf,
            self.idle_seconds or math.inf,
            self.keepalive_seconds,
            self.client_keepalive_seconds,
            self.client_wait_seconds,
            self.linger_seconds,
        )
        return min(max(shortest / 4, 0.005), 1.0)
