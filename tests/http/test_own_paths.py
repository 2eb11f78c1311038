"""The sidecar's own paths as HTTP has them, and what the engine's root path means for all others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime

import pytest

from gated_proxy.allowlist import AllowList
from gated_proxy.routes import Front, SidecarPaths
from tests.fakes.engine import FakeEngine
from tests.http.conftest import Wire
from tests.http.test_control_plane import TOKEN, Running, both_on_ports, sidecar_before
from tests.patience import patiently

UNASKED = b"GET /v1/victim HTTP/1.1\r\nX: "
PLANTED = b"GET /v1/planted HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
async def running():
    async with sidecar_before(FakeEngine()) as sidecar:
        yield sidecar


@contextlib.asynccontextmanager
async def connected(running: Running) -> AsyncIterator[Wire]:
    wire = Wire(*await asyncio.open_connection("127.0.0.1", running.port))
    try:
        yield wire
    finally:
        await wire.leave()


# --- the way in ---


async def test_a_browser_at_the_root_is_sent_to_the_page(running):
    """By a relative address, so that it works beneath a reverse proxy's prefix too."""
    answer = await running.client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["location"], answer.headers["vary"]) == (303, "dashboard", "Accept")
    assert (await running.client.get("/", headers={"accept": "text/html"}, follow_redirects=True)).status_code == 200


async def test_curl_at_the_root_learns_what_is_where(running):
    answer = await running.client.get("/")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    named = [word for word in answer.text.split() if word.startswith("/")]
    assert "/dashboard" in named
    for path in named:
        assert (await running.client.get(path)).status_code == 200, path


async def test_the_root_is_on_the_control_port_alone():
    paths = SidecarPaths(frozenset({"/"}))
    refusal = Front(paths, AllowList(), has_control_port=True)(b"GET", b"/", False).refusal
    assert (refusal.status, "control port" in refusal.message) == (404, True)


async def test_what_the_engine_is_known_to_have_wins_over_a_folder_of_ours():
    front = Front(SidecarPaths(frozenset({"/memory"}), folders=("/docs/",)), AllowList(("/docs/plugin",)))
    went = {
        path: front(b"GET", path, False).to
        for path in (b"/docs", b"/docs/oauth2-redirect", b"/docs/plugin", b"/docs/x")
    }
    assert list(went.values()) == ["engine", "engine", "engine", "sidecar"]
    assert front(b"GET", b"/docs/x", True).to == "nowhere"


async def test_the_engines_root_path_has_no_page_of_ours():
    assert Front(SidecarPaths(frozenset({"/"})), AllowList((), "/llm"))(b"GET", b"/llm/", False).to != "sidecar"


# --- HEAD and Date ---


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/memory", "/metrics", "/memory/history", "/dashboard", "/"])
async def test_head_is_get_without_the_body(running, path):
    """RFC 9110 9.1: same status and headers, and the connection serves the next request."""
    async with connected(running) as wire:
        await wire.request("HEAD", path)
        head = await wire.answer(without_body=True)
        await wire.request("GET", path)
        got = await wire.answer()
    assert head.status == got.status
    assert head.header("content-type") == got.header("content-type")
    assert bool(head.header("content-length")) is bool(got.header("content-length"))


async def test_head_of_a_stream_ends(running):
    """The events would not; and nobody follows them afterwards."""
    async with connected(running) as wire:
        await wire.request("HEAD", "/memory/events", ("accept", "text/event-stream"))
        assert (await wire.answer(without_body=True)).header("content-type")[0].startswith("text/event-stream")
        await wire.request("GET", "/livez")
        assert (await patiently(wire.answer())).status == 200


async def test_head_of_what_only_takes_a_post_acts_on_nothing(running):
    assert await running.raw("HEAD", "/reset_mm_cache") == 405
    assert running.fake.resets() == []


@pytest.mark.parametrize("path", ["/livez", "/memory", "/nope", "/collective_rpc"])
async def test_an_answer_of_ours_has_a_date(running, path):
    async with connected(running) as wire:
        await wire.request("GET", path)
        (date,) = (await wire.answer()).header("date")
    assert parsedate_to_datetime(date).tzinfo is not None


async def test_a_proxied_answer_has_the_engines_date_alone():
    async with both_on_ports() as running, connected(running) as wire:
        await wire.request("GET", "/version")
        assert len((await wire.answer()).header("date")) == 1


async def test_what_the_engine_cannot_do_now_is_worth_another_try(running):
    running.fake.down = True
    await running.poll()
    answer = await running.client.get("/memory/encoder-cache")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


# --- a body that was never asked for ---


@pytest.mark.parametrize("path", ["/livez", "/memory", "/nope", "/reset_mm_cache"])
async def test_no_request_hides_behind_a_body_that_was_not_asked_for(path):
    """The answer ends the connection: what comes next can be the body, or the next client's request."""
    async with both_on_ports() as running, connected(running) as wire:
        expecting = ("expect", "100-continue"), ("content-length", str(len(UNASKED)))
        await wire.request("GET", path, *expecting)
        answer = await wire.answer()
        assert answer.header("connection") == ["close"]
        with contextlib.suppress(ConnectionError):
            await wire.send(UNASKED + PLANTED)
            assert await patiently(wire.reader.read()) == b""
        assert not any(call.path in ("/v1/victim", "/v1/planted") for call in running.fake.calls)


async def test_a_body_that_is_asked_for_costs_no_connection():
    """It has come: the next request is the next request."""
    body = b'{"name": "after"}'
    headers = ("expect", "100-continue"), ("content-length", str(len(body))), ("content-type", "application/json")
    headers += (("authorization", f"Bearer {TOKEN}"),)
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as running, connected(running) as wire:
        for _ in range(2):
            await wire.request("POST", "/memory/marks", *headers)
            assert (await wire.head()).status == 100
            await wire.send(body)
            answer = await wire.answer()
            assert (answer.status, answer.header("connection")) == (201, [])


# --- methods and targets ---


async def test_an_upgrade_makes_no_get_of_another_method():
    """The engine would run the method."""
    async with both_on_ports(engine_root_path="/not-the-engines") as running:
        upgrade = ("connection", "upgrade"), ("upgrade", "websocket")
        for method, path in (("DELETE", "/v1/a/b/sleep"), ("POST", "/is_sleeping"), ("POST", "/v1/a/pause")):
            assert await running.raw(method, path, *upgrade) == 403
            assert not any(call.method == method for call in running.fake.asked(path))


async def test_a_target_in_absolute_form_goes_where_its_path_goes():
    async with both_on_ports() as running:
        assert await running.raw("GET", "http://sidecar/livez") == 200
        assert await running.raw("GET", "http://sidecar/version?x=1") == 200
        assert await running.raw("POST", "http://sidecar/collective_rpc") == 403
        assert await running.raw("GET", "http://elsewhere/version") == 400
        assert [(call.path, call.query) for call in running.fake.calls][-1] == ("/version", "x=1")


@pytest.mark.parametrize("method", ["MKCOL", "PROPFIND", "TRACE"])
async def test_a_method_that_no_api_has_is_not_implemented(running, method):
    assert await running.raw(method, "/v1/models") == 501


# --- the engine's root path ---


def news(running: Running) -> list[str]:
    return [event.summary for event in running.app.services.history.events(limit=100) if "root path" in event.summary]


async def test_a_root_path_that_is_not_set_is_said_once(caplog):
    fake = FakeEngine()
    fake.root_path = "/v1"
    async with sidecar_before(fake) as running:
        await running.poll()
        (summary,) = news(running)
        assert "engine_root_path=/v1" in summary
        assert summary in caplog.text
        assert await running.raw("POST", "/v1/new_control") == 403


async def test_a_root_path_that_is_set_is_no_news():
    fake = FakeEngine()
    fake.root_path = "/llm"
    async with sidecar_before(fake, engine_root_path="/llm") as running:
        assert news(running) == []
        assert await running.raw("POST", "/llm/new_control") == 404
        assert await running.raw("POST", "/llm/pause") == 403


def test_another_engine_may_have_another_root_path():
    front = Front(SidecarPaths(frozenset()), AllowList())
    asked = (b"POST", b"/v1/new_control", False)
    assert front.learn_root_path(None) is None
    assert front(*asked).to == "engine"
    assert "engine_root_path=/v1" in str(front.learn_root_path("/v1"))
    assert front(*asked).to == "nowhere"
    assert front.learn_root_path(None) is None  # it does not say: what was known stays
    assert front(*asked).to == "nowhere"
    assert front.learn_root_path("") is None
    assert front(*asked).to == "engine"


PAUSE = (b"POST", b"/v1/fine_tuning/jobs/ft-1/pause", False)


def test_a_pause_of_something_else_passes_while_the_root_path_is_known():
    """Not while another engine may have been started with one."""
    front = Front(SidecarPaths(frozenset()), AllowList())
    open_after = [(front.learn_root_path(said), front(*PAUSE).to)[1] for said in (None, "", None, "/v1", "/llm")]
    assert open_after == ["nowhere", "engine", "nowhere", "nowhere", "engine"]


@pytest.mark.parametrize("said", ["", "/llm"])
def test_a_root_path_that_is_set_wrong_is_not_known(said):
    front = Front(SidecarPaths(frozenset()), AllowList(root_path="/other"))
    assert front(*PAUSE).to == "engine"
    assert "/other" in str(front.learn_root_path(said))
    assert front(*PAUSE).to == "nowhere"
    assert front.learn_root_path(None) is None
    assert front(*PAUSE).to == "nowhere"


async def test_an_engine_that_reports_nothing_may_be_said_to_have_no_root_path():
    for options, is_open in (({}, False), ({"engine_root_path": "/"}, True)):
        async with sidecar_before(FakeEngine(openapi=False), **options) as running:
            assert (await running.raw("POST", PAUSE[1].decode()) != 403) is is_open
            assert await running.raw("POST", "/pause") == 403


async def test_an_engine_that_was_stopped_may_come_back_with_a_root_path():
    """Until it has been asked again, a path that could be a control path stays closed."""
    async with sidecar_before(fake := FakeEngine()) as running:
        assert await running.raw("POST", PAUSE[1].decode()) != 403
        fake.down = True
        await running.poll()
        await running.poll()
        assert await running.raw("POST", PAUSE[1].decode()) == 403


@pytest.mark.parametrize(("said", "told"), [("/llm", None), ("", "no root path"), ("/other", "root path /other")])
def test_a_setting_that_is_not_the_engines_is_told(said, told):
    """The engine would not find what is sent below it."""
    problem = Front(SidecarPaths(frozenset()), AllowList(root_path="/llm")).learn_root_path(said)
    assert problem is None if told is None else told in str(problem)


def test_requests_below_the_root_path_are_counted_with_the_others():
    front = Front(SidecarPaths(frozenset()), AllowList(root_path="/llm"))
    assert front(b"POST", b"/llm/v1/chat/completions", False).path_class == "chat_completions"
