"""The extension in the real thing: torch's own tensors, vLLM's own classes, a live engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import worker_ext
from app.demo.engine import SHIM_FOLDER, link_extension
from app.demo.traffic import send_images

from .conftest import ask_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.demo.engine import Engine
    from app.demo.environment import EngineEnvironment

PROBE = Path(__file__).with_name("worker_ext_probe.py")
LIBRARIES = Path("/usr/lib")
MIB = 1 << 20


@pytest.fixture(scope="module")
def probe(
    engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """`probe("question")` asks worker_ext_probe.py in the engine's Python."""
    python_path = f"{SHIM_FOLDER}{os.pathsep}{link_extension(tmp_path_factory.mktemp('extension'))}"

    def ask(question: str, **environ: str) -> dict[str, Any]:
        done = subprocess.run(
            [engine_environment.python, str(PROBE), question],
            env=os.environ | {"PYTHONPATH": python_path, "VLLM_LOGGING_LEVEL": "ERROR"} | environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def ask(engine: Engine, op: str, payload: str = "{}") -> dict[str, Any]:
    """Return rank 0's good answer."""
    answer = ask_all(engine, op, payload)[0]
    assert answer["ok"], answer
    return answer


def reset_encoder_cache(engine: Engine) -> None:
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
    """It takes one name; a class that inherits from both brings both."""
    answer = probe("injection")
    assert answer["bases"][-1] == "Both"
    assert (answer["other"], answer["hello"]) == ("other", True)


def test_a_thousand_entries_cost_milliseconds(probe, capsys):
    """Every call stops the engine. Judged by the thread's own time: the machine may be busy with other things."""
    answer = probe("many_entries")
    with capsys.disabled():
        print("\nworker_ext with 1,000 encoder entries:", json.dumps(answer["timings"]))  # noqa: T201 - a figure to see
    assert answer["timings"]["memory"]["cpu_median_ms"] < 15
    assert answer["timings"]["encoder_cache_100"]["cpu_median_ms"] < 25
    assert answer["timings"]["hello"]["cpu_median_ms"] < 2


def test_real_tensors_are_counted_by_storage(probe):
    """1,000 views of 500 batches; 64 layers; as many weights as the model says."""
    answer = probe("many_entries")
    memory, listing = answer["memory"], answer["listing"]
    assert memory["notes"] == []
    assert memory["encoder_cache"]["entries"] == 1000
    assert memory["encoder_cache"]["device_bytes"] == 500 * 512 * 64 * 2
    assert memory["kv_cache_bytes"] == memory["kv_cache_reserved_bytes"] == 64 * MIB
    assert memory["weights_bytes"] == answer["expected_weights"]
    assert (listing["entries_total"], listing["storages"], listing["entries"][0]["shared_with"]) == (1000, 500, 1)


def test_reserved_pages_that_nobody_wrote_are_not_resident(probe):
    """On CPU the parts must fit into the process's resident size."""
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


def test_a_live_engine_introduces_itself(engine: Engine):
    """What the sidecar decides by."""
    hello = ask(engine, "hello")
    assert hello["ops"] == ["encoder_cache", "hello", "memory", "release"]
    assert hello["device"]["type"] == "cpu"
    assert hello["worker_class"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert (hello["runner_version"], hello["encoder_cache_kind"]) == ("v1", "dict")
    assert hello["vllm_version"].startswith(engine.environment.version)
    assert (hello["rank"], hello["dp_rank"], hello["tp_rank"], hello["pp_rank"]) == (0, 0, 0, 0)


def test_a_live_engines_parts_fit_into_its_process(engine: Engine):
    """Weights, KV cache and encoder outputs are all in the worker's resident size."""
    memory = ask(engine, "memory")
    assert memory["notes"] == []
    assert memory["pid"] in engine.worker_pids()
    assert memory["used_bytes"] == memory["host_memory"]["rss_bytes"]
    parts = (memory["weights_bytes"], memory["kv_cache_bytes"], memory["encoder_cache"]["device_bytes"])
    assert min(parts[:2]) > 10 * MIB
    assert sum(parts) < memory["used_bytes"] < memory["total_bytes"]


async def test_images_fill_the_cache_and_a_reset_with_release_gives_it_back(engine: Engine):
    """The story of this project, seen from inside one worker."""
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


def test_the_probe_sees_this_trees_extension():
    """The engine imports it through a link, not from an installed copy."""
    assert Path(worker_ext.__file__).parent == Path(__file__).parents[2] / "worker_ext"
