"""Connections to the engine: one request at a time on each, and a pool of those that may serve another.

A response's framing is kept: bytes go on as they arrive, and llhttp only finds where the response ends.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from typing import Protocol, cast
from urllib.parse import SplitResult

import httptools

from gated_proxy.failures import (
    BROKEN_OFF,
    CONNECT,
    CONNECT_TIMEOUT,
    DISCONNECTED,
    MALFORMED,
    NO_DESCRIPTORS,
    Failure,
)
from gated_proxy.heads import EngineOrigin, RequestHead, ResponseHead
from gated_proxy.transports import FULL_READ_BYTES, ReadSide, WriteBatch, WriteSide, has_hung_up, keep_alive

INFORMATIONAL = range(100, 200)
SWITCHING_PROTOCOLS = 101
_NONE = -1
_HEAD_ENDS = b"\r\n\r\n"
# No engine's head is longer; one that never ends must not fill the memory.
_MAX_HEAD_BYTES = 256 * 1024
# This process, or the machine, may have no more files open.
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_DEFAULT_PORTS = {"http": 80, "https": 443}


def port_of(url: SplitResult) -> int:
    """Return the port that a URL names, or its scheme's; 0 for a socket's path."""
    return url.port or _DEFAULT_PORTS.get(url.scheme, 0)


class Requester(Protocol):
    """The sender of a request to the engine, and receiver of its response."""

    head: RequestHead

    def interim_response(self, raw: bytes) -> None: ...
    def response_begins(self, head: ResponseHead, data: bytes) -> None: ...
    def response_continues(self, data: bytes) -> None: ...
    def response_ends(self, *, reusable: bool) -> None: ...
    def tunnel_opens(self, head: ResponseHead) -> None:
        """Take the 101 by which the engine switched protocols; bytes follow."""

    def engine_failed(self, failure: Failure) -> None:
        """Take the end of the connection, or of what could be understood of it; repeat the request where safe."""

    def engine_full(self) -> None: ...
    def engine_ready(self) -> None: ...


class EngineConnection(asyncio.Protocol):
    """One connection, for one request at a time."""

    transport: asyncio.Transport
    read_side: ReadSide  # held while the client takes no more
    write_side: WriteSide  # the only writer to the engine

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self.is_counted = False  # as open, by the pool
        self.ends: object = None  # the addresses of this end and the far one, once it is counted
        self.served = 0  # requests
        self.idle_since = 0.0  # loop time
        self._requester: Requester | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._bare_body: list[bytes] | None = None
        self._is_tunnel = False
        self._head = b""
        self._status = _NONE  # of a complete head that is not handed on yet
        self._interims = 0
        self._response: ResponseHead | None = None
        self._keeps_alive = False
        self._has_ended = False
        self._has_surplus = False
        self._body_bytes = 0  # of the response so far

    # --- called by the exchange ---

    def begin(self, requester: Requester) -> None:
        self._requester = requester
        self.write_side.keep_unsent()
        if requester.head.is_http10:  # which has no chunks
            self._bare_body = []
            self._parser = httptools.HttpResponseParser(_WithBody(self, self._bare_body))

    def release(self) -> None:
        """Keep it for the next request: this one and its response are complete."""
        self._requester = self._response = None
        self._head, self._status, self._body_bytes, self._has_ended = b"", _NONE, 0, False
        self.served += 1
        self.read_side.let_go("client")
        self._pool.keep(self)

    def cut(self) -> None:
        self._requester = None
        self.write_side.abort()

    def close(self) -> None:
        self._requester = None
        self.write_side.close()

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.read_side = ReadSide(self.transport)
        self.write_side = WriteSide(self.transport, self._pool.write_batch)
        keep_alive(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_counted:
            self._pool.open -= 1
            self._pool.ends.discard(self.ends)
        requester, self._requester = self._requester, None
        self._parser = None  # it holds our methods: a cycle would be the garbage collector's work
        if requester is None:
            self._pool.forget(self)
        elif self._response is None:
            requester.engine_failed(MALFORMED if self._head else DISCONNECTED)
        elif self._response.until_close and exc is None:
            requester.response_ends(reusable=False)
        else:
            requester.engine_failed(BROKEN_OFF)

    def eof_received(self) -> None:
        """Let the transport close: the engine will send no more."""

    def pause_writing(self) -> None:  # the socket's buffer and the transport's are full
        if self._requester is not None:
            self._requester.engine_full()

    def resume_writing(self) -> None:
        if self._requester is not None:
            self._requester.engine_ready()

    def data_received(self, data: bytes) -> None:
        requester, parser = self._requester, self._parser
        if requester is None or parser is None:  # unrequested bytes could be taken for part of a later response
            self.transport.abort()
            return
        if len(data) >= FULL_READ_BYTES:
            self.read_side.give_way()
        if self._is_tunnel:
            requester.response_continues(data)
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:
            self._switch(requester, data, switch.args[0])
        except httptools.HttpParserError:
            if self._has_ended:  # what follows a whole response is no part of it
                self._has_surplus = True
                self._hand_on(requester, data)
            else:
                self._fail(requester)
        else:
            self._hand_on(requester, data)

    def _hand_on(self, requester: Requester, data: bytes) -> None:
        if self._response is not None:
            self._body(requester, self._response, data)
        elif self._status != _NONE:
            self._take_head(requester, self._head + data)
        else:
            self._head += data
            if len(self._head) > _MAX_HEAD_BYTES:
                self._fail(requester)

    def _take_head(self, requester: Requester, data: bytes) -> None:
        while self._interims:
            self._interims -= 1
            end = data.index(_HEAD_ENDS) + 4
            requester.interim_response(data[:end])
            data = data[end:]
        if self._status in INFORMATIONAL:
            self._head, self._status = data, _NONE
            return
        end = data.index(_HEAD_ENDS) + 4
        is_to_head = requester.head.method == b"HEAD"
        response = ResponseHead(data[:end], self._status, to_head=is_to_head, origin=self._pool.origin)
        data = data[end:]
        if not response.has_body:
            if not self._has_ended:  # the parser would wait for the length that the response to a HEAD declares
                self._parser = httptools.HttpResponseParser(self)
            self._has_ended = True
        if not response.raw.startswith(b"HTTP/1.") or self._status < INFORMATIONAL.start:
            self._fail(requester)
            return
        self._body(requester, response, data)

    def _body(self, requester: Requester, response: ResponseHead, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._has_ended:
            if response.has_body and response.chunked and (self._has_surplus or response.has_line_ends_behind(data)):
                self._fail(requester)  # the parser does not tell where the body ended
                return
            surplus = response.surplus_bytes(self._body_bytes)
            if surplus:
                data = data[:-surplus]
                self._keeps_alive = False
        if self._bare_body is not None:
            data = b"".join(self._bare_body) if response.chunked else data
            self._bare_body.clear()
        if self._response is None:
            self._response = response
            requester.response_begins(response, data)
        elif data:
            requester.response_continues(data)
        if self._has_ended:
            requester.response_ends(reusable=self._keeps_alive and self._bare_body is None)

    def _switch(self, requester: Requester, data: bytes, offset: int) -> None:
        if self._status != SWITCHING_PROTOCOLS or self._interims or not requester.head.websocket:
            self._fail(requester)
            return
        self._is_tunnel = True
        self._response = ResponseHead(self._head + data[:offset], self._status, to_head=False)
        requester.tunnel_opens(self._response)
        if offset < len(data):
            requester.response_continues(data[offset:])

    def _fail(self, requester: Requester) -> None:
        requester.engine_failed(MALFORMED if self._response is None else BROKEN_OFF)

    # --- called by llhttp ---

    def on_message_begin(self) -> None:
        """Notice whether a second response begins, which was never requested."""
        self._has_surplus = self._has_ended

    def on_headers_complete(self) -> None:
        if self._has_surplus:
            return
        parser = cast("httptools.HttpResponseParser", self._parser)
        self._status = status = parser.get_status_code()
        if status in INFORMATIONAL and status != SWITCHING_PROTOCOLS:
            self._interims += 1
        else:
            self._keeps_alive = parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self._has_ended = self._status not in INFORMATIONAL


class _WithBody:
    """The parser's callbacks where the body is wanted without its framing."""

    def __init__(self, connection: EngineConnection, pieces: list[bytes]) -> None:
        self.on_message_begin = connection.on_message_begin
        self.on_headers_complete = connection.on_headers_complete
        self.on_message_complete = connection.on_message_complete
        self.on_body = pieces.append


class ConnectionPool:
    """Idle connections, the last used first, and the way to a new one."""

    def __init__(
        self,
        *,
        url: SplitResult,
        tls: ssl.SSLContext | None,
        write_batch: WriteBatch,
        connect_seconds: float,  # the longest that connecting may take
        keepalive_seconds: float,  # the longest that a connection may be idle and still be used
        origin: EngineOrigin,
    ) -> None:
        self._url, self._tls = url, tls
        self.write_batch = write_batch
        self.open = 0  # connections, in use or not
        # Their addresses on this side and on the far one: a client with such a pair is this pool itself. The first does
        # not show it alone: the kernel gives one port to connections to several addresses.
        self.ends: set[object] = set()
        self.origin = origin
        self.retries = 0  # requests sent once more, on a new connection
        self._connect_seconds = connect_seconds
        self._keepalive_seconds = keepalive_seconds
        self._idle: deque[EngineConnection] = deque()
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def active(self) -> int:
        return self.open - len(self._idle)

    def take(self) -> EngineConnection | None:
        idle = self._idle
        while idle:
            newest = idle.pop()
            transport = newest.transport
            is_young = self._time() - newest.idle_since < self._keepalive_seconds
            # The engine may have closed it already, and the loop has not come to that event yet.
            if is_young and not transport.is_closing() and not has_hung_up(transport):
                return newest
            transport.close()
        return None

    async def connect(self) -> EngineConnection | Failure:
        connection = EngineConnection(self)
        try:
            async with asyncio.timeout(self._connect_seconds):
                if self._url.scheme == "unix":
                    await self._loop.create_unix_connection(lambda: connection, self._url.path)
                else:
                    host, port = self._url.hostname or "", port_of(self._url)
                    await self._loop.create_connection(lambda: connection, host, port, ssl=self._tls)
        except TimeoutError:
            return CONNECT_TIMEOUT
        except OSError as exc:  # refused, no such name, no such file; and a TLS handshake that fails
            return NO_DESCRIPTORS if exc.errno in _NO_DESCRIPTOR else CONNECT
        # Here and not in connection_made: uvloop reports no end of a connection whose client has left meanwhile.
        connection.is_counted = True
        self.open += 1
        connection.ends = (
            connection.transport.get_extra_info("sockname"),
            connection.transport.get_extra_info("peername"),
        )
        self.ends.add(connection.ends)
        return connection

    def keep(self, connection: EngineConnection) -> None:
        connection.idle_since = self._time()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self) -> None:
        oldest = self._time() - self._keepalive_seconds
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.popleft().transport.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().transport.close()
