"""Heads of requests: what they declare, and how each is written for the engine or the sidecar. No I/O.

llhttp has parsed every head strictly: no bare CR or LF, no folded lines, no space before a colon, not both a length and
chunks. What it accepts although it can be read in two ways is refused here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import httptools

from highwater.proxy.failures import BadRequest, Failure, bad_request
from highwater.proxy.forwarded import Forwarding

NOT_HTTP = bad_request("this is not an HTTP/1.1 request")

Header = tuple[bytes, bytes]

# RFC 9110 7.6.1 and what old clients still send. Whatever `Connection` names joins them, request by request.
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
# Taken out of a request's head: they are hop by hop, or written anew for the engine. It gets its own host: vLLM up to
# 0.21 derives the path it guards with --api-key from the Host header.
TAKEN_OUT = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
_TAKEN_OUT = re.compile(rb"\r\n(%b):[ \t]*([^\r]*)" % b"|".join(sorted(TAKEN_OUT)), re.IGNORECASE)
# No trailer may have these: framing and routing (RFC 9110 6.5.1).
NEVER_A_TRAILER = TAKEN_OUT | {
    *(b"authorization", b"api-key", b"x-api-key", b"x-auth-token"),
    *(b"content-encoding", b"content-type", b"cookie"),
}
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r]*", re.IGNORECASE)
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


class _NoCallbacks:
    pass


_NO_CALLBACKS = _NoCallbacks()  # of a parser that only checks the form


class RequestHead:
    """A request's head as the client sent it, with the empty line at its end; `parse_head` makes one.

    ``declared_bytes`` is the length of a counted body; with ``expects_continue`` the client sends it only after a 100;
    with ``keep_alive`` the client's connection may serve another request.
    """

    # Defaults here and not in __init__: most heads change none of them.
    declared_bytes = 0
    chunked = False
    expects_continue = False
    is_http10 = False
    keep_alive = True
    websocket = False
    host = b""
    _upgrade: bytes | None = None
    _request_id: bytes | None = None
    _tokens: set[bytes] | None = None  # of its Connection lines

    def __init__(self, raw: bytes, method: bytes = b"", target: bytes = b"", *, is_http10: bool = False) -> None:
        self.raw = raw
        self.method = method
        self.target = target
        # The lines that travel, each with the line end before it; between them name and value of those that do not.
        self._parts = _TAKEN_OUT.split(raw)
        if is_http10:
            self.is_http10, self.keep_alive = True, False

    def read_taken_out(self) -> None:
        """Read the lines that do not travel. Raises BadRequest: they contradict each other, or cannot be passed on."""
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
                    raise BadRequest(bad_request("Content-Length must be a number"))
                self.declared_bytes = int(value)
            elif name == b"transfer-encoding":
                framings += 1
                self.chunked = True
                if value.lower() != b"chunked" or self.is_http10:
                    raise BadRequest(bad_request("Transfer-Encoding can only be 'chunked', in HTTP/1.1"))
            else:
                self._read_rare_line(name, value)
        if framings > 1:
            raise BadRequest(bad_request("a request has one Content-Length, or one Transfer-Encoding"))
        if hosts != 1 and (hosts or not self.is_http10):
            raise BadRequest(bad_request("a request has one Host"))
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
            first, *rest = lines.split(b"\r\n")
            named = self._tokens
            kept = (line for line in rest if line.partition(b":")[0].lower() not in named)
            lines = b"\r\n".join([first, *kept])
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
    except BadRequest as bad:
        return bad.failure
    if absolute is not None and absolute[1].lower() != head.host.lower():
        return bad_request("the target's authority must be the Host")
    return head


def has_bare_line_feed(start: bytes) -> bool:
    """Return whether a head's start has a line feed without its carriage return: its end would never come."""
    return start.count(b"\n") != start.count(b"\r\n")
