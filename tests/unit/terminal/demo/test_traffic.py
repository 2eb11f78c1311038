"""Images are valid, follow from their seed alone, and every request is counted."""

from __future__ import annotations

import io
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web
from PIL import Image

from highwater.terminal.demo.traffic import image_url, png, send_images
from tests.engines import send_texts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


def test_a_png_opens_with_its_size_and_colours() -> None:
    with Image.open(io.BytesIO(png(7, width=100, height=60))) as image:
        image.load()
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (100, 60))
        assert len(image.getcolors(maxcolors=100) or []) > 1


@asynccontextmanager
async def server(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Yield the URL of a server on a real port that answers chat completions with `answer`."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def test_each_seed_is_sent_once_with_its_image() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body["messages"][0]["content"][0]["image_url"]["url"])
        return web.json_response({})

    async with server(answer) as url:
        result = await send_images(url, "m", images=range(5), concurrency=2, width=32, height=32)
    assert (result.sent, result.failed) == (5, 0)
    assert sorted(seen) == sorted(image_url(seed, width=32, height=32) for seed in range(5))


async def test_failures_are_counted_and_the_first_are_quoted() -> None:
    done: list[None] = []

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=503, text="not now")

    async with server(answer) as url:
        result = await send_texts(url, "m", texts=["hello"] * 9, on_done=lambda: done.append(None))
    assert (result.sent, result.failed, len(done)) == (9, 9, 9)
    assert result.errors == ("HTTP 503: not now",) * 5


async def test_an_engine_that_is_not_there_is_a_failure_not_an_exception(unused_tcp_port: int) -> None:
    result = await send_texts(f"http://127.0.0.1:{unused_tcp_port}", "m", texts=["hello"])
    assert result.failed == 1
