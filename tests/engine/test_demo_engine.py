"""The demonstration's engine is a real one, its encoder cache can be seen in its memory, and it ends cleanly."""

from __future__ import annotations

import psutil

from highwater.terminal.demo.engine import CACHE_TOKENS, DemoEngine
from highwater.terminal.demo.traffic import IMAGE_SIDE, send_images
from tests.engines import image_cache_bytes, image_tokens, send_texts, worker_pids
from tests.tested import Ran, confirm

from .conftest import ask_all

MIB = 1024**2


def worker_rss_bytes(engine: DemoEngine) -> int:
    (pid,) = worker_pids(engine)
    return psutil.Process(pid).memory_info().rss


async def test_a_text_and_an_image_are_answered(engine: DemoEngine) -> None:
    texts = await send_texts(engine.url, engine.served_model, texts=["hello"])
    images = await send_images(engine.url, engine.served_model, images=[1])
    assert (texts.errors, images.errors) == ((), ())
    (memory,), (budget,) = ask_all(engine, "memory"), ask_all(engine, "budget")
    confirm(Ran.of_worker(memory, budget, __file__))


async def test_distinct_images_grow_the_worker(engine: DemoEngine) -> None:
    first = await send_images(engine.url, engine.served_model, images=range(1000, 1004))
    before = worker_rss_bytes(engine)
    rest = await send_images(engine.url, engine.served_model, images=range(2000, 2000 + cache_capacity_images()))
    assert first.errors + rest.errors == ()
    assert worker_rss_bytes(engine) - before >= 200 * MIB


def cache_capacity_images() -> int:
    return CACHE_TOKENS // image_tokens(IMAGE_SIDE, IMAGE_SIDE)


def test_the_encoder_cache_can_hold_enough_to_be_seen() -> None:
    assert cache_capacity_images() * image_cache_bytes(IMAGE_SIDE, IMAGE_SIDE) == 384 * MIB
