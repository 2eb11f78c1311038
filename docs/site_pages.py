"""Adds the repository's own pages to the documentation site, and points links at them: a hook of mkdocs.yml.

A page is written once, with links that work in the repository; on the site README.md is the first page, and what lies
outside docs/ has a name of its own.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
OUTSIDE: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASING.md": "releasing.md",
    "SECURITY.md": "reporting.md",
    "helm/README.md": "chart.md",
    "worker_ext/README.md": "worker-extension.md",
}
"""The repository's path of each page outside docs/, and its path on the site."""
_SITE_TO_REPOSITORY: Final = {site: path for path, site in OUTSIDE.items()}
_LINK: Final = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)\s#]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, as MkDocs calls it."""
    for path, site in OUTSIDE.items():
        files.append(File.generated(config, site, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Rewrite the links of one page, as MkDocs calls it."""
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, site: str) -> str:
    """Return a page whose relative links lead to the same pages on the site.

    Args:
        markdown: The page, with links as they work in the repository.
        site: Its path on the site.
    """
    here = posixpath.dirname(_SITE_TO_REPOSITORY.get(site, f"docs/{site}"))

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[2]))
        target = OUTSIDE.get(path, path.removeprefix("docs/"))
        return link[1] + posixpath.relpath(target, posixpath.dirname(site) or ".")

    return _LINK.sub(moved, markdown)
