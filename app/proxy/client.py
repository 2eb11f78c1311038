"""A client's connection: its requests one after the other, each sent to where it belongs."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from app.proxy.exchange import Exchange
from app.proxy.failures import Failure, bad_request, error_answer
from app.proxy.heads import KEPT_APART, Destination, Header, RequestHead
from app.proxy.own import OwnConversation
from app.proxy.proxy import Proxy
from app.proxy.reading import FULL_READ_BYTES, Reading

log = logging.getLogger("app.proxy")

Judge = Callable[[bytes, bytes, bool], Destination]
"""Where a request goes, by its method, its raw path, and whether it asks for a WebSocket."""

_NOT_HTTP = bad_request("this is not an HTTP/1.1 request")


class Conversation(Protocol):
    """Whoever answers a request."""

    def start(self) -> None:
        """Set out."""

    def body(self, piece: bytes) -> None:
        """A piece of the request's body."""

    def body_ends(self, trailers: list[Header]) -> None:
        """The request is complete."""

    def flush(self) -> None:
        """That is all for this turn."""

    def client_full(self) -> None:
        """Write no more for now."""

    def client_ready(self) -> None:
        """Write on."""

    def client_left(self) -> None:
        """Nobody waits for the answer any more."""

    def fail(self, failure: Failure) -> None:
        """What the client sent cannot be understood further."""

    def shutdown(self) -> None:
        """Let this be the connection's last answer."""


class _Incoming:
    """A request that is being received; what has come of it stays here until its turn has come."""

    talk: Conversation | None = None  # none any more: what comes of its body is nobody's
    flaw: Failure | None = None
    is_waiting = False
    is_complete = False
    body_bytes = 0

    def __init__(self) -> None:
        self.head = RequestHead()
        self.pieces: list[bytes] = []
        self.trailers: list[Header] = []


class ClientConnection(asyncio.Protocol):
    """The protocol that uvicorn runs on each connection.

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
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.reading: Reading = cast("Reading", None)
        self._parser = httptools.HttpRequestParser(self)
        self._receiving: _Incoming | None = None
        self._head = RequestHead()  # the one being received
        self._is_in_head = False
        self._head_bytes = 0  # read so far for a head that is not complete
        self._plain_bytes = 0  # still to come of a counted body, which needs no parser
        self._current: _Incoming | None = None  # the one in conversation
        self._queue: deque[_Incoming] = deque()
        self._is_raw = False  # what comes is the conversation's, whatever it is
        self._is_deaf = False  # what comes is nobody's
        self._is_last = False
        self._is_lingering = False
        self._quiet = 0  # ticks since the last answer, or since a head began

    # --- what the transport says ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connects."""
        self.transport = cast("asyncio.Transport", transport)
        self.reading = Reading(self.transport)
        self._connections.add(self)
        self._proxy.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, or was closed."""
        del exc
        self._connections.discard(self)
        self._proxy.clients.discard(self)
        self._is_deaf = True
        self._queue.clear()
        talk = self._forget_current()
        self._receiving = None
        self._parser = None  # it holds our methods: a cycle would be the garbage collector's work
        if talk is not None:
            talk.client_left()

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
        if self._current is not None and self._current.talk is not None:
            self._current.talk.flush()

    def _take(self, data: bytes) -> bytes:
        """Take what can be taken at once, and return the rest."""
        if self._is_raw:
            if self._current is not None and self._current.talk is not None:
                self._current.talk.body(data)
            return b""
        if self._plain_bytes:
            return self._take_plain(data)
        if self._is_in_head or self._receiving is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser stops behind a request that asks for another protocol; the next one starts there.
            self._parser = httptools.HttpRequestParser(self)
            return data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            log.debug("not HTTP: %s", error)
            self._refuse(_NOT_HTTP)
            return b""
        receiving = self._receiving
        if self._is_in_head:
            if self._head_bytes > self._proxy.limits.max_header_bytes:
                self._refuse(self._proxy.head_too_large)
        elif receiving is not None and not receiving.head.chunked:
            self._plain_bytes = receiving.head.declared_bytes - receiving.body_bytes
        return b""

    def _take_plain(self, data: bytes) -> bytes:
        """The rest of a body whose length is known: a parser would only copy it."""
        rest = data[self._plain_bytes :]
        piece = data[: self._plain_bytes] if rest else data
        self._plain_bytes -= len(piece)
        self.on_body(piece)
        if not self._plain_bytes and not self._is_deaf:
            self._parser = httptools.HttpRequestParser(self)
            self.on_message_complete()
        return rest

    # --- what llhttp says ---

    def on_message_begin(self) -> None:
        """A request begins."""
        self._receiving = incoming = _Incoming()
        self._head = incoming.head
        self._is_in_head = True
        self._quiet = 0

    def on_url(self, url: bytes) -> None:
        """Its target, or a part of it."""
        self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of its head, or a trailer."""
        if self._is_in_head:
            lowered = name.lower()
            if lowered in KEPT_APART:
                self._head.apart.append((lowered, value))
            else:
                self._head.lines.append(b"%b: %b\r\n" % (name, value))
        elif self._receiving is not None:
            self._receiving.trailers.append((name, value))

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        incoming, parser, limits = self._receiving, self._parser, self._proxy.limits
        if incoming is None or self._is_deaf:
            return
        self._is_in_head = False
        head = incoming.head
        flaw = head.complete(
            parser.get_method(),
            parser.get_http_version(),
            keep_alive=parser.should_keep_alive(),
            upgrade=parser.should_upgrade(),
        )
        if self._head_bytes > limits.max_header_bytes and head.size() > limits.max_header_bytes:
            flaw = self._proxy.head_too_large
        elif head.declared_bytes > limits.max_body_bytes:
            flaw = self._proxy.body_too_large
        self._head_bytes = 0
        if flaw is not None:
            self._refuse(flaw)
        elif self._current is not None or self._queue:
            self._wait_for_turn(incoming)
        else:
            self._converse(incoming)

    def on_body(self, piece: bytes) -> None:
        """A piece of its body."""
        incoming = self._receiving
        if incoming is None or self._is_deaf:
            return
        incoming.body_bytes += len(piece)
        if incoming.body_bytes > self._proxy.limits.max_body_bytes:
            self._refuse(self._proxy.body_too_large)
        elif incoming.talk is not None:
            incoming.talk.body(piece)
        elif incoming.is_waiting:
            incoming.pieces.append(piece)

    def on_message_complete(self) -> None:
        """It is complete."""
        incoming, self._receiving = self._receiving, None
        if incoming is None or self._is_deaf:
            return
        incoming.is_complete = True
        self._is_raw = incoming.head.websocket
        if incoming.talk is not None:
            incoming.talk.body_ends(incoming.trailers)

    # --- conversations ---

    def _wait_for_turn(self, incoming: _Incoming) -> None:
        incoming.is_waiting = True
        self._queue.append(incoming)
        self.reading.hold("queue")  # no more of them than one read brings

    def _converse(self, incoming: _Incoming) -> None:
        was_waiting, incoming.is_waiting = incoming.is_waiting, False
        if incoming.flaw is not None:
            self._give_up(incoming.flaw, incoming.head)
            return
        head = incoming.head
        where = self._judge(head.method, head.path, head.websocket)
        if where.refusal is not None:
            # The body, if one comes, is nobody's; a client that waits to be asked for it cannot be told from its next
            # request.
            close = self._is_last or head.websocket or not head.keep_alive or head.expects_continue
            self._write_error(where.refusal, head, close=close)
            if close:
                self._end_after(incoming)
            return
        talk: Conversation
        if where.to == "own":
            talk = OwnConversation(self, head, *self._uvicorn)
        else:
            talk = Exchange(self._proxy, self, head, where.path_class)
        self._current, incoming.talk = incoming, talk
        if self._is_last:
            talk.shutdown()
        talk.start()
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
        if incoming.talk is not None:
            incoming.talk.flush()

    def answered(self, *, close: bool) -> None:
        """The conversation is over and its answer written."""
        incoming = self._current
        self._forget_current()
        self._quiet = 0
        if incoming is not None and (close or self._is_last or self._is_raw):
            self._end_after(incoming)
        elif self._queue:
            # Not from within the engine's callback: a queue of quick answers would become a stack.
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        while self._queue and self._current is None and not self._is_lingering:
            self._converse(self._queue.popleft())
        if not self._queue:
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
            self.transport.abort()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server stops: close, now or after the answer."""
        self._is_last = True
        if self._current is not None and self._current.talk is not None:
            self._current.talk.shutdown()
        elif not self._queue:
            self.transport.close()

    # --- refusals and ends ---

    def _refuse(self, failure: Failure) -> None:
        """Nothing that follows on this connection can be understood, or should be."""
        self._is_deaf = True
        incoming = self._receiving or _Incoming()
        self._receiving = None
        if incoming.talk is not None:
            incoming.talk.fail(failure)
        elif self._current is not None or self._queue:
            incoming.flaw = failure
            if not incoming.is_waiting:  # what came before it is answered first
                self._wait_for_turn(incoming)
        else:
            self._give_up(failure, incoming.head)

    def _give_up(self, failure: Failure, head: RequestHead) -> None:
        self._write_error(failure, head, close=True)
        self._linger()

    def _write_error(self, failure: Failure, head: RequestHead, *, close: bool) -> None:
        answer = error_answer(failure, head.request_id(), close=close, without_body=head.method == b"HEAD")
        self.transport.write(answer)

    def _end_after(self, incoming: _Incoming) -> None:
        if incoming.is_complete and not self._is_deaf:
            self._is_deaf = True
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close when the client has done so, or soon: to close on unread bytes would destroy the answer on its way."""
        self._is_deaf = self._is_lingering = True
        self._quiet = 0
        self._queue.clear()
        self.reading.let_go_all()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def tick(self) -> None:
        """A while has passed."""
        self._quiet += 1
        if self._is_lingering:
            if self._quiet > self._proxy.linger_ticks:
                self.transport.abort()
        elif self._current is None and self._quiet > self._proxy.client_ticks:
            self.transport.close()


def protocol(proxy: Proxy, judge: Judge) -> Callable[..., ClientConnection]:
    """What uvicorn makes of each connection; its ``http=``."""
    return partial(ClientConnection, proxy, judge)
