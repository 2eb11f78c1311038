"""The dashboard's files, as a browser gets them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from highwater.http.pages import DASHBOARD, TYPES
from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import TOKEN, both_on_ports, sidecar_before

ASSETS = sorted(path.relative_to(DASHBOARD).as_posix() for path in DASHBOARD.rglob("*") if path.suffix in TYPES)
MOST_LINES = 2300


class References(HTMLParser):
    """What a page loads, and what in it would be inline."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.inline: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        if tag in {"script", "link", "img"}:
            self.loaded.add(given.get("src") or given.get("href"))


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_page_is_there_for_everyone(method):
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as sidecar:
        answer = await sidecar.client.request(method, "/dashboard")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert int(answer.headers["content-length"]) == (DASHBOARD / "index.html").stat().st_size
    assert bool(answer.content) == (method == "GET")


async def test_nothing_foreign_may_run_in_it():
    async with sidecar_before(FakeEngine()) as sidecar:
        headers = (await sidecar.client.get("/dashboard")).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_every_file_is_served_as_what_it_is():
    async with sidecar_before(FakeEngine()) as sidecar:
        answers = {name: await sidecar.client.get(f"/dashboard/{name}", follow_redirects=True) for name in ASSETS}
    for name, answer in answers.items():
        assert answer.status_code == 200
        assert answer.headers["content-type"].split(";")[0] == TYPES[f".{name.rpartition('.')[2]}"]
        assert answer.content == (DASHBOARD / name).read_bytes()
        assert {"content-security-policy", "x-content-type-options", "etag"} <= set(answer.headers)


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/main.js"])
async def test_a_browser_asks_again_and_loads_only_what_changed(path):
    """The page and its modules must be of one version."""
    async with sidecar_before(FakeEngine()) as sidecar:
        first = await sidecar.client.get(path)
        tag = first.headers["etag"]
        again = await sidecar.client.get(path, headers={"If-None-Match": f'"other", W/{tag}'})
        changed = await sidecar.client.get(path, headers={"If-None-Match": '"other"'})
    assert first.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert changed.status_code == 200


async def test_no_other_file_is():
    names = ["nothing.js", "vendor", "vendor/README.md", "%2e%2e/main.py", "..%2fmain.py", "/etc/passwd", "main.js/"]
    async with sidecar_before(FakeEngine()) as sidecar:
        assert {await sidecar.raw("GET", f"/dashboard/{name}") for name in names} <= {404, 400}


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/index.html"])
async def test_the_page_has_one_address(path):
    async with sidecar_before(FakeEngine()) as sidecar:
        answer = await sidecar.client.get(path)
        there = await sidecar.client.get(path, follow_redirects=True)
    assert (answer.status_code, answer.headers["location"]) == (308, "../dashboard")
    assert there.url.path == "/dashboard"


async def test_it_is_ours_and_never_the_engines():
    async with both_on_ports() as sidecar:
        before = len(sidecar.fake.calls)
        statuses = [
            (await sidecar.client.request(method, path)).status_code
            for method, path in [("POST", "/dashboard"), ("GET", "/dashboard/x"), ("DELETE", "/dashboard/main.js")]
        ]
        assert statuses == [405, 404, 405]
        assert len(sidecar.fake.calls) == before


def test_the_page_loads_what_there_is_and_nothing_inline():
    page = References()
    page.feed((DASHBOARD / "index.html").read_text(encoding="utf-8"))
    assert page.inline == []
    assert {name.removeprefix("dashboard/") for name in page.loaded} <= set(ASSETS)
    modules = {name for name in ASSETS if name.endswith(".js") and "/" not in name}
    assert {f"dashboard/{name}" for name in modules} <= page.loaded


@pytest.mark.parametrize("name", [name for name in ASSETS if not name.startswith("vendor/") and name.endswith(".js")])
def test_foreign_text_is_never_markup(name):
    text = (DASHBOARD / name).read_text(encoding="utf-8")
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text) == []
    assert set(re.findall(r'from "\./([^"]+)"', text)) <= set(ASSETS)


def test_the_page_stays_small():
    ours = [DASHBOARD / name for name in ASSETS if name.endswith(".js") and "/" not in name and name != "facts.js"]
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in ours) <= MOST_LINES


def test_what_is_vendored_is_told_with_its_licence():
    note = (DASHBOARD / "vendor" / "README.md").read_text(encoding="utf-8")
    for folder in (path for path in (DASHBOARD / "vendor").iterdir() if path.is_dir()):
        version = folder.name.rpartition("-")[2]
        assert f"| {version} |" in note
        licence = (folder / "LICENSE").read_text(encoding="utf-8")
        assert "Permission is hereby granted" in licence or "Apache License" in licence
