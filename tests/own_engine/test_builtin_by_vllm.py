"""The built-in beside vLLM's own answer on meta, for every architecture that it plans: no difference at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from highwater.demo.environment import DEFAULT_VERSION
from highwater_worker.plan.cards import CARDS
from kvplan.builtin.start import Start, read_start
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags, command_line, given_flags
from kvplan.generations import generation_of
from kvplan.pool import plan_pool
from tests.support.asked_starts import Asked, asked, completed, model_folder
from tests.support.builtin_models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.long("plan"), pytest.mark.timeout(1800, func_only=True)]
GIB = 1 << 30
# By card: its step sizes and the kernels of its compute capability decide.
SMALL, LARGE = 3 * GIB // 10, 6 * GIB
FLAGS: Mapping[str, dict[str, Any]] = {
    "nothing given": {},
    "a short length": {"max_model_len": 1000},
    "two ranks, 8-bit cache": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"},
    "two stages, long steps": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16384, "max_num_seqs": 100},
    "no prefix caching": {"enable_prefix_caching": False, "max_model_len": 4096},
    "one kind of layers": {"disable_hybrid_kv_cache_manager": True, "async_scheduling": False},
    "8 ranks": {"tensor_parallel_size": 8, "max_num_seqs": 7},
    "large blocks": {"block_size": 64, "num_gpu_blocks_override": 4000, "dtype": "float16"},
    "float32": {"dtype": "float32", "max_num_batched_tokens": 1024, "max_num_seqs": 300},
}


def compared(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what vLLM says, by the names of `planned`; a refusal is its stage."""
    if answer["status"] not in ("fits", "does_not_fit"):
        return {"refused": answer["status"]}
    pool, config = answer["kv_cache"], answer["config"]
    return {
        "fits": pool["fits"],
        **{key: pool.get(key) for key in ("blocks", "tokens", "block_size", "needed_bytes", "max_model_len_that_fits")},
        "max_concurrency": pool.get("max_concurrency") and round(pool["max_concurrency"], 6),
        **{key: config["scheduler"][key] for key in ("max_num_batched_tokens", "max_num_seqs")},
        "enable_prefix_caching": config["cache"]["enable_prefix_caching"],
    }


def planned(start: Start, available: int, version: str) -> dict[str, Any]:
    workers = [available] * len(start.workers)
    pool = plan_pool(start.workers, workers, start.limits, generation_of(version))
    return {
        "fits": pool.fits,
        "blocks": pool.blocks if pool.fits else None,
        "tokens": pool.tokens,
        "needed_bytes": pool.needed_bytes,
        "max_model_len_that_fits": pool.max_model_len_that_fits,
        "max_concurrency": pool.max_concurrency and round(pool.max_concurrency, 6),
        "max_num_batched_tokens": start.flags.max_num_batched_tokens,
        "max_num_seqs": start.flags.max_num_seqs,
        "block_size": start.flags.block_size if pool.fits else None,
        "enable_prefix_caching": start.flags.enable_prefix_caching,
    }


def differences(vllm: Asked, card: str, root: Path, name: str, version: str = DEFAULT_VERSION) -> list[str]:
    """Return a line for each flag and size where the built-in's plan is not vLLM's; what it refuses is no plan."""
    found, plans = [], 0
    traits, config = CARDS[card], completed(MODELS[name])
    more = {
        "device_bytes": traits.total_bytes,
        "device_name": traits.name,
        "compute_capability": ".".join(map(str, traits.capability)),
    }
    folder = model_folder(root, name, config)
    for what, given in FLAGS.items():
        flags = EngineFlags(**given)
        for available in (SMALL, LARGE):
            try:
                ours = planned(read_start(config, EngineFlags(**given, **more)), available, version)
            except PlanError:
                continue
            plans += 1
            answer = vllm.ask(command_line(given_flags(flags), str(folder)), kv_cache_bytes=available)
            theirs = compared(answer)
            if ours != theirs:
                unequal = {
                    key: (ours.get(key), theirs.get(key)) for key in ours | theirs if ours.get(key) != theirs.get(key)
                }
                said = answer.get("error") or (answer.get("refusal") or {}).get("message") or ""
                found.append(f"{what}, {available}: {unequal} {str(said)[:300]}")
    assert plans >= len(FLAGS), f"too few of {name} are planned"
    return found


@pytest.fixture(scope="module", params=["H100", "B200", "A100", "L4"])
def card(request: pytest.FixtureRequest) -> Iterator[tuple[str, Asked]]:
    with asked(DEFAULT_VERSION, "--card", request.param) as process:
        yield request.param, process


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_vllms(card: tuple[str, Asked], tmp_path: Path, name: str) -> None:
    """Blocks, tokens, concurrency, needed bytes, longest length, and the defaults of a step and of prefix caching."""
    assert differences(card[1], card[0], tmp_path, name) == []
