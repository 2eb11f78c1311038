"""Requests for the sidecar's paths: each is handed to an HTTP protocol object of uvicorn's.

uvicorn sees a connection that carries this request alone; `ClientConnection` decides about the client's real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gated_proxy.failures import BODY_LATE, CLIENT_LEFT, CLIENT_NOT_READING, Failure
from gated_proxy.heads import RequestHead
from gated_proxy.logs import RequestRecord
from gated_proxy.proxy import Client, Proxy
from gated_proxy.traffic import Result

_READER = "sidecar"


class SidecarExchange(RequestRecord):
    """One request to the ASGI application, and its response. uvicorn's own arguments come from ``config`` on."""

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
        super().__init__(head)
        self._proxy = proxy
        self._peer = client.peer
        self._write = client.write_side.write
        self._has_request = not head.has_body
        self._client_is_full = False
        self._quiet = 0  # ticks in which the client was waited for
        self._is_logged = False
        self._server = _Server(config, server_state, app_state, self._finish)
        self._server.connection_made(cast("asyncio.Transport", _LentTransport(client, self._write_response)))
        # The client's own connection is in it; uvicorn must not close this one when it is idle.
        server_state.connections.discard(self._server)
        self._client: Client | None = client

    def start(self) -> None:
        self._server.data_received(self.head.for_sidecar())
        if self.head.expects_continue:
            # Without a 100 the client may leave the body out: then its next request would look like the body.
            self._server.cycle.keep_alive = False

    def body(self, piece: bytes) -> None:
        self.request_bytes += len(piece)
        self._server.data_received(b"%x\r\n%b\r\n" % (len(piece), piece) if self.head.chunked else piece)

    def body_ends(self) -> None:
        self._has_request = True
        self._quiet = 0
        if self.head.expects_continue and self.head.keep_alive and not self._server.cycle.response_started:
            self._server.cycle.keep_alive = True
        if self.head.chunked:
            self._server.data_received(b"0\r\n\r\n")

    def client_full(self) -> None:
        self._client_is_full = True
        self._quiet = 0
        self._server.pause_writing()

    def client_ready(self) -> None:
        self._client_is_full = False
        self._quiet = 0
        self._server.resume_writing()

    def client_left(self) -> None:
        self._log("client_left", CLIENT_LEFT)
        self._client = None
        self._server.connection_lost(ConnectionResetError())

    def fail(self, failure: Failure) -> None:
        """End a request that broke off, without an error: the client would not recognise it as one."""
        client = self._client
        if client is not None:
            self._proxy.report(failure, self.head, self._peer, "refused")
            self._log("refused", failure)
        self.client_left()
        if client is not None:
            client.response_done(close=True)

    def shutdown(self) -> None:
        self._server.shutdown()

    def tick(self) -> None:
        """Count a tick in which the client is waited for; it may be one without a token."""
        if self._has_request and not self._client_is_full:
            return
        self._quiet += 1
        if self._client_is_full and self._quiet > self._proxy.idle_ticks:
            client = self._client
            self._log("client_left", CLIENT_NOT_READING)
            self.client_left()
            if client is not None:
                client.cut(reset=True)
        elif not self._client_is_full and self._quiet > self._proxy.client_ticks:
            if self._client is not None and not self._server.cycle.response_started:
                self._write_response(self.head.error(BODY_LATE, close=True))
            self.fail(BODY_LATE)

    def _write_response(self, data: bytes) -> None:
        if self.status is None and not data.startswith(b"HTTP/1.1 1"):
            self.status = int(data[9:12])  # behind "HTTP/1.1 ": uvicorn writes a head in one piece
            self.note_first_byte()
        self.response_bytes += len(data)
        self._write(data)

    def _log(self, result: Result, failure: Failure | None) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        self.result, self.reason = result, None if failure is None else failure.reason
        if self._proxy.access_log is not None:
            status = self.status or (CLIENT_LEFT if failure is None else failure).status
            seconds = time.perf_counter() - self.started
            self._proxy.access_log.write(self.line(self._peer, "sidecar", status, seconds))

    def _finish(self) -> None:
        self._log("complete", None)
        client, self._client = self._client, None
        if client is not None:
            client.read_side.let_go(_READER)
            client.response_done(close=not self._server.cycle.keep_alive)


class _Server(HttpToolsProtocol):
    """Reports that the response is complete, and has no next request to wait for."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], finished: Callable[[], None]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._finished = finished

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._finished()


class _LentTransport:
    """The client's transport, lent for one response: its end is not the connection's."""

    def __init__(self, client: Client, write: Callable[[bytes], None]) -> None:
        self._read_side = client.read_side
        self.write = write
        self.close = client.write_side.close
        self.is_closing = client.transport.is_closing
        self.get_extra_info = client.transport.get_extra_info

    def pause_reading(self) -> None:
        self._read_side.hold(_READER)

    def resume_reading(self) -> None:
        self._read_side.let_go(_READER)
