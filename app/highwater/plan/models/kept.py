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
    """The cache of one module.

    Attributes:
        layer: The layer's place in the model, which decides its pipeline stage.
        name: The module's name in vLLM.
    """

    layer: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Kept):
    """Keys and values.

    Attributes:
        kv_heads: The KV heads of the whole model.
        head_size: The width of a key, and of a value.
        window: The tokens that it attends to; None: all.
        chunk: The length of the chunks that it attends within; None: it has none.
    """

    kv_heads: int
    head_size: int
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent(Kept):
    """One latent vector a token (MLA), of `width` elements: rank plus rotary part."""

    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer(Kept):
    """The keys by which sparse attention picks its tokens.

    Attributes:
        width_bytes: The bytes of one token: 8-bit elements, and a 4-byte scale for each 128 of them.
    """

    width_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross(Kept):
    """Keys and values of the encoder's output."""

    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class StateForm:
    """The state tensors of one layer, as vLLM's MambaStateShapeCalculator has them (mamba_utils.py).

    Attributes:
        shapes: Returns each tensor's shape on one rank for a tensor parallel size and a number of speculative tokens;
            raises PlanError where vLLM cannot divide them.
        roles: The name that decides the element type of each tensor.
        keeps_checkpoints: It may keep a state from the middle of a prompt (Mamba 2).
    """

    shapes: Callable[[int, int], Shapes]
    roles: tuple[Role, ...] = ("conv", "ssm")
    keeps_checkpoints: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Kept):
    """A recurrent state."""

    form: StateForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as the size of its KV cache goes.

    Attributes:
        architecture: vLLM's name of the class that serves it.
        model_type: Transformers' name of the language model's configuration.
        layers: All its layers, which pipeline stages divide.
        attention_heads: The query heads of the whole model; 0: it has no attention.
        kv_heads: The KV heads of vLLM's ModelConfig, which sizes the pages of hybrids; `head_size` likewise.
        kept: The caches of its modules, in the order of the model.
        dtype: The element type of the checkpoint; None: the configuration does not name it.
        quantization: The `quantization_config`, or an empty mapping.
        is_hybrid: It has attention and recurrent states.
        is_encoder_decoder: An encoder's states are kept as well.
        is_latent: Its attention is MLA.
        is_sparse: An indexer picks the tokens that MLA attends to.
        caches_states: Prefixes of its recurrent states can all be kept (`--mamba-cache-mode all`).
        state_chunk: The tokens of one chunk of its state kernel; None: not known.
        state_dtype: The element type that its configuration names for recurrent states; None: it names none.
        encoder_tokens: The longest input of its encoder.
        is_moe: It has experts.
        unrotated_head_size: MLA's `qk_nope_head_dim`, which decides its kernel on some cards.
    """

    architecture: str
    model_type: str
    layers: int
    attention_heads: int
    kv_heads: int
    head_size: int
    kept: tuple[Kept, ...]
    length: Length
    dtype: str | None = None
    quantization: Mapping[str, Any]
    is_hybrid: bool = False
    has_attention: bool = True
    is_encoder_decoder: bool = False
    is_latent: bool = False
    is_sparse: bool = False
    caches_states: bool = False
    state_chunk: int | None = None
    state_dtype: str | None = None
    encoder_tokens: int = 0
    is_moe: bool = False
    unrotated_head_size: int | None = None
