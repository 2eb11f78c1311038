"""The interfaces between the parts of the data plane. Base classes, not protocols: compiled, a call is a C call."""

from __future__ import annotations

import asyncio

from mypy_extensions import trait

from highwater.proxy.failures import Failure
from highwater.proxy.forwarded import Forwarding
from highwater.proxy.record import RequestRecord
from highwater.proxy.request_head import Header
from highwater.proxy.response_head import ResponseHead
from highwater.proxy.transports import ReadSide, WriteSide, peer_of


class Exchange(RequestRecord):
    """One request of a client and its response; notified of what the client does."""

    def start(self) -> None:
        """Begin to serve the request."""
        raise NotImplementedError

    def body(self, piece: bytes) -> None:
        """Take a piece of the request's body, or of a tunnel."""
        raise NotImplementedError

    def body_ends(self, trailers: tuple[Header, ...]) -> None:
        """Take the end of the request."""
        raise NotImplementedError

    def client_full(self) -> None:
        """Write no more for now."""
        raise NotImplementedError

    def client_ready(self) -> None:
        """Write on."""
        raise NotImplementedError

    def client_left(self) -> None:
        """End it: nobody waits for the response."""
        raise NotImplementedError

    def fail(self, failure: Failure) -> None:
        """End it, with an error for the client where one can still be sent."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Let this be the connection's last response."""
        raise NotImplementedError

    def tick(self) -> None:
        """Count one tick, and act on a deadline that has passed."""
        raise NotImplementedError


@trait
class Requester:
    """The sender of a request to the engine; notified of what the engine does.

    Attributes:
        to_head: The request is a HEAD.
        wants_bare_body: The client cannot read chunks.
        wants_tunnel: The request is for a WebSocket.
    """

    to_head: bool
    wants_bare_body: bool
    wants_tunnel: bool

    def interim_response(self, raw: bytes) -> None:
        """Take a 1xx head."""
        raise NotImplementedError

    def response_begins(self, head: ResponseHead, data: bytes) -> None:
        """Take the head, and the part of the body that came with it."""
        raise NotImplementedError

    def response_continues(self, data: bytes) -> None:
        """Take a piece of the body, in its framing unless `wants_bare_body`; or of a tunnel."""
        raise NotImplementedError

    def response_ends(self, *, reusable: bool) -> None:
        """Take the end of the response; `reusable` where the connection may serve another request."""
        raise NotImplementedError

    def tunnel_opens(self, head: ResponseHead) -> None:
        """Take the 101 by which the engine switched protocols; bytes follow."""
        raise NotImplementedError

    def engine_failed(self, failure: Failure) -> None:
        """Take the end of the connection, or of what could be understood of it."""
        raise NotImplementedError

    def engine_full(self) -> None:
        """Send no more for now."""
        raise NotImplementedError

    def engine_ready(self) -> None:
        """Send on."""
        raise NotImplementedError


class Client:
    """A client's connection.

    Attributes:
        transport: Of the connection.
        read_side: Held while the client's bytes cannot be taken.
        write_side: The only writer to the client.
        forwarding: Adds headers that name the client to the engine, if any.
    """

    transport: asyncio.Transport
    read_side: ReadSide
    write_side: WriteSide
    forwarding: Forwarding | None

    @property
    def peer(self) -> str:
        """The client's address and port."""
        return peer_of(self.transport)

    @property
    def unread_bytes(self) -> int:
        """The bytes written that neither the client nor its socket has taken."""
        return self.transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close at once; bytes that the client has not taken are lost."""
        self.write_side.abort()

    def tick(self) -> None:
        """Count one tick, and act on a deadline that has passed."""
        raise NotImplementedError

    def response_done(self, *, close: bool) -> None:
        """End the exchange: its response is complete."""
        raise NotImplementedError

    def cut(self, *, reset: bool) -> None:
        """End the response here, incomplete; `reset` where the connection's end alone would look clean."""
        raise NotImplementedError
