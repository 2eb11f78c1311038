"""Sixteen clients that never stop asking, and what became of every answer: the load that relief is proven under.

What is asked is a function of the client's number and of how far it got, so that two runs ask the same: every other
request repeats an image of a small pool (a hit in every cache), the rest bring images that nobody has sent before;
every third answer is streamed. Answers are kept whole, to be held against those of a run that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from highwater.terminal.demo.traffic import image_url

CLIENTS = 16
POOL = 24
IMAGE_SIDE = 256
MAX_TOKENS = 6
REQUEST_SECONDS = 120.0
OK = 200


@dataclass(frozen=True)
class Ask:
    """One request: which images, and whether its answer is streamed."""

    images: tuple[int, ...]
    stream: bool


@dataclass
class Storm:
    """A run of the clients.

    Attributes:
        answers: What came of each request that was answered; one that was asked again must have got the same.
        failures: One line for each that was not.
        answered: How many were.
    """

    answers: dict[Ask, str] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    answered: int = 0
    seconds: float = 0.0

    def keep(self, ask: Ask, text: str) -> None:
        self.answered += 1
        before = self.answers.setdefault(ask, text)
        if before != text:
            self.contradictions.append(f"{ask}: {before!r} and then {text!r}")

    def differing(self, other: Storm) -> list[str]:
        return [
            f"{ask}: {text!r} against {other.answers[ask]!r}"
            for ask, text in self.answers.items()
            if ask in other.answers and other.answers[ask] != text
        ]


def nth(client: int, number: int, fresh_from: int) -> Ask:
    repeated = (7 * number + client) % POOL
    if number % 2:
        return Ask((repeated,), number % 3 == 0)
    fresh = fresh_from + number * CLIENTS + client
    return Ask((fresh, repeated) if number % 4 else (fresh,), number % 3 == 0)


@asynccontextmanager
async def storming(url: str, model: str, *, fresh_from: int) -> AsyncIterator[Storm]:
    storm, began = Storm(), time.monotonic()
    stop = asyncio.Event()

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        turn = 0
        while not stop.is_set():
            await _ask(storm, session, f"{url}/v1/chat/completions", model, nth(number, turn, fresh_from))
            turn += 1

    async with _session() as session, asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number, session))
        try:
            yield storm
        finally:
            stop.set()
    storm.seconds = time.monotonic() - began


async def ask_again(url: str, model: str, asks: list[Ask]) -> Storm:
    """The same requests once more, as many at a time, undisturbed."""
    storm, left = Storm(), iter(asks)

    async def client(session: aiohttp.ClientSession) -> None:
        for ask in left:
            await _ask(storm, session, f"{url}/v1/chat/completions", model, ask)

    async with _session() as session, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client(session))
    return storm


async def ask_one_by_one(
    url: str, model: str, asks: list[Ask], between: Callable[[], Awaitable[None]] | None = None
) -> Storm:
    storm = Storm()
    async with _session() as session:
        for ask in asks:
            if between is not None:
                await between()
            await _ask(storm, session, f"{url}/v1/chat/completions", model, ask)
    return storm


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS), connector=aiohttp.TCPConnector(limit=0)
    )


async def _ask(storm: Storm, session: aiohttp.ClientSession, url: str, model: str, ask: Ask) -> None:
    urls = [image_url(one, width=IMAGE_SIDE, height=IMAGE_SIDE) for one in ask.images]
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "What is this?"}]}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
        "stream": ask.stream,
    }
    try:
        async with session.post(url, json=body) as response:
            if response.status != OK:
                storm.failures.append(f"{ask}: HTTP {response.status}: {(await response.text())[:300]}")
                return
            whole = await response.text()
            text = _streamed(whole) if ask.stream else json.loads(whole)["choices"][0]["message"]["content"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as exc:
        storm.failures.append(f"{ask}: {type(exc).__name__}: {exc}")
        return
    storm.keep(ask, text)


def _streamed(whole: str) -> str:
    """The text of a stream; an error in it, or no end to it, is a failure.

    Raises:
        ValueError: Both of these.
    """
    events = [line.removeprefix("data: ") for line in whole.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"a stream without its end: {whole[-200:]!r}")
    parts = [json.loads(event) for event in events[:-1]]
    broken = next((part for part in parts if "error" in part), None)
    if broken is not None:
        raise ValueError(f"an error within the stream: {broken}")
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part.get("choices"))
