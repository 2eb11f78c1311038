"""A vLLM server with the real vllm-ascend over a simulated NPU, and a sidecar before it: the story, in small.

The API server and its EngineCore are processes of their own, which share the device; tests/fakes/cann has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from highwater.demo.engine import DemoEngine, EngineOptions
from highwater.demo.process import free_port
from highwater.demo.sidecar import DemoSidecar
from highwater.demo.traffic import image_url
from tests.engine.conftest import wait_for
from tests.engines import BYTES_PER_NUMBER, ENCODER_WIDTH, image_tokens
from tests.fakes.cann.ascend import RINGS, VLLM, environ_of_vllm_ascend
from tests.fakes.cann.npu import NEEDS_COMPILER, SimulatedNpu
from tests.patience import LIMIT_SECONDS

if TYPE_CHECKING:
    from highwater.demo.environment import EngineEnvironment

pytestmark = [pytest.mark.long("device"), NEEDS_COMPILER]
TOTAL_BYTES = 2 << 30
SIDE = 256
ENTRY_BYTES = image_tokens(SIDE, SIDE) * ENCODER_WIDTH * BYTES_PER_NUMBER
FEW, MANY = 2, 6
RULE = {
    "name": "small",
    "signal": "encoder_cache_bytes",
    "high_water": 4 * ENTRY_BYTES,
    "low_water": 3 * ENTRY_BYTES,
    "min_gain_bytes": ENTRY_BYTES,
    "remedies": ["trim_encoder_cache"],
}
"""So low that a few images cross it."""
ARGUMENTS = (
    *("--max-model-len", "1024", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024", "--no-skip-mm-profiling"),
    *("--kv-cache-memory-bytes", "None", "--gpu-memory-utilization", "0.25", "--no-enable-prefix-caching"),
    *("--limit-mm-per-prompt", '{"image": 1, "video": 0}'),
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, engine_environment: EngineEnvironment) -> dict[str, Any]:
    """The rank in each stage of the story, and what operations answered."""
    folder: Path = tmp_path_factory.mktemp("server")
    npu = SimulatedNpu(folder / "cann", engine_environment, total_bytes=TOTAL_BYTES)
    environ = environ_of_vllm_ascend(npu, engine_environment, folder)
    options = EngineOptions(port=free_port(), extension=False, extra_args=ARGUMENTS, extra_env=tuple(environ.items()))
    settings = {"HIGHWATER_RECORDER_DIR": str(folder / RINGS), "HIGHWATER_POLICY__RULES": json.dumps([RULE])}
    with (
        DemoSidecar(f"http://127.0.0.1:{options.port}", folder=folder, settings=settings) as sidecar,
        DemoEngine(engine_environment, options, folder=folder),
    ):
        return story(sidecar)


def story(sidecar: DemoSidecar) -> dict[str, Any]:
    def rank_where(is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        report = wait_for(sidecar, lambda report: report["ranks_reported"] == 1 and is_so(report["ranks"][0]))
        return dict(report["ranks"][0])

    wait_for(sidecar, lambda report: report["engine"]["state"] == "ready")
    told: dict[str, Any] = {"up": rank_where(lambda _: True), "version": sidecar.call("GET", "/memory")["engine"]}
    told["budget"] = sidecar.call("GET", "/memory/budget")["explanation"]["ranks"]
    ask(sidecar, range(FEW))
    told["images"] = rank_where(lambda rank: held(rank) == FEW * ENTRY_BYTES)
    sidecar.call("POST", "/reset_mm_cache")
    told["after_reset_mm_cache"] = rank_where(lambda _: True)
    ask(sidecar, range(MANY))
    told["after_policy"] = rank_where(lambda rank: rank["encoder_cache"]["host_bytes"] > 0)
    told["policy"] = sidecar.call("GET", "/policy")
    ask(sidecar, range(MANY))
    told["again"] = rank_where(lambda rank: rank["encoder_cache"]["restores"] > 0)
    sidecar.call("POST", "/reset_encoder_cache?mode=safe")
    told["emptied"] = rank_where(lambda rank: rank["encoder_cache"]["entries"] == 0)
    (told["release"],) = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"]})["results"]
    return told


def ask(sidecar: DemoSidecar, images: range) -> None:
    for seed in images:
        content = [{"type": "image_url", "image_url": {"url": image_url(seed, width=SIDE, height=SIDE)}}]
        body = {"model": "tiny-qwen3-vl", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        url = f"{sidecar.url}/v1/chat/completions"
        httpx.post(url, json=body, timeout=LIMIT_SECONDS, trust_env=False).raise_for_status()


def held(rank: dict[str, Any]) -> int:
    return int(rank["components"]["encoder_cache_bytes"] or 0)


def test_the_worker_is_watched_through_its_recorder(told: dict[str, Any]) -> None:
    assert told["version"]["version"] == VLLM
    assert (told["up"]["source"], told["up"]["device"]["type"]) == ("recorder", "npu")
    assert [phase["name"] for phase in told["up"]["start"]][-1] == "warm_up"


@pytest.mark.parametrize("stage", ["up", "images", "after_reset_mm_cache", "after_policy", "again", "emptied"])
def test_all_components_sum_to_the_devices_use(told: dict[str, Any], stage: str) -> None:
    """The allocator's reserve too, which an engine on a CPU has none of."""
    rank = told[stage]
    components = rank["components"]
    assert None not in components.values()
    assert sum(components.values()) == rank["used_bytes"] == TOTAL_BYTES - rank["free_bytes"]
    assert min(components[f"{name}_bytes"] for name in ("weights", "kv_cache", "torch_cached")) > 0


def test_the_budget_is_exact(told: dict[str, Any]) -> None:
    (rank,) = told["budget"]
    parts = {part["key"]: part["bytes"] for part in rank["parts"]}
    assert sum(parts.values()) == rank["requested_bytes"]
    assert not parts.keys() & {"mm_ipc", "rescaled", "unexplained"}


def test_images_stay_on_the_device_when_the_processors_cache_is_reset(told: dict[str, Any]) -> None:
    """As in the story: that cache lies in host memory."""
    assert held(told["up"]) == 0
    assert held(told["images"]) == held(told["after_reset_mm_cache"]) == FEW * ENTRY_BYTES


def test_the_policy_trims_by_itself_and_the_images_come_back(told: dict[str, Any]) -> None:
    assert told["after_policy"]["encoder_cache"]["spills"] > 0
    assert told["again"]["encoder_cache"]["entries"] == MANY


def test_a_release_is_done(told: dict[str, Any]) -> None:
    """tests/own_engine/test_vllm_ascend.py holds it to the byte."""
    assert told["release"]["outcome"] == "done"
