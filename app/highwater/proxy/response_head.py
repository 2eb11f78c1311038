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
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*([0-9]+)")
_BODILESS = frozenset({204, 304})


class EngineOrigin:
    """The engine's name for itself in `Location`: the `Host` of the request to it, which clients cannot reach.

    Args:
        authority: The engine's host, and its port if it has one.
        root_path: The prefix below which the engine serves all paths as well. A proxy that takes it off on a client's
            way here does not put it back into a response; with it the client's next request comes here either way.
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

    def has_surplus(self, data: bytes, body_bytes: int) -> bool:
        """Return whether line ends follow the body, which the parser skips silently and a client would not expect.

        Args:
            data: The last read, in which the parser has seen the end.
            body_bytes: The length of everything after the head.
        """
        if not data.endswith((b"\r", b"\n")):
            return False
        if self.chunked:
            return not b"\r\n\r\n".endswith(data[len(data.rstrip(b"\r\n")) :])
        length = _LENGTH.search(self._lowered)
        return length is not None and body_bytes > int(length[1])

    def for_client(self, request_id: bytes, *, close: bool, unchunked: bool = False) -> bytes:
        """Return the head for the client; `unchunked`, for HTTP/1.0, without the body's framing.

        The request's id is added unless the engine has set one of its own.
        """
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
