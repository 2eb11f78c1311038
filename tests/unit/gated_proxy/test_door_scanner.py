"""The scanner finds what vLLM would load, wherever the body is cut, and nothing that is only spoken of."""

from __future__ import annotations

import base64
import io
import json
import struct
import time
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


def tiff() -> bytes:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "tiff", compression="group4")
    return file.getvalue()


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def part(address: str) -> dict:
    return {"type": "image_url", "image_url": {"url": address}}


def chat(*parts: object, **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], **more}).encode()


def scan(body: bytes, *cuts: int) -> list[Media]:
    scanner, places = Scanner(), [0, *sorted(cuts), len(body)]
    return [media for start, end in pairwise(places) for media in scanner.feed(body[start:end])]


def sizes(found: list[Media]) -> list[tuple[int, int]]:
    return [(media.width, media.height) for media in found]


PNG = image("png", 640, 480)
PNG_BASE64 = base64.b64encode(PNG).decode()
BOX = struct.Struct(">I4s")


def box(kind: bytes, content: bytes) -> bytes:
    return BOX.pack(8 + len(content), kind) + content


def video(width: int, height: int, *, claimed: int | None = None) -> bytes:
    tkhd = bytes(76) + struct.pack(">II", (claimed or width) << 16, (claimed or height) << 16)
    entry = box(b"avc1", bytes(24) + struct.pack(">HH", width, height) + bytes(50))
    sound = box(
        b"stsd", struct.pack(">II", 0, 1) + box(b"mp4a", bytes(16) + struct.pack(">HHII", 2, 16, 0, 44100 << 16))
    )
    stsd = box(b"stsd", struct.pack(">II", 0, 1) + entry)
    return box(b"ftyp", b"isom") + box(b"moov", box(b"trak", box(b"tkhd", tkhd) + stsd) + box(b"trak", sound))


@pytest.mark.parametrize("form", FORMATS)
def test_an_image_is_measured_by_its_first_bytes(form):
    assert scan(chat(part(url(image(form, 321, 123))))) == [Media(FORMATS[form], 321, 123)]


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"exif": b"Exif\0\0" + bytes(45_000)}, {"icc_profile": bytes(30_000)}]
)
def test_a_jpeg_is_measured_behind_its_metadata(options):
    assert sizes(scan(chat(part(url(image("jpeg", 4032, 3024, **options)))))) == [(4032, 3024)]


@pytest.mark.parametrize("claimed", [None, 16])
def test_a_video_counts_with_its_samples_size_and_the_frames_that_vllm_takes(claimed):
    assert measure(video(1920, 1080, claimed=claimed), is_all=False) == Media("mp4", 1920, 1080, 32)


@pytest.mark.parametrize("form", FORMATS)
def test_under_a_videos_key_every_format_counts_with_its_frames(form):
    body = chat({"type": "video_url", "video_url": {"url": url(image(form, 64, 32))}}, part(url(PNG)))
    assert scan(body) == [Media(FORMATS[form], 64, 32, 32), Media("png", 640, 480)]


def test_a_video_whose_index_is_at_its_end_is_of_unknown_size():
    late = box(b"ftyp", b"isom") + box(b"mdat", bytes(MAX_VALUE_BYTES)) + video(640, 480)
    assert scan(chat({"type": "video_url", "video_url": {"url": url(late, "video/mp4")}})) == [UNKNOWN]


def test_vllms_own_form_of_frames_is_of_unknown_size():
    frames = f"{url(image('jpeg', 64, 32), 'video/jpeg')},{base64.b64encode(image('jpeg', 6400, 3200)).decode()}"
    assert scan(chat({"type": "video_url", "video_url": {"url": frames}})) == [UNKNOWN]


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
        chat({"type": "input_image", "image_url": url(PNG)}).replace(b"data:", b"dat\\u0061:"),
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
        chat({"source": {"title": "a title that somebody gave", "note": "three short words " * 3, "data": PNG_BASE64}}),
        json.dumps({"m": [part(url(PNG))]}, indent=300).encode(),
        json.dumps({"m": [part(url(PNG))]}, separators=(" , ", " " * 5000 + ": ")).encode(),
        chat(part(url(PNG))).replace(b"/", b"\\/"),
        chat(part(url(PNG))).replace(b"/", b"\\u002F").replace(b"+", b"\\u002b").replace(b"=", b"\\u003D"),
        chat(part(url(PNG))).replace(b'"url"', b'"\\u0075rl"'),
        chat(part(url(PNG))).replace(b'"url"', b'"\\u0075\\u0072\\u006C"'),
        chat(part(url(PNG))).replace(b"data:", b"d\\u0061ta:"),
        chat(part(url(PNG))).replace(b"data:", b" \\n DATA:"),
        chat(part(url(PNG))).replace(b"image_url", b"image\\u005furl"),
        chat({"type": "image_url", "image_url": url(PNG)}).replace(b'e_url"', b'\\u0065\\u005Furl"'),
        chat(part(url(PNG, 'image/"png'))),
        chat(part(url(PNG, 'image/\\"\\\\png'))),
        chat(part(url(PNG, "text/plain")), {"type": "text", "text": 'an end \\\\"'}),
        chat(part(url(PNG, "image/" + "x" * 300))),
        chat(
            {"type": "image_url", "image_url": {"detail": '}]} "url', "more": [{}, {"type": "url"}], "url": url(PNG)}}
        ),
        json.dumps({"model": "m", "images": [url(PNG)]}).encode(),
        json.dumps({"model": "m", "images": ["", url(PNG)]}).replace("data:", "\\u0064ata:").encode(),
        json.dumps({"model": "m", "images": [url(PNG)]}).replace("data:", "DATA:").encode(),
    ],
)
def test_every_spelling_of_an_image_is_found_wherever_it_is_cut(body):
    assert sizes(scan(body)) == [(640, 480)]
    assert sizes(scan(body, *range(1, len(body)))) == [(640, 480)]
    assert all(sizes(scan(body, at)) == [(640, 480)] for at in range(1, 300))
    assert sizes(scan(b'{"a":[' + b'"x",' * 99 + b'"x"],"b":' + body + b"}")) == [(640, 480)]


def test_an_escape_that_the_first_try_ends_in_is_no_part_of_the_image():
    letters = base64.b64encode(image("bmp", 640, 480)).decode()
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in letters[:48]) + letters[48:]
    for length in range(250, 500):
        body = f'{{"image_url":"data:{"x" * length};base64,{escaped}"}}'.encode()
        assert sizes(scan(body)) == [(640, 480)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat(part(url(PNG))), True),
        (chat({"type": "input_image", "image_url": url(PNG)}), True),
        (chat({"type": "image", "source": {"type": "base64", "data": PNG_BASE64}}), True),
        (json.dumps({"images": ["http://x/y"]}).encode(), True),
        (chat(part(url(PNG))).replace(b"image_url", b"image\\u005furl"), True),
        (chat(part(url(PNG))).decode().encode("utf-16"), True),
        (chat({"type": "text", "text": 'a "url" and\n some \u00e9 data'}), False),
        (chat({"type": "text", "text": "image_url, source"}), False),
        (chat({"type": "text", "text": "an image_url of some source."}), False),
        (chat(annotations=[{"type": "url_citation", "url_citation": {"url": "https://x"}}]), False),
        (b"", False),
    ],
)
def test_a_body_without_any_mark_is_not_scanned(body, expected):
    assert may_have_media(body) is expected


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_wide_body_is_one_item_of_unknown_size(encoding):
    body = chat(*[part(url(PNG, "image/\u2222"))] * 3).decode().encode(encoding)
    assert scan(body) == [UNKNOWN]
    assert scan(body, *range(1, 99)) == [UNKNOWN]


def test_the_urls_of_cohere_s_images_count():
    body = json.dumps({"model": "m", "images": [url(PNG), url(image("jpeg", 10, 20)), "HTTP://x/y"]}).encode()
    assert scan(body) == scan(body, *range(1, len(body))) == [Media("png", 640, 480), Media("jpeg", 10, 20), BY_URL]


@pytest.mark.parametrize(
    "body",
    [
        b'{"images": ["x"], "image_url": "http://x"}',
        b'{"images": ["x", {"image_url": "http://x"}]}',
        b'{"images": [[], "x"], "m": {"image_url": {"url": "http://x"}}}',
        b'{"images": "x", "image_url": "http://x"}',
        b'{"image_url": {"images": [{}], "url": "http://x"}}',
        b'{"image_url": {"images": ["x", []], "source": {"a": []}, "url": "http://x"}}',
        b'{"image_url": {"a": "\\"url", "b": "url", "url": "http://x"}, "source": "url"}',
    ],
)
def test_what_stands_beside_an_item_hides_it_not(body):
    assert scan(body) == scan(body, *range(1, len(body))) == [BY_URL]
    assert all(scan(body, at) == [BY_URL] for at in range(1, len(body)))


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
        chat(part(""), part("x"), annotations=[{"type": "url_citation", "url_citation": {"url": "https://x"}}]),
        chat(metadata={"url": "https://x", "data": PNG_BASE64, "source": "https://x"}),
        chat(part("x"), annotations=[{"url": "https://x"}, {"source": {}, "url": "https://x"}]),
        chat(tools=[{"properties": {"images": {"type": "array", "description": "https://x"}}}]),
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
        tiff(),
        b"no image at all, but some text",
        PNG[:20],
        b"\xff\xd8\xff" + bytes(99),
        image("jpeg", 40, 30, exif=b"Exif\0\0" + bytes(60_000)),  # behind what is looked at
        image("avif", 30, 20) + video(1, 1),  # it is decoded as an image, whatever it claims to hold besides
    ],
)
def test_an_image_that_cannot_be_read_is_of_unknown_size(data):
    assert scan(chat(part(url(data)))) == [UNKNOWN]
    assert scan(chat(part(url(data, "text/plain")))) == [UNKNOWN]
    source = {"type": "base64", "media_type": "audio/wav", "data": base64.b64encode(data).decode()}
    assert scan(chat({"type": "image", "source": source})) == [UNKNOWN]


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
        b"\xff\xd8" + sof(8, 8) + b"\xff\xd9\xff\xf0" + sof(8192, 8192) + b"\xff\xda",
        b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b"x,\0\0\0\0" + struct.pack("<HH", 8192, 8192) + b"\0",
        b"\xff\xd8\xff\xe0\x00\x02" + sof(8, 8) + b"junk" + b"\xff\xff" + sof(8192, 8192) + b"\xff\xda",
        b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b",\0\0\0\0" + struct.pack("<HH", 8192, 8192) + b"\0",
        b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b"," + struct.pack("<HHHH", 8191, 8190, 1, 2) + b"\0",
    ],
)
def test_of_several_sizes_the_largest_counts(data):
    assert sizes(scan(chat(part(url(data))))) == [(8192, 8192)]


SMALL_GIF = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + ihdr(8, 8),
        b"\x89PNG\r\n\x1a\n" + ihdr(8, 8) + chunk(b"prIv", bytes(262_144)) + ihdr(8192, 8192) + chunk(b"IDAT", b"x"),
        b"\x89PNG\r\n\x1a\n" + ihdr(8, 8) + chunk(b"prIv", b"") * 600 + ihdr(8192, 8192) + chunk(b"IDAT", b"x"),
        b"\xff\xd8" + sof(8, 8) + b"\xff\xef\x00\x02" * 600 + sof(8192, 8192) + b"\xff\xda",
        b"\xff\xd8" + sof(8, 8) + b"\xff\xd9",
        SMALL_GIF + b"!\xfe" + b"\x01a" * 600 + b"\0,\0\0\0\0" + struct.pack("<HH", 8192, 8192) + b"\0",
        SMALL_GIF + b"!\x01\0,\0\0\0\0\x08\0\x08\0" + bytes(36) + b"\0,\0\0\0\0\0\x20\0\x20\0",
        box(b"ftyp", b"isom") + BOX.pack(99_999, b"moov") + video(8, 8)[12:],
        box(b"ftyp", b"isom") + BOX.pack(1, b"moov") + bytes(99),
    ],
)
def test_a_size_that_a_larger_one_may_follow_is_unknown(data):
    assert scan(chat(part(url(data)))) == [UNKNOWN]


@pytest.mark.parametrize("size", [(0, 0), (0, 9), (2**32 - 1, 2**32 - 1), (65_500, 65_500)])
def test_dimensions_that_lie_are_believed_or_unknown(size):
    (found,) = scan(chat(part(url(b"\x89PNG\r\n\x1a\n" + ihdr(*size) + chunk(b"IDAT", b"x")))))
    assert sizes([found]) == [size if all(size) else (0, 0)]


@pytest.mark.parametrize("junk", ['"data":"",', '"url":"x",', "[],", '{"a":[]},'])
def test_a_holder_of_too_much_is_of_unknown_size_and_hides_nothing(junk):
    body = b'[{"source":{' + junk.encode() * 1000 + b'"data":"' + PNG_BASE64.encode() + b'"}},'
    for more in (b'{"images": ["http://x"]}]', chat(part("http://x")) + b"]"):
        found = scan(body + b'{"url":"https://x","data":"a text"},' + more)
        assert len(found) < 70
        assert found[-3:] == [UNKNOWN, Media("png", 640, 480), BY_URL]
        assert scan(body + more, *range(len(body), len(body + more))) == found


def test_the_key_with_which_a_holder_is_too_much_is_looked_at():
    for filled in range(60, 70):
        body = b'{"image_url":{' + b'"a":[],' * filled + b'"url":"' + url(PNG).encode() + b'"}}'
        assert sizes(scan(body))[-1:] == sizes(scan(body, *range(1, len(body))))[-1:] == [(640, 480)]


def test_ten_thousand_tiny_images_are_counted():
    assert sizes(scan(chat(*[part(url(image("png", 2, 3)))] * 10_000))) == [(2, 3)] * 10_000


def test_no_more_is_held_than_the_first_bytes_of_one_string():
    scanner = Scanner()
    body = b'{"image_url":{"url":"data:image/jpeg;base64,' + base64.b64encode(
        b"\xff\xd8\xff" + b"\xff\xe1\xff\xff" + bytes(65_533) * 40
    )
    held = []
    for at in range(0, len(body), 10_000):
        scanner.feed(body[at : at + 10_000])
        held.append(len(scanner._value) + len(scanner._tail))
    assert max(held) <= MAX_VALUE_BYTES
    assert held[-1] == 0


@pytest.mark.parametrize(
    "repeated",
    [
        *('"data":"",', '"text":"",', '"url":"https://x",', '"\\u0075rl":"",', '{"source":{"a":[]}},', "}", '"', '\\"'),
        *('"image_url":"d",', '"image_url":"http",', '"",' * 99 + '"source":{},'),
        *('"source":{"a":"b",', '"image_url":{"a":"\\n",', '"images":["http",', '"source":{' + '"a":"",' * 99),
    ],
)
def test_the_time_for_a_body_grows_with_its_length_alone(repeated):
    def seconds(length: int) -> float:
        piece, began = repeated.encode() * (length // len(repeated)), time.process_time()
        Scanner().feed(piece)
        return time.process_time() - began

    seconds(100_000)
    assert min(seconds(800_000) for _ in range(3)) < 40 * max(min(seconds(100_000) for _ in range(3)), 1e-3)


JSON_VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=80)
    | st.sampled_from(["url", "data", 'data"', "image_url", "data:x", "http:"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=12) | st.sampled_from(["url", "data", "image_url", "source", "images"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
FRAGMENTS = [b'"source":{', b'"images":["', b'"url":"', b'"data":"', b"\\u00", b"\\", b'"', b"}", b"\0"]
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
@given(st.lists(st.binary(max_size=300) | st.sampled_from(FRAGMENTS), max_size=12))
def test_any_bytes_are_scanned(pieces):
    scanner = Scanner()
    for piece in pieces:
        scanner.feed(piece)


@settings(deadline=None)
@given(st.sampled_from(["png", "jpeg", "webp", "gif", "bmp"]), st.data())
def test_a_damaged_image_is_measured_somehow(form, data):
    whole = bytearray(image(form, 30, 20))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        whole[at] = data.draw(st.integers(0, 255))
    assert measure(bytes(whole[: data.draw(st.integers(0, len(whole)))]), is_all=True) is not None
