"""What a real engine's explanation is held to, on every version: its own log lines and metrics, and exact sums."""

from __future__ import annotations

import re
from typing import Any

import httpx

from highwater.terminal.demo.engine import DemoEngine
from tests.patience import LIMIT_SECONDS


def logged(engine: DemoEngine, pattern: str) -> str:
    """Return the last number that the engine's log has so, without its separators."""
    found = re.findall(pattern, engine.log_path.read_text())
    assert found, f"the engine's log has no {pattern!r}"
    return str(found[-1]).replace(",", "")


def blocks_by_metrics(engine: DemoEngine) -> int:
    page = httpx.get(f"{engine.url}/metrics", trust_env=False, timeout=LIMIT_SECONDS).text
    (blocks,) = set(re.findall(r'vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', page))
    return int(blocks)


def assert_pool_is_the_engines(engine: DemoEngine, answer: dict[str, Any], version: str) -> None:
    """Blocks, tokens and concurrency as the log prints them; the arithmetic of this version has no other."""
    (pool,) = answer["explanation"]["pools"]
    assert (pool["problem"], pool["differences"]) == (None, [])
    assert pool["tokens"] == int(logged(engine, r"KV cache size: ([\d,]+) tokens"))
    printed = logged(engine, r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
    assert f"{pool['max_concurrency']:.2f}" == printed
    assert pool["blocks"] == pool["planned_blocks"] == blocks_by_metrics(engine)
    assert answer["explanation"]["vllm_version"].startswith(version)


def assert_sums_are_exact(answer: dict[str, Any]) -> None:
    """To what was requested, or where the KV cache's size was given to the whole."""
    (rank,) = answer["explanation"]["ranks"]
    whole = rank["total_bytes"] if rank["requested_bytes"] is None else rank["requested_bytes"]
    by_key = {part["key"]: part["bytes"] for part in rank["parts"]}
    assert sum(by_key.values()) == whole
    assert by_key["kv_cache"] + by_key["null_block"] == rank["pool_bytes"]
    assert by_key["kv_cache"] + by_key["null_block"] + by_key["rounding"] == rank["available_bytes"]
    assert "unexplained" not in by_key
    assert rank["available_bytes"] > 0
