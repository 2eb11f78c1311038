"""The dashboard in a real browser, on a sidecar beside the real engine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from highwater.accounting.components import COMPONENT_NAMES
from highwater.demo.traffic import send_images
from tests.browser.conftest import PATIENCE_MS, chromium
from tests.patience import patience

from .conftest import sidecar_beside, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Page

    from highwater.demo.engine import DemoEngine
    from highwater.demo.sidecar import DemoSidecar

TOKEN = "correct-horse-battery"
IMAGES = 12
FIELDS = ("used_bytes", "total_bytes", *COMPONENT_NAMES)


async def on_page(page: Page) -> dict[str, str | None]:
    script = """() => Object.fromEntries([...document.querySelectorAll('[data-cell^="0:0 "][data-bytes]')].map(
      (cell) => [cell.dataset.cell.slice(4), cell.dataset.bytes]))"""
    return dict(await page.evaluate(script))


def in_memory(report: dict[str, Any]) -> dict[str, str]:
    (rank,) = report["ranks"]
    told = {field: rank.get(field, rank["components"].get(field)) for field in FIELDS}
    return {field: "unknown" if value is None else str(value) for field, value in told.items()}


async def settled(page: Page, sidecar: DemoSidecar) -> dict[str, str]:
    """The numbers of `/memory`, once the page shows the same: a reading comes every second, to one and the other."""
    async with patience(300):
        while True:
            told = in_memory(sidecar.call("GET", "/memory"))
            cells = await on_page(page)
            if {field: cells.get(field) for field in FIELDS} == told:
                return told
            await asyncio.sleep(0.1)


RATES = """async () => {
  const { inspect } = await import("./dashboard/main.js");
  return inspect.plots.lines["request-rate"].chart?.view.data.slice(1).map((rates) => Math.max(0, ...rates)) ?? [];
}"""


async def test_the_page_shows_the_engine_and_resets_it(engine: DemoEngine, tmp_path: Path) -> None:
    settings = {"HIGHWATER_ADMIN_TOKEN": TOKEN, "HIGHWATER_POLICY__MODE": "observe"}
    with sidecar_beside(engine, tmp_path, **settings) as sidecar:
        sent = await send_images(engine.url, engine.served_model, images=range(7000, 7000 + IMAGES))
        assert sent.errors == ()
        wait_for(sidecar, lambda report: report["encoder_cache"]["device_bytes"] > 0)
        async with chromium() as browser:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_MS)
            await page.goto(f"{sidecar.url}/dashboard")
            await page.wait_for_selector("body[data-ready]")
            told = await settled(page, sidecar)
            assert int(told["encoder_cache_bytes"]) > 0
            assert told["torch_cached_bytes"] == "unknown"  # as PyTorch has it on CPU

            through = await send_images(sidecar.url, engine.served_model, images=range(7100, 7100 + IMAGES))
            assert through.errors == ()
            await page.wait_for_function(
                f"() => ({RATES})().then((rates) => rates.length === 2 && rates.every(Boolean))"
            )
            wait_for(sidecar, lambda report: report["engine"]["work"]["requests"] >= 2 * IMAGES)
            assert sidecar.call("GET", "/memory")["proxy"]["requests_ended"] == IMAGES

            # The count of requests is read beside the ranks, which a busy machine may have read before.
            ended = time.time()
            wait_for(sidecar, lambda report: report["ranks"][0]["taken_at"] > ended)
            told = await settled(page, sidecar)
            await page.click("#reset_encoder_cache")
            await page.fill("#token-input", TOKEN)
            await page.press("#token-input", "Enter")
            await page.wait_for_selector(".result[aria-busy=false] .one-result")
            assert "Gave back" in await page.inner_text(".result"), await page.inner_text(".result")
            await page.locator('[data-rank="0:0"]').scroll_into_view_if_needed()  # what is not seen is not drawn
            note = page.locator('[data-rank="0:0"] .note[data-kind=reset]')
            await note.wait_for(state="attached")
            (event,) = [e for e in sidecar.call("GET", "/memory/events")["events"] if e["kind"] == "reset"]
            assert event["result"]["freed_components"]["encoder_cache_bytes"] == int(told["encoder_cache_bytes"])
            assert (await note.inner_text()).startswith("encoder cache ")
            await page.wait_for_selector(f'#resets .freed[data-bytes="{event["result"]["credited_bytes"]}"]')
            assert (await settled(page, sidecar))["encoder_cache_bytes"] == "0"
