"""The dashboard in a real browser, on a sidecar beside the real engine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from highwater.accounting.components import STACKED
from highwater.demo.traffic import send_images
from tests.browser.conftest import PATIENCE_MS, chromium
from tests.patience import patience

from .conftest import sidecar_beside, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Page

    from highwater.demo.engine import DemoEngine
    from highwater.demo.sidecar import DemoSidecar

pytestmark = pytest.mark.long("shown")

TOKEN = "correct-horse-battery"
IMAGES = 12
GIB = 1024**3
# As the table of the ranks has them, after the share that is used.
FIELDS = ("used_bytes", *(one.name for one in STACKED), "free_bytes", "total_bytes")


async def on_page(page: Page) -> dict[str, str | None]:
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="rank 0"))
    titles = await row.get_by_role("cell").locator("span").evaluate_all("all => all.map((one) => one.title)")
    return dict(zip(FIELDS, titles, strict=False))


def in_memory(report: dict[str, Any]) -> dict[str, str]:
    (rank,) = report["ranks"]
    told = {field: rank.get(field, rank["components"].get(field)) for field in FIELDS}
    return {field: "not known" if value is None else f"{value:,} bytes" for field, value in told.items()}


async def settled(page: Page, sidecar: DemoSidecar) -> dict[str, str]:
    """The numbers of `/memory`, once the page shows the same: a reading comes every second, to one and the other."""
    async with patience(300):
        while True:
            told = in_memory(sidecar.call("GET", "/memory"))
            if await on_page(page) == told:
                return told
            await asyncio.sleep(0.1)


RATES = """async () => {
  const { hour } = (await import("./dashboard/main.js")).inspect.state;
  const rates = (name) => hour.rows.map((_, index) => hour.rate(name, index) ?? 0);
  return ["requests_ended", "proxy_requests_ended"].map((name) => Math.max(0, ...rates(name)));
}"""


async def test_the_page_shows_the_engine_and_resets_it(engine: DemoEngine, tmp_path: Path) -> None:
    """Its numbers are those of `/memory`; a reset by its button, with the token, is seen with what it gave back."""
    settings = {"HIGHWATER_ADMIN_TOKEN": TOKEN, "HIGHWATER_POLICY__MODE": "observe"}
    with sidecar_beside(engine, tmp_path, **settings) as sidecar:
        sent = await send_images(engine.url, engine.served_model, images=range(7000, 7000 + IMAGES))
        assert sent.errors == ()
        wait_for(sidecar, lambda report: report["encoder_cache"]["device_bytes"] > 0)
        async with chromium() as browser:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_MS)
            await page.goto(f"{sidecar.url}/dashboard#ranks")
            await page.wait_for_selector("body[data-ready]")
            told = await settled(page, sidecar)
            assert told["encoder_cache_bytes"] not in ("0 bytes", "not known")
            assert told["torch_cached_bytes"] == "not known"  # as PyTorch has it on CPU

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
            await page.keyboard.press("6")
            await page.get_by_role("button", name="reset encoder cache").click()
            await page.get_by_label("Token", exact=True).fill(TOKEN)
            await page.get_by_label("Token", exact=True).press("Enter")
            became = page.get_by_role("status", name="What it did")
            await became.filter(has_text="Gave back").wait_for()
            (event,) = [e for e in sidecar.call("GET", "/memory/events")["events"] if e["kind"] == "reset"]
            assert (
                f"{event['result']['freed_components']['encoder_cache_bytes']:,} bytes" == told["encoder_cache_bytes"]
            )
            await page.keyboard.press("7")
            acts = page.get_by_role("list", name="Events, newest first")
            given = f"{event['result']['credited_bytes'] / GIB:.3f} GiB"
            await acts.get_by_text(f"gave back {given}: reset encoder cache").wait_for()
            await page.keyboard.press("1")
            assert (await settled(page, sidecar))["encoder_cache_bytes"] == "0 bytes"
