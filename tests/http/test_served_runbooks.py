"""The runbooks, as an alert's link finds them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from highwater.http import pages
from highwater.http.pages import runbook_page, runbooks
from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import TOKEN, sidecar_before

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
NAMES = sorted(path.stem for path in RUNBOOKS.glob("*.md"))


async def test_every_runbook_is_a_page_for_everyone():
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as sidecar:
        pages = {name: await sidecar.client.get(f"/docs/runbooks/{name}.html") for name in NAMES}
    assert {answer.status_code for answer in pages.values()} == {200}
    for name, answer in pages.items():
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert f"<h1>{name}</h1>" in answer.text
        assert "<h2>What to do</h2>" in answer.text


async def test_a_runbook_is_there_as_it_was_written():
    async with sidecar_before(FakeEngine()) as sidecar:
        answer = await sidecar.client.get(f"/docs/runbooks/{NAMES[0]}.md")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == (RUNBOOKS / f"{NAMES[0]}.md").read_text(encoding="utf-8")


async def test_the_list_links_every_runbook():
    """Relative, so that it works beneath a reverse proxy's prefix."""
    async with sidecar_before(FakeEngine()) as sidecar:
        answer = await sidecar.client.get("/docs/runbooks/")
    assert re.findall(r'href="([^"]*)"', answer.text) == [f"{name}.html" for name in NAMES]


async def test_every_link_of_a_page_leads_to_one_that_is_served():
    async with sidecar_before(FakeEngine()) as sidecar:
        texts = [(await sidecar.client.get(f"/docs/runbooks/{name}.html")).text for name in NAMES]
    targets = {target for text in texts for target in re.findall(r'href="([^"]*)"', text)}
    local = {target for target in targets if not target.startswith("https://")}
    assert local
    assert local <= {f"{name}.html" for name in NAMES}
    assert not any("](" in text for text in texts)


@pytest.mark.parametrize(
    "path", ["nothing.html", "HighwaterOutOfMemory", "HighwaterOutOfMemory.txt", "..%2fpolicy.md", "%2e%2e/policy.html"]
)
async def test_nothing_else_is_served(path: str):
    async with sidecar_before(FakeEngine()) as sidecar:
        assert await sidecar.raw("GET", f"/docs/runbooks/{path}") in {400, 404}


async def test_nothing_runs_in_a_page():
    """The page's own style is all that its policy admits, and no other site can frame it."""
    async with sidecar_before(FakeEngine()) as sidecar:
        headers = (await sidecar.client.get(f"/docs/runbooks/{NAMES[0]}.html")).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_markup_in_a_runbook_is_text():
    assert "<script>" not in runbook_page("<script>", "# a\n\n<script>alert(1)</script>\n\n[x](javascript:alert)")
    assert "javascript:" not in re.findall(r'href="([^"]*)"', runbook_page("a", "[x](javascript:alert)"))


async def test_the_engines_own_documentation_is_still_the_engines():
    async with sidecar_before(FakeEngine()) as sidecar:
        answer = await sidecar.client.get("/docs")
    assert "highwater" not in answer.text.lower()


def test_an_installation_without_runbooks_serves_the_rest(tmp_path: Path):
    assert runbooks(None) == {}
    assert runbooks(tmp_path) == {}
    assert pages.RUNBOOKS == RUNBOOKS
