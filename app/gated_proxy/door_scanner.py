"""Finds the images and videos of a request in its body's bytes as they pass. Pure: no I/O, no clock.

It parses no JSON and keeps no body: it looks for the keys that hold what vLLM loads (``image_url`` and ``video_url`` of
OpenAI's API, ``source`` of Anthropic's, ``images`` of Cohere's), goes from string to string within them, decodes the
first bytes of those that vLLM loads, and passes over the rest. Within a string every quote has a backslash before it,
so that a text which only speaks of images matches nothing. In doubt it counts an item of unknown size.

::

    TEXT ──a key──► BETWEEN ──its string──► VALUE ──measured, or no image──► REST ──the closing quote──► TEXT
                       └──────────────────── the next string of a list ───────────────────────┘

What is short and whole within a piece goes no such way: it is taken with its key. What it holds is the last few bytes
of a text, or the first 64 KiB of one string.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import replace
from enum import Enum

from gated_proxy.door_items import Media
from gated_proxy.door_media import BY_URL, UNKNOWN, VIDEO_FRAMES, measure

# Each connection may hold that much.
MAX_VALUE_BYTES = 64 * 1024
_FIRST_TRY_BYTES = 512

_QUOTE, _BACKSLASH = b'"', b"\\"


def _spelled(*names: str) -> bytes:
    """Return a pattern of any of these names, whichever of their letters are written as escapes."""
    letters = {letter: f"(?:{letter}|\\\\(?i:u{ord(letter):04x}))" for name in names for letter in name}
    spelled = ("".join(letters[letter] for letter in name) for name in names)
    return f"(?>{'|'.join((*names, *spelled))})".encode()


# A holder's own key where that holder's end was lost: it has counted, but what is in it may be larger.
_STRAY = b"stray"
# What may stand behind each key, if it is to be looked into.
_OPENERS = {b"image_url": b'{"', b"video_url": b'{"', b"source": b"{", b"images": b'["'}
_OPENERS |= dict.fromkeys((b"url", b"data", _STRAY), b'"')
_HOLDERS = _spelled("image_url", "video_url", "source", "images")
_NESTED = _spelled("image_url", "video_url")
# No value, or none that begins as what vLLM loads, as far as that is seen.
_LOADED = rb"\s|(?i:data:|http|file:)|[a-zA-Z]{0,4}(?:\\|\Z)"
_IDLE = rb'\s*+(?:[,}\]]|:\s*+(?:[^\s"{\[]|"(?!%b)))' % _LOADED
# A short string, and a holder of such, are taken whole with their key: many steps for each would hold up the loop.
_SHORT = rb'(?:[^"\\]{1,64}+|\\.){0,16}+'
_FLAT = rb'(?:[^"{}\[\]]*+"(?!(?:%b)")%b"){0,16}+[^"{}\[\]]*+' % (_NESTED, _SHORT)
_WHOLE = rb'(?:\s*+:\s*+(?:"(%b)"|{(%b)}))?' % (_SHORT, _FLAT)
_KEY = re.compile(rb'"(?=[ivs\\])(%b)"(?!%b)%b' % (_HOLDERS, _IDLE, _WHOLE), re.DOTALL)
_ANY_KEY = re.compile(rb'"(?=[disuv\\])(%b|%b)"%b' % (_HOLDERS, _spelled("url", "data"), _WHOLE), re.DOTALL)
_ENTRY = re.compile(rb'(?<!\\)"(%b)"\s*+:\s*+"(%b)"' % (_spelled("url", "data"), _SHORT), re.DOTALL)
_LISTED = re.compile(rb'[\s,]*+"(%b)"' % _SHORT, re.DOTALL)
# Within a holder, behind whole strings that are no names: a brace, or a string's beginning.
_NAME = rb'(?=[diuv\\])(?:%b|%b)"' % (_NESTED, _spelled("url", "data"))
_TOKEN = re.compile(rb'(?:[^"{}\[\]]++|"(?!%b)(?:[^"\\]++|\\.)*+")*+([{}\[\]]|"(%b)?)' % (_NAME, _NAME), re.DOTALL)
_KEY_BYTES = 64  # more than the longest of them has, every character of it written as an escape
# vLLM loads one item of a holder that is no list; each takes a few.
_MOST_TOKENS = 64
# Where quotes are that rare they are looked at one by one: the C library finds one byte five times as fast as CPython
# several.
_BYTES_A_QUOTE = 4096
# Where a body has none of these vLLM finds no image and no video in it.
_MARKS = (b'_url"', b'source"', b'images"')
_HIDDEN = re.compile(rb"\\u00[2-7]")
_COLON, _COMMA = re.compile(rb"[\s:]*"), re.compile(rb"[\s,]*")
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_ESCAPE = re.compile(rb"\\(?:u00([0-9a-fA-F]{2})|u[0-9a-fA-F]{4}|(.))", re.DOTALL)
_LONGEST_ESCAPE = 6
_WHITESPACE = b" \t\r\n\f"
_DATA, _ADDRESSES = b"data:", (b"http", b"file:")
_WIDEST_CHARACTER = 4


def may_have_media(body: bytes) -> bool:
    """Return whether a whole body is worth a scan: mostly it is not, and this is all that it costs."""
    return _is_wide(body, 0) or _KEY.search(body, _first_key(body)) is not None


def _first_key(text: bytes) -> int:
    """Return the place before which no key is: most texts have few quotes, or none of the marks."""
    at = 0
    for _ in range(len(text) // _BYTES_A_QUOTE):
        at = text.find(_QUOTE, at)
        if at < 0:
            return len(text)
        if _KEY.match(text, at) is not None:
            return at
        at += 1
    # CPython's search from the right is several times as fast, and mostly there is nothing.
    for mark in _MARKS:
        if text.rfind(mark, at) >= 0:
            return at
    return at if text.rfind(b"\\u00", at) >= 0 and _HIDDEN.search(text, at) is not None else len(text)


def _is_wide(piece: bytes, before: int) -> bool:
    """UTF-16 or UTF-32, which JSON's readers take as well, by the body's first character; so much came before."""
    return before < _WIDEST_CHARACTER and b"\0" in piece[: _WIDEST_CHARACTER - before]


class _State(Enum):
    TEXT = "text"
    BETWEEN = "between"
    VALUE = "value"
    REST = "rest"
    UNREAD = "unread"


class Scanner:
    """Scans one body, piece by piece."""

    def __init__(self) -> None:
        self._state = _State.TEXT
        self._bytes = 0  # of the body, so far
        self._tail = b""  # of a text: a key may go on in the next piece
        self._keys = _KEY
        self._name = b""  # of the last key
        self._depth = 0  # within a holder: its objects and lists that are open
        self._tokens_left = 0  # within a holder, before it counts as an item of unknown size
        self._is_list = False  # each string is a URL
        self._is_video = False
        self._is_escaped = False  # a string's next character has a backslash before it
        self._value = bytearray()

    def feed(self, piece: bytes) -> list[Media]:
        """Return what became known with this piece: an image may be complete with it, and never was before."""
        found: list[Media] = []
        if _is_wide(piece, self._bytes) and self._state is not _State.UNREAD:
            self._state = _State.UNREAD
            found.append(UNKNOWN)
        self._bytes += len(piece)
        text, self._tail = self._tail + piece, b""
        at = 0
        while at < len(text) and self._state is not _State.UNREAD:
            if self._state is _State.TEXT:
                at = self._search_holder(text, at, found) if self._depth else self._search(text, at, found)
            elif self._state is _State.BETWEEN:
                at = self._between(text, at, found)
            elif self._state is _State.VALUE:
                at = self._take_value(text, at, found)
            else:
                at = self._pass(text, self._closing(text, at))
        return found

    def _search(self, text: bytes, at: int, found: list[Media]) -> int:
        """Take what is whole, up to a key that needs more steps; return the place behind it, or the text's end."""
        self._is_list = False
        for key in self._keys.finditer(text, at or (_first_key(text) if self._keys is _KEY else 0)):
            name, string, flat = key.groups()
            name, at = _without_escapes(name), key.end()
            name = _STRAY if name in (b"url", b"data") else name
            self._is_video = name == b"video_url"
            if string is not None:
                if _QUOTE in _OPENERS[name]:
                    found += self._judge(name, string) or ()
            elif flat is not None:
                if b"{" in _OPENERS[name]:
                    for entry, value in _ENTRY.findall(flat):
                        found += self._judge(_without_escapes(entry), value) or ()
            else:
                self._name, self._state = name, _State.BETWEEN
                return self._between(text, at, found)
        quote = text.rfind(_QUOTE, max(at, len(text) - _KEY_BYTES))
        self._tail = text[quote:] if quote >= 0 else b""
        return len(text)

    def _search_holder(self, text: bytes, at: int, found: list[Media]) -> int:
        token = _TOKEN.match(text, at)
        if token is None:
            return len(text)
        at = token.end()
        if token[1] in b"}]":
            self._depth -= 1
            return at
        if token[1] == _QUOTE:  # its end comes later
            if len(text) - at < _KEY_BYTES:  # it may become a key's name
                self._tail = text[at - 1 :]
                return len(text)
            self._state = _State.REST
            return at
        self._tokens_left -= 1
        if self._tokens_left < 0:
            found.append(UNKNOWN)
            self._depth, self._keys = 0, _ANY_KEY
            return token.start(1)
        if token[2] is not None:
            self._name, self._state = _without_escapes(token[2][:-1]), _State.BETWEEN
        else:
            self._depth += 1
        return at

    def _between(self, text: bytes, at: int, found: list[Media]) -> int:
        """Pass over what stands before a value; where that is nothing to look into, go on behind it."""
        while self._is_list and (listed := _LISTED.match(text, at)) is not None:
            found += self._judge(self._name, listed[1]) or ()
            at = listed.end()
        space = (_COMMA if self._is_list else _COLON).match(text, at)
        at = at if space is None else space.end()
        if at == len(text):
            return at
        opener = text[at : at + 1]
        if opener not in (_QUOTE if self._is_list else _OPENERS[self._name]):
            self._state = _State.TEXT
            return at
        self._is_video |= self._name == b"video_url"
        if opener == _QUOTE:
            self._state = _State.VALUE
        elif opener == b"[":
            self._is_list = True
        else:
            self._state = _State.TEXT
            self._tokens_left = self._tokens_left if self._depth else _MOST_TOKENS
            self._depth += 1
        return at + 1

    def _take_value(self, text: bytes, at: int, found: list[Media]) -> int:
        closing = self._closing(text, at)
        end = len(text) if closing < 0 else closing
        value, media = self._value, None
        while media is None:
            # A try with twice as much each time.
            wanted = _FIRST_TRY_BYTES << (len(value) // _FIRST_TRY_BYTES).bit_length()
            taken = text[at : min(at + wanted - len(value), end)]
            value += taken
            at += len(taken)
            is_all = at == closing or len(value) >= MAX_VALUE_BYTES
            if not is_all and len(value) < wanted:
                return at
            media = self._judge(self._name, bytes(value), is_all=is_all)
        value.clear()
        found += media
        return self._pass(text, closing)

    def _pass(self, text: bytes, closing: int) -> int:
        """Go behind a string, or to the text's end where the string goes on."""
        if closing < 0:
            self._state = _State.REST
            return len(text)
        self._state = _State.BETWEEN if self._is_list else _State.TEXT
        return closing + 1

    def _closing(self, text: bytes, at: int) -> int:
        """Return the place of the quote that closes the string, -1 where that is not in this text."""
        if self._is_escaped:
            at += 1
            self._is_escaped = False
        quote = text.find(_QUOTE, at)
        last = len(text) if quote < 0 else quote
        if text[max(at, last - 1) : last] != _BACKSLASH:
            return quote
        string = _STRING.match(text, at)
        end = at if string is None else string.end()
        self._is_escaped = text[end : end + 1] == _BACKSLASH
        return -1 if end == len(text) or self._is_escaped else end

    def _judge(self, name: bytes, value: bytes, *, is_all: bool = True) -> tuple[Media, ...] | None:
        """Measure what a string's first bytes say: nothing if it is no image and no video; None: it takes more."""
        if _BACKSLASH in value:
            value = _without_escapes(value, is_all=is_all)
        value = value.lstrip(_WHITESPACE)
        start = value[: len(_DATA)].lower()
        if start == _DATA:
            head, comma, value = value.partition(b",")
            if b"video/jpeg" in head.lower():  # vLLM's own: images, with a comma between two
                return (UNKNOWN,)
            if not comma:
                return (UNKNOWN,) if is_all else None
        elif name not in (b"data", _STRAY):
            if len(start) < len(_DATA) and not is_all:
                return None
            return (BY_URL,) if start.startswith(_ADDRESSES) else ()
        base64 = value.translate(None, _WHITESPACE)
        try:
            data = binascii.a2b_base64(base64[: len(base64) & ~3] + b"==")
        except binascii.Error:
            data = b""
        media = measure(data, is_all=is_all)
        if media is None or (name == _STRAY and not media.pixels):
            return None if media is None else ()
        return (replace(media, frames=VIDEO_FRAMES) if self._is_video and media.pixels else media,)


def _without_escapes(value: bytes, *, is_all: bool = True) -> bytes:
    if _BACKSLASH not in value:
        return value
    if not is_all:  # the last escape may be incomplete
        at = value.rfind(_BACKSLASH, -_LONGEST_ESCAPE)
        value = value if at < 0 else value[:at]
    return _ESCAPE.sub(_unescaped, value)


def _unescaped(match: re.Match[bytes]) -> bytes:
    code, character = match.groups()
    if code is not None:
        return bytes((int(code, 16),))
    return character if character is not None and character in b'/\\"' else b""
