"""The parts of a model that keep something in the KV cache, before tensor parallelism and element types are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from highwater.plan.models.length import Length

Role: TypeAlias = Literal["conv", "ssm", "float32"]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The cache of one module."""

    layer: int  # the layer's place in the model, which decides its pipeline stage
    name: str  # the module's name in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Kept):
    """Keys and values."""

    kv_heads: int  # the KV heads of the whole model
    head_size: int  # the width of a key, and of a value
    window: int | None = None  # the tokens that it attends to; None: all
    chunk: int | None = None  # the length of the chunks that it attends within; None: it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent(Kept):
    """One latent vector a token (MLA), of `width` elements: rank plus rotary part."""

    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer(Kept):
    """The keys by which sparse attention picks its tokens."""

    width_bytes: int  # the bytes of one token: 8-bit elements, and a 4-byte scale for each 128 of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross(Kept):
    """Keys and values of the encoder's output."""

    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class StateForm:
    """The state tensors of one layer, as vLLM's MambaStateShapeCalculator has them (mamba_utils.py)."""

    # Returns each tensor's shape on one rank for a tensor parallel size and a number of speculative tokens; raises
    # PlanError where vLLM cannot divide them.
    shapes: Callable[[int, int], Shapes]
    roles: tuple[Role, ...] = ("conv", "ssm")  # the name that decides the element type of each tensor
    keeps_checkpoints: bool = False  # it may keep a state from the middle of a prompt (Mamba 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState(Kept):
    form: StateForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as the size of its KV cache goes."""

    architecture: str  # vLLM's name of the class that serves it
    model_type: str  # Transformers' name of the language model's configuration
    layers: int  # all its layers, which pipeline stages divide
    attention_heads: int  # the query heads of the whole model; 0: it has no attention
    kv_heads: int  # of vLLM's ModelConfig, which sizes the pages of hybrids
    head_size: int  # likewise
    kept: tuple[Kept, ...]  # the caches of its modules, in the order of the model
    length: Length
    dtype: str | None = None  # the element type of the checkpoint; None: the configuration does not name it
    quantization: Mapping[str, Any]  # the `quantization_config`, or an empty mapping
    is_hybrid: bool = False  # it has attention and recurrent states
    has_attention: bool = True
    is_encoder_decoder: bool = False  # an encoder's states are kept as well
    is_latent: bool = False  # its attention is MLA
    is_sparse: bool = False  # an indexer picks the tokens that MLA attends to
    caches_states: bool = False  # prefixes of its recurrent states can all be kept (`--mamba-cache-mode all`)
    state_chunk: int | None = None  # the tokens of one chunk of its state kernel; None: not known
    # The element type that its configuration names for recurrent states; None: it names none.
    state_dtype: str | None = None
    encoder_tokens: int = 0  # the longest input of its encoder
    is_moe: bool = False
    unrotated_head_size: int | None = None  # MLA's `qk_nope_head_dim`, which decides its kernel on some cards
