"""Clients that ask about images without end, and how long each waited for the first byte of its answer.

Every other request repeats an image of a small pool (a hit in every cache), the others bring images that no cache has
seen. All answers are streamed: vLLM sends the first piece with the first token.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.traffic import image_url

CLIENTS = 16
POOL = 24
IMAGE_SIDE = 256
MAX_TOKENS = 6
REQUEST_SECONDS = 120.0


@dataclass(slots=True)
class Traffic:
    """The results of the requests.

    Attributes:
        first_bytes: For each answered request when it was sent (monotonic), and the seconds to its first byte.
        failures: The first few, one line each.
        failed: How many.
    """

    first_bytes: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    failed: int = 0

    def waits(self, began: float, ended: float) -> list[float]:
        """Seconds to the first byte of the requests that were sent in that time."""
        return [seconds for at, seconds in self.first_bytes if began <= at < ended]


@asynccontextmanager
async def image_clients(url: str, model: str) -> AsyncIterator[Traffic]:
    """Clients that ask for as long as the block lasts; at its end all of them have their answers.

    Raises:
        DemoError: A request failed.
    """
    traffic, stop = Traffic(), asyncio.Event()

    async def client(session: aiohttp.ClientSession, images: Iterator[int]) -> None:
        while not stop.is_set():
            await _ask(traffic, session, f"{url}/v1/chat/completions", _body(model, next(images)))

    pool = random.getrandbits(40)
    fresh = itertools.count(pool + POOL)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)  # the clients are the limit
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(session, _images(number, pool, fresh)))
        try:
            yield traffic
        finally:
            stop.set()
    if traffic.failed:
        total = traffic.failed + len(traffic.first_bytes)
        raise DemoError(f"{traffic.failed} of {total} image requests failed: {traffic.failures}")


def _images(client: int, pool: int, fresh: Iterator[int]) -> Iterator[int]:
    for turn in itertools.count(client):
        yield next(fresh) if turn % 2 else pool + (7 * turn + client) % POOL


def _body(model: str, image: int) -> dict[str, Any]:
    shown = {"type": "image_url", "image_url": {"url": image_url(image, width=IMAGE_SIDE, height=IMAGE_SIDE)}}
    return {
        "model": model,
        "messages": [{"role": "user", "content": [shown, {"type": "text", "text": "What is this?"}]}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def _ask(traffic: Traffic, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    began = time.monotonic()
    try:
        async with session.post(url, json=body) as response:
            first = await response.content.readany()
            seconds = time.monotonic() - began
            whole = first + await response.read()
        if whole.rstrip().endswith(b"[DONE]") and b'"error"' not in whole:
            traffic.first_bytes.append((began, seconds))
            return
        failure = f"HTTP {response.status}: {whole[-300:].decode(errors='replace')}"
    except (aiohttp.ClientError, TimeoutError) as error:
        failure = f"{type(error).__name__}: {error}"
    traffic.failed += 1
    if len(traffic.failures) < 5:
        traffic.failures.append(failure)
