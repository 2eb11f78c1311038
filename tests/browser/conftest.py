"""A real browser for the page: Debian's Chromium, headless. `make tools` installs it; without it these tests fail."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from tests.browser.sample import SetClock
from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import Running, sidecar_before

PATIENCE_MS = 240_000
ELSEWHERE = "dashboard.test"  # a name that leads here
ARGUMENTS = ["--no-sandbox", f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1"]
# What a browser writes to its console about answers that tests want: a refusal, a sidecar that is not there.
EXPECTED = re.compile(r"Failed to load resource|net::ERR_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/browser/"):
            # One loop for all, so that they share the browser.
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.timeout(1800))


def noon() -> str:
    """A zone in which it is about noon, so that the story's hour is never of two days: the page names the day then."""
    return f"Etc/GMT{time.gmtime().tm_hour - 12:+d}"  # "+" is west of Greenwich there


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Debian's; no browser is downloaded."""
    path = shutil.which("chromium")
    assert path is not None, "chromium is not installed: make tools"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE_MS)
        try:
            yield browser
        finally:
            await browser.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Ended with the file: the tests of other folders measure."""
    async with chromium() as running:
        yield running


@dataclass
class Watched:
    """What a page did that it should not."""

    own: str
    foreign: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("request", lambda request: self._asked(request.url))
        page.on("console", lambda message: self._told(message.type, message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))

    def _asked(self, url: str) -> None:
        if urlsplit(url).netloc != self.own:
            self.foreign.append(url)

    def _told(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"} and not EXPECTED.search(text):
            self.said.append(text)


@pytest_asyncio.fixture(loop_scope="session")
async def visit(browser: Browser) -> AsyncIterator[Callable[..., Any]]:
    """`visit(port)` opens the dashboard. Whatever a test does: no other host is asked, no error is in the console."""
    opened: list[tuple[Any, Watched]] = []

    async def open_page(
        port: int, *, view: str = "", ready: bool = True, host: str = "127.0.0.1", clock: bool = False, **options: Any
    ) -> Page:
        options = {"viewport": {"width": 1440, "height": 1000}, "locale": "en-GB", "timezone_id": noon(), **options}
        context = await browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        page = await context.new_page()
        watched = Watched(f"{host}:{port}")
        watched.watch(page)
        opened.append((context, watched))
        if clock:  # the page's time can be moved
            await page.clock.install()
        await page.goto(f"http://{host}:{port}/dashboard{f'#{view}' if view else ''}")
        if ready:
            await page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context, watched in opened:
        await context.close()
        assert watched.foreign == []
        assert watched.said == []


@dataclass
class Beside:
    """A sidecar before a fake engine, and the clock of both."""

    sidecar: Running
    fake: FakeEngine
    clock: SetClock

    @property
    def port(self) -> int:
        return self.sidecar.port

    @property
    def history(self) -> Any:
        return self.sidecar.app.services.history

    async def memory(self) -> dict[str, Any]:
        return (await self.sidecar.client.get("/memory")).json()


@contextlib.asynccontextmanager
async def beside(
    prepare: Callable[[FakeEngine], object] = lambda _: None,
    *,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Beside]:
    """A sidecar that polls only when it is told to, unless `poll_seconds` says otherwise.

    Its first report is of the engine as `prepare` made it.
    """
    clock = SetClock()
    fake = FakeEngine(clock=clock, **(engine or {}))
    prepare(fake)
    async with sidecar_before(fake, **settings) as sidecar:
        try:
            yield Beside(sidecar, fake, clock)
        finally:
            sidecar.app.begin_stop()  # as `highwater serve` does when it stops; the page is still open
