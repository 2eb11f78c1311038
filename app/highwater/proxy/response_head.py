"""Heads of the engine's responses: what they declare, and how each is written for the client. No I/O.

llhttp has parsed every head strictly.
"""

from __future__ import annotations

import re

from highwater.proxy.request_head import HOP_BY_HOP

# A response's framing is kept, and so are its trailers.
_RESPONSE_HOP_BY_HOP = HOP_BY_HOP - {b"transfer-encoding", b"trailer"}
# Headers whose values are URLs. Not Refresh, which is not standardised and which vLLM never sends.
_LOCATIONS = frozenset({b"location", b"content-location"})
# A head in lower case without any of these goes on unchanged.
_REWRITTEN = re.compile(rb"\n(?:%b):" % b"|".join(sorted(_RESPONSE_HOP_BY_HOP | _LOCATIONS | {b"x-request-id"})))
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*([^\r]*)")
_BODILESS = frozenset({204, 304})


def repeats_length(head: bytes) -> bool:
    """Return whether a response's head, or its beginning, names its length more than once, which llhttp refuses."""
    lengths = _LENGTH.findall(head.lower())
    return len(lengths) > 1 or b"," in b"".join(lengths)


def with_one_length(head: bytes) -> bytes | None:
    """Return a response's head with one length for equal ones; None where they are not equal (RFC 9112 6.3)."""
    lengths = {each.strip(b" \t") for line in _LENGTH.findall(head.lower()) for each in line.split(b",")}
    if len(lengths) != 1:
        return None
    first, *lines = head.split(b"\r\n")
    kept = (line for line in lines if not line.lower().startswith(b"content-length:"))
    return b"\r\n".join([first, b"content-length: " + lengths.pop(), *kept])


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
