"""Connections to the engine: one request at a time on each, and a pool of those that may serve another.

An answer's framing is followed by llhttp and kept: what arrives goes on as it is, and the parser only tells where it
ends.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from typing import Any, cast

import httptools

from app.proxy.failures import (
    BROKEN_OFF,
    CONNECT,
    CONNECT_TIMEOUT,
    DISCONNECTED,
    MALFORMED,
    NO_DESCRIPTORS,
    Failure,
)
from app.proxy.heads import AnswerHead, EngineOrigin
from app.proxy.roles import Asker
from app.proxy.transports import FULL_READ_BYTES, Reading, Turn, Writing, has_hung_up, keep_alive

INFORMATIONAL = range(100, 200)
SWITCHING_PROTOCOLS = 101
_NONE = -1
_HEAD_ENDS = b"\r\n\r\n"
# No engine's head is so long; one that never ends must not fill our memory.
_HEAD_BYTES_MOST = 256 * 1024
# This process, or the machine, may have no more files open.
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


class EngineConnection:
    """One connection; an ``asyncio.Protocol`` in all but name, for a compiled class cannot have that base.

    Args:
        pool: keeps it while it is idle.

    Attributes:
        transport: once connected.
        reading: held while the client takes no more.
        writing: the one way to send it something.
        is_counted: the pool counts it as open.
        answered: requests served so far.
        idle_since: loop time.
    """

    transport: asyncio.Transport
    reading: Reading
    writing: Writing

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.is_counted = False
        self.answered = 0
        self.idle_since = 0.0
        self._asker: Asker | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._bare_body: list[bytes] | None = None
        self._is_tunnel = False
        self._head = b""
        self._status = _NONE  # of a head that is complete and not handed on yet
        self._interims = 0
        self._answer: AnswerHead | None = None
        self._keeps_alive = False
        self._has_ended = False
        self._has_surplus = False
        self._body_bytes = 0  # of the answer so far

    # --- what the exchange does ---

    def ask(self, asker: Asker) -> None:
        """Take a request; the bytes of it follow through ``writing``."""
        self._asker = asker
        self.writing.keep_unsent()
        if asker.wants_bare_body:
            self._bare_body = []
            self._parser = httptools.HttpResponseParser(_WithBody(self, self._bare_body))

    def release(self) -> None:
        """Keep it for the next request: this one and its answer are complete."""
        self._asker = self._answer = None
        self._head, self._status, self._body_bytes, self._has_ended = b"", _NONE, 0, False
        self.answered += 1
        self.reading.let_go("client")
        self._pool.keep(self)

    def cut(self) -> None:
        """Close it now; the engine sees its client leave."""
        self._asker = None
        self.writing.abort()

    def close(self) -> None:
        """Close it when all is sent."""
        self._asker = None
        self.writing.close()

    # --- what the transport says ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)
        self.reading = Reading(self.transport)
        self.writing = Writing(self.transport, self._pool.turn)
        keep_alive(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by whomever."""
        if self.is_counted:
            self._pool.open -= 1
        asker, self._asker = self._asker, None
        self._parser = None  # it holds our methods: a cycle would be the garbage collector's work
        if asker is None:
            self._pool.forget(self)
        elif self._answer is None:
            asker.engine_failed(MALFORMED if self._head else DISCONNECTED)
        elif self._answer.until_close and exc is None:
            asker.answer_ends(reusable=False)
        else:
            asker.engine_failed(BROKEN_OFF)

    def eof_received(self) -> None:
        """The engine will send no more: the transport closes."""

    def pause_writing(self) -> None:
        """The socket's buffer and ours are full."""
        if self._asker is not None:
            self._asker.engine_full()

    def resume_writing(self) -> None:
        """They have room again."""
        if self._asker is not None:
            self._asker.engine_ready()

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        asker, parser = self._asker, self._parser
        if asker is None or parser is None:  # nobody asked; whatever it is, no later answer could be told from it
            self.transport.abort()
            return
        if len(data) >= FULL_READ_BYTES:
            self.reading.give_way()
        if self._is_tunnel:
            asker.answer_continues(data)
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:
            self._switch(asker, data, switch.args[0])
        except httptools.HttpParserError:
            self._fail(asker)
        else:
            self._hand_on(asker, data)

    def _hand_on(self, asker: Asker, data: bytes) -> None:
        """Hand on what the parser has seen and found in order."""
        if self._has_surplus:
            self._fail(asker)
        elif self._answer is not None:
            self._body(asker, self._answer, data)
        elif self._status != _NONE:
            self._begin(asker, self._head + data)
        else:
            self._head += data
            if len(self._head) > _HEAD_BYTES_MOST:
                self._fail(asker)

    def _begin(self, asker: Asker, data: bytes) -> None:
        """Take apart the data that completed a head: heads of 1xx before it, perhaps, and a body behind it."""
        while self._interims:
            self._interims -= 1
            end = data.index(_HEAD_ENDS) + 4
            asker.answer_interim(data[:end])
            data = data[end:]
        if self._status in INFORMATIONAL:
            self._head, self._status = data, _NONE
            return
        end = data.index(_HEAD_ENDS) + 4
        answer = AnswerHead(data[:end], self._status, to_head=asker.to_head, origin=self._pool.origin)
        data = data[end:]
        if not answer.has_body:
            if data:
                self._fail(asker)
                return
            if not self._has_ended:  # the length in the answer to a HEAD is another's; the parser would wait for it
                self._parser = httptools.HttpResponseParser(self)
            self._has_ended = True
        if not answer.raw.startswith(b"HTTP/1.") or self._status < INFORMATIONAL.start:
            self._fail(asker)
            return
        self._body(asker, answer, data)

    def _body(self, asker: Asker, answer: AnswerHead, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._has_ended and answer.has_surplus(data, self._body_bytes):
            self._fail(asker)
            return
        if self._bare_body is not None:
            data = self._bare(self._bare_body)
        if self._answer is None:
            self._answer = answer
            asker.answer_begins(answer, data)
        elif data:
            asker.answer_continues(data)
        if self._has_ended:
            asker.answer_ends(reusable=self._keeps_alive and self._bare_body is None)

    @staticmethod
    def _bare(pieces: list[bytes]) -> bytes:
        data = b"".join(pieces)
        pieces.clear()
        return data

    def _switch(self, asker: Asker, data: bytes, offset: int) -> None:
        if self._status != SWITCHING_PROTOCOLS or self._interims or not asker.wants_tunnel:
            self._fail(asker)
            return
        self._is_tunnel = True
        self._answer = AnswerHead(self._head + data[:offset], self._status, to_head=False)
        asker.tunnel_opens(self._answer)
        if offset < len(data):
            asker.answer_continues(data[offset:])

    def _fail(self, asker: Asker) -> None:
        asker.engine_failed(MALFORMED if self._answer is None else BROKEN_OFF)

    # --- what llhttp says ---

    def on_message_begin(self) -> None:
        """An answer begins; a second one was never asked for."""
        self._has_surplus = self._has_ended

    def on_headers_complete(self) -> None:
        """A head is complete, of a 1xx or of the answer."""
        if self._has_surplus:
            return
        parser = cast("httptools.HttpResponseParser", self._parser)
        self._status = status = parser.get_status_code()
        if status in INFORMATIONAL and status != SWITCHING_PROTOCOLS:
            self._interims += 1
        else:
            self._keeps_alive = parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """An answer is complete; a 1xx is none."""
        self._has_ended = self._status not in INFORMATIONAL


class _WithBody:
    """The parser's callbacks where the body is wanted without its framing."""

    def __init__(self, connection: EngineConnection, pieces: list[bytes]) -> None:
        self.on_message_begin = connection.on_message_begin
        self.on_headers_complete = connection.on_headers_complete
        self.on_message_complete = connection.on_message_complete
        self.on_body = pieces.append


class Pool:
    """Idle connections, the last used first, and the way to a new one.

    Args:
        host: of the engine, with its port; or the path of its socket.
        port: see host.
        socket_path: see host.
        tls: for an engine on https.
        turn: when writes are sent.
        connect_seconds: then no connection is to be had.
        keepalive_seconds: an idle connection is used no longer.
        origin: what the engine calls itself.

    Attributes:
        open: connections that are open, in use or not.
        retries: requests sent once more, on a new connection.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        socket_path: str | None,
        tls: ssl.SSLContext | None,
        turn: Turn,
        connect_seconds: float,
        keepalive_seconds: float,
        origin: EngineOrigin | None = None,
    ) -> None:
        self._host, self._port, self._socket_path, self._tls = host, port, socket_path, tls
        self.turn = turn
        self.open = 0
        self.origin = origin
        self.retries = 0
        self._connect_seconds = connect_seconds
        self._keepalive_seconds = keepalive_seconds
        self._idle: deque[EngineConnection] = deque()
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    @property
    def active(self) -> int:
        """Connections that serve a request, or are being closed."""
        return self.open - len(self._idle)

    def take(self) -> EngineConnection | None:
        """An idle connection, if there is one that the engine will surely not close in this moment."""
        idle = self._idle
        while idle:
            newest = idle.pop()
            transport = newest.transport
            is_young = self._time() - newest.idle_since < self._keepalive_seconds
            # Its end may be here already, and the loop has not come to it yet.
            if is_young and not transport.is_closing() and not has_hung_up(transport):
                return newest
            transport.close()
        return None

    async def connect(self) -> EngineConnection | Failure:
        """A new connection, or why there is none."""
        made = EngineConnection(self)
        protocol: Any = lambda: made  # noqa: E731 - it is not an asyncio.Protocol for the type checker
        try:
            async with asyncio.timeout(self._connect_seconds):
                if self._socket_path is not None:
                    await self._loop.create_unix_connection(protocol, self._socket_path)
                else:
                    await self._loop.create_connection(protocol, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            return CONNECT_TIMEOUT
        except OSError as exc:  # refused, no such name, no such file; and a TLS handshake that fails
            return NO_DESCRIPTORS if exc.errno in _NO_DESCRIPTOR else CONNECT
        # Here and not when it is made: of one whose client has left meanwhile, uvloop says only that it is made.
        made.is_counted = True
        self.open += 1
        return made

    def keep(self, connection: EngineConnection) -> None:
        """Take it back."""
        connection.idle_since = self._time()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """It is closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self) -> None:
        """Close those that were idle for too long."""
        oldest = self._time() - self._keepalive_seconds
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.popleft().transport.close()

    def close(self) -> None:
        """Close all that are idle."""
        while self._idle:
            self._idle.pop().transport.close()
