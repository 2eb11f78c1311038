"""Bodies with images, honest and hostile: the door looks at each, and the engine gets the bytes that were sent."""

import asyncio
import io
import json
import random
from itertools import pairwise

import pytest
from PIL import Image

from tests.faithful.fronts import Profile, fronted_by
from tests.fakes.images import data_url, png
from tests.patience import until

MIB = 1024**2
NARROW = Profile(
    "narrow",
    sidecar={
        "HIGHWATER_DOOR__DECODED_BYTES": str(MIB),
        "HIGHWATER_DOOR__UNKNOWN_BYTES": "1",
        "HIGHWATER_DOOR__WAIT_SECONDS": "60",
    },
)
PATH = "/v1/chat/completions"
JSON = ("content-type", "application/json")


def url(form: str, width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, form)
    return data_url(file.getvalue(), f"image/{form}")


def chat(*urls: str, **more: object) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    return json.dumps({"messages": [{"role": "user", "content": parts}], **more}).encode()


PHOTO = url("jpeg", 320, 240)
HOSTILE = {
    "one image": chat(PHOTO),
    "every format": chat(*(url(form, 30, 20) for form in ("png", "jpeg", "webp", "gif", "bmp"))),
    "escaped slashes": chat(PHOTO).replace(b"/", b"\\/"),
    "escaped letters": chat(PHOTO).replace(b'"url"', b'"\\u0075\\u0072l"').replace(b"data:", b"\\u0064ata:"),
    "escapes within base64": chat(PHOTO).replace(b"+", b"\\u002B").replace(b"A", b"\\u0041"),
    "JSON within JSON": chat(json.dumps({"image_url": {"url": PHOTO}}), text=chat(PHOTO).decode()),
    "deeply nested": b'{"url":' * 5000 + b'"x"' + b"}" * 5000,
    "no end": b'{"image_url": {"url": "data:image/png;base64,' + b"A" * 300_000,
    "quotes alone": b'"' * 100_000,
    "escaped quotes": chat(PHOTO.replace("image/", 'image/"\\')),
    "images in a list": json.dumps({"images": [PHOTO, PHOTO.replace("data:", "DATA:"), "http://x/y"]}).encode(),
    "citations": chat(annotations=[{"url_citation": {"url": "https://x"}}] * 20),
    "keys in a holder": b'{"source":{' + b'"data":"","url":"x",{}' * 2_000,
    "keys alone": b'"url":"data":' * 20_000,
    "broken base64": chat("data:image/png;base64,!!!!", "data:image/png;base64,", "data:"),
    "size nothing": chat(data_url(png(0, 0, pixels=0))),
    "ten thousand tiny images": chat(*[url("png", 2, 2)] * 10_000),
    "UTF-16": chat(PHOTO).decode().encode("utf-16"),
    "not JSON": bytes(range(256)) * 1000,
}


@pytest.fixture
def profile() -> Profile:
    return NARROW


@fronted_by("sidecar")
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_counted_body_is_the_same_bytes(through, engine, name):
    answer = await through.ask("POST", PATH, JSON, body=HOSTILE[name])
    assert (answer.status, engine.calls[0].body == HOSTILE[name]) == (200, True)


@fronted_by("sidecar")
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_chunked_body_is_the_same_bytes_wherever_it_is_cut(through, engine, name):
    body, cuts = HOSTILE[name], random.Random(name)  # noqa: S311 - the same cuts each time
    places = sorted({0, len(body), *(cuts.randrange(len(body)) for _ in range(200))})
    client = await through.connect()
    await client.request("POST", PATH, JSON, ("transfer-encoding", "chunked"))
    for start, end in pairwise(places):
        await client.send(b"%x\r\n%b\r\n" % (end - start, body[start:end]))
    await client.send(b"0\r\n\r\n")
    answer = await client.whole(method="POST")
    assert (answer.status, engine.calls[0].body == body) == (200, True)


@fronted_by("sidecar")
async def test_a_body_that_waits_in_its_middle_is_the_same_bytes(through, engine):
    go = asyncio.Event()

    @engine.on("/v1/first")
    async def first(call):
        await call.read()
        await go.wait()
        await call.answer()

    holder, client = await through.connect(), await through.connect()
    await holder.request("POST", "/v1/first", JSON, body=chat(url("png", 512, 512)))
    await until(lambda: engine.calls and engine.calls[0].body)
    body = chat("x" * 500_000, url("png", 256, 512), "y" * 500_000, url("png", 256, 128))
    await client.request("POST", PATH, JSON, ("transfer-encoding", "chunked"))
    for at in range(0, len(body), 50_001):
        piece = body[at : at + 50_001]
        client.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    client.writer.write(b"0\r\n\r\n")
    await asyncio.sleep(0.3)
    assert not any(call.body for call in engine.seen(PATH))
    go.set()
    answer = await client.whole(method="POST")
    assert (answer.status, engine.seen(PATH)[0].body == body) == (200, True)


@fronted_by("sidecar")
async def test_hostile_bodies_hold_no_memory(through, engine):
    bodies = [HOSTILE["no end"], HOSTILE["keys alone"], HOSTILE["ten thousand tiny images"]]
    for body in bodies:
        await through.ask("POST", PATH, JSON, body=body)
    before = through.rss_bytes()
    for _ in range(10):
        for body in bodies:
            await through.ask("POST", PATH, JSON, body=body)
    assert through.rss_bytes() - before < 8 * MIB


@fronted_by("sidecar")
async def test_a_decode_bomb_never_reaches_the_engine(through, engine):
    answer = await through.ask("POST", PATH, JSON, body=chat(data_url(png(60_000, 60_000, pixels=0))))
    assert answer.status == 413
    assert json.loads(answer.body)["error"]["type"] == "request_too_large"
    assert not any(call.body for call in engine.calls)
