"""One request as it is received: its head, and what of its body has come. No I/O."""

from __future__ import annotations

from highwater.proxy.chunks import Chunks
from highwater.proxy.failures import BadRequest
from highwater.proxy.proxy import Proxy
from highwater.proxy.request_head import Header, RequestHead
from highwater.proxy.roles import Exchange


class IncomingRequest:
    """A request that is being received, or served by ``exchange``; without one, the rest of its body is dropped.

    A WebSocket's bytes end with the connection alone: it is never complete. ``trailers`` are of a complete chunked
    body.
    """

    exchange: Exchange | None = None
    trailers: tuple[Header, ...] = ()
    _chunks: Chunks | None = None
    _body_bytes = 0  # of a chunked body

    def __init__(self, proxy: Proxy, head: RequestHead) -> None:
        self.head = head
        self.is_complete = not (head.chunked or head.declared_bytes or head.websocket)
        self._proxy = proxy
        self._left = head.declared_bytes  # of a counted body
        if head.chunked:
            self._chunks = Chunks(proxy.head_too_large, proxy.limits.max_header_bytes)

    def take(self, data: bytes, at: int) -> tuple[bytes, int]:
        """Take a piece of the body from a place in the data; return it, without chunks, and the place behind it.

        Raises BadRequest where the data is not in chunks, or the body is too large.
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
            raise BadRequest(self._proxy.body_too_large)
        if self._chunks.is_complete:
            self.is_complete, self.trailers = True, self._chunks.trailers
        return body, len(data) - len(rest)
