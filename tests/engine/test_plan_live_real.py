"""The running engine planned with other flags: as it runs, its own number of blocks; else what it would have."""

from __future__ import annotations

import re
import urllib.request

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar

PATH = "/memory/plan"


def test_as_it_runs_the_plan_has_the_engines_own_blocks(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as answer:
        shown = re.search(r'cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', answer.read().decode())
    assert shown is not None
    plan = sidecar.call("POST", PATH, {})
    assert plan["kv_cache"]["blocks"] == int(shown[1])
    assert set(plan["kv_cache"]["grades"].values()) <= {"engine", "exact"}


def test_half_the_bytes_are_half_the_blocks(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    now = sidecar.call("POST", PATH, {})["kv_cache"]
    half = sidecar.call("POST", PATH, {"kv_cache_memory_bytes": now["available_bytes"] // 2})["kv_cache"]
    assert half["blocks"] == now["blocks"] // 2
    assert half["grades"]["blocks"] == "exact"


def test_a_wish_is_answered_by_the_images_that_it_takes(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    """Two conversations of 1k with an image of 1,024 tokens each."""
    answer = sidecar.call("POST", PATH, {"wish": "2 x 1k + 1 image of 1024 tokens"})
    assert answer["wish"]["fits"]
    assert answer["wish"]["chosen"]["flags"] == {
        "max_model_len": 2_048,
        "max_num_seqs": 2,
        "limit_mm_per_prompt": {"image": 1},
    }
    assert answer["encoder"]["cache_embeddings"] >= 1_024
