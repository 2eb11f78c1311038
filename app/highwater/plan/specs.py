"""What one layer keeps in the KV cache: one frozen value for each kind of layer that vLLM's own specs know.

They mirror `vllm/v1/kv_cache_interface.py` without importing it. Two layers whose values are equal share a group where
vLLM's own would. Sizes are bytes, blocks hold tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer's share of a block.

    Attributes:
        block_size: How many tokens a block of this layer holds.
        page_bytes_padded: The size its page was raised to, to equal another layer's; None: not raised.
    """

    block_size: int
    page_bytes_padded: int | None = None

    @property
    def content_bytes(self) -> int:
        """The bytes of one block that this layer writes."""
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        """The bytes of one block that this layer takes, padding included."""
        return self.content_bytes if self.page_bytes_padded is None else self.page_bytes_padded


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer(LayerSpec):
    """Keys and values of every token.

    Attributes:
        kv_heads: The KV heads on one rank, at least one.
        head_size: The width of a key.
        head_size_v: The width of a value; None: the same as a key's. 0 where one vector serves as both.
        element_bytes: The size of one element in the cache.
        token_head_bytes: The bytes of one token and head where that is no product of the above (packed formats).
    """

    kv_heads: int
    head_size: int
    element_bytes: int
    head_size_v: int | None = None
    token_head_bytes: int | None = None

    @property
    def content_bytes(self) -> int:
        if self.token_head_bytes is not None:
            return self.block_size * self.kv_heads * self.token_head_bytes
        width = self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)
        return self.block_size * self.kv_heads * width * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(AttentionLayer):
    """A layer that attends to every token before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(AttentionLayer):
    """A layer that attends to the last tokens only."""

    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocal(AttentionLayer):
    """A layer that attends within its chunk of the sequence (Llama 4)."""

    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention(AttentionLayer):
    """One latent vector a token (DeepSeek, Kimi): not split by tensor parallelism."""

    head_size_v: int | None = 0
    cache_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention(AttentionLayer):
    """The encoder's states of an encoder-decoder model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaState(LayerSpec):
    """A state of fixed size, whatever the length (Mamba, linear attention, gated delta nets, short convolutions).

    Attributes:
        shapes: The shape of each state tensor on one rank.
        element_bytes: The size of an element of each.
        speculative_blocks: Blocks more for each request, one for each token of a draft.
    """

    shapes: tuple[tuple[int, ...], ...]
    element_bytes: tuple[int, ...]
    speculative_blocks: int = 0

    @property
    def content_bytes(self) -> int:
        return sum(
            math.prod(shape) * size for shape, size in zip(self.shapes, self.element_bytes, strict=True)
        )


# By layer name, as vLLM names them; in the order of the model.
Layers: TypeAlias = Mapping[str, LayerSpec]
