"""The time that a poll holds a worker up: op `memory` inside it, with the encoder cache full of small entries."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

import httpx

from bench.figure import Figure, number
from bench.stage import CALL_SECONDS, Stage
from highwater.terminal.demo.engine import CACHE_TOKENS
from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.traffic import send_images
from tests.engines import image_tokens

WIDTH, HEIGHT = 128, 192
ENTRIES = CACHE_TOKENS // image_tokens(WIDTH, HEIGHT)
GAP_SECONDS = 0.05
CONCURRENCY = 16


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """Milliseconds that the worker counts itself. No sidecar runs meanwhile: one caller only."""
    first = random.getrandbits(40)  # images that no cache has seen
    url, model = stage.engine.url, stage.engine.served_model
    httpx.post(f"{url}/reset_encoder_cache", timeout=CALL_SECONDS, trust_env=False).raise_for_status()
    empty = [_memory(stage) for _ in range(50)]
    images = range(first, first + ENTRIES)
    result = asyncio.run(send_images(url, model, images=images, concurrency=CONCURRENCY, width=WIDTH, height=HEIGHT))
    if result.failed:
        raise DemoError(f"{result.failed} of {result.sent} image requests failed: {result.errors}")
    full = [_memory(stage) for _ in range(60 if short else 300)]
    times = [answer["elapsed_ms"] for answer in full]
    held = full[-1]["encoder_cache"]["entries"]
    return [
        Figure(
            what=f"Op `memory` inside a worker, {held} encoder cache entries, median",
            value=statistics.median(times),
            unit="ms",
            goal=None,
            spread=f"longest {number(max(times))}; with an empty cache "
            f"{number(statistics.median(answer['elapsed_ms'] for answer in empty))}, "
            f"longest {number(max(answer['elapsed_ms'] for answer in empty))}",
            method=f"real engine, idle; `elapsed_ms` of {len(times)} calls. The engine makes no step meanwhile.",
        )
    ]


def _memory(stage: Stage) -> dict[str, Any]:
    time.sleep(GAP_SECONDS)
    return stage.worker_op("memory")
