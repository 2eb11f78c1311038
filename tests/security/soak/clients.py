"""The clients that must be served: they stream answers, check each byte and measure the time to the first one.

Beside them an operator reads `/metrics` and `/memory`, and now and then asks for a safe reset.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

from tests.security.soak.engine import answer
from tests.security.soak.sidecar import TOKEN

TOKENS = (60, 180)  # at 40 a second: 1.5 to 4.5 s
ANSWER_SECONDS = 120.0
READ_SECONDS = 5.0
# For so long after a reset of the processor caches the sidecar lets requests through one by one.
PACED_SECONDS = 2.5
MAX_FAILURES_KEPT = 50
ERRORS = (aiohttp.ClientError, TimeoutError, ValueError, OSError)


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete answer: when it was asked for and its first byte came, and its longest gap; `time.monotonic`."""

    asked: float
    first_byte: float
    longest_gap: float

    @property
    def first_byte_seconds(self) -> float:
        """The time to the first byte of its body."""
        return self.first_byte - self.asked


@dataclass(frozen=True, slots=True)
class Reset:
    """One safe reset: when it was asked for, how long it took, its status (0: no answer) and what it says."""

    asked: float
    seconds: float
    status: int
    says: str


@dataclass(slots=True)
class Service:
    """The clients' and the operator's view of the sidecar."""

    answers: list[Answer] = field(default_factory=list)
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    reads: int = 0
    reads_failed: int = 0
    slowest_read_seconds: float = 0.0
    resets: list[Reset] = field(default_factory=list)

    def fail(self, what: str) -> None:
        """Count an ordinary request that failed, and keep why."""
        self.failed += 1
        if len(self.failures) < MAX_FAILURES_KEPT:
            self.failures.append(what)

    def may_hold(self, answer: Answer) -> bool:
        """Return whether a safe reset may have held the request; such are judged by success, not by time."""
        return any(
            answer.asked <= reset.asked + reset.seconds + PACED_SECONDS and reset.asked <= answer.first_byte
            for reset in self.resets
        )


class Clients:
    """Ordinary clients and an operator of one sidecar. Every other client connects anew for each request.

    Args:
        url: The sidecar's.
        number: Of clients that stream at once.
        seed: Decides lengths and pauses.
    """

    def __init__(self, url: str, number: int, seed: int) -> None:
        self.service = Service()
        self._url = url
        self._number = number
        self._random = random.Random(seed)  # noqa: S311 - lengths and pauses, no secrets
        self._is_stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients and operator at work; at the end each answer under way is still read to its end."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        kept, new = (aiohttp.TCPConnector(limit=0, force_close=is_new) for is_new in (False, True))
        async with (
            aiohttp.ClientSession(self._url, timeout=timeout, connector=kept) as on_kept,
            aiohttp.ClientSession(self._url, timeout=timeout, connector=new) as on_new,
        ):
            clients = [
                asyncio.create_task(self._client(on_new if number % 2 else on_kept, number))
                for number in range(self._number)
            ]
            operator = asyncio.create_task(self._operator(on_new))
            try:
                yield
            finally:
                self._is_stopping = True
                operator.cancel()
                await asyncio.gather(*clients)
                await asyncio.gather(operator, return_exceptions=True)

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(self._random.uniform(0.0, 4.0))
        asked = 0
        while not self._is_stopping:
            asked += 1
            request, tokens = f"{number:04d}-{asked:06d}", self._random.randint(*TOKENS)
            try:
                self.service.answers.append(await self._ask(session, request, tokens))
            except ERRORS as error:
                self.service.fail(f"{request}: {type(error).__name__}: {error}")
                await asyncio.sleep(1.0)
            await asyncio.sleep(self._random.uniform(0.0, 0.1))

    @staticmethod
    async def _ask(session: aiohttp.ClientSession, request: str, tokens: int) -> Answer:
        body = {
            "id": request,
            "max_tokens": tokens,
            "stream": True,
            "messages": [{"role": "user", "content": "x" * 400}],
        }
        pieces, times = list[bytes](), list[float]()
        asked = time.monotonic()
        async with session.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
            async for piece in response.content.iter_any():
                pieces.append(piece)
                times.append(time.monotonic())
        if b"".join(pieces) != answer(request, tokens):
            raise ValueError(f"{sum(map(len, pieces))} bytes came that are not the answer")
        return Answer(asked, times[0], max((later - earlier for earlier, later in pairwise(times)), default=0.0))

    async def _operator(self, session: aiohttp.ClientSession) -> None:
        service = self.service
        while True:
            for path in ("/metrics", "/memory"):
                asked = time.monotonic()
                try:
                    async with session.get(path) as response:
                        await response.read()
                        is_read = response.status == 200
                except ERRORS:
                    is_read = False
                service.reads += 1
                service.reads_failed += not is_read
                service.slowest_read_seconds = max(service.slowest_read_seconds, time.monotonic() - asked)
            await asyncio.sleep(READ_SECONDS)

    async def reset(self) -> None:
        """Ask for a safe reset as an operator would, and keep what came of it."""
        asked, status = time.monotonic(), 0
        headers = {"authorization": f"Bearer {TOKEN}"}
        try:
            async with (
                aiohttp.ClientSession(self._url, headers=headers) as session,
                session.post("/reset_mm_cache", params={"mode": "safe"}) as response,
            ):
                status, answer = response.status, await response.json()
                says = str(answer.get("error", {}).get("message") or answer.get("reason") or answer.get("outcome"))
        except ERRORS as error:
            says = f"{type(error).__name__}: {error}"
        self.service.resets.append(Reset(asked, time.monotonic() - asked, status, says))
