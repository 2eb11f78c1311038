"""Real starts whose logs are public: every figure that was printed closes with the plan, within its own rounding.

Most are from `llm-d-incubation/llm-d-planner`, folder `accuracy`: vLLM 0.19.0 on H100 80GB. Blocks of 16 tokens, prefix
caching off, 8,192 batched tokens unless a row says another. A log prints GiB with two decimals, so that the bytes lie
in a window of 0.01 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvplan.flags import Limits
from kvplan.generations import generation_of
from kvplan.pool import KvPool, plan_pool
from kvplan.specs import ChunkedLocal, FullAttention, Layers, LayerSpec, MambaState, MlaAttention, SlidingWindow

GIB = 1 << 30


def full(kv_heads: int, head_size: int, **fields: Any) -> FullAttention:
    return FullAttention(
        **{
            "block_size": 16,
            "kv_heads": kv_heads,
            "head_size": head_size,
            "element_bytes": 2,
            **fields,
        }
    )


def sliding(kv_heads: int, head_size: int, window: int, **fields: Any) -> SlidingWindow:
    return SlidingWindow(
        **{
            "block_size": 16,
            "kv_heads": kv_heads,
            "head_size": head_size,
            "element_bytes": 2,
            "window": window,
            **fields,
        }
    )


def layers(*parts: tuple[int, LayerSpec]) -> Layers:
    specs = [spec for count, spec in parts for _ in range(count)]
    return {f"layers.{place}": spec for place, spec in enumerate(specs)}


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start, as its log tells it; None: not printed."""

    name: str
    layers: Layers
    kv_gib: float
    blocks: int | None = None
    tokens: int | None = None
    concurrency: float | None = None
    groups: int = 1
    version: str = "0.19.0"
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    mamba_cache_mode: str = "none"

    def plan(self, available_bytes: int) -> KvPool:
        limits = Limits(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=1024,
            async_scheduling=True,
            mamba_cache_mode=self.mamba_cache_mode,
        )
        return plan_pool([self.layers], [available_bytes], limits, generation_of(self.version))


LLAMA_8B = layers((32, full(8, 128)))
QWEN_7B = layers((28, full(4, 128)))
QWEN_14B = layers((40, full(8, 128)))
GEMMA_4 = ((25, sliding(8, 256, 1024, element_bytes=1)), (5, full(2, 512, element_bytes=1)))

STARTS = (
    Start(name="Llama-3.3-70B FP8, TP 2", layers=layers((80, full(4, 128))), kv_gib=37.28, blocks=15269),
    Start(name="Qwen2.5-7B FP8", layers=QWEN_7B, kv_gib=64.64, blocks=75644, tokens=1210304, concurrency=147.74),
    Start(
        name="gemma-2-2b",
        layers=layers((13, sliding(4, 256, 4096)), (13, full(4, 256))),
        kv_gib=66.47,
        blocks=83770,
        tokens=670160,
        concurrency=81.73,
        groups=2,
    ),
    Start(
        name="gemma-3-12b",
        layers=layers((40, sliding(8, 256, 1024)), (8, full(8, 256))),
        kv_gib=47.72,
        blocks=48867,
        tokens=130304,
        concurrency=15.88,
        groups=6,
    ),
    Start(
        name="gemma-3-27b",
        layers=layers((52, sliding(16, 128, 1024)), (10, full(16, 128))),
        kv_gib=19.53,
        blocks=15997,
        tokens=36560,
        concurrency=4.46,
        groups=7,
    ),
    Start(
        name="gemma-3-4b",
        layers=layers((29, sliding(4, 256, 1024)), (5, full(4, 256))),
        kv_gib=62.51,
        blocks=204817,
        tokens=468144,
        concurrency=57.05,
        groups=7,
    ),
    Start(
        name="granite-3.1-2b",
        layers=layers((40, full(8, 64))),
        kv_gib=69.28,
        blocks=56753,
        tokens=908048,
        concurrency=110.85,
    ),
    Start(name="Llama-3.1-8B, fp8", layers=LLAMA_8B, kv_gib=64.61, blocks=33078, tokens=529248, concurrency=64.61),
    Start(
        name="Llama-3.1-8B, 16,384 tokens",
        layers=LLAMA_8B,
        kv_gib=58.11,
        blocks=29751,
        tokens=476016,
        concurrency=29.05,
        max_model_len=16384,
    ),
    Start(
        name="Llama-4-Scout, TP 4",
        layers=layers(
            (36, ChunkedLocal(block_size=16, kv_heads=2, head_size=128, element_bytes=2, chunk=8192)),
            (12, full(2, 128)),
        ),
        kv_gib=16.75,
        blocks=91495,
        tokens=365968,
        concurrency=44.68,
        groups=4,
    ),
    Start(
        name="phi-2",
        layers=layers((32, full(32, 80))),
        kv_gib=69.0,
        blocks=14132,
        tokens=226112,
        concurrency=110.41,
        max_model_len=2048,
    ),
    Start(
        name="gpt-oss-20b, TP 2",
        layers=layers((12, sliding(4, 64, 128)), (12, full(4, 64))),
        kv_gib=59.32,
        blocks=323972,
        tokens=2591776,
        concurrency=316.07,
        groups=2,
    ),
    Start(
        name="gpt-oss-20b",
        layers=layers((12, sliding(8, 64, 128)), (12, full(8, 64))),
        kv_gib=58.47,
        tokens=1277184,
        concurrency=155.75,
        groups=2,
    ),
    Start(
        name="Qwen1.5-MoE-A2.7B",
        layers=layers((24, full(16, 128))),
        kv_gib=45.83,
        blocks=15644,
        tokens=250304,
        concurrency=30.55,
    ),
    Start(name="Mistral-Small-3.1 w8a8, TP 2", layers=layers((40, full(4, 128))), kv_gib=59.02, blocks=48349),
    Start(name="Llama-3.1-8B, 4,096 tokens", layers=LLAMA_8B, kv_gib=58.11, tokens=476016, max_model_len=4096),
    Start(name="Qwen2.5-7B", layers=QWEN_7B, kv_gib=58.53, tokens=1096000),
    Start(name="Qwen3-14B on 0.15", layers=QWEN_14B, kv_gib=41.94, concurrency=33.55, version="0.15.0"),
    Start(name="Qwen3-14B on 0.17", layers=QWEN_14B, kv_gib=45.34, concurrency=36.27, version="0.17.0"),
    Start(
        name="Qwen3.6-35B-A3B, GDN and fp8 KV",
        layers=layers(
            (10, full(2, 256, element_bytes=1, block_size=2096)),
            (
                30,
                MambaState(
                    block_size=2096,
                    # The state itself was not printed: its page is padded to that of the attention layers.
                    shapes=((32, 128, 128),),
                    element_bytes=(4,),
                    page_bytes_padded=2096 * 2 * 2 * 256,
                ),
            ),
        ),
        kv_gib=2.95,
        tokens=75456,
        concurrency=3.87,
        groups=4,
        version="0.20.0",
        max_model_len=65536,
        mamba_cache_mode="align",
    ),
    Start(
        name="gemma-4-26B, fp8 KV",
        layers=layers(*GEMMA_4),
        kv_gib=7.15,
        tokens=62496,
        concurrency=1.74,
        groups=6,
        version="0.19.2rc1.dev8+g4b7f5ea1a",
        max_model_len=256000,
        max_num_batched_tokens=16384,  # not printed; the concurrency fits no other power of two
    ),
    Start(
        name="gemma-4-26B and its EAGLE-3 drafter",
        layers=layers(*GEMMA_4, (1, full(16, 128, element_bytes=1))),
        kv_gib=7.77,
        tokens=65696,
        concurrency=3.54,
        groups=31,
        version="0.19.2rc1.dev8+g4b7f5ea1a",
        max_model_len=98304,
    ),
    Start(
        name="Kimi-K2 and its EAGLE-3 drafter, TP 4",
        layers=layers(
            (61, MlaAttention(block_size=32, kv_heads=1, head_size=576, element_bytes=1)),
            (1, full(16, 128, element_bytes=1, block_size=32)),
        ),
        kv_gib=16.85,
        blocks=14413,
        tokens=461216,
        concurrency=3.52,
        max_model_len=131072,
    ),
    Start(name="Llama-2-7B", layers=layers((32, full(32, 128))), kv_gib=58.37, tokens=119536, max_model_len=4096),
    # Before 0.20.1 the printed tokens of a model with several groups are not the concurrency times the length.
    Start(
        name="Qwen3-VL-8B on Ascend, TP 2",
        layers=layers((36, full(4, 128, block_size=128))),
        kv_gib=44.30,
        tokens=645120,
        version="0.12.0",
    ),
    Start(
        name="Qwen3-VL-8B on Ascend, corrected",
        layers=layers((36, full(4, 128, block_size=128))),
        kv_gib=43.54,
        tokens=633984,
        version="0.12.0",
    ),
)


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.name)
def test_what_a_real_start_printed_closes_with_the_plan(start: Start) -> None:
    low, high = int((start.kv_gib - 0.005) * GIB), int((start.kv_gib + 0.005) * GIB)
    step = start.plan(low).bytes_per_block
    pools = [start.plan(available) for available in range(low, high + step, step)]
    assert any(_agrees(pool, start) for pool in pools), [(pool.blocks, pool.tokens) for pool in pools]
    assert len(pools[0].groups) == start.groups


def _agrees(pool: KvPool, start: Start) -> bool:
    assert pool.max_concurrency is not None
    return (
        start.blocks in {None, pool.blocks}
        and start.tokens in {None, pool.tokens}
        and start.concurrency in {None, round(pool.max_concurrency, 2)}
    )


def test_a_hybrid_model_is_refused_with_the_length_that_the_log_printed() -> None:
    """gemma-4-26B in 0.6 GiB on 0.20.1: 2,832 tokens, a multiple of 16 and not of the full layers' 32."""
    gemma = layers((25, sliding(8, 256, 1024)), (5, full(2, 512)))
    start = Start(name="gemma-4-26B FP8", layers=gemma, kv_gib=0.6, version="0.20.1")
    pool = start.plan(int(0.6 * GIB))
    assert (pool.fits, pool.tokens, pool.max_model_len_that_fits) == (False, None, 2832)
    assert [group.block_size for group in pool.groups] == [16] * 5 + [32]


@pytest.mark.parametrize(
    ("model", "length", "kv_gib", "needed"),
    [
        (QWEN_7B, 131072, 5.26, "7.0 GiB KV cache is needed"),
        (QWEN_7B, 120000, 5.26, "6.41 GiB KV cache is needed"),
        (LLAMA_8B, 131072, 8.1, "16.0 GiB KV cache is needed"),
        (layers((36, full(8, 128))), 40960, 4.5, "5.62 GiB KV cache is needed"),
    ],
)
def test_a_refusal_names_the_printed_need(model: Layers, length: int, kv_gib: float, needed: str) -> None:
    start = Start(name="refused", layers=model, kv_gib=kv_gib, max_model_len=length)
    refusal = start.plan(int(kv_gib * GIB)).refusal
    assert refusal is not None
    assert needed in refusal.message
    assert f"({kv_gib} GiB)" in refusal.message


def test_the_32b_model_of_the_story_holds_164224_tokens() -> None:
    """21,540,531,712 bytes with TP 2 and blocks of 128: 1,283 blocks of 16 MiB."""
    model = layers((64, full(4, 128, block_size=128)))
    start = Start(name="Qwen3-VL-32B", layers=model, kv_gib=20.06, version="0.12.0", max_model_len=162000)
    pool = start.plan(21_540_531_712)
    assert (pool.blocks, pool.tokens, pool.fits) == (1283, 164224, True)
    longer = replace(start, max_model_len=164225).plan(21_540_531_712)
    assert (longer.fits, longer.max_model_len_that_fits) == (False, 164224)
