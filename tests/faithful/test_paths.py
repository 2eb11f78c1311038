"""However a path is written, none that some reader takes for one of the engine's control paths gets there."""

import contextlib

import pytest

from tests.faithful.fronts import fronted_by
from tests.faithful.oracle import admitted, leads_to_control, statuses

PATHS = {
    "plain": "/collective_rpc",
    "slash-behind": "/collective_rpc/",
    "below-v1": "/v1/collective_rpc",
    "two-slashes": "//collective_rpc",
    "three-slashes": "///sleep",
    "inner-slashes": "/v1//sleep",
    "dot": "/./collective_rpc",
    "dots": "/v1/../collective_rpc",
    "dots-deep": "/v1/models/x/../../../sleep",
    "dots-at-the-end": "/collective_rpc/x/..",
    "dots-from-the-own": "/livez/../collective_rpc",
    "dots-from-the-open": "/health/../sleep",
    "encoded-letter": "/%63ollective_rpc",
    "encoded-all": "/%63%6f%6c%6c%65%63%74%69%76%65%5f%72%70%63",
    "encoded-letter-sleep": "/sl%65%65p",
    "encoded-slash": "/v1%2f..%2fcollective_rpc",
    "encoded-slash-first": "/%2fcollective_rpc",
    "encoded-slash-inside": "/v1/x%2F..%2F..%2Fsleep",
    "encoded-dots": "/v1/%2e%2e/collective_rpc",
    "encoded-dot": "/v1/.%2e/collective_rpc",
    "double-encoded": "/%2563ollective_rpc",
    "double-encoded-dots": "/v1/%252e%252e/collective_rpc",
    "double-encoded-slash": "/v1/..%252fsleep",
    "triple-encoded": "/v1/%25252e%25252e/sleep",
    "overlong-dots": "/v1/%c0%ae%c0%ae/collective_rpc",
    "overlong-slash": "/v1/..%c0%afcollective_rpc",
    "half-escape": "/v1/%2/../sleep",
    "semicolon": "/collective_rpc;x=y",
    "semicolon-dots": "/v1/..;/collective_rpc",
    "semicolon-inside": "/v1;/../sleep",
    "encoded-semicolon": "/collective_rpc%3bx",
    "backslash": "/v1\\..\\collective_rpc",
    "backslash-first": "/\\collective_rpc",
    "encoded-backslash": "/v1/..%5csleep",
    "upper-case": "/COLLECTIVE_RPC",
    "mixed-case": "/Collective_Rpc",
    "mixed-case-sleep": "/sLeep",
    "hash": "/collective_rpc#/v1/models",
    "hash-behind": "/v1/models#/../../collective_rpc",
    "encoded-hash": "/collective_rpc%23/v1",
    "query-encoded": "/collective_rpc%3f/v1/models",
    "query": "/collective_rpc?/v1/models",
    "nul": "/collective_rpc%00",
    "nul-inside": "/v1/models%00/../../sleep",
    "raw-nul": "/sleep\0",
    "encoded-line": "/sleep%0d%0ax:y",
    "encoded-space": "/collective_rpc%20",
    "encoded-space-first": "/%20/../sleep",
    "encoded-tab": "/sleep%09",
    "full-width": "/\uff43ollective_rpc".encode().decode("latin-1"),
    "dotted-i": "/collect\u0131ve_rpc".encode().decode("latin-1"),
    "plus": "/+/../collective_rpc",
    "absolute": "http://127.0.0.1/collective_rpc",
    "absolute-upper": "HTTP://ENGINE/sleep",
    "absolute-dots": "http://engine/v1/../sleep",
    "absolute-user": "http://x@engine/collective_rpc",
    "absolute-no-host": "http:///collective_rpc",
    "absolute-other-scheme": "file:///collective_rpc",
    "absolute-inside": "/http://engine/../../../sleep",
    "no-slash": "collective_rpc",
    "authority": "engine:8000",
    "query-only": "?/collective_rpc",
    "fault-tolerance": "/fault_tolerance/reset",
    "root-path": "/v1/sleep",
    "root-path-deep": "/v1/fault_tolerance/x",
    "weights": "/v1/../update_weights",
    "invocations": "/invocations",
    "wake-up": "/%77ake_up",
}
METHODS = ("GET", "POST", "PUT", "OPTIONS", "HEAD", "QUERY", "get", "CONNECT", "TRACE")


def request(method: str, target: str, *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: s", *headers, "content-length: 0", "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def refused(through, data: bytes) -> list[int]:
    """What a client hears that sends this and one more request."""
    client = await through.connect()
    with contextlib.suppress(OSError):
        await client.send(data)
        await through.settle()
        await client.half_close()
    return statuses(await client.rest())


@fronted_by("sidecar")
@pytest.mark.parametrize("name", PATHS)
async def test_no_spelling_of_a_denied_path_reaches_the_engine(through, oracle, name):
    for method in METHODS:
        answers = await refused(through, request(method, PATHS[name]))
        assert [seen.target for seen in oracle.requests if leads_to_control(seen.target)] == [], method
        assert all(admitted(seen) for seen in oracle.requests), oracle.requests
        assert oracle.violations == []
        if not oracle.targets():
            assert answers, method
            assert answers[0] in range(400, 502), method


@fronted_by("sidecar")
@pytest.mark.parametrize("name", ["plain", "dots", "encoded-letter", "absolute", "mixed-case"])
async def test_no_header_says_where_a_request_goes(through, oracle, name):
    headers = [
        f"{header}: {PATHS[name]}" for header in ("x-original-url", "x-rewrite-url", "x-forwarded-path", "referer")
    ]
    headers += ["x-http-method-override: PATCH", "x-method-override: PATCH", "x-forwarded-host: evil"]
    assert await refused(through, request("POST", "/v1/x", *headers)) == [200]
    (seen,) = (seen for seen in oracle.requests if seen.target != "/v1/settle")
    assert (seen.method, seen.target, seen.header("x-original-url")) == ("POST", "/v1/x", [PATHS[name]])


@fronted_by("sidecar")
async def test_a_denied_path_is_denied_wherever_it_stands_in_a_pipeline(through, oracle):
    denied, fine = request("POST", "/collective_rpc"), request("POST", "/v1/x")
    for data in (denied + fine, fine + denied, fine + denied + fine, denied * 3):
        assert set(await refused(through, data)) <= {200, 403}
    client = await through.connect()
    for piece in (fine + denied[:9], denied[9:20], denied[20:] + fine):
        await client.send(piece)
        await through.settle()
    assert [(await client.whole()).status for _ in range(3)] == [200, 403, 200]
    assert set(oracle.targets()) == {"/v1/x"}


@fronted_by("sidecar")
async def test_a_denied_path_with_a_body_is_denied_whole(through, oracle):
    inner = request("POST", "/v1/smuggled")
    head = b"POST /collective_rpc HTTP/1.1\r\nhost: s\r\n"
    counted = head + b"content-length: %d\r\n\r\n%s" % (len(inner), inner)
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner)
    expecting = counted.replace(b"host: s", b"host: s\r\nexpect: 100-continue", 1)
    for data in (counted, chunked, expecting):
        answers = await refused(through, data + request("POST", "/v1/next"))
        assert answers[0] in (100, 403), data
        assert set(oracle.targets()) <= {"/v1/next"}


@fronted_by("sidecar")
async def test_a_denied_path_is_denied_to_websockets_too(through, oracle):
    for target in (PATHS["plain"], PATHS["dots"], PATHS["encoded-letter"], "/sleep"):
        upgrade = ["upgrade: websocket", "connection: Upgrade", "sec-websocket-version: 13"]
        key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
        answers = await refused(through, request("GET", target, *upgrade, key))
        assert answers
        assert answers[0] in (400, 403, 404)
    assert oracle.targets() == []


@fronted_by("sidecar")
@pytest.mark.parametrize(
    "target",
    [
        "/v1/models/sleep",
        "/v1/x?to=/../collective_rpc",
        "/v1/models/a%2Fsleep",
        "/v1/x?%23%00;/collective_rpc",
    ],
)
async def test_names_and_queries_are_no_paths(through, oracle, target):
    assert await refused(through, request("GET", target)) == [200]
    assert oracle.targets() == [target]


@fronted_by("direct")
async def test_without_a_sidecar_the_control_paths_are_open(through, oracle):
    """So that the silence in the tests above means something."""
    await refused(through, request("POST", "/collective_rpc"))
    assert [leads_to_control(seen.target) for seen in oracle.requests if seen.target != "/v1/settle"] == [True]
