"""Heads of requests and of the engine's responses: what they declare, how each is written for the far side; and chunks.

llhttp has parsed every head strictly: no bare CR or LF, no folded lines, no space before a colon, not both a length and
chunks. What it accepts of a request although it can be read in two ways is refused here. No I/O.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from typing import Literal

import httptools

from gated_proxy.failures import Failure, Refused, bad_request, error_response

NOT_HTTP = bad_request("this is not an HTTP/1.1 request")

# RFC 9110 7.6.1 and what old clients still send. Whatever `Connection` names joins them, request by request.
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
# Taken out of a request's head: they are hop by hop, or written anew for the engine. It gets its own host: vLLM up to
# 0.21 derives the path it guards with --api-key from the Host header.
TAKEN_OUT = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
_TAKEN_OUT = re.compile(rb"\r\n(%b):[ \t]*([^\r]*)" % b"|".join(sorted(TAKEN_OUT)), re.IGNORECASE)
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r]*", re.IGNORECASE)
# The headers in which clients send a key: vLLM reads the first.
KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
# A target's absolute form; one with a user's name in it does not match.
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)([^#]*)", re.IGNORECASE)
_HTTP10 = b"HTTP/1.0"
_VERSIONS = (b"HTTP/1.1", _HTTP10)
# Of a Connection header: those that name no other header.
_PLAIN_TOKENS = frozenset({b"keep-alive", b"close", b"upgrade", b""})
_SANE_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_DIGITS = re.compile(rb"[0-9]{1,18}")
_MAY_LACK_A_BODY = frozenset({b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT"})


def _request_ids() -> Iterator[bytes]:
    # A call to the kernel for each costs more than the rest of a head. Not a counter: vLLM makes them part of the ids
    # by which stored responses can be read.
    while True:
        block = os.urandom(4096).hex().encode()
        yield from (block[at : at + 32] for at in range(0, len(block), 32))


_fresh = _request_ids()

_NO_CALLBACKS = object()  # of a parser that only checks the form


class RequestHead:
    """A request's head as the client sent it, with the empty line at its end; `parse_head` makes one.

    ``declared_bytes`` is the length of a counted body; with ``expects_continue`` the client sends it only after a 100;
    with ``keep_alive`` the client's connection may serve another request.
    """

    def __init__(self, raw: bytes, method: bytes = b"", target: bytes = b"", *, is_http10: bool = False) -> None:
        self.raw = raw
        self.method = method
        self.target = target
        # The lines that travel, each with the line end before it; between them name and value of those that do not.
        self._parts = _TAKEN_OUT.split(raw)
        self.is_http10 = is_http10
        self.keep_alive = not is_http10
        self.declared_bytes = 0
        self.chunked = False
        self.expects_continue = False
        self.websocket = False
        self.host = b""
        self._upgrade: bytes | None = None
        self._request_id: bytes | None = None
        self._tokens: set[bytes] | None = None  # of its Connection lines

    def read_taken_out(self) -> None:
        """Read the lines that do not travel. Raises Refused: they contradict each other, or cannot be passed on."""
        hosts = framings = 0
        parts = self._parts
        for at in range(1, len(parts), 3):
            name, value = parts[at].lower(), parts[at + 1].rstrip(b" \t")
            if name == b"host":
                hosts += 1
                self.host = value
            elif name == b"content-length":
                framings += 1
                if not _DIGITS.fullmatch(value):
                    raise Refused(bad_request("Content-Length must be a number"))
                self.declared_bytes = int(value)
            elif name == b"transfer-encoding":
                framings += 1
                self.chunked = True
                if value.lower() != b"chunked" or self.is_http10:
                    raise Refused(bad_request("Transfer-Encoding can only be 'chunked', in HTTP/1.1"))
            else:
                self._read_rare_line(name, value)
        if framings > 1:
            raise Refused(bad_request("a request has one Content-Length, or one Transfer-Encoding"))
        if hosts != 1 and (hosts or not self.is_http10):
            raise Refused(bad_request("a request has one Host"))
        if self._upgrade == b"websocket" and self._tokens and b"upgrade" in self._tokens:
            # Any other protocol is not taken up: the request is served without it (RFC 9110 7.8).
            # With another method it would be that method that the engine acts on.
            self.websocket = self.method == b"GET" and not (self.has_body or self.is_http10)

    def _read_rare_line(self, name: bytes, value: bytes) -> None:
        if name == b"x-request-id":
            self._request_id = value if _SANE_REQUEST_ID.fullmatch(value) else None
        elif name == b"connection":
            tokens = {token.strip() for token in value.lower().split(b",")}
            # In place: a head may have thousands of these lines; a copy of all tokens for each would hold up the loop.
            if self._tokens is None:
                self._tokens = tokens
            else:
                self._tokens.update(tokens)
            if b"close" in tokens:
                self.keep_alive = False
        elif name == b"expect":
            self.expects_continue = value.lower() == b"100-continue" and not self.is_http10
        elif name == b"upgrade":
            self._upgrade = value.lower()

    @property
    def has_body(self) -> bool:
        return self.chunked or self.declared_bytes > 0

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def request_id(self) -> bytes:
        if self._request_id is None:
            self._request_id = next(_fresh)
        return self._request_id

    def error(self, failure: Failure, *, close: bool) -> bytes:
        return error_response(failure, self.request_id(), close=close, without_body=self.method == b"HEAD")

    def for_engine(self, host_line: bytes, forwarding: Forwarding | None = None) -> bytes:
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
        lines = b"".join(self._parts[0::3])
        if self.is_http10:
            lines = lines.replace(b" HTTP/1.0\r\n", b" HTTP/1.1\r\n", 1)
        if self._tokens and self._tokens - _PLAIN_TOKENS:
            first, *rest = lines[:-4].split(b"\r\n")
            named = self._tokens
            kept = (line for line in rest if line.partition(b":")[0].lower() not in named)
            lines = b"\r\n".join([first, *kept, b"", b""])
        if forwarding is not None:
            lines = forwarding.rewrite(lines, self.host)
        return b"%b%b%bx-request-id: %b\r\n\r\n" % (lines[:-2], host_line, framing, self.request_id())

    def for_sidecar(self) -> bytes:
        """Return the head for the sidecar's own server: as it came, without a request for another protocol."""
        return self.raw if self._upgrade is None else _UPGRADE.sub(b"", self.raw)


def parse_head(raw: bytes) -> RequestHead | Failure:
    """Parse a whole head, from its first byte to its empty line; return the failure where it cannot be passed on.

    llhttp only checks the form: what it accepts has one line for each header, so that reading the lines finds the
    headers that llhttp found.
    """
    try:
        httptools.HttpRequestParser(_NO_CALLBACKS).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # the head is complete, and asks for another protocol
    except httptools.HttpParserError:
        return NOT_HTTP
    first = raw[: raw.index(b"\r")].split(b" ")
    # llhttp overlooks line ends before the method.
    if len(first) != 3 or first[2] not in _VERSIONS or not first[0][:1].isalpha():  # noqa: PLR2004 - method, target, version
        return NOT_HTTP
    method, target, version = first
    absolute = None if target.startswith(b"/") else _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        # A form for forward proxies, which every server must accept (RFC 9112 3.2.2).
        target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
        raw = b"%b %b %b%b" % (method, target, version, raw[raw.index(b"\r") :])
    head = RequestHead(raw, method, target, is_http10=version == _HTTP10)
    try:
        head.read_taken_out()
    except Refused as bad:
        return bad.failure
    if absolute is not None and absolute[1].lower() != head.host.lower():
        return bad_request("the target's authority must be the Host")
    return head


# llhttp does not report where in its input a chunked body (RFC 9112 7.1) ended, and what follows may be another
# request: so the lines of chunk sizes are read here, to the letter. Extensions are between the client and us (7.1.1),
# and are dropped. So are trailers: no server of vLLM's hands them to a handler (uvicorn drops them).
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t -~\x80-\xff]*)?")
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
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise Refused(NOT_HTTP)
            self._left = int(size[1], 16)
            self._is_behind_chunks = not self._left


Mode = Literal["pass", "replace", "append"]

_FORWARDED = re.compile(rb"\r\n(x-forwarded-(?:for|proto|host)|forwarded):[ \t]*([^\r]*)", re.IGNORECASE)
# What goes into quotes without a second look (RFC 7239 4).
_PLAIN_HOST = re.compile(rb"[A-Za-z0-9.:\[\]_-]+")


class Forwarding:
    """The headers for one client's connection: `replace` writes them in place of its own, `append` behind them."""

    def __init__(self, mode: Mode, peer: bytes | None, scheme: bytes) -> None:
        self._appends = mode == "append"
        self._peer = peer
        self._scheme = scheme
        self._for_line = b"" if peer is None else b"x-forwarded-for: %b\r\n" % peer
        self._proto_line = b"x-forwarded-proto: %b\r\n" % scheme

    def rewrite(self, lines: bytes, host: bytes) -> bytes:
        """Return a request's head with the headers; `host` is the client's `Host`, or empty."""
        host_line = host and b"x-forwarded-host: %b\r\n" % host
        if _FORWARDED.search(lines) is None:
            return b"%b%b%b%b\r\n" % (lines[:-2], self._for_line, self._proto_line, host_line)
        parts = _FORWARDED.split(lines)
        sent: dict[bytes, list[bytes]] = {}
        if self._appends:
            for at in range(1, len(parts), 3):
                sent.setdefault(parts[at].lower(), []).append(parts[at + 1].rstrip(b" \t"))
        written = [b"".join(parts[0::3])[:-2]]
        chain = sent.get(b"x-forwarded-for", [])
        if self._peer is not None:
            chain = [*chain, self._peer]
        if chain:
            written.append(b"x-forwarded-for: %b\r\n" % b", ".join(chain))
        # The next server takes the last of these two.
        for name, line in ((b"x-forwarded-proto", self._proto_line), (b"x-forwarded-host", host_line)):
            written += [b"%b: %b\r\n" % (name, value) for value in sent.get(name, [])] or [line]
        if b"forwarded" in sent:
            written.append(b"forwarded: %b\r\n" % b", ".join([*sent[b"forwarded"], self._element(host)]))
        return b"".join([*written, b"\r\n"])

    def _element(self, host: bytes) -> bytes:
        peer = b"unknown" if self._peer is None else self._peer
        element = b'for="[%b]"' % peer if b":" in peer else b"for=%b" % peer
        element += b";proto=%b" % self._scheme
        return element + b';host="%b"' % host if _PLAIN_HOST.fullmatch(host) else element


def forwarding(mode: Mode, transport: asyncio.BaseTransport) -> Forwarding | None:
    if mode == "pass":
        return None
    address = transport.get_extra_info("peername")
    peer = str(address[0]).encode() if isinstance(address, tuple) else None
    return Forwarding(mode, peer, b"http" if transport.get_extra_info("sslcontext") is None else b"https")


# A response's framing is kept, and so are its trailers.
_RESPONSE_HOP_BY_HOP = HOP_BY_HOP - {b"transfer-encoding", b"trailer"}
# Headers whose values are URLs. Not Refresh, which is not standardised and which vLLM never sends.
_LOCATIONS = frozenset({b"location", b"content-location"})
# A head in lower case without any of these goes on unchanged.
_REWRITTEN = re.compile(rb"\n(?:%b):" % b"|".join(sorted(_RESPONSE_HOP_BY_HOP | _LOCATIONS | {b"x-request-id"})))
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*([^\r]*)")
_BODILESS = frozenset({204, 304})


class EngineOrigin:
    """The engine's name for itself in `Location`: the `Host` of the request to it, which clients cannot reach.

    A proxy that takes the root path off on a client's way here does not put it back into a response; with it the
    client's next request comes here either way.
    """

    def __init__(self, authority: str, root_path: str = "") -> None:
        named = re.escape(authority.encode())
        # vLLM takes the scheme from the client (X-Forwarded-Proto), so it may be either; likewise its port.
        ports = rb"(?::80|:443)?" if re.search(r":[0-9]+$", authority) is None else b""
        # A path that would name another host by itself ("//", or "/\\" to browsers) stays as it came.
        self._own = re.compile(rb"https?://%b%b(/(?![/\\])[^\r]*|[?#][^\r]*)?" % (named, ports), re.IGNORECASE)
        self._root_path = root_path.encode()

    def relative(self, location: bytes) -> bytes:
        """Return a reference that leads where the engine meant it to, whatever host the client used."""
        own = self._own.fullmatch(location)
        if own is None:
            return location
        path: bytes = own[1] or b"/"
        if not path.startswith(b"/"):
            path = b"/" + path
        has_prefix = path.startswith((self._root_path + b"/", self._root_path + b"?")) or path == self._root_path
        return path if has_prefix else self._root_path + path


class ResponseHead:
    """A response's head as the engine sent it, with the empty line at its end.

    URLs of the engine's origin go to the client as relative references. With ``until_close`` only the connection's end
    ends the body.
    """

    __slots__ = ("_lowered", "_origin", "chunked", "has_body", "raw", "status", "until_close")

    def __init__(self, raw: bytes, status: int, *, to_head: bool, origin: EngineOrigin | None = None) -> None:
        self.raw = raw
        self._origin = origin
        self._lowered = lowered = raw.lower()
        self.status = status
        self.has_body = not to_head and status not in _BODILESS
        self.chunked = b"\ntransfer-encoding:" in lowered
        self.until_close = self.has_body and not self.chunked and b"\ncontent-length:" not in lowered

    def surplus_bytes(self, body_bytes: int) -> int:
        """Return by how much the body is longer than declared; 0 for a chunked one, whose end the parser knows."""
        if not self.has_body:
            return body_bytes
        length = None if self.chunked else _LENGTH.search(self._lowered)
        return 0 if length is None else body_bytes - int(length[1])

    def has_line_ends_behind(self, data: bytes) -> bool:
        """Return whether line ends follow a chunked body, which the parser skips silently and a client does not expect.

        ``data`` is the last read, in which the parser has seen the end.
        """
        return self.chunked and not b"\r\n\r\n".endswith(data[len(data.rstrip(b"\r\n")) :])

    def for_client(self, request_id: bytes, *, close: bool, unchunked: bool = False) -> bytes:
        """Return the head for the client, with the request's id where it has none; `unchunked` for HTTP/1.0."""
        if not unchunked and _REWRITTEN.search(self._lowered) is None:
            lines, has_id = self.raw[:-2], False
        else:
            lines, has_id = self._rewritten(unchunked=unchunked)
        return b"%b%b%b\r\n" % (
            lines,
            b"" if has_id else b"x-request-id: %b\r\n" % request_id,
            b"connection: close\r\n" if close else b"",
        )

    def _rewritten(self, *, unchunked: bool) -> tuple[bytes, bool]:
        first, *lines = self.raw[:-4].split(b"\r\n")
        named = [(line.partition(b":")[0].lower(), line) for line in lines]
        less = set(_RESPONSE_HOP_BY_HOP)
        for name, line in named:
            if name == b"connection":
                tokens = {token.strip().lower() for token in line.partition(b":")[2].split(b",")}
                less |= tokens - {b"transfer-encoding", b"content-length"}
        if unchunked:
            less |= {b"transfer-encoding", b"trailer"}
        kept = [(name, line) for name, line in named if name not in less]
        lines = [self._located(line) if name in _LOCATIONS else line for name, line in kept]
        return b"\r\n".join([first, *lines, b""]), any(name == b"x-request-id" for name, _ in kept)

    def _located(self, line: bytes) -> bytes:
        name, _, value = line.partition(b":")
        if self._origin is None:
            return line
        location = value.strip(b" \t")
        relative = self._origin.relative(location)
        return line if relative == location else b"%b: %b" % (name, relative)

    def for_tunnel(self, request_id: bytes) -> bytes:
        """Return a 101's head for the client: its headers are hop by hop, and passed on all the same."""
        if b"\nx-request-id:" in self._lowered:
            return self.raw
        return b"%bx-request-id: %b\r\n\r\n" % (self.raw[:-2], request_id)
