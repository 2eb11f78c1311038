"""A client's connection: its requests one after the other, each sent to where it belongs."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from app.proxy.chunks import BadChunks, Chunks
from app.proxy.exchange import Exchange
from app.proxy.failures import Failure, error_answer
from app.proxy.forwarded import forwarding
from app.proxy.heads import NOT_HTTP, Destination, Header, RequestHead, has_bare_line_feed, read_request
from app.proxy.own import OwnConversation
from app.proxy.proxy import Proxy
from app.proxy.roles import Client, Conversation
from app.proxy.transports import FULL_READ_BYTES, Reading, Writing

log = logging.getLogger("app.proxy")

_CR = ord("\r")
# Of requests behind one that is being answered; then no more are read.
_WAITING_BYTES_MOST = 64 * 1024
# Above proxy.max_connections, for those who ask the sidecar itself: probes, scrapes, operators. One answer each.
SURPLUS_CONNECTIONS = 32

Judge = Callable[[bytes, bytes, bool], Destination]
"""Where a request goes, by its method, its raw path, and whether it asks for a WebSocket."""


class _Incoming:
    """A request that is being received; what has come of it stays here until its turn has come."""

    talk: Conversation | None = None  # none any more: what comes of its body is nobody's
    flaw: Failure | None = None
    is_waiting = False
    is_complete = False
    body_bytes = 0
    trailers: tuple[Header, ...] = ()

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.pieces: list[bytes] = []


class ClientConnection(Client):
    """What uvicorn runs on each connection.

    An ``asyncio.Protocol`` in all but name: a compiled class cannot have that base.

    Args:
        proxy: what all requests share.
        judge: says where a request goes.
        config: uvicorn's, like all that follow.
        server_state: holds connections and tasks.
        app_state: the lifespan's.
        _loop: the running one.
    """

    def __init__(
        self,
        proxy: Proxy,
        judge: Judge,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._proxy = proxy
        self._judge = judge
        self._uvicorn = (config, server_state, app_state)
        self._connections: set[Any] = server_state.connections
        self._start = b""  # of a head that is not complete
        self._receiving: _Incoming | None = None
        self._plain_bytes = 0  # still to come of a counted body
        self._chunks: Chunks | None = None  # still coming
        self._current: _Incoming | None = None  # the one in conversation
        self._queue: deque[_Incoming] = deque()
        self._waiting_bytes = 0  # of those in the queue
        self._is_deaf = False  # what comes is nobody's
        self._is_last = False
        self._is_surplus = False  # more are connected than may ask the engine
        self._is_lingering = False
        self._quiet = 0  # ticks since the last answer, or since a head began
        self._unsent = 0  # bytes at the last tick, of answers that are over
        self._deaf_ticks = 0  # in which it took none of them

    # --- what the transport says ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connects."""
        self.transport = cast("asyncio.Transport", transport)
        self.reading = Reading(self.transport)
        self.writing = Writing(self.transport, self._proxy.turn)
        self.forwarding = forwarding(self._proxy.forwarded, self.transport)
        self._connections.add(self)
        self._proxy.clients.add(self)
        crowd = self._proxy.crowd
        self._is_surplus = crowd > 0
        if crowd > SURPLUS_CONNECTIONS:
            self._is_deaf = True
            self._write_error(self._proxy.too_many_connections, RequestHead(b""), close=True)
            self.writing.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, or was closed."""
        del exc
        self._connections.discard(self)
        self._proxy.clients.discard(self)
        self._is_deaf = True
        self._queue.clear()
        talk = self._forget_current()
        self._receiving = None
        if talk is not None:
            talk.client_left()

    def eof_received(self) -> None:
        """It will send no more, which is how clients leave: the transport closes (nginx and uvicorn see it so too)."""

    def pause_writing(self) -> None:
        """It takes no more for now."""
        if self._current is not None and self._current.talk is not None:
            self._current.talk.client_full()

    def resume_writing(self) -> None:
        """It does again."""
        if self._current is not None and self._current.talk is not None:
            self._current.talk.client_ready()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if len(data) >= FULL_READ_BYTES:
            self.reading.give_way()
        while data and not self._is_deaf:
            data = self._take(data)

    def _take(self, data: bytes) -> bytes:
        """Take what can be taken at once, and return the rest."""
        incoming = self._receiving
        if incoming is None:
            return self._take_head(data)
        if self._chunks is not None:
            return self._take_chunks(incoming, self._chunks, data)
        if incoming.head.websocket:
            self._body(incoming, data)
            return b""
        rest = data[self._plain_bytes :]
        piece = data[: self._plain_bytes] if rest else data
        self._plain_bytes -= len(piece)
        self._body(incoming, piece)
        if not self._plain_bytes:
            self._complete(incoming)
        return rest

    def _take_head(self, data: bytes) -> bytes:
        if self._start:
            data, self._start = self._start + data, b""
        if data[0] == _CR:
            data = data.removeprefix(b"\r\n")  # of old clients, behind a body (RFC 9112 2.2)
        end = data.find(b"\r\n\r\n") + 4
        limits = self._proxy.limits
        if end < 4 or end > limits.max_header_bytes:  # noqa: PLR2004 - not found
            self._take_start(data)
            return b""
        head = read_request(data[:end])
        if isinstance(head, Failure):
            self._refuse(head)
            return b""
        if head.declared_bytes > limits.max_body_bytes:
            self._refuse(self._proxy.body_too_large, head)
            return b""
        self._receiving = incoming = _Incoming(head)
        incoming.is_complete = not (head.chunked or head.declared_bytes or head.websocket)
        if self._current is not None or self._queue:
            self._wait_for_turn(incoming)
        else:
            self._converse(incoming)
        if head.chunked:
            self._chunks = Chunks(self._proxy.head_too_large, self._proxy.limits.max_header_bytes)
        elif head.declared_bytes:
            self._plain_bytes = head.declared_bytes
        elif not head.websocket:
            self._complete(incoming)
        return data[end:]

    def _take_start(self, data: bytes) -> None:
        if not self._start:
            self._quiet = 0
        if len(data) > self._proxy.limits.max_header_bytes:
            self._refuse(self._proxy.head_too_large)
        elif (not data[:1].isalpha() and data not in (b"", b"\r")) or has_bare_line_feed(data):
            # No method, or line ends that end nothing: a client that speaks TLS, perhaps, and waits.
            self._refuse(NOT_HTTP)
        else:
            self._start = data

    def _take_chunks(self, incoming: _Incoming, chunks: Chunks, data: bytes) -> bytes:
        try:
            body, rest = chunks.take(data)
        except BadChunks as bad:
            self._refuse(bad.failure)
            return b""
        if body:
            self._body(incoming, body)
        if chunks.is_complete and not self._is_deaf:
            self._chunks = None
            incoming.trailers = chunks.trailers
            self._complete(incoming)
        return rest

    def _body(self, incoming: _Incoming, piece: bytes) -> None:
        incoming.body_bytes += len(piece)
        if incoming.body_bytes > self._proxy.limits.max_body_bytes and not incoming.head.websocket:
            self._refuse(self._proxy.body_too_large)
        elif incoming.talk is not None:
            incoming.talk.body(piece)
        elif incoming.is_waiting:
            incoming.pieces.append(piece)
            self._count_waiting(len(piece))

    def _complete(self, incoming: _Incoming) -> None:
        self._receiving = None
        incoming.is_complete = True
        if incoming.talk is not None:
            incoming.talk.body_ends(incoming.trailers)

    # --- conversations ---

    def _wait_for_turn(self, incoming: _Incoming) -> None:
        incoming.is_waiting = True
        self._queue.append(incoming)
        self._count_waiting(len(incoming.head.raw))

    def _count_waiting(self, size: int) -> None:
        # Not before they are many: only who reads sees the client leave.
        self._waiting_bytes += size
        if self._waiting_bytes > _WAITING_BYTES_MOST:
            self.reading.hold("queue")

    def _converse(self, incoming: _Incoming) -> None:
        was_waiting, incoming.is_waiting = incoming.is_waiting, False
        if incoming.flaw is not None:
            self._give_up(incoming.head, incoming.flaw)
            return
        head = incoming.head
        where = self._judge(head.method, head.path, head.websocket)
        if self._is_surplus:
            self._is_surplus = self._proxy.crowd > 0
            if self._is_surplus and where.to == "engine":
                where = Destination("nowhere", refusal=self._proxy.too_many_connections)
        if where.refusal is not None:
            # The body, if one comes, is nobody's; a client that waits to be asked for it cannot be told from its next
            # request.
            close = self._is_last or self._is_surplus or head.websocket or not head.keep_alive or head.expects_continue
            self._write_error(where.refusal, head, close=close)
            if close:
                self._end_after(incoming)
            return
        talk: Conversation
        if where.to == "own":
            config, server_state, app_state = self._uvicorn
            talk = OwnConversation(
                self._proxy, self, head, config=config, server_state=server_state, app_state=app_state
            )
        else:
            talk = Exchange(self._proxy, self, head, where.path_class)
        self._current, incoming.talk = incoming, talk
        if self._is_last:
            talk.shutdown()
        talk.start()
        if self._is_surplus:
            talk.shutdown()
        if was_waiting:
            self._catch_up(incoming)

    @staticmethod
    def _catch_up(incoming: _Incoming) -> None:
        """Hand over what came while it waited."""
        pieces, incoming.pieces = incoming.pieces, []
        for piece in pieces:
            if incoming.talk is not None:
                incoming.talk.body(piece)
        if incoming.is_complete and incoming.talk is not None:
            incoming.talk.body_ends(incoming.trailers)

    def answered(self, *, close: bool) -> None:
        """The conversation is over and its answer written."""
        incoming = self._current
        self._forget_current()
        self._quiet = 0
        if incoming is not None and (close or self._is_last or self._is_surplus or incoming.head.websocket):
            self._end_after(incoming)
        elif self._queue:
            # Not from within the engine's callback: a queue of quick answers would become a stack.
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        while self._queue and self._current is None and not self._is_lingering:
            self._converse(self._queue.popleft())
        if not self._queue:
            self._waiting_bytes = 0
            self.reading.let_go("queue")

    def _forget_current(self) -> Conversation | None:
        incoming, self._current = self._current, None
        if incoming is None:
            return None
        talk, incoming.talk = incoming.talk, None
        return talk

    def cut(self, *, reset: bool) -> None:
        """End the connection in the middle of an answer."""
        self._forget_current()
        self._is_deaf = True
        if reset:
            self.writing.reset()
        else:
            self.writing.close()

    def shutdown(self) -> None:
        """The server stops: close, now or after the answer."""
        self._is_last = True
        if self._current is not None and self._current.talk is not None:
            self._current.talk.shutdown()
        elif not self._queue:
            self.writing.close()

    # --- refusals and ends ---

    def _refuse(self, failure: Failure, head: RequestHead | None = None) -> None:
        """Nothing that follows on this connection can be understood, or should be."""
        self._is_deaf = True
        incoming, self._receiving = self._receiving, None
        if incoming is None:
            incoming = _Incoming(head or RequestHead(b""))
            incoming.flaw = failure
            if self._current is None and not self._queue:
                self._give_up(incoming.head, failure)
            else:  # what came before it is answered first
                self._wait_for_turn(incoming)
        elif incoming.talk is not None:
            incoming.talk.fail(failure)
        elif incoming.is_waiting:
            incoming.flaw = failure
        else:  # it has its answer
            self._linger()

    def _give_up(self, head: RequestHead, failure: Failure) -> None:
        self._write_error(failure, head, close=True)
        self._linger()

    def _write_error(self, failure: Failure, head: RequestHead, *, close: bool) -> None:
        answer = error_answer(failure, head.request_id(), close=close, without_body=head.method == b"HEAD")
        self.writing.write(answer)
        self._proxy.refused(failure, head, self.peer, len(answer))

    def _end_after(self, incoming: _Incoming) -> None:
        if incoming.is_complete and not self._is_deaf:
            self._is_deaf = True
            self.writing.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close when the client has done so, or soon: to close on unread bytes would destroy the answer on its way."""
        self._is_deaf = self._is_lingering = True
        self._quiet = 0
        self._queue.clear()
        self.reading.let_go_all()
        self.writing.finish()

    def tick(self) -> None:
        """A while has passed."""
        self._quiet += 1
        if self._is_lingering:
            if self._quiet > self._proxy.linger_ticks:
                self.writing.abort()
        elif self._current is None:
            self._look_at_what_is_unsent()
            if self._quiet > self._patience():
                self.writing.close()
        elif isinstance(self._current.talk, OwnConversation):  # an exchange is the proxy's to tell
            self._current.talk.tick()

    def _patience(self) -> float:
        """How many ticks the next request may take to come."""
        if self._is_surplus:  # somebody else may need its place, for a probe
            return self._proxy.linger_ticks
        return self._proxy.client_ticks if self._start else self._proxy.client_idle_ticks

    def _look_at_what_is_unsent(self) -> None:
        """An answer of our own is written whole: who takes nothing of it is let go, and the memory with it."""
        unsent = self.transport.get_write_buffer_size()
        self._deaf_ticks = self._deaf_ticks + 1 if unsent and unsent == self._unsent else 0
        self._unsent = unsent
        if self._deaf_ticks > self._proxy.client_ticks:
            self.writing.abort()


def protocol(proxy: Proxy, judge: Judge) -> Callable[..., ClientConnection]:
    """What uvicorn makes of each connection; its ``http=``."""
    return partial(ClientConnection, proxy, judge)
