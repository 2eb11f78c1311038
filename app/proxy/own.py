"""The sidecar's own paths: handed to uvicorn's HTTP, one protocol object of its for each request.

uvicorn sees a connection that carries this request alone. What it does with connections, such as closing those that
are idle, remains the affair of the connection that clients really have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.proxy.failures import BODY_LATE, Failure, error_answer
from app.proxy.heads import Header, RequestHead
from app.proxy.roles import Client, Conversation

_READER = "own"


class OwnConversation(Conversation):
    """One request to the ASGI application, and its answer.

    Args:
        client: gets the answer.
        head: the request's.
        config: uvicorn's, which knows the application.
        server_state: uvicorn's; it waits for the tasks in it when it stops.
        app_state: the lifespan's.
        body_ticks: how long the request's body may take, all of it: ours are small.
        deaf_ticks: how long the client may take none of its answer.
    """

    def __init__(
        self,
        client: Client,
        head: RequestHead,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        body_ticks: float,
        deaf_ticks: float,
    ) -> None:
        self._head = head
        self._body_ticks, self._deaf_ticks = body_ticks, deaf_ticks
        self._has_asked = not head.has_body
        self._client_is_full = False
        self._quiet = 0  # ticks in which the client has kept us waiting
        self._server = _Server(config, server_state, app_state, self._answered)
        self._server.connection_made(cast("asyncio.Transport", _LentTransport(client)))
        # The connection is in there itself; this one is not to be closed when it is idle.
        server_state.connections.discard(self._server)
        self._client: Client | None = client

    def start(self) -> None:
        """Begin."""
        self._server.data_received(self._head.for_ourselves())
        if self._head.expects_continue:
            # A client that waits to be asked for its body, and is not: what it sends next cannot be told from its body.
            self._server.cycle.keep_alive = False

    def body(self, piece: bytes) -> None:
        """A piece of the request's body."""
        self._server.data_received(b"%x\r\n%b\r\n" % (len(piece), piece) if self._head.chunked else piece)

    def body_ends(self, trailers: tuple[Header, ...]) -> None:
        """The request is complete."""
        del trailers
        self._has_asked = True
        self._quiet = 0
        if self._head.expects_continue and self._head.keep_alive and not self._server.cycle.response_started:
            self._server.cycle.keep_alive = True
        if self._head.chunked:
            self._server.data_received(b"0\r\n\r\n")

    def flush(self) -> None:
        """Nothing waits."""

    def client_full(self) -> None:
        """The application is held where it sends."""
        self._client_is_full = True
        self._quiet = 0
        self._server.pause_writing()

    def client_ready(self) -> None:
        """It goes on."""
        self._client_is_full = False
        self._quiet = 0
        self._server.resume_writing()

    def client_left(self) -> None:
        """The application is told."""
        self._client = None
        self._server.connection_lost(ConnectionResetError())

    def fail(self, failure: Failure) -> None:
        """The request broke off: nothing that could be said to it would be understood."""
        del failure
        client = self._client
        self.client_left()
        if client is not None:
            client.answered(close=True)

    def shutdown(self) -> None:
        """This is the connection's last answer."""
        self._server.shutdown()

    def tick(self) -> None:
        """A while has passed. Whoever connects may make us wait, before anybody has asked for a token."""
        if self._has_asked and not self._client_is_full:
            return
        self._quiet += 1
        if self._client_is_full and self._quiet > self._deaf_ticks:
            client = self._client
            self.client_left()
            if client is not None:
                client.cut(reset=True)
        elif not self._client_is_full and self._quiet > self._body_ticks:
            if self._client is not None and not self._server.cycle.response_started:
                self._client.writing.write(error_answer(BODY_LATE, self._head.request_id(), close=True))
            self.fail(BODY_LATE)

    def _answered(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.reading.let_go(_READER)
            client.answered(close=not self._server.cycle.keep_alive)


class _Server(HttpToolsProtocol):
    """Tells when the answer is complete, and has no next request to wait for."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], answered: Callable[[], None]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._tell = answered

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._tell()


class _LentTransport:
    """The client's transport, as far as one answer goes: its end is not the connection's."""

    def __init__(self, client: Client) -> None:
        self._reading = client.reading
        self.write = client.writing.write
        self.close = client.writing.close
        self.is_closing = client.transport.is_closing
        self.get_extra_info = client.transport.get_extra_info

    def pause_reading(self) -> None:
        self._reading.hold(_READER)

    def resume_reading(self) -> None:
        self._reading.let_go(_READER)
