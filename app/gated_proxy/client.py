"""A client's connection: its requests, one after the other, each sent to its destination."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from gated_proxy.exchange import EngineExchange
from gated_proxy.failures import Failure, Refused
from gated_proxy.heads import NOT_HTTP, Chunks, Forwarding, RequestHead, forwarding, parse_head
from gated_proxy.proxy import Clients, Proxy
from gated_proxy.routes import LIVE_STREAM, Destination
from gated_proxy.sidecar import SidecarExchange
from gated_proxy.transports import (
    FULL_READ_BYTES,
    MAX_WAITING_BYTES,
    ReadSide,
    UnreadWatch,
    WriteSide,
    has_hung_up,
    keep_alive,
    peer_of,
)

_CR = ord("\r")
# Above a port's limit, for requests to the sidecar itself: probes, scrapes, operators. One response each.
SURPLUS_CONNECTIONS = 32
# Heads, or pieces of a body, that one connection may take in a turn of the loop: a read may hold thousands of either,
# and the other connections wait meanwhile.
STEPS_PER_TURN = 16

Route = Callable[[bytes, bytes, bool], Destination]
"""Decides where a request goes, by its method, its raw path, and whether it asks for a WebSocket."""


class IncomingRequest:
    """A request that is being received, or served by ``exchange``; without one, the rest of its body is dropped.

    A WebSocket's bytes end with the connection alone: it is never complete.
    """

    def __init__(self, proxy: Proxy, head: RequestHead) -> None:
        self.head = head
        self.exchange: EngineExchange | SidecarExchange | None = None
        self.is_complete = not (head.has_body or head.websocket)
        self._proxy = proxy
        self._left = head.declared_bytes  # of a counted body
        self._body_bytes = 0  # of a chunked body
        self._chunks = Chunks(proxy.head_too_large, proxy.limits.max_header_bytes) if head.chunked else None

    def take(self, data: bytes, at: int) -> tuple[bytes, int]:
        """Take a piece of the body from a place in the data; return it, without chunks, and the place behind it.

        Raises Refused where the data is not in chunks, or the body is too large.
        """
        if self.head.websocket:
            return data[at:] if at else data, len(data)
        if self._chunks is None:
            end = min(at + self._left, len(data))
            self._left -= end - at
            self.is_complete = not self._left
            return data[at:end] if end - at < len(data) else data, end
        body, rest = self._chunks.take(data[at:] if at else data)
        self._body_bytes += len(body)
        if self._body_bytes > self._proxy.limits.max_body_bytes:
            raise Refused(self._proxy.body_too_large)
        self.is_complete = self._chunks.is_complete
        return body, len(data) - len(rest)


class ClientConnection(asyncio.Protocol):
    """The protocol that uvicorn runs on each connection.

    One request is served at a time, and none is begun while responses wait for the client to take them: further bytes
    stay unread, first here, then with the client. So a connection costs one response more than its client takes, and
    not as many as its client has requested.

    uvicorn passes the arguments from ``config`` on.
    """

    transport: asyncio.Transport
    read_side: ReadSide
    write_side: WriteSide
    forwarding: Forwarding | None

    def __init__(
        self,
        proxy: Proxy,
        route: Route,
        clients: Clients,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._proxy = proxy
        self._route = route
        self._clients = clients
        self._uvicorn = (config, server_state, app_state)
        self._connections: set[Any] = server_state.connections  # uvicorn names its own protocols alone
        self._rest = b""  # bytes not taken yet: an incomplete head, or requests that wait
        self._is_scheduled = False  # the loop will go on with the rest
        self._is_within_head = False  # some of the next request's head has come
        self._receiving: IncomingRequest | None = None  # the request whose body is still coming
        self._current: IncomingRequest | None = None  # the request in exchange
        self._is_full = False  # the client takes no more for now
        self._is_old = False  # the connection has seen a tick
        self._ignores_input = False  # further bytes are dropped
        self._is_last = False  # no request is served after the present one
        self._is_surplus = False  # the client is above the limit, and may send the engine nothing
        self._is_lingering = False  # the last response is sent, and the client may still read it
        self._quiet = 0  # ticks since the last response, or since a head began
        limits = proxy.limits
        self._unread = UnreadWatch(proxy.client_ticks, limits.held_bytes_per_second * limits.tick_seconds)

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.read_side = ReadSide(self.transport)
        self.write_side = WriteSide(self.transport, self._proxy.write_batch)
        self.forwarding = forwarding(self._proxy.forwarded, self.transport)
        self._ends = (self.transport.get_extra_info("peername"), self.transport.get_extra_info("sockname"))
        self._connections.add(self)
        self._clients.add(self)
        surplus = self._clients.surplus
        self._is_surplus = surplus > 0
        if surplus > SURPLUS_CONNECTIONS:
            self._ignores_input = True
            self._write_error(self._clients.too_many, RequestHead(b""), close=True)
            self.write_side.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._connections.discard(self)
        self._clients.discard(self)
        self._ignores_input = True
        self._rest = b""
        exchange = self._forget_current()
        self._receiving = None
        if exchange is not None:
            exchange.client_left()

    def eof_received(self) -> None:
        """Let the transport close: clients leave by closing their sending side (nginx and uvicorn see it so too)."""

    def pause_writing(self) -> None:
        self._is_full = True
        if self._current is not None and self._current.exchange is not None:
            self._current.exchange.client_full()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._current is not None and self._current.exchange is not None:
            self._current.exchange.client_ready()
        self._go_on_soon()

    def data_received(self, data: bytes) -> None:
        if len(data) >= FULL_READ_BYTES:
            self.read_side.give_way()
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._is_scheduled:
            self._keep(data)
        else:
            self._take_all(data)

    @property
    def peer(self) -> str:
        return peer_of(self.transport)

    @property
    def unread_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def _take_all(self, data: bytes) -> None:
        at = steps = 0
        while at < len(data) and not self._ignores_input:
            if steps == STEPS_PER_TURN:
                self._is_scheduled = True
                asyncio.get_running_loop().call_soon(self._go_on)
                break
            before = at
            if self._receiving is not None:
                at = self._take_body(self._receiving, data, at)
            elif self._current is None and not self._is_full:
                at = self._take_head(data, at)
            if at == before:
                break
            steps += 1
        if at < len(data):
            self._keep(data[at:] if at else data)
        else:
            self.read_side.let_go("queue")

    def _keep(self, rest: bytes) -> None:
        if self._ignores_input:
            return
        self._rest = rest
        # A head that is not complete must be read on, however long it may be.
        if len(rest) > MAX_WAITING_BYTES and not self._may_take_next:
            self.read_side.hold("queue")
        else:
            self.read_side.let_go("queue")

    @property
    def _may_take_next(self) -> bool:
        return self._current is None and not (self._is_full or self._is_scheduled)

    def _go_on_soon(self) -> None:
        # Not from within the engine's callback: many quick responses would become a deep stack.
        if self._rest and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_scheduled = False
        data, self._rest = self._rest, b""
        self._take_all(data)
        if self._is_last and self._may_take_next and not self._ignores_input:
            self.write_side.close()

    def _take_body(self, incoming: IncomingRequest, data: bytes, at: int) -> int:
        """Take a piece of a body; return the place behind it."""
        try:
            piece, at = incoming.take(data, at)
        except Refused as bad:
            self._refuse(bad.failure)
            return len(data)
        if piece and incoming.exchange is not None:
            incoming.exchange.body(piece)
        if incoming.is_complete and not self._ignores_input:
            self._complete(incoming)
        return at

    def _take_head(self, data: bytes, at: int) -> int:
        """Take a head; return the place behind it, or the same where it is not complete."""
        if data[at] == _CR and data.startswith(b"\r\n", at):  # of old clients, behind a body (RFC 9112 2.2)
            self._begin_head()
            return at + 2
        end = data.find(b"\r\n\r\n", at) + 4
        limits = self._proxy.limits
        if end < 4 or end - at > limits.max_header_bytes:  # noqa: PLR2004 - not found
            self._begin_head()
            start = data[at:] if at else data
            if len(start) > limits.max_header_bytes:
                self._refuse(self._proxy.head_too_large)
            elif not start[:1].isalpha() and start not in (b"", b"\r"):
                self._refuse(NOT_HTTP)  # no method: a client that speaks TLS, perhaps, and waits
            elif start.count(b"\n") != start.count(b"\r\n"):
                self._refuse(NOT_HTTP)  # a line feed without its carriage return: the head's end would never come
            return at
        self._is_within_head = False
        head = parse_head(data[at:end])
        if isinstance(head, Failure):
            self._refuse(head)
            return end
        if head.declared_bytes > limits.max_body_bytes:
            self._refuse(self._proxy.body_too_large, head)
            return end
        self._receiving = incoming = IncomingRequest(self._proxy, head)
        self._begin_exchange(incoming)
        if incoming.is_complete:
            self._complete(incoming)
        return end

    def _begin_head(self) -> None:
        """Start the time that a head has, which none of its bytes renews."""
        if not self._is_within_head:
            self._is_within_head = True
            self._quiet = 0

    def _complete(self, incoming: IncomingRequest) -> None:
        self._receiving = None
        if incoming.exchange is not None:
            incoming.exchange.body_ends()

    # --- exchanges ---

    def _begin_exchange(self, incoming: IncomingRequest) -> None:
        self._unread.restart()
        head = incoming.head
        where = self._destination(head)
        if where.refusal is not None:
            # A body is dropped; where the client waits for a 100 first, it could not be told from the next request.
            close = self._is_last or self._is_surplus or head.websocket or not head.keep_alive or head.expects_continue
            self._write_error(where.refusal, head, close=close)
            self._quiet = 0
            if close:
                self._end_after(incoming)
            return
        exchange: EngineExchange | SidecarExchange
        if where.to == "sidecar":
            config, server_state, app_state = self._uvicorn
            exchange = SidecarExchange(
                self._proxy, self, head, config=config, server_state=server_state, app_state=app_state
            )
        else:
            exchange = EngineExchange(self._proxy, self, head, where.path_class)
        self._current, incoming.exchange = incoming, exchange
        if self._is_last:
            exchange.shutdown()
        exchange.start()
        if self._is_surplus:
            exchange.shutdown()

    def _destination(self, head: RequestHead) -> Destination:
        where = self._route(head.method, head.path, head.websocket)
        if self._is_surplus:
            self._is_surplus = self._clients.surplus > 0
            if self._is_surplus and (where.to == "engine" or where.path_class == LIVE_STREAM):
                return Destination("nowhere", refusal=self._clients.too_many)
        if where.to == "engine":
            itself = self._proxy.loop_failure(self._ends)
            if itself is not None:
                return Destination("nowhere", refusal=itself)
        return where

    def response_done(self, *, close: bool) -> None:
        incoming = self._current
        self._forget_current()
        self._quiet = 0
        if incoming is not None and (close or self._is_last or self._is_surplus or incoming.head.websocket):
            self._end_after(incoming)
        else:
            self._go_on_soon()

    def _forget_current(self) -> EngineExchange | SidecarExchange | None:
        incoming, self._current = self._current, None
        if incoming is None:
            return None
        exchange, incoming.exchange = incoming.exchange, None
        return exchange

    def cut(self, *, reset: bool) -> None:
        self._forget_current()
        self._ignores_input = True
        if reset:
            self.write_side.reset()
        else:
            self.write_side.close()

    def shutdown(self) -> None:
        self._is_last = True
        if self._current is not None and self._current.exchange is not None:
            self._current.exchange.shutdown()
        elif self._may_take_next or not self._rest:  # else requests may wait, and one of them is still served
            self.write_side.close()

    # --- refusals and ends ---

    def _refuse(self, failure: Failure, head: RequestHead | None = None) -> None:
        """End the connection with an error: its further bytes cannot, or should not, be understood."""
        self._ignores_input = True
        incoming, self._receiving = self._receiving, None
        if incoming is None:
            self._write_error(failure, head or RequestHead(b""), close=True)
            self._linger()
        elif incoming.exchange is not None:
            incoming.exchange.fail(failure)
        else:  # the request has its response
            self._linger()

    def _write_error(self, failure: Failure, head: RequestHead, *, close: bool) -> None:
        response = head.error(failure, close=close)
        self.write_side.write(response)
        self._proxy.refused(failure, head, self.peer, len(response))

    def _end_after(self, incoming: IncomingRequest) -> None:
        if incoming.is_complete and not self._ignores_input:
            self._ignores_input = True
            self.write_side.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close soon, or when the client does: closing on unread bytes would destroy the response on its way."""
        self._ignores_input = self._is_lingering = True
        self._quiet = 0
        self._rest = b""
        self.read_side.let_go_all()
        self.write_side.finish()

    def tick(self) -> None:
        self._quiet += 1
        if not self._is_old:  # a connection that is over at once is spared these calls
            self._is_old = True
            keep_alive(self.transport)
        if self._is_lingering:
            if self._quiet > self._proxy.linger_ticks:
                self.write_side.abort()
        elif self._current is None:
            unsent = self.transport.get_write_buffer_size()
            if unsent:
                self._quiet = 0  # it is not idle
            if self._unread.is_over(unsent):
                self.write_side.abort()
            if self._quiet > self._patience():
                self.write_side.close()
        elif isinstance(self._current.exchange, SidecarExchange):  # the proxy ticks the exchanges
            self._current.exchange.tick()
        # A client that leaves while it is not read; not in a tunnel, whose last bytes are for the engine.
        is_tunnel = self._receiving is not None and self._receiving.head.websocket
        if self.read_side.is_held and not is_tunnel and has_hung_up(self.transport):
            self.write_side.abort()

    def _patience(self) -> float:
        """Return how many ticks the next request may take to come."""
        if self._is_surplus:  # another client may need its place, for a probe
            return self._proxy.linger_ticks
        # A body may come after its response.
        is_within_request = self._is_within_head or self._receiving is not None
        return self._proxy.client_ticks if is_within_request else self._proxy.client_idle_ticks


def protocol(proxy: Proxy, route: Route, clients: Clients | None = None) -> Callable[..., ClientConnection]:
    """Return uvicorn's ``http=`` for a port; without clients of its own it is the one for requests to the engine."""
    return partial(ClientConnection, proxy, route, proxy.clients if clients is None else clients)
