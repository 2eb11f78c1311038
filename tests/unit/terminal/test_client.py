"""The client of a sidecar: what it sends, what it makes of the answers, the one line that it says when all fails."""

from __future__ import annotations

import json

import httpx
import pytest

from highwater.process.errors import SidecarRefused, SidecarUnreachable
from highwater.terminal.client import SidecarClient, events_of

TOKEN = "correct-horse-battery"
OURS = {"error": {"code": "refused", "message": "it is busy"}}
VLLM = {"error": {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}}


@pytest.fixture
def answering(monkeypatch):
    """`answering(answer)` has every call answered so; what was sent is kept in the list that it returns."""
    client = httpx.Client

    def answer_with(answer):
        sent: list[httpx.Request] = []

        def handle(request):
            sent.append(request)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def in_process(**options):
            assert options["trust_env"] is False
            return client(transport=httpx.MockTransport(handle), **{k: v for k, v in options.items() if k != "verify"})

        monkeypatch.setattr(httpx, "Client", in_process)
        return sent

    return answer_with


def refused(answering, answer, *, url="http://s:1", **options) -> SidecarRefused:
    answering(answer)
    with SidecarClient(url, **options) as sidecar, pytest.raises(SidecarRefused) as caught:
        sidecar.get("/memory")
    return caught.value


def unreachable(answering, answer, *, url="http://s:1") -> str:
    answering(answer)
    with SidecarClient(url) as sidecar, pytest.raises(SidecarUnreachable) as caught:
        sidecar.get("/memory")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_sent(answering):
    sent = answering(httpx.Response(200, json={"ok": True}))
    with SidecarClient("http://s:1/", token=TOKEN) as sidecar:
        assert sidecar.get("/memory", {"since": "a b"}) == {"ok": True}
        sidecar.post("/memory/reclaim", {"dry_run": True})
        sidecar.post("/memory/reclaim")
    assert [(r.method, str(r.url), r.content) for r in sent] == [
        ("GET", "http://s:1/memory?since=a+b", b""),
        ("POST", "http://s:1/memory/reclaim", b'{"dry_run":true}'),
        ("POST", "http://s:1/memory/reclaim", b""),
    ]
    assert {request.headers["authorization"] for request in sent} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("url", "base"), [("localhost:8001", "http://localhost:8001"), ("https://h/x/?q#f", "https://h/x")]
)
def test_a_url_is_taken_as_people_type_it(url, base):
    with SidecarClient(url) as sidecar:
        assert sidecar.url == base


@pytest.mark.parametrize("url", ["", "http://", "ftp://h", "http://[::1", "http://h:0", "http://h:99999", "unix:///x"])
def test_a_url_that_is_none_is_said(url):
    with pytest.raises(SidecarUnreachable, match=r"http://127\.0\.0\.1:8001"):
        SidecarClient(url)


@pytest.mark.parametrize(
    ("url", "token", "words"),
    [
        (f"http://me:{TOKEN}@h:1", None, "HIGHWATER_ADMIN_TOKEN"),
        (f"http://me:{TOKEN}@h:99999", None, "is not the URL of a sidecar"),
        (f"ftp://me:{TOKEN}@h", None, "is not the URL of a sidecar"),
        (f"http://h:0/?token={TOKEN}", None, "is not the URL of a sidecar"),
        ("http://h:1", f"{TOKEN}\n", "line break"),  # the library's own complaint would show it
    ],
)
def test_a_secret_that_cannot_be_used_is_not_shown(url, token, words):
    with pytest.raises(SidecarUnreachable, match=words) as caught:
        SidecarClient(url, token=token)
    assert TOKEN not in str(caught.value)


def test_a_refusal_is_the_sidecars_own_word(answering):
    exc = refused(answering, httpx.Response(409, json=OURS))
    assert (exc.status, exc.code, exc.message, exc.body, str(exc)) == (409, "refused", "it is busy", OURS, "it is busy")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"schema": 1, "results": [{"remedy": "release", "reason": "it sleeps"}]}, "release: it sleeps"),
        (
            {"results": [{"remedy": name, "reason": "it sleeps"} for name in ("release", "reset_mm_cache")]},
            "release, reset_mm_cache: it sleeps",
        ),
        ({"ready": False, "engine": "gone", "reason": "nothing answers"}, "nothing answers"),
        ({"error": {"message": "/x is not. The sidecar's own: /memory", "code": "not_admitted"}}, "of this version?"),
    ],
)
def test_other_errors_of_a_sidecar_are_its_own_too(answering, body, message):
    assert message in str(refused(answering, httpx.Response(503, json=body)))


def test_a_list_of_names_is_not_cut(answering):
    names = ", ".join(f"'EngineCore anonymous_bytes {number}'" for number in range(60))
    body = {"error": {"code": "unknown_name", "message": f"series: 'x' is not known; allowed: {names}"}}
    assert str(refused(answering, httpx.Response(422, json=body))).endswith("anonymous_bytes 59'")


def test_who_may_not_is_told_of_the_token(answering):
    no = httpx.Response(401, json={"error": {"code": "unauthorized", "message": "needs the admin token"}})
    none = str(refused(answering, no, token_source="/x.token does not exist"))
    assert "found no token: /x.token does not exist" in none
    wrong = str(refused(answering, no, token=TOKEN, token_source="/x.token"))
    assert "The token from /x.token is not this sidecar's" in wrong
    assert TOKEN not in wrong


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(404, html="<h1>404</h1>", headers={"server": "nginx/1.22"}), "404 Not Found from nginx/1.22"),
        (httpx.Response(200, html="<h1>Welcome</h1>"), "a web page"),
        (httpx.Response(404, json=VLLM, headers={"server": "uvicorn"}), "vLLM itself"),
        (httpx.Response(404, json={"detail": "Not Found"}), "no Highwater sidecar"),
        (httpx.Response(301, headers={"location": "https://elsewhere/"}), "301 Moved Permanently"),
        (httpx.Response(200, content=b"\x00\xff"), "what is no JSON"),
        (httpx.Response(502, json=[1]), "502 Bad Gateway"),
        (httpx.ConnectError("[Errno 111] Connection refused"), "highwater serve"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "Name or service not known"),
        (httpx.ConnectTimeout(""), "accepts no connection in time"),
        (httpx.ReadTimeout(""), "does not answer in time"),
        (httpx.RemoteProtocolError("Server disconnected"), "does it want https://?"),
        (httpx.ReadError(""), "ReadError"),
    ],
)
def test_what_is_no_sidecar_is_said(answering, answer, words):
    text = unreachable(answering, answer)
    assert words in text
    assert "http://s:1" in text


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate", "SSL_CERT_FILE"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "try http://"),
    ],
)
def test_a_handshake_that_fails_says_what_to_change(answering, reason, words):
    assert words in unreachable(answering, httpx.ConnectError(reason), url="https://s:1")


@pytest.mark.parametrize(
    "message",
    [
        "/memory/memory is not on the proxy's allow list. The sidecar's own: /memory, /metrics",
        "/memory/memory is not served on this port. The sidecar's own paths are on its control port (control_port)",
    ],
)
def test_a_url_with_a_path_is_to_be_given_without(answering, message):
    """People copy the address of a page; nothing has to be allowed for that."""
    answer = httpx.Response(404, json={"error": {"message": message, "type": "NotFoundError", "code": 404}})
    text = unreachable(answering, answer, url="http://s:1/memory")
    assert "without the path /memory, such as http://s:1" in text
    assert "allow list" not in text


def test_below_a_prefix_a_missing_thing_is_the_sidecars_word(answering):
    """A reverse proxy may serve the sidecar there."""
    answer = httpx.Response(404, json={"error": {"code": "not_found", "message": "id: there is no incident"}})
    assert "no incident" in str(refused(answering, answer, url="http://s:1/highwater"))


def test_what_answers_cannot_command_the_terminal(answering):
    text = unreachable(answering, httpx.Response(500, headers={"server": "a\x1b[2Jb" + "x" * 9000}))
    assert text.isprintable()
    assert len(text) < 1000


@pytest.mark.parametrize(("said", "status"), [("1", 1), (None, None), ("", None), ("1" * 5000, None), ("x", None)])
def test_an_answer_says_what_to_end_with(answering, said, status):
    """Where the sidecar names no exit status that a command has, none is made up."""
    headers = {} if said is None else {"Highwater-Exit-Status": said}
    answering(httpx.Response(200, text="a table", headers=headers))
    with SidecarClient("http://s:1") as sidecar:
        assert sidecar.ask("GET", "/memory/host") == ("text/plain", b"a table", status)


def test_a_refusal_that_says_what_to_end_with_is_shown(answering):
    answering(httpx.Response(409, text="release: it sleeps", headers={"Highwater-Exit-Status": "1"}))
    with SidecarClient("http://s:1") as sidecar:
        assert sidecar.ask("POST", "/memory/reclaim").exit_status == 1
    answering(httpx.Response(409, json=OURS))
    with SidecarClient("http://s:1") as sidecar, pytest.raises(SidecarRefused, match="it is busy"):
        sidecar.ask("POST", "/memory/reclaim")


def stream(*parts: str, kind: str = "text/event-stream") -> httpx.Response:
    return httpx.Response(200, content="".join(parts).encode(), headers={"content-type": kind})


def test_events_come_one_by_one(answering):
    body = {"engine": {}}
    answering(
        stream(": ping\n\n", f"event: report\ndata: {json.dumps(body)}\n\n", 'event: event\nid: 4\ndata: {"id": 4}\n\n')
    )
    with SidecarClient("http://s:1") as sidecar:
        assert list(sidecar.events()) == [("report", body), ("event", {"id": 4})]


@pytest.mark.parametrize(
    "answer",
    [
        stream("data: {}\n\n", kind="text/html"),
        stream("event: report\ndata: <p>\n\n"),
        httpx.Response(404, html="<p>"),
        httpx.ReadTimeout(""),
        httpx.RemoteProtocolError("peer closed connection without sending complete message body"),
    ],
)
def test_a_stream_that_is_none_is_said(answering, answer):
    answering(answer)
    with SidecarClient("http://s:1") as sidecar, pytest.raises(SidecarUnreachable):
        list(sidecar.events())


def test_too_many_readers_are_refused(answering):
    answering(httpx.Response(503, json={"error": {"code": "engine_not_available", "message": "64 readers"}}))
    with SidecarClient("http://s:1") as sidecar, pytest.raises(SidecarRefused, match="64 readers"):
        list(sidecar.events())


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_nested_without_end_is_no_sidecars(answering, status):
    """A server that sends a hundred thousand brackets gets one line said of it, and no traceback."""
    assert "no Highwater sidecar" in unreachable(answering, httpx.Response(status, content=b"[" * 100_000))


@pytest.mark.parametrize("at", [1e300, -1e300, float("nan"), 253402300800.0, -1.0])
def test_an_event_at_no_time_is_not_known(at):
    """No calendar of Python's names a year beyond 9999 or before 1970; the others are shown all the same."""
    event = {"id": 1, "kind": "state", "summary": "it is up"}
    known = [0.0, 1.0, 253402300799.0]
    assert [one.at for one in events_of([event | {"at": when} for when in (at, *known)])] == known
