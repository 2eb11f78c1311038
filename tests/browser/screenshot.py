"""Pictures of the page in a real browser, with the story's numbers: ``python -m tests.browser.screenshot [FOLDER]``.

Without a folder it writes ``docs/images/dashboard.png``, which README and documentation show (``make pictures``); with
one, all that are worth a look after a change.

So that this picture cannot be of a page of the past, a test draws it anew and compares. Fonts and clocks differ from
one machine and moment to the next, so two things are compared that do not: the page's words, their figures left out,
which the file itself keeps; and its colours, cell by cell of a coarse grid.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops
from PIL.PngImagePlugin import PngInfo
from playwright.async_api import Browser, Page

from highwater.act.rules import PolicySettings
from tests.browser.conftest import Beside, beside, chromium, noon
from tests.browser.sample import Story, an_hour, many_ranks
from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import sidecar_before

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "dashboard.png"
SCREEN = {"width": 1366, "height": 768}
PHONE = {"width": 390, "height": 844}
SETTINGS: dict[str, Any] = {"poll_seconds": 20.0, "history_seconds": 86_400, "policy": PolicySettings()}
_CELL, _VISIBLE = 20, 40  # pixels, levels of 255
# What the picture shows, and the names of what it draws; not how long ago it was read.
_WORDS = """() => {
  const texts = [".engine", "main"].map((part) => document.querySelector(part).innerText);
  return [...texts, ...[...document.querySelectorAll(".plot, .flag")].map((one) => one.textContent)];
}"""
VIEWS = ("ranks", "parts", "start", "encoder", "host", "policy", "events", "plan")


async def opened(browser: Browser, port: int, view: str = "", **options: Any) -> Page:
    options = {"viewport": SCREEN, "color_scheme": "light", "locale": "en-GB", "timezone_id": noon(), **options}
    page = await (await browser.new_context(**options)).new_page()
    await page.goto(f"http://127.0.0.1:{port}/dashboard#{view}")
    await page.wait_for_selector("body[data-ready]")
    await page.wait_for_timeout(2500)  # the readings
    return page


async def picture(browser: Browser, port: int, path: Path, **options: Any) -> None:
    page = await opened(browser, port, **options)
    await page.screenshot(path=str(path), full_page=True)
    await page.context.close()


def simulated(fake: FakeEngine) -> None:
    """The picture says that no device is behind it."""
    for worker in fake.workers:
        device = worker.device() | {"name": "simulated device"}
        worker.device = lambda device=device: device


async def shown_picture(browser: Browser, path: Path) -> None:
    async with beside(simulated, **SETTINGS) as running:
        await tell(running)
        page = await opened(browser, running.port, viewport=SCREEN)
        words, shot = await page.evaluate(_WORDS), await page.screenshot()
        await page.context.close()
    kept = PngInfo()
    # As the machine's pace has it.
    words = [re.sub(r"just now|[\d.]+ (s|min) ago", "0 s ago", text) for text in words]
    kept.add_itxt("Words", json.dumps([re.sub(r"\d[\d.,:]*", "#", text) for text in words]), zip=True)
    with Image.open(io.BytesIO(shot)) as image:
        image.convert("RGB").save(path, optimize=True, pnginfo=kept)


def words_of(path: Path) -> list[str]:
    """What stood on the page when its picture was drawn, every number as ``#``."""
    with Image.open(path) as image:
        return list(json.loads(image.text["Words"]))


def unlike(one: Path, other: Path) -> float:
    """The share of two pictures that anybody would see is of another colour."""
    with Image.open(one) as first, Image.open(other) as second:
        if first.size != second.size:
            return 1.0
        size = (first.width // _CELL, first.height // _CELL)
        coarse = [image.convert("RGB").resize(size, Image.Resampling.BOX) for image in (first, second)]
        cells = ImageChops.difference(*coarse).get_flattened_data()
    return sum(max(cell) > _VISIBLE for cell in cells) / len(cells)


async def tell(running: Beside) -> None:
    an_hour(running.history, running.fake, running.clock, Story(running.history, running.fake))
    lives = running.sidecar.app.services.poller._lives
    lives.present = replace(lives.present, baseline_at=running.history.began_at)  # it was found before the hour, too
    await running.sidecar.poll()


async def main(folder: Path | None) -> None:
    async with chromium() as browser:
        if folder is None:
            await shown_picture(browser, PICTURE)
            return
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        async with beside(**SETTINGS) as running:
            await tell(running)
            await picture(browser, running.port, folder / "light.png")
            await picture(browser, running.port, folder / "dark.png", color_scheme="dark")
            await picture(browser, running.port, folder / "phone.png", viewport=PHONE)
            async with sidecar_before(running.fake, engine_port=1, **SETTINGS) as without:
                await picture(browser, without.port, folder / "none.png")
        async with beside(engine={"tensor_parallel": 8}, **SETTINGS) as eight:
            an_hour(eight.history, eight.fake, eight.clock, many_ranks(eight.fake))
            await picture(browser, eight.port, folder / "eight.png", color_scheme="dark")
            for view in VIEWS:
                await picture(browser, eight.port, folder / f"{view}.png", view=view)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
