"""Finds the images and videos of a request in its body's bytes as they pass. Pure: no I/O, no clock.

It parses no JSON and keeps no body: it looks for the keys whose strings vLLM loads media from (``url``, ``image_url``
and ``video_url`` of OpenAI's API, ``data`` of Anthropic's, bare data URLs of Cohere's), decodes the first bytes of such
a string, and passes over the rest of it from quote to quote. Within a string every quote has a backslash before it, so
that a text which only speaks of images matches nothing.

::

    TEXT ──a key──► BETWEEN ──its string──► VALUE ──measured, or no image──► REST ──the closing quote──► TEXT

What it holds is the last few bytes of a text, or the first 256 KiB of one string.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import replace
from enum import Enum
from typing import Literal

from gated_proxy.door_items import Media
from gated_proxy.door_media import BY_URL, UNKNOWN, VIDEO_FRAMES, measure

# Phones write that much metadata before the dimensions.
MAX_VALUE_BYTES = 256 * 1024
_FIRST_TRY_BYTES = 512
# Where quotes are rarer than this it is cheaper to go from one to the next than to look at every byte.
_FAR_BYTES = 512
_WINDOW_BYTES = 2048
# The end of a key and what is looked at before it, every character of it written as an escape.
_KEY_BYTES = 64
_MAX_MEDIA_TYPE_BYTES = 256

_QUOTE = ord('"')
_URL_KEY, _DATA_KEY, _BARE_URL = b'url"', b'data"', b'"data:'
_KEY = re.compile(rb'(?:url|data)"')
_HIDDEN = (b"\\u006", b"\\u007")  # letters that no encoder escapes: they hide a word
_ESCAPED_KEY = re.compile(
    rb'(?P<url>(?:u|\\u0075)(?:r|\\u0072)(?:l|\\u006[cC])")|(?:d|\\u0064)(?:a|\\u0061)(?:t|\\u0074)(?:a|\\u0061)"'
)
# Where a body has none of these (for its path class, or for all others) vLLM finds no image and no video in it.
_ANY_MARK = (b'_url"',)
_MARKS = {"messages": (b'source"',), "other_v2": (*_ANY_MARK, _BARE_URL)}
_BETWEEN = re.compile(rb"[\s:]*")
_ESCAPE = re.compile(rb"\\(?:u00([0-9a-fA-F]{2})|u[0-9a-fA-F]{4}|(.))", re.DOTALL)
_LONGEST_ESCAPE = 6
_WHITESPACE = b" \t\r\n\f"
_SCHEMES = (b"http:", b"https:", b"file:")
_LONGEST_SCHEME = 6
_WIDEST_CHARACTER = 4


def may_have_media(body: bytes, path_class: str) -> bool:
    """Return whether a whole body is worth a scan: mostly it is not, and this is all that it costs."""
    for mark in _MARKS.get(path_class, _ANY_MARK):
        if body.rfind(mark) >= 0:
            return True
    is_hidden = body.rfind(b"\\u00") >= 0 and any(hidden in body for hidden in _HIDDEN)
    return is_hidden or b"\0" in body[:_WIDEST_CHARACTER]


class _State(Enum):
    TEXT = "text"
    BETWEEN = "between"
    VALUE = "value"
    REST = "rest"


class Scanner:
    """Scans one body, piece by piece.

    Args:
        has_bare_urls: Data URLs count wherever they stand (Cohere's ``images``), not only behind a key.
    """

    def __init__(self, *, has_bare_urls: bool = False) -> None:
        self._has_bare_urls = has_bare_urls
        self._state = _State.TEXT
        self._is_first = True
        self._is_wide = False  # UTF-16 or UTF-32, which JSON's readers take as well
        self._tail = b""  # of a text: a key may go on in the next piece
        self._is_url = True  # the string's key names a URL, not the data itself
        self._value = bytearray()
        self._next_try_bytes = 0

    def feed(self, piece: bytes) -> list[Media]:
        """Return what became known with this piece: an image may be complete with it, and never was before."""
        if self._is_first:
            piece, self._tail = self._tail + piece, b""
            if len(piece) < _WIDEST_CHARACTER:
                self._tail = piece
                return []
            self._is_first = False
            self._is_wide = b"\0" in piece[:_WIDEST_CHARACTER]
        if self._is_wide:
            piece = piece.replace(b"\0", b"")
        if self._tail:
            piece, self._tail = self._tail + piece, b""
        found: list[Media] = []
        at = 0
        while at < len(piece):
            if self._state is _State.REST:
                at = piece.find(b'"', at) + 1
                if not at:
                    break
                self._state = _State.TEXT
            elif self._state is _State.VALUE:
                at = self._take_value(piece, at, found)
            elif self._state is _State.BETWEEN:
                at = self._between(piece, at)
            else:
                at = self._search(piece, at)
        return found

    def _search(self, text: bytes, start: int) -> int:
        """Go to the next key of interest; return the place behind it, or the text's end."""
        at = start
        while at < len(text):
            quote = text.find(b'"', at)
            if quote < 0:
                at = len(text)
                break
            if quote - at > _FAR_BYTES:
                at = quote - _KEY_BYTES
            end = min(at + _WINDOW_BYTES, len(text))
            found = self._find_key(text, at, end)
            if found is not None:
                return found
            at = end if end == len(text) else end - _KEY_BYTES
        self._tail = text[max(start, at - _KEY_BYTES) :]
        return at

    def _find_key(self, text: bytes, start: int, end: int) -> int | None:
        # CPython's search from the right is several times as fast, and mostly there is nothing.
        if text.rfind(_URL_KEY, start, end) >= 0 or text.rfind(_DATA_KEY, start, end) >= 0:
            at = start
            while (key := _KEY.search(text, at, end)) is not None:
                is_url = key[0] == _URL_KEY
                if _names_a_url(text, key.start()) if is_url else text[key.start() - 1 : key.start()] == b'"':
                    return self._begin(_State.BETWEEN, key.end(), is_url=is_url)
                at = key.end()
        if self._has_bare_urls and (bare := text.find(_BARE_URL, start, end)) >= 0:
            return self._begin(_State.VALUE, bare + 1, is_url=True)
        is_hidden = text.rfind(b"\\u00", start, end) >= 0 and any(text.find(each, start, end) >= 0 for each in _HIDDEN)
        if is_hidden and (escaped := _ESCAPED_KEY.search(text, start, end)):
            return self._begin(_State.BETWEEN, escaped.end(), is_url=escaped["url"] is not None)
        return None

    def _begin(self, state: _State, at: int, *, is_url: bool) -> int:
        self._state, self._is_url = state, is_url
        self._value.clear()
        self._next_try_bytes = _FIRST_TRY_BYTES
        return at

    def _between(self, text: bytes, at: int) -> int:
        """Pass over what stands between a key and its string; anything else than a string is none of ours."""
        space = _BETWEEN.match(text, at)
        at = at if space is None else space.end()
        if at < len(text):
            self._state = _State.VALUE if text[at] == _QUOTE else _State.TEXT
            at += self._state is _State.VALUE
        return at

    def _take_value(self, text: bytes, at: int, found: list[Media]) -> int:
        closing = text.find(b'"', at)
        end = len(text) if closing < 0 else closing
        value = self._value
        while True:
            taken = text[at : min(at + self._next_try_bytes - len(value), end)]
            value += taken
            at += len(taken)
            is_all = at == closing or len(value) >= MAX_VALUE_BYTES
            if not is_all and len(value) < self._next_try_bytes:
                return at
            media = _judge(bytes(value), is_url=self._is_url, is_all=is_all)
            if is_all or media is not None:
                break
            self._next_try_bytes = min(2 * self._next_try_bytes, MAX_VALUE_BYTES)
        value.clear()
        self._state = _State.REST
        if media:
            found.append(media)
        return at


def _names_a_url(text: bytes, at: int) -> bool:
    before = text[max(at - 7, 0) : at]
    return before.endswith((b'"', b'"image_', b'"video_'))


def _judge(value: bytes, *, is_url: bool, is_all: bool) -> Media | Literal[False] | None:
    """Measure what a string's first bytes say; False where it is no image and no video, None where it takes more."""
    value = _without_escapes(value, is_all=is_all).lstrip(_WHITESPACE)
    media_type = b""
    start = value[:_LONGEST_SCHEME].lower()
    if start.startswith(b"data:"):
        head, comma, value = value.partition(b",")
        media_type = head[5:].lower()
        if not comma:
            return False if is_all or len(head) > _MAX_MEDIA_TYPE_BYTES else None
        if not media_type.endswith(b";base64"):  # vLLM refuses it
            return False
    elif is_url:
        is_judged = is_all or len(start) == _LONGEST_SCHEME
        return BY_URL if start.startswith(_SCHEMES) else False if is_judged else None
    media = measure(_decoded(value), is_all=is_all)
    if media is UNKNOWN and (not is_url or media_type.startswith((b"audio/", b"text/", b"application/"))):
        return False
    if media is not None and media_type.startswith(b"video/jpeg"):  # vLLM's own: images, with a comma between two
        return replace(media, frames=VIDEO_FRAMES)
    return media


def _without_escapes(value: bytes, *, is_all: bool) -> bytes:
    if b"\\" not in value:
        return value
    if not is_all:  # the last escape may be incomplete
        at = value.rfind(b"\\", -_LONGEST_ESCAPE)
        value = value if at < 0 else value[:at]
    return _ESCAPE.sub(_unescaped, value)


def _unescaped(match: re.Match[bytes]) -> bytes:
    code, character = match.groups()
    if code is not None:
        return bytes((int(code, 16),))
    return character if character is not None and character in b'/\\"' else b""


def _decoded(base64: bytes) -> bytes:
    kept = base64.translate(None, _WHITESPACE)
    try:
        return binascii.a2b_base64(kept[: len(kept) & ~3] + b"==")
    except binascii.Error:
        return b""
