"""One request on its way to the engine, and the response back. The package's docstring draws the states."""

from __future__ import annotations

import asyncio
import math
import time
from enum import Enum

from gated_proxy.door_visit import Visit
from gated_proxy.engine import EngineConnection
from gated_proxy.failures import (
    CLIENT_LEFT,
    CLIENT_NOT_READING,
    CLIENT_STALLED,
    DISCONNECTED,
    NO_RESPONSE,
    RESPONSE_STALLED,
    SERVER_ERRORS,
    UNREADABLE,
    UPLOAD_STALLED,
    Failure,
    Refused,
    body_too_slow,
)
from gated_proxy.gate import Admission
from gated_proxy.heads import RequestHead, ResponseHead
from gated_proxy.logs import RequestRecord
from gated_proxy.proxy import Client, Proxy
from gated_proxy.routes import SAFE_METHODS, method_class
from gated_proxy.transports import WaitingPieces

# With these the first byte of a response means that the engine has encoded the images: it is of the first token.
_BEGINS_WITH_A_TOKEN = frozenset({"chat_completions", "messages"})


class State(Enum):
    HELD = "held"
    CONNECTING = "connecting"
    SENDING = "sending"
    RESPONDING = "responding"
    TUNNEL = "tunnel"
    OVER = "over"


class EngineExchange(RequestRecord):
    """One request to the engine, from its head to the end of its response.

    The gate counts it from the piece that makes it whole, without which the engine can do nothing: uvicorn calls the
    application at the head, but FastAPI reads all of a body before it calls a handler that has one. A handler without a
    body (`/ping`, `/v1/responses/{id}/cancel`) may run at the head and starts nothing in the model; a request whose
    response begins early is counted from there on. So a body goes on as it comes, and only its last piece waits while
    the gate is closed; a head that comes while it is closed waits with all that follows.

    Before that the door looks at each piece, and may have one wait, and what follows it, until the images that became
    known with it have room; of a body that has lent its room only the last waits.
    """

    def __init__(self, proxy: Proxy, client: Client, head: RequestHead, path_class: str) -> None:
        super().__init__(head)
        self._proxy = proxy
        self._client = client
        self._path_class = path_class
        self._has_request = not head.has_body  # the whole request has come
        self._closes = not head.keep_alive
        self._state = State.HELD
        self._engine: EngineConnection | None = None
        self._response: ResponseHead | None = None
        self._admission: Admission | None = None  # while the gate counts it
        self._last: bytes | None = None  # the piece that makes the request whole, until door and gate let it through
        self._body_ticks = 0  # ticks in which more of the body was waited for
        self._task: asyncio.Task[None] | None = None
        self._pieces = WaitingPieces(client.read_side, "waiting")  # for the engine
        self._visit: Visit | None = None  # at the door
        self._at_door = WaitingPieces(client.read_side, "door")  # of which the first has been looked at
        self._held_since: float | None = None  # while it waits at the gate
        self._engine_is_full = False
        self._client_is_full = False
        self._quiet = 0  # ticks since the last byte in either direction

    # --- the way to the engine ---

    def start(self) -> None:
        self._proxy.exchanges.add(self)
        self._proxy.observer.request_started()
        if self._is_gated:
            gate = self._proxy.gate
            if self._has_request:
                self._admission = gate.try_enter()
                passes = self._admission is not None
            else:
                passes = gate.passes_at_once
            if not passes:
                self._hold()
                return
        self._connect()

    @property
    def _is_gated(self) -> bool:
        return self.head.method not in SAFE_METHODS or self.head.websocket

    def _hold(self) -> None:
        self._held_since = time.perf_counter()
        self._task = self._proxy.spawn(self._wait_at_gate())

    async def _wait_at_gate(self) -> None:
        gate = self._proxy.gate
        try:
            admission = await gate.enter()
        except Refused as shed:
            self.fail(shed.failure)
            return
        self._end_hold(time.perf_counter())
        if self._state is State.HELD:
            if self._has_request:
                self._admission = admission
            else:  # it may go on, but does not count yet
                gate.leave(admission)
            self._connect()
            return
        if self._admission is None and self._state is not State.OVER:
            self._admission = admission
        else:  # a response came early, or the request ended while it waited
            gate.leave(admission)
        last, self._last = self._last, None
        if last is not None:
            self._send(last)

    def _end_hold(self, now: float) -> None:
        if self._held_since is not None:
            self.held_seconds += now - self._held_since
            self._held_since = None

    def _connect(self) -> None:
        self._state = State.CONNECTING
        pooled = self._proxy.pool.take()
        if pooled is not None:
            self._send_head(pooled)
        else:
            self._task = self._proxy.spawn(self._open())

    async def _open(self) -> None:
        opened = await self._proxy.pool.connect()
        if isinstance(opened, Failure):
            self.fail(opened)
        else:
            self._send_head(opened)

    def _send_head(self, engine: EngineConnection) -> None:
        self._state = State.SENDING
        self._engine = engine
        self.was_reused = engine.served > 0
        if self.was_reused:
            self._proxy.requests_on_reused += 1
        else:
            self._proxy.requests_on_new += 1
        self._quiet = 0
        engine.begin(self)
        engine.write_side.write(self._proxy.head_for_engine(self.head, self._client.forwarding))
        if not self.head.websocket:
            self._pieces.send(engine.write_side)
        if self._last is not None:
            self._send_last(self._last)

    # --- called by the client's side ---

    def body(self, piece: bytes) -> None:
        if not self.request_bytes and self._is_gated and not self.head.websocket:
            self._visit = self._proxy.door.visit(
                self.head, self._path_class, piece, opens=self._door_opens, refuses=self.fail
            )
        self.request_bytes += len(piece)
        if self._passes_door(piece):
            self._pass_on(piece)

    def _passes_door(self, piece: bytes) -> bool:
        if self._visit is None:
            return True
        if not self._at_door:
            try:
                if self._proxy.door.take(self._visit, piece):
                    return True
            except Refused as refused:
                self.fail(refused.failure)
                return False
        self._at_door.add(piece)
        return False

    def _door_opens(self) -> None:
        """Go on with the body, up to its next piece that has to wait."""
        pieces = self._at_door.take()
        for at, piece in enumerate(pieces, 1):
            if at > 1 and not self._passes_door(piece):
                if self._state is not State.OVER:
                    for later in pieces[at:]:
                        self._at_door.add(later)
                return
            self._pass_on(piece, is_followed=at < len(pieces))
        if self._state is State.OVER:  # the client left before, or the last piece was refused
            return
        if self._last is not None and self._held_since is None:
            self._send_last(self._last)
        if pieces and self._has_request:
            self.body_ends()
        elif self._state is State.SENDING and self._last is None:
            self._quiet = 0

    def _pass_on(self, piece: bytes, *, is_followed: bool = False) -> None:
        if self.head.chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        elif self.request_bytes == self.head.declared_bytes and not is_followed:
            self._send_last(piece)
            return
        self._send(piece)

    def _send_last(self, piece: bytes) -> None:
        self._last = piece
        try:
            if self._visit is not None and not self._proxy.door.finish(self._visit):
                return
        except Refused as refused:
            self.fail(refused.failure)
            return
        if self._is_gated and self._admission is None and self._state is not State.HELD:
            if self._state is State.CONNECTING:
                return
            self._admission = self._proxy.gate.try_enter()
            if self._admission is None:
                self._hold()
                return
        self._last = None
        self._send(piece)

    def _leave_gate(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            self._proxy.gate.leave(admission)

    def _send(self, piece: bytes) -> None:
        self._quiet = 0
        engine = self._engine
        if engine is not None and (not self.head.websocket or self._state is State.TUNNEL):
            engine.write_side.write(piece)
            return
        self._pieces.add(piece)

    def body_ends(self) -> None:
        self._has_request = True
        if self._at_door:
            return
        if self.head.chunked:
            self._send_last(b"0\r\n\r\n")
        if self._state is State.SENDING:
            self._quiet = 0

    def engine_full(self) -> None:
        self._engine_is_full = True
        self._client.read_side.hold("engine")

    def engine_ready(self) -> None:
        self._engine_is_full = False
        self._quiet = 0
        self._client.read_side.let_go("engine")

    # --- called by the engine's connection ---

    def interim_response(self, raw: bytes) -> None:
        """Pass on a 1xx, unless the client speaks HTTP/1.0, which has none."""
        if not self.head.is_http10:
            self.response_bytes += len(raw)
            self._client.write_side.write(raw)

    def response_begins(self, head: ResponseHead, data: bytes) -> None:
        self._state = State.RESPONDING
        if self._admission is not None:
            self._admission.has_response = True
        if not (head.chunked or head.until_close):
            # A declared length means that the whole response is made: however slow the client is, the engine is done.
            self._leave_gate()
        elif self._is_gated and self._admission is None:
            self._admission = self._proxy.gate.admit()
        self._response = head
        self.status = head.status
        visit, last_is_at_door = self._visit, self._last is not None and self._held_since is None
        if visit is not None and (self._at_door or last_is_at_door or visit.has_lent):
            self._proxy.door.leave(visit)  # the engine responds to what it has, and reads on or not
            self._door_opens()
        # Without a 100 the client may leave the body out: then its next request would look like the body.
        lacks_100 = self.head.expects_continue and not self._has_request
        self._closes = self._closes or head.until_close or lacks_100
        unchunked = self.head.is_http10 and head.chunked
        if data:
            self.note_first_byte()
        data = head.for_client(self.head.request_id(), close=self._closes, unchunked=unchunked) + data
        self.response_bytes += len(data)
        self._client.write_side.write(data)
        self._quiet = 0

    def response_continues(self, data: bytes) -> None:
        self._quiet = 0
        if self.first_byte_seconds is None:
            self.note_first_byte()
        self.response_bytes += len(data)
        self._client.write_side.write(data)

    def response_ends(self, *, reusable: bool) -> None:
        """End the exchange. The rest of a request that is still arriving is dropped."""
        if self.first_byte_seconds is None:
            self.note_first_byte()
        engine, self._engine = self._engine, None
        if engine is not None:
            if reusable and self._has_request and self._last is None and not self._at_door:
                engine.release()
            else:
                engine.cut()
        self._end()
        self._client.response_done(close=self._closes)

    def note_first_byte(self) -> None:
        super().note_first_byte()
        if self._visit is not None and self._path_class in _BEGINS_WITH_A_TOKEN:
            self._proxy.door.leave(self._visit)

    def tunnel_opens(self, head: ResponseHead) -> None:
        self._state = State.TUNNEL
        self._response = head
        self.status = head.status
        self._quiet = 0
        self._proxy.tunnels += 1
        self.note_first_byte()
        if self._admission is not None:
            self._admission.is_open_ended = True
        data = head.for_tunnel(self.head.request_id())
        self.response_bytes += len(data)
        self._client.write_side.write(data)
        if self._engine is not None:
            self._pieces.send(self._engine.write_side)

    def engine_failed(self, failure: Failure) -> None:
        engine, self._engine = self._engine, None
        unsent = None
        if engine is not None:
            unsent = engine.write_side.take_unsent()
            engine.cut()
        # The engine may have acted on what was sent: then only a request that changes nothing is sent once more.
        may_repeat = unsent is not None or (self.head.method in SAFE_METHODS and not self.head.has_body)
        if self._state is State.TUNNEL:
            # An end in order is in the frames that went through.
            self._end()
            self._client.cut(reset=False)
        elif failure is DISCONNECTED and engine is not None and engine.served and may_repeat:
            self._proxy.pool.retries += 1
            self._state = State.CONNECTING
            self._pieces.put_back((unsent or [])[1:])  # the head is written anew
            self._task = self._proxy.spawn(self._open())
        else:
            self.fail(failure)

    def client_full(self) -> None:
        self._client_is_full = True
        if self._engine is not None:
            self._engine.read_side.hold("client")

    def client_ready(self) -> None:
        self._client_is_full = False
        self._quiet = 0
        if self._engine is not None:
            self._engine.read_side.let_go("client")

    # --- ends other than a whole response ---

    def client_left(self) -> None:
        if self._state is State.TUNNEL:
            if self._engine is not None:
                self._engine.close()  # once the client's last bytes are sent
            self._engine = None
            self._end()
        else:
            self.fail(CLIENT_LEFT)

    def fail(self, failure: Failure) -> None:
        """End it, with an error for the client where one can still be sent."""
        if self._state is State.OVER:
            return
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.cut()
        self.reason = failure.reason
        is_before_response = self.status is None
        if failure.status == CLIENT_LEFT.status:
            self.result = "client_left"
        elif is_before_response or failure.status not in SERVER_ERRORS:
            # Within a response only the client's own body can still be refused; any other failure cuts it short.
            self.result = "refused"
        else:
            self.result = "truncated"
        error, closes = b"", self._closes
        if self.result != "client_left":
            self._proxy.report(failure, self.head, self._client.peer, self.result)
            self.status = self.status or failure.status
            if is_before_response:
                # What is missing of the body is read and dropped, and the connection goes on, unless it closes in any
                # case, or the body itself was the fault, or would come only after a 100.
                body_ends_it = self.head.expects_continue or failure.status in UNREADABLE
                closes = closes or (body_ends_it and not self._has_request)
                error = self.head.error(failure, close=closes)
                self.response_bytes += len(error)
        self._end()
        if error:
            self._client.write_side.write(error)
            self._client.response_done(close=closes)
        elif failure is not CLIENT_LEFT:
            response = self._response
            # Without framing, the connection's end would look like the response's.
            is_unframed = response is not None and (response.until_close or self.head.is_http10)
            self._client.cut(reset=is_unframed or failure.status == CLIENT_LEFT.status)

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
        if self._visit is not None:
            proxy.door.end(self._visit, self.status or CLIENT_LEFT.status)
            self.held_seconds += self._visit.waited_seconds
        if self._engine_is_full:
            self._client.read_side.let_go("engine")
        for pieces in (self._pieces, self._at_door):
            if pieces:
                pieces.take()
        seconds = now - self.started
        status = self.status or CLIENT_LEFT.status
        proxy.observer.request_ended(
            self._path_class,
            method_class(self.head.method),
            status,
            self.result,
            seconds=seconds,
            first_byte_seconds=self.first_byte_seconds,
            request_bytes=len(self.head.raw) + self.request_bytes,
            response_bytes=self.response_bytes,
        )
        if proxy.access_log is not None:
            proxy.access_log.write(self.line(self._client.peer, self._path_class, status, seconds))

    def shutdown(self) -> None:
        self._closes = True

    # --- time ---

    def tick(self) -> None:
        self._quiet += 1
        if self._quiet > self._patience():
            if self._state is State.TUNNEL:
                self.engine_failed(RESPONSE_STALLED)
            else:
                self.fail(self._stalled())
        elif self._engine is not None and not (self._has_request or self._engine_is_full or self._at_door):
            self._body_ticks += 1  # no piece renews this time
            limits = self._proxy.limits
            allowed = limits.slow_body_seconds + self.request_bytes / limits.body_bytes_per_second
            if self._body_ticks * limits.tick_seconds > allowed:
                self.fail(body_too_slow(limits.body_bytes_per_second))

    def _patience(self) -> float:
        """Return the ticks that it may be quiet: to connect, at the door and at the gate it waits by their limits."""
        if self._state in (State.RESPONDING, State.TUNNEL):
            return self._proxy.idle_ticks
        if self._state is not State.SENDING or self._last is not None or self._at_door:
            return math.inf
        return self._proxy.first_byte_ticks if self._has_request else self._proxy.idle_ticks

    def _stalled(self) -> Failure:
        if self._state is State.RESPONDING:
            return CLIENT_NOT_READING if self._client_is_full else RESPONSE_STALLED
        if self._has_request:
            return NO_RESPONSE
        return UPLOAD_STALLED if self._engine_is_full else CLIENT_STALLED
