"""The picture in README and docs/dashboard.md is of the page as it is now."""

from __future__ import annotations

import pytest

from tests.browser.screenshot import PICTURE, shown_picture, unlike, words_of

MAX_BYTES = 250_000
# Measured: redrawn 0, in another font 0.0002; another colour of one component 0.07, without the legend 0.13.
MAX_UNLIKE = 0.01


@pytest.mark.parametrize("page", ["README.md", "docs/dashboard.md"])
async def test_what_is_simulated_is_called_so_beside_its_picture(page):
    _, _, after = (PICTURE.parents[2] / page).read_text(encoding="utf-8").partition(f"images/{PICTURE.name})\n\n")
    assert after.startswith("*Simulated: ")


async def test_the_picture_of_the_page_is_as_it_would_be_drawn_now(browser, tmp_path):
    drawn = tmp_path / PICTURE.name
    await shown_picture(browser, drawn)
    assert words_of(PICTURE) == words_of(drawn)
    assert unlike(PICTURE, drawn) < MAX_UNLIKE
    assert PICTURE.stat().st_size < MAX_BYTES
