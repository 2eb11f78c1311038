"""Sizes and times that are bounded, and the headers that are the proxy's own affair."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from tests.faithful.fronts import Profile, fronted_by
from tests.patience import LIMIT_SECONDS, patiently, until

IMPATIENT = Profile(
    "impatient",
    sidecar={"HIGHWATER_PROXY__FIRST_BYTE_SECONDS": "0.4", "HIGHWATER_PROXY__IDLE_SECONDS": "0.4"},
    nginx=("client_max_body_size 256m;", "proxy_read_timeout 400ms;", "proxy_send_timeout 400ms;"),
)
SMALL = Profile(
    "small",
    sidecar={"HIGHWATER_PROXY__MAX_HEADER_BYTES": "8192", "HIGHWATER_PROXY__MAX_BODY_BYTES": "100000"},
    nginx=("client_max_body_size 100000;",),
)
JSON = (("content-type", "application/json"),)
ATTEMPTS = 5
T = TypeVar("T")


async def comes_to(attempt: Callable[[], Awaitable[T]], expected: T) -> None:
    """Assert that an attempt gives this: one that a limit forbids gives it never, however often it is tried.

    A front cannot tell an engine that the machine holds up for a while, or itself, from one that is too slow.
    """
    for _ in range(ATTEMPTS):
        found = await attempt()
        if found == expected:
            return
    assert found == expected


def message_of(answer) -> str:
    """What an API client would show."""
    return json.loads(answer.body)["error"]["message"]


class TestHeads:
    """Of requests: 64 KiB, unless told otherwise."""

    async def test_a_head_of_30_kilobytes_passes(self, through, engine):
        sent = [(f"x-long-{number}", "x" * 5000) for number in range(6)]
        answer = await through.ask("GET", "/v1/x", *sent)
        assert answer.status == 200
        assert [engine.calls[0].header(name)[0] for name, _ in sent] == [value for _, value in sent]

    @fronted_by("sidecar", "vllm-router")
    @pytest.mark.parametrize(
        "head",
        [
            b"x-long: " + b"x" * 2_000_000 + b"\r\n",
            b"".join(b"x-%d: %s\r\n" % (number, b"x" * 100) for number in range(20_000)),
            b"x-endless: " + b"x" * 2_000_000,
            b"x" * 2_000_000,
        ],
        ids=["one-header", "many-headers", "without-an-end", "a-name"],
    )
    async def test_a_head_over_the_cap_is_a_431(self, through, engine, head):
        answer = await through.say(b"GET /v1/x HTTP/1.1\r\nhost: s\r\n" + head + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert engine.calls == []

    @fronted_by("sidecar", "nginx", "vllm-router")
    async def test_a_target_over_the_cap_is_refused(self, through, engine):
        answer = await through.say(b"GET /v1/x?" + b"q" * 2_000_000 + b" HTTP/1.1\r\nhost: s\r\n\r\n")
        assert answer[:12] in (b"HTTP/1.1 414", b"HTTP/1.1 431")
        assert engine.calls == []

    @fronted_by("sidecar")
    async def test_a_second_head_is_capped_too(self, through, engine):
        client = await through.connect()
        head = [(f"x-{number}", "x" * 5000) for number in range(10)]
        for _ in range(3):
            await client.request("GET", "/v1/x", *head)
            assert (await client.whole()).status == 200
        with contextlib.suppress(ConnectionError):
            await client.request("GET", "/v1/x", *head * 10)
        assert (await client.whole()).status == 431
        assert len(engine.calls) == 3

    @fronted_by("sidecar")
    @pytest.mark.parametrize(
        ("start", "more"),
        [
            (b"5;x=", b"x"),
            (b"0\r\nx-trailer: ", b"x"),
            (b"0\r\nx-tr", b"x"),
            (b"0\r\n", b"x: yyyyyyyyyyy\r\n"),
            (b"0", b"0"),
            (b"", b"0"),
        ],
        ids=["extension", "trailer", "trailer-name", "trailers", "size", "no-size"],
    )
    async def test_what_else_is_read_line_by_line_is_capped_too(self, through, engine, start, more):

        @engine.on("/v1/x")
        async def listen(call):
            await call.wait_until_gone()
            call.close()

        client = await through.connect()
        await client.request("POST", "/v1/x", ("transfer-encoding", "chunked"))
        with contextlib.suppress(ConnectionError):
            await client.send(start + more * (2**20 // len(more)))
        answer = await client.rest()
        assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 431", b"HTTP/1.1 502", b"")


@fronted_by("sidecar")
class TestSmallHeads:
    """The cap as a setting."""

    @pytest.fixture
    def profile(self) -> Profile:
        return SMALL

    @pytest.mark.parametrize(("length", "status"), [(7000, 200), (8300, 431)])
    @pytest.mark.usefixtures("engine")
    async def test_the_cap_is_a_setting(self, through, length, status):
        answer = await through.ask("GET", "/v1/x", ("x-long", "x" * length))
        assert answer.status == status
        if status == 431:
            assert "proxy.max_header_bytes" in message_of(answer)


@fronted_by("sidecar", "nginx")
class TestBodies:
    """Of requests: `proxy.max_body_bytes`, here 100,000."""

    @pytest.fixture
    def profile(self) -> Profile:
        return SMALL

    @pytest.mark.parametrize("framing", ["counted", "chunked"])
    @pytest.mark.usefixtures("engine")
    async def test_a_body_at_the_cap_passes(self, through, framing):
        body = bytes(100_000)
        if framing == "counted":
            answer = await through.ask("POST", "/v1/x", body=body)
        else:
            client = await through.connect()
            await client.request("POST", "/v1/x", ("transfer-encoding", "chunked"))
            await client.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            answer = await client.whole()
        assert (answer.status, answer.body) == (200, body)

    async def test_a_declared_body_over_the_cap_is_a_413_at_once(self, through, engine):
        client = await through.connect()
        await client.request("POST", "/v1/x", ("content-length", "100001"), ("expect", "100-continue"))
        answer = await client.whole()
        assert (answer.status, answer.interim, engine.calls) == (413, [], [])

    async def test_a_chunked_body_over_the_cap_is_stopped_on_its_way(self, through, engine):
        begun, broken = asyncio.Event(), asyncio.Event()

        @engine.on("/v1/x")
        async def listen(call):
            begun.set()
            try:
                await call.read()
            except (asyncio.IncompleteReadError, ConnectionError):
                broken.set()
                raise

        client = await through.connect()
        await client.request("POST", "/v1/x", ("transfer-encoding", "chunked"))
        await client.send(b"8000\r\n" + bytes(0x8000) + b"\r\n")
        await patiently(begun.wait())
        with contextlib.suppress(ConnectionError):
            await client.send((b"8000\r\n" + bytes(0x8000) + b"\r\n") * 4)
        assert (await client.whole()).status == 413
        await patiently(broken.wait())

    @pytest.mark.usefixtures("engine")
    async def test_one_chunk_over_the_cap_is_a_413(self, through):
        client = await through.connect()
        await client.request("POST", "/v1/x", ("transfer-encoding", "chunked"))
        with contextlib.suppress(ConnectionError):
            await client.send(b"fffffff\r\n" + bytes(200_000))
        assert (await client.whole()).status == 413

    @pytest.mark.usefixtures("engine")
    async def test_a_413_reaches_a_client_that_only_writes(self, through):
        """One that sends its whole body before it reads: no reset may overtake the answer."""
        client = await through.connect()
        with contextlib.suppress(ConnectionError):
            await client.request("POST", "/v1/x", body=bytes(1_000_000))
        assert (await client.whole()).status == 413


async def test_the_413_names_the_setting(fronts, engine):
    front = fronts.get("sidecar", SMALL)
    answer = await front.ask("POST", "/v1/x", ("content-length", "100001"))
    error = json.loads(answer.body)["error"]
    assert (error["code"], error["type"]) == ("body_too_large", "request_too_large")
    assert "proxy.max_body_bytes" in error["message"]


@fronted_by("sidecar", "nginx")
class TestTime:
    """Here 0.4 s to the first byte, and between two pieces."""

    @pytest.fixture
    def profile(self) -> Profile:
        return IMPATIENT

    async def test_an_engine_that_never_answers_is_a_504(self, through, engine):

        @engine.on("/v1/x")
        async def think(call):
            await call.read()
            await call.wait_until_gone()

        client = await through.connect()
        await client.request("POST", "/v1/x", *JSON, body=b"{}")
        assert (await client.whole()).status == 504
        await patiently(engine.calls[0].gone.wait())

    @pytest.mark.usefixtures("engine")
    async def test_the_wait_begins_when_the_request_has_been_sent(self, through):

        async def attempt() -> bytes:
            client = await through.connect()
            await client.request("POST", "/v1/x", ("content-length", "6"))
            for _ in range(6):
                await asyncio.sleep(0.12)  # what is tested is that time goes by
                await client.send(b"x")
            return (await client.whole()).body

        await comes_to(attempt, b"xxxxxx")

    async def test_an_answer_that_stands_still_is_cut(self, through, engine):

        @engine.on("/v1/x")
        async def stall(call):
            await call.begin()
            await call.chunk(b"data: 1\n\n")
            await call.wait_until_gone()

        client = await through.connect()
        await client.request("GET", "/v1/x")
        answer = await client.whole()
        assert (answer.status, answer.body, answer.complete) == (200, b"data: 1\n\n", False)
        await patiently(engine.calls[0].gone.wait())

    async def test_a_stream_may_take_as_long_as_it_likes(self, through, engine):

        @engine.on("/v1/x")
        async def stream(call):
            await call.begin()
            for number in range(8):
                await call.chunk(b"%d" % number)
                await asyncio.sleep(0.16)  # what is tested is that time goes by
            await call.end()

        async def attempt() -> tuple[bytes, bool]:
            answer = await through.ask("GET", "/v1/x")
            return answer.body, answer.complete

        await comes_to(attempt, (b"01234567", True))


@pytest.fixture(scope="session")
def black_hole():
    """A port that takes no connection and refuses none."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@fronted_by("sidecar", "nginx")
class TestNoConnection:
    """An engine whose host drops packets: here a listener whose backlog is full."""

    @pytest.fixture
    def profile(self, black_hole) -> Profile:
        return Profile(
            "black-hole",
            sidecar={"HIGHWATER_PROXY__CONNECT_SECONDS": "0.3"},
            nginx=("proxy_connect_timeout 300ms;",),
            engine_port=black_hole,
        )

    async def test_a_connect_that_takes_too_long_is_a_504(self, through):
        client = await through.connect()
        await client.request("POST", "/v1/x", *JSON, body=b"{}")
        assert (await client.whole()).status == 504


@fronted_by("sidecar", "nginx")
class TestLeavingWithinTheConnect:
    """The same engine, and a time to connect that is over after the test."""

    @pytest.fixture
    def profile(self, black_hole) -> Profile:
        return Profile(
            "long-connect",
            sidecar={"HIGHWATER_PROXY__CONNECT_SECONDS": f"{4 * LIMIT_SECONDS:.0f}"},
            nginx=(f"proxy_connect_timeout {4 * LIMIT_SECONDS:.0f}s;",),
            engine_port=black_hole,
        )

    async def test_a_client_that_leaves_within_the_connect_leaves_nothing(self, through):
        before = through.open_files()
        clients = [await through.connect() for _ in range(8)]
        for client in clients:
            await client.request("POST", "/v1/x", *JSON, body=b"{}")
        # Both sockets of each: the client's, and the one that connects to the engine.
        await until(lambda: through.open_files() >= before + 2 * len(clients), pause_seconds=0.01)
        for client in clients:
            client.reset()
        await until(lambda: through.open_files() <= before + 1, pause_seconds=0.01)


@fronted_by("sidecar")
class TestRequestIds:
    """The sidecar makes an id if the client sends none that is fit for a log."""

    @pytest.mark.parametrize("given", ["r", "req-42", "!~" * 64, "a,b;c=d%0d%0a"])
    async def test_a_sane_request_id_travels_and_comes_back(self, through, engine, given):
        answer = await through.ask("GET", "/v1/x", ("x-request-id", given))
        assert (engine.calls[0].header("x-request-id"), answer.header("x-request-id")) == ([given], [given])

    @pytest.mark.parametrize("given", [None, "", "x" * 129, "two words", "caf\xe9", "a\tb"])
    async def test_a_missing_or_odd_one_is_replaced(self, through, engine, given):
        answer = await through.ask("GET", "/v1/x", *([("X-Request-ID", given)] if given is not None else []))
        (ours,) = engine.calls[0].header("x-request-id")
        assert answer.header("x-request-id") == [ours]
        assert ours != given
        assert 8 <= len(ours) <= 128

    async def test_two_of_them_are_one_in_the_end(self, through, engine):
        answer = await through.ask("GET", "/v1/x", ("x-request-id", "one"), ("x-request-id", "two"))
        (ours,) = engine.calls[0].header("x-request-id")
        assert answer.header("x-request-id") == [ours]

    @pytest.mark.usefixtures("engine")
    async def test_every_request_of_a_connection_has_its_own(self, through):
        client = await through.connect()
        await client.send(b"GET /v1/x HTTP/1.1\r\nhost: s\r\n\r\n" * 3)
        answers = [await client.whole() for _ in range(3)]
        assert len({tuple(answer.header("x-request-id")) for answer in answers}) == 3

    async def test_the_engines_own_wins(self, through, engine):
        """vLLM sets it with --enable-request-id-headers."""

        @engine.on("/v1/x")
        async def own(call):
            await call.answer(b"{}", 200, ("x-request-id", "theirs"))

        assert (await through.ask("GET", "/v1/x")).header("x-request-id") == ["theirs"]

    @pytest.mark.usefixtures("engine")
    async def test_refusals_carry_it_too(self, through):
        answer = await through.ask("POST", "/v1/x", ("x-request-id", "r-9"), ("content-length", str(2**40)))
        assert (answer.status, answer.header("x-request-id")) == (413, ["r-9"])


FORWARDED = [
    ("forwarded", "for=192.0.2.60;proto=http;by=203.0.113.43"),
    ("x-forwarded-for", "192.0.2.1, 198.51.100.7"),
    ("x-forwarded-for", "203.0.113.9"),
    ("x-forwarded-proto", "https"),
    ("x-forwarded-host", "example.org"),
    ("x-real-ip", "192.0.2.1"),
    ("via", "1.1 somewhere"),
]


class TestForwardingPassed:
    """With `proxy.forwarded` at `pass`: for an engine whose other callers are believed about it."""

    @pytest.fixture
    def profile(self) -> Profile:
        return Profile("forwarding-passed", sidecar={"HIGHWATER_PROXY__FORWARDED": "pass"})

    @fronted_by("sidecar", "nginx")
    async def test_forwarding_headers_go_on_as_they_came(self, through, engine):
        await through.ask("GET", "/v1/x", *FORWARDED)
        names = dict(FORWARDED)
        assert [(n.lower(), v) for n, v in engine.calls[0].headers if n.lower() in names] == FORWARDED

    @fronted_by("sidecar")
    async def test_nothing_is_added_but_host_and_request_id(self, through, engine):
        await through.ask("GET", "/v1/x", ("x-tag", "1"))
        await through.ask("POST", "/v1/x", ("x-tag", "1"), body=b"{}")
        names = [sorted(name.lower() for name, _ in call.headers) for call in engine.calls]
        assert names == [["host", "x-request-id", "x-tag"], ["content-length", "host", "x-request-id", "x-tag"]]
        assert engine.calls[0].header("host") == [f"127.0.0.1:{engine.port}"]


@fronted_by("sidecar")
async def test_the_clients_address_is_added_behind_what_it_says(through, engine):
    """vLLM's server believes the last address of a line that comes from loopback: it must be one that nobody chose."""
    await through.ask("GET", "/v1/x", *FORWARDED)
    await through.ask("GET", "/v1/x")
    first, second = engine.calls
    assert first.header("x-forwarded-for") == ["192.0.2.1, 198.51.100.7, 203.0.113.9, 127.0.0.1"]
    assert [first.header(f"x-forwarded-{name}") for name in ("proto", "host")] == [["https"], ["example.org"]]
    assert [second.header(f"x-forwarded-{name}") for name in ("for", "proto")] == [["127.0.0.1"], ["http"]]
    assert first.header("via") == ["1.1 somewhere"]


@fronted_by("sidecar")
async def test_nothing_is_added_to_the_answer_but_the_request_id(through, engine):

    @engine.on("/v1/x")
    async def serve(call):
        await call.answer(b"{}", 200, ("x-tag", "1"), ("server", "uvicorn"))

    answer = await through.ask("GET", "/v1/x")
    assert sorted(name.lower() for name, _ in answer.headers) == ["content-length", "server", "x-request-id", "x-tag"]
