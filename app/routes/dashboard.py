"""The page for browsers, and what it is made of: files that are read once, at start."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse

FOLDER: Final = Path(__file__).resolve().parents[1] / "dashboard"
# Only this page's own files, no inline script or style, nothing from elsewhere, and no string that becomes HTML.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = {
    "Cache-Control": "no-cache",  # kept, and asked about each time: the page and its modules must be of one version
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Not the machine's or Python's own table: browsers run a module only if it is served as one.
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page.

    Attributes:
        body: Its bytes.
        media_type: What it is served as.
        etag: Changes with its bytes.
    """

    body: bytes
    media_type: str
    etag: str


def read_assets(folder: Path = FOLDER) -> dict[str, Asset]:
    """Every file that a browser is given, by its path beneath the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in _TYPES and path.is_file())
    return {path.relative_to(folder).as_posix(): _asset(path) for path in files}


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def dashboard_router() -> APIRouter:
    """``/dashboard`` and the files beneath it. They hold no secret: what the page shows it asks for like anyone."""
    assets = read_assets()
    # Not in the schema: it is no interface for programs. HEAD is for those who look whether it is there.
    router = APIRouter(include_in_schema=False)

    @router.api_route("/dashboard", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        """Where the memory is, whether it grows, and what gave it back: live, for people."""
        return _answer(request, assets["index.html"])

    @router.api_route("/dashboard/{name:path}", methods=["GET", "HEAD"])
    async def asset(request: Request, name: str) -> Response:
        """One of the page's files."""
        if name in {"", "index.html"}:
            # The page's addresses are relative, so that it also works beneath a reverse proxy's prefix.
            return RedirectResponse("../dashboard", 308, headers=_HEADERS)
        if name not in assets:
            raise HTTPException(404, "the dashboard has no such file; the page is at /dashboard")
        return _answer(request, assets[name])

    return router


def _answer(request: Request, asset: Asset) -> Response:
    headers = _HEADERS | {"ETag": asset.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
