"""A client's connection: its requests one after the other, each sent to where it belongs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from app.proxy.chunks import BadChunks, Chunks
from app.proxy.exchange import Exchange
from app.proxy.failures import Failure, error_answer
from app.proxy.forwarded import forwarding
from app.proxy.heads import LIVE_STREAM, NOT_HTTP, Destination, Header, RequestHead, has_bare_line_feed, read_request
from app.proxy.own import OwnConversation
from app.proxy.proxy import Proxy
from app.proxy.roles import Client, Conversation
from app.proxy.transports import FULL_READ_BYTES, Reading, Writing, has_hung_up, keep_alive

log = logging.getLogger("app.proxy")

_CR = ord("\r")
# Of requests whose turn has not come; then no more are read. Not before: only who reads sees the client leave.
_WAITING_BYTES_MOST = 64 * 1024
# Above proxy.max_connections, for those who ask the sidecar itself: probes, scrapes, operators. One answer each.
SURPLUS_CONNECTIONS = 32
# Heads, or pieces of a body, that one connection may have taken in a turn of the loop: a read may hold thousands of
# either, and the other connections wait meanwhile.
STEPS_PER_TURN = 16

Judge = Callable[[bytes, bytes, bool], Destination]
"""Where a request goes, by its method, its raw path, and whether it asks for a WebSocket."""


class _Incoming:
    """A request that is being received, or answered."""

    talk: Conversation | None = None  # none any more: what comes of its body is nobody's
    is_complete = False
    body_bytes = 0

    def __init__(self, head: RequestHead) -> None:
        self.head = head


class ClientConnection(Client):
    """What uvicorn runs on each connection.

    One request is answered at a time, and none is begun while answers wait for the client to take them: what comes
    meanwhile stays unread, here as far as it has come, then with the client. So a connection costs one answer more than
    its client takes, and not as many as it has asked for.

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
        self._rest = b""  # of what came: a head that is not complete, or requests whose turn has not come
        self._is_scheduled = False  # to go on with the rest
        self._is_within_head = False  # some of the next request's head has come
        self._receiving: _Incoming | None = None
        self._plain_bytes = 0  # still to come of a counted body
        self._chunks: Chunks | None = None  # still coming
        self._current: _Incoming | None = None  # the one in conversation
        self._is_full = False  # the client takes no more for now
        self._is_old = False  # has seen a tick
        self._is_deaf = False  # what comes is nobody's
        self._is_last = False
        self._is_surplus = False  # more are connected than may ask the engine
        self._is_lingering = False
        self._quiet = 0  # ticks since the last answer, or since a head began
        self._unsent = 0  # bytes at the last tick, of answers that are over
        self._unsent_ticks = 0.0  # that they have waited
        self._unsent_patience = 0.0  # ticks that they may
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
        self._rest = b""
        talk = self._forget_current()
        self._receiving = None
        if talk is not None:
            talk.client_left()

    def eof_received(self) -> None:
        """It will send no more, which is how clients leave: the transport closes (nginx and uvicorn see it so too)."""

    def pause_writing(self) -> None:
        """It takes no more for now."""
        self._is_full = True
        if self._current is not None and self._current.talk is not None:
            self._current.talk.client_full()

    def resume_writing(self) -> None:
        """It does again."""
        self._is_full = False
        if self._current is not None and self._current.talk is not None:
            self._current.talk.client_ready()
        self._go_on_soon()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if len(data) >= FULL_READ_BYTES:
            self.reading.give_way()
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._is_scheduled:
            self._keep(data)
        else:
            self._take_all(data)

    def _take_all(self, data: bytes) -> None:
        """Take what can be taken in this turn, and keep the rest."""
        at = steps = 0
        while at < len(data) and not self._is_deaf:
            if steps == STEPS_PER_TURN:
                self._is_scheduled = True
                asyncio.get_running_loop().call_soon(self._go_on)
                break
            before = at
            at = self._take(data, at)
            if at == before:
                break
            steps += 1
        if at < len(data):
            self._keep(data[at:] if at else data)
        else:
            self.reading.let_go("queue")

    def _keep(self, rest: bytes) -> None:
        if self._is_deaf:
            return
        self._rest = rest
        # A head that is not complete must be read on, however long it may be.
        if len(rest) > _WAITING_BYTES_MOST and not self._has_turn:
            self.reading.hold("queue")
        else:
            self.reading.let_go("queue")

    @property
    def _has_turn(self) -> bool:
        """Whether the next request may be taken now."""
        return self._current is None and not (self._is_full or self._is_scheduled)

    def _go_on_soon(self) -> None:
        # Not from within the engine's callback: many quick answers would become a stack.
        if self._rest and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Take what came and could not be taken then."""
        self._is_scheduled = False
        data, self._rest = self._rest, b""
        self._take_all(data)
        if self._is_last and self._has_turn and not self._is_deaf:
            self.writing.close()

    def _take(self, data: bytes, at: int) -> int:
        """Take something of the data behind a place in it, if that can be done.

        Returns:
            The place behind what was taken; the same where the next request must wait, for its bytes or for its turn.
        """
        incoming = self._receiving
        if incoming is None:
            return self._take_head(data, at) if self._current is None and not self._is_full else at
        if self._chunks is not None:
            return self._take_chunks(incoming, self._chunks, data, at)
        if incoming.head.websocket:
            self._body(incoming, data[at:] if at else data)
            return len(data)
        end = min(at + self._plain_bytes, len(data))
        piece = data[at:end] if end - at < len(data) else data
        self._plain_bytes -= len(piece)
        self._body(incoming, piece)
        if not self._plain_bytes:
            self._complete(incoming)
        return end

    def _take_head(self, data: bytes, at: int) -> int:
        if data[at] == _CR and data.startswith(b"\r\n", at):  # of old clients, behind a body (RFC 9112 2.2)
            self._begin_head()
            return at + 2
        end = data.find(b"\r\n\r\n", at) + 4
        limits = self._proxy.limits
        if end < 4 or end - at > limits.max_header_bytes:  # noqa: PLR2004 - not found
            self._begin_head()
            self._look_at_start(data[at:] if at else data)
            return at
        self._is_within_head = False
        head = read_request(data[at:end])
        if isinstance(head, Failure):
            self._refuse(head)
            return end
        if head.declared_bytes > limits.max_body_bytes:
            self._refuse(self._proxy.body_too_large, head)
            return end
        self._receiving = incoming = _Incoming(head)
        incoming.is_complete = not (head.chunked or head.declared_bytes or head.websocket)
        self._converse(incoming)
        if head.chunked:
            self._chunks = Chunks(self._proxy.head_too_large, self._proxy.limits.max_header_bytes)
        elif head.declared_bytes:
            self._plain_bytes = head.declared_bytes
        elif not head.websocket:
            self._complete(incoming)
        return end

    def _begin_head(self) -> None:
        """Start the one time that a head has, which none of its bytes renews."""
        if not self._is_within_head:
            self._is_within_head = True
            self._quiet = 0

    def _look_at_start(self, data: bytes) -> None:
        """Refuse what will not become a head."""
        if len(data) > self._proxy.limits.max_header_bytes:
            self._refuse(self._proxy.head_too_large)
        elif (not data[:1].isalpha() and data not in (b"", b"\r")) or has_bare_line_feed(data):
            # No method, or line ends that end nothing: a client that speaks TLS, perhaps, and waits.
            self._refuse(NOT_HTTP)

    def _take_chunks(self, incoming: _Incoming, chunks: Chunks, data: bytes, at: int) -> int:
        try:
            body, rest = chunks.take(data[at:] if at else data)
        except BadChunks as bad:
            self._refuse(bad.failure)
            return len(data)
        if body:
            self._body(incoming, body)
        if chunks.is_complete and not self._is_deaf:
            self._chunks = None
            self._complete(incoming, chunks.trailers)
        return len(data) - len(rest)

    def _body(self, incoming: _Incoming, piece: bytes) -> None:
        incoming.body_bytes += len(piece)
        if incoming.body_bytes > self._proxy.limits.max_body_bytes and not incoming.head.websocket:
            self._refuse(self._proxy.body_too_large)
        elif incoming.talk is not None:
            incoming.talk.body(piece)

    def _complete(self, incoming: _Incoming, trailers: tuple[Header, ...] = ()) -> None:
        self._receiving = None
        incoming.is_complete = True
        if incoming.talk is not None:
            incoming.talk.body_ends(trailers)

    # --- conversations ---

    def _converse(self, incoming: _Incoming) -> None:
        self._unsent_ticks = 0.0
        head = incoming.head
        where = self._judge(head.method, head.path, head.websocket)
        if self._is_surplus:
            self._is_surplus = self._proxy.crowd > 0
            if self._is_surplus and (where.to == "engine" or where.path_class == LIVE_STREAM):
                where = Destination("nowhere", refusal=self._proxy.too_many_connections)
        if where.refusal is not None:
            # The body, if one comes, is nobody's; a client that waits to be asked for it cannot be told from its next
            # request.
            close = self._is_last or self._is_surplus or head.websocket or not head.keep_alive or head.expects_continue
            self._write_error(where.refusal, head, close=close)
            self._quiet = 0
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

    def answered(self, *, close: bool) -> None:
        """The conversation is over and its answer written."""
        incoming = self._current
        self._forget_current()
        self._quiet = 0
        if incoming is not None and (close or self._is_last or self._is_surplus or incoming.head.websocket):
            self._end_after(incoming)
        else:
            self._go_on_soon()

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

    def drop(self) -> None:
        """Close at once; what was not taken is lost."""
        self.writing.abort()

    @property
    def unread_bytes(self) -> int:
        """What was written and neither the client nor its socket has taken."""
        return self.transport.get_write_buffer_size()

    def shutdown(self) -> None:
        """The server stops: close, now or after the answer."""
        self._is_last = True
        if self._current is not None and self._current.talk is not None:
            self._current.talk.shutdown()
        elif self._has_turn or not self._rest:  # else requests may wait, and one of them is still answered
            self.writing.close()

    # --- refusals and ends ---

    def _refuse(self, failure: Failure, head: RequestHead | None = None) -> None:
        """Nothing that follows on this connection can be understood, or should be."""
        self._is_deaf = True
        incoming, self._receiving = self._receiving, None
        if incoming is None:
            self._write_error(failure, head or RequestHead(b""), close=True)
            self._linger()
        elif incoming.talk is not None:
            incoming.talk.fail(failure)
        else:  # it has its answer
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
        self._rest = b""
        self.reading.let_go_all()
        self.writing.finish()

    def tick(self) -> None:
        """A while has passed."""
        self._quiet += 1
        if not self._is_old:  # a connection that is over at once is spared these calls
            self._is_old = True
            keep_alive(self.transport)
        if self._is_lingering:
            if self._quiet > self._proxy.linger_ticks:
                self.writing.abort()
        elif self._current is None:
            self._look_at_what_is_unsent()
            if self._quiet > self._patience():
                self.writing.close()
        elif isinstance(self._current.talk, OwnConversation):  # an exchange is the proxy's to tell
            self._current.talk.tick()
        self._look_for_client()

    def _look_for_client(self) -> None:
        """Notice that a client has left which is not read just now, so that it cannot say so.

        Of a tunnel it would be too early: what the client said last is the engine's.
        """
        is_tunnel = self._receiving is not None and self._receiving.head.websocket
        if self.reading.is_held and not is_tunnel and has_hung_up(self.transport):
            self.writing.abort()

    def _patience(self) -> float:
        """How many ticks the next request may take to come."""
        if self._is_surplus:  # somebody else may need its place, for a probe
            return self._proxy.linger_ticks
        is_within_request = self._is_within_head or self._receiving is not None  # a body may come behind its answer
        return self._proxy.client_ticks if is_within_request else self._proxy.client_idle_ticks

    def _look_at_what_is_unsent(self) -> None:
        """An answer of our own is written whole: who does not take it is let go, and the memory with it."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self._unsent = self._deaf_ticks = 0
            self._unsent_ticks = 0.0
            return
        limits, ticks = self._proxy.limits, self._proxy.client_ticks
        if not self._unsent_ticks:
            self._unsent_patience = ticks + unsent / (limits.held_bytes_per_second * limits.tick_seconds)
        self._unsent_ticks += 1
        self._deaf_ticks = self._deaf_ticks + 1 if unsent == self._unsent else 0
        self._unsent = unsent
        self._quiet = 0  # it is not idle
        if self._deaf_ticks > ticks or self._unsent_ticks > self._unsent_patience:
            self.writing.abort()


def protocol(proxy: Proxy, judge: Judge) -> Callable[..., ClientConnection]:
    """What uvicorn makes of each connection; its ``http=``."""
    return partial(ClientConnection, proxy, judge)
