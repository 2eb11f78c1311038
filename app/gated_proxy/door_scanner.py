"""Finds the images and videos of a request in its body's bytes as they pass. Pure: no I/O, no clock.

It parses no JSON and keeps no body: it looks for the keys that hold what vLLM loads (``image_url`` and ``video_url`` of
OpenAI's API, ``source`` of Anthropic's, ``images`` of Cohere's), goes from string to string within them, decodes the
first bytes of those that vLLM loads, and passes over the rest. Within a string every quote has a backslash before it,
so that a text which only speaks of images matches nothing. In doubt it counts an item of unknown size.

::

    TEXT ──a key──► BETWEEN ──its string──► VALUE ──measured, or no image──► REST ──the closing quote──► TEXT

What it holds is the last few bytes of a text, or the first 64 KiB of one string.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import replace
from enum import Enum
from typing import Literal

from gated_proxy.door_items import Media
from gated_proxy.door_media import BY_URL, UNKNOWN, VIDEO_FRAMES, measure

# Each connection may hold that much.
MAX_VALUE_BYTES = 64 * 1024
_FIRST_TRY_BYTES = 512

_QUOTE, _BACKSLASH = b'"\\'


def _spelled(*names: str) -> bytes:
    """Return a pattern of any of these names, whichever of their letters are written as escapes."""
    letters = {letter: f"(?:{letter}|\\\\(?i:u{ord(letter):04x}))" for name in names for letter in name}
    return "|".join("".join(letters[letter] for letter in name) for name in names).encode()


_HOLDERS = ("image_url", "video_url", "source", "images")
# No value, or none that begins as what vLLM loads, as far as that is seen.
_LOADED = rb"\s|(?i:data:|http|file:)|[a-zA-Z]{0,4}(?:\\|\Z)"
_IDLE = rb'\s*+(?:[,}\]]|:\s*+(?:[^\s"{\[]|"(?!%b)))' % _LOADED
_KEY = re.compile(rb'"(?=[ivs\\])(%b)"(?!%b)' % (_spelled(*_HOLDERS), _IDLE))
# Within a holder, behind whole strings that are no names: braces up to the next string, or a string's beginning.
_NAME = rb'(?=[disuv\\])(?:%b)"' % _spelled(*_HOLDERS, "url", "data")
_TOKEN = re.compile(rb'(?:[^"{}\[\]]++|"(?!%b)[^"\\]*+")*+([{}\[\]][^"]*+|"(%b)?)' % (_NAME, _NAME))
_LIST_TOKEN = re.compile(rb'[^"{}\[\]]*+([{}\[\]][^"]*+|")')
_BRACE = re.compile(rb"[{}\[\]]")
_KEY_BYTES = 64  # more than the longest of them has, every character of it written as an escape
_OPENERS = {b"source": b"{", b"images": b'["'}
_ANY_OPENER = b'{"'
# vLLM loads one item of a holder that is no list; each takes a few.
_MOST_TOKENS = 64
# Where quotes are that rare they are looked at one by one: the C library finds one byte five times as fast as CPython
# several.
_BYTES_A_QUOTE = 4096
# Where a body has none of these vLLM finds no image and no video in it.
_MARKS = (b'_url"', b'source"', b'images"')
_HIDDEN = re.compile(rb"\\u00[2-7]")
_BETWEEN = re.compile(rb"[\s:]*")
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_ESCAPE = re.compile(rb"\\(?:u00([0-9a-fA-F]{2})|u[0-9a-fA-F]{4}|(.))", re.DOTALL)
_LONGEST_ESCAPE = 6
_WHITESPACE = b" \t\r\n\f"
_DATA, _ADDRESSES = b"data:", (b"http", b"file:")
_WIDEST_CHARACTER = 4


def may_have_media(body: bytes) -> bool:
    """Return whether a whole body is worth a scan: mostly it is not, and this is all that it costs."""
    return _is_wide(body) or _next_key(body, 0) is not None


def _next_key(text: bytes, at: int) -> re.Match[bytes] | None:
    """Find the next key that may have an image; most texts have few quotes, or none of the marks."""
    if not at:  # else it would look for the marks once more behind each key
        for _ in range(len(text) // _BYTES_A_QUOTE):
            at = text.find(b'"', at)
            if at < 0:
                return None
            key = _KEY.match(text, at)
            if key is not None:
                return key
            at += 1
        # CPython's search from the right is several times as fast, and mostly there is nothing.
        for mark in _MARKS:
            if text.rfind(mark, at) >= 0:
                break
        else:
            if text.rfind(b"\\u00", at) < 0 or _HIDDEN.search(text, at) is None:
                return None
    return _KEY.search(text, at)


def _is_wide(body: bytes) -> bool:
    """UTF-16 or UTF-32, which JSON's readers take as well."""
    return b"\0" in body[:_WIDEST_CHARACTER]


class _State(Enum):
    START = "start"
    TEXT = "text"
    BETWEEN = "between"
    VALUE = "value"
    REST = "rest"
    UNREAD = "unread"


class Scanner:
    """Scans one body, piece by piece."""

    def __init__(self) -> None:
        self._state = _State.START
        self._tail = b""  # of a text: a key may go on in the next piece
        self._name = b""  # of the last key
        self._depth = 0  # within a holder: its objects and lists that are open
        self._tokens_left = 0  # within a holder, before it counts as an item of unknown size
        self._is_list = False  # each string is a URL
        self._is_video = False
        self._is_escaped = False  # a string's next character has a backslash before it
        self._value = bytearray()
        self._next_try_bytes = 0

    def feed(self, piece: bytes) -> list[Media]:
        """Return what became known with this piece: an image may be complete with it, and never was before."""
        if self._tail:
            piece, self._tail = self._tail + piece, b""
        found: list[Media] = []
        if self._state is _State.START:
            if len(piece) < _WIDEST_CHARACTER:
                self._tail = piece
                return found
            self._state = _State.TEXT
            if _is_wide(piece):
                self._state = _State.UNREAD
                found.append(UNKNOWN)
        at = 0
        while at < len(piece) and self._state is not _State.UNREAD:
            if self._state is _State.TEXT:
                at = self._search_holder(piece, at, found) if self._depth else self._search(piece, at)
            elif self._state is _State.BETWEEN:
                at = self._between(piece, at)
            elif self._state is _State.VALUE:
                at = self._take_value(piece, at, found)
            else:
                at = self._pass(piece, self._closing(piece, at))
        return found

    def _search(self, text: bytes, at: int) -> int:
        """Go to the next key or string of interest; return the place behind it, or the text's end."""
        self._is_list = self._is_video = False
        key = _next_key(text, at)
        if key is None:
            quote = text.rfind(b'"', max(at, len(text) - _KEY_BYTES))
            self._tail = text[quote:] if quote >= 0 else b""
            return len(text)
        return self._go_behind(text, key[1], key.end())

    def _search_holder(self, text: bytes, at: int, found: list[Media]) -> int:
        if self._tokens_left < 0:
            found.append(UNKNOWN)
            self._depth = 0
            return at
        token = (_LIST_TOKEN if self._is_list else _TOKEN).match(text, at)
        if token is None:
            return len(text)
        at = token.end()
        if text[token.start(1)] != _QUOTE:
            self._tokens_left -= 1
            return self._count_braces(text, token.start(1), at)
        if self._is_list:
            self._begin_value(b"images")
            return at
        self._tokens_left -= 1
        if token[2] is not None:
            return self._go_behind(text, token[2][:-1], at)
        if len(text) - at < _KEY_BYTES and text.find(b'"', at) < 0:  # it may become a key's name
            self._tail = text[at - 1 :]
            at = len(text)
        else:
            self._state = _State.REST
        return at

    def _go_behind(self, text: bytes, name: bytes, at: int) -> int:
        self._name = _without_escapes(name, is_all=True)
        self._state = _State.BETWEEN
        return self._between(text, at)

    def _count_braces(self, text: bytes, start: int, end: int) -> int:
        """Return the end, or the place behind the brace that closes the holder."""
        closed = text.count(b"}", start, end) + text.count(b"]", start, end)
        if closed < self._depth:
            self._depth += text.count(b"{", start, end) + text.count(b"[", start, end) - closed
            return end
        for brace in _BRACE.finditer(text, start, end):
            self._depth += 1 if brace[0] in b"{[" else -1
            self._tokens_left -= 1
            if not self._depth or self._tokens_left < 0:
                return brace.end()
        return end

    def _between(self, text: bytes, at: int) -> int:
        """Pass over what stands between a key and its value; where that is nothing to look into, go on behind it."""
        space = _BETWEEN.match(text, at)
        at = at if space is None else space.end()
        if at == len(text):
            return at
        self._state = _State.TEXT
        if text[at] not in _OPENERS.get(self._name, _ANY_OPENER):
            return at
        self._is_video |= self._name == b"video_url"
        if text[at] == _QUOTE:
            self._begin_value(self._name)
        else:
            self._tokens_left = self._tokens_left if self._depth else _MOST_TOKENS
            self._depth += 1
            self._is_list |= text[at : at + 1] == b"["
        return at + 1

    def _begin_value(self, name: bytes) -> None:
        self._state, self._name = _State.VALUE, name
        self._value.clear()
        self._next_try_bytes = _FIRST_TRY_BYTES

    def _take_value(self, text: bytes, at: int, found: list[Media]) -> int:
        closing = self._closing(text, at)
        end = len(text) if closing < 0 else closing
        value = self._value
        while True:
            taken = text[at : min(at + self._next_try_bytes - len(value), end)]
            value += taken
            at += len(taken)
            is_all = at == closing or len(value) >= MAX_VALUE_BYTES
            if not is_all and len(value) < self._next_try_bytes:
                return at
            media = _judge(bytes(value), is_url=self._name != b"data", is_video=self._is_video, is_all=is_all)
            if is_all or media is not None:
                break
            self._next_try_bytes = min(2 * self._next_try_bytes, MAX_VALUE_BYTES)
        value.clear()
        if media:
            found.append(media)
        return self._pass(text, closing)

    def _pass(self, text: bytes, closing: int) -> int:
        """Go behind a string, or to the text's end where the string goes on."""
        self._state = _State.REST if closing < 0 else _State.TEXT
        return len(text) if closing < 0 else closing + 1

    def _closing(self, text: bytes, at: int) -> int:
        """Return the place of the quote that closes the string, -1 where that is not in this text."""
        if self._is_escaped:
            at += 1
            self._is_escaped = False
        quote = text.find(b'"', at)
        last = (len(text) if quote < 0 else quote) - 1
        if last < at or text[last] != _BACKSLASH:
            return quote
        string = _STRING.match(text, at)
        end = at if string is None else string.end()
        self._is_escaped = text[end : end + 1] == b"\\"
        return -1 if end == len(text) or self._is_escaped else end


def _judge(value: bytes, *, is_url: bool, is_video: bool, is_all: bool) -> Media | Literal[False] | None:
    """Measure what a string's first bytes say; False where it is no image and no video, None where it takes more."""
    value = _without_escapes(value, is_all=is_all).lstrip(_WHITESPACE)
    start = value[: len(_DATA)].lower()
    if start == _DATA:
        head, comma, value = value.partition(b",")
        if b"video/jpeg" in head.lower():  # vLLM's own: images, with a comma between two
            return UNKNOWN
        if not comma:
            return UNKNOWN if is_all else None
    elif is_url:
        if len(start) < len(_DATA) and not is_all:
            return None
        return BY_URL if start.startswith(_ADDRESSES) else False
    base64 = value.translate(None, _WHITESPACE)
    try:
        data = binascii.a2b_base64(base64[: len(base64) & ~3] + b"==")
    except binascii.Error:
        data = b""
    media = measure(data, is_all=is_all)
    return replace(media, frames=VIDEO_FRAMES) if is_video and media is not None and media.pixels else media


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
