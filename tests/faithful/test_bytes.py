"""What goes through is what came: bodies, headers, targets, and every framing that HTTP/1.1 has."""

import asyncio
import gzip

import pytest

from tests.faithful.fronts import PROXIES, fronted_by
from tests.patience import patiently

JSON = b'{"prompt":"x"}'
SPELLED = b'{ "b" : 1.0,\r\n "a":"\\u00e9", "a": 2e0, "t": "\xc3\xa9" }'
EVENTS = [b'data: {"n":%d,"t":"\r\n\xc3\xa9"}\n\n' % number for number in range(500)]
EVERY_BYTE = bytes(range(256)) * 300


async def test_a_counted_body_is_the_same_bytes_both_ways(through, engine):
    answer = await through.ask("POST", "/v1/x", body=EVERY_BYTE)
    assert (answer.status, answer.body, answer.complete, answer.framing) == (200, EVERY_BYTE, True, "counted")
    (call,) = engine.calls
    assert (call.body, call.header("content-length")) == (EVERY_BYTE, [str(len(EVERY_BYTE))])


async def test_a_json_body_keeps_its_spelling(through, engine):
    await through.ask("POST", "/v1/completions", ("content-type", "application/json"), body=SPELLED)
    assert engine.calls[0].body == SPELLED


async def test_a_plain_answer_is_the_same_bytes(through, engine):

    @engine.on("/v1/x")
    async def spell(call):
        await call.answer(SPELLED, 200, ("content-type", "application/json"))

    answer = await through.ask("GET", "/v1/x")
    assert (answer.body, answer.header("content-type")) == (SPELLED, ["application/json"])


async def test_a_streamed_answer_is_the_same_bytes(through, engine):

    @engine.on("/v1/completions")
    async def stream(call):
        await call.read()
        await call.begin(("content-type", "text/event-stream"))
        for event in EVENTS:
            await call.chunk(event)
        await call.end()

    answer = await through.ask("POST", "/v1/completions", ("content-type", "application/json"), body=JSON)
    assert (answer.status, answer.body, answer.complete) == (200, b"".join(EVENTS), True)


async def test_each_event_arrives_before_the_next_is_sent(through, engine):
    proceed = asyncio.Event()

    @engine.on("/v1/x")
    async def stream(call):
        await call.begin(("content-type", "text/event-stream"))
        for number in range(3):
            await call.chunk(b"data: %d\n\n" % number)
            await proceed.wait()
            proceed.clear()
        await call.end()

    client = await through.connect()
    await client.request("GET", "/v1/x")
    assert (await client.head()).status == 200
    for number in range(3):
        assert await patiently(client.chunk()) == b"data: %d\n\n" % number
        proceed.set()
    assert await client.chunk() == b""


async def test_an_answer_that_ends_with_its_connection_is_whole(through, engine):
    """HTTP/1.0's way, which an HTTP/1.1 server may use too."""

    @engine.on("/v1/x")
    async def old(call):
        await call.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + EVERY_BYTE)
        call.close()

    answer = await through.ask("GET", "/v1/x")
    assert (answer.status, answer.body, answer.complete) == (200, EVERY_BYTE, True)


async def test_an_http_1_0_answer_is_understood(through, engine):

    @engine.on("/v1/x")
    async def old(call):
        await call.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nhello")
        call.close()

    answer = await through.ask("GET", "/v1/x")
    assert (answer.status, answer.body, answer.complete) == (200, b"hello", True)


async def test_a_compressed_answer_stays_compressed(through, engine):
    packed = gzip.compress(SPELLED)

    @engine.on("/v1/x")
    async def zipped(call):
        await call.answer(packed, 200, ("content-encoding", "gzip"))

    answer = await through.ask("GET", "/v1/x", ("accept-encoding", "gzip"))
    assert (answer.body, answer.header("content-encoding")) == (packed, ["gzip"])
    assert engine.calls[0].header("accept-encoding") == ["gzip"]


async def test_a_compressed_upload_stays_compressed(through, engine):
    packed = gzip.compress(JSON)
    await through.ask("POST", "/v1/x", ("content-encoding", "gzip"), body=packed)
    assert (engine.calls[0].body, engine.calls[0].header("content-encoding")) == (packed, ["gzip"])


async def test_repeated_headers_stay_repeated_on_the_way_up(through, engine):
    await through.ask("GET", "/v1/x", ("x-tag", "one"), ("accept", "a/b"), ("x-tag", "two"), ("cookie", "a=1; b=2"))
    (call,) = engine.calls
    assert [call.header(name) for name in ("x-tag", "accept", "cookie")] == [["one", "two"], ["a/b"], ["a=1; b=2"]]


async def test_repeated_headers_stay_repeated_on_the_way_down(through, engine):

    @engine.on("/v1/x")
    async def cookies(call):
        await call.answer(b"{}", 200, ("set-cookie", "a=1"), ("x-one", "1"), ("set-cookie", "b=2"), ("x-one", "2"))

    answer = await through.ask("GET", "/v1/x")
    assert (answer.header("set-cookie"), answer.header("x-one")) == (["a=1", "b=2"], ["1", "2"])


async def test_header_values_keep_their_bytes(through, engine):
    values = ["caf\u00e9".encode().decode("latin-1"), "caf\xe9", 'a,  "b\t c"', "x" * 5000]
    sent = [(f"x-{number}", value) for number, value in enumerate(values)]

    @engine.on("/v1/x")
    async def mirror(call):
        await call.answer(b"{}", 200, *sent)

    answer = await through.ask("GET", "/v1/x", *sent)
    assert [engine.calls[0].header(name)[0] for name, _ in sent] == values
    assert [answer.header(name)[0] for name, _ in sent] == values


async def test_an_empty_header_value_stays_empty(through, engine):
    client = await through.connect()
    await client.send(b"GET /v1/x HTTP/1.1\r\nhost: s\r\nx-empty: \r\n\r\n")
    assert (await client.whole()).status == 200
    assert engine.calls[0].header("x-empty") == [""]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_every_ordinary_method_goes_through(through, engine, method):
    body = b"" if method in ("GET", "OPTIONS", "DELETE") else JSON
    answer = await through.ask(method, "/v1/x", ("content-type", "application/json"), body=body)
    assert (answer.status, answer.body) == (200, body)
    assert engine.calls[0].method == method


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models/org%2Fname",
        "/v1/models/a+b%20c?q=%2F+x&y=%20[z]&y=",
        "/v1/models?",
        "/v1/%7Etilde/~tilde?a=b?c=d",
        "/v1/models/caf%C3%A9?%63=%C3%A9",
        "/v1/x?next=//evil/../collective_rpc;a=b",
        "/v1/x?" + "q" * 6000,
    ],
    ids=["slash", "plus", "empty-query", "tilde", "escapes", "path-in-query", "long"],
)
async def test_the_target_is_sent_as_the_client_wrote_it(through, engine, target):
    await through.ask("GET", target)
    assert engine.calls[0].target == target


async def test_a_redirect_is_the_clients_to_follow(through, engine):

    @engine.on("/v1/x")
    async def redirect(call):
        await call.answer(b"", 307, ("location", "/v1/elsewhere"))

    answer = await through.ask("GET", "/v1/x")
    assert (answer.status, answer.header("location"), len(engine.calls)) == (307, ["/v1/elsewhere"], 1)


async def test_a_cookie_is_not_kept_for_the_next_caller(through, engine):

    @engine.on("/v1/x")
    async def cookies(call):
        await call.answer(b"{}", 200, ("set-cookie", "session=mine; path=/"))

    for _ in range(2):
        await through.ask("GET", "/v1/x")
    assert [call.header("cookie") for call in engine.calls] == [[], []]


@pytest.mark.parametrize(
    "framing", [("content-length", "1234"), ("transfer-encoding", "chunked")], ids=["counted", "chunked"]
)
async def test_head_is_answered_with_a_head_alone(through, engine, framing):

    @engine.on("/v1/x")
    async def head(call):
        await call.head(200, framing, ("x-end", "1"))

    client = await through.connect()
    for _ in range(2):
        await client.request("HEAD", "/v1/x")
        answer = await client.whole(method="HEAD")
        assert (answer.status, answer.header("x-end")) == (200, ["1"])
        if framing[0] == "content-length":
            assert answer.header("content-length") == ["1234"]
    await client.request("GET", "/v1/y")
    assert (await client.whole()).status == 200


@pytest.mark.parametrize(
    ("status", "headers"),
    [(204, ()), (304, (("content-length", "99"), ("etag", '"x"'))), (304, (("transfer-encoding", "chunked"),))],
    ids=["204", "304-counted", "304-chunked"],
)
async def test_answers_without_a_body_end_at_their_head(through, engine, status, headers):

    @engine.on("/v1/x")
    async def empty(call):
        await call.head(status, *headers)

    client = await through.connect()
    for _ in range(2):
        await client.request("GET", "/v1/x")
        answer = await client.whole()
        assert (answer.status, answer.header("etag")) == (status, [v for n, v in headers if n == "etag"])
    await client.request("GET", "/v1/y")
    assert (await client.whole()).status == 200


async def test_early_hints_come_before_the_answer(through, engine):

    @engine.on("/v1/x")
    async def hint(call):
        await call.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>; rel=preload\r\n\r\n" * 2)
        await call.answer(b"ok")

    client = await through.connect()
    await client.request("GET", "/v1/x")
    answer = await client.whole()
    assert (answer.status, answer.body, answer.interim) == (200, b"ok", [103, 103])


async def test_early_hints_are_not_held_back(through, engine):
    hinted = asyncio.Event()

    @engine.on("/v1/x")
    async def hint(call):
        await call.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>; rel=preload\r\n\r\n")
        await hinted.wait()
        await call.answer(b"ok")

    client = await through.connect()
    await client.request("GET", "/v1/x")
    head = await patiently(client.head())
    assert (head.status, ("link", "</a>; rel=preload") in head.headers) == (103, True)
    hinted.set()
    assert (await client.whole()).body == b"ok"


async def continue_if_asked(call):
    """What uvicorn does: 100 once somebody reads the body."""
    if call.header("expect"):
        await call.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    await call.answer(await call.read())


async def test_expect_100_continue_is_answered_once_before_the_body(through, engine):
    engine.on("/v1/x")(continue_if_asked)
    client = await through.connect()
    await client.request("POST", "/v1/x", ("content-length", str(len(JSON))), ("expect", "100-continue"))
    assert await patiently(client.reader.readuntil(b"\r\n\r\n")) == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(JSON)
    answer = await client.whole()
    assert (answer.status, answer.body, answer.interim) == (200, JSON, [])


async def test_expect_100_continue_may_come_with_the_body(through, engine):
    """A client need not wait; one 100 at most comes before the answer."""
    engine.on("/v1/x")(continue_if_asked)
    client = await through.connect()
    for _ in range(2):
        await client.request("POST", "/v1/x", ("expect", "100-continue"), body=JSON)
        answer = await client.whole()
        assert (answer.status, answer.body, answer.interim in ([], [100])) == (200, JSON, True)


async def test_a_refusal_instead_of_100_continue_reaches_the_client(through, engine):

    @engine.on("/v1/x")
    async def refuse(call):
        await call.answer(b"no", 401, ("connection", "close"))
        call.close()

    client = await through.connect()
    await client.request("POST", "/v1/x", ("content-length", "100000"), ("expect", "100-continue"))
    answer = await client.whole()
    assert (answer.status, answer.body) == (401, b"no")


async def test_trailers_of_the_answer_arrive(through, engine):

    @engine.on("/v1/x")
    async def stream(call):
        await call.begin(("trailer", "x-checksum"))
        await call.chunk(b"hello")
        await call.write(b"0\r\nx-checksum: abc\r\nx-more: 1\r\n\r\n")

    client = await through.connect()
    for _ in range(2):
        await client.request("GET", "/v1/x", ("te", "trailers"))
        answer = await client.whole()
        assert (answer.body, answer.complete) == (b"hello", True)
        assert answer.trailers == [("x-checksum", "abc"), ("x-more", "1")]


async def test_a_chunked_upload_goes_up_as_it_comes(through, engine):
    arrived = asyncio.Queue()

    @engine.on("/v1/x")
    async def listen(call):
        async for piece in call.pieces():
            arrived.put_nowait(piece)
        await call.answer()

    client = await through.connect()
    await client.request("POST", "/v1/x", ("transfer-encoding", "chunked"))
    for piece in (b"one", b"two", b"three"):
        await client.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        assert await patiently(arrived.get()) == piece
    await client.send(b"0\r\n\r\n")
    assert (await client.whole()).status == 200
    assert engine.calls[0].header("transfer-encoding") == ["chunked"]


@pytest.mark.parametrize(
    "body",
    [
        b"E\r\n" + JSON + b"\r\n0\r\n\r\n",
        b"00e;a=b\r\n" + JSON + b"\r\n000\r\nx-trailer: 1\r\n\r\n",
        b'1\r\n{\r\n7\r\n"prompt\r\n6\r\n":"x"}\r\n0\r\n\r\n',
    ],
    ids=["plain", "odd", "pieces"],
)
async def test_a_chunked_body_sent_at_once_is_whole(through, engine, body):

    @engine.on("/v1/x")
    async def listen(call):
        data = b""
        if call.header("content-length"):
            data = await call.read()
        else:
            while size := int((await call.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                data += (await call.reader.readexactly(size + 2))[:-2]
            while await call.reader.readuntil(b"\r\n") != b"\r\n":
                pass
        await call.answer(data)

    client = await through.connect()
    await client.send(b"POST /v1/x HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\n" + body)
    answer = await client.whole()
    assert (answer.status, answer.body) == (200, JSON)


async def test_an_empty_chunked_body_is_a_body(through, engine):
    client = await through.connect()
    await client.send(b"POST /v1/x HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
    assert (await client.whole()).status == 200
    assert engine.calls[0].body == b""


async def test_a_counted_upload_goes_up_as_it_comes(through, engine):
    arrived = asyncio.Event()

    @engine.on("/v1/x")
    async def listen(call):
        assert await call.reader.readexactly(3) == b"abc"
        arrived.set()
        assert await call.reader.readexactly(3) == b"def"
        await call.answer()

    client = await through.connect()
    await client.request("POST", "/v1/x", ("content-length", "6"))
    await client.send(b"abc")
    await patiently(arrived.wait())
    await client.send(b"def")
    assert (await client.whole()).status == 200
    assert engine.calls[0].header("content-length") == ["6"]
    assert engine.calls[0].header("transfer-encoding") == []


async def test_a_get_with_a_body_keeps_it(through, engine):
    assert (await through.ask("GET", "/v1/x", body=JSON)).body == JSON


async def test_a_post_without_a_body_stays_one(through, engine):
    client = await through.connect()
    await client.send(b"POST /v1/x HTTP/1.1\r\nhost: s\r\n\r\n")
    assert (await client.whole()).status == 200
    assert engine.calls[0].header("content-length") in ([], ["0"])


async def test_ten_megabytes_come_back_as_they_went(through, engine):
    size = 10 * 2**20
    sent = bytes(range(256)) * (size // 256)

    @engine.on("/v1/x")
    async def mirror(call):
        await call.begin()
        async for piece in call.pieces():
            await call.chunk(piece)
        await call.end()

    client = await through.connect()
    sending = asyncio.create_task(client.request("POST", "/v1/x", body=sent))
    answer = await client.whole()
    await sending
    assert answer.complete
    assert answer.body == sent


@fronted_by(*PROXIES)
async def test_headers_that_connection_names_end_at_the_proxy(through, engine):

    @engine.on("/v1/x")
    async def chatty(call):
        await call.answer(b"{}", 200, ("connection", "x-hop"), ("x-hop", "1"), ("x-end", "1"))

    answer = await through.ask(
        "GET", "/v1/x", ("connection", "keep-alive, X-Private"), ("x-private", "1"), ("x-e", "1")
    )
    (call,) = engine.calls
    assert (call.header("x-private"), call.header("x-e")) == ([], ["1"])
    assert (answer.header("x-hop"), answer.header("x-end")) == ([], ["1"])


@pytest.mark.parametrize(
    "name",
    [
        "traceparent",
        "tracestate",
        "baggage",
        "authorization",
        "x-api-key",
        "user-agent",
        "accept",
        "origin",
        "x-data-parallel-rank",
        "x_underscored",
    ],
)
async def test_end_to_end_headers_reach_the_engine(through, engine, name):
    await through.ask("GET", "/v1/x", (name, "their/value"))
    assert engine.calls[0].header(name) == ["their/value"]
