"""`X-Forwarded-*` and `Forwarded`: headers that name a request's origin. No I/O.

vLLM's server, uvicorn, trusts these headers when they come from loopback, which is where the sidecar runs: it takes the
client's address for its log, and the scheme for its redirects, from them.
"""

from __future__ import annotations

import asyncio
import re
from typing import Literal

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
