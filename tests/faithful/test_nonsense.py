"""An engine that answers nonsense harms one answer at most: the next request gets its own, on whatever connection."""

import asyncio
import contextlib

import pytest

from tests.faithful.fronts import PROXIES, fronted_by
from tests.patience import patiently

OK = b"HTTP/1.1 200 OK\r\n"
POISON = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison"

# Nothing of these can be told to a client: it gets 502.
UNSPEAKABLE = {
    "not-http": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "binary": bytes(range(256)) * 8,
    "html": b"<html><body>It works</body></html>",
    "a-request": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "http-2": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64\x00\x04\x00\x00\xff\xff",
    "tls": b"\x15\x03\x03\x00\x02\x02\x16",
    "version-2": b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "another-protocol": b"ICY 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "no-status": b"HTTP/1.1 OK\r\ncontent-length: 2\r\n\r\n{}",
    "status-of-two-digits": b"HTTP/1.1 20 OK\r\ncontent-length: 2\r\n\r\n{}",
    "status-of-four-digits": b"HTTP/1.1 2000 OK\r\ncontent-length: 2\r\n\r\n{}",
    "status-with-letters": b"HTTP/1.1 2x0 OK\r\ncontent-length: 2\r\n\r\n{}",
    "status-000": b"HTTP/1.1 000 OK\r\ncontent-length: 2\r\n\r\n{}",
    "length-twice": OK + b"content-length: 2\r\ncontent-length: 50\r\n\r\n{}" + POISON,
    "length-list": OK + b"content-length: 2, 50\r\n\r\n{}" + POISON,
    "length-negative": OK + b"content-length: -2\r\n\r\n{}",
    "length-plus": OK + b"content-length: +2\r\n\r\n{}",
    "length-hex": OK + b"content-length: 0x2\r\n\r\n{}",
    "length-no-number": OK + b"content-length: two\r\n\r\n{}",
    "length-overflow": OK + b"content-length: 18446744073709551618\r\n\r\n{}",
    "nul-in-a-value": OK + b"content-length: 2\r\nx: a\0b\r\n\r\n{}",
    "nul-in-a-name": OK + b"content-length: 2\r\nx\0: a\r\n\r\n{}",
    "bare-cr-in-a-value": OK + b"content-length: 2\r\nx: a\rset-cookie: b\r\n\r\n{}",
    "no-colon": OK + b"content-length: 2\r\nnonsense\r\n\r\n{}",
    "space-before-colon": OK + b"content-length : 2\r\n\r\n{}",
    "huge-header": OK + b"x: " + b"x" * 2_000_000 + b"\r\ncontent-length: 2\r\n\r\n{}",
    "many-headers": OK + b"x: yyyyyyyyyyyyyyyyyyyy\r\n" * 100_000 + b"content-length: 2\r\n\r\n{}",
    "huge-reason": b"HTTP/1.1 200 " + b"x" * 2_000_000 + b"\r\ncontent-length: 2\r\n\r\n{}",
    "switching-protocols": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nGET",
    "switching-to-nothing": b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + POISON,
    "switching-to-websockets": b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n\x81\x02hi",
}

# These begin as answers, or may be read as one; what must not be is that the end looks whole or a second one gets out.
BROKEN = {
    "length-and-coding": OK
    + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    + POISON,
    "length-and-coding-other-order": OK + b"transfer-encoding: chunked\r\ncontent-length: 50\r\n\r\n0\r\n\r\n" + POISON,
    "coding-twice": OK + b"transfer-encoding: chunked, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" + POISON,
    "coding-gzip": OK + b"transfer-encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" + POISON,
    "folded": OK + b"x: a\r\n content-length: 50\r\ncontent-length: 2\r\n\r\n{}" + POISON,
    "chunk-size-no-hex": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n" + POISON,
    "chunk-size-overflow": OK + b"transfer-encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n" + POISON,
    "chunk-end-missing": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n" + POISON,
    "bare-lf-head": b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}" + POISON,
}

# These go on forever, in a place where a careful reader keeps what it reads until it ends.
ENDLESS = {
    "header": (OK + b"x: ", b"y"),
    "headers": (OK, b"x: yyyyyyyyyyyyyyyyyyyy\r\n"),
    "reason": (b"HTTP/1.1 200 ", b"y"),
    "chunk-extension": (OK + b"transfer-encoding: chunked\r\n\r\n5;", b"y"),
    "trailer": (OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: ", b"y"),
    "trailers": (OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n", b"x: yyyyyyyyyyyyyyyyyyyy\r\n"),
    "chunk-size": (OK + b"transfer-encoding: chunked\r\n\r\n", b"0"),
    "empty-lines": (b"", b"\r\n"),
}

# Whole answers with something behind them that nobody asked for.
SURPLUS = {
    "another-answer": OK + b"content-length: 2\r\n\r\n{}" + POISON,
    "another-answer-chunked": OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + POISON,
    "two-more": OK + b"content-length: 2\r\n\r\n{}" + POISON * 2,
    "rubbish": OK + b"content-length: 2\r\n\r\n{}" + b"x" * 1000,
    "line-ends": OK + b"content-length: 2\r\n\r\n{}\r\n\r\n",
    "half-an-answer": OK + b"content-length: 2\r\n\r\n{}" + POISON[:20],
    "body-of-204": b"HTTP/1.1 204 No Content\r\ncontent-length: 68\r\n\r\n" + POISON,
    "body-of-204-chunked": b"HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n2c\r\n" + POISON,
    "body-of-304": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 68\r\n\r\n" + POISON,
}


COUNTED = OK + b"content-length: 10\r\n\r\n"
# Ten bytes of a body that is longer than its length, by the engine's writes; the last two have the poison whole.
TOO_LONG = {
    "one-write": (COUNTED + b"0123456789" + POISON,),
    "head-then-all": (COUNTED, b"0123456789" + POISON),
    "half-then-all": (COUNTED + b"01234", b"56789" + POISON),
    "three-writes": (COUNTED, b"0123456789", POISON),
    "three-writes-across": (COUNTED[:-1], COUNTED[-1:] + b"012", b"3456789" + b"x" * 26),
    "bytes": tuple(bytes([byte]) for byte in COUNTED + b"0123456789x"),
    "hints-before": (b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + COUNTED + b"0123456789" + POISON,),
}
EQUAL_LENGTHS = {
    "next-to-each-other": b"content-length: 10\r\ncontent-length: 10\r\n",
    "apart-in-other-case": b"Content-Length: 10\r\nx: y\r\nCONTENT-LENGTH:10 \r\n",
    "three": b"content-length: 10\r\n" * 3,
    "list": b"content-length: 10, 10\r\n",
}


@pytest.fixture
def nonsense(engine):
    """`/v1/nonsense/NAME` says it, and holds the line until the other side has had enough."""

    def say(*writes: bytes):
        @engine.on("/v1/nonsense")
        async def talk(call):
            await call.read()
            with contextlib.suppress(ConnectionError):
                for number, data in enumerate(writes):
                    if number:
                        await asyncio.sleep(0.02)  # that they arrive one by one
                    await call.write(data)
                await call.wait_until_gone()
            call.close()

    async def fine(call):
        await call.read()
        await call.answer(f"fine {call.target}".encode())

    for number in range(8):
        engine.on(f"/v1/fine{number}")(fine)
    return say


async def everyone_is_fine(through, client=None) -> None:
    """The same connection if it is still there, and new ones over whatever is pooled."""
    if client is not None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await client.request("GET", "/v1/fine0")
            answer = await client.whole()
            assert (answer.status, answer.body) == (200, b"fine /v1/fine0")
    answers = await asyncio.gather(*(through.ask("GET", f"/v1/fine{number}") for number in range(8)))
    assert [answer.body for answer in answers] == [b"fine /v1/fine%d" % number for number in range(8)]


@fronted_by("sidecar", "vllm-router")  # to nginx it is HTTP/0.9
@pytest.mark.parametrize("name", UNSPEAKABLE)
async def test_what_is_no_answer_is_a_502(through, nonsense, name):
    nonsense(UNSPEAKABLE[name])
    client = await through.connect()
    await client.request("POST", "/v1/nonsense", body=b"{}")
    answer = await client.whole()
    assert (answer.status, answer.complete) == (502, True)
    assert b"poison" not in answer.body
    assert answer.header("set-cookie") == []
    await everyone_is_fine(through, client)


@fronted_by(*PROXIES)
@pytest.mark.parametrize("name", BROKEN)
async def test_what_breaks_has_no_clean_end_and_no_sequel(through, nonsense, name):
    nonsense(BROKEN[name])
    before = through.rss_bytes()
    client = await through.connect()
    await client.request("POST", "/v1/nonsense", body=b"{}")
    answer = await client.whole()
    assert answer.status in (200, 502)
    assert answer.status == 502 or not answer.complete or answer.body in (b"{}", b"hello", b"")
    assert b"poison" not in answer.body
    await everyone_is_fine(through, client)
    assert through.rss_bytes() - before < 8 * 2**20


@fronted_by("sidecar", "nginx")
@pytest.mark.parametrize("name", ENDLESS)
async def test_what_never_ends_is_not_kept(through, engine, name):
    start, more = ENDLESS[name]

    @engine.on("/v1/nonsense")
    async def babble(call):
        with contextlib.suppress(ConnectionError):
            await call.write(start)
            for _ in range(256):
                await call.write(more * (2**16 // len(more)))
        call.close()

    before = through.rss_bytes()
    client = await through.connect(limit=2**16)
    await client.request("GET", "/v1/nonsense", ("connection", "close"))
    data = await client.rest()
    assert data.startswith(b"HTTP/1.1 200 ") or b" 502 " in data[:20]
    assert through.rss_bytes() - before < 8 * 2**20
    assert (await through.ask("GET", "/v1/x")).status == 200


@fronted_by(*PROXIES)
@pytest.mark.parametrize("name", SURPLUS)
async def test_what_comes_behind_an_answer_reaches_nobody(through, nonsense, name):
    """Neither the next request on the client's connection nor one that the engine's would have been pooled for."""
    nonsense(SURPLUS[name])
    client = await through.connect()
    await client.request("POST", "/v1/nonsense", body=b"{}")
    answer = await client.whole()
    assert answer.status in (200, 204, 304, 502)
    assert b"poison" not in answer.body
    await everyone_is_fine(through, client)


@fronted_by("sidecar", "direct")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("name", TOO_LONG)
async def test_a_body_longer_than_its_length_is_delivered_up_to_it(through, nonsense, name, version):
    nonsense(*TOO_LONG[name])
    client = await through.connect()
    await client.send(f"GET /v1/nonsense HTTP/{version}\r\nhost: s\r\nconnection: keep-alive\r\n\r\n".encode())
    answer = await client.whole()
    assert (answer.status, answer.complete, answer.body) == (200, True, b"0123456789")
    assert answer.header("content-length") == ["10"]


@fronted_by("sidecar")  # RFC 9112 6.3 lets a proxy take them for one as well
@pytest.mark.parametrize("name", EQUAL_LENGTHS)
async def test_an_answer_of_equal_lengths_is_none(through, nonsense, name):
    nonsense(OK + EQUAL_LENGTHS[name] + b"\r\n0123456789")
    assert (await through.ask("GET", "/v1/nonsense")).status == 502


@fronted_by("sidecar")
@pytest.mark.parametrize("name", TOO_LONG)
async def test_a_connection_that_gave_too_much_is_not_used_again(through, engine, nonsense, name):
    """What else comes on it would be taken for the next answer."""
    nonsense(*TOO_LONG[name])
    assert (await through.ask("GET", "/v1/nonsense")).body == b"0123456789"
    await patiently(engine.seen("/v1/nonsense")[0].gone.wait())
    await through.ask("GET", "/v1/fine1")
    assert engine.connections_used() == 2


@fronted_by(*PROXIES)
async def test_a_pipelined_request_does_not_get_what_comes_behind_an_answer(through, nonsense):
    nonsense(SURPLUS["another-answer"])
    client = await through.connect()
    await client.request("POST", "/v1/nonsense", body=b"{}")
    await client.request("GET", "/v1/fine1")
    answer = await client.whole()
    assert answer.status == 502 or answer.body == b"{}"
    assert (await client.whole()).body == b"fine /v1/fine1"


@fronted_by(*PROXIES)
async def test_an_answer_that_comes_unasked_is_for_nobody(through, engine, nonsense):
    written = asyncio.Event()

    @engine.on("/v1/late")
    async def late(call):
        await call.answer(b"in time")
        await asyncio.sleep(0.05)  # for the connection to be idle
        with contextlib.suppress(ConnectionError):
            await call.write(POISON)
        written.set()

    client = await through.connect()
    await client.request("GET", "/v1/late")
    assert (await client.whole()).body == b"in time"
    await patiently(written.wait())
    await everyone_is_fine(through, client)


@fronted_by(*PROXIES)
async def test_a_head_answered_with_a_body_harms_nobody(through, nonsense):
    nonsense(OK + b"content-length: %d\r\n\r\n" % len(POISON) + POISON)
    client = await through.connect()
    await client.request("HEAD", "/v1/nonsense")
    answer = await client.whole(method="HEAD")
    assert answer.status in (200, 502)
    await everyone_is_fine(through, client)


@fronted_by("sidecar")
async def test_hints_without_an_end_are_not_for_ever(through, engine):
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </%s>; rel=preload\r\n\r\n" % (b"a" * 900) * 1000
    before = through.rss_bytes()

    @engine.on("/v1/nonsense")
    async def hint(call):
        with contextlib.suppress(ConnectionError):
            for _ in range(50):
                await call.write(hints)
            await call.answer(b"ok")
        call.close()

    client = await through.connect()
    await client.request("GET", "/v1/nonsense")
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        answer = await client.whole()
        assert answer.status in (200, 502)
    assert through.rss_bytes() - before < 50 * len(hints) / 2  # buffers on both sides, and not what went through them
    assert (await through.ask("GET", "/v1/x")).status == 200


@fronted_by(*PROXIES)
async def test_an_answer_before_the_request_is_whole_ends_that_engines_connection(through, engine):
    seen = []

    @engine.on("/v1/early")
    async def early(call):
        await call.answer(b"early")
        with contextlib.suppress(ConnectionError):
            while data := await call.reader.read(65536):
                seen.append(data)
        call.close()

    client = await through.connect()
    await client.request("POST", "/v1/early", ("content-length", "1000"))
    await client.send(bytes(10))
    assert (await client.whole()).body == b"early"
    answers = await asyncio.gather(*(through.ask("GET", "/v1/x") for _ in range(4)))
    assert [answer.status for answer in answers] == [200] * 4
    assert b"GET" not in b"".join(seen)
