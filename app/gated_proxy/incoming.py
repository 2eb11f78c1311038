"""One request as it is received: its head, and what of its body has come. No I/O.

llhttp does not report where in its input a chunked body (RFC 9112 7.1) ended, and what follows may be another request;
so the lines of chunk sizes are read here, to the letter. A request's trailers end here: no server of vLLM's hands them
to a handler (uvicorn drops them).
"""

from __future__ import annotations

import re

from gated_proxy.exchange import EngineExchange
from gated_proxy.failures import Failure, Refused
from gated_proxy.heads import NOT_HTTP, RequestHead
from gated_proxy.proxy import Proxy
from gated_proxy.sidecar import SidecarExchange

# Extensions are between the client and us (RFC 9112 7.1.1), and are dropped.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t -~\x80-\xff]*)?")
# Lines that one call takes at most; a body may have a line for every three bytes.
LINES_AT_ONCE = 128


class Chunks:
    """One body. A line, or the trailers together, of more than `max_line_bytes` are too large."""

    def __init__(self, too_large: Failure, max_line_bytes: int) -> None:
        self._too_large = too_large
        self._max_line_bytes = max_line_bytes
        self._start = b""  # of a line that is not complete
        self._left = 0  # of a chunk's data
        self._is_behind_data = False  # where its line end must come
        self._is_behind_chunks = False
        self._trailer_bytes = 0
        self.is_complete = False

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take as many chunks out of the data as may be taken at once; return their body, and the rest of the data.

        The rest is for the next call, or, where the body is complete, another request's. Raises Refused: no chunks.
        """
        if self._start:
            data, self._start = self._start + data, b""
        pieces: list[bytes] = []
        at = lines = 0
        while not self.is_complete and lines < LINES_AT_ONCE:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._is_behind_data = True
            end = data.find(b"\r\n", at)
            if (len(data) if end < 0 else end) - at > self._max_line_bytes:
                raise Refused(self._too_large)
            if end < 0:
                self._start = data[at:]
                at = len(data)
                break
            self._take_line(data[at:end])
            at = end + 2
            lines += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), data[at:]

    def _take_line(self, line: bytes) -> None:
        if self._is_behind_chunks:
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > self._max_line_bytes:
                raise Refused(self._too_large)
            self.is_complete = not line
        elif self._is_behind_data:
            if line:
                raise Refused(NOT_HTTP)
            self._is_behind_data = False
        else:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise Refused(NOT_HTTP)
            self._left = int(size[1], 16)
            self._is_behind_chunks = not self._left


class IncomingRequest:
    """A request that is being received, or served by ``exchange``; without one, the rest of its body is dropped.

    A WebSocket's bytes end with the connection alone: it is never complete.
    """

    def __init__(self, proxy: Proxy, head: RequestHead) -> None:
        self.head = head
        self.exchange: EngineExchange | SidecarExchange | None = None
        self.is_complete = not (head.chunked or head.declared_bytes or head.websocket)
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
