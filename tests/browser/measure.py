"""What eight ranks and an hour at one reading a second cost the browser: ``python -m tests.browser.measure``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from playwright.async_api import Page

from tests.browser.conftest import Beside, beside, chromium
from tests.browser.sample import an_hour, many_ranks

RING = 4600  # readings; a few more than the page keeps
LOADS = 5
PAINTS = """async () => {
  const drawn = () => document.querySelectorAll("[data-plot=stack] canvas").length >= 4;
  while (!drawn()) await new Promise((resolve) => requestAnimationFrame(resolve));
  const charts = performance.now();
  while (window.highwaterReadings === undefined && performance.now() < 60000) {
    const { inspect } = await import("./dashboard/main.js");
    if (inspect.readings.length > 300) window.highwaterReadings = performance.now();
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  await new Promise((resolve) => setTimeout(resolve, 500));
  return {
    "first contentful paint": performance.getEntriesByName("first-contentful-paint")[0].startTime,
    "numbers and charts": charts,
    "the whole hour": window.highwaterReadings,
  };
}"""
FLOOD = """async ([text, readings]) => {
  const { takeReport, readings: ring } = (await import("./dashboard/main.js")).inspect;
  const start = Math.max(ring.lastAt, JSON.parse(text).taken_at);
  for (let second = 1; second <= readings; second++) {
    const report = JSON.parse(text);
    report.taken_at = start + second;
    takeReport(report);
    if (second % 100 === 0) await new Promise((resolve) => requestAnimationFrame(resolve));
  }
}"""
FRAMES = """async ([text, readings]) => {
  const { takeReport, readings: ring } = (await import("./dashboard/main.js")).inspect;
  const start = Math.max(ring.lastAt, JSON.parse(text).taken_at);
  const gaps = [];
  let last = performance.now();
  for (let frame = 0; frame < readings * 60; frame++) {
    const now = await new Promise((resolve) => requestAnimationFrame(resolve));
    gaps.push(now - last);
    last = now;
    if (frame % 60) continue;
    const report = JSON.parse(text);
    report.taken_at = start + 1 + frame / 60;
    takeReport(report);
  }
  gaps.sort((one, other) => other - one);
  return gaps.slice(0, 5).map((gap) => Math.round(gap));
}"""


@contextlib.asynccontextmanager
async def an_hour_of_eight() -> AsyncIterator[Beside]:
    """A sidecar that remembers it."""
    # The ring has room for an hour of readings although the poller itself is slow here.
    async with beside(engine={"tensor_parallel": 8}, history_seconds=86_400, poll_seconds=20) as here:
        an_hour(here.history, here.fake, here.clock, many_ranks(here.fake))
        await here.sidecar.poll()
        yield here


async def times_to_paint(page: Page) -> dict[str, float]:
    """Milliseconds since the page was asked for."""
    return dict(await page.evaluate(PAINTS))


async def flood(page: Page, report: dict[str, Any], readings: int) -> None:
    """Reports, one a second as far as the page can tell, in a few seconds."""
    await page.evaluate(FLOOD, [json.dumps(report), readings])


async def heap_bytes(page: Page) -> int:
    """What the page's scripts hold after a collection, typed arrays included."""
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("HeapProfiler.collectGarbage")
    usage = await session.send("Runtime.getHeapUsage")
    await session.detach()
    return int(usage["usedSize"]) + int(usage.get("backingStorageSize", 0))


async def main() -> None:
    async with chromium() as browser, an_hour_of_eight() as here:
        for _ in range(LOADS):
            context = await browser.new_context(viewport={"width": 1440, "height": 1000})
            page = await context.new_page()
            await page.goto(f"http://127.0.0.1:{here.port}/dashboard")
            print({name: round(at) for name, at in (await times_to_paint(page)).items()}, "ms")  # noqa: T201 - a script that prints
            report = await here.memory()
            if _ == LOADS - 1:
                await flood(page, report, RING)
                worst = await page.evaluate(FRAMES, [json.dumps(report), 10])
                print("longest frames in 10 s at a reading a second:", worst, "ms")  # noqa: T201 - a script that prints
                for _minute in range(3):
                    print(f"heap: {await heap_bytes(page) / 2**20:.1f} MiB")  # noqa: T201 - a script that prints
                    await flood(page, report, RING)
            await context.close()


if __name__ == "__main__":
    asyncio.run(main())
