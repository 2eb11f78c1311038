"""Real starts whose logs are public: every figure that was printed closes with the plan, within its own rounding.

The starts are those of `tests/support/printed_pools.py`, here with their models' layers as vLLM has them, whatever the
built-in makes of a config.json. A log prints GiB with two decimals, so that the bytes lie in a window of 0.01 GiB.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplan import Limits
from kvplan.generations import generation_of
from kvplan.pool import KvPool, plan_pool
from kvplan.specs import (
    AttentionLayer,
    ChunkedLocal,
    FullAttention,
    Layers,
    LayerSpec,
    MambaState,
    MlaAttention,
    SlidingWindow,
)
from tests.support.printed_pools import GIB, HALF_A_DIGIT, REFUSED, STARTS, Start


def full(kv_heads: int, head_size: int, **fields: Any) -> FullAttention:
    return FullAttention(
        **{"block_size": 16, "kv_heads": kv_heads, "head_size": head_size, "element_bytes": 2} | fields
    )


def sliding(kv_heads: int, head_size: int, window: int) -> SlidingWindow:
    return SlidingWindow(block_size=16, kv_heads=kv_heads, head_size=head_size, element_bytes=2, window=window)


# Of whole models in 16 bits: how many layers of each kind.
GEMMA_4 = ((25, sliding(8, 256, 1024)), (5, full(2, 512)))
MODELS: dict[str, tuple[tuple[int, LayerSpec], ...]] = {
    "llama-3.3-70b": ((80, full(8, 128)),),
    "qwen2.5-7b": ((28, full(4, 128)),),
    "gemma-2-2b": ((13, sliding(4, 256, 4096)), (13, full(4, 256))),
    "gemma-3-12b": ((40, sliding(8, 256, 1024)), (8, full(8, 256))),
    "gemma-3-27b": ((52, sliding(16, 128, 1024)), (10, full(16, 128))),
    "gemma-3-4b": ((29, sliding(4, 256, 1024)), (5, full(4, 256))),
    "granite-3.1-2b": ((40, full(8, 64)),),
    "llama-3.1-8b": ((32, full(8, 128)),),
    "llama-4-scout": (
        (36, ChunkedLocal(block_size=16, kv_heads=8, head_size=128, element_bytes=2, chunk=8192)),
        (12, full(8, 128)),
    ),
    "phi-2": ((32, full(32, 80)),),
    "gpt-oss-20b": ((12, sliding(8, 64, 128)), (12, full(8, 64))),
    "qwen1.5-moe-a2.7b": ((24, full(16, 128)),),
    "mistral-small-3.1-24b": ((40, full(8, 128)),),
    "qwen3-4b": ((36, full(8, 128)),),
    "qwen3-14b": ((40, full(8, 128)),),
    "qwen3.6-35b-a3b-nvfp4": (
        (10, full(2, 256, block_size=2096)),
        # The state itself was not printed: its page is padded to that of the attention layers.
        (30, MambaState(block_size=2096, shapes=((32, 128, 128),), element_bytes=(4,), page_bytes_padded=2096 * 1024)),
    ),
    "gemma-4-26b-a4b": GEMMA_4,
    "gemma-4-26b-a4b-eagle3": (*GEMMA_4, (1, full(16, 128))),
    "kimi-k2-eagle3": (
        (61, MlaAttention(block_size=32, kv_heads=1, head_size=576, element_bytes=2)),
        (1, full(64, 128, block_size=32)),
    ),
    "llama-2-7b": ((32, full(32, 128)),),
}


def layers_of(one: Start) -> Layers:
    specs = [spec for count, spec in MODELS[one.draft or one.config] for _ in range(count)]
    element = 1 if one.cache_dtype else 2
    return {
        f"layers.{place}": replace(spec, kv_heads=max(spec.kv_heads // one.tensor_parallel, 1), element_bytes=element)
        if isinstance(spec, AttentionLayer)
        else spec
        for place, spec in enumerate(specs)
    }


def plan(
    layers: Layers, available_bytes: int, *, version: str, length: int, batched: int = 8192, mode: str = "none"
) -> KvPool:
    limits = Limits(
        max_model_len=length,
        max_num_batched_tokens=batched,
        max_num_seqs=1024,
        async_scheduling=True,
        mamba_cache_mode=mode,
    )
    return plan_pool([layers], [available_bytes], limits, generation_of(version))


def planned(one: Start, available_bytes: int) -> KvPool:
    mode = "align" if one.prefix_caching else "none"
    length = one.length or 4096  # Llama 2's own
    return plan(layers_of(one), available_bytes, version=one.version, length=length, batched=one.batched, mode=mode)


@pytest.mark.parametrize("one", STARTS, ids=lambda one: f"{one.row} {one.config}")
def test_what_a_real_start_printed_closes_with_the_plan(one: Start) -> None:
    low, high = int((one.gib - HALF_A_DIGIT) * GIB), int((one.gib + HALF_A_DIGIT) * GIB)
    step = planned(one, low).bytes_per_block
    pools = [planned(one, available) for available in range(low, high + step, step)]
    assert any(agrees(pool, one) for pool in pools), [(pool.blocks, pool.tokens) for pool in pools]
    assert not one.groups or len(pools[0].groups) == sum(count for _, _, count in one.groups)


def agrees(pool: KvPool, one: Start) -> bool:
    return (
        one.blocks in {None, pool.blocks}
        and one.tokens in {None, pool.tokens}
        and one.concurrency in {None, round(pool.max_concurrency, 2)}
    )


@pytest.mark.parametrize(("gib", "tokens"), [(44.30, 645_120), (43.54, 633_984)])
def test_the_8b_model_of_the_story_holds_what_its_starts_printed(gib: float, tokens: int) -> None:
    """On Ascend with TP 2 and blocks of 128. Before 0.20.1 the printed tokens are blocks times their size."""
    model = {f"layers.{place}": full(4, 128, block_size=128) for place in range(36)}
    low, high = (
        plan(model, int((gib + by) * GIB), version="0.12.0", length=8192).tokens for by in (-HALF_A_DIGIT, HALF_A_DIGIT)
    )
    assert (low or 0) <= tokens <= (high or 0)


def test_the_32b_model_of_the_story_holds_164224_tokens() -> None:
    """21,540,531,712 bytes with TP 2 and blocks of 128: 1,283 blocks of 16 MiB."""
    model = {f"layers.{place}": full(4, 128, block_size=128) for place in range(64)}
    pool = plan(model, 21_540_531_712, version="0.12.0", length=162_000)
    assert (pool.blocks, pool.tokens, pool.fits) == (1283, 164224, True)
    longer = plan(model, 21_540_531_712, version="0.12.0", length=164_225)
    assert (longer.fits, longer.max_model_len_that_fits) == (False, 164224)


# Row 54 printed its estimate: a multiple of 16 tokens and not of the full layers' 32.
@pytest.mark.parametrize(
    ("one", "needed", "longest"),
    [
        *REFUSED,
        (replace(STARTS[1], length=131072, gib=5.26), 7.0, None),
        (replace(STARTS[1], length=120000, gib=5.26), 6.41, None),
    ],
)
def test_a_refusal_has_the_figures_that_were_printed(one: Start, needed: float | None, longest: int | None) -> None:
    pool = planned(one, int(one.gib * GIB))
    assert (pool.fits, pool.tokens) == (False, None)
    assert f"({one.gib} GiB)" in pool.refusal.message
    assert needed is None or f"{needed} GiB KV cache is needed" in pool.refusal.message
    assert longest in {None, pool.max_model_len_that_fits}
