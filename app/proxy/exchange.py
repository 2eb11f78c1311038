"""One request on its way to the engine, and the answer back. The states are drawn in this package's docstring."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from enum import Enum

from app.gate import Shed
from app.proxy.failures import (
    ANSWER_STALLED,
    BROKEN_OFF,
    CLIENT_DEAF,
    CLIENT_LEFT,
    CLIENT_STALLED,
    DISCONNECTED,
    NO_ANSWER,
    SERVER_ERRORS,
    UPLOAD_STALLED,
    Failure,
    error_answer,
)
from app.proxy.heads import NEVER_A_TRAILER, READING, AnswerHead, Header, RequestHead, method_class
from app.proxy.proxy import Proxy
from app.proxy.roles import Asker, Client, Conversation
from app.proxy.upstream import EngineConnection

log = logging.getLogger("app.proxy")

# Of a target, which may be as long as a head.
_LOGGED_BYTES = 200
# The request's body is too much, too slow, or not HTTP: the connection ends with the answer.
_UNREADABLE = frozenset({400, 408, 413, 431})
# Of what is for the engine and cannot be sent yet; then the client is not read.
_WAITING_BYTES_MOST = 64 * 1024


class State(Enum):
    """How far it has come."""

    HELD = "held"
    CONNECTING = "connecting"
    ASKING = "asking"
    ANSWERING = "answering"
    TUNNEL = "tunnel"
    OVER = "over"


class Exchange(Conversation, Asker):
    """One request, from its head to the end of its answer.

    Args:
        proxy: the gate, the pool, the limits, and who counts.
        client: gets the answer.
        head: the request's.
        path_class: for who counts.
    """

    # Defaults here and not in __init__: a plain request changes few of them.
    _state = State.HELD
    _engine: EngineConnection | None = None
    _answer: AnswerHead | None = None
    _is_counted_at_gate = False
    _task: asyncio.Task[None] | None = None
    _code: int | None = None  # that the client has seen
    _first_byte_seconds: float | None = None
    _engine_is_full = False
    _client_is_full = False
    _has_repeated = False
    _waiting_bytes = 0
    _quiet = 0  # ticks since anything moved
    _patience = math.inf

    def __init__(self, proxy: Proxy, client: Client, head: RequestHead, path_class: str) -> None:
        self._proxy = proxy
        self._client = client
        self._write = client.writing.write
        self._head = head
        self._path_class = path_class
        self._waiting: list[bytes] = []  # for the engine, until it can be sent
        self._has_asked = not (head.chunked or head.declared_bytes)  # all of the request has come
        self._closes = not head.keep_alive
        self._started = time.perf_counter()
        self.to_head = head.method == b"HEAD"
        self.wants_bare_body = head.is_http10
        self.wants_tunnel = head.websocket

    # --- the way there ---

    def start(self) -> None:
        """Set out: through the gate, to a connection."""
        self._proxy.exchanges.add(self)
        self._proxy.observer.request_started(self._path_class)
        if self._head.method not in READING or self.wants_tunnel:
            if not self._proxy.gate.try_enter():
                self._task = self._proxy.spawn(self._wait_at_gate())
                return
            self._is_counted_at_gate = True
        self._connect()

    async def _wait_at_gate(self) -> None:
        try:
            await self._proxy.gate.enter()
        except Shed as shed:
            self.fail(Failure(503, shed.reason, str(shed), shed.retry_after))
            return
        self._is_counted_at_gate = True
        self._connect()

    def _connect(self) -> None:
        self._state = State.CONNECTING
        pooled = self._proxy.pool.take()
        if pooled is not None:
            self._ask(pooled)
        else:
            self._task = self._proxy.spawn(self._open())

    async def _open(self) -> None:
        made = await self._proxy.pool.connect()
        if isinstance(made, Failure):
            self.fail(made)
        else:
            self._ask(made)

    def _ask(self, engine: EngineConnection) -> None:
        self._state = State.ASKING
        self._engine = engine
        self._quiet = 0
        self._patience = self._proxy.first_byte_ticks if self._has_asked else self._proxy.idle_ticks
        engine.ask(self)
        engine.writing.write(self._proxy.head_for_engine(self._head))
        if self._waiting and not self.wants_tunnel:
            self._send_waiting(engine)

    def _send_waiting(self, engine: EngineConnection) -> None:
        for piece in self._waiting:
            engine.writing.write(piece)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._client.reading.let_go("waiting")

    # --- what the client sends ---

    def body(self, piece: bytes) -> None:
        """A piece of the request's body; or of a tunnel."""
        if self._head.chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self._send(piece)

    def _send(self, piece: bytes) -> None:
        self._quiet = 0
        engine = self._engine
        if engine is not None and (not self.wants_tunnel or self._state is State.TUNNEL):
            engine.writing.write(piece)
            return
        self._waiting.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes > _WAITING_BYTES_MOST:
            self._client.reading.hold("waiting")

    def body_ends(self, trailers: tuple[Header, ...]) -> None:
        """The request is complete."""
        if self._head.chunked:
            kept = (b"%b: %b\r\n" % header for header in trailers if header[0].lower() not in NEVER_A_TRAILER)
            self._send(b"0\r\n%b\r\n" % b"".join(kept))
        self._has_asked = True
        if self._state is State.ASKING:
            self._quiet = 0
            self._patience = self._proxy.first_byte_ticks

    def engine_full(self) -> None:
        """The engine takes no more for now, so the client is not read."""
        self._engine_is_full = True
        self._client.reading.hold("engine")

    def engine_ready(self) -> None:
        """It does again."""
        self._engine_is_full = False
        self._quiet = 0
        self._client.reading.let_go("engine")

    # --- what the engine answers ---

    def answer_interim(self, raw: bytes) -> None:
        """A 1xx, which HTTP/1.0 does not know."""
        if not self._head.is_http10:
            self._write(raw)

    def answer_begins(self, head: AnswerHead, data: bytes) -> None:
        """Its head, and what came of its body with it."""
        self._state = State.ANSWERING
        self._answer = head
        self._code = head.status
        # A client that waits to be asked for its body, and is not: what it sends next cannot be told from its body.
        unasked = self._head.expects_continue and not self._has_asked
        self._closes = self._closes or head.until_close or unasked
        unchunked = self.wants_bare_body and head.chunked
        if data:
            self._first_byte_seconds = time.perf_counter() - self._started
        self._write(head.for_client(self._head.request_id(), close=self._closes, unchunked=unchunked) + data)
        self._quiet = 0
        self._patience = self._proxy.idle_ticks

    def answer_continues(self, data: bytes) -> None:
        """A piece of its body."""
        self._quiet = 0
        if self._first_byte_seconds is None:
            self._first_byte_seconds = time.perf_counter() - self._started
        self._write(data)

    def answer_ends(self, *, reusable: bool) -> None:
        """The end of it. The request may still be on its way: then its rest is nobody's."""
        if self._first_byte_seconds is None:
            self._first_byte_seconds = time.perf_counter() - self._started
        engine, self._engine = self._engine, None
        if engine is not None:
            if reusable and self._has_asked:
                engine.release()
            else:
                engine.cut()
        self._end()
        self._client.answered(close=self._closes)

    def tunnel_opens(self, head: AnswerHead) -> None:
        """The engine speaks WebSocket now; whatever comes is the far end's."""
        self._state = State.TUNNEL
        self._answer = head
        self._code = head.status
        self._patience = math.inf
        self._write(head.for_tunnel(self._head.request_id()))
        if self._engine is not None:
            self._send_waiting(self._engine)

    def engine_failed(self, failure: Failure) -> None:
        """The connection is gone, or what came is no answer."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.cut()
        if self._state is State.TUNNEL:
            # How it ended stands in the frames that went through, if it did in order.
            self._end()
            self._client.cut(reset=False)
        elif failure is DISCONNECTED and engine is not None and engine.answered and self._may_repeat():
            # An idle connection that the engine closed just now; a request that changes nothing is sent once more.
            self._has_repeated = True
            self._task = self._proxy.spawn(self._open())
        else:
            self.fail(failure)

    def _may_repeat(self) -> bool:
        return self._head.method in READING and not self._head.has_body and not self._has_repeated

    def client_full(self) -> None:
        """The client takes no more for now, so the engine is not read."""
        self._client_is_full = True
        if self._engine is not None:
            self._engine.reading.hold("client")

    def client_ready(self) -> None:
        """It does again."""
        self._client_is_full = False
        self._quiet = 0
        if self._engine is not None:
            self._engine.reading.let_go("client")

    # --- how it ends otherwise ---

    def client_left(self) -> None:
        """Nobody waits for the answer any more."""
        if self._state is State.TUNNEL:
            if self._engine is not None:
                self._engine.close()  # with what the client said last
            self._engine = None
            self._end()
        else:
            self.fail(CLIENT_LEFT)

    def fail(self, failure: Failure) -> None:
        """End it, and tell the client as far as that can be done."""
        if self._state is State.OVER:
            return
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.cut()
        has_begun, answer = self._code is not None, self._answer
        if failure.status == CLIENT_LEFT.status:
            self._proxy.observer.client_disconnected()
        else:
            self._report(BROKEN_OFF if has_begun and failure.status not in SERVER_ERRORS else failure)
            self._code = self._code or failure.status
        self._end()
        if failure is CLIENT_LEFT:
            return
        if has_begun or failure is CLIENT_DEAF:
            # Without framing, the connection's end is the answer's.
            bare = answer is not None and (answer.until_close or self.wants_bare_body)
            self._client.cut(reset=bare or failure is CLIENT_DEAF)
            return
        # The rest of the body is read in vain, and the connection lives; unless the body itself was the fault.
        unread = not self._has_asked and (self._head.expects_continue or failure.status in _UNREADABLE)
        close = self._closes or unread
        self._write(error_answer(failure, self._head.request_id(), close=close, without_body=self.to_head))
        self._client.answered(close=close)

    def _report(self, failure: Failure) -> None:
        if failure.retry_after is not None:
            self._proxy.observer.request_shed(failure.reason)
        elif failure.status in SERVER_ERRORS:
            self._proxy.observer.upstream_error(failure.reason)
        log.warning(
            "%s %s: %s, request_id=%s",
            self._head.method.decode(),
            self._head.target[:_LOGGED_BYTES].decode("latin-1"),
            failure.message,
            self._head.request_id().decode(),
        )

    def _end(self) -> None:
        self._state = State.OVER
        proxy = self._proxy
        proxy.exchanges.discard(self)
        if self._task is not None and not self._task.done() and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None
        if self._is_counted_at_gate:
            proxy.gate.leave()
        if self._engine_is_full or self._waiting_bytes:
            self._client.reading.let_go("engine")
            self._client.reading.let_go("waiting")
        code = self._code or CLIENT_LEFT.status
        proxy.observer.request_ended(self._path_class, method_class(self._head.method), code, self._first_byte_seconds)

    def shutdown(self) -> None:
        """The server stops: the client's connection closes after this answer."""
        self._closes = True

    # --- time ---

    def tick(self) -> None:
        """A while has passed."""
        self._quiet += 1
        if self._quiet > self._patience:
            self.fail(self._who_kept_us_waiting())

    def _who_kept_us_waiting(self) -> Failure:
        if self._state is State.ANSWERING:
            return CLIENT_DEAF if self._client_is_full else ANSWER_STALLED
        if self._has_asked:
            return NO_ANSWER
        return UPLOAD_STALLED if self._engine_is_full else CLIENT_STALLED
