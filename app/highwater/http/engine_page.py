"""vLLM's own metrics, fetched for each scrape of the sidecar, so that scrapers of vLLM keep working.

They are not cached: if the engine does not return them in time they are left out, because old figures look like a
running engine. And they are checked: one invalid line, or a family that is on the page twice, costs a scraper the whole
page.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Final

from highwater.engine.client import Engine
from highwater.process.errors import EngineError, EngineGarbled

log = logging.getLogger(__name__)

SECONDS: Final = 0.25
# 64 data-parallel engines behind one API server have a page of 3 MB.
MAX_BYTES: Final = 8 * 1024 * 1024
# Read in one go: checking it takes less than a millisecond, for which every stream of the proxy waits.
_PIECE_BYTES: Final = 64 * 1024

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_LABEL = rb'[a-zA-Z_][a-zA-Z0-9_]*+="[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'
_NUMBER = rb"[-+]?(?:\d++(?:\.\d*+)?(?:[eE][-+]?\d++)?|Inf|NaN)"
_SAMPLE = _NAME + rb"(?:\{(?:" + _LABEL + rb",?)*+\})?+ " + _NUMBER + rb"(?: -?\d++)?"
_TYPE = rb"# TYPE " + _NAME + rb" (?:counter|gauge|histogram|summary|untyped)"
_LINES = re.compile(rb"(?:(?:" + _SAMPLE + rb"|" + _TYPE + rb"|#(?! TYPE )[^\n]*+|)\n)*+")
_DECLARATION = re.compile(rb"\n# (HELP|TYPE) (" + _NAME + rb")")
_OURS = re.compile(rb"^highwater_[^\n]*\n", re.MULTILINE)


class EnginePage:
    """The engine's page; scrapes at the same time share one request, and wait for it at most ``seconds``."""

    def __init__(self, engine: Engine, *, seconds: float = SECONDS) -> None:
        self._engine = engine
        self._seconds = seconds
        self._request: asyncio.Task[bytes] | None = None
        self._problem: str | None = None

    async def read(self) -> bytes:
        """Return the engine's families in the classic text format; nothing if it does not return them in time."""
        if self._request is None or self._request.done():
            self._request = asyncio.create_task(self._fetch())
        # A scraper that disconnects must not cancel the request for the others.
        return await asyncio.shield(self._request)

    async def _fetch(self) -> bytes:
        page, problem = b"", None
        try:
            response = await self._engine.get_within("/metrics", seconds=self._seconds, max_bytes=MAX_BYTES)
            if response.status != HTTPStatus.OK or not response.content_type.startswith("text/plain"):
                raise EngineGarbled(f"GET /metrics: status {response.status}, content type {response.content_type!r}")
            page = await _families(response.body)
        except EngineError as exc:
            problem = f"vLLM's own families are left out of /metrics: {exc}"
        if problem != self._problem:  # logged once: there may be twenty scrapes a second
            log.info("%s", problem or "vLLM's own families are in /metrics again")
            self._problem = problem
        return page


async def _families(page: bytes) -> bytes:
    """Leave out families that are declared twice or have our names. Raises EngineGarbled for no exposition."""
    families, pieces, begin = _Families(), list[bytes](), 0
    while begin < len(page):
        end = page.find(b"\n", begin + _PIECE_BYTES) + 1 or len(page)
        pieces.append(families.take(page[begin:end]))
        begin = end
        await asyncio.sleep(0)
    return b"".join(pieces)


class _Families:
    def __init__(self) -> None:
        self._declared: set[tuple[bytes, bytes]] = set()
        self._name = b""
        self._is_kept = True

    def take(self, piece: bytes) -> bytes:
        """Return the part of some whole lines that is passed on. Raises EngineGarbled for no exposition."""
        try:
            piece.decode()
        except UnicodeDecodeError as exc:
            raise EngineGarbled("GET /metrics is no Prometheus exposition") from exc
        if not _LINES.fullmatch(piece):
            raise EngineGarbled("GET /metrics is no Prometheus exposition")
        lines, parts, at = b"\n" + piece, list[bytes](), 1
        for declaration in _DECLARATION.finditer(lines):
            parts.append(self._samples(lines[at : declaration.start() + 1]))
            self._declare(declaration[1], declaration[2])
            at = declaration.start() + 1
        parts.append(self._samples(lines[at:]))
        return b"".join(parts)

    def _declare(self, kind: bytes, name: bytes) -> None:
        if name == self._name:  # its HELP and then its TYPE, unless it begins again
            self._is_kept = self._is_kept and (kind, name) not in self._declared
        else:
            is_again = {(b"HELP", name), (b"TYPE", name)} & self._declared
            self._is_kept = not is_again and not name.startswith(b"highwater_")
        self._declared.add((kind, name))
        self._name = name

    def _samples(self, lines: bytes) -> bytes:
        if not self._is_kept:
            return b""
        return _OURS.sub(b"", lines) if b"highwater_" in lines else lines
