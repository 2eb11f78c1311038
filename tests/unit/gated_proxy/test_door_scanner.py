"""The scanner finds what vLLM would load, wherever the body is cut, and nothing that is only spoken of."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gated_proxy.door_items import Media
from gated_proxy.door_media import BY_URL, UNKNOWN, measure
from gated_proxy.door_scanner import MAX_VALUE_BYTES, Scanner, may_have_media

FORMATS = {"png": "png", "jpeg": "jpeg", "webp": "webp", "gif": "gif", "bmp": "bmp"}


def image(form: str, width: int, height: int, **options) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, form, **options)
    return file.getvalue()


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def part(address: str) -> dict:
    return {"type": "image_url", "image_url": {"url": address}}


def chat(*parts: object, **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], **more}).encode()


def scan(body: bytes, *cuts: int, **options) -> list[Media]:
    scanner, places = Scanner(**options), [0, *sorted(cuts), len(body)]
    return [media for start, end in pairwise(places) for media in scanner.feed(body[start:end])]


def sizes(found: list[Media]) -> list[tuple[int, int]]:
    return [(media.width, media.height) for media in found]


PNG = image("png", 640, 480)
PNG_BASE64 = base64.b64encode(PNG).decode()
BOX = struct.Struct(">I4s")


def box(kind: bytes, content: bytes) -> bytes:
    return BOX.pack(8 + len(content), kind) + content


def video(width: int, height: int, samples: int, *, version: int = 0) -> bytes:
    times = bytes(32 if version else 20)
    tkhd = bytes([version, 0, 0, 0]) + times + bytes(52) + struct.pack(">II", width << 16, height << 16)
    stsz = bytes(8) + struct.pack(">I", samples)
    return box(b"ftyp", b"isom") + box(b"moov", box(b"trak", box(b"tkhd", tkhd) + box(b"stsz", stsz)))


@pytest.mark.parametrize("form", FORMATS)
def test_an_image_is_measured_by_its_first_bytes(form):
    assert scan(chat(part(url(image(form, 321, 123))))) == [Media(FORMATS[form], 321, 123)]


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"exif": b"Exif\0\0" + bytes(60_000)}, {"icc_profile": bytes(150_000)}]
)
def test_a_jpeg_is_measured_behind_its_metadata(options):
    assert sizes(scan(chat(part(url(image("jpeg", 4032, 3024, **options)))))) == [(4032, 3024)]


@pytest.mark.parametrize("version", [0, 1])
def test_a_video_counts_with_the_frames_that_vllm_takes(version):
    assert measure(video(1920, 1080, 900, version=version), is_all=False) == Media("mp4", 1920, 1080, 32)
    assert measure(video(1920, 1080, 7, version=version), is_all=False) == Media("mp4", 1920, 1080, 7)


def test_a_video_whose_index_is_at_its_end_is_of_unknown_size():
    late = box(b"ftyp", b"isom") + box(b"mdat", bytes(MAX_VALUE_BYTES)) + video(640, 480, 9)
    assert scan(chat({"type": "video_url", "video_url": {"url": url(late, "video/mp4")}})) == [UNKNOWN]


def test_vllms_own_form_of_frames_counts_as_a_video():
    frames = f"{url(image('jpeg', 64, 32), 'video/jpeg')},{base64.b64encode(image('jpeg', 64, 32)).decode()}"
    assert scan(chat({"type": "video_url", "video_url": {"url": frames}})) == [Media("jpeg", 64, 32, 32)]


def test_an_animated_webp_counts_with_the_canvases_of_its_decoder():
    frames = [Image.effect_noise((80, 60), sigma).convert("RGB") for sigma in (10, 50, 90)]
    file = io.BytesIO()
    frames[0].save(file, "webp", save_all=True, append_images=frames[1:])
    assert measure(file.getvalue(), is_all=True) == Media("webp", 80, 60, 3)


@pytest.mark.parametrize(
    "body",
    [
        chat(part(url(PNG))),
        chat({"type": "image_url", "image_url": url(PNG)}),
        chat({"type": "image_url", "image_url": {"detail": "high", "url": url(PNG)}}),
        chat({"type": "input_image", "image_url": url(PNG), "detail": "auto"}),
        chat({"type": "image_url", "image_url": {"url": url(PNG, "x/y;charset=z")}}),
        chat(
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": PNG_BASE64},
            }
        ),
        chat(
            {
                "type": "image",
                "source": {"data": PNG_BASE64, "media_type": "image/png", "type": "base64"},
            }
        ),
        json.dumps({"m": [part(url(PNG))]}, indent=300).encode(),
        json.dumps({"m": [part(url(PNG))]}, separators=(" , ", " " * 5000 + ": ")).encode(),
        chat(part(url(PNG))).replace(b"/", b"\\/"),
        chat(part(url(PNG))).replace(b"/", b"\\u002F").replace(b"+", b"\\u002b").replace(b"=", b"\\u003D"),
        chat(part(url(PNG))).replace(b'"url"', b'"\\u0075rl"'),
        chat(part(url(PNG))).replace(b'"url"', b'"\\u0075\\u0072\\u006C"'),
        chat(part(url(PNG))).replace(b"data:", b"d\\u0061ta:"),
        chat(part(url(PNG))).replace(b"data:", b" \\n DATA:"),
        chat(part(url(PNG))).decode().encode("utf-16"),
        chat(part(url(PNG))).decode().encode("utf-32-be"),
    ],
)
def test_every_spelling_of_an_image_is_found_wherever_it_is_cut(body):
    assert sizes(scan(body)) == [(640, 480)]
    assert sizes(scan(body, *range(1, len(body)))) == [(640, 480)]


@pytest.mark.parametrize(
    ("body", "path_class", "expected"),
    [
        (chat(part(url(PNG))), "chat_completions", True),
        (chat({"type": "input_image", "image_url": url(PNG)}), "responses", True),
        (chat({"type": "image", "source": {"type": "base64", "data": PNG_BASE64}}), "messages", True),
        (json.dumps({"images": [url(PNG)]}).encode(), "other_v2", True),
        (chat(part(url(PNG))), "other_v2", True),
        (chat(part(url(PNG))).replace(b'"image_url"', b'"image_\\u0075rl"'), "chat_completions", True),
        (chat(part(url(PNG))).decode().encode("utf-16"), "chat_completions", True),
        (chat({"type": "text", "text": 'a "url" and\n some \u00e9 data'}), "chat_completions", False),
        (chat({"type": "text", "text": "image_url"}), "messages", False),
        (b"", "chat_completions", False),
    ],
)
def test_a_body_without_any_mark_is_not_scanned(body, path_class, expected):
    assert may_have_media(body, path_class) is expected


def test_data_urls_without_a_key_are_cohere_s():
    body = json.dumps({"model": "m", "images": [url(PNG), url(image("jpeg", 10, 20))]}).encode()
    assert sizes(scan(body, has_bare_urls=True)) == [(640, 480), (10, 20)]


@pytest.mark.parametrize("address", ["https://example.com/a.png", "HTTP://x/y", "file:///tmp/a.jpg"])
def test_an_image_behind_a_url_is_of_unknown_size(address):
    assert scan(chat(part(address))) == [BY_URL]
    assert scan(chat({"type": "image", "source": {"type": "url", "url": address}})) == [BY_URL]


@pytest.mark.parametrize(
    "body",
    [
        chat({"type": "text", "text": json.dumps(part(url(PNG)))}),
        chat({"type": "text", "text": f"the url is {url(PNG)}"}),
        chat({"type": "text", "text": "url"}, {"type": "text", "text": url(PNG)}),
        chat({"type": "audio_url", "audio_url": url(PNG[:4] + bytes(100), "audio/wav")}),
        chat({"type": "input_audio", "input_audio": {"data": base64.b64encode(bytes(1000)).decode(), "format": "wav"}}),
        chat(tools=[{"type": "mcp", "server_url": "https://example.com/mcp"}]),
        chat(part(""), part("x"), part("data:image/png,not-base64"), part("data:image/png;base64")),
        chat({"type": "image_url", "image_url": None}, {"url": 3, "data": {"url": []}}),
    ],
)
def test_what_vllm_would_not_load_is_no_item(body):
    assert scan(body) == []
    assert scan(body, *range(1, len(body))) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PN",
        b"no image at all, but some text",
        PNG[:20],
        b"\xff\xd8\xff" + bytes(99),
        image("avif", 30, 20) + video(1, 1, 1),  # it is decoded as an image, whatever it claims to hold besides
    ],
)
def test_an_image_that_cannot_be_read_is_of_unknown_size(data):
    assert scan(chat(part(url(data)))) == [UNKNOWN]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def ihdr(width: int, height: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def sof(width: int, height: int) -> bytes:
    return b"\xff\xc0\x00\x11\x08" + struct.pack(">HH", height, width) + bytes(10)


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + ihdr(8, 8) + ihdr(8192, 8192) + chunk(b"IDAT", b"x"),
        b"\xff\xd8\xff\xe0\x00\x02" + sof(8, 8) + b"junk" + b"\xff\xff" + sof(8192, 8192) + b"\xff\xda",
        b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b",\0\0\0\0" + struct.pack("<HH", 8192, 8192) + b"\0",
    ],
)
def test_of_several_sizes_the_largest_counts(data):
    assert sizes(scan(chat(part(url(data))))) == [(8192, 8192)]


@pytest.mark.parametrize("size", [(0, 0), (0, 9), (2**32 - 1, 2**32 - 1), (65_500, 65_500)])
def test_dimensions_that_lie_are_believed_or_unknown(size):
    (found,) = scan(chat(part(url(b"\x89PNG\r\n\x1a\n" + ihdr(*size) + chunk(b"IDAT", b"x")))))
    assert sizes([found]) == [size if all(size) else (0, 0)]


def test_ten_thousand_tiny_images_are_counted():
    assert sizes(scan(chat(*[part(url(image("png", 2, 3)))] * 10_000))) == [(2, 3)] * 10_000


def test_no_more_is_held_than_the_first_bytes_of_one_string():
    scanner = Scanner()
    body = b'{"url":"data:image/jpeg;base64,' + base64.b64encode(
        b"\xff\xd8\xff" + b"\xff\xe1\xff\xff" + bytes(65_533) * 40
    )
    held = []
    for at in range(0, len(body), 10_000):
        scanner.feed(body[at : at + 10_000])
        held.append(len(scanner._value) + len(scanner._tail))
    assert max(held) <= MAX_VALUE_BYTES
    assert held[-1] == 0


JSON_VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=80)
    | st.sampled_from(["url", "data", 'data"', "image_url", "data:x", "http:"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=12) | st.sampled_from(["url", "data", "image_url"]), inner, max_size=4)
    ),
    max_leaves=12,
)
FRAGMENTS = [b'"url":"', b'"data":"', b"\\u00", b"\\", b'"', b"\0"]
IMAGES = st.builds(
    lambda form, width, height: (url(image(form, width, height), f"image/{form}"), (width, height)),
    st.sampled_from(["png", "jpeg", "gif", "bmp"]),
    st.integers(1, 40),
    st.integers(1, 40),
)


@settings(deadline=None)
@given(st.lists(JSON_VALUES | IMAGES, max_size=6), st.booleans(), st.data())
def test_the_cuts_of_a_body_change_nothing(parts, is_ascii, data):
    content = [part(each[0]) if isinstance(each, tuple) else each for each in parts]
    body = json.dumps(content, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=12))
    whole = scan(body)
    assert scan(body, *cuts) == whole
    assert [size for size in sizes(whole) if size != (0, 0)] == [each[1] for each in parts if isinstance(each, tuple)]


@settings(deadline=None)
@given(
    st.lists(
        st.binary(max_size=300) | st.sampled_from([b'"url":"', b'"data":"', b"\\u00", b"\\", b'"', b"\0"]), max_size=12
    )
)
def test_any_bytes_are_scanned(pieces):
    scanner = Scanner(has_bare_urls=True)
    for piece in pieces:
        scanner.feed(piece)


@settings(deadline=None)
@given(st.sampled_from(["png", "jpeg", "webp", "gif", "bmp"]), st.data())
def test_a_damaged_image_is_measured_somehow(form, data):
    whole = bytearray(image(form, 30, 20))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        whole[at] = data.draw(st.integers(0, 255))
    assert measure(bytes(whole[: data.draw(st.integers(0, len(whole)))]), is_all=True) is not None
