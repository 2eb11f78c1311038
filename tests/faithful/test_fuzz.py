"""Any bytes, cut anywhere: the engine never sees what the allow list refuses or two readers could read in two ways.

Hypothesis makes requests from pieces that are right, nearly right and wrong, mutates them, and sends them to the real
sidecar; the oracle behind it reads to the letter. It runs for a bounded time.
"""

import asyncio
import contextlib
import os
import time

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.faithful.fronts import fronted_by
from tests.faithful.oracle import Oracle, admitted, leads_to_control

# Longer looks deeper, for those who changed something.
SECONDS = float(os.environ.get("HIGHWATER_FUZZ_SECONDS", "10"))
TOGETHER = 8

one_of = st.sampled_from
METHODS = one_of([b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"get", b"CONNECT", b"PRI", b"G\0T", b"", b"POST POST"])
SEGMENTS = one_of(
    [
        b"v1",
        b"models",
        b"collective_rpc",
        b"sleep",
        b"..",
        b".",
        b"",
        b"%2e%2e",
        b"%2f",
        b"%5c",
        b"%00",
        b"%25",
        b";x",
        b"livez",
        b"health",
        b"COLLECTIVE_RPC",
        b"%63ollective_rpc",
        b"sl%65ep",
        b"\\",
        b"#",
        b"?",
        b"\xc3\xa9",
        b" ",
    ]
)
TARGETS = st.one_of(
    one_of([b"/v1/x", b"/v1/x?y=%2F", b"/livez", b"/collective_rpc", b"*", b"http://h/v1/x", b"http://h/sleep", b""]),
    st.lists(SEGMENTS, min_size=1, max_size=5).map(lambda parts: b"/" + b"/".join(parts)),
    st.binary(max_size=12).map(lambda raw: b"/v1/" + raw),
)
VERSIONS = one_of([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1.1 ", b""])
LINE_ENDS = one_of([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\n ", b"\r\r\n", b"\0\r\n", b""])
COLONS = one_of([b": "] * 8 + [b":", b" : ", b":\t", b"", b":\r\n ", b" "])
LENGTHS = one_of(
    [b"0", b"5", b"30", b"+5", b"-5", b"5, 5", b"5,6", b"0x5", b"", b"5 5", b"1e1", b"99999999999999999999"]
)
CODINGS = one_of(
    [b"chunked"] * 4
    + [b"Chunked", b"gzip, chunked", b"chunked, identity", b"identity", b"xchunked", b"\x0bchunked", b'"chunked"', b""]
)
FIELDS = st.one_of(
    st.tuples(one_of([b"host", b"Host"]), one_of([b"s", b"", b"a b", b"evil/../x"])),
    st.tuples(one_of([b"content-length", b"Content-Length", b"content_length", b"content-length "]), LENGTHS),
    st.tuples(one_of([b"transfer-encoding", b"Transfer-Encoding", b" transfer-encoding"]), CODINGS),
    st.tuples(st.just(b"connection"), one_of([b"close", b"keep-alive", b"content-length", b"upgrade", b"x, host, te"])),
    st.tuples(st.just(b"upgrade"), one_of([b"websocket", b"h2c", b"HTTP/2.0"])),
    st.tuples(st.just(b"expect"), one_of([b"100-continue", b"nonsense"])),
    st.tuples(st.just(b"x-request-id"), one_of([b"r", b"a b", b"\xff", b"x" * 200])),
    st.tuples(one_of([b"x", b"X-Y", b"x y", b"", b"x\0", b"(x)", b"trailer", b"te"]), st.binary(max_size=8)),
)
CHUNKS = st.lists(
    st.one_of(
        one_of([b"5\r\nhello\r\n", b"5;a=b\r\nhello\r\n", b"1\r\nx\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n"]),
        one_of([b"5\nhello\n", b"+5\r\nhello\r\n", b"5\r\nhelloXX", b"6\r\nhello\r\n", b" 5\r\nhello\r\n", b"\r\n"]),
        one_of([b"ffffffffffffffff5\r\n", b"0\n\n", b"0\r\ncontent-length: 5\r\n\r\n", b"5;\n\r\nhello\r\n"]),
    ),
    max_size=4,
).map(b"".join)
HIDDEN = b"POST /collective_rpc HTTP/1.1\r\nhost: s\r\ncontent-length: 0\r\n\r\n"
BODIES = st.one_of(st.just(b""), st.just(b"hello"), CHUNKS, st.binary(max_size=30), st.just(HIDDEN))


@st.composite
def messages(draw) -> bytes:
    """A request, right or nearly right."""
    line = b" ".join([draw(METHODS), draw(TARGETS), draw(VERSIONS)]) + draw(LINE_ENDS)
    fields = draw(st.lists(FIELDS, max_size=4))
    if draw(st.integers(0, 5)):
        fields.insert(0, (b"host", b"s"))
    head = b"".join(name + draw(COLONS) + value + draw(LINE_ENDS) for name, value in fields)
    return line + head + draw(LINE_ENDS) + draw(BODIES)


GOOD = one_of(
    [
        b"GET /v1/x HTTP/1.1\r\nhost: s\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: s\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: s\r\ncontent-length: 5\r\n\r\nhello",
        b"POST /v1/x HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"POST /livez HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"POST /collective_rpc HTTP/1.1\r\nhost: s\r\ncontent-length: %d\r\n\r\n%s" % (len(HIDDEN), HIDDEN),
        b"HEAD /v1/x HTTP/1.1\r\nhost: s\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: s\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\nhello",
    ]
)


@st.composite
def mutants(draw) -> bytes:
    """Good requests with a few bytes changed, doubled or lost."""
    data = bytearray(b"".join(draw(st.lists(GOOD, min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        change = draw(st.integers(0, 3))
        odd = draw(one_of([b"\r", b"\n", b"\0", b" ", b"\t", b":", b"\r\n", b"\x0b", b"\xff", b"0", b",", b";", b"%"]))
        if change == 0:
            data[at : at + 1] = odd
        elif change == 1:
            data[at:at] = odd
        elif change == 2:
            del data[at : at + draw(st.integers(1, 4))]
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 30))]
    return bytes(data)


@st.composite
def conversations(draw) -> list[bytes]:
    """What is sent on one connection, in segments."""
    data = b"".join(draw(st.lists(st.one_of(messages(), mutants(), GOOD), min_size=1, max_size=3)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def converse(through, segments: list[bytes]) -> None:
    """Send them, and leave when nothing more comes."""
    client = await through.connect(limit=2**16)
    with contextlib.suppress(ConnectionError, TimeoutError):
        for segment in segments:
            await client.send(segment)
            if len(segments) > 1:
                await asyncio.sleep(0.001)  # for a segment of its own: there is nothing to wait for
        await client.rest(0.02)
    client.writer.transport.abort()


@fronted_by("sidecar")
def test_whatever_clients_send_the_engine_sees_only_plain_and_admitted_requests(through, engine_port):
    sent = 0
    began = time.monotonic()

    @settings(
        max_examples=25,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),  # a failure is shown as it came: shrinking it would take minutes
        suppress_health_check=list(HealthCheck),
        database=None,
        print_blob=True,
    )
    @given(together=st.lists(conversations(), min_size=TOGETHER, max_size=TOGETHER))
    def attack(together: list[list[bytes]]) -> None:
        nonlocal sent
        sent += len(together)
        runner.run(play(together))

    async def play(together: list[list[bytes]]) -> None:
        async with Oracle(engine_port) as oracle:
            await asyncio.gather(*(converse(through, segments) for segments in together))
            assert (await through.ask("GET", "/livez")).status == 200
            await through.settle()
            through.clients.clear()
            assert oracle.violations == [], together
            assert [seen.target for seen in oracle.requests if leads_to_control(seen.target)] == [], together
            assert [seen for seen in oracle.requests if not admitted(seen)] == [], together

    with asyncio.Runner() as runner:
        while time.monotonic() - began < SECONDS:
            attack()
    assert sent > 100
