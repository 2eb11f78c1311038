"""Clients of the sidecar's data port: images and texts go through the door, on virtual time too."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tests.fakes.images import data_url, png

PATH = "/v1/chat/completions"
TEXT_SECONDS = 2.0
"""The time that the model engine takes for a text."""
WAIT_SECONDS = 120.0
REFUSED, OK = 503, 200


@dataclass
class Clients:
    """Those of one situation."""

    url: str  # the sidecar's
    # What each image's request got, by its side in pixels.
    images: dict[int, Counter[int]] = field(default_factory=dict)
    texts: Counter[int] = field(default_factory=Counter)  # what each text's got
    text_seconds: float = 0.0  # the longest that one took
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def send(self, sides: Sequence[int], *, clients: int, every: float) -> None:
        """Let so many clients send images of these sides in turn, each the next one so long after its answer."""
        for first in range(clients):
            self._tasks.append(asyncio.create_task(self._images(itertools.cycle(sides), first, every)))

    def write(self) -> None:
        """Let one client send a text after the other."""
        self._tasks.append(asyncio.create_task(self._texts()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _images(self, sides: itertools.cycle[int], first: int, every: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=WAIT_SECONDS) as client:
            for side in itertools.islice(sides, first, None):
                status = await _ask(client, {"side": side, "messages": [{"role": "user", "content": [_image(side)]}]})
                self.images.setdefault(side, Counter())[status] += 1
                await asyncio.sleep(every)

    async def _texts(self) -> None:
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=WAIT_SECONDS) as client:
            while True:
                began = loop.time()
                self.texts[await _ask(client, {"messages": [{"role": "user", "content": "hello"}]})] += 1
                self.text_seconds = max(self.text_seconds, loop.time() - began)
                await asyncio.sleep(1.0)

    def missed(self, *, served: Sequence[int], refused: Sequence[int]) -> list[str]:
        """Return what should have been else: sides of which some must be served, and of which none can be."""
        found = [f"texts got {dict(self.texts)}"] if set(self.texts) - {OK} else []
        if self.text_seconds >= 2 * TEXT_SECONDS:
            found.append(f"a text took {self.text_seconds:.1f} s")
        for side, statuses in self.images.items():
            if set(statuses) - {OK, REFUSED}:
                found.append(f"images of {side} pixels got {dict(statuses)}")
        found += [f"no image of {side} pixels was served" for side in served if not self.images.get(side, {}).get(OK)]
        found += [f"an image of {side} pixels was let in" for side in refused if self.images.get(side, {}).get(OK)]
        return found


async def _ask(client: httpx.AsyncClient, body: object) -> int:
    try:
        return (await client.post(PATH, content=json.dumps(body))).status_code
    except httpx.TransportError:
        return 0


def _image(side: int) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(png(side, side))}}
