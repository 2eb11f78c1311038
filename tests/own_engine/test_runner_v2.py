"""vLLM's V2 model runner, which every GPU has by default since 0.29, on a CPU: what Highwater says and does there.

A real server with an engine core and a worker process; its kernels run in Triton's interpreter, at about a second for
each request. So one engine, few requests, and no load.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment
from highwater.terminal.demo.process import free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.traffic import image_url
from tests.engine.conftest import PATIENT, ask_all, engine_with_weights, wait_for
from tests.engine.explained import assert_pool_is_the_engines, assert_sums_are_exact, logged
from tests.engines import (
    BYTES_PER_NUMBER,
    ENCODER_WIDTH,
    RUNNER_V2_BATCH_TOKENS,
    RUNNER_V2_IMAGE_SIDE,
    image_tokens,
    on_runner_v2,
    worker_pids,
)
from tests.patience import LIMIT_SECONDS
from tests.tested import Ran, confirm

PHASES = ["before", "init", "weights", "profile", "kv_cache", "warm_up"]
IMAGES = (1, 2)
SIDE = 128
LARGEST = image_tokens(RUNNER_V2_IMAGE_SIDE, RUNNER_V2_IMAGE_SIDE)
NUMBER_BYTES = 2 * BYTES_PER_NUMBER  # float32
ENTRY_BYTES = image_tokens(SIDE, SIDE) * ENCODER_WIDTH * NUMBER_BYTES


class Watched(NamedTuple):
    engine: DemoEngine
    sidecar: DemoSidecar


@pytest.fixture(scope="module")
def watched(engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder: Path = tmp_path_factory.mktemp("v2")
    port, rings = free_port(), folder / "rings"
    settings = {"HIGHWATER_RECORDER_DIR": str(rings), "HIGHWATER_POLICY__MODE": "observe", **PATIENT}
    with (
        DemoSidecar(f"http://127.0.0.1:{port}", folder=folder, settings=settings) as sidecar,
        engine_with_weights(engine_environment, folder, port=port, **on_runner_v2(folder, rings)) as engine,
    ):
        wait_for(sidecar, lambda report: report["engine"]["state"] == "ready" and report["ranks_reported"] == 1)
        yield Watched(engine, sidecar)


def rank_of(sidecar: DemoSidecar) -> dict[str, Any]:
    (rank,) = sidecar.call("GET", "/memory")["ranks"]
    return dict(rank)


async def answers(sidecar: DemoSidecar, seeds: tuple[int, ...]) -> list[str]:
    """Return what the engine says of each image, by the chances of its words: they differ with the image."""

    async def ask(client: httpx.AsyncClient, seed: int) -> str:
        content = [{"type": "image_url", "image_url": {"url": image_url(seed, width=SIDE, height=SIDE)}}]
        body = {"model": "tiny-qwen3-vl", "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 5}
        response = await client.post(f"{sidecar.url}/v1/chat/completions", json=body)
        return str(response.raise_for_status().json()["choices"][0]["logprobs"])

    async with httpx.AsyncClient(timeout=LIMIT_SECONDS, trust_env=False) as client:
        return [await ask(client, seed) for seed in seeds]


def test_the_worker_is_one_of_runner_v2(watched: Watched) -> None:
    """Else everything below would be about another; docs/tested.json has it."""
    (memory,), (budget,) = ask_all(watched.engine, "memory"), ask_all(watched.engine, "budget")
    assert (budget["engine_budget"]["limits"]["v2_runner"], memory["notes"]) == (True, [])
    assert "Using V2 Model Runner" in watched.engine.log_path.read_text()
    confirm(Ran.of_worker(memory, budget, __file__))


def test_the_recorder_has_the_start_and_components_that_sum(watched: Watched) -> None:
    rank = rank_of(watched.sidecar)
    assert [phase["name"] for phase in rank["start"]] == PHASES
    assert all(phase["error"] is None and phase["used_bytes"] > 0 for phase in rank["start"])
    assert rank["source"] == "recorder"
    components = rank["components"]
    assert sum(size for size in components.values() if size is not None) == rank["used_bytes"]
    assert min(components["weights_bytes"], components["kv_cache_bytes"]) > 0


def test_the_budget_is_explained_with_the_encoders_part(watched: Watched) -> None:
    engine, sidecar = watched
    answer = sidecar.call("GET", "/memory/budget")
    assert_pool_is_the_engines(engine, answer, engine.environment.version)
    assert_sums_are_exact(answer)
    encoder = answer["explanation"]["encoder"]
    assert LARGEST > RUNNER_V2_BATCH_TOKENS
    assert (
        encoder["cache_size"]
        == encoder["item_tokens"]
        == LARGEST
        == rank_of(sidecar)["encoder_cache"]["capacity_embeds"]
    )
    assert encoder["cache_size"] == int(logged(engine, r"initialized with a budget of (\d+) tokens"))
    assert encoder["profiled_items"] == int(logged(engine, r"profiled with (\d+) image items"))
    assert encoder["cache_bytes"] == LARGEST * ENCODER_WIDTH * NUMBER_BYTES
    assert encoder["is_profiled"] is True


def test_a_plan_beside_it_knows_its_images(watched: Watched) -> None:
    sidecar = watched.sidecar
    flags = {"max_num_batched_tokens": 4 * LARGEST, "kv_cache_memory_bytes": 64 * 1024**2}
    wider = sidecar.call("POST", "/memory/plan", flags)
    assert wider["encoder"]["cache_embeddings"] == 4 * LARGEST
    fewer = sidecar.call("POST", "/memory/plan", {"images_per_prompt": 1})
    assert fewer["changed"] == {"limit_mm_per_prompt": {"image": 1}}


async def test_entries_are_trimmed_restored_at_access_reset_and_released(watched: Watched) -> None:
    engine, sidecar = watched
    first = await answers(sidecar, IMAGES)
    assert len(set(first)) == len(IMAGES)
    report = await asyncio.to_thread(wait_for, sidecar, lambda report: held(report)["entries"] == len(IMAGES))
    assert report["ranks"][0]["components"]["encoder_cache_bytes"] == len(IMAGES) * ENTRY_BYTES
    (listed,) = sidecar.call("GET", "/memory/encoder-cache")["ranks"]
    (asked,) = ask_all(engine, "encoder_cache")
    assert [entry["bytes"] for entry in listed["entries"]] == [ENTRY_BYTES] * len(IMAGES)
    assert {entry["mm_hash"] for entry in listed["entries"]} <= {entry["mm_hash"] for entry in asked["entries"]}
    assert [entry["referenced"] for entry in asked["entries"]] == [False] * len(IMAGES)

    assert done(sidecar, "trim_encoder_cache")["outcome"] == "done"
    (trimmed,) = ask_all(engine, "memory")
    assert (trimmed["encoder_cache"]["host_entries"], trimmed["encoder_cache"]["device_bytes"]) == (len(IMAGES), 0)
    # Else the prompts would come from the prefix cache, and nobody would look at the images.
    assert sidecar.call("POST", "/reset_prefix_cache")["after"]
    assert await answers(sidecar, IMAGES) == first
    (memory,) = ask_all(engine, "memory")
    assert (memory["encoder_cache"]["restores"], memory["encoder_cache"]["host_bytes"]) == (len(IMAGES), 0)

    assert sidecar.call("POST", "/reset_encoder_cache?mode=safe")["after"]
    await asyncio.to_thread(wait_for, sidecar, lambda report: held(report)["entries"] == 0)
    assert done(sidecar, "release")["outcome"] == "done"


@pytest.mark.soak
def test_an_engine_that_is_killed_is_an_incident_and_the_next_is_watched_from_its_start(watched: Watched) -> None:
    engine, sidecar = watched
    (pid,) = worker_pids(engine)
    os.kill(pid, signal.SIGKILL)
    wait_for(sidecar, lambda report: report["engine"]["state"] == "gone")
    wait_for(sidecar, lambda _: sidecar.call("GET", "/memory/incidents")["incidents"])
    engine.stop()
    engine.start()
    report = wait_for(
        sidecar, lambda report: report["engine"]["state"] == "ready" and report["engine"]["restarts"] == 1
    )
    assert (report["ranks"][0]["pid"] != pid, held(report)["entries"]) == (True, 0)
    assert sidecar.call("GET", "/memory/budget")["explanation"]["encoder"]["cache_size"] == LARGEST


def held(report: dict[str, Any]) -> dict[str, Any]:
    return dict(report["ranks"][0]["encoder_cache"] or {"entries": None})


def done(sidecar: DemoSidecar, remedy: str) -> dict[str, Any]:
    (result,) = sidecar.call("POST", "/memory/reclaim", {"remedies": [remedy]})["results"]
    return dict(result)
