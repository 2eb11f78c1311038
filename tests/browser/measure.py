"""What eight ranks and an hour at one reading a second cost the browser: ``python -m tests.browser.measure [FOLDER]``.

With the folder of another page (a checkout's ``app/highwater/dashboard``) that one is measured in the same run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, Route

from highwater.http.pages import TYPES
from tests.browser.conftest import Beside, beside, chromium
from tests.browser.sample import an_hour, many_ranks

RING = 4600  # readings; more than an hour of them
LOADS = 3
CPU_SECONDS = 40
SCREEN: Any = {"width": 1366, "height": 768}
PAINTS = """async () => {
  while (!document.querySelector("canvas")) await new Promise((resolve) => requestAnimationFrame(resolve));
  const charts = performance.now();
  const { inspect } = await import("./dashboard/main.js");
  while (inspect.state.hour.rows.length < 100) await new Promise((resolve) => requestAnimationFrame(resolve));
  const hour = performance.now();
  await new Promise((resolve) => setTimeout(resolve, 500));
  return {
    "first contentful paint": performance.getEntriesByName("first-contentful-paint")[0].startTime,
    "numbers and chart": charts,
    "the whole hour": hour,
  };
}"""
FLOOD = """async ([text, readings]) => {
  const { takeReport, state } = (await import("./dashboard/main.js")).inspect;
  const start = Math.max(state.hour.last?.at ?? 0, JSON.parse(text).taken_at);
  for (let second = 1; second <= readings; second++) {
    takeReport({ ...JSON.parse(text), taken_at: start + second });
    if (second % 100 === 0) await new Promise((resolve) => requestAnimationFrame(resolve));
  }
}"""
FRAMES = """async ([text, readings]) => {
  const { takeReport, state } = (await import("./dashboard/main.js")).inspect;
  const start = state.hour.last.at;
  const gaps = [];
  let last = performance.now();
  for (let frame = 0; frame < readings * 60; frame++) {
    const now = await new Promise((resolve) => requestAnimationFrame(resolve));
    gaps.push(now - last);
    last = now;
    if (frame % 60 === 0) takeReport({ ...JSON.parse(text), taken_at: start + 1 + frame / 60 });
  }
  return gaps.sort((one, other) => other - one).slice(0, 5).map((gap) => Math.round(gap));
}"""
# What can be read without scrolling; the choices of a closed list cannot.
WORDS = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let words = 0;
  while (texts.nextNode()) {
    const parent = texts.currentNode.parentElement;
    if (parent.closest(".visually-hidden, .skip, option, noscript, script, title")) continue;
    const range = document.createRange();
    range.selectNodeContents(texts.currentNode);
    const box = range.getBoundingClientRect();
    if (!box.width || !box.height || box.top >= innerHeight || box.bottom <= 0) continue;
    words += texts.currentNode.textContent.split(/\\s+/).filter((word) => /[\\p{L}\\p{N}]/u.test(word)).length;
  }
  return words;
}"""


@contextlib.asynccontextmanager
async def an_hour_of_eight() -> AsyncIterator[Beside]:
    # The ring has room for an hour of readings although the poller itself is slow here.
    async with beside(engine={"tensor_parallel": 8}, history_seconds=86_400, poll_seconds=20) as here:
        an_hour(here.history, here.fake, here.clock, many_ranks(here.fake))
        await here.sidecar.poll()
        yield here


async def times_to_paint(page: Page) -> dict[str, float]:
    return dict(await page.evaluate(PAINTS))


async def flood(page: Page, report: dict[str, Any], readings: int) -> None:
    """Reports, one a second as far as the page can tell, in a few seconds."""
    await page.evaluate(FLOOD, [json.dumps(report), readings])


async def words_seen(page: Page) -> int:
    return int(await page.evaluate(WORDS))


async def heap_bytes(page: Page) -> int:
    """What the page's scripts hold after a collection, typed arrays included."""
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("HeapProfiler.collectGarbage")
    usage = await session.send("Runtime.getHeapUsage")
    await session.detach()
    return int(usage["usedSize"]) + int(usage.get("backingStorageSize", 0))


def browser_seconds() -> float:
    """The processor time of all processes below this one: the browser's; this one's own, the sidecar's, is left out."""
    parents: dict[int, list[tuple[int, int]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text("utf-8").rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append((int(stat.parent.name), int(fields[11]) + int(fields[12])))
    ticks, below = 0, [os.getpid()]
    while below:
        for pid, own in parents.get(below.pop(), ()):
            ticks += own
            below.append(pid)
    return ticks / os.sysconf("SC_CLK_TCK")


async def cpu_share(browser: Browser, here: Beside, folder: Path | None) -> None:
    async def another(route: Route) -> None:
        name = route.request.url.partition("/dashboard")[2].strip("/") or "index.html"
        assert folder is not None
        file = folder / name
        await route.fulfill(body=file.read_bytes(), content_type=TYPES[file.suffix])

    page = await (await browser.new_context(viewport=SCREEN)).new_page()
    if folder is not None:
        await page.route("**/dashboard**", another)
    await page.goto(f"http://127.0.0.1:{here.port}/dashboard")
    await page.wait_for_selector("body[data-ready]")
    move = many_ranks(here.fake)

    async def live(seconds: int) -> None:
        for second in range(seconds):
            move(-second)
            await asyncio.gather(here.sidecar.poll(), asyncio.sleep(1.0))

    await live(5)
    before = browser_seconds()
    await live(CPU_SECONDS)
    share = (browser_seconds() - before) / CPU_SECONDS
    height = await page.evaluate("document.documentElement.scrollHeight")
    words = await words_seen(page)
    print(f"{folder or 'this page'}: {share:.1%} of a core, {words} words on the first screen, {height} px")  # noqa: T201 - a script that prints
    await page.context.close()


async def main(folder: Path | None) -> None:
    async with chromium() as browser, an_hour_of_eight() as here:
        for load in range(LOADS):
            context = await browser.new_context(viewport=SCREEN)
            page = await context.new_page()
            await page.goto(f"http://127.0.0.1:{here.port}/dashboard")
            print({name: round(at) for name, at in (await times_to_paint(page)).items()}, "ms")  # noqa: T201 - a script that prints
            report = await here.memory()
            if load == LOADS - 1:
                await flood(page, report, RING)
                worst = await page.evaluate(FRAMES, [json.dumps(report), 10])
                print("longest frames in 10 s at a reading a second:", worst, "ms")  # noqa: T201 - a script that prints
                for _hour in range(3):
                    print(f"heap: {await heap_bytes(page) / 2**20:.1f} MiB")  # noqa: T201 - a script that prints
                    await flood(page, report, RING)
            await context.close()
        for each in (folder, None) if folder else (None,):
            await cpu_share(browser, here, each)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
