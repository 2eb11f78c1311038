"""Sizes of images and videos, read from their first bytes as the engine's decoders read them. No I/O, nothing decoded.

PNG, JPEG, WebP, GIF and BMP; MP4 and MOV where the index stands in front. Where a file names several
sizes the largest counts: Pillow takes the last one that it meets, and a header may lie about the others.
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
# Pillow and vLLM read no further sizes behind these. A file with more parts before its pixels is not measured.
_MAX_PARTS = 512
_LONGEST_MAGIC = 12

_JPEG_MARKER = re.compile(rb"\xff+([^\xff])", re.DOTALL)
_UNSIZED_MARKERS = frozenset({0x00, 0x01, *range(0xD0, 0xD8)})  # no length follows
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


BY_URL = Media("url")
UNKNOWN = Media("unknown")

_Size = tuple[int, int]


def measure(data: bytes, *, is_all: bool) -> Media | None:
    """Measure an image or a video by its first bytes.

    Args:
        data: What is known of the file, from its first byte.
        is_all: There is no more of it, or no more will be looked at.

    Returns:
        ``UNKNOWN`` where no size can be read; None where that takes more bytes.
    """
    found = next((each for each in _READERS if each[1].match(data)), None)
    if found is None:
        return UNKNOWN if is_all or len(data) >= _LONGEST_MAGIC else None
    form, _, read = found
    sizes: list[_Size] = []
    try:
        frames = read(data, sizes)
    except (IndexError, struct.error):  # it goes on behind the data
        if not is_all:
            return None
        frames = VIDEO_FRAMES if form == "mp4" else 1
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
            break
        at += 12 + length
    return 1


def _jpeg(data: bytes, sizes: list[_Size]) -> int:
    at = 2
    for _ in range(_MAX_PARTS):
        found = _JPEG_MARKER.search(data, at)  # Pillow passes over bytes between two segments
        if found is None:
            raise IndexError
        marker, at = found[1][0], found.end()
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            break
        if marker in _UNSIZED_MARKERS:
            continue
        if marker in _FRAME_MARKERS:
            height, width = struct.unpack_from(">HH", data, at + 3)
            sizes.append((width, height))
        (length,) = struct.unpack_from(">H", data, at)
        at += length
    return 1


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
    at = 13 + _color_table_bytes(data[10])
    is_in_extension = False
    for _ in range(_MAX_PARTS):
        if is_in_extension:
            is_in_extension = data[at] > 0
            at += 1 + data[at]
        elif data[at] == ord("!"):
            is_in_extension = True
            at += 2
        else:
            if data[at] == ord(","):
                left, top, width, height = struct.unpack_from("<HHHH", data, at + 1)
                sizes.append((left + width, top + height))
            break
    return 1


def _color_table_bytes(flags: int) -> int:
    return 3 * (2 << (flags & 7)) if flags & 0x80 else 0


def _bmp(data: bytes, sizes: list[_Size]) -> int:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)  # noqa: PLR2004 - OS/2's
    sizes.append((abs(width), abs(height)))  # a negative height: the rows come from the top
    return 1


def _mp4(data: bytes, sizes: list[_Size]) -> int:
    """Read the sizes of the tracks (`tkhd`), and the samples of the one with the most (`stsz`)."""
    samples = 0
    for match in re.finditer(rb"tkhd", data):
        at = match.end()
        width, height = struct.unpack_from(">II", data, at + (88 if data[at] else 76))
        sizes.append((width >> 16, height >> 16))  # with 16 bits behind the point
    for match in re.finditer(rb"stsz", data):
        samples = max(samples, *struct.unpack_from(">I", data, match.end() + 8))
    if not (sizes and samples):
        raise IndexError
    return min(samples, VIDEO_FRAMES)


_READERS: tuple[tuple[Form, re.Pattern[bytes], Callable[[bytes, list[_Size]], int]], ...] = (
    ("png", re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    ("jpeg", re.compile(rb"\xff\xd8\xff"), _jpeg),
    ("webp", re.compile(rb"RIFF....WEBP", re.DOTALL), _webp),
    ("gif", re.compile(rb"GIF8[79]a"), _gif),
    ("bmp", re.compile(rb"BM"), _bmp),
    ("mp4", re.compile(rb"....ftyp(?!avi[fs]|hei|mif1|msf1)", re.DOTALL), _mp4),  # not images in the same boxes
)
