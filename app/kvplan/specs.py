"""The KV cache of one layer: a frozen value for each kind of layer that vLLM's own specs have.

They mirror `vllm/v1/kv_cache_interface.py` without importing it. Two layers whose values are equal share a group where
vLLM's own would. Sizes are bytes, blocks hold tokens. An encoder-only layer, and a layer that reads another layer's
cache, keep nothing and are left out, as in the reports of vLLM's workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from kvplan import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer's share of a block."""

    kind: ClassVar[str] = ""  # as a plan names it; a layer without it cannot be planned
    block_size: int  # the tokens of a block
    # The size that its page was raised to, to equal another layer's; None: not raised.
    page_bytes_padded: int | None = None

    @property
    def content_bytes(self) -> int:
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        """The bytes of one block that this layer takes, padding included."""
        return self.content_bytes if self.page_bytes_padded is None else self.page_bytes_padded


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer(LayerSpec):
    """Keys and values of every token."""

    kv_heads: int  # the KV heads on one rank, at least one
    head_size: int
    element_bytes: int
    head_size_v: int | None = None  # the width of a value; None: the same as a key's. 0 where one vector serves as both
    # The bytes of one token and head where that is no product of the others (packed formats).
    token_head_bytes: int | None = None
    # Whether its kernel reads padded pages, which 0.24 to 0.28 ask before they pad one: those for CUDA do (0.24.0,
    # vllm/v1/attention/backends/flash_attn.py:160), CPU's does not, MLA's vary.
    indexes_by_block_stride: bool = False

    def __post_init__(self) -> None:
        if self.head_size_v == self.head_size:
            object.__setattr__(self, "head_size_v", None)

    @property
    def content_bytes(self) -> int:
        if self.token_head_bytes is not None:
            return self.block_size * self.kv_heads * self.token_head_bytes
        width = self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)
        return self.block_size * self.kv_heads * width * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(AttentionLayer):
    """A layer whose cache keeps every token; a promoted sliding or chunked layer still has its window or chunk."""

    kind: ClassVar[str] = "full"
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(AttentionLayer):
    """A layer that attends to the last tokens only."""

    kind: ClassVar[str] = "sliding"
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocal(AttentionLayer):
    """A layer that attends within its chunk of the sequence (Llama 4)."""

    kind: ClassVar[str] = "chunked"
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention(FullAttention):
    """One latent vector a token (DeepSeek, Kimi): not split by tensor parallelism.

    The packed format ``fp8_ds_mla`` takes 656 bytes a token (0.11.0, vllm/v1/kv_cache_interface.py:146): give it as
    `token_head_bytes`, with one head.
    """

    kind: ClassVar[str] = "mla"
    head_size_v: int | None = 0
    cache_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention(AttentionLayer):
    """The encoder's states of an encoder-decoder model."""

    kind: ClassVar[str] = "cross"


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaState(LayerSpec):
    """A state of fixed size, whatever the length (Mamba, linear attention, gated delta nets, short convolutions)."""

    kind: ClassVar[str] = "mamba"
    # The shape of each state tensor on one rank, and the size of an element of each.
    shapes: tuple[tuple[int, ...], ...]
    element_bytes: tuple[int, ...]
    speculative_blocks: int = 0  # more blocks for each request, one for each token of a draft
    # More blocks in the cache mode ``align``, for states kept in the middle of a prompt (0.29).
    checkpoint_blocks: int = 0

    @property
    def content_bytes(self) -> int:
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, self.element_bytes, strict=True))


# What an element of keys and values takes by `--kv-cache-dtype`, beside ``auto``, which is the model's own type.
CACHE_BYTES: Final = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# By layer name, as vLLM names them; in the order of the model.
Layers: TypeAlias = Mapping[str, LayerSpec]


# --- One rank's part of a model: its layers, and its KV heads ---


def stage_bounds(layers: int, stages: int) -> list[tuple[int, int]]:
    """Return the first layer and the end of each stage (vllm/distributed/utils.py, get_pp_indices).

    Layers that are left over go to the stages before the last, from the back.
    """
    sizes = [layers // stages] * stages
    for extra in range(layers % stages):
        sizes[-(extra + 2)] += 1
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def rank_heads(heads: int, ranks: int, key: str = "--tensor-parallel-size") -> int:
    """Return the KV heads of one rank: a part of them, or one, which several ranks then have alike.

    Raises PlanError: vLLM would refuse to spread them; the message names the ranks by `key`.
    """
    if heads >= ranks and heads % ranks:
        raise PlanError(f"{key}: {ranks}; the model's {heads} KV heads must be divisible by it")
    if heads < ranks and ranks % heads:
        raise PlanError(f"{key}: {ranks}; a multiple of the model's {heads} KV heads is needed")
    return max(1, heads // ranks)
