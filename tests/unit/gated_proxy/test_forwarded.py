"""What the engine is told of where a request came from."""

from __future__ import annotations

import pytest

from gated_proxy.failures import Failure
from gated_proxy.heads import Forwarding, parse_head

SPOOFED = (
    b"x-forwarded-for: 6.6.6.6",
    b"X-Forwarded-Proto: https",
    b"X-FORWARDED-HOST: evil",
    b"Forwarded: for=6.6.6.6;proto=https",
)


def sent(mode, *lines: bytes, peer: bytes | None = b"192.0.2.1", host: bytes = b"sidecar") -> list[bytes]:
    """The lines that the engine gets, less those that it always gets."""
    head = parse_head(b"\r\n".join([b"GET /v1/x HTTP/1.1", b"host: " + host, b"x-tag: 1", *lines, b"", b""]))
    assert not isinstance(head, Failure)
    forwarding = Forwarding(mode, peer, b"http")
    first, tag, *others = head.for_engine(b"host: engine\r\n", forwarding).split(b"\r\n")
    assert (first, tag) == (b"GET /v1/x HTTP/1.1", b"x-tag: 1")
    assert others[-2:] == [b"", b""]
    return [line for line in others[:-2] if not line.startswith((b"host:", b"x-request-id:"))]


OURS = [b"x-forwarded-for: 192.0.2.1", b"x-forwarded-proto: http", b"x-forwarded-host: sidecar"]


@pytest.mark.parametrize("mode", ["append", "replace"])
def test_the_clients_connection_is_told(mode):
    assert sent(mode) == OURS


def test_replaced_is_all_that_the_client_has_said():
    assert sent("replace", *SPOOFED, b"x-forwarded-for: 7.7.7.7") == OURS


def test_appended_is_the_address_that_a_server_may_believe():
    """uvicorn takes the last one of `X-Forwarded-For` that it does not know for a proxy's."""
    assert sent("append", *SPOOFED, b"x-forwarded-for: 7.7.7.7,  8.8.8.8") == [
        b"x-forwarded-for: 6.6.6.6, 7.7.7.7,  8.8.8.8, 192.0.2.1",
        b"x-forwarded-proto: https",
        b"x-forwarded-host: evil",
        b'forwarded: for=6.6.6.6;proto=https, for=192.0.2.1;proto=http;host="sidecar"',
    ]


def test_an_address_of_ipv6_is_quoted_where_it_must_be():
    """RFC 7239 4, and never in X-Forwarded-For."""
    lines = sent("append", b"forwarded: for=a", peer=b"2001:db8::1")
    assert lines[0] == b"x-forwarded-for: 2001:db8::1"
    assert b'for="[2001:db8::1]"' in lines[-1]


def test_what_cannot_be_known_is_not_said():
    lines = sent("append", b"forwarded: for=a", peer=None, host=b'a"b')
    assert lines[-1] == b"forwarded: for=a, for=unknown;proto=http"
    assert not any(line.startswith(b"x-forwarded-for") for line in lines)
    assert not any(line.startswith(b"x-forwarded-for") for line in sent("replace", *SPOOFED, peer=None))
