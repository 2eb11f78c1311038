"""One request on its way to the engine, and the answer back. The states are drawn in this package's docstring."""

from __future__ import annotations

import asyncio
import math
import time
from enum import Enum

from app.gate import Admission, Shed
from app.proxy.failures import (
    ANSWER_STALLED,
    CLIENT_DEAF,
    CLIENT_LEFT,
    CLIENT_SLOW,
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
from app.traffic import Result

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

    The gate counts it from the piece that makes it whole: without that the engine can do nothing with it. uvicorn calls
    the application at the head, but FastAPI reads all of a body before it calls a handler that has one. A handler
    without (`/ping`, `/v1/responses/{id}/cancel`) may run at the head and starts nothing in the model; whatever answers
    early is counted from its answer on. So a body goes on as it comes, and only its last piece waits while the gate is
    closed; a head that comes while it is closed waits with all that follows.

    Args:
        proxy: the gate, the pool, the limits, and what is counted and logged.
        client: gets the answer.
        head: the request's.
        path_class: a label of what is counted.
    """

    # Defaults here and not in __init__: a plain request changes few of them.
    _state = State.HELD
    _engine: EngineConnection | None = None
    _answer: AnswerHead | None = None
    _is_gated = False
    _admission: Admission | None = None  # while the gate counts it
    _last: bytes | None = None  # what makes the request whole, before the gate has let it through
    _body_ticks = 0  # in which it was waited for more
    _task: asyncio.Task[None] | None = None
    _code: int | None = None  # that the client has seen
    _first_byte_seconds: float | None = None
    _result: Result = "complete"
    _reason: str | None = None  # why it is not
    _request_bytes = 0  # of the body
    _response_bytes = 0
    _held_since: float | None = None  # while it waits at the gate
    _held_seconds = 0.0
    _was_reused: bool | None = None  # the engine's connection, once there is one
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
        self._proxy.observer.request_started()
        if self._head.method not in READING or self.wants_tunnel:
            self._is_gated = True
            gate = self._proxy.gate
            if self._has_asked:
                self._admission = gate.try_enter()
                passes = self._admission is not None
            else:
                passes = gate.passes_at_once
            if not passes:
                self._task = self._proxy.spawn(self._wait_at_gate())
                return
        self._connect()

    async def _wait_at_gate(self) -> None:
        gate = self._proxy.gate
        self._held_since = time.perf_counter()
        try:
            admission = await gate.enter()
        except Shed as shed:
            self.fail(Failure(503, shed.reason, str(shed), shed.retry_after))
            return
        self._end_hold(time.perf_counter())
        if self._state is not State.HELD:
            self._admit(admission)
            return
        if self._has_asked:
            self._admission = admission
        else:  # its turn has come, but it does not count yet
            gate.leave(admission)
        self._connect()

    def _end_hold(self, now: float) -> None:
        if self._held_since is not None:
            self._held_seconds += now - self._held_since
            self._held_since = None

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
        self._was_reused = engine.answered > 0
        if self._was_reused:
            self._proxy.requests_on_reused += 1
        else:
            self._proxy.requests_on_new += 1
        self._quiet = 0
        self._patience = self._proxy.first_byte_ticks if self._has_asked else self._proxy.idle_ticks
        engine.ask(self)
        engine.writing.write(self._proxy.head_for_engine(self._head, self._client.forwarding))
        if self._waiting and not self.wants_tunnel:
            self._send_waiting(engine)
        if self._last is not None:
            self._send_last(self._last)

    def _send_waiting(self, engine: EngineConnection) -> None:
        for piece in self._waiting:
            engine.writing.write(piece)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._client.reading.let_go("waiting")

    # --- what the client sends ---

    def body(self, piece: bytes) -> None:
        """A piece of the request's body; or of a tunnel."""
        self._request_bytes += len(piece)
        if self._head.chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        elif self._request_bytes == self._head.declared_bytes:
            self._send_last(piece)
            return
        self._send(piece)

    def _send_last(self, piece: bytes) -> None:
        """Send what makes the request whole as soon as the gate counts it."""
        if self._is_gated and self._admission is None and self._state is not State.HELD:
            if self._state is State.CONNECTING:
                self._last = piece
                return
            self._admission = self._proxy.gate.try_enter()
            if self._admission is None:
                self._last = piece
                if self._state is State.ASKING:
                    self._patience = math.inf  # it is the gate that keeps them waiting, for gate.hold_seconds
                self._task = self._proxy.spawn(self._wait_at_gate())
                return
        self._last = None
        self._send(piece)

    def _admit(self, admission: Admission) -> None:
        if self._admission is None and self._state is not State.OVER:
            self._admission = admission
        else:  # an early answer was faster, or it ended while it waited
            self._proxy.gate.leave(admission)
        last, self._last = self._last, None
        if last is not None:
            self._send(last)
        if self._state is State.ASKING:
            self._patience = self._proxy.first_byte_ticks

    def _leave_gate(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            self._proxy.gate.leave(admission)

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
            self._send_last(b"0\r\n%b\r\n" % b"".join(kept))
        self._has_asked = True
        if self._state is State.ASKING and self._last is None:
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
            self._response_bytes += len(raw)
            self._write(raw)

    def answer_begins(self, head: AnswerHead, data: bytes) -> None:
        """Its head, and what came of its body with it."""
        self._state = State.ANSWERING
        if not (head.chunked or head.until_close):
            # Who says the length has made all of it: however slowly the client takes it, the engine is done.
            self._leave_gate()
        elif self._is_gated and self._admission is None:
            self._admission = self._proxy.gate.admit()
        self._answer = head
        self._code = head.status
        # A client that waits to be asked for its body, and is not: what it sends next cannot be told from its body.
        unasked = self._head.expects_continue and not self._has_asked
        self._closes = self._closes or head.until_close or unasked
        unchunked = self.wants_bare_body and head.chunked
        if data:
            self._first_byte_seconds = time.perf_counter() - self._started
        data = head.for_client(self._head.request_id(), close=self._closes, unchunked=unchunked) + data
        self._response_bytes += len(data)
        self._write(data)
        self._quiet = 0
        self._patience = self._proxy.idle_ticks

    def answer_continues(self, data: bytes) -> None:
        """A piece of its body."""
        self._quiet = 0
        if self._first_byte_seconds is None:
            self._first_byte_seconds = time.perf_counter() - self._started
        self._response_bytes += len(data)
        self._write(data)

    def answer_ends(self, *, reusable: bool) -> None:
        """The end of it. The request may still be on its way: then its rest is nobody's."""
        if self._first_byte_seconds is None:
            self._first_byte_seconds = time.perf_counter() - self._started
        engine, self._engine = self._engine, None
        if engine is not None:
            if reusable and self._has_asked and self._last is None:
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
        self._quiet = 0
        self._patience = self._proxy.idle_ticks
        self._proxy.tunnels += 1
        self._first_byte_seconds = time.perf_counter() - self._started
        if self._admission is not None:
            self._admission.is_open_ended = True
        data = head.for_tunnel(self._head.request_id())
        self._response_bytes += len(data)
        self._write(data)
        if self._engine is not None:
            self._send_waiting(self._engine)

    def engine_failed(self, failure: Failure) -> None:
        """The connection is gone, or what came is no answer."""
        engine, self._engine = self._engine, None
        unsent = None
        if engine is not None:
            unsent = engine.writing.take_unsent()
            engine.cut()
        if self._state is State.TUNNEL:
            # How it ended stands in the frames that went through, if it did in order.
            self._end()
            self._client.cut(reset=False)
        elif failure is DISCONNECTED and engine is not None and engine.answered and self._may_repeat(unsent):
            self._repeat(unsent or [])
        else:
            self.fail(failure)

    def _may_repeat(self, unsent: list[bytes] | None) -> bool:
        """Whether it may be sent once more: the engine closed an idle connection just now.

        Args:
            unsent: what was for the engine, if none of it was sent. Else the engine may have acted on it, and only what
                changes nothing is asked again.
        """
        changes_nothing = self._head.method in READING and not self._head.has_body
        return not self._has_repeated and (unsent is not None or changes_nothing)

    def _repeat(self, unsent: list[bytes]) -> None:
        self._has_repeated = True
        self._proxy.pool.retries += 1
        self._state = State.CONNECTING
        body = unsent[1:]  # the head is written anew
        self._waiting[:0] = body
        self._waiting_bytes += sum(len(piece) for piece in body)
        self._task = self._proxy.spawn(self._open())

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
        self._result, self._reason = _result_of(failure, has_begun=has_begun), failure.reason
        if self._result != "client_left":
            self._proxy.report(failure, self._head, self._client.peer, self._result)
            self._code = self._code or failure.status
        if failure is CLIENT_LEFT:
            self._end()
            return
        if has_begun or failure is CLIENT_DEAF:
            self._end()
            # Without framing, the connection's end is the answer's.
            bare = answer is not None and (answer.until_close or self.wants_bare_body)
            self._client.cut(reset=bare or failure is CLIENT_DEAF)
            return
        # The rest of the body is read in vain, and the connection lives; unless the body itself was the fault.
        unread = not self._has_asked and (self._head.expects_continue or failure.status in _UNREADABLE)
        close = self._closes or unread
        data = error_answer(failure, self._head.request_id(), close=close, without_body=self.to_head)
        self._response_bytes += len(data)
        self._end()
        self._write(data)
        self._client.answered(close=close)

    def _end(self) -> None:
        now = time.perf_counter()
        self._end_hold(now)
        if self._state is State.TUNNEL:
            self._proxy.tunnels -= 1
        self._state = State.OVER
        proxy = self._proxy
        proxy.exchanges.discard(self)
        if self._task is not None and not self._task.done() and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None
        self._leave_gate()
        if self._engine_is_full or self._waiting_bytes:
            self._client.reading.let_go("engine")
            self._client.reading.let_go("waiting")
        self._count(now - self._started)

    def _count(self, seconds: float) -> None:
        proxy, head = self._proxy, self._head
        code = self._code or CLIENT_LEFT.status
        proxy.observer.request_ended(
            self._path_class,
            method_class(head.method),
            code,
            self._result,
            seconds=seconds,
            first_byte_seconds=self._first_byte_seconds,
            request_bytes=len(head.raw) + self._request_bytes,
            response_bytes=self._response_bytes,
        )
        if proxy.access_log is not None:
            proxy.log_ended(
                head,
                self._client.peer,
                self._path_class,
                code,
                result=self._result,
                reason=self._reason,
                request_bytes=self._request_bytes,
                response_bytes=self._response_bytes,
                seconds=seconds,
                first_byte_seconds=self._first_byte_seconds,
                held_seconds=self._held_seconds,
                reused=self._was_reused,
            )

    def shutdown(self) -> None:
        """The server stops: the client's connection closes after this answer."""
        self._closes = True

    # --- time ---

    def tick(self) -> None:
        """A while has passed."""
        self._quiet += 1
        if self._quiet > self._patience:
            if self._state is State.TUNNEL:
                self._end_idle_tunnel()
            else:
                self.fail(self._who_kept_us_waiting())
        elif self._engine is not None and not (self._has_asked or self._engine_is_full):
            self._wait_for_body()

    def _wait_for_body(self) -> None:
        """Look whether a body comes as fast as any must: pieces renew how long it may stand still, but not this."""
        self._body_ticks += 1
        limits = self._proxy.limits
        allowed = limits.slow_body_seconds + self._request_bytes / limits.body_bytes_per_second
        if self._body_ticks * limits.tick_seconds > allowed:
            self.fail(CLIENT_SLOW)

    def _end_idle_tunnel(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.cut()
        self._end()
        self._client.cut(reset=False)

    def _who_kept_us_waiting(self) -> Failure:
        if self._state is State.ANSWERING:
            return CLIENT_DEAF if self._client_is_full else ANSWER_STALLED
        if self._has_asked:
            return NO_ANSWER
        return UPLOAD_STALLED if self._engine_is_full else CLIENT_STALLED


def _result_of(failure: Failure, *, has_begun: bool) -> Result:
    if failure.status == CLIENT_LEFT.status:
        return "client_left"
    # Within an answer only the client's own body can still be refused; all else cuts it short.
    return "truncated" if has_begun and failure.status in SERVER_ERRORS else "refused"
