"""What passes through the proxy passes unchanged, as it comes, in both directions."""

import asyncio
import gc
import json
import tracemalloc
from collections import Counter

import pytest

from gated_proxy.proxy import Proxy
from gated_proxy.traffic import ProxyTraffic
from tests.patience import patiently, until


async def test_a_body_comes_back_byte_for_byte(front, upstream):
    """Every byte value survives both directions, and a counted body keeps its count."""
    body = bytes(range(256)) * 300
    answer = await front.post("/v1/completions", body)
    assert (answer.status, answer.body, answer.complete) == (200, body, True)
    assert upstream.calls[0].header("content-length") == [str(len(body))]
    assert answer.header("content-length") == [str(len(body))]


async def test_events_arrive_one_by_one(front, upstream):
    """The client holds an event before the engine has sent the next."""
    proceed = asyncio.Event()

    @upstream.on("/v1/chat/completions")
    async def stream(call):
        await call.read()
        await call.begin(("content-type", "text/event-stream"))
        for number in range(3):
            await call.chunk(b"data: %d\n\n" % number)
            await proceed.wait()
            proceed.clear()
        await call.end()

    wire = await front.connect()
    await wire.request("POST", "/v1/chat/completions", body=b'{"stream": true}')
    assert (await wire.head()).header("content-type") == ["text/event-stream"]
    for number in range(3):
        assert await wire.chunk() == b"data: %d\n\n" % number
        proceed.set()
    assert await wire.chunk() == b""


async def test_a_long_stream_is_the_same_bytes(front, upstream):
    """Chunk borders are the transport's affair; the bytes and their order are not."""
    pieces = [b'data: {"n": %d, "\xc3\xa9": "\r\n"}\n\n' % number for number in range(2000)]

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.begin()
        for piece in pieces:
            await call.chunk(piece)
        await call.end()

    answer = await front.get("/v1/completions")
    assert answer.complete
    assert answer.body == b"".join(pieces)


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models/org%2Fname",
        "/v1/models/a+b%20c?q=%2F+x&y=%20[z]&y=",
        "/v1/models?",
        "/v1/%7Etilde/~tilde?a=b?c=d",
    ],
)
async def test_the_target_is_sent_as_the_client_wrote_it(front, upstream, target):
    """No decoding, no re-encoding, no normalising."""
    await front.get(target)
    assert upstream.calls[0].target == target


async def test_repeated_headers_stay_repeated(front, upstream):
    """Order and repetition are kept upwards and downwards."""

    @upstream.on("/v1/models")
    async def cookies(call):
        await call.answer(b"{}", 200, ("set-cookie", "a=1"), ("x-one", "1"), ("set-cookie", "b=2"))

    answer = await front.get("/v1/models", ("x-tag", "one"), ("accept", "a"), ("x-tag", "two"))
    assert answer.header("set-cookie") == ["a=1", "b=2"]
    assert upstream.calls[0].header("x-tag") == ["one", "two"]


async def test_cookies_are_not_kept_for_the_next_caller(front, upstream):
    """A cookie set for one client never travels with another's request."""

    @upstream.on("/v1/models")
    async def cookies(call):
        await call.answer(b"{}", 200, ("set-cookie", "session=mine; path=/"))

    await front.get("/v1/models")
    await front.get("/v1/models")
    assert upstream.calls[1].header("cookie") == []


async def test_nothing_is_added_but_host_and_request_id(front, upstream):
    """The engine sees its own host and the client's headers; aiohttp's defaults stay away."""
    await front.get("/v1/models", ("authorization", "Bearer theirs"), ("traceparent", "00-ab-cd-01"))
    names = {name.lower() for name, _ in upstream.calls[0].headers}
    assert names == {"host", "authorization", "traceparent", "x-request-id"}
    assert upstream.calls[0].header("host") == [f"127.0.0.1:{upstream.port}"]


async def test_a_utf8_header_value_keeps_its_bytes(front, upstream):
    """Values beyond ASCII reach the engine as they came."""
    value = "caf\u00e9".encode().decode("latin-1")
    await front.get("/v1/models", ("x-name", value))
    assert upstream.calls[0].header("x-name") == [value]


async def test_hop_by_hop_headers_end_here(front, upstream):
    """Also those that Connection names, in both directions."""

    @upstream.on("/v1/models")
    async def chatty(call):
        await call.answer(
            b"{}", 200, ("connection", "x-hop"), ("x-hop", "1"), ("keep-alive", "timeout=5"), ("x-end", "1")
        )

    answer = await front.get(
        "/v1/models", ("connection", "keep-alive, X-Private"), ("x-private", "1"), ("te", "trailers"), ("x-end", "1")
    )
    sent, back = upstream.calls[0], {name for name, _ in answer.headers}
    assert [sent.header(name) for name in ("connection", "x-private", "te", "x-end")] == [[], [], [], ["1"]]
    assert back == {"content-length", "x-end", "x-request-id"}


async def test_a_compressed_answer_stays_compressed(front, upstream):
    """The proxy never decompresses."""

    @upstream.on("/v1/models")
    async def zipped(call):
        await call.answer(b"\x1f\x8bnot really", 200, ("content-encoding", "gzip"))

    answer = await front.get("/v1/models", ("accept-encoding", "gzip"))
    assert (answer.body, answer.header("content-encoding")) == (b"\x1f\x8bnot really", ["gzip"])


async def test_a_redirect_is_the_clients_to_follow(front, upstream):
    """The proxy hands it on."""

    @upstream.on("/v1/models/")
    async def redirect(call):
        await call.answer(b"", 307, ("location", "/v1/models"))

    answer = await front.get("/v1/models/")
    assert (answer.status, answer.header("location"), len(upstream.calls)) == (307, ["/v1/models"], 1)


async def test_head_has_a_length_and_no_body(front, upstream):
    """The connection is fit for the next request afterwards."""

    @upstream.on("/health")
    async def head(call):
        await call.head(200, ("content-length", "1234"))

    wire = await front.connect()
    for _ in range(2):
        await wire.request("HEAD", "/health")
        answer = await wire.answer(without_body=True)
        assert (answer.status, answer.header("content-length")) == (200, ["1234"])
    assert upstream.connections == 1


@pytest.mark.parametrize(("status", "headers"), [(204, ()), (304, (("content-length", "99"), ("etag", '"x"')))])
async def test_answers_without_a_body_end_at_their_head(front, upstream, status, headers):
    """204 and 304, even with a length that tells of another answer."""

    @upstream.on("/v1/models")
    async def empty(call):
        await call.head(status, *headers)

    wire = await front.connect()
    for _ in range(2):
        await wire.request("GET", "/v1/models")
        answer = await wire.answer(without_body=True)
        assert (answer.status, answer.header("transfer-encoding")) == (status, [])
    assert upstream.connections == 1


async def test_a_chunked_upload_goes_up_as_it_comes(front, upstream):
    """The engine holds the first piece before the client has sent the second."""
    arrived = asyncio.Queue()

    @upstream.on("/v1/audio/transcriptions")
    async def listen(call):
        async for piece in call.pieces():
            arrived.put_nowait(piece)
        await call.answer()

    wire = await front.connect()
    await wire.request("POST", "/v1/audio/transcriptions", ("transfer-encoding", "chunked"))
    for piece in (b"one", b"two", b"three"):
        await wire.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        assert await arrived.get() == piece
    await wire.send(b"0\r\n\r\n")
    assert (await wire.answer()).status == 200
    assert upstream.calls[0].header("transfer-encoding") == ["chunked"]


async def test_a_small_chunked_body_stays_chunked(front, upstream):
    """Also when it was complete at once, and also when it is empty."""
    for body in (b"3\r\nabc\r\n0\r\n\r\n", b"0\r\n\r\n"):
        wire = await front.connect()
        await wire.send(b"POST /v1/x HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\n" + body)
        assert (await wire.answer()).complete
    assert [call.header("transfer-encoding") for call in upstream.calls] == [["chunked"]] * 2
    assert [call.body for call in upstream.calls] == [b"abc", b""]


async def test_a_counted_upload_goes_up_as_it_comes(front, upstream):
    """The head and the first half reach the engine before the second half is sent."""
    arrived = asyncio.Event()

    @upstream.on("/v1/audio/transcriptions")
    async def listen(call):
        assert await call.reader.readexactly(3) == b"abc"
        arrived.set()
        assert await call.reader.readexactly(3) == b"def"
        await call.answer()

    wire = await front.connect()
    await wire.request("POST", "/v1/audio/transcriptions", ("content-length", "6"))
    await wire.send(b"abc")
    await arrived.wait()
    await wire.send(b"def")
    assert (await wire.answer()).status == 200
    assert upstream.calls[0].header("content-length") == ["6"]
    assert upstream.calls[0].header("transfer-encoding") == []


async def test_a_get_with_a_body_keeps_it(front, upstream):
    """Unusual and legal."""
    wire = await front.connect()
    await wire.request("GET", "/v1/x", body=b"query")
    assert (await wire.answer()).body == b"query"


async def test_a_post_without_a_body_gets_a_length_of_zero(front, upstream):
    """The one header that may be added."""
    answer = await front.post("/v1/responses/r1/cancel", b"")
    assert (answer.status, upstream.calls[0].header("content-length")) == (200, ["0"])


async def test_ten_megabytes_go_up_in_bounded_memory(front, upstream):
    """Buffers, not bodies: the peak stays far under the upload's size while the engine reads slowly."""
    size, piece = 10 * 2**20, bytes(2**16)
    seen = 0

    @upstream.on("/v1/audio/transcriptions")
    async def listen(call):
        nonlocal seen
        async for part in call.pieces():
            seen += len(part)
            await asyncio.sleep(0)
        await call.answer()

    wire = await front.connect()
    tracemalloc.start()
    await wire.request("POST", "/v1/audio/transcriptions", ("content-length", str(size)))
    for _ in range(size // len(piece)):
        await wire.send(piece)
    answer = await wire.answer()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (answer.status, seen) == (200, size)
    assert peak < 4 * 2**20


async def test_a_client_that_does_not_read_holds_the_engine_back(front, upstream):
    """Backpressure reaches the engine: it cannot push a stream that nobody takes into our memory."""
    written = 0
    stuck = asyncio.Event()

    @upstream.on("/v1/completions")
    async def flood(call):
        nonlocal written
        await call.begin()
        while True:
            try:
                await asyncio.wait_for(call.chunk(bytes(2**16)), 0.5)  # noqa: TID251 - who gives up early sends less
            except TimeoutError:
                break
            written += 2**16
        stuck.set()
        await call.wait_until_gone()

    wire = await front.connect()
    wire.writer.transport.pause_reading()
    await wire.request("GET", "/v1/completions")
    await patiently(stuck.wait())
    assert written < 32 * 2**20
    await wire.leave()
    await patiently(upstream.calls[0].gone.wait())


async def test_a_sane_request_id_travels_and_comes_back(front, upstream):
    """As it is."""
    answer = await front.get("/v1/models", ("x-request-id", "req-42"))
    assert upstream.calls[0].header("x-request-id") == ["req-42"]
    assert answer.header("x-request-id") == ["req-42"]


@pytest.mark.parametrize("given", [None, "x" * 129, "two words", "caf\xe9"])
async def test_a_missing_or_odd_request_id_is_replaced(front, upstream, given):
    """So that no client writes into our log what it likes; the engine and the client see the same new one."""
    answer = await front.get("/v1/models", *([("x-request-id", given)] if given else []))
    (ours,) = upstream.calls[0].header("x-request-id")
    assert answer.header("x-request-id") == [ours]
    assert ours != given
    assert len(ours) == 32


async def test_the_engines_own_request_id_wins(front, upstream):
    """vLLM sets it with --enable-request-id-headers."""

    @upstream.on("/v1/models")
    async def own(call):
        await call.answer(b"{}", 200, ("x-request-id", "theirs"))

    assert (await front.get("/v1/models")).header("x-request-id") == ["theirs"]


async def test_connections_are_reused(front, upstream):
    """A keep-alive client costs one connection to the engine, not one per request."""
    wire = await front.connect()
    for _ in range(5):
        await wire.request("POST", "/v1/completions", body=b"{}")
        assert (await wire.answer()).complete
    assert upstream.connections == 1


async def test_requests_at_the_engines_keepalive_limit_all_succeed(start_proxy, upstream):
    """The pool lets a connection go before the engine closes it, so no POST meets a closing one."""
    upstream.idle_seconds = 0.05
    async with start_proxy(keepalive_seconds=0.02) as front:
        wire = await front.connect()
        for _ in range(12):
            await wire.request("POST", "/v1/completions", body=b"{}")
            assert (await wire.answer()).status == 200
            await asyncio.sleep(0.05)


async def test_requests_leave_nothing_for_the_garbage_collector(front, upstream):
    """Cycles cost a third of the CPU per request: whatever a request held is freed by counting when it ends."""
    gc.collect()
    gc.disable()
    try:
        wire = await front.connect()
        for _ in range(5):
            await wire.request("POST", "/v1/completions", body=b"{}")
            await wire.answer()
        await wire.leave()
        await until(lambda: not front.proxy.clients)
        left = [thing for thing in gc.get_objects() if str(type(thing).__module__).startswith("gated_proxy")]
    finally:
        gc.enable()
    counts = Counter(type(thing).__name__ for thing in left)
    assert {"Proxy", "EngineConnection"} <= set(counts)  # it does look
    assert {"EngineExchange", "RequestHead", "ResponseHead", "IncomingRequest", "ClientConnection"}.isdisjoint(counts)


async def test_a_unix_socket_is_an_engine_too(start_proxy, upstream, tmp_path):
    """vLLM listens on one with --uds."""
    server = await upstream.listen_on(f"{tmp_path}/engine.sock")
    async with start_proxy(f"unix:{tmp_path}/engine.sock") as front:
        assert (await front.post("/v1/completions", b"hello")).body == b"hello"
    server.close()
    assert upstream.calls[0].header("host") == ["localhost"]


def test_an_upstream_of_another_kind_is_refused():
    """At once, with the forms that would do."""
    with pytest.raises(ValueError, match="unix:/path"):
        Proxy("localhost:8000", observer=ProxyTraffic())


async def test_the_observer_hears_of_every_request(front, upstream):
    """With labels from a bounded set, whatever the client sends."""
    await front.post("/v1/chat/completions", b"{}")
    await front.get("/v1/models/org%2Fname")
    wire = await front.connect()
    await wire.request("PROPFIND", "/whatever/it/is")
    await wire.answer()
    assert front.observed.started == 3
    assert [ended[:4] for ended in front.observed.ended] == [
        ("chat_completions", "POST", 200, "complete"),
        ("models", "GET", 200, "complete"),
        ("other", "other", 200, "complete"),
    ]
    assert all(0 < ended.first_byte_seconds <= ended.seconds for ended in front.observed.ended)


async def test_errors_have_the_openai_shape(start_proxy, unused_tcp_port):
    """So that clients show the sentence rather than a parse error."""
    async with start_proxy(f"http://127.0.0.1:{unused_tcp_port}") as front:
        answer = await front.get("/v1/models")
    error = json.loads(answer.body)["error"]
    assert answer.header("content-type") == ["application/json"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (502, None)
