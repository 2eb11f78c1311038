"""Chat requests for an engine, mostly of images: the clients of the demonstration, the tests and the benchmark.

Images are made from a seed with the standard library alone: the same seed gives the same bytes, and so the same
`mm_hash`, by which vLLM's caches know an image.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

IMAGE_SIDE = 512
REQUEST_SECONDS = 600.0
KEPT_ERRORS = 5
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_STRIPE_PIXELS = 8


@dataclass(frozen=True)
class TrafficResult:
    sent: int
    failed: int
    errors: tuple[str, ...]  # the first few failures, each in one line
    seconds: float


def png(seed: int, *, width: int = IMAGE_SIDE, height: int = IMAGE_SIDE) -> bytes:
    """Return a PNG of vertical stripes whose colours are drawn from `seed`: a few hundred bytes, RGB, 8 bits."""
    colours = hashlib.shake_128(seed.to_bytes(16, "big", signed=True)).digest(3 * (-(-width // _STRIPE_PIXELS)))
    stripes = (colours[start : start + 3] * _STRIPE_PIXELS for start in range(0, len(colours), 3))
    row = b"".join(stripes)[: 3 * width]
    rows = (b"\0" + row) * height  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return _PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def image_url(seed: int, *, width: int = IMAGE_SIDE, height: int = IMAGE_SIDE) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed, width=width, height=height)).decode()


async def send_images(
    url: str,
    model: str,
    *,
    images: Iterable[int],
    concurrency: int = 4,
    width: int = IMAGE_SIDE,
    height: int = IMAGE_SIDE,
    max_tokens: int = 1,
    on_done: Callable[[], None] | None = None,
) -> TrafficResult:
    """Request one chat completion per image; the same seed is the same image.

    Sizes are in pixels. `on_done` is called after each request, failed or not.
    """
    contents = (
        [
            {"type": "image_url", "image_url": {"url": image_url(seed, width=width, height=height)}},
            {"type": "text", "text": "What is this?"},
        ]
        for seed in images
    )
    return await send(url, model, contents, concurrency=concurrency, max_tokens=max_tokens, on_done=on_done)


async def send(
    url: str,
    model: str,
    contents: Iterable[Any],
    *,
    concurrency: int = 4,
    max_tokens: int = 1,
    on_done: Callable[[], None] | None = None,
) -> TrafficResult:
    bodies = (
        {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": content}]}
        for content in contents
    )
    errors: list[str] = []
    sent = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal sent
        # The workers share one generator: each image is made when its turn comes, never all at once.
        for body in bodies:
            sent += 1
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    response = await client.post(f"{url}/v1/chat/completions", json=body)
                if not response.is_success:
                    errors.append(f"HTTP {response.status_code}: {response.text[:300]}")
            except (httpx.HTTPError, TimeoutError) as error:
                errors.append(f"{type(error).__name__}: {error}")
            if on_done is not None:
                on_done()

    began = time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)  # the workers are the limit
    async with (
        httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(concurrency):
            group.create_task(work(client))
    return TrafficResult(sent, len(errors), tuple(errors[:KEPT_ERRORS]), time.monotonic() - began)
