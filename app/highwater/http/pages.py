"""Pages for browsers: the dashboard with its files, the signpost at ``/``, and the alerts' runbooks.

They hold no secret: the page calls open paths, and alerts can link to the runbooks without a published documentation.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from markdown_it import MarkdownIt

from highwater.http.text import markdown

DASHBOARD: Final = Path(__file__).resolve().parents[1] / "dashboard"
# Only this page's own files, no inline script or style, nothing from elsewhere, and no string that becomes HTML.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
# For a reader without a browser and without documentation.
SIGNPOST: Final = """\
Highwater, the memory control plane beside a vLLM server.

/dashboard            the page, for browsers
/memory?format=text   where the memory is; without format=text as JSON
/memory/budget        why it is that much
/memory/events        what happened, newest first
/memory/incidents     why the engine died, hung or ran out of memory
/policy               what gives memory back by itself
/metrics              for Prometheus
/livez /readyz /health/deep    health
/memory/openapi.json  every path, with what it takes and returns

The same at a shell: highwater status, highwater top, highwater --help
"""
_HEADERS: Final = {
    "Cache-Control": "no-cache",  # kept, and asked about each time: the page and its modules must be of one version
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_DASHBOARD_HEADERS: Final = _HEADERS | {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
}
_RUNBOOK_HEADERS: Final = _HEADERS | {
    "Content-Security-Policy": f"{markdown.CONTENT_SECURITY_POLICY}; frame-ancestors 'none'"
}
# Not the machine's or Python's own table: browsers run a module only if it is served as one. Nothing else is served.
TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}
_FILES: Final = StaticFiles(directory=DASHBOARD)
_FILE_TYPES: Final = {
    path.relative_to(DASHBOARD).as_posix(): TYPES.get(path.suffix) for path in sorted(DASHBOARD.rglob("*"))
}

RUNBOOKS_PREFIX: Final = "/docs/runbooks/"
# In an installed package beneath it, else beneath the repository.
RUNBOOKS: Final = next(
    (folder for parent in Path(__file__).resolve().parents if (folder := parent / "docs" / "runbooks").is_dir()), None
)
# A link leads to another page of this folder, or to a page that the sidecar does not have: that one is named instead.
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_RUNBOOK: Final = re.compile(r"(Highwater\w+)\.md(#.*)?")

# Not in the schema: they are no interface for programs.
router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def root(request: Request) -> Response:
    headers = {**_DASHBOARD_HEADERS, "Vary": "Accept"}
    if "text/html" in request.headers.get("accept", ""):
        # Relative, as below.
        return RedirectResponse("dashboard", 303, headers=headers)
    return PlainTextResponse(SIGNPOST, headers=headers)


@router.api_route("/dashboard", methods=["GET", "HEAD"])
async def dashboard(request: Request) -> Response:
    return await _served("index.html", request)


@router.api_route("/dashboard/{name:path}", methods=["GET", "HEAD"])
async def asset(request: Request, name: str) -> Response:
    if name in {"", "index.html"}:
        # The page's addresses are relative, so that it also works beneath a reverse proxy's prefix.
        return RedirectResponse("../dashboard", 308, headers=_DASHBOARD_HEADERS)
    return await _served(name, request)


async def _served(name: str, request: Request) -> Response:
    media_type = _FILE_TYPES.get(name)
    if media_type is None:
        raise HTTPException(404, "the dashboard has no such file; the page is at /dashboard")
    response = await _FILES.get_response(name, request.scope)
    response.headers.update(_DASHBOARD_HEADERS)
    if "content-type" in response.headers:  # not where the browser has it already
        response.headers["content-type"] = f"{media_type}; charset=utf-8"
    return response


@cache
def runbooks(folder: Path | None = RUNBOOKS) -> dict[str, str]:
    """Return every runbook by its name, as it was written, read once; none without a folder."""
    paths = [] if folder is None else sorted(folder.glob("Highwater*.md"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


@router.get(RUNBOOKS_PREFIX)
async def runbooks_listed() -> Response:
    text = "# Runbooks\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in runbooks())
    return HTMLResponse(runbook_page("Runbooks", text), headers=_RUNBOOK_HEADERS)


@router.get(RUNBOOKS_PREFIX + "{file}")
async def runbook(file: str) -> Response:
    name, _, ending = file.rpartition(".")
    text = runbooks().get(name)
    if text is None or ending not in ("html", "md"):
        raise HTTPException(404, f"there is no runbook {file}; GET {RUNBOOKS_PREFIX} lists them")
    if ending == "md":
        return PlainTextResponse(text, headers=_RUNBOOK_HEADERS)
    return HTMLResponse(runbook_page(name, text), headers=_RUNBOOK_HEADERS)


@cache
def runbook_page(title: str, text: str) -> str:
    """Return Markdown as a whole HTML document; HTML within the Markdown is shown as text."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(_LINK.sub(_link, text))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{markdown.STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )


def _link(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    if found := _RUNBOOK.fullmatch(target):
        return f"[{text}]({found[1]}.html{found[2] or ''})"
    if target.startswith(("https://", "http://", "#")):
        return link[0]
    return f"{text} (`docs/{target.removeprefix('../')}`)" if text != target.removeprefix("../") else f"`docs/{text}`"
