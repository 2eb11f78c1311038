"""vLLM's own metrics, fetched for a scrape of ours, so that whatever scraped vLLM goes on working.

Nothing of them is kept: where the engine does not give them in time they are left out, because a figure that stays as
it was looks like an engine that is there. And nothing is passed on unread: one line that is no exposition, or a family
that is on the page twice, costs a scraper the whole page.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Final

from highwater.engine.client import Engine
from highwater.errors import EngineError, EngineGarbled

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
    """The engine's page, asked for by as many scrapes as come at once.

    Args:
        engine: The engine.
        seconds: How long a scrape waits for it.
    """

    def __init__(self, engine: Engine, *, seconds: float = SECONDS) -> None:
        self._engine = engine
        self._seconds = seconds
        self._asking: asyncio.Task[bytes] | None = None
        self._problem: str | None = None

    async def read(self) -> bytes:
        """Return the engine's families in the classic text format; nothing where it does not give them in time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        # One scraper that leaves must not take the page from the others.
        return await asyncio.shield(self._asking)

    async def _ask(self) -> bytes:
        try:
            page = await self._fetch()
        except EngineError as exc:
            self._note(f"vLLM's own families are left out of /metrics: {exc}")
            return b""
        self._note(None)
        return page

    async def _fetch(self) -> bytes:
        response = await self._engine.get_within("/metrics", seconds=self._seconds, max_bytes=MAX_BYTES)
        if response.status != HTTPStatus.OK or not response.content_type.startswith("text/plain"):
            raise EngineGarbled(f"GET /metrics: status {response.status}, content type {response.content_type!r}")
        return await _families(response.body)

    def _note(self, problem: str | None) -> None:
        """Log each change once: it may be scraped twenty times a second."""
        if problem != self._problem:
            log.info("%s", problem or "vLLM's own families are in /metrics again")
            self._problem = problem


async def _families(page: bytes) -> bytes:
    """Return a page without families that are declared twice or have our names.

    Raises:
        EngineGarbled: It is no exposition.
    """
    families, kept, begin = _Families(), list[bytes](), 0
    while begin < len(page):
        end = page.find(b"\n", begin + _PIECE_BYTES) + 1 or len(page)
        kept.append(families.take(page[begin:end]))
        begin = end
        await asyncio.sleep(0)
    return b"".join(kept)


class _Families:
    """The families of one page, taken piece by piece."""

    def __init__(self) -> None:
        self._declared: set[tuple[bytes, bytes]] = set()
        self._name = b""
        self._is_kept = True

    def take(self, piece: bytes) -> bytes:
        """Return what stays of some whole lines.

        Raises:
            EngineGarbled: They are no exposition.
        """
        if not _LINES.fullmatch(piece) or not _is_utf8(piece):
            raise EngineGarbled("GET /metrics is no Prometheus exposition")
        lines, kept, at = b"\n" + piece, list[bytes](), 1
        for found in _DECLARATION.finditer(lines):
            kept.append(self._samples(lines[at : found.start() + 1]))
            self._declare(found[1], found[2])
            at = found.start() + 1
        kept.append(self._samples(lines[at:]))
        return b"".join(kept)

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


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
