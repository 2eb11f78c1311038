"""The clients' requests: images of mixed sizes with repeats, text, and short videos, by the real OpenAI client."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError
from PIL import Image

from highwater.terminal.demo.traffic import image_url

SIDES = (64, 224, 336, 512, 768, 1024, 1536, 2048, 4096)
_WEIGHTS = (4, 8, 8, 10, 5, 4, 2, 1, 1)
_REPEATED = 0.4
_KEPT_SEEDS = 400
_KEPT_ERRORS = 20
REQUEST_SECONDS = 300.0
WORK_SECONDS, REST_SECONDS = 40.0, 20.0
"""Growth is judged from what is left at rest: a rest lasts until host memory was looked at, on a busy machine too."""


@dataclass
class Counts:
    """The outcomes of the requests, by kind."""

    sent: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    images_by_side: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    without_videos: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return them."""
        return {
            "sent": dict(self.sent),
            "failed": dict(self.failed),
            "errors": self.errors,
            "images_by_side": dict(self.images_by_side),
            "repeated_images": self.repeated,
            "without_videos": self.without_videos,
        }


class Mix:
    """Draws requests.

    Args:
        seed: Of all that is drawn.
        counts: Where the sizes are counted.
    """

    def __init__(self, seed: int, counts: Counts) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a mix of requests, not a secret
        self._seen: list[tuple[int, int, int]] = []
        self._counts = counts
        self._next = 1_000_000

    def request(self, *, with_videos: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the kind of the next request, and its content."""
        kinds = ("image", "text", "images", "video") if with_videos else ("image", "text", "images")
        kind = self._random.choices(kinds, (10, 4, 2, 1)[: len(kinds)])[0]
        words = " ".join(str(self._random.randrange(10_000)) for _ in range(self._random.randrange(2, 60)))
        text = {"type": "text", "text": f"What is here? {words}"}
        if kind == "text":
            return kind, [text]
        if kind == "video":
            return kind, [{"type": "video_url", "video_url": {"url": video_url(self._random.randrange(10**6))}}, text]
        count = 1 if kind == "image" else 2
        return "image", [{"type": "image_url", "image_url": {"url": self._image()}} for _ in range(count)] + [text]

    def _image(self) -> str:
        if self._seen and self._random.random() < _REPEATED:
            self._counts.repeated += 1
            seed, width, height = self._random.choice(self._seen)
        else:
            self._next += 1
            width, height = (self._random.choices(SIDES, _WEIGHTS)[0] for _ in range(2))
            if max(width, height) / min(width, height) > 8:  # no more than that is a picture
                height = width
            seed = self._next
            self._seen = [*self._seen, (seed, width, height)][-_KEPT_SEEDS:]
        self._counts.images_by_side[str(max(width, height))] += 1
        return image_url(seed, width=width, height=height)


def video_url(seed: int, frames: int = 4, side: int = 128) -> str:
    """Return a short video as vLLM takes one without a container: JPEG pictures in base64, with commas between."""
    return "data:video/jpeg;base64," + ",".join(_jpegs(seed, frames, side))


def _jpegs(seed: int, frames: int, side: int) -> Iterator[str]:
    for number in range(frames):
        colour = tuple((seed * factor + 20 * number) % 256 for factor in (3, 7, 11))
        file = io.BytesIO()
        Image.new("RGB", (side, side), colour).save(file, "JPEG")
        yield base64.b64encode(file.getvalue()).decode()


class Traffic:
    """Clients that work for two thirds of a minute, and rest together for the rest of it.

    Args:
        url: Of the sidecar.
        model: As the engine calls it.
        counts: What comes of it.
        seed: Of the mix.
        clients: That send at once.
    """

    def __init__(self, url: str, model: str, counts: Counts, *, seed: int, clients: int) -> None:
        self._model = model
        self._counts = counts
        self._mix = Mix(seed, counts)
        self._clients = clients
        # A request that fails is a failure: nobody tries again.
        self._openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_SECONDS)

    async def run(self, seconds: float, *, clock: Callable[[], float]) -> None:
        """Send for so long; the last requests are waited for."""
        end = clock() + seconds
        await self._try_video()
        async with self._openai:
            while clock() < end:
                pause = min(end, clock() + WORK_SECONDS)
                await asyncio.gather(*(self._work(pause, clock) for _ in range(self._clients)))
                await asyncio.sleep(min(REST_SECONDS, max(0.0, end - clock())))

    async def _try_video(self) -> None:
        """Leave videos out where the engine takes none: that is no failure of what is soaked."""
        content = [{"type": "video_url", "video_url": {"url": video_url(1)}}, {"type": "text", "text": "What is here?"}]
        try:
            await self._ask(content)
        except OpenAIError as exc:
            self._counts.without_videos = str(exc)[:300]

    async def _work(self, end: float, clock: Callable[[], float]) -> None:
        while clock() < end:
            kind, content = self._mix.request(with_videos=self._counts.without_videos is None)
            self._counts.sent[kind] += 1
            try:
                await self._ask(content)
            except OpenAIError as exc:
                self._counts.failed[kind] += 1
                if len(self._counts.errors) < _KEPT_ERRORS:
                    self._counts.errors.append(f"{kind}: {type(exc).__name__}: {str(exc)[:300]}")

    async def _ask(self, content: list[dict[str, Any]]) -> None:
        messages: Any = [{"role": "user", "content": content}]
        answer = await self._openai.chat.completions.create(
            model=self._model, messages=messages, max_tokens=4, temperature=0
        )
        if not answer.choices:
            raise OpenAIError("an answer without a choice")
