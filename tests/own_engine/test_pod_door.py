"""A flood of images at a real engine in a container with a memory limit: it dies without the door, and lives with it.

Two hundred clients at once, each with images of its own: thumbnails, photos, pictures of 8192 x 8192 pixels, and small
files that claim 60,000 x 60,000. Beside them clients that send text.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import statistics
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from gated_proxy.door_items import BYTES_PER_PIXEL
from highwater.act.door import FREE_SHARE
from highwater.terminal.demo.engine import EngineEnvironment
from highwater.terminal.demo.process import answers
from tests.pod.engine import PodEngine
from tests.pod.kubelet import wait_for_start
from tests.pod.pod import Container, Pod, why_not
from tests.pod.sidecar import BOTH, PodSidecar

MIB = 1024**2
LIMIT_BYTES = 5120 * MIB
CLIENTS, TEXT_CLIENTS = 200, 4
FLOOD_SECONDS = 120.0
TEXT_SECONDS = 60.0
SIDES = (*[512] * 24, *[2048] * 8, *[4096] * 4, *[8192] * 3, 60_000)
"""In pixels, as often as a client sends them."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600, func_only=True)]


def picture(side: int, number: int) -> str:
    if side == SIDES[-1]:
        header = struct.pack(">I4sIIBBBBB", 13, b"IHDR", side, side, 8, 2, 0, 0, 0) + bytes(4)
        header += struct.pack(">I4s", 0, b"IDAT")  # no larger size can follow
        return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + header + number.to_bytes(4)).decode()
    file = io.BytesIO()
    Image.new("RGB", (side, side - number % 16), (number % 256, side % 256, 7)).save(file, "jpeg")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


@dataclass
class Flood:
    """What clients got. `statuses` by the side of the image; 0: no response."""

    statuses: dict[int, Counter[int]] = field(default_factory=lambda: {side: Counter() for side in set(SIDES)})
    texts: Counter[int] = field(default_factory=Counter)
    text_seconds: list[float] = field(default_factory=list)
    kept_bytes: int = 0
    """The most of the container's memory, as it was looked at."""


@dataclass
class Served:
    engine: PodEngine
    container: Container
    sidecar: PodSidecar

    @property
    def is_alive(self) -> bool:
        return self.container.is_running() and not self.container.ended().oom_kills

    async def ask(self, client: httpx.AsyncClient, content: Any) -> int:
        body = {"model": self.engine.served_model, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        try:
            return (await client.post(f"{self.sidecar.url}/v1/chat/completions", json=body)).status_code
        except httpx.HTTPError:
            return 0

    async def preparing(self, side: int) -> float:
        """Send one photo, and return by how many bytes a pixel the container's memory rose meanwhile."""
        before = most = self.container.kept_bytes()
        shown = {"type": "image_url", "image_url": {"url": picture(side, 0)}}
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            asked = asyncio.create_task(self.ask(client, [shown]))
            while not asked.done():
                most = max(most, self.container.kept_bytes())
                await asyncio.sleep(0.02)
        assert asked.result() == httpx.codes.OK
        return (most - before) / side**2

    async def flood(self, *, seconds: float, with_images: bool = True) -> Flood:
        """Have all clients ask; without images those of the flood send text of their own."""
        done, pictures = Flood(), random.Random(1)  # noqa: S311 - the same ones each time
        pool = [(side, picture(side, number)) for number, side in enumerate(SIDES * 2)]
        end = time.monotonic() + seconds

        async def look() -> None:
            while self.is_alive and time.monotonic() < end:
                done.kept_bytes = max(done.kept_bytes, self.container.kept_bytes())
                await asyncio.sleep(0.5)

        over = asyncio.create_task(look())

        async def images(client: httpx.AsyncClient) -> None:
            while not over.done():
                side, url = pictures.choice(pool)
                shown = {"type": "image_url", "image_url": {"url": url}}
                asked = shown if with_images else {"type": "text", "text": f"a square of {side} pixels"}
                done.statuses[side][await self.ask(client, [asked])] += 1
                await asyncio.sleep(1.0)

        async def texts(client: httpx.AsyncClient) -> None:
            while not over.done():
                began = time.monotonic()
                done.texts[await self.ask(client, "hello")] += 1
                done.text_seconds.append(time.monotonic() - began)

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60.0, trust_env=False, limits=limits) as client:
            await asyncio.gather(
                *(images(client) for _ in range(CLIENTS)), *(texts(client) for _ in range(TEXT_CLIENTS))
            )
        return done


@contextmanager
def served(environment: EngineEnvironment, folder: Path, **settings: str) -> Iterator[Served]:
    if reason := why_not(folder / "tried"):
        pytest.skip(reason)
    with Pod(folder / "pod") as pod:
        engine = PodEngine(environment, folder / "engine")
        container = pod.container("vllm", limit_bytes=LIMIT_BYTES)
        container.start(engine.command, env=engine.env, cwd=engine.folder)
        wait_for_start(lambda: answers(engine.port, "/health"))
        known = {"HIGHWATER_RECORDER_DIR": str(engine.recorder), "HIGHWATER_ENGINE_LOG": str(container.log_path)}
        with PodSidecar(pod, BOTH, engine.url, known | settings) as sidecar:
            wait_for_start(lambda: sidecar.report()["host"])
            yield Served(engine, container, sidecar)


async def test_without_the_door_the_kernel_ends_the_engine(engine_environment, tmp_path):
    with served(engine_environment, tmp_path, HIGHWATER_DOOR__MODE="off") as running:
        await running.flood(seconds=FLOOD_SECONDS)
        wait_for_start(lambda: not running.is_alive)
        assert running.container.ended().reason == "OOMKilled"


async def test_with_the_door_it_lives_and_text_takes_less_than_twice_as_long(
    engine_environment, tmp_path, record_property
):
    """Beside the same clients without images: what they cost a text is then the images' part, and not the machine's."""
    with served(engine_environment, tmp_path) as running:
        # Host memory is read beside the polls, and the door looks at it with the next one.
        wait_for_start(lambda: running.sidecar.report()["door"]["mode"] == "on")
        assert running.sidecar.report()["door"]["why"] == "the engine's container has a memory limit"
        pixel_bytes = await running.preparing(SIDES[-2])
        texts = await running.flood(seconds=TEXT_SECONDS, with_images=False)
        done = await running.flood(seconds=FLOOD_SECONDS)
        record_property("images", str(done.statuses))
        record_property("text beside the same clients without images", _spread(texts.text_seconds))
        record_property("text beside images", _spread(done.text_seconds))
        record_property("runnable processes of the machine, last minute", f"{os.getloadavg()[0]:.1f}")
        record_property("most of the container's memory", f"{done.kept_bytes / MIB:.0f} of {LIMIT_BYTES / MIB:.0f} MiB")
        record_property("bytes a pixel while a photo is prepared", f"{pixel_bytes:.1f}")
        assert pixel_bytes < FREE_SHARE * BYTES_PER_PIXEL
        assert running.is_alive
        assert set(done.texts) == {200}
        assert set(done.statuses[60_000]) <= {413}
        assert set().union(*done.statuses.values()) <= {200, 413, 503}
        assert done.statuses[512][200]
        requests = running.sidecar.call("GET", "/memory/requests?limit=1000")["requests"]
        assert {each["largest"][0]["width"] for each in requests} >= {512, 8192}
        assert statistics.median(done.text_seconds) < 2 * statistics.median(texts.text_seconds)
        assert max(done.text_seconds) < 2 * max(texts.text_seconds)


def _spread(seconds: list[float]) -> str:
    middle, worst = statistics.median(seconds), max(seconds)
    return f"{len(seconds)} requests, median {middle:.2f} s, longest {worst:.2f} s"
