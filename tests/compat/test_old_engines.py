"""The demonstration's engine is a real one in older versions too, and its workers carry Highwater's extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.traffic import IMAGE_SIDE, send_images
from tests.engine.conftest import ask_all
from tests.engines import image_cache_bytes, send_texts, worker_pids
from tests.patience import LIMIT_SECONDS
from tests.tested import Ran, confirm

BYTES_PER_BFLOAT16 = 2
BYTES_PER_FLOAT32 = 4


async def test_texts_and_images_are_answered_and_the_extension_sees_them(
    version: str, engine_factory: Callable[..., DemoEngine]
) -> None:
    """In float32, where an answer does not hang on who else was in the batch."""
    with engine_factory(extra_args=("--dtype", "float32")) as engine:
        assert version_of(engine) == version
        assert (await send_texts(engine.url, engine.served_model, texts=["hello"])).errors == ()
        assert (await send_images(engine.url, engine.served_model, images=[1, 2, 3, 2, 1])).errors == ()
        (cache,) = ask_all(engine, "encoder_cache")
        (memory,), (budget,) = ask_all(engine, "memory"), ask_all(engine, "budget")
        assert all(answer["ok"] for answer in (cache, memory, budget))
        assert budget["engine_budget"]["vllm_version"] == version
        assert [memory["pid"]] == worker_pids(engine)
        confirm(Ran.of_worker(memory, budget, __file__))
    expected = image_cache_bytes(IMAGE_SIDE, IMAGE_SIDE) * BYTES_PER_FLOAT32 // BYTES_PER_BFLOAT16
    assert [entry["bytes"] for entry in cache["entries"]] == [expected] * 3


def version_of(engine: DemoEngine) -> Any:
    return httpx.get(f"{engine.url}/version", trust_env=False, timeout=LIMIT_SECONDS).json()["version"]
