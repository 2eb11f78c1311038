"""The built-in beside vLLM's own answer on meta, for every architecture that it plans: no difference at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from highwater.explain.command_line import Line
from highwater.terminal.demo.engine import DEFAULT_VERSION
from highwater_worker.plan.cards import CARDS
from kvplan import EngineFlags, PlanError
from kvplan.builtin import Start, read_start
from kvplan.generations import generation_of
from kvplan.pool import plan_pool
from tests.support.asked_starts import Asked, asked, completed, given_flags, model_folder
from tests.support.builtin_models import MODELS

pytestmark = pytest.mark.timeout(1800, func_only=True)
GIB = 1 << 30
# Bytes for the KV cache: some models are refused with the first, none with the second.
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
# What a card decides: its step sizes, and the kernels of its compute capability.
BY_CARD = ("nothing given", "two ranks, 8-bit cache", "large blocks")
SMALL_TOO = ("nothing given", "no prefix caching")

# Of mixtures and of wrappers the peak on meta was now and then one that no card has, hundreds of GiB.
PEAKS = ("llama", "granite", "gemma2", "qwen2", "qwen3")
# Kernels with rules of their own, which the built-in refuses.
NOT_PLANNED = {("B200", "gemma3"), *product(("B200", "A100", "L4"), ("deepseek-v32", "glm-dsa"))}


def given(name: str, what: str, card: str) -> EngineFlags:
    traits, text = CARDS[card], what.startswith("text")
    limits = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if text and "vision_config" in MODELS[name] else {}
    return EngineFlags(
        device_bytes=traits.total_bytes,
        device_name=traits.name,
        compute_capability=".".join(map(str, traits.capability)),
        **{**FLAGS.get(what, {}), **limits},
    )


def compared(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what vLLM says, by the names of `planned`."""
    if answer["status"] not in ("fits", "does_not_fit"):
        said = answer.get("error") or (answer.get("refusal") or {}).get("message")
        return {answer["status"]: str(said)[:300]}
    pool, config = answer["kv_cache"], answer["config"]
    keys = ("fits", "blocks", "tokens", "block_size", "needed_bytes", "max_model_len_that_fits")
    return {
        **{key: pool.get(key) for key in keys},
        "max_concurrency": pool.get("max_concurrency") and round(pool["max_concurrency"], 6),
        **{key: config["scheduler"][key] for key in ("max_num_batched_tokens", "max_num_seqs")},
        "enable_prefix_caching": config["cache"]["enable_prefix_caching"],
    }


def planned(start: Start, available: int) -> dict[str, Any]:
    pool = plan_pool(start.workers, [available] * len(start.workers), start.limits, generation_of(DEFAULT_VERSION))
    return {
        "fits": pool.fits,
        "blocks": pool.blocks if pool.fits else None,
        "tokens": pool.tokens,
        "block_size": start.flags.block_size if pool.fits else None,
        "needed_bytes": pool.needed_bytes,
        "max_model_len_that_fits": pool.max_model_len_that_fits,
        "max_concurrency": pool.max_concurrency and round(pool.max_concurrency, 6),
        "max_num_batched_tokens": start.flags.max_num_batched_tokens,
        "max_num_seqs": start.flags.max_num_seqs,
        "enable_prefix_caching": start.flags.enable_prefix_caching,
    }


def some_flags(name: str) -> tuple[str, ...]:
    """Return what a card decides, and each third of the others, others for the next model."""
    others = [what for what in FLAGS if what not in BY_CARD]
    return (*BY_CARD, *others[list(MODELS).index(name) % 3 :: 3])


def differences(vllm: Asked, card: str, root: Path, name: str, whats: Iterable[str]) -> list[str]:
    """Return a line for each flag and size where the built-in's plan is not vLLM's; what it refuses is no plan."""
    found, plans = [], 0
    config = completed(MODELS[name])
    folder = str(model_folder(root, name, config))
    for what in whats:
        flags = given(name, what, card)
        for available in (SMALL, LARGE) if what in SMALL_TOO else (LARGE,):
            try:
                ours = planned(read_start(config, flags), available)
            except PlanError:
                continue
            plans += 1
            theirs = compared(vllm.ask(str(Line((folder,), {}).changed(given_flags(flags))), kv_cache_bytes=available))
            unequal = {key: (ours.get(key), theirs.get(key)) for key in ours | theirs}
            unequal = {key: (one, other) for key, (one, other) in unequal.items() if one != other}
            found += [f"{what}, {available}: {unequal}"] if unequal else []
    assert plans > 1 or (card, name) in NOT_PLANNED, f"too few of {name} are planned"
    return found


def beyond_bounds(vllm: Asked, card: str, root: Path, name: str) -> list[str]:
    """Return a line for weights or an activation peak that vLLM has on meta, and the built-in's bounds have not."""
    found = []
    config = completed(MODELS[name])
    folder = str(model_folder(root, name, config))
    for what, more in {"text": {}, "text, 4 ranks": {"tensor_parallel_size": 4}}.items():
        flags = replace(given(name, what, card), **more)
        start = read_start(config, flags)
        answer = vllm.ask(str(Line((folder,), {}).changed(given_flags(flags))))
        (weights, *_), peak = answer["ranks"][0]["weights"], answer["ranks"][0]["activation"]
        for part, figure, theirs in (
            ("weights", start.weights[0] if start.weights else None, weights),
            ("activation", start.activation, peak[0] if peak and name in PEAKS else None),
        ):
            if figure is not None and theirs is not None and not figure.low <= theirs <= figure.high:
                found.append(
                    f"{what}: {part} {theirs / GIB:.3f} is not in {figure.low / GIB:.3f} to {figure.high / GIB:.3f}"
                )
    return found


@pytest.fixture(
    scope="module",
    params=["H100", *(pytest.param(name, marks=pytest.mark.soak) for name in ("B200", "A100", "L4"))],
)
def card(request: pytest.FixtureRequest) -> Iterator[tuple[str, Asked]]:
    with asked(DEFAULT_VERSION, "--card", request.param) as process:
        yield request.param, process


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_vllms(card: tuple[str, Asked], tmp_path: Path, name: str) -> None:
    whats = some_flags(name) if card[0] == "H100" else BY_CARD
    assert differences(card[1], card[0], tmp_path, name, whats) == []


@pytest.mark.soak
@pytest.mark.parametrize("card", ["H100"], indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_with_any_flag_is_vllms(card: tuple[str, Asked], tmp_path: Path, name: str) -> None:
    assert differences(card[1], card[0], tmp_path, name, FLAGS) == []


@pytest.mark.parametrize("card", ["H100"], indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_weights_and_activation_on_meta_lie_within_the_bounds(
    card: tuple[str, Asked], tmp_path: Path, name: str
) -> None:
    assert beyond_bounds(card[1], card[0], tmp_path, name) == []
