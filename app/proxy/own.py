"""The sidecar's own paths: handed to uvicorn's HTTP, one protocol object of its for each request.

uvicorn sees a connection that carries this request alone. What it does with connections, such as closing those that
are idle, remains the affair of the connection that clients really have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.proxy.failures import BODY_LATE, CLIENT_DEAF, CLIENT_LEFT, Failure, error_answer
from app.proxy.heads import Header, RequestHead
from app.proxy.proxy import Proxy
from app.proxy.roles import Client, Conversation
from app.traffic import Result

_READER = "own"


class OwnConversation(Conversation):
    """One request to the ASGI application, and its answer.

    Args:
        proxy: the limits, and what is counted and logged. A request's body, all of it, may take as long as an idle
            client's connection lives: ours are small.
        client: gets the answer.
        head: the request's.
        config: uvicorn's, which knows the application.
        server_state: uvicorn's; it waits for the tasks in it when it stops.
        app_state: the lifespan's.
    """

    _status: int | None = None  # that the client has seen
    _first_byte_seconds: float | None = None
    _request_bytes = 0
    _response_bytes = 0
    _is_logged = False

    def __init__(
        self,
        proxy: Proxy,
        client: Client,
        head: RequestHead,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        self._proxy = proxy
        self._head = head
        self._peer = client.peer
        self._write = client.writing.write
        self._started = time.perf_counter()
        self._has_asked = not head.has_body
        self._client_is_full = False
        self._quiet = 0  # ticks in which the client has kept us waiting
        self._server = _Server(config, server_state, app_state, self._answered)
        self._server.connection_made(cast("asyncio.Transport", _LentTransport(client, self._write_answer)))
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
        self._request_bytes += len(piece)
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
        self._log("client_left", CLIENT_LEFT)
        self._client = None
        self._server.connection_lost(ConnectionResetError())

    def fail(self, failure: Failure) -> None:
        """The request broke off: nothing that could be said to it would be understood."""
        client = self._client
        if client is not None:
            self._proxy.report(failure, self._head, self._peer, "refused")
            self._log("refused", failure)
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
        if self._client_is_full and self._quiet > self._proxy.idle_ticks:
            client = self._client
            self._log("client_left", CLIENT_DEAF)
            self.client_left()
            if client is not None:
                client.cut(reset=True)
        elif not self._client_is_full and self._quiet > self._proxy.client_ticks:
            if self._client is not None and not self._server.cycle.response_started:
                self._write_answer(error_answer(BODY_LATE, self._head.request_id(), close=True))
            self.fail(BODY_LATE)

    def _write_answer(self, data: bytes) -> None:
        if self._status is None and not data.startswith(b"HTTP/1.1 1"):
            self._status = int(data[9:12])  # behind "HTTP/1.1 ": uvicorn writes a head at once and whole
            self._first_byte_seconds = time.perf_counter() - self._started
        self._response_bytes += len(data)
        self._write(data)

    def _log(self, result: Result, failure: Failure | None) -> None:
        """Log the request's end, the first one that it comes to."""
        if self._is_logged:
            return
        self._is_logged = True
        self._proxy.log_ended(
            self._head,
            self._peer,
            "sidecar",
            self._status or (CLIENT_LEFT if failure is None else failure).status,
            result=result,
            reason=None if failure is None else failure.reason,
            request_bytes=self._request_bytes,
            response_bytes=self._response_bytes,
            seconds=time.perf_counter() - self._started,
            first_byte_seconds=self._first_byte_seconds,
        )

    def _answered(self) -> None:
        self._log("complete", None)
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

    def __init__(self, client: Client, write: Callable[[bytes], None]) -> None:
        self._reading = client.reading
        self.write = write
        self.close = client.writing.close
        self.is_closing = client.transport.is_closing
        self.get_extra_info = client.transport.get_extra_info

    def pause_reading(self) -> None:
        self._reading.hold(_READER)

    def resume_reading(self) -> None:
        self._reading.let_go(_READER)
