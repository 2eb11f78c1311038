"""The parts of a model that keep something in the KV cache, before tensor parallelism and element types are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from highwater.plan.errors import PlanError

Role: TypeAlias = Literal["conv", "ssm", "float32"]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The cache of one module.

    Attributes:
        layer: The layer's place in the model, which decides its pipeline stage.
        name: The module's name, as vLLM names it.
    """

    layer: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Kept):
    """Keys and values.

    Attributes:
        kv_heads: The KV heads of the whole model.
        head_size: The width of a key.
        head_size_v: The width of a value; None: the same.
        window: How far back it looks; None: all the way.
        chunk: The length of the chunks that it stays in; None: none.
    """

    kv_heads: int
    head_size: int
    head_size_v: int | None = None
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent(Kept):
    """One latent vector a token (MLA).

    Attributes:
        width: Its elements: rank plus rotary part.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Kept):
    """A recurrent state."""

    form: StateForm


class StateForm:
    """The shapes of one layer's state tensors, as vLLM's MambaStateShapeCalculator has them (mamba_utils.py)."""

    __slots__ = ()

    @property
    def roles(self) -> tuple[Role, ...]:
        """The name that decides the element type of each tensor."""
        return ("conv", "ssm")

    def shapes(self, tensor_parallel: int, speculative: int) -> Shapes:
        """Return each tensor's shape on one rank."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1(StateForm):
    """A selective state space (Mamba, Jamba)."""

    intermediate: int
    state: int
    kernel: int

    def shapes(self, tensor_parallel: int, speculative: int) -> Shapes:  # noqa: ARG002 - no drafts here
        """Return the shapes of one rank."""
        width = divided("intermediate size", self.intermediate, tensor_parallel)
        return (self.kernel - 1, width), (width, self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(StateForm):
    """A state space with heads (Mamba 2, Bamba, Nemotron-H, Falcon-H1, Granite 4, Zamba 2)."""

    intermediate: int
    groups: int
    heads: int
    head_size: int
    state: int
    kernel: int
    counts_drafts: bool = False

    def shapes(self, tensor_parallel: int, speculative: int) -> Shapes:
        """Return the shapes of one rank."""
        groups = self.groups
        if groups % tensor_parallel:
            groups = tensor_parallel  # each rank has the group of its heads
        width = divided("convolution's width", self.intermediate + 2 * groups * self.state, tensor_parallel)
        heads = divided("number of state heads", self.heads, tensor_parallel)
        return (
            (self.kernel - 1 + (speculative if self.counts_drafts else 0), width),
            (heads, self.head_size, self.state),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(StateForm):
    """A gated delta net (Qwen3-Next, Qwen3.5, OLMo hybrid)."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    def shapes(self, tensor_parallel: int, speculative: int) -> Shapes:
        """Return the shapes of one rank."""
        total = self.key_size * self.key_heads * 2 + self.value_size * self.value_heads
        width = divided("convolution's width", total, tensor_parallel)
        heads = divided("linear_num_value_heads", self.value_heads, tensor_parallel)
        return (self.kernel - 1 + speculative, width), (heads, self.value_size, self.key_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(StateForm):
    """Kimi's delta attention: three convolutions and a state in float32."""

    heads: int
    head_size: int
    kernel: int

    @property
    def roles(self) -> tuple[Role, ...]:
        """The names that decide the element types, one for each tensor."""
        return ("conv", "conv", "conv", "float32")

    def shapes(self, tensor_parallel: int, speculative: int) -> Shapes:  # noqa: ARG002 - no drafts here
        """Return the shapes of one rank."""
        width = divided("projection", self.heads * self.head_size, tensor_parallel)
        heads = divided("number of state heads", self.heads, tensor_parallel)
        conv = (self.kernel - 1, width)
        return conv, conv, conv, (heads, self.head_size, self.head_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(StateForm):
    """Lightning attention (MiniMax-01)."""

    heads: int
    head_size: int

    @property
    def roles(self) -> tuple[Role, ...]:
        """The names that decide the element types, one for each tensor."""
        return ("conv",)

    def shapes(self, tensor_parallel: int, speculative: int) -> Shapes:  # noqa: ARG002 - no drafts here
        """Return the shapes of one rank."""
        return ((self.heads // tensor_parallel, self.head_size, self.head_size),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution(StateForm):
    """A short convolution (LFM2)."""

    width: int
    kernel: int

    @property
    def roles(self) -> tuple[Role, ...]:
        """The names that decide the element types, one for each tensor."""
        return ("conv",)

    def shapes(self, tensor_parallel: int, speculative: int) -> Shapes:  # noqa: ARG002 - no drafts here
        """Return the shapes of one rank."""
        return ((self.kernel - 1, divided("conv_dim", self.width, tensor_parallel)),)


def divided(what: str, number: int, ranks: int) -> int:
    """Return one rank's part, as vLLM's `divide` does."""
    if number % ranks:
        raise PlanError(f"--tensor-parallel-size: {ranks}; the {what} is {number}, and vLLM divides it evenly")
    return number // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as the size of its KV cache goes.

    Attributes:
        architecture: vLLM's name of the class that serves it.
        model_type: Transformers' name of the language model's configuration.
        layers: How many layers it has, for its pipeline stages.
        attention_heads: The query heads of the whole model; 0: it has none.
        kv_heads: The KV heads of vLLM's ModelConfig, which sizes the pages of hybrids.
        head_size: The head size of the same.
        kept: What its modules keep, in the order of the model.
        max_length: The longest sequence that the configuration allows; None: it does not say.
        max_length_key: The key that says it.
        default_length: The length that vLLM takes where none is given; None: `max_length`.
        length_override: `model_max_length`, up to which a longer one may be asked for.
        dtype: The element type of the checkpoint, as the configuration names it; None: it does not.
        quantization: The `quantization_config`, or an empty mapping.
        is_hybrid: Attention and recurrent states.
        has_attention: Any layer with keys and values.
        is_encoder_decoder: An encoder's states are kept as well.
        is_latent: Its attention is MLA.
        is_sparse: An indexer picks the tokens that MLA attends to.
        caches_states: Prefixes of its recurrent states can all be kept (`--mamba-cache-mode all`).
        state_chunk: The tokens of one chunk of its state kernel; None: not known.
        state_dtype: The element type that its configuration wants for recurrent states; None: it does not say.
        encoder_tokens: The longest input of its encoder.
        is_moe: It has experts.
        unrotated_head_size: MLA's `qk_nope_head_dim`, which decides its kernel on some cards.
        notes: What a reader of a plan should know.
    """

    architecture: str
    model_type: str
    layers: int
    attention_heads: int
    kv_heads: int
    head_size: int
    kept: tuple[Kept, ...]
    max_length: float | None
    max_length_key: str | None
    default_length: int | None = None
    length_override: int | None = None
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
    notes: tuple[str, ...] = ()
