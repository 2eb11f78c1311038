"""The documentation site: it builds without network, its links lead somewhere, and it loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LOADED = re.compile(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"?(https?:)?//", re.IGNORECASE)


def load_hook():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_links = load_hook().site_links


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a broken link, anchor or menu entry, and a page that no menu names, end the build."""
    folder = tmp_path_factory.mktemp("site")
    # No proxy answers there: whatever asked another host would fail.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_on_the_site(site: Path):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages | {Path("index.html")} <= {path.relative_to(site) for path in site.rglob("*.html")}
    assert "What <code>curl /memory</code> shows" in (site / "index.html").read_text(encoding="utf-8")


def test_a_page_loads_nothing_from_elsewhere(site: Path):
    pages = sorted(site.rglob("*.html"))
    assert [page.name for page in pages if _LOADED.search(page.read_text(encoding="utf-8"))] == []
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not any(re.search(r"url\(['\"]?https?:|@import", style) for style in styles)


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("index.md", "docs/policy.md#rules", "policy.md#rules"),
        ("index.md", "docs/images/a.png", "images/a.png"),
        ("policy.md", "../worker_ext/README.md", "worker-extension.md"),
        ("runbooks/A.md", "../policy.md", "../policy.md"),
        ("runbooks/A.md", "../../README.md", "../index.md"),
        ("chart.md", "../docs/kubernetes.md", "kubernetes.md"),
        ("policy.md", "#rules", "#rules"),
        ("policy.md", "https://example.org/docs/a.md", "https://example.org/docs/a.md"),
    ],
)
def test_a_link_leads_to_the_same_page_as_in_the_repository(page: str, link: str, target: str):
    assert site_links(f"[a]({link})", page) == f"[a]({target})"
