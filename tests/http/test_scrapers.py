"""Whatever scraped vLLM scrapes the sidecar: the engine's families beside ours, as of now, on real ports."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from highwater.http.metrics import EnginePage
from tests.fakes.engine import FakeEngine
from tests.http.conftest import serving
from tests.http.test_control_plane import Running, sidecar_before
from tests.patience import LIMIT_SECONDS, patience
from tests.scrapers import LLM_D, PROMETHEUS_ACCEPTS, llm_d, production_stack

CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
# Of every call to the engine but a scrape's: no scrape that waits for as long comes within the patience of a test.
REQUEST_SECONDS = 600.0


@dataclass
class Page:
    """The engine, and how its `/metrics` is: as it should be, another response, or none while it is held."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    instead: Response | None = None
    held: asyncio.Event | None = None
    asked: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope.get("path") == "/metrics"
        if is_page:
            self.asked += 1
            if self.held is not None:
                await self.held.wait()
        await ((self.instead if is_page else None) or self.engine)(scope, receive, send)


@contextlib.asynccontextmanager
async def scraped(page: Page) -> AsyncIterator[Running]:
    """A sidecar before that engine, which polls only when a test says so."""
    late = {"request_seconds": REQUEST_SECONDS, "rpc_deadline_seconds": REQUEST_SECONDS}
    async with serving(page) as port, sidecar_before(page.engine, engine_port=port, **late) as running:
        yield running


@pytest.fixture(autouse=True)
def scrape_deadline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape waits for the engine's part as long as a test does, but in the test of how long it waits."""
    if request.node.originalname != test_no_scrape_waits_for_an_engine_that_hangs.__name__:
        monkeypatch.setitem(EnginePage.__init__.__kwdefaults__, "seconds", LIMIT_SECONDS)


@pytest.fixture
def page() -> Page:
    return Page()


async def text_of(running: Running, path: str = "/metrics") -> str:
    """The page, as Prometheus asks for it."""
    response = await running.client.get(path, headers={"Accept": PROMETHEUS_ACCEPTS})
    assert (response.status_code, response.headers["content-type"]) == (200, CLASSIC)
    return response.text


def names(text: str) -> list[str]:
    """The families, `_created` as families of their own, as often as they are declared."""
    return [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]


async def test_one_scrape_serves_both(page):
    async with scraped(page) as running:
        both, ours = await text_of(running), await text_of(running, "/metrics?engine=0")
        asked_for = await text_of(running, "/metrics?engine=1")
    assert len(set(names(both))) == len(names(both))
    assert "highwater_engine_up" in names(both)
    assert {name for name in names(both) if not name.startswith("highwater_")} == set(names(both)) - set(names(ours))
    assert set(LLM_D) <= set(names(both))
    assert names(asked_for) == names(both)


async def test_promtool_parses_it(page):
    """With Go's own parser, which llm-d's picker uses too: it refuses a page with one family twice."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; make tools brings it")
    async with scraped(page) as running:
        text = await text_of(running)
    told = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=text.encode(), capture_output=True, check=False
    )
    assert b"error while linting" not in told.stderr
    twice = text + "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1.0\n"
    told = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=twice.encode(), capture_output=True, check=False
    )
    assert b"error while linting" in told.stderr


async def test_routers_see_the_load_as_it_is_now(page):
    async with scraped(page) as running:
        page.engine.running, page.engine.waiting, page.engine.kv_usage = 7, 3, 0.5
        text = await text_of(running)
    assert production_stack(text) == (7, 3)
    assert llm_d(text) == dict(zip(LLM_D, (3, 7, 0.5), strict=True))


async def test_routers_see_no_load_of_an_engine_that_is_gone(page):
    """Neither does Prometheus: what stood there a moment ago is not repeated, and the sidecar goes on with its own."""
    async with contextlib.AsyncExitStack() as sidecar:
        async with serving(page) as port:
            page.engine.running = 7
            running = await sidecar.enter_async_context(sidecar_before(page.engine, engine_port=port))
            assert production_stack(await text_of(running)) == (7, 0)
        text = await text_of(running)
    assert "vllm:" not in text
    assert (production_stack(text), llm_d(text)) == ((0, 0), {})
    assert "highwater_engine_up" in names(text)


async def test_no_scrape_waits_for_an_engine_that_hangs(page):
    """However many come: the engine is asked once for all that wait, and each has our part in time."""
    async with scraped(page) as running:
        page.held, page.asked = asyncio.Event(), 0
        async with patience():
            texts = await asyncio.gather(*(text_of(running) for _ in range(10)))
        assert page.asked < 10
        assert not any("vllm:" in text for text in texts)
        assert all("highwater_engine_up" in names(text) for text in texts)
        page.held.set()
        async with patience():  # a slow machine may miss the scrape's own deadline, as a slow engine does
            while "vllm:" not in await text_of(running):
                pass


@pytest.mark.parametrize(
    "instead",
    [
        PlainTextResponse("Internal Server Error", 500),
        PlainTextResponse("<html>not what you asked for</html>\n"),
        Response(b"\x00\xff" * 1000, media_type="application/octet-stream"),
        PlainTextResponse("# \n" * 3_000_000),
    ],
    ids=["error", "html", "bytes", "huge"],
)
async def test_whatever_the_engine_says_ours_is_whole(page, instead):
    async with scraped(page) as running:
        alone = names(await text_of(running, "/metrics?engine=0"))
        page.instead = instead
        assert names(await text_of(running)) == alone


async def test_a_family_with_our_name_is_ours(page):
    """As of a sidecar behind this one: a parser would refuse the page for it."""
    page.instead = PlainTextResponse(
        "# HELP highwater_engine_up Another's.\n# TYPE highwater_engine_up gauge\nhighwater_engine_up 0.0\n"
        "# HELP vllm:x X.\n# TYPE vllm:x gauge\nvllm:x 1.0\n"
    )
    async with scraped(page) as running:
        text = await text_of(running)
    assert text.count("\nhighwater_engine_up 1.0\n") == text.count("# TYPE highwater_engine_up ") == 1
    assert text.endswith("# HELP vllm:x X.\n# TYPE vllm:x gauge\nvllm:x 1.0\n")
    assert "Another's" not in text


async def test_a_replaced_policy_is_on_the_next_page(page):
    """Although the page is rendered once a report, and none has come since."""
    async with scraped(page) as running:
        assert 'highwater_policy_mode{mode="observe"} 0.0' in await text_of(running)
        await running.client.put("/policy", json={"mode": "observe"})
        assert 'highwater_policy_mode{mode="observe"} 1.0' in await text_of(running)
