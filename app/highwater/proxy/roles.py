"""The interfaces between the parts of the data plane. Base classes, not protocols: compiled, a call is a C call."""

from __future__ import annotations

import asyncio

from mypy_extensions import trait

from highwater.proxy.access_log import RequestRecord
from highwater.proxy.failures import Failure
from highwater.proxy.forwarded import Forwarding
from highwater.proxy.request_head import Header
from highwater.proxy.response_head import ResponseHead
from highwater.proxy.transports import ReadSide, WriteSide, peer_of


class Exchange(RequestRecord):
    """One request of a client and its response; notified of what the client does."""

    def start(self) -> None:
        raise NotImplementedError

    def body(self, piece: bytes) -> None:
        raise NotImplementedError

    def body_ends(self, trailers: tuple[Header, ...]) -> None:
        raise NotImplementedError

    def client_full(self) -> None:
        raise NotImplementedError

    def client_ready(self) -> None:
        raise NotImplementedError

    def client_left(self) -> None:
        raise NotImplementedError

    def fail(self, failure: Failure) -> None:
        """End it, with an error for the client where one can still be sent."""
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError


@trait
class Requester:
    """The sender of a request to the engine; ``wants_bare_body``: without chunks, ``wants_tunnel``: a WebSocket."""

    to_head: bool
    wants_bare_body: bool
    wants_tunnel: bool

    def interim_response(self, raw: bytes) -> None:
        raise NotImplementedError

    def response_begins(self, head: ResponseHead, data: bytes) -> None:
        raise NotImplementedError

    def response_continues(self, data: bytes) -> None:
        raise NotImplementedError

    def response_ends(self, *, reusable: bool) -> None:
        raise NotImplementedError

    def tunnel_opens(self, head: ResponseHead) -> None:
        """Take the 101 by which the engine switched protocols; bytes follow."""
        raise NotImplementedError

    def engine_failed(self, failure: Failure) -> None:
        """Take the end of the connection, or of what could be understood of it; repeat the request where safe."""
        raise NotImplementedError

    def engine_full(self) -> None:
        raise NotImplementedError

    def engine_ready(self) -> None:
        raise NotImplementedError


class Client:
    transport: asyncio.Transport
    read_side: ReadSide  # held while the client's bytes cannot be taken
    write_side: WriteSide  # the only writer to the client
    forwarding: Forwarding | None  # adds headers that name the client to the engine

    @property
    def peer(self) -> str:
        return peer_of(self.transport)

    @property
    def unread_bytes(self) -> int:
        """The bytes written that neither the client nor its socket has taken."""
        return self.transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close at once; bytes that the client has not taken are lost."""
        self.write_side.abort()

    def tick(self) -> None:
        raise NotImplementedError

    def response_done(self, *, close: bool) -> None:
        raise NotImplementedError

    def cut(self, *, reset: bool) -> None:
        """End the response here, incomplete; `reset` where the connection's end alone would look clean."""
        raise NotImplementedError
