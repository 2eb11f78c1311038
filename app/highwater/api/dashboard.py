"""The page for browsers and its files, and the signpost at ``/``. They hold no secret: the page calls open paths."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

FOLDER: Final = Path(__file__).resolve().parents[1] / "dashboard"
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
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Not the machine's or Python's own table: browsers run a module only if it is served as one. Nothing else is served.
TYPES: Final = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}


def dashboard_router() -> APIRouter:
    files = StaticFiles(directory=FOLDER)
    types = {path.relative_to(FOLDER).as_posix(): TYPES.get(path.suffix) for path in FOLDER.rglob("*")}

    async def served(name: str, request: Request) -> Response:
        media_type = types.get(name)
        if media_type is None:
            raise HTTPException(404, "the dashboard has no such file; the page is at /dashboard")
        response = await files.get_response(name, request.scope)
        response.headers.update(_HEADERS)
        if "content-type" in response.headers:  # not where the browser has it already
            response.headers["content-type"] = f"{media_type}; charset=utf-8"
        return response

    # Not in the schema: it is no interface for programs.
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def root(request: Request) -> Response:
        headers = {**_HEADERS, "Vary": "Accept"}
        if "text/html" in request.headers.get("accept", ""):
            # Relative, as below.
            return RedirectResponse("dashboard", 303, headers=headers)
        return PlainTextResponse(SIGNPOST, headers=headers)

    @router.api_route("/dashboard", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return await served("index.html", request)

    @router.api_route("/dashboard/{name:path}", methods=["GET", "HEAD"])
    async def asset(request: Request, name: str) -> Response:
        if name in {"", "index.html"}:
            # The page's addresses are relative, so that it also works beneath a reverse proxy's prefix.
            return RedirectResponse("../dashboard", 308, headers=_HEADERS)
        return await served(name, request)

    return router
