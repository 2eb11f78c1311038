"""What the verbs ask for, and how they end."""

from __future__ import annotations

import json
from contextlib import contextmanager

import click
import httpx
import pytest
from click.testing import CliRunner, Result

from highwater.act.remedies import REMEDIES
from highwater.terminal import verbs
from highwater.terminal.cli import main
from highwater.terminal.client import SidecarClient
from highwater.terminal.verbs import known_remedies, reclaim, reclaim_of

GIB = 2**30
SAYS = {"Highwater-Exit-Status": "0"}


class Sidecar:
    """What it answers; what it was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, str]] = []
        self.answer: httpx.Response | Exception = httpx.Response(200, text="a table\n", headers=SAYS)

    def handle(self, request: httpx.Request) -> httpx.Response:
        url = str(request.url).removeprefix("http://127.0.0.1:8001")
        self.asked.append((request.method, url, request.headers["accept"], request.content.decode()))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def sidecar(monkeypatch):
    made, client = Sidecar(), httpx.Client

    def in_process(**options):
        options.pop("verify")
        return client(transport=httpx.MockTransport(made.handle), **options)

    @contextmanager
    def control_of(url, *, timeout_seconds):
        del timeout_seconds
        with SidecarClient(url) as asked:
            yield asked

    monkeypatch.setattr(httpx, "Client", in_process)
    monkeypatch.setattr(verbs, "control_of", control_of)  # without the look at who is there
    return made


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("typed", "method", "path", "body"),
    [
        ("host", "GET", "/memory/host", None),
        ("growth", "GET", "/memory/growth", None),
        ("growth --series x", "GET", "/memory/growth?series=x", None),
        ("explain", "GET", "/memory/budget", None),
        ("incidents", "GET", "/memory/incidents", None),
        ("incidents ../../policy?x=1#y", "GET", "/memory/incidents/..%2F..%2Fpolicy%3Fx%3D1%23y", None),
        ("restore", "POST", "/memory/encoder-cache/restore", None),
        ("mark x", "POST", "/memory/marks", {"name": "x"}),
        (
            "reclaim release --mode now --dry-run",
            "POST",
            "/memory/reclaim?dry_run=true",
            {"mode": "now", "remedies": ["release"]},
        ),
        ("reclaim release", "POST", "/memory/reclaim", {"mode": "safe", "remedies": ["release"]}),
        ("policy get", "GET", "/policy", None),
        ("policy mode act", "PUT", "/policy", {"mode": "act"}),
        ("snapshot list", "GET", "/memory/snapshots", None),
        ("snapshot take --dry-run", "POST", "/memory/snapshot", {"dry_run": True}),
        ("snapshot take", "POST", "/memory/snapshot", {"dry_run": False}),
        ("snapshot take --record-stacks 10", "POST", "/memory/snapshot/stacks", {"minutes": 10.0}),
    ],
)
def test_each_asks_once_and_shows_what_comes(sidecar, typed, method, path, body):
    sent = "" if body is None else json.dumps(body, separators=(",", ":"))
    assert invoke(*typed.split()).output == "a table\n"
    sidecar.answer = httpx.Response(200, json={"a": 1}, headers=SAYS)
    assert json.loads(invoke(*typed.split(), "--json").output) == {"a": 1}
    assert sidecar.asked == [(method, path, accept, sent) for accept in ("text/plain", "application/json")]


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_sidecar_says_what_it_ends_with(sidecar, status):
    sidecar.answer = httpx.Response(409, text="no", headers={"Highwater-Exit-Status": str(status)})
    result = invoke("reclaim")
    assert (result.exit_code, result.output) == (status, "no\n")


@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [
        (httpx.Response(404, json={"error": {"code": "not_found", "message": "it is not"}}), 1, "it is not"),
        (httpx.Response(502, text="<html>"), 3, "answered with 502"),
        (httpx.Response(500, json=["odd"]), 3, "answered with 500"),
        (httpx.Response(200, html="<html>"), 3, "a web page"),
        (httpx.Response(200, text="a table"), 3, "upgrade the older one"),
        (httpx.Response(200, json={}, headers=SAYS), 3, "upgrade the older one"),
        (httpx.ConnectError("refused"), 3, "no sidecar answers at http://127.0.0.1:8001 (refused)"),
    ],
)
def test_what_goes_wrong_is_one_line(sidecar, answer, status, problem):
    sidecar.answer = answer
    for typed in ("host", "incidents"):
        result = invoke(typed)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (status, "", 1)
        assert problem in result.stderr
        assert ("--folder" in result.stderr) == (status == 3 and typed == "incidents")


def test_what_a_sidecar_says_is_plain(sidecar):
    """Whoever it is that answers there: a terminal would obey it."""
    sidecar.answer = httpx.Response(200, text="a\x1b[2Jb\x07\n\u202ec", headers=SAYS)
    assert invoke("host").output == "a[2Jb\nc\n"


@pytest.mark.parametrize(
    "typed",
    [
        "snapshot take --record-stacks 61",
        "snapshot take --record-stacks 1 --dry-run",
        "reclaim release --free 1GiB",
        "reclaim --free 0",
        "policy mode rest",
        "get ä",
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(sidecar, typed):
    assert invoke(*typed.split()).exit_code == 2
    assert sidecar.asked == []


def remedies_of(*names: str, free: int | None = None) -> object:
    return reclaim_of(names, free, "safe", dry_run=False).body["remedies"]


def test_the_remedies_are_those_that_there_are():
    shown = known_remedies(click.Context(reclaim), reclaim.params[0], "")
    assert shown == sorted(remedy.name for remedy in REMEDIES)
    assert known_remedies(click.Context(reclaim), reclaim.params[0], "rel") == ["release"]


def test_remedies_go_out_in_their_order():
    assert remedies_of("release", "reset-mm-cache") == ["release", "reset_mm_cache"]
    assert remedies_of() is None


def test_a_size_is_for_the_trim():
    trim = {"remedy": "trim_encoder_cache", "free_bytes": GIB}
    assert remedies_of(free=GIB) == [trim]
    assert remedies_of("release", "trim_encoder_cache", free=GIB) == ["release", trim]
