"""Random KV caches for the oracle: models of every kind of layer, with budgets near the edges of what fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from kvplan import Limits, PlanError
from kvplan.generations import Generation, generation_of
from kvplan.pool import KvPool, plan_pool
from kvplan.specs import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LayerSpec,
    MambaState,
    MlaAttention,
    SlidingWindow,
)
from tests.support.pool_oracle import Question

PLENTY = 1 << 50


def random_questions(version: str, *, count: int, seed: int) -> list[Question]:
    """Return as many questions for one version; the same seed gives the same."""
    maker = _Maker(generation_of(version), Random(seed))  # noqa: S311 - test cases, no secrets
    return [maker.question() for _ in range(count)]


def plan(question: Question, version: str) -> KvPool | PlanError:
    try:
        return plan_pool(question.workers, question.available_bytes, question.limits, generation_of(version))
    except PlanError as exc:
        return exc


class _Maker:
    """Draws what a model may have; what the version's specs do not know is left out."""

    def __init__(self, generation: Generation, random: Random) -> None:
        self._generation = generation
        self._random = random
        self._block_size = 16

    def question(self) -> Question:
        draw = self._random
        self._block_size = draw.choice((16, 16, 16, 32, 64, 128, 544, 784))
        often = (self._one_kind, self._windows, self._states)
        rare = (self._several_sizes, self._windows, self._two_windows, self._chunks, self._latent)
        layers = draw.choice((*often, *often, *rare, self._encoder_decoder, self._anything))()
        workers = self._stages(layers)
        question = Question(workers=workers, available_bytes=[PLENTY] * len(workers), limits=self._limits(len(workers)))
        return replace(question, available_bytes=self._budgets(question))

    def _since(self, *release: int) -> bool:
        return self._generation.release >= release

    def _attention(self, **fields: Any) -> dict[str, Any]:
        draw = self._random
        tensor_parallel = draw.choice((1, 1, 2, 4, 8))
        values = {
            "block_size": self._block_size,
            "kv_heads": max(1, draw.choice((1, 2, 4, 8, 16, 32)) // tensor_parallel),
            "head_size": draw.choice((64, 80, 96, 128, 192, 256)),
            "element_bytes": draw.choice((1, 2, 2, 2, 4)),
        }
        if self._since(0, 24, 0) and not self._since(0, 29, 0):
            values["indexes_by_block_stride"] = draw.random() < 0.5
        return values | fields

    def _full(self, **fields: Any) -> FullAttention:
        spec = FullAttention(**self._attention(**fields))
        if self._since(0, 14, 0) and self._random.random() < 0.1:
            return replace(spec, head_size_v=self._random.choice((32, 64, 128)))
        if self._since(0, 28, 0) and self._random.random() < 0.05:
            return replace(spec, token_head_bytes=self._random.choice((72, 132, 136)))
        return spec

    def _window(self) -> int:
        return self._random.choice((128, 512, 1024, 2047, 4096, 32768))

    def _mla(self) -> MlaAttention:
        draw = self._random
        if draw.random() < 0.3:
            return self._latent_of(576, 1, cache_dtype="fp8_ds_mla", token_head_bytes=656)
        return self._latent_of(draw.choice((320, 576)), draw.choice((1, 2)))

    def _latent_of(self, head_size: int, element_bytes: int, **fields: Any) -> MlaAttention:
        shape = {"kv_heads": 1, "head_size": head_size, "element_bytes": element_bytes}
        return MlaAttention(block_size=self._block_size, **shape, **fields)

    def _sliding(self) -> SlidingWindow:
        return SlidingWindow(**self._attention(window=self._window()))

    def _state(self, page_bytes: int | None = None) -> MambaState:
        draw = self._random
        shapes = (
            (draw.choice((1024, 3072, 5120)), draw.choice((3, 4))),
            (draw.choice((8, 16, 32)), draw.choice((64, 128)), 128),
        )
        sizes = (2, draw.choice((2, 4)))
        tensors = draw.choice((1, 2, 2))
        state = MambaState(
            block_size=draw.choice((self._block_size, 4096, 131072)),
            shapes=shapes[:tensors],
            element_bytes=sizes[:tensors],
        )
        if draw.random() < 0.2:
            state = replace(state, speculative_blocks=draw.choice((1, 3)))
        if self._since(0, 29, 0) and draw.random() < 0.1:
            state = replace(state, checkpoint_blocks=1)
        if page_bytes is not None and page_bytes >= state.content_bytes:
            state = replace(state, page_bytes_padded=page_bytes)
        return state

    def _count(self) -> int:
        return self._random.choice((1, 2, 3, 4, 5, 6, 10, 12, 13, 24))

    def _mixed(self, *parts: tuple[LayerSpec, int]) -> dict[str, LayerSpec]:
        specs = [spec for spec, count in parts for _ in range(count)]
        if self._random.random() < 0.7:
            self._random.shuffle(specs)
        return {f"model.layers.{place}": spec for place, spec in enumerate(specs)}

    def _one_kind(self) -> dict[str, LayerSpec]:
        spec = self._random.choice((self._full, self._mla, self._sliding, self._state))()
        return self._mixed((spec, self._count()))

    def _several_sizes(self) -> dict[str, LayerSpec]:
        parts: list[LayerSpec] = [self._full() for _ in range(self._random.choice((2, 3)))]
        if self._random.random() < 0.5:
            parts.append(self._mla())
        return self._mixed(*((spec, self._count()) for spec in parts))

    def _windows(self) -> dict[str, LayerSpec]:
        """Full attention and one window, often of the same size, as gemma-3 and gpt-oss have."""
        full = self._full()
        fields = self._attention(window=self._window())
        if (drawn := self._random.random()) < 0.85:
            heads = full.kv_heads * (1 if drawn < 0.7 else 2)
            fields |= {"kv_heads": heads, "head_size": full.head_size, "element_bytes": full.element_bytes}
        if self._random.random() < 0.1:
            fields["block_size"] = self._block_size * 2
        if self._since(0, 14, 0) and self._random.random() < 0.1:
            fields["page_bytes_padded"] = SlidingWindow(**fields).content_bytes + 4096
        if self._since(0, 20, 0) and self._random.random() < 0.1:
            fields["head_size_v"] = full.head_size_v or 64
        return self._mixed((full, self._count()), (SlidingWindow(**fields), self._count()))

    def _two_windows(self) -> dict[str, LayerSpec]:
        fields = self._attention()
        return self._mixed(
            (FullAttention(**fields), self._count()),
            (SlidingWindow(**fields, window=512), self._count()),
            (SlidingWindow(**fields, window=self._window()), self._count()),
        )

    def _chunks(self) -> dict[str, LayerSpec]:
        fields = self._attention()
        chunk = self._random.choice((2048, 8192))
        return self._mixed(
            (FullAttention(**fields), self._count()), (ChunkedLocal(**fields, chunk=chunk), self._count())
        )

    def _latent(self) -> dict[str, LayerSpec]:
        """MLA with an indexer, a drafter, or sliding windows beside it."""
        other = self._random.choice((lambda: self._latent_of(132, 1), self._full, self._mla, self._sliding))()
        return self._mixed((self._mla(), self._count()), (other, self._count()))

    def _states(self) -> dict[str, LayerSpec]:
        """Attention and states, with pages that were made equal by the platform, and some that were not."""
        full = self._full()
        pages = self._random.choice((full.page_bytes, full.page_bytes, None))
        parts: list[tuple[LayerSpec, int]] = [(full, self._count()), (self._state(pages), self._count())]
        if self._random.random() < 0.2:
            parts.append((self._sliding(), self._count()))
        if self._random.random() < 0.1:
            parts.append((self._state(pages), self._count()))
        return self._mixed(*parts)

    def _encoder_decoder(self) -> dict[str, LayerSpec]:
        fields = self._attention()
        count = self._count()
        return self._mixed((FullAttention(**fields), count), (CrossAttention(**fields), count))

    def _anything(self) -> dict[str, LayerSpec]:
        makers = (
            *(self._full, self._mla, self._state, self._sliding),
            lambda: ChunkedLocal(**self._attention(chunk=2048)),
            lambda: CrossAttention(**self._attention()),
        )
        return self._mixed(
            *((self._random.choice(makers)(), self._count()) for _ in range(self._random.choice((2, 3))))
        )

    def _stages(self, layers: dict[str, LayerSpec]) -> list[dict[str, LayerSpec]]:
        """Spread the layers over pipeline stages, and each stage over one or two tensor ranks."""
        names = list(layers)
        stages = min(self._random.choice((1, 1, 1, 2, 3)), len(names))
        cuts = [round(place * len(names) / stages) for place in range(stages + 1)]
        parts = [{name: layers[name] for name in names[a:b]} for a, b in pairwise(cuts)]
        ranks = self._random.choice((1, 1, 2))
        return [part for part in parts for _ in range(ranks)]

    def _limits(self, workers: int) -> Limits:
        draw = self._random
        modes = ("none", "none", "align", "all") if self._generation.mamba_has_all else ("none", "align")
        return Limits(
            max_model_len=draw.choice((1, 15, 2048, 4097, 8192, 32768, 40960, 131072, 262144, 1048576)),
            max_num_batched_tokens=draw.choice((512, 2048, 8192, 16384)),
            max_num_seqs=draw.choice((16, 256, 1024)),
            async_scheduling=draw.random() < 0.5,
            decode_context_parallel_size=draw.choice((1,) * 10 + (2, 4)),
            prefill_context_parallel_size=draw.choice((1, 1, 1, 1, 2)) if self._since(0, 12, 0) else 1,
            num_gpu_blocks_override=draw.choice((None,) * 6 + (64, 1000, 100000)),
            mamba_cache_mode=draw.choice(modes),
            hybrid_manager=draw.random() < 0.85,
            max_encoder_tokens=draw.choice((448, 1500, 2048)),
            pipeline_parallel_size=workers if draw.random() < 0.5 else 1,
            v2_model_runner=draw.random() < 0.5,
        )

    def _budgets(self, question: Question) -> list[int]:
        draw = self._random
        pool = plan(question, self._generation.version)
        if isinstance(pool, PlanError):
            return [draw.randrange(1 << 28, 1 << 37)] * len(question.workers)
        edges = (-1, 0, 1, pool.bytes_per_block - 1, pool.bytes_per_block, pool.bytes_per_block + 1)
        if draw.random() < 0.4:
            budget = pool.needed_bytes + draw.choice(edges)
        elif draw.random() < 0.05:
            budget = draw.choice((0, -1, 1))
        else:
            budget = int(pool.needed_bytes * draw.choice((draw.uniform(0.05, 1), draw.uniform(1, 40))))
        return [budget + draw.choice((0, 0, pool.bytes_per_block, 12345)) for _ in question.workers]
