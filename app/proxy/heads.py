"""Request and answer heads: what they promise, and how they read on the other side. No I/O.

llhttp has parsed every head that comes here, strictly: no bare CR or LF, no folded lines, no space before a colon, not
both a length and chunks. What it lets pass and still can be read in two ways is refused here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from app.proxy.failures import Failure, bad_request

Header = tuple[bytes, bytes]

# RFC 9110 7.6.1 and what old clients still send. Whatever `Connection` names joins them, request by request.
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
# Kept apart while a request's head is read: they are hop by hop, or written anew for the engine. It gets its own host:
# vLLM up to 0.21 derives the path it guards with --api-key from the Host header.
KEPT_APART = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
# What no trailer may bring: framing and routing (RFC 9110 6.5.1).
NEVER_A_TRAILER = KEPT_APART | {b"authorization", b"content-encoding", b"content-type", b"cookie"}
# An answer's framing is kept, and so are its trailers.
_ANSWER_HOP_BY_HOP = HOP_BY_HOP - {b"transfer-encoding", b"trailer"}
# A head in lower case without any of these goes on as it came.
_REWRITTEN = re.compile(rb"\n(?:%b):" % b"|".join(sorted(_ANSWER_HOP_BY_HOP | {b"x-request-id"})))

_SANE_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_DIGITS = re.compile(rb"[0-9]{1,18}")
_BODILESS = frozenset({204, 304})
_MAY_LACK_A_BODY = frozenset({b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT"})
# Cannot reach the model: they pass the gate uncounted, for liveness must not wait for a reset.
READING = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_METHODS = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")}

_PATH_CLASSES = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/realtime": "realtime",
    "/v1/models": "models",
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
    "/health": "health",
    "/ping": "health",
}
_PATH_CLASS_PREFIXES = (
    ("/v1/models/", "models"),
    ("/v1/responses/", "responses"),
    ("/v1/audio/", "audio"),
    ("/v1/", "other_v1"),
    ("/v2/", "other_v2"),
)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes: to the engine, to the sidecar's own application, or nowhere for this reason."""

    to: Literal["engine", "own", "nowhere"]
    path_class: str = "other"
    refusal: Failure | None = None


def path_class(path: str) -> str:
    """Name a decoded path with one of a few words, as a metric's label."""
    known = _PATH_CLASSES.get(path)
    return known or next((name for prefix, name in _PATH_CLASS_PREFIXES if path.startswith(prefix)), "other")


def method_class(method: bytes) -> str:
    """Name a method with one of a few words, as a metric's label."""
    return _METHODS.get(method, "other")


def _request_ids() -> Iterator[bytes]:
    # Asking the kernel for each costs more than the rest of a head. Not a counter: vLLM makes them part of the ids by
    # which stored answers can be read.
    while True:
        block = os.urandom(4096).hex().encode()
        yield from (block[at : at + 32] for at in range(0, len(block), 32))


_fresh = _request_ids()


class RequestHead:
    """A request's head as the client sent it.

    Attributes:
        target: as sent.
        lines: the header lines that travel, as they came; whoever reads the head adds them.
        apart: those of ``KEPT_APART``, with names in lower case; the same.
        declared_bytes: of a counted body; 0 without one.
        chunked: whether the body comes in chunks.
        expects_continue: whether the client waits to be asked for the body.
        keep_alive: whether the client's connection may serve another request.
        websocket: whether it asks to speak WebSocket.
    """

    # Defaults here and not in __init__: most heads change none of them.
    method = b""
    target = b""
    declared_bytes = 0
    chunked = False
    expects_continue = False
    is_http10 = False
    keep_alive = True
    websocket = False
    _request_id: bytes | None = None
    _named: tuple[bytes, ...] = ()

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.apart: list[Header] = []

    def complete(self, method: bytes, version: str, *, keep_alive: bool, upgrade: bool) -> Failure | None:
        """Take what the parser knows at the end of the head.

        Returns:
            Why it cannot be passed on, if it cannot.
        """
        self.method = method
        if version != "1.1":
            if version != "1.0":
                return bad_request("the HTTP version is neither 1.1 nor 1.0")
            self.is_http10 = True
            self.keep_alive = False
        elif not keep_alive:
            self.keep_alive = False
        flaw = self._read_apart()
        if flaw is not None:
            return bad_request(flaw)
        if upgrade:
            protocols = {value.lower() for name, value in self.apart if name == b"upgrade"}
            # Any other protocol is not taken up: the request is served as if it had not asked (RFC 9110 7.8).
            self.websocket = protocols == {b"websocket"} and not self.has_body and not self.is_http10
        return None

    def _read_apart(self) -> str | None:
        hosts = lengths = codings = 0
        for name, value in self.apart:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                lengths += 1
                if not _DIGITS.fullmatch(value):
                    return "Content-Length must be a number"
                self.declared_bytes = int(value)
            elif name == b"connection":
                self._read_connection(value)
            elif name == b"x-request-id":
                self._request_id = value if _SANE_REQUEST_ID.fullmatch(value) else None
            elif name == b"transfer-encoding":
                codings += 1
                self.chunked = value.lower() == b"chunked"
            elif name == b"expect":
                self.expects_continue = value.lower() == b"100-continue" and not self.is_http10
        if lengths + codings > 1:
            return "a request has one Content-Length, or one Transfer-Encoding"
        if codings and (not self.chunked or self.is_http10):
            return "Transfer-Encoding can only be 'chunked', in HTTP/1.1"
        if hosts != 1 and not (hosts == 0 and self.is_http10):
            return "a request has one Host"
        return None

    def _read_connection(self, value: bytes) -> None:
        lowered = value.lower()
        if lowered not in (b"keep-alive", b"close", b"upgrade"):
            self._named += tuple(token.strip() + b":" for token in lowered.split(b","))

    @property
    def has_body(self) -> bool:
        """Whether bytes follow the head, or may."""
        return self.chunked or self.declared_bytes > 0

    @property
    def path(self) -> bytes:
        """The target without its query, as sent."""
        return self.target.partition(b"?")[0]

    def request_id(self) -> bytes:
        """The client's own if it is fit for a log line, else one made for this request."""
        if self._request_id is None:
            self._request_id = next(_fresh)
        return self._request_id

    def for_engine(self, host_line: bytes) -> bytes:
        """The head as the engine gets it."""
        if self.declared_bytes:
            framing = b"content-length: %d\r\n" % self.declared_bytes
        elif self.chunked:
            framing = b"transfer-encoding: chunked\r\n"
        elif self.websocket:
            framing = b"connection: Upgrade\r\nupgrade: websocket\r\n"
        else:
            # RFC 9110 8.6 asks for a length even of an empty body, of methods that have a use for one.
            framing = b"" if self.method in _MAY_LACK_A_BODY else b"content-length: 0\r\n"
        if self.expects_continue:
            framing += b"expect: 100-continue\r\n"  # the engine asks for the body, or refuses it unseen
        lines = self.lines
        if self._named:
            lines = [line for line in lines if not line.lower().startswith(self._named)]
        return b"%b %b HTTP/1.1\r\n%b%b%bx-request-id: %b\r\n\r\n" % (
            self.method,
            self.target,
            host_line,
            b"".join(lines),
            framing,
            self.request_id(),
        )

    def for_ourselves(self) -> bytes:
        """The head as the sidecar's own server gets it: as it came, less a protocol that we do not take up."""
        version = b"1.0" if self.is_http10 else b"1.1"
        apart = b"".join(b"%b: %b\r\n" % header for header in self.apart if header[0] not in (b"upgrade", b"te"))
        return b"%b %b HTTP/%b\r\n%b%b\r\n" % (self.method, self.target, version, apart, b"".join(self.lines))

    def size(self) -> int:
        """Bytes, nearly."""
        apart = sum(len(name) + len(value) + 4 for name, value in self.apart)
        return len(self.target) + sum(map(len, self.lines)) + apart


class AnswerHead:
    """An answer's head as the engine sent it.

    Args:
        raw: all of it, with the empty line at its end.
        status: as parsed.
        to_head: whether it answers a HEAD request.

    Attributes:
        chunked: whether the body comes in chunks.
        has_body: whether bytes may follow.
        until_close: whether only the connection's end ends the body.
    """

    __slots__ = ("_lowered", "_raw", "chunked", "has_body", "status", "until_close")

    def __init__(self, raw: bytes, status: int, *, to_head: bool) -> None:
        self._raw = raw
        self._lowered = lowered = raw.lower()
        self.status = status
        self.has_body = not to_head and status not in _BODILESS
        self.chunked = b"\ntransfer-encoding:" in lowered
        self.until_close = self.has_body and not self.chunked and b"\ncontent-length:" not in lowered

    def for_client(self, request_id: bytes, *, close: bool, unchunked: bool = False) -> bytes:
        """The head as the client gets it, its framing kept.

        Args:
            request_id: added unless the engine has set one of its own.
            close: whether the client's connection ends with this answer.
            unchunked: the body goes on without its framing, for a client of HTTP/1.0.
        """
        if not unchunked and _REWRITTEN.search(self._lowered) is None:
            lines, has_id = self._raw[:-2], False
        else:
            lines, has_id = self._rewritten(unchunked=unchunked)
        return b"%b%b%b\r\n" % (
            lines,
            b"" if has_id else b"x-request-id: %b\r\n" % request_id,
            b"connection: close\r\n" if close else b"",
        )

    def _rewritten(self, *, unchunked: bool) -> tuple[bytes, bool]:
        first, *lines = self._raw[:-4].split(b"\r\n")
        named = [(line.partition(b":")[0].lower(), line) for line in lines]
        less = set(_ANSWER_HOP_BY_HOP)
        for name, line in named:
            if name == b"connection":
                tokens = {token.strip().lower() for token in line.partition(b":")[2].split(b",")}
                less |= tokens - {b"transfer-encoding", b"content-length"}
        if unchunked:
            less |= {b"transfer-encoding", b"trailer"}
        kept = [(name, line) for name, line in named if name not in less]
        lines = [line for _, line in kept]
        return b"\r\n".join([first, *lines, b""]), any(name == b"x-request-id" for name, _ in kept)

    def for_tunnel(self, request_id: bytes) -> bytes:
        """A 101's head as the client gets it: hop by hop, and passed on all the same."""
        if b"\nx-request-id:" in self._lowered:
            return self._raw
        return b"%bx-request-id: %b\r\n\r\n" % (self._raw[:-2], request_id)
