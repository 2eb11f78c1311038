"""What real starts of vLLM printed about the KV pool, with the command lines that they were made with.

They are public (most on an H100 with 79.19 GiB). The configurations hold the keys of the models' public config.json
that decide the size of a cache, and no others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplan import EngineFlags

CONFIGS = Path(__file__).parents[1] / "unit" / "explain" / "configs"
GIB = 1 << 30
# GiB are printed with two decimals.
HALF_A_DIGIT = 0.005
GEMMA_DEV = "0.19.2rc1.dev8+g4b7f5ea1a"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start: what was asked for, and what was printed."""

    row: int
    config: str
    version: str
    gib: float
    length: int | None = None
    tensor_parallel: int = 1
    batched: int = 8192
    cache_dtype: str | None = None
    prefix_caching: bool = False
    capability: str | None = None
    draft: str | None = None
    blocks: int | None = None
    tokens: int | None = None
    concurrency: float | None = None
    groups: tuple[tuple[str, int, int], ...] = ()

    def flags(self, available_bytes: int) -> EngineFlags:
        draft = None
        if self.draft is not None:
            model = str(CONFIGS / f"{self.draft}.json")
            draft = json.dumps({"method": "eagle3", "model": model, "num_speculative_tokens": 3})
        return EngineFlags(
            kv_cache_memory_bytes=available_bytes,
            max_model_len=self.length,
            tensor_parallel_size=self.tensor_parallel,
            max_num_batched_tokens=self.batched,
            max_num_seqs=1024,
            kv_cache_dtype=self.cache_dtype,
            enable_prefix_caching=self.prefix_caching,
            compute_capability=self.capability,
            speculative_config=draft,
        )


def start(row: int, config: str, gib: float, **given: Any) -> Start:
    """Return a start of 0.19.0 with 8,192 tokens, unless said otherwise."""
    return Start(row=row, config=config, gib=gib, **({"version": "0.19.0", "length": 8192} | given))


STARTS = (
    start(2, "llama-3.3-70b", 37.28, tensor_parallel=2, blocks=15269, groups=(("full", 80, 1),)),
    start(4, "qwen2.5-7b", 64.64, blocks=75644, tokens=1210304, concurrency=147.74, groups=(("full", 28, 1),)),
    start(6, "gemma-2-2b", 66.47, blocks=83770, tokens=670160, concurrency=81.73,
          groups=(("sliding", 13, 1), ("full", 13, 1))),
    start(8, "gemma-3-12b", 47.72, blocks=48867, tokens=130304, concurrency=15.88,
          groups=(("sliding", 8, 5), ("full", 8, 1))),
    start(9, "gemma-3-27b", 19.53, blocks=15997, tokens=36560, concurrency=4.46,
          groups=(("sliding", 9, 4), ("sliding", 8, 2), ("full", 10, 1))),
    start(10, "gemma-3-4b", 62.51, blocks=204817, tokens=468144, concurrency=57.05,
          groups=(("sliding", 5, 5), ("sliding", 4, 1), ("full", 5, 1))),
    start(12, "granite-3.1-2b", 69.28, blocks=56753, tokens=908048, concurrency=110.85),
    start(14, "llama-3.1-8b", 64.61, blocks=33078, tokens=529248, concurrency=64.61),
    start(16, "llama-3.1-8b", 58.11, length=16384, blocks=29751, tokens=476016, concurrency=29.05),
    start(17, "llama-4-scout", 16.75, tensor_parallel=4, blocks=91495, tokens=365968, concurrency=44.68,
          groups=(("chunked", 12, 3), ("full", 12, 1))),
    start(18, "phi-2", 69.0, length=2048, blocks=14132, tokens=226112, concurrency=110.41),
    start(19, "gpt-oss-20b", 59.32, tensor_parallel=2, blocks=323972, tokens=2591776, concurrency=316.07,
          groups=(("sliding", 12, 1), ("full", 12, 1))),
    start(20, "qwen1.5-moe-a2.7b", 45.83, blocks=15644, tokens=250304, concurrency=30.55),
    start(22, "mistral-small-3.1-24b", 59.02, tensor_parallel=2, blocks=48349),
    start(24, "gpt-oss-20b", 58.47, tokens=1277184, concurrency=155.75),
    start(32, "llama-3.1-8b", 58.11, length=4096, tokens=476016),
    start(34, "llama-3.1-8b", 58.11, length=32768, tokens=476016),
    start(36, "qwen2.5-7b", 58.53, length=2048, tokens=1096000),
    start(38, "qwen2.5-7b", 58.53, tokens=1096000),
    start(40, "qwen2.5-7b", 58.53, length=32768, tokens=1096000),
    start(42, "qwen3-14b", 41.94, version="0.15.0", concurrency=33.55),
    start(44, "qwen3-14b", 45.34, version="0.17.0", concurrency=36.27),
    start(46, "qwen3.6-35b-a3b-nvfp4", 2.95, version="0.20.0", length=65536, cache_dtype="fp8_e4m3",
          prefix_caching=True, tokens=75456, concurrency=3.87, groups=(("mamba", 10, 3), ("full", 10, 1))),
    # The row does not say how many tokens a step had; of vLLM's defaults 16,384 closes, 8,192 would give 2.15.
    start(48, "gemma-4-26b-a4b", 7.15, version=GEMMA_DEV, length=256000, cache_dtype="fp8_e4m3", batched=16384,
          tokens=62496, concurrency=1.74, groups=(("sliding", 5, 5), ("full", 5, 1))),
    start(49, "gemma-4-26b-a4b", 7.77, version=GEMMA_DEV, length=98304, cache_dtype="fp8_e4m3",
          draft="gemma-4-26b-a4b-eagle3", tokens=65696, concurrency=3.54,
          groups=(("sliding", 1, 25), ("full", 1, 6))),
    start(50, "kimi-k2", 16.85, length=131072, tensor_parallel=4, cache_dtype="fp8", capability="10.0",
          draft="kimi-k2-eagle3", blocks=14413, tokens=461216, concurrency=3.52, groups=(("mixed", 62, 1),)),
    start(52, "llama-2-7b", 58.37, length=None, tokens=119536),
)  # fmt: skip

# Row 54 printed its estimate; 56 and 58 printed the GiB of what is needed.
REFUSED = (
    (start(54, "gemma-4-26b-a4b", 0.6, version="0.20.1"), None, 2832),
    (start(56, "qwen3-4b", 4.5, length=40960), 5.62, None),
    (start(58, "llama-3.1-8b", 8.1, length=131072), 16.0, None),
)
