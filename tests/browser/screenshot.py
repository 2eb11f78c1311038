"""Pictures of the page in a real browser, with the story's numbers: ``python -m tests.browser.screenshot [FOLDER]``.

Without a folder it writes ``docs/images/dashboard.png``, the one that the documentation shows; with one, all that are
worth a look after a change.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from playwright.async_api import Browser

from highwater.policy.settings import PolicySettings
from tests.browser.conftest import Beside, beside, chromium
from tests.browser.sample import Story, an_hour, many_ranks
from tests.http.test_control_plane import sidecar_before

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "dashboard.png"
DESKTOP = {"width": 1440, "height": 1000}
PHONE = {"width": 390, "height": 844}


async def picture(browser: Browser, port: int, path: Path, *, whole: bool = False, **options: Any) -> None:
    """One picture of the page as it is now."""
    options = {"viewport": DESKTOP, "color_scheme": "light", "locale": "en-GB", **options}
    context = await browser.new_context(**options)
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{port}/dashboard")
    await page.wait_for_selector("body[data-ready]")
    await page.wait_for_timeout(2500)  # the fine readings, and a few live ones
    if whole:  # charts draw themselves when they are seen
        await page.set_viewport_size(
            {"width": options["viewport"]["width"], "height": 3600 if options["viewport"]["width"] > 500 else 9000}
        )
        await page.wait_for_timeout(1500)
    await page.screenshot(path=str(path), full_page=whole)
    await context.close()


async def tell(running: Beside) -> None:
    """The story's hour."""
    an_hour(running.history, running.fake, running.clock, Story(running.history, running.fake))
    await running.sidecar.poll()


async def main(folder: Path | None) -> None:
    """All of them."""
    settings: dict[str, Any] = {"poll_seconds": 1.0, "policy": PolicySettings()}
    async with chromium() as browser, beside(**settings) as running:
        started = time.time()
        await tell(running)
        print(f"the story took {time.time() - started:.1f} s")  # noqa: T201 - a script that prints
        if folder is None:
            await picture(browser, running.port, PICTURE, viewport={"width": 1440, "height": 1180})
            return
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        await picture(browser, running.port, folder / "light.png", whole=True)
        await picture(browser, running.port, folder / "dark.png", whole=True, color_scheme="dark")
        await picture(browser, running.port, folder / "phone.png", whole=True, viewport=PHONE)
        async with beside(engine={"tensor_parallel": 8}, **settings) as eight:
            an_hour(eight.history, eight.fake, eight.clock, many_ranks(eight.fake))
            await picture(browser, eight.port, folder / "eight.png", whole=True, color_scheme="dark")
        async with sidecar_before(running.fake, engine_port=1, **settings) as without:
            await picture(browser, without.port, folder / "none.png")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
