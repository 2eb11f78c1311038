"""The alerts' runbooks, read-only, for alerts to link to without a published documentation."""

from __future__ import annotations

import re
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from markdown_it import MarkdownIt

from highwater.diagnose.markdown import CONTENT_SECURITY_POLICY, STYLE

PREFIX: Final = "/docs/runbooks/"
# In an installed package beneath it, else beneath the repository.
FOLDER: Final = next(
    (folder for parent in Path(__file__).resolve().parents if (folder := parent / "docs" / "runbooks").is_dir()), None
)
# A link leads to another page of this folder, or to a page that the sidecar does not have: that one is named instead.
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_RUNBOOK: Final = re.compile(r"(Highwater\w+)\.md(#.*)?")

_HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": f"{CONTENT_SECURITY_POLICY}; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def runbooks_router(folder: Path | None = FOLDER) -> APIRouter:
    """Serve a list of the runbooks, and each as a page and as it was written, read once; without a folder 404."""
    paths = [] if folder is None else sorted(folder.glob("Highwater*.md"))
    pages = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    router = APIRouter(include_in_schema=False)  # no interface for programs

    @router.get(PREFIX)
    async def listed() -> Response:
        text = "# Runbooks\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in pages)
        return HTMLResponse(page("Runbooks", text), headers=_HEADERS)

    @router.get(PREFIX + "{file}")
    async def runbook(file: str) -> Response:
        name, _, ending = file.rpartition(".")
        if name not in pages or ending not in ("html", "md"):
            raise HTTPException(404, f"there is no runbook {file}; GET {PREFIX} lists them")
        if ending == "md":
            return PlainTextResponse(pages[name], headers=_HEADERS)
        return HTMLResponse(page(name, pages[name]), headers=_HEADERS)

    return router


@lru_cache(maxsize=64)
def page(title: str, text: str) -> str:
    """Return Markdown as a whole HTML document; HTML within the Markdown is shown as text."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(_LINK.sub(_link, text))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )


def _link(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    if found := _RUNBOOK.fullmatch(target):
        return f"[{text}]({found[1]}.html{found[2] or ''})"
    if target.startswith(("https://", "http://", "#")):
        return link[0]
    return f"{text} (`docs/{target.removeprefix('../')}`)" if text != target.removeprefix("../") else f"`docs/{text}`"
