"""Who may use the control paths."""

from __future__ import annotations

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from app.routes.access import Access

TOKEN = "correct-horse-battery"


def asked(peer: str | None = "127.0.0.1", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    if "host" not in headers:
        raw.append((b"host", b"127.0.0.1:8001"))
    client = None if peer is None else (peer, 40000)
    return Request({"type": "http", "method": "POST", "path": "/memory/marks", "headers": raw, "client": client})


def status(access: Access, request: Request) -> int:
    try:
        access(request)
    except HTTPException as exc:
        return exc.status_code
    return 200


# --- no token is set ---


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_a_loopback_peer_may(peer):
    """However the socket shows it."""
    assert status(Access(None), asked(peer)) == 200


@pytest.mark.parametrize("peer", ["10.0.0.7", "192.168.1.1", "::ffff:10.0.0.7", "fe80::1", "", "localhost", None])
def test_a_peer_from_elsewhere_may_not(peer):
    """Also one whose address is not known."""
    assert status(Access(None), asked(peer)) == 403


@pytest.mark.parametrize("peer", ["127.0.0.6", "::ffff:127.0.0.6"])
def test_a_service_mesh_may_not(peer):
    """Istio's sidecar connects from there for everybody in the mesh, to a plain TCP port without adding a header."""
    assert status(Access(None), asked(peer)) == 403


@pytest.mark.parametrize(
    "header",
    [
        *("forwarded", "x_forwarded_for", "x_real_ip", "via", "x_forwarded_proto", "x_forwarded_client_cert"),
        *("x_envoy_attempt_count", "l5d_client_id"),
    ],
)
def test_a_peer_behind_a_reverse_proxy_may_not(header):
    """The proxy is on loopback; who came through it is not."""
    assert status(Access(None), asked(**{header: "127.0.0.1"})) == 403


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:8001", 200),
        ("localhost:8001", 200),
        ("localhost", 200),
        ("[::1]:8001", 200),
        ("10.0.0.7:8001", 200),
        ("evil.example:8001", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_pointed_at_loopback_may_not(host, code):
    """DNS rebinding: a page's own name leads to this machine, and the browser says that name."""
    assert status(Access(None), asked(host=host)) == code


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        ("http://127.0.0.1:8001", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost:8001", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_a_page_of_another_site_may_not(origin, code):
    """A browser sends Origin with every POST; only our own page is the same."""
    assert status(Access(None), asked(origin=origin)) == code


@pytest.mark.parametrize("header", ["host", "origin"])
@pytest.mark.parametrize("value", ["[::1", "http://[::1", "a b", "http://[", "]", "[v1.x]", "[127.0.0.1]"])
def test_a_malformed_header_is_refused_not_an_error(header, value):
    """403, never a traceback."""
    assert status(Access(None), asked(**{header: value})) == 403


@given(st.text(alphabet=st.characters(max_codepoint=255)))
def test_no_host_or_origin_breaks_it(text):
    """Whatever bytes a client sends."""
    assert status(Access(None), asked("10.0.0.7", host=text, origin=text)) == 403
    assert status(Access(None), asked(host=text)) in {200, 403}
    assert status(Access(None), asked(origin=text)) in {200, 403}


def test_the_refusal_says_what_to_set():
    """The operator's next step."""
    with pytest.raises(HTTPException, match="HIGHWATER_ADMIN_TOKEN"):
        Access(None)(asked("10.0.0.7"))


# --- a token is set ---


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7", None])
def test_the_token_opens_from_anywhere(scheme, peer):
    """Also through a reverse proxy: it is the operator's."""
    assert status(Access(TOKEN), asked(peer, authorization=f"{scheme} {TOKEN}", x_forwarded_for="1.2.3.4")) == 200


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
    """A token that is set is needed by everyone."""
    assert status(Access(TOKEN), asked(authorization=authorization)) == 401


def test_without_a_header_the_answer_names_the_scheme():
    """As HTTP wants it, and the token is not in it."""
    with pytest.raises(HTTPException) as caught:
        Access(TOKEN)(asked())
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    assert TOKEN not in str(caught.value.detail)
