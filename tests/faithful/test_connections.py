"""One connection, many requests: kept alive, pipelined, cut anywhere by the network, old clients, early answers."""

import asyncio
import contextlib
import json

import pytest

from tests.faithful.fronts import PROXIES, fronted_by
from tests.patience import patiently

JSON = b'{"n":%d}'


def get(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nhost: s\r\n\r\n".encode()


def post(target: str, body: bytes) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def post_chunked(target: str, body: bytes) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    half = len(body) // 2
    chunks = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:half], body[half:], b""))
    return head.encode() + b"".join(chunks)


@pytest.fixture
def named(engine):
    """The engine tells in each answer which request it is for."""

    async def name(call):
        body = await call.read()
        await call.answer(f"{call.method} {call.target} ".encode() + body)

    for path in ("/v1/a", "/v1/b", "/v1/c", "/v1/d"):
        engine.on(path)(name)
    return engine


MIXED = {
    "gets": ([get("/v1/a"), get("/v1/b?x=%2F"), get("/v1/c")], [b"GET /v1/a ", b"GET /v1/b?x=%2F ", b"GET /v1/c "]),
    "counted": (
        [post("/v1/a", JSON % 1), post("/v1/b", JSON % 22), get("/v1/c")],
        [b'POST /v1/a {"n":1}', b'POST /v1/b {"n":22}', b"GET /v1/c "],
    ),
    "chunked": (
        [post_chunked("/v1/a", JSON % 1), post("/v1/b", JSON % 22), post_chunked("/v1/c", JSON % 3)],
        [b'POST /v1/a {"n":1}', b'POST /v1/b {"n":22}', b'POST /v1/c {"n":3}'],
    ),
}


async def test_a_connection_is_kept_for_the_next_request(through, named):
    client = await through.connect()
    for number in range(20):
        await client.send(post("/v1/a", JSON % number))
        assert (await client.whole()).body == b"POST /v1/a " + JSON % number
    if through.kind != "vllm-router":  # which has a mind of its own
        assert named.connections_used() == 1


async def test_connection_close_is_kept(through, named):
    client = await through.connect()
    await client.request("GET", "/v1/a", ("connection", "close"))
    assert (await client.whole()).body == b"GET /v1/a "
    if through.kind != "direct":  # this engine leaves it to the client
        assert await client.rest() == b""


@pytest.mark.parametrize("said", [[("connection", "close")], []], ids=["said", "without-a-word"])
async def test_an_engine_that_closes_after_its_answer_costs_the_client_nothing(through, engine, said):

    @engine.on("/v1/x")
    async def close(call):
        await call.answer(await call.read(), 200, *said)
        call.close()

    client = await through.connect()
    for _ in range(3):
        await client.send(post("/v1/x", JSON % 1))
        assert (await client.whole()).body == JSON % 1
        await through.settle()
        if through.kind == "direct":
            await client.leave()
            client = await through.connect()


@pytest.mark.parametrize("kind", MIXED)
async def test_pipelined_requests_are_answered_in_order(through, named, kind):
    requests, answers = MIXED[kind]
    client = await through.connect()
    await client.send(b"".join(requests))
    assert [(await client.whole()).body for _ in requests] == answers


@pytest.mark.parametrize("kind", MIXED)
async def test_pipelined_requests_may_be_cut_at_every_byte(through, named, kind):
    requests, answers = MIXED[kind]
    data = b"".join(requests)
    clients = [await through.connect(limit=2**16) for _ in range(1, len(data))]
    for border, client in enumerate(clients, 1):
        await client.send(data[:border])
    await through.settle()
    for border, client in enumerate(clients, 1):
        await client.send(data[border:])
    for border, client in enumerate(clients, 1):
        assert [(await client.whole()).body for _ in requests] == answers, border


async def test_pipelined_requests_may_come_byte_by_byte(through, named):
    requests, answers = MIXED["chunked"]
    client = await through.connect()
    for byte in b"".join(requests):
        await client.send(bytes([byte]))
        await asyncio.sleep(0.0005)  # for a segment of its own: there is nothing to wait for
    assert [(await client.whole()).body for _ in requests] == answers


async def test_a_pipelined_request_waits_for_a_slow_answer(through, named):
    go = asyncio.Event()

    @named.on("/v1/slow")
    async def slow(call):
        await go.wait()
        await call.answer(b"slow")

    client = await through.connect()
    await client.send(get("/v1/slow") + get("/v1/a") + get("/v1/slow") + post("/v1/b", JSON % 2))
    await through.settle()
    go.set()
    expected = [b"slow", b"GET /v1/a ", b"slow", b'POST /v1/b {"n":2}']
    assert [(await client.whole()).body for _ in expected] == expected


async def test_a_pipelined_request_waits_for_a_stream(through, named):
    go = asyncio.Event()

    @named.on("/v1/stream")
    async def stream(call):
        await call.begin()
        await call.chunk(b"one")
        await go.wait()
        await call.chunk(b"two")
        await call.end()

    client = await through.connect()
    await client.send(get("/v1/stream") + get("/v1/a"))
    await through.settle()
    go.set()
    assert [(await client.whole()).body for _ in range(2)] == [b"onetwo", b"GET /v1/a "]


async def test_answers_without_a_body_do_not_shift_pipelined_ones(through, named):

    @named.on("/v1/204")
    async def nothing(call):
        await call.head(204)

    @named.on("/v1/304")
    async def unchanged(call):
        await call.head(304, ("content-length", "17"))

    @named.on("/v1/head")
    async def tell(call):
        await call.head(200, ("content-length", "17"))

    client = await through.connect()
    head = get("/v1/head").replace(b"GET", b"HEAD")
    await client.send(get("/v1/204") + head + get("/v1/a") + get("/v1/304") + head + post("/v1/b", b"{}"))
    methods = ["GET", "HEAD", "GET", "GET", "HEAD", "POST"]
    answers = [await client.whole(method=method) for method in methods]
    assert [answer.status for answer in answers] == [204, 200, 200, 304, 200, 200]
    assert [answers[2].body, answers[5].body] == [b"GET /v1/a ", b"POST /v1/b {}"]


async def test_many_pipelined_requests_are_all_answered(through, named):
    client = await through.connect()
    sending = asyncio.create_task(client.send(b"".join(post("/v1/a", JSON % number) for number in range(200))))
    for number in range(200):
        assert (await client.whole()).body == b"POST /v1/a " + JSON % number
    await sending


OWN = [get("/livez"), post("/v1/a", JSON % 1), get("/livez"), get("/livez"), get("/v1/b"), get("/livez")]


def shown(answers) -> list[bytes]:
    """The bodies, where a front answers `/livez` itself or leaves it to the engine."""
    return [b"alive" if answer.body in (b'{"status":"ok"}', b"") else answer.body for answer in answers]


LIVELY = [b"alive", b'POST /v1/a {"n":1}', b"alive", b"alive", b"GET /v1/b ", b"alive"]


async def test_own_paths_and_proxied_ones_share_a_connection(through, named):
    client = await through.connect()
    answers = []
    for request in OWN:
        await client.send(request)
        answers.append(await client.whole())
    assert shown(answers) == LIVELY


async def test_own_paths_and_proxied_ones_may_be_pipelined(through, named):
    client = await through.connect()
    await client.send(b"".join(OWN))
    assert shown([await client.whole() for _ in OWN]) == LIVELY


async def test_own_paths_and_proxied_ones_may_be_cut_at_every_byte(through, named):
    data = b"".join(OWN[:3])
    clients = [await through.connect(limit=2**16) for _ in range(1, len(data))]
    for border, client in enumerate(clients, 1):
        await client.send(data[:border])
    await through.settle()
    for border, client in enumerate(clients, 1):
        await client.send(data[border:])
    for border, client in enumerate(clients, 1):
        assert shown([await client.whole() for _ in range(3)]) == LIVELY[:3], border


@fronted_by("sidecar")
async def test_refused_and_proxied_requests_share_a_connection(through, named):
    client = await through.connect()
    await client.send(get("/v1/a") + post("/collective_rpc", JSON % 1) + get("/v1/b") + get("/nowhere") + get("/v1/c"))
    answers = [await client.whole() for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 403, 200, 404, 200]
    assert json.loads(answers[1].body)["error"]["code"] == "forbidden"
    assert [call.target for call in named.calls] == ["/v1/a", "/v1/b", "/v1/c"]


@fronted_by("sidecar")
async def test_own_paths_with_bodies_do_not_shift_the_next_request(through, named):
    client = await through.connect()
    own = [post("/memory/marks", b'{"name":"here"}'), post_chunked("/memory/marks", b'{"name":"there"}')]
    own += [get("/livez").replace(b"\r\n\r\n", b"\r\ncontent-length: 5\r\n\r\nhello"), post("/livez", JSON % 3)]
    for request in own:
        await client.send(request.replace(b"host: s", b"host: localhost") + get("/v1/a"))
    answers = [await client.whole() for _ in range(2 * len(own))]
    assert [answer.status for answer in answers[::2]] == [201, 201, 200, 405]
    assert [answer.body for answer in answers[1::2]] == [b"GET /v1/a "] * len(own)


@fronted_by(*PROXIES)
async def test_an_http_1_0_client_gets_a_stream_without_chunks(through, engine):

    @engine.on("/v1/x")
    async def stream(call):
        await call.begin(("content-type", "text/event-stream"))
        for number in range(3):
            await call.chunk(b"data: %d\n\n" % number)
        await call.end()

    client = await through.connect()
    await client.send(b"GET /v1/x HTTP/1.0\r\n\r\n")
    answer = await client.whole()
    assert (answer.status, answer.framing, answer.complete) == (200, "close", True)
    assert answer.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


@fronted_by(*PROXIES)
async def test_an_http_1_0_client_that_would_keep_alive_gets_no_chunks_either(through, engine):
    """What it cannot read it must not be sent, whatever it says of the connection."""

    @engine.on("/v1/x")
    async def stream(call):
        await call.begin()
        await call.chunk(b"hello")
        await call.end()

    client = await through.connect()
    await client.send(b"GET /v1/x HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    answer = await client.whole()
    assert (answer.header("transfer-encoding"), answer.body, answer.complete) == ([], b"hello", True)
    assert await client.rest() == b""


async def test_an_http_1_0_client_gets_a_counted_answer(through, named):
    client = await through.connect()
    await client.send(b"POST /v1/a HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n" + JSON % 1)
    answer = await client.whole()
    assert (answer.status, answer.body, answer.complete) == (200, b'POST /v1/a {"n":1}', True)
    if through.kind != "direct":  # this engine knows no HTTP/1.0
        assert await client.rest() == b""


@fronted_by(*PROXIES)
async def test_an_http_1_0_client_sees_no_early_hints(through, engine):
    """RFC 9110 15.2: no 1xx for it."""

    @engine.on("/v1/x")
    async def hint(call):
        await call.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        await call.answer(b"ok")

    client = await through.connect()
    await client.send(b"GET /v1/x HTTP/1.0\r\n\r\n")
    answer = await client.whole()
    assert (answer.status, answer.body, answer.interim) == (200, b"ok", [])


@fronted_by(*PROXIES)
async def test_a_cut_stream_to_an_http_1_0_client_is_no_clean_end(through, engine):
    """It has no last chunk to miss: only a reset tells it."""
    seen = asyncio.Event()

    @engine.on("/v1/x")
    async def stream(call):
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await seen.wait()
        call.die()

    client = await through.connect()
    await client.send(b"GET /v1/x HTTP/1.0\r\n\r\n")
    await client.head()
    assert await patiently(client.reader.readexactly(9)) == b"data: 1\n\n"
    seen.set()
    with pytest.raises(ConnectionError):
        await patiently(client.reader.read())


@pytest.mark.parametrize("manners", ["stays", "closes"])
async def test_an_early_error_reaches_a_client_that_still_sends(through, engine, manners):

    @engine.on("/v1/x")
    async def refuse(call):
        await call.answer(b'{"error":"Unauthorized"}', 401, *([("connection", "close")] * (manners == "closes")))
        if manners == "closes":
            call.close()
        else:
            await call.wait_until_gone()

    client = await through.connect()
    await client.request("POST", "/v1/x", ("content-length", "1000000"))
    await client.send(bytes(1000))
    answer = await client.whole()
    assert (answer.status, answer.body, answer.complete) == (401, b'{"error":"Unauthorized"}', True)


@fronted_by("sidecar")
@pytest.mark.parametrize("framing", ["counted", "chunked"])
async def test_what_follows_an_early_error_is_the_next_request_or_nothing(through, engine, framing):
    asked = asyncio.Event()

    @engine.on("/v1/x")
    async def refuse(call):
        await call.answer(b"no", 401)
        asked.set()
        await call.wait_until_gone()

    inner = get("/v1/smuggled") * 100
    client = await through.connect()
    if framing == "counted":
        await client.send(post("/v1/x", inner)[: -len(inner)])
    else:
        await client.request("POST", "/v1/x", ("transfer-encoding", "chunked"))
    assert (await client.whole()).status == 401
    body = inner if framing == "counted" else b"%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await client.send(body + get("/v1/next"))
        assert (await client.whole()).status in (200, 400)
    await through.settle()
    assert {call.target for call in engine.calls} <= {"/v1/x", "/v1/next", "/v1/settle"}
