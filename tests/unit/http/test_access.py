"""Who may use the control paths."""

from __future__ import annotations

from base64 import b64encode

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from highwater.http.access import Access, Denial
from highwater.model.report import Caller
from highwater.process.admin_token import AdminToken

TOKEN = "correct-horse-battery"


def asked(peer: str | None = "127.0.0.1", query: bytes = b"", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    if "host" not in headers:
        raw.append((b"host", b"127.0.0.1:8001"))
    client = None if peer is None else (peer, 40000)
    scope = {"type": "http", "method": "POST", "path": "/memory/marks", "query_string": query}
    return Request({**scope, "headers": raw, "client": client})


def access(*, trust_loopback: bool = False, token: str | None = TOKEN) -> Access:
    return Access(AdminToken(token, None), port=8001, trust_loopback=trust_loopback)


TRUSTING = access(trust_loopback=True)


def status(judge: Access, request: Request) -> int:
    verdict = judge.judge(request)
    return verdict.status if isinstance(verdict, Denial) else 200


# --- loopback is trusted ---


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_a_loopback_peer_may(peer):
    assert TRUSTING.judge(asked(peer)) == Caller(peer, "loopback")


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "10.0.0.7", None])
def test_without_trust_in_it_a_loopback_peer_may_not(peer):
    """A reverse proxy on this machine is one, and need not say that it is a proxy: nginx adds nothing of itself."""
    assert status(access(), asked(peer)) == 401


@pytest.mark.parametrize("peer", ["10.0.0.7", "192.168.1.1", "::ffff:10.0.0.7", "fe80::1", "", "localhost", None])
def test_a_peer_from_elsewhere_may_not(peer):
    assert status(TRUSTING, asked(peer)) == 401


@pytest.mark.parametrize("peer", ["127.0.0.6", "::ffff:127.0.0.6"])
def test_a_service_mesh_may_not(peer):
    assert status(TRUSTING, asked(peer)) == 401


@pytest.mark.parametrize(
    "header",
    [
        *("forwarded", "x_forwarded_for", "x_real_ip", "via", "x_forwarded_proto", "x_forwarded_client_cert"),
        *("x_envoy_attempt_count", "l5d_client_id"),
    ],
)
def test_a_peer_behind_a_reverse_proxy_may_not(header):
    assert status(TRUSTING, asked(**{header: "127.0.0.1"})) == 401


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:8001", 200),
        ("localhost:8001", 200),
        ("localhost", 200),
        ("[::1]:8001", 200),
        ("10.0.0.7:8001", 200),
        ("evil.example:8001", 401),
        ("127.0.0.1.evil.example", 401),
        ("localhost.evil.example", 401),
        ("", 401),
    ],
)
def test_a_name_that_was_pointed_at_loopback_may_not(host, code):
    assert status(TRUSTING, asked(host=host)) == code


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        ("http://127.0.0.1:8001", 200),
        ("http://127.0.0.1:3000", 401),
        ("http://localhost:8001", 401),
        ("https://evil.example", 401),
        ("null", 401),
        ("", 401),
    ],
)
def test_a_page_of_another_site_may_not(origin, code):
    assert status(TRUSTING, asked(origin=origin)) == code


@pytest.mark.parametrize("header", ["host", "origin"])
@pytest.mark.parametrize("value", ["[::1", "http://[::1", "a b", "http://[", "]", "[v1.x]", "[127.0.0.1]"])
def test_a_malformed_header_is_refused_not_an_error(header, value):
    assert status(TRUSTING, asked(**{header: value})) == 401


@given(st.text(alphabet=st.characters(max_codepoint=255)))
def test_no_host_or_origin_breaks_it(text):
    assert status(TRUSTING, asked("10.0.0.7", host=text, origin=text)) == 401
    assert status(TRUSTING, asked(host=text)) in {200, 401}
    assert status(TRUSTING, asked(origin=text)) in {200, 401}


# --- a token is set ---


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7", None])
def test_the_token_opens_from_anywhere(scheme, peer):
    """Also through a reverse proxy: it is the operator's."""
    assert status(access(), asked(peer, authorization=f"{scheme} {TOKEN}", x_forwarded_for="1.2.3.4")) == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN} {TOKEN}",
        "Bearer \xff\xfe",
    ],
)
def test_anything_else_is_401_also_from_loopback(authorization):
    assert status(access(), asked(authorization=authorization)) == 401


@pytest.mark.parametrize(("given", "reason"), [("", "no_token"), ("Bearer", "no_token"), ("Bearer x", "wrong_token")])
async def test_the_refusal_names_the_scheme_and_the_command_that_works(given, reason):
    denial = access().judge(asked(authorization=given))
    assert isinstance(denial, Denial)
    assert (denial.reason, denial.headers) == (reason, {"WWW-Authenticate": "Bearer"})
    assert denial.message.endswith("curl -X POST --oauth2-bearer ADMIN_TOKEN http://127.0.0.1:8001/memory/marks")
    assert TOKEN not in denial.message
    with pytest.raises(HTTPException) as caught:
        access().admitted(asked(authorization=given))
    assert (caught.value.status_code, caught.value.detail, caught.value.headers) == (
        401,
        denial.message,
        denial.headers,
    )


@pytest.mark.parametrize(
    "asking", [{"content_length": "18"}, {"transfer_encoding": "chunked"}, {"query": b"device=gpu"}], ids=str
)
def test_a_refused_call_with_a_body_or_a_query_is_not_printed_without_them(asking):
    """Its body is never read, and the bare command would do something else: a dry run would reclaim."""
    denial = access().judge(asked(authorization="Bearer x", **asking))
    assert isinstance(denial, Denial)
    assert "curl -X" not in denial.message
    assert "HIGHWATER_ADMIN_TOKEN=ADMIN_TOKEN" in denial.message
    assert "--oauth2-bearer ADMIN_TOKEN" in denial.message


def test_an_empty_body_is_none():
    denial = access().judge(asked(content_length="0"))
    assert isinstance(denial, Denial)
    assert denial.message.endswith("http://127.0.0.1:8001/memory/marks")


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer ", "Bearer None", f"Bearer {TOKEN}"])
def test_where_there_is_no_token_nobody_has_it(authorization):
    """Not even who sends nothing, which would be equal to it; and it is said where the reason is."""
    denial = access(token=None).judge(asked(authorization=authorization))
    assert isinstance(denial, Denial)
    assert (denial.status, denial.reason, denial.headers) == (403, "closed", {})
    assert "its log says why and what to change" in denial.message


def test_the_token_counts_for_more_than_the_address():
    assert TRUSTING.judge(asked(authorization=f"Bearer {TOKEN}")) == Caller("127.0.0.1", "token")
    assert TRUSTING.judge(asked("10.0.0.7", authorization=f"Bearer {TOKEN}")) == Caller("10.0.0.7", "token")


# --- the token does not go on to the engine ---


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: e\r\n%bcontent-length: 7\r\nx-a: %b\r\n\r\n"


@pytest.mark.parametrize("line", [b"Authorization: Bearer %b", b"AUTHORIZATION:%b", b"x-api-key: %b", b"api-key: %b"])
def test_the_token_is_taken_out_of_a_head_for_the_engine(line):
    head = HEAD % (line % TOKEN.encode() + b"\r\n", b"b")
    assert access().without_token(head) == HEAD % (b"", b"b")


@pytest.mark.parametrize("pair", ["highwater:%s", "%s:", "%s"])
def test_the_token_as_a_password_is_taken_out_too(pair):
    given, other = (b64encode((pair % word).encode()) for word in (TOKEN, "x" * len(TOKEN)))
    for name in (b"Authorization", b"authorization"):
        assert access().without_token(HEAD % (name + b": Basic " + given + b"\r\n", b"b")) == HEAD % (b"", b"b")
    own = HEAD % (b"Authorization: Basic " + other + b"\r\n", b"b")
    assert access().without_token(own) is own
    broken = HEAD % (b"Authorization: Basic abc\r\n", b"b")
    assert access().without_token(broken) is broken


def test_a_clients_own_key_goes_on_as_it_came():
    own = HEAD % (b"Authorization: Bearer sk-mine\r\n", b"b")
    assert access().without_token(own) is own
    beside = HEAD % (b"Authorization: Bearer sk-mine\r\n", TOKEN.encode())
    assert access().without_token(beside) == HEAD % (b"Authorization: Bearer sk-mine\r\n", b"")
    assert access(token=None).without_token(own) is own
