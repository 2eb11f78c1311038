"""What could be two requests to one reader and one to another is refused, or made plain before it goes on.

The engine here reads to the letter (see `oracle.py`). Every attempt hides a request for `/v1/smuggled` where a careless
reader would find it.
"""

import contextlib

import pytest

from tests.faithful.fronts import PROXIES, fronted_by
from tests.faithful.oracle import leads_to_control, statuses

INNER = b"GET /v1/smuggled HTTP/1.1\r\nhost: s\r\nx: "
HIDDEN = INNER + b"y\r\n\r\n"
REFUSED = {400, 411, 413, 414, 417, 426, 431, 501, 505}


def request(*fields: bytes, body: bytes = b"", line: bytes = b"POST /v1/x HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"host: s", *fields, b"", b""]) + body


def counted(length: bytes, body: bytes = HIDDEN) -> bytes:
    return request(b"content-length: " + length, body=body)


def coded(field: bytes, *others: bytes) -> bytes:
    """Chunked to who understands the coding; to others the end comes at once, or where the length says."""
    return request(*others, field, body=b"0\r\n\r\n" + HIDDEN)


def chunk(size_line: bytes, data: bytes = b"hello", end: bytes = b"\r\n") -> bytes:
    return request(b"transfer-encoding: chunked", body=size_line + b"\r\n" + data + end + b"0\r\n\r\n")


CL = b"content-length: %d" % (len(HIDDEN) + 5)
CL_TE = request(b"content-length: %d" % (len(HIDDEN) + 5), b"transfer-encoding: chunked", body=b"0\r\n\r\n" + HIDDEN)
TE_CL = request(
    b"transfer-encoding: chunked", b"content-length: 4", body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
)
H2C = (b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__", b"connection: Upgrade, HTTP2-Settings")
SHORT = request(b"content-length: 0", b"content-length: %d" % len(HIDDEN), body=HIDDEN)

# Whoever passes these on as they are has smuggled, or left it to the engine whether they are.
AMBIGUOUS = {
    "cl-te": CL_TE,
    "te-cl": TE_CL,
    "te-cl-zero": request(b"transfer-encoding: chunked", b"content-length: 0", body=b"0\r\n\r\n"),
    "te-unknown-and-cl": coded(b"transfer-encoding: xchunked", CL),
    "te-unknown": coded(b"transfer-encoding: cow"),
    "te-vertical-tab": coded(b"transfer-encoding: \x0bchunked", CL),
    "te-form-feed": coded(b"transfer-encoding: chunked\x0c", CL),
    "te-quoted": coded(b'transfer-encoding: "chunked"', CL),
    "te-parameter": coded(b"transfer-encoding: chunked;q=1", CL),
    "te-identity-last": coded(b"transfer-encoding: chunked, identity", CL),
    "te-identity-first": coded(b"transfer-encoding: identity, chunked", CL),
    "te-identity": coded(b"transfer-encoding: identity", CL),
    "te-twice": coded(b"transfer-encoding: chunked, chunked"),
    "te-two-fields": coded(b"transfer-encoding: chunked", b"transfer-encoding: identity"),
    "te-two-fields-unknown": coded(b"transfer-encoding: cow", b"transfer-encoding: chunked", CL),
    "te-gzip-first": coded(b"transfer-encoding: gzip, chunked"),
    "te-gzip-only": coded(b"transfer-encoding: gzip", CL),
    "te-empty": coded(b"transfer-encoding:", CL),
    "te-comma": coded(b"transfer-encoding: ,chunked", CL),
    "te-folded-name": coded(b"x: y\r\n transfer-encoding: chunked", CL),
    "te-space-before-colon": coded(b"transfer-encoding : chunked", CL),
    "te-tab-before-colon": coded(b"transfer-encoding\t: chunked", CL),
    "te-space-before-name": coded(b" transfer-encoding: chunked", CL),
    "te-value-folded": coded(b"transfer-encoding:\r\n chunked", CL),
    "te-behind-bare-lf": coded(b"x: y\ntransfer-encoding: chunked", CL),
    "te-behind-bare-cr": coded(b"x: y\rtransfer-encoding: chunked", CL),
    "te-behind-nul": coded(b"x: y\0transfer-encoding: chunked", CL),
    "te-nul": coded(b"transfer-encoding: chunked\0", CL),
    "te-high-byte": coded(b"transfer-encoding: chunked\xa0", CL),
    "te-name-nul": coded(b"transfer-encoding\0: chunked", CL),
    "te-1.0": coded(b"transfer-encoding: chunked", CL).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "te-1.0-alone": coded(b"transfer-encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "cl-twice-different": SHORT,
    "cl-twice-different-last-nought": request(b"content-length: %d" % len(HIDDEN), b"content-length: 0", body=HIDDEN),
    "cl-list": counted(b"0, %d" % len(HIDDEN)),
    "cl-list-same": counted(b"%d, %d" % (len(HIDDEN), len(HIDDEN))),
    "cl-twice-same": request(*[b"content-length: %d" % len(HIDDEN)] * 2, body=HIDDEN),
    "cl-plus": counted(b"+%d" % len(HIDDEN)),
    "cl-minus": counted(b"-%d" % len(HIDDEN)),
    "cl-minus-nought": counted(b"-0"),
    "cl-hex": counted(b"0x%x" % len(HIDDEN)),
    "cl-empty": counted(b""),
    "cl-space-inside": counted(b"%d 0" % len(HIDDEN)),
    "cl-exponent": counted(b"4e1"),
    "cl-underscore": counted(b"4_2"),
    "cl-point": counted(b"%d.0" % len(HIDDEN)),
    "cl-nul": counted(b"%d\0" % len(HIDDEN)),
    "cl-other-digits": counted("\uff14\uff12".encode()),
    "cl-overflow-64": counted(b"%d" % (2**64 + len(HIDDEN))),
    "cl-overflow-huge": counted(b"1" + b"0" * 400),
    "cl-folded": counted(b"1\r\n 0"),
    "cl-space-before-colon": request(b"content-length : %d" % len(HIDDEN), body=HIDDEN),
    "cl-behind-bare-lf": request(b"x: y\ncontent-length: %d" % len(HIDDEN), body=HIDDEN),
    "cl-behind-bare-cr": request(b"x: y\rcontent-length: %d" % len(HIDDEN), body=HIDDEN),
    "fold": request(b"x: y\r\n z", b"content-length: 0"),
    "fold-first": b"POST /v1/x HTTP/1.1\r\n host: s\r\ncontent-length: 0\r\n\r\n",
    "bare-lf-all": b"POST /v1/x HTTP/1.1\nhost: s\ncontent-length: %d\n\n%s" % (len(HIDDEN), HIDDEN),
    "bare-lf-head-end": b"POST /v1/x HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\n" + HIDDEN,
    "bare-lf-line": b"POST /v1/x HTTP/1.1\nhost: s\r\ncontent-length: 0\r\n\r\n",
    "bare-cr-head-end": b"POST /v1/x HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\r" + HIDDEN,
    "bare-cr-lines": b"POST /v1/x HTTP/1.1\rhost: s\rcontent-length: 0\r\r" + HIDDEN,
    "bare-cr-in-a-value": request(b"x: a\rb", b"content-length: 0"),
    "nul-in-a-value": request(b"x: a\0b", b"content-length: 0"),
    "nul-in-a-name": request(b"x\0y: a", b"content-length: 0"),
    "no-colon": request(b"x", b"content-length: 0"),
    "no-name": request(b": x", b"content-length: 0"),
    "odd-name": request(b"(x): y", b"content-length: 0"),
    "high-name": request(b"x\xff: y", b"content-length: 0"),
    "space-in-a-name": request(b"x y: z", b"content-length: 0"),
    "lf-before-the-line": b"\nPOST /v1/x HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\r\n",
    "cr-before-the-line": b"\rPOST /v1/x HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\r\n",
    "lines-before-the-line": b"\r\n\n\r\nPOST /v1/x HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\r\n",
    "space-before-the-line": b" POST /v1/x HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\r\n",
    "nul-before-the-line": b"\0POST /v1/x HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\r\n",
    "two-hosts": request(b"host: t", b"content-length: 0"),
    "two-spaces": request(b"content-length: 0", line=b"POST  /v1/x HTTP/1.1"),
    "two-spaces-behind": request(b"content-length: 0", line=b"POST /v1/x  HTTP/1.1"),
    "tabs": request(b"content-length: 0", line=b"POST\t/v1/x\tHTTP/1.1"),
    "space-behind-the-version": request(b"content-length: 0", line=b"POST /v1/x HTTP/1.1 "),
    "no-version": b"GET /v1/x\r\n\r\n" + HIDDEN,
    "version-2": request(b"content-length: 0", line=b"POST /v1/x HTTP/2.0"),
    "version-long": request(b"content-length: 0", line=b"POST /v1/x HTTP/1.10"),
    "version-odd": request(b"content-length: 0", line=b"POST /v1/x HTTP/1,1"),
    "version-lower-case": request(b"content-length: 0", line=b"POST /v1/x http/1.1"),
    "another-protocol": request(b"content-length: 0", line=b"POST /v1/x ICY/1.1"),
    "http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "space-in-the-target": request(b"content-length: 0", line=b"POST /v1/x ?y HTTP/1.1"),
    "request-line-in-the-target": request(b"content-length: 0", line=b"POST /v1/x HTTP/1.1 HTTP/1.1"),
    "control-in-the-query": request(b"content-length: 0", line=b"POST /v1/x?\x01 HTTP/1.1"),
    "delete-in-the-query": request(b"content-length: 0", line=b"POST /v1/x?\x7f HTTP/1.1"),
    "nul-in-the-query": request(b"content-length: 0", line=b"POST /v1/x?\0 HTTP/1.1"),
    "cr-in-the-query": request(b"content-length: 0", line=b"POST /v1/x?\rx HTTP/1.1"),
    "nul-in-the-method": request(b"content-length: 0", line=b"PO\0ST /v1/x HTTP/1.1"),
    "h2c": request(
        b"upgrade: h2c",
        b"http2-settings: AAMAAABkAAQAAP__",
        b"connection: Upgrade, HTTP2-Settings",
        b"content-length: 0",
    ),
    "h2c-with-a-body": request(*H2C, b"content-length: %d" % len(HIDDEN), body=HIDDEN),
    "upgrade-to-anything": request(b"upgrade: tls/1.0", b"connection: upgrade", b"content-length: 0"),
    "chunk-size-hex-sign": chunk(b"0x5"),
    "chunk-size-plus": chunk(b"+5"),
    "chunk-size-minus": chunk(b"-5"),
    "chunk-size-space-before": chunk(b" 5"),
    "chunk-size-tab-behind": chunk(b"5\t"),
    "chunk-size-empty": chunk(b""),
    "chunk-size-no-hex": chunk(b"g"),
    "chunk-size-underscore": chunk(b"0_5"),
    "chunk-size-overflow": chunk(b"10000000000000005"),
    "chunk-size-overflow-32": request(
        b"transfer-encoding: chunked", body=b"100000000\r\n" + b"hello\r\n0\r\n\r\n" + HIDDEN
    ),
    "chunk-size-bare-lf": request(b"transfer-encoding: chunked", body=b"5\nhello\r\n0\r\n\r\n"),
    "chunk-size-bare-cr": request(b"transfer-encoding: chunked", body=b"5\rhello\r\n0\r\n\r\n"),
    "chunk-size-nul": chunk(b"5\0"),
    "chunk-extension-bare-lf": request(
        b"transfer-encoding: chunked", body=b"5;\nhello\r\n%x\r\n0\r\n\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN) + 5, HIDDEN)
    ),
    "chunk-extension-bare-cr": chunk(b"5;a\rb"),
    "chunk-extension-nul": chunk(b"5;a\0"),
    "chunk-too-long": chunk(b"3"),
    "chunk-end-missing": chunk(b"5", end=b""),
    "chunk-end-bare-lf": chunk(b"5", end=b"\n"),
    "chunk-end-bare-cr": chunk(b"5", end=b"\r"),
    "chunk-end-other": chunk(b"5", end=b"XX"),
    "last-chunk-bare-lf": request(b"transfer-encoding: chunked", body=b"5\r\nhello\r\n0\r\n\n" + HIDDEN),
    "last-chunk-all-bare": request(b"transfer-encoding: chunked", body=b"5\r\nhello\r\n0\n\n" + HIDDEN),
    "trailer-frames": request(b"transfer-encoding: chunked", body=b"0\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN)),
    "trailer-recodes": request(b"transfer-encoding: chunked", body=b"0\r\ntransfer-encoding: chunked\r\n\r\n"),
    "trailer-folded": request(b"transfer-encoding: chunked", body=b"0\r\nx: y\r\n z\r\n\r\n"),
    "trailer-bare-lf": request(b"transfer-encoding: chunked", body=b"0\r\nx: y\n\r\n" + HIDDEN),
    "trailer-no-colon": request(b"transfer-encoding: chunked", body=b"0\r\nGET /v1/smuggled HTTP/1.1\r\n\r\n"),
}

# These have one meaning only, and the hidden request is none: a body, or the value of a header.
PLAIN = {
    "a-body-like-a-request": counted(b"%d" % len(HIDDEN)),
    "a-chunk-like-a-request": request(
        b"transfer-encoding: chunked", body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
    ),
    "a-get-with-a-body": request(b"content-length: %d" % len(HIDDEN), line=b"GET /v1/x HTTP/1.1", body=HIDDEN),
    "a-head-with-a-body": request(b"content-length: %d" % len(HIDDEN), line=b"HEAD /v1/x HTTP/1.1", body=HIDDEN),
    "a-delete-with-a-body": request(b"content-length: %d" % len(HIDDEN), line=b"DELETE /v1/x HTTP/1.1", body=HIDDEN),
    "length-named-by-connection": request(
        b"connection: content-length", b"content-length: %d" % len(HIDDEN), body=HIDDEN
    ),
    "coding-named-by-connection": request(
        b"connection: transfer-encoding",
        b"transfer-encoding: chunked",
        body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN),
    ),
    "host-named-by-connection": request(
        b"connection: host, x-request-id", b"content-length: %d" % len(HIDDEN), body=HIDDEN
    ),
    "coding-in-capitals": request(b"Transfer-Encoding: CHUNKED", body=b"%X\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)),
    "length-with-noughts": counted(b"000%d" % len(HIDDEN)),
    "length-with-spaces": counted(b"  %d" % len(HIDDEN)),
    "chunk-extension": request(
        b"transfer-encoding: chunked", body=b'%x;a="b";c\r\n%s\r\n0;d\r\n\r\n' % (len(HIDDEN), HIDDEN)
    ),
    "trailers": request(b"transfer-encoding: chunked", body=b"5\r\nhello\r\n0\r\nx: GET /v1/smuggled\r\n\r\n"),
    "expect-and-a-body": request(b"expect: 100-continue", b"content-length: %d" % len(HIDDEN), body=HIDDEN),
    "a-request-id-with-escapes": request(b"x-request-id: %0d%0aGET%20/v1/smuggled", b"content-length: 0"),
    "escapes-in-the-query": request(b"content-length: 0", line=b"POST /v1/x?%0d%0aGET%20/v1/smuggled HTTP/1.1"),
}


async def attempt(through, data: bytes) -> tuple[list[int], bool]:
    """Send it, and say which answers came, and whether that was the end of the connection."""
    client = await through.connect()
    with contextlib.suppress(ConnectionError):
        await client.send(data)
    await through.settle()
    with contextlib.suppress(OSError):  # it may have been closed already
        await client.half_close()
    try:
        return statuses(await client.rest()), True
    except TimeoutError:
        return [], False


@fronted_by(*PROXIES)
@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_an_ambiguous_request_is_refused_or_made_plain(through, oracle, name):
    answers, ended = await attempt(through, AMBIGUOUS[name])
    assert oracle.violations == []
    assert len(oracle.targets()) <= 1
    assert all(target.startswith("/v1/x") for target in oracle.targets())
    assert ended
    assert len(answers) <= 2
    if not oracle.targets() and (answers or through.kind == "sidecar"):  # the controls may just hang up
        assert answers
        assert answers[-1] in REFUSED


@fronted_by("sidecar", "nginx")
@pytest.mark.parametrize("name", PLAIN)
async def test_a_plain_request_stays_one(through, oracle, name):
    client = await through.connect()
    await client.send(PLAIN[name])
    answer = await client.whole(method=PLAIN[name].split(b" ")[0].decode())
    await through.settle()
    assert oracle.violations == []
    assert (answer.status, len(oracle.targets())) == (200, 1)
    (seen,) = (seen for seen in oracle.requests if seen.target != "/v1/settle")
    assert seen.whole
    assert seen.body in (HIDDEN, b"hello", b"")
    assert bool(seen.body) == (b"hello" in PLAIN[name] or HIDDEN in PLAIN[name])


@fronted_by("direct")
async def test_the_oracle_notices(through, oracle):
    unnoticed, scolded = [], []
    for name, data in AMBIGUOUS.items():
        oracle.forget()
        await attempt(through, data)
        if not oracle.violations:
            unnoticed.append(name)
    for name, data in PLAIN.items():
        oracle.forget()
        await attempt(through, data)
        if oracle.violations:
            scolded.append(name)
    assert (unnoticed, scolded) == ([], [])


def test_the_oracle_reads_paths_in_every_way():
    """A few of each kind, so that its silence means something."""
    for target in (
        "/collective_rpc",
        "/v1/x/../../sleep",
        "/v1/%2e%2e/sleep",
        "/%2573leep",
        "http://h/sleep",
        "//sleep",
        "/v1/..;/sleep",
        "/SLEEP/",
        "/sleep%00",
        "/\\sleep",
    ):
        assert leads_to_control(target), target
    for target in ("/v1/models", "/v1/x?next=/sleep", "/v1/models/sleep", "/v1/x?collective_rpc"):
        assert not leads_to_control(target), target
