"""Sizes of images and videos, read from their first bytes as the engine's decoders read them. No I/O, nothing decoded.

PNG, JPEG, WebP, GIF and BMP; MP4 and MOV where the index stands in front. Where a file names several sizes the largest
counts: Pillow takes the last one that it meets, and a header may lie about the others. Where a larger one may follow
behind what is looked at, the size is unknown.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from gated_proxy.door_items import Form, Media

# vLLM's `VideoMediaIO` takes so many frames of a video, unless its options say otherwise.
VIDEO_FRAMES = 32
# libwebp's decoder of animations keeps the canvas before, this one's and the one that it hands out.
_WEBP_CANVASES = 3
# A file with more parts before its pixels is not measured.
_MAX_PARTS = 128
_LONGEST_MAGIC = 12
_BOX_BYTES, _SIZE_IN_STSD = 8, 40

_JPEG_MARKER = re.compile(rb"\xff+([^\xff])", re.DOTALL)
# As Pillow has them: no length follows, and it goes on behind the image's end.
_UNSIZED_MARKERS = frozenset({*range(0xC0), 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
_FRAME_MARKERS = frozenset({*range(0xC0, 0xD0), 0xDE}) - {0xC4, 0xC8, 0xCC}
_START_OF_SCAN = 0xDA


BY_URL = Media("url")
UNKNOWN = Media("unknown")

_Size = tuple[int, int]


class _Unmeasured(Exception):
    """A larger size may stand behind what is looked at."""


def measure(data: bytes, *, is_all: bool) -> Media | None:
    """Measure an image or a video by its first bytes.

    Args:
        data: What is known of the file, from its first byte.
        is_all: There is no more of it, or no more will be looked at.

    Returns:
        ``UNKNOWN`` where no size can be read; None where that takes more bytes.
    """
    magic = _MAGIC.match(data)
    if magic is None:
        return UNKNOWN if is_all or len(data) >= _LONGEST_MAGIC else None
    form, read = _READERS[magic.lastindex or 0]
    sizes: list[_Size] = []
    try:
        frames = read(data, sizes)
    except (IndexError, struct.error):  # it goes on behind the data
        return UNKNOWN if is_all else None
    except _Unmeasured:
        return UNKNOWN
    largest = max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))
    if not (largest[0] and largest[1]):
        return UNKNOWN
    return Media(form, *largest, frames)


def _png(data: bytes, sizes: list[_Size]) -> int:
    at = 8
    for _ in range(_MAX_PARTS):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IHDR":
            sizes.append(struct.unpack_from(">II", data, at + 8))
        elif kind in (b"IDAT", b"IEND"):
            return 1
        at += 12 + length
    raise _Unmeasured


def _jpeg(data: bytes, sizes: list[_Size]) -> int:
    at = 2
    for _ in range(_MAX_PARTS):
        found = _JPEG_MARKER.search(data, at)  # Pillow passes over bytes between two segments
        if found is None:
            raise IndexError
        marker, at = found[1][0], found.end()
        if marker == _START_OF_SCAN:
            return 1
        if marker in _UNSIZED_MARKERS:
            continue
        if marker in _FRAME_MARKERS:
            height, width = struct.unpack_from(">HH", data, at + 3)
            sizes.append((width, height))
        (length,) = struct.unpack_from(">H", data, at)
        at += length
    raise _Unmeasured


def _webp(data: bytes, sizes: list[_Size]) -> int:
    kind = data[12:16]
    if kind == b"VP8X":
        flags = data[20]
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        _ = data[29]
        sizes.append((width, height))
        return _WEBP_CANVASES if flags & 2 else 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        sizes.append((1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
    elif kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        sizes.append((width & 0x3FFF, height & 0x3FFF))
    return 1


def _gif(data: bytes, sizes: list[_Size]) -> int:
    """Read the screen's size, and the first frame's, which may reach beyond it: vLLM decodes no other."""
    sizes.append(struct.unpack_from("<HH", data, 6))
    at = 13 + (3 * (2 << (data[10] & 7)) if data[10] & 0x80 else 0)  # behind the colors
    is_in_extension = False
    for _ in range(_MAX_PARTS):
        if is_in_extension:
            is_in_extension = data[at] > 0
            at += 1 + data[at]
        elif data[at] == ord("!"):
            if not data[at + 2]:  # Pillow takes what follows for the extension's
                raise _Unmeasured
            is_in_extension = True
            at += 2
        elif data[at] == ord(","):
            left, top, width, height = struct.unpack_from("<HHHH", data, at + 1)
            sizes.append((left + width, top + height))
            return 1
        elif data[at] == ord(";"):
            return 1
        else:
            at += 1
    raise _Unmeasured


def _bmp(data: bytes, sizes: list[_Size]) -> int:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)  # noqa: PLR2004 - OS/2's
    sizes.append((abs(width), abs(height)))  # a negative height: the rows come from the top
    return 1


def _mp4(data: bytes, sizes: list[_Size]) -> int:
    """Read the sizes of the tracks' samples (`stsd`): decoders do not look at those of `tkhd`."""
    at, kind = 0, b""
    while kind != b"moov":
        length, kind = struct.unpack_from(">I4s", data, at)
        if length < _BOX_BYTES:  # 64 bits of length, or to the end
            raise _Unmeasured
        start, at = at, at + length
    _ = data[at - 1]
    index = data[start:at]
    sizes += (struct.unpack_from(">HH", index, match.end() + _SIZE_IN_STSD) for match in re.finditer(rb"stsd", index))
    return VIDEO_FRAMES


_READERS: tuple[tuple[Form, Callable[[bytes, list[_Size]], int]], ...] = (
    ("png", _png),
    ("jpeg", _jpeg),
    ("webp", _webp),
    ("gif", _gif),
    ("bmp", _bmp),
    ("mp4", _mp4),
)
# A group for each; the boxes of `ftyp` may hold images as well.
_MAGIC = re.compile(
    rb"(?s:\x89PNG\r\n\x1a\n|(\xff\xd8\xff)|(RIFF....WEBP)|(GIF8[79]a)|(BM)|(....ftyp(?!avi[fs]|hei|mif1|msf1)))"
)
