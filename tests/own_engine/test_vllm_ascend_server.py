"""A vLLM server with the real vllm-ascend over a simulated NPU, and a sidecar: the story of `make demo-ascend`.

The API server and its EngineCore are processes of their own, which share the device; tests/fakes/cann has it.
"""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.npu_story import (
    FIRST_IMAGES,
    KV_CACHE_BYTES,
    MORE_IMAGES,
    SIDES,
    TOTAL_BYTES,
    Scene,
    Told,
    engine_options,
    results,
    table,
    tell,
)
from highwater.terminal.demo.engine import EngineEnvironment
from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.story import stage
from highwater.terminal.demo.traffic import REQUEST_SECONDS, image_url
from tests.engine.conftest import ask_all, wait_for
from tests.fakes.cann.ascend import VLLM
from tests.fakes.cann.npu import NEEDS_COMPILER, build
from tests.fakes.cann.state import set_state
from tests.tested import Ran, confirm

pytestmark = NEEDS_COMPILER
LOST = "the NPU was lost (507010)"
CLIENTS, IMAGES_EACH = 24, 2


@pytest.fixture(scope="module")
def story(
    tmp_path_factory: pytest.TempPathFactory, engine_environment: EngineEnvironment
) -> tuple[Told, dict[str, Any]]:
    """The story, and what the second engine answered after it: to operations by hand, and without its device."""
    folder: Path = tmp_path_factory.mktemp("npu")
    after: dict[str, Any] = {}

    def afterwards(scene: Scene) -> None:
        after["flood"], after["door"] = flood(scene), scene.sidecar.call("GET", "/memory")["door"]
        after["after_flood"] = scene.engine.is_running()
        by_hand(scene, after)
        lose_the_device(scene, folder / "cann" / "state", after)

    return tell(engine_environment, folder, print, afterwards=afterwards), after


def flood(scene: Scene) -> Counter[int]:
    """Send images all at once, that no cache has; return what clients got."""

    def client(number: int) -> list[int]:
        statuses = []
        for image in range(IMAGES_EACH):
            side, seed = SIDES[(number + image) % len(SIDES)], 1000 + number * IMAGES_EACH + image
            shown = {"type": "image_url", "image_url": {"url": image_url(seed, width=side, height=side)}}
            asked = {"model": scene.engine.served_model, "max_tokens": 1}
            body = asked | {"messages": [{"role": "user", "content": [shown]}]}
            url = f"{scene.sidecar.url}/v1/chat/completions"
            statuses.append(httpx.post(url, json=body, timeout=REQUEST_SECONDS, trust_env=False).status_code)
        return statuses

    with ThreadPoolExecutor(CLIENTS) as clients:
        return Counter(status for found in clients.map(client, range(CLIENTS)) for status in found)


def by_hand(scene: Scene, after: dict[str, Any]) -> None:
    sidecar = scene.sidecar
    after["engine"] = sidecar.call("GET", "/memory")["engine"]
    (after["of_rank"],), (after["of_start"],) = ask_all(scene.engine, "memory"), ask_all(scene.engine, "budget")
    (after["budget"],) = sidecar.call("GET", "/memory/budget")["explanation"]["ranks"]
    scene.ask(1)
    sidecar.call("POST", "/memory/reclaim", {"remedies": ["trim_encoder_cache"]})
    after["trimmed"] = scene.rank()
    scene.ask(1)
    before = after["trimmed"]["encoder_cache"]["restores"]
    wait_for(sidecar, lambda report: report["ranks"][0]["encoder_cache"]["restores"] > before)
    after["again"] = scene.rank()
    sidecar.call("POST", "/reset_encoder_cache?mode=safe")
    wait_for(sidecar, lambda report: report["ranks"][0]["encoder_cache"]["entries"] == 0)
    after["emptied"] = scene.rank()
    (after["release"],) = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"]})["results"]


def lose_the_device(scene: Scene, state: Path, after: dict[str, Any]) -> None:
    """Nothing calls an idle engine's device: a release does, and then an image."""
    sidecar = scene.sidecar
    set_state(state, is_lost=1)
    (after["lost_release"],) = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"]})["results"]
    lost = wait_for(sidecar, lambda report: report["ranks"][0]["used_bytes"] is None and noted(report))
    after["lost"], after["lost_check"] = lost["ranks"][0], sidecar.command("check")
    assert scene.ask(2)
    after["lost_incident"] = wait_for_incident(scene)
    after["dead_check"] = sidecar.command("check")


def noted(report: dict[str, Any]) -> bool:
    return any("lost" in note["reason"] for note in report["ranks"][0]["notes"])


def held(rank: dict[str, Any]) -> int:
    return int(rank["components"]["encoder_cache_bytes"])


def test_without_the_policy_the_device_is_full_and_the_engine_dies(story: tuple[Told, dict[str, Any]]) -> None:
    told, _ = story
    assert told.failed_image > FIRST_IMAGES
    assert told.answer
    assert told.message.startswith("torch.OutOfMemoryError: NPU out of memory. Tried to allocate")
    assert "PyTorch found no room on the NPU" in told.incident


def test_with_the_policy_the_same_images_and_more_are_served(story: tuple[Told, dict[str, Any]]) -> None:
    told, _ = story
    assert told.images == told.failed_image + MORE_IMAGES
    assert told.reliefs
    before, relieved = list(told.stages.values())[-3:-1]
    assert relieved["free_bytes"] > before["free_bytes"]
    assert held(relieved) < held(before)


def test_with_the_door_a_flood_of_images_leaves_the_engine_alive(story: tuple[Told, dict[str, Any]]) -> None:
    """This start did not profile its encoder: nothing sets memory aside for several images at once."""
    _, after = story
    door = after["door"]
    assert (door["mode"], door["uses_engines_rule"], door["token_side_pixels"]) == ("on", True, 32)
    assert "did not count its encoder" in door["why"]
    assert door["bytes_per_token"] > 0
    assert after["after_flood"]
    assert set(after["flood"]) <= {200, 503}
    assert after["flood"][200] >= 1


def test_without_the_door_the_same_flood_ends_the_engine(engine_environment: EngineEnvironment, tmp_path: Path) -> None:
    options = engine_options(engine_environment, tmp_path, print)
    with stage(engine_environment, options, None, say=print, settings={"HIGHWATER_DOOR__MODE": "off"}) as (
        engine,
        sidecar,
    ):
        scene = Scene(engine, sidecar, sidecar.url, print)
        assert set(flood(scene)) - {200, 503}
        incident = wait_for_incident(scene)
    assert "PyTorch found no room on the NPU" in incident


def wait_for_incident(scene: Scene) -> str:
    wait_for(scene.sidecar, lambda _: bool(scene.sidecar.call("GET", "/memory/incidents")["incidents"]))
    return str(scene.sidecar.call("GET", "/memory/incidents")["incidents"][0]["summary"])


def test_all_components_sum_to_the_devices_use(story: tuple[Told, dict[str, Any]]) -> None:
    told, after = story
    ranks = [*told.stages.values(), *(after[name] for name in ("trimmed", "again", "emptied"))]
    assert len(ranks) == 10
    for rank in ranks:
        assert sum(rank["components"].values()) == rank["used_bytes"] == TOTAL_BYTES - rank["free_bytes"]
    for rank in ranks[1:]:
        assert min(rank["components"][f"{name}_bytes"] for name in ("weights", "kv_cache", "torch_cached")) > 0


def test_each_row_is_a_reading_of_its_own(story: tuple[Told, dict[str, Any]]) -> None:
    """Taken after what its title names: the one before would pass for it where nothing else is looked at."""
    told, _ = story
    _, *ranks = told.stages.values()  # the first is the start's own measure
    times = [rank["taken_at"] for rank in ranks]
    assert times == sorted(set(times))


def test_the_processors_cache_is_not_what_fills_the_device(story: tuple[Told, dict[str, Any]]) -> None:
    told, _ = story
    _, up, images, reset = list(told.stages.values())[:4]
    assert (held(up), up["components"]["kv_cache_bytes"]) == (0, KV_CACHE_BYTES)
    assert held(images) > 0
    assert reset["taken_at"] > images["taken_at"]
    assert (held(reset), reset["used_bytes"]) == (held(images), images["used_bytes"])


def test_the_table_is_made_of_the_stages(story: tuple[Told, dict[str, Any]]) -> None:
    told, _ = story
    found = json.loads(json.dumps(results(told)))
    assert found["heading"].startswith("simulated device")
    assert all(moment in table(found) for moment in told.stages)


def test_the_worker_is_watched_through_its_recorder(story: tuple[Told, dict[str, Any]]) -> None:
    told, after = story
    up = told.stages["server up"]
    assert after["engine"]["version"] == VLLM
    ascend = after["of_start"]["engine_budget"]["ascend_version"]
    confirm(Ran.of_worker(after["of_rank"], after["of_start"], __file__, is_simulated=True, ascend_version=ascend))
    assert (up["source"], up["device"]["type"]) == ("recorder", "npu")
    assert [phase["name"] for phase in up["start"]][-1] == "warm_up"


def test_the_budget_names_every_byte(story: tuple[Told, dict[str, Any]]) -> None:
    _, after = story
    parts = {part["key"]: part["bytes"] for part in after["budget"]["parts"]}
    assert sum(parts.values()) == TOTAL_BYTES
    assert "unexplained" not in parts


def test_what_was_trimmed_by_hand_comes_back_with_its_image(story: tuple[Told, dict[str, Any]]) -> None:
    _, after = story
    trimmed, again = after["trimmed"], after["again"]
    assert trimmed["encoder_cache"]["host_bytes"] > 0
    assert again["encoder_cache"]["restores"] > trimmed["encoder_cache"]["restores"]


def test_a_release_is_done(story: tuple[Told, dict[str, Any]]) -> None:
    _, after = story
    assert after["release"]["outcome"] == "done"


def test_of_a_lost_device_no_memory_is_told(story: tuple[Told, dict[str, Any]]) -> None:
    _, after = story
    assert (after["lost_release"]["outcome"], after["lost"]["releasable_bytes"]) == ("failed", None)
    assert "the NPU was lost (507010)" in after["lost_check"]


def test_a_death_by_a_lost_device_is_no_shortage(story: tuple[Told, dict[str, Any]]) -> None:
    _, after = story
    assert after["lost_incident"].startswith(f"The engine died: the log says that {LOST}")
    assert LOST in after["dead_check"]


def test_a_compiler_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DemoError, match="there is no C compiler"):
        build(tmp_path / "cann")
