"""Request and answer heads: what is refused, what travels, and what is written anew."""

from __future__ import annotations

import contextlib
import itertools
import re

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gated_proxy.failures import Failure, Refused, head_too_large
from gated_proxy.heads import (
    TAKEN_OUT,
    Chunks,
    EngineOrigin,
    RequestHead,
    ResponseHead,
    parse_head,
)

HOST = b"host: engine\r\n"
CAP = 300
TOO_LARGE = head_too_large(CAP)


def request(*lines: bytes, first: bytes = b"POST /v1/x HTTP/1.1") -> bytes:
    return b"\r\n".join([first, *lines, b"", b""])


def read(*lines: bytes, first: bytes = b"POST /v1/x HTTP/1.1") -> RequestHead:
    head = parse_head(request(*lines, first=first))
    assert isinstance(head, RequestHead), head
    return head


def test_what_the_client_sent_travels_as_it_came():
    lines = (b"X-Tag: one", b"accept: */*", b"Host: h", b"X-tag:two", b"Authorization: Bearer a:b", b"X-Empty:")
    sent = read(*lines).for_engine(HOST)
    assert sent.startswith(
        b"POST /v1/x HTTP/1.1\r\nX-Tag: one\r\naccept: */*\r\nX-tag:two\r\nAuthorization: Bearer a:b\r\n"
    )
    assert re.fullmatch(
        rb".*X-Empty:\r\nhost: engine\r\ncontent-length: 0\r\nx-request-id: [0-9a-f]{32}\r\n\r\n", sent, re.DOTALL
    )


@pytest.mark.parametrize(
    "lines",
    [
        (b"Host: a", b"Content-Length: 3", b"Transfer-Encoding: chunked"),
        (b"Host: a", b"Transfer-Encoding: chunked", b"Content-Length: 3"),
        (b"Host: a", b"Content-Length: 3", b"Content-Length: 3"),
        (b"Host: a", b"Content-Length: 3", b"Content-Length: 4"),
        (b"Host: a", b"Content-Length: 3, 3"),
        (b"Host: a", b"Content-Length: +3"),
        (b"Host: a", b"Content-Length: -3"),
        (b"Host: a", b"Content-Length: 0x3"),
        (b"Host: a", b"Content-Length: 3 3"),
        (b"Host: a", b"Content-Length:"),
        (b"Host: a", b"Content-Length: 99999999999999999999"),
        (b"Host: a", b"Content-Length : 3"),
        (b"Host: a", b"Transfer-Encoding: xchunked"),
        (b"Host: a", b"Transfer-Encoding: chunked, identity"),
        (b"Host: a", b"Transfer-Encoding: gzip, chunked"),
        (b"Host: a", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        (b"Host: a", b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked"),
        (b"Host: a", b"Transfer-Encoding : chunked"),
        (b"Host: a", b"Transfer-Encoding:\x0bchunked"),
        (b"Host: a", b"X: 1\r\n folded: 2"),
        (b"Host: a", b"X: 1\r\n\tContent-Length: 2"),
        (b"Host: a", b"X: 1\nContent-Length: 2"),
        (b"Host: a", b"X: 1\rContent-Length: 2"),
        (b"Host: a", b"X: a\x00b"),
        (b"Host: a", b"X\x00: b"),
        (b"Host: a", b": no name"),
        (b"Host: a", b"no colon"),
        (b"Host: a", b" Leading: space"),
        (b"Host: a", b"Host: b"),
        (b"X: no host",),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(lines):
    failure = parse_head(request(*lines))
    assert isinstance(failure, Failure)
    assert failure.status == 400


@pytest.mark.parametrize(
    "first",
    [
        b"POST /x HTTP/2.0",
        b"POST /x HTTP/1.2",
        b"POST /x HTTP/0.9",
        b"POST  /x HTTP/1.1",
        b"POST /x  HTTP/1.1",
        b"POST /x y HTTP/1.1",
        b"POST /x",
        b"post /x HTTP/1.1",
        b"POST /\xc3\xa9 HTTP/1.1",
        b"POST /x\x00 HTTP/1.1",
        b"\x16\x03\x01\x02",
        b"PRI * HTTP/2.0",
    ],
)
def test_a_first_line_that_is_none_is_refused(first):
    assert isinstance(parse_head(request(b"host: a", first=first)), Failure)


def test_chunks_are_not_for_http_10():
    """Nobody sends them; some who read them differ in what they make of it."""
    first = b"POST /x HTTP/1.0"
    assert isinstance(parse_head(request(b"host: a", b"transfer-encoding: chunked", first=first)), Failure)
    assert read(first=first).is_http10  # which needs no Host


def test_framing_is_written_anew():
    assert b"\r\ncontent-length: 7\r\n" in read(b"host: a", b"CONTENT-length:   007  ").for_engine(HOST)
    chunked = read(b"host: a", b"Transfer-Encoding:  ChunKED ")
    assert chunked.chunked
    assert b"\r\ntransfer-encoding: chunked\r\n" in chunked.for_engine(HOST)


@pytest.mark.parametrize(("method", "length"), [(b"POST", True), (b"PUT", True), (b"GET", False), (b"DELETE", False)])
def test_a_length_is_added_where_a_body_would_have_a_use(method, length):
    """RFC 9110 8.6."""
    sent = read(b"host: a", first=method + b" /x HTTP/1.1").for_engine(HOST)
    assert (b"content-length: 0" in sent) is length


def test_headers_that_connection_names_end_here():
    lines = (b"Connection: Close, X-Private", b"x-private: 1", b"X-PRIVATE: 2", b"connection: x-other", b"X-Other: 3")
    head = read(b"host: a", *lines, b"x-private-not: 4")
    sent = head.for_engine(HOST).lower()
    assert b"x-private:" not in sent
    assert b"x-other" not in sent
    assert b"x-private-not: 4" in sent
    assert not head.keep_alive


@pytest.mark.parametrize("given_id", [b"req-42", b"!~"])
def test_a_sane_request_id_is_kept(given_id):
    head = read(b"host: a", b"X-Request-ID: " + given_id)
    assert head.request_id() == given_id == head.request_id()
    assert head.for_engine(HOST).lower().count(b"x-request-id") == 1


@pytest.mark.parametrize("given_id", [b"", b"two words", b"x" * 129, b"caf\xc3\xa9"])
def test_another_is_made_in_place_of_an_odd_one(given_id):
    """32 hexadecimal digits, not a counter: vLLM makes ids of stored answers from it."""
    ids = {read(b"host: a", b"x-request-id: " + given_id).request_id() for _ in range(300)}
    assert len(ids) == 300
    assert all(re.fullmatch(rb"[0-9a-f]{32}", one) for one in ids)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((b"Connection: Upgrade", b"Upgrade: WebSocket"), True),
        ((b"Connection: keep-alive, upgrade", b"Upgrade: websocket"), True),
        ((b"Upgrade: websocket",), False),
        ((b"Connection: Upgrade", b"Upgrade: h2c"), False),
        ((b"Connection: Upgrade", b"Upgrade: websocket", b"Content-Length: 5"), False),
    ],
)
def test_only_a_websocket_is_an_upgrade(lines, expected):
    head = read(b"host: a", *lines, first=b"GET /v1/realtime HTTP/1.1")
    assert head.websocket is expected
    assert (b"upgrade: websocket" in head.for_engine(HOST)) is expected


@pytest.mark.parametrize("method", [b"POST", b"DELETE", b"HEAD", b"PUT", b"OPTIONS"])
def test_only_a_get_asks_for_a_websocket(method):
    """The engine would act on the method, and the list judges what the engine acts on."""
    head = read(b"host: a", b"Connection: Upgrade", b"Upgrade: websocket", first=method + b" /v1/a/b/sleep HTTP/1.1")
    assert not head.websocket
    assert b"upgrade" not in head.for_engine(HOST)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://a/v1/x?y=http://b/", b"/v1/x?y=http://b/"),
        (b"HTTPS://A/v1/x", b"/v1/x"),
        (b"http://a", b"/"),
        (b"http://a?y", b"/?y"),
    ],
)
def test_a_target_in_absolute_form_is_one_for_its_path(target, expected):
    """RFC 9112 3.2.2: a server accepts it; the engine and our own server get the rest."""
    head = read(b"host: a", b"X-Tag: 1", first=b"GET " + target + b" HTTP/1.1")
    assert head.target == expected
    for sent in (head.for_engine(HOST), head.for_sidecar()):
        assert sent.startswith(b"GET " + expected + b" HTTP/1.1\r\n")
        assert b"X-Tag: 1" in sent


@pytest.mark.parametrize("target", [b"http://b/v1/x", b"http://a:80/v1/x", b"http://u@a/v1/x", b"http:///v1/x"])
def test_a_target_that_names_another_host_is_refused(target):
    """It can be read in two ways: by its own host, and by the header."""
    failure = parse_head(request(b"host: a", first=b"GET " + target + b" HTTP/1.1"))
    is_refused = isinstance(failure, Failure) and failure.status == 400
    # What has no authority stays a target that no list admits.
    assert is_refused or not failure.path.startswith(b"/")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (b"http://engine:8000/v1/x?y=1#z", b"/v1/x?y=1#z"),
        (b"HTTPS://Engine:8000/v1/x", b"/v1/x"),
        (b"http://engine:8000", b"/"),
        (b"http://engine:8000?y", b"/?y"),
        (b"/v1/x", None),
        (b"v1/x", None),
        (b"http://engine/v1/x", None),
        (b"http://engine:80001/v1/x", None),
        (b"http://engine:8000.evil/v1/x", None),
        (b"http://engine:8000@evil/v1/x", None),
        (b"http://elsewhere/v1/x", None),
        (b"http://engine:8000//evil/v1/x", None),
        (b"http://engine:8000/\\evil/v1/x", None),
        (b"ftp://engine:8000/v1/x", None),
    ],
)
def test_only_the_engines_own_address_becomes_relative(location, expected):
    assert EngineOrigin("engine:8000").relative(location) == (location if expected is None else expected)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (b"http://localhost/v1/x", b"/llm/v1/x"),
        (b"http://localhost:80/v1/x", b"/llm/v1/x"),
        (b"http://localhost/llm/v1/x", b"/llm/v1/x"),
        (b"http://localhost/llmx", b"/llm/llmx"),
        (b"http://localhost/llm", b"/llm"),
        (b"http://localhost", b"/llm/"),
    ],
)
def test_a_relative_reference_has_the_root_path(location, expected):
    assert EngineOrigin("localhost", "/llm").relative(location) == expected


def test_our_own_server_sees_the_head_as_it_came():
    raw = request(b"host: a", b"Upgrade: h2c", b"X-Request-Id: r", b"content-length: 3")
    head = parse_head(raw)
    assert isinstance(head, RequestHead)
    assert head.for_sidecar() == raw.replace(b"\r\nUpgrade: h2c", b"")


NAMES = st.sampled_from([*sorted(TAKEN_OUT), b"accept", b"X-One", b"Authorization", b"HOST", b"Content-LENGTH"])
VALUES = st.one_of(
    st.sampled_from(
        [b"chunked", b"close", b"keep-alive", b"3", b"a", b"upgrade, x-one", b"websocket", b"100-continue"]
    ),
    st.binary(max_size=12),
)
LINES = st.lists(st.tuples(NAMES, st.sampled_from([b":", b": ", b" : ", b":\t", b":\r\n "]), VALUES), max_size=6)


class Listener:
    """What llhttp makes of a head."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = b""
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


def heard(raw: bytes) -> Listener:
    listener = Listener()
    with contextlib.suppress(httptools.HttpParserUpgrade):
        httptools.HttpRequestParser(listener).feed_data(raw)
    return listener


@given(method=st.sampled_from([b"GET", b"POST", b"HEAD"]), lines=LINES)
@example(
    method=b"POST", lines=[(b"HOST", b":", b"a"), (b"connection", b": ", b"upgrade, x-one"), (b"X-One", b": ", b"1")]
)
@example(
    method=b"GET", lines=[(b"host", b":", b"a"), (b"connection", b":", b"x-one,"), (b"accept", b":", b"text/html")]
)
def test_the_lines_say_what_the_parser_says(method, lines):
    raw = request(*(name + colon + value for name, colon, value in lines), first=method + b" /v1/x?y=%2F HTTP/1.1")
    head = parse_head(raw)
    if isinstance(head, Failure):
        return
    ours, theirs = heard(raw), heard(head.for_engine(HOST))
    assert ours.complete
    assert theirs.complete
    assert ours.url == theirs.url == head.target
    lengths = [value for name, value in theirs.headers if name.lower() == b"content-length"]
    codings = [value for name, value in theirs.headers if name.lower() == b"transfer-encoding"]
    assert len(lengths) + len(codings) <= 1
    assert codings == ([b"chunked"] if head.chunked else [])
    assert [name for name, _ in theirs.headers].count(b"host") == 1
    gone = TAKEN_OUT | {
        token.strip() for n, v in ours.headers if n.lower() == b"connection" for token in v.lower().split(b",")
    }
    kept = [(name, value) for name, value in ours.headers if name.lower() not in gone]
    assert [(name, value) for name, value in theirs.headers if name.lower() not in gone] == kept


def answer(*lines: bytes, status: int = 200) -> ResponseHead:
    return ResponseHead(b"\r\n".join([b"HTTP/1.1 %d OK" % status, *lines, b"", b""]), status, to_head=False)


def test_a_plain_answer_goes_on_as_it_came():
    head = answer(b"Date: now", b"content-length: 3", b"Set-Cookie: a", b"set-cookie: b")
    assert head.for_client(b"r1", close=False) == head.raw[:-2] + b"x-request-id: r1\r\n\r\n"
    assert not head.until_close


def test_an_answers_hop_by_hop_headers_end_here():
    lines = (b"Connection: close, X-Hop, content-length", b"X-Hop: 1", b"Keep-Alive: timeout=5", b"content-length: 3")
    text = answer(*lines, b"X-End: 1").for_client(b"r1", close=True)
    assert text == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nX-End: 1\r\nx-request-id: r1\r\nconnection: close\r\n\r\n"


def test_the_engines_own_request_id_stays_alone():
    """vLLM sets one with --enable-request-id-headers."""
    text = answer(b"X-Request-Id: theirs", b"content-length: 0").for_client(b"ours", close=False)
    assert text.lower().count(b"x-request-id") == 1
    assert b"theirs" in text


def test_chunks_are_taken_off_for_http_10():
    text = answer(b"Transfer-Encoding: chunked", b"Trailer: X").for_client(b"r1", close=True, unchunked=True)
    assert text == b"HTTP/1.1 200 OK\r\nx-request-id: r1\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("status", "lines", "has_body", "until_close"),
    [
        (200, (b"content-length: 3",), True, False),
        (200, (b"transfer-encoding: chunked",), True, False),
        (200, (), True, True),
        (204, (), False, False),
        (304, (b"content-length: 3",), False, False),
    ],
)
def test_where_an_answer_ends(status, lines, has_body, until_close):
    head = answer(*lines, status=status)
    assert (head.has_body, head.until_close) == (has_body, until_close)
    assert not ResponseHead(head.raw, status, to_head=True).has_body


# --- chunks ---


def framed(pieces: list[bytes], trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailers + b"\r\n"


@given(
    pieces=st.lists(
        st.one_of(st.binary(min_size=1, max_size=40), st.just(b"\r\n\r\n"), st.just(b"0\r\n\r\n")), max_size=5
    ),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    trailers=st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: 1\r\nB: 2\r\n"]),
    rest=st.sampled_from([b"", b"GET / HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"\n"]),
)
@example(pieces=[b"\r\n\r\n"], cuts=[], trailers=b"", rest=b"\n")
def test_a_chunked_body_ends_where_it_ends(pieces, cuts, trailers, rest):
    wire = framed(pieces, trailers) + rest
    borders = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    chunks, body, left = Chunks(TOO_LARGE, CAP), b"", b""
    for start, end in itertools.pairwise(borders):
        if chunks.is_complete:
            left += wire[start:end]
            continue
        piece, left = chunks.take(wire[start:end])
        body += piece
    assert chunks.is_complete
    assert (body, left) == (b"".join(pieces), rest)


@pytest.mark.parametrize("wire", [b"3\nabc\r\n", b"x\r\n", b"-1\r\n", b"3\r\nabcd\r\n"])
def test_what_are_no_chunks_is_refused(wire):
    with pytest.raises(Refused) as bad:
        Chunks(TOO_LARGE, CAP).take(wire)
    assert bad.value.failure.status == 400


@pytest.mark.parametrize(
    ("start", "more"), [(b"5;x=", b"x"), (b"0\r\nx-tr", b"x"), (b"0\r\n", b"x: yyyyyyyyyyy\r\n"), (b"", b"0")]
)
def test_what_stands_between_chunks_is_capped(start, more):
    chunks = Chunks(TOO_LARGE, CAP)
    chunks.take(start)

    def take_more():
        for _ in range(CAP // len(more) + 1):
            chunks.take(more)

    with pytest.raises(Refused) as bad:
        take_more()
    assert bad.value.failure is TOO_LARGE


@pytest.mark.parametrize(
    ("body", "surplus"),
    [(b"1\r\n\n\r\n0\r\n\r\n", b"\r\n"), (b"0\r\nx: y\r\n\r\n", b"\r"), (b"0\r\n\r\n", b"\n\r\n")],
)
def test_line_ends_behind_a_chunked_answer_are_seen(body, surplus):
    head = answer(b"transfer-encoding: chunked")
    for at in range(len(body)):
        assert not head.has_line_ends_behind(body[at:])
    for at in range(len(body) - 3):
        assert head.has_line_ends_behind(body[at:] + surplus)


@pytest.mark.parametrize("framing", [b"content-length: 4", b"Content-Length:4 ", b"x: y\r\nCONTENT-LENGTH:  4"])
def test_what_is_more_than_a_length_is_counted(framing):
    assert [answer(framing).surplus_bytes(count) for count in (4, 5, 40)] == [0, 1, 36]
    assert answer(b"transfer-encoding: chunked").surplus_bytes(40) == 0
