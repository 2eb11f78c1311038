"""The extension in the real thing: torch's own tensors, vLLM's own classes, a live engine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

import highwater_worker
from highwater.process.worker_package import SHIM_FOLDER
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, link_extension
from highwater.terminal.demo.traffic import image_url, send_images
from tests.engines import worker_pids

from .conftest import ask_all

# To import vLLM takes ten seconds: those that need it are asked together.
ASKED_TOGETHER = ("v2_cache", "collisions", "injection", "packed_weights", "spill_under_v1", "spill_under_v2")
PROBE = Path(__file__).with_name("worker_ext_probe.py")
LIBRARIES = Path("/usr/lib")
MIB = 1 << 20


@pytest.fixture(scope="module")
def probe(
    engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """`probe("question")` asks worker_ext_probe.py in the engine's Python."""
    python_path = f"{SHIM_FOLDER}{os.pathsep}{link_extension(tmp_path_factory.mktemp('extension'))}"

    @cache
    def ask(question: str, **environ: str) -> dict[str, Any]:
        if question in ASKED_TOGETHER:
            return together()[question]
        return ask_all_of(question, **environ)[question]

    @cache
    def together() -> dict[str, dict[str, Any]]:
        return ask_all_of(*ASKED_TOGETHER)

    def ask_all_of(*questions: str, **environ: str) -> dict[str, dict[str, Any]]:
        done = subprocess.run(
            [engine_environment.python, str(PROBE), *questions],
            env=os.environ | {"PYTHONPATH": python_path, "VLLM_LOGGING_LEVEL": "ERROR"} | environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return dict(zip(questions, answers, strict=True))

    return ask


def ask(engine: DemoEngine, op: str, payload: str = "{}") -> dict[str, Any]:
    answer = ask_all(engine, op, payload)[0]
    assert answer["ok"], answer
    return answer


def reset_encoder_cache(engine: DemoEngine) -> None:
    httpx.post(f"{engine.url}/reset_encoder_cache", timeout=60, trust_env=False).raise_for_status()


def test_runner_v2s_own_cache_is_read(probe):
    """The CPU engine runs V1; V2's class comes with it. An empty one is falsy, and still there."""
    answers = probe("v2_cache")
    assert answers["falsy"] is True
    assert (answers["empty"]["present"], answers["empty"]["entries_total"]) == (True, 0)
    filled = answers["filled"]
    assert (filled["entries_total"], filled["storages"], filled["device_bytes"]) == (2, 1, 320)
    assert {row["mm_hash"]: row["referenced"] for row in filled["entries"]} == {"a": False, "b": True}
    assert {(tuple(row["shape"]), row["dtype"], row["shared_with"]) for row in filled["entries"]} == {
        ((10, 4), "float32", 1)
    }


def test_no_worker_class_has_one_of_our_names(probe):
    """vLLM asserts it at start; an engine that cannot start is the worst that we could do."""
    found = probe("collisions")
    assert {"cpu_worker.CPUWorker", "gpu_worker.Worker", "worker_base.WorkerWrapperBase"} <= set(found)
    assert [names for names in found.values() if names] == []


def test_vllm_loads_a_class_of_two_extensions(probe):
    answer = probe("injection")
    assert answer["bases"][-1] == "Both"
    assert (answer["other"], answer["budget"]) == ("other", True)


def test_a_thousand_entries_cost_milliseconds(probe, capsys):
    """Every call stops the engine. Counted in loops of 100,000 additions, which a busy machine slows as much."""
    answer = probe("many_entries")
    with capsys.disabled():
        print("\nworker_ext with 1,000 encoder entries:", json.dumps(answer["timings"]))  # noqa: T201 - a figure to see
    assert answer["timings"]["memory"]["loops"] < 6
    assert answer["timings"]["encoder_cache_100"]["loops"] < 6
    assert answer["timings"]["budget"]["loops"] < 0.5


def test_real_tensors_are_counted_by_storage(probe):
    answer = probe("many_entries")
    memory, listing = answer["memory"], answer["listing"]
    assert memory["notes"] == []
    assert memory["encoder_cache"]["entries"] == 1000
    assert memory["encoder_cache"]["device_bytes"] == 500 * 512 * 64 * 2
    assert memory["kv_cache_bytes"] == memory["kv_cache_reserved_bytes"] == 64 * MIB
    assert memory["weights_bytes"] == answer["expected_weights"]
    assert (listing["entries_total"], listing["storages"], listing["entries"][0]["shared_with"]) == (1000, 500, 1)


def test_reserved_pages_that_nobody_wrote_are_not_resident(probe):
    answer = probe("residency")
    size = answer["size"]
    assert answer["untouched"] < size / 50
    assert abs(answer["half"] - size / 2) < size / 50
    assert answer["zeroed"] == answer["reserved"] == size
    assert answer["rss"] > size


def test_weights_that_the_cpu_backend_packed_are_counted(probe):
    """It drops the parameters: counting those alone would miss nearly all."""
    answer = probe("packed_weights")
    assert answer["parameters"] < answer["before"] / 10
    assert answer["after"] == pytest.approx(answer["before"], rel=0.2)


def test_spilled_tensors_come_back_bit_for_bit(probe):
    """bfloat16, views of a batch, transposed, gapped, NaN: by every way that a dict is read or copied."""
    answer = probe("spill_and_access")
    assert answer["spilled"] == ["first", "second", "transposed", "gapped", "half", "odd"]
    assert answer["gone"] == [True] * 6, "storages that were let go are still there"
    assert all(answer["same"].values()), answer["same"]
    assert all(answer["again"].values()), answer["again"]
    assert all(answer["dense_strides"])
    assert answer["trimmed"]["encoder_cache"]["device_bytes"] == 0
    # The gapped view's storage was larger than its elements, and so is what the device got back.
    assert answer["trimmed"]["spilled_bytes"] - answer["trimmed"]["host_bytes_added"] == (32 * 16 - 16 * 4) * 4
    assert (answer["left"], answer["memory"]["host_bytes"]) == ([], 0)
    assert answer["memory"]["spills"] == answer["memory"]["restores"] == 9 * 6


def test_a_device_that_is_full_costs_no_entry(probe):
    """torch's own error: once, and the access succeeds; twice, and the entry stays where it is."""
    answer = probe("restore_failures")
    assert (answer["once"], answer["twice"]) == (64, "out of memory")
    assert answer["still"] == ["second", "transposed", "gapped", "half", "odd"]
    assert (answer["restored"]["restored_entries"], answer["restored"]["left_entries"]) == (0, 5)
    assert [note["name"] for note in answer["restored"]["notes"]] == ["left_entries"]
    assert answer["popped"] == ["cpu", [3, 5, 7]]
    assert (answer["left"], answer["rest"]) == (["second", "transposed", "gapped"], 0)


def test_runner_v1s_own_methods_use_a_cache_that_spills(probe):
    answer = probe("spill_under_v1")
    assert (answer["trimmed"]["kind"], answer["trimmed"]["spilled_entries"]) == ("dict", 6)
    assert answer["read"] == {"second": True, "gapped": True}
    assert answer["missing"] is None
    assert answer["keys"] == ["transposed", "gapped", "half"]
    assert (answer["after"]["spills"], answer["after"]["restores"]) == (6, 2)
    assert (answer["kind"], answer["reset"]["entries"]) == (True, 0)


def test_runner_v2s_own_methods_use_a_cache_that_spills(probe):
    answer = probe("spill_under_v2")
    assert (answer["needed"]["spilled_entries"], answer["needed"]["kept"]["needed_entries"]) == (0, 2)
    assert (answer["trimmed"]["kind"], answer["trimmed"]["spilled_entries"]) == ("encoder_outputs", 2)
    assert (answer["gone"], answer["to_encode"], answer["gathered"]) == (True, ["c"], [True, True])
    assert (answer["before"]["host_bytes"], answer["freed"]["host_bytes"]) == (160, 80)
    assert answer["freed"]["restores"] == answer["before"]["restores"] == 2
    assert (answer["length"], answer["reset"]) == (1, 0)


def test_a_trim_that_finds_nothing_costs_milliseconds(probe, capsys):
    answer = probe("spill_costs")
    with capsys.disabled():
        print("\nspilling:", json.dumps(answer))  # noqa: T201 - a figure to see
    # Of a core that others use too: 27 were measured beside three busy programs.
    assert all(found["cpu_median_ms"] < 80 for found in answer["trims"].values())
    assert answer["access_us"]["ours"] < 5


@pytest.mark.parametrize(
    ("pattern", "mechanism"),
    [("", "malloc_trim"), ("libtcmalloc*.so.*", "tcmalloc"), ("libjemalloc.so.*", "jemalloc")],
)
def test_free_heap_goes_back_to_the_kernel(probe, pattern, mechanism):
    """Whichever allocator keeps it: most of 180 MB come back."""
    found = sorted(path for path in LIBRARIES.rglob(pattern) if "debug" not in path.name) if pattern else []
    if pattern and not found:
        pytest.skip(f"no {pattern} under {LIBRARIES}")
    answer = probe("give_back", **({"LD_PRELOAD": str(found[0])} if found else {}))
    assert answer["mechanism"] == mechanism
    # jemalloc gives most of it back by itself, before it is asked.
    assert mechanism == "jemalloc" or answer["freed_bytes"] > 100 * MIB


def test_a_live_engine_introduces_itself(engine: DemoEngine):
    memory, budget = ask(engine, "memory"), ask(engine, "budget")["engine_budget"]
    assert memory["device"]["type"] == "cpu"
    assert budget["vllm_version"].startswith(engine.environment.version)
    assert (memory["rank"], memory["dp_rank"], memory["tp_rank"], memory["pp_rank"]) == (0, 0, 0, 0)


def test_a_live_engines_parts_fit_into_its_process(engine: DemoEngine):
    memory = ask(engine, "memory")
    assert memory["notes"] == []
    assert memory["pid"] in worker_pids(engine)
    assert memory["used_bytes"] == memory["host_memory"]["rss_bytes"]
    parts = (memory["weights_bytes"], memory["kv_cache_bytes"], memory["encoder_cache"]["device_bytes"])
    assert min(parts[:2]) > 10 * MIB
    assert sum(parts) < memory["used_bytes"] < memory["total_bytes"]


async def test_images_fill_the_cache_and_a_reset_with_release_gives_it_back(engine: DemoEngine):
    reset_encoder_cache(engine)
    ask(engine, "release")
    empty = ask(engine, "memory")
    assert empty["encoder_cache"]["entries"] == 0
    result = await send_images(engine.url, engine.served_model, images=range(40))
    assert result.failed == 0, result.errors
    full = ask(engine, "memory")
    listing = ask(engine, "encoder_cache", '{"limit": 1000, "sort": "age"}')
    assert full["encoder_cache"]["entries"] == listing["entries_total"] == len(listing["entries"]) == 40
    # Some outputs are slices of one batch: together they are as large as their storages.
    assert sum(row["bytes"] for row in listing["entries"]) == listing["device_bytes"]
    assert listing["storages"] == len(listing["entries"]) or any(row["shared_with"] for row in listing["entries"])
    assert not any(row["referenced"] for row in listing["entries"])
    assert full["used_bytes"] - empty["used_bytes"] > listing["device_bytes"] / 2
    reset_encoder_cache(engine)
    release = ask(engine, "release")
    after = ask(engine, "memory")
    assert after["encoder_cache"]["device_bytes"] == 0
    assert release["freed_bytes"] > 0
    assert after["used_bytes"] < full["used_bytes"] - listing["device_bytes"] / 2


def describe_image(engine: DemoEngine, seed: int) -> str:
    """Return what the engine says of one image, with nothing left to chance, by tokens that it names one by one."""
    content = [{"type": "image_url", "image_url": {"url": image_url(seed)}}, {"type": "text", "text": "What is this?"}]
    body = {
        "model": engine.served_model, "max_tokens": 8, "temperature": 0, "logprobs": True,
        "messages": [{"role": "user", "content": content}],
    }  # fmt: skip
    response = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    choice = response.raise_for_status().json()["choices"][0]
    return json.dumps([entry["token"] for entry in choice["logprobs"]["content"]])


def test_a_live_engine_answers_the_same_from_entries_that_were_spilled(engine: DemoEngine):
    seeds = range(9_000_000, 9_000_004)  # nobody else's: what the prefix cache knows is not encoded again
    reset_encoder_cache(engine)
    first = [describe_image(engine, seed) for seed in seeds]
    trim = ask(engine, "trim")
    assert (trim["kind"], trim["spilled_entries"]) == ("dict", 4)
    assert (trim["encoder_cache"]["entries"], trim["encoder_cache"]["device_bytes"]) == (4, 0)
    # Without this the prompts would come from the prefix cache, and nobody would look at the images.
    httpx.post(f"{engine.url}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()
    assert [describe_image(engine, seed) for seed in seeds] == first
    after = ask(engine, "memory")["encoder_cache"]
    assert (after["entries"], after["host_bytes"]) == (4, 0)
    assert after["restores"] - trim["encoder_cache"]["restores"] == 4
    ask(engine, "trim", '{"free_bytes": 1}')
    back = ask(engine, "restore")
    assert (back["restored_entries"], back["left_entries"]) == (1, 0)
    ask(engine, "trim")
    reset_encoder_cache(engine)
    assert ask(engine, "memory")["encoder_cache"]["host_bytes"] == 0


def test_the_probe_sees_this_trees_extension():
    assert Path(highwater_worker.__file__).parent == Path(__file__).parents[2] / "worker_ext" / "highwater_worker"
