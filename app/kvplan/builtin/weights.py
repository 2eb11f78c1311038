"""The weights of one rank, as "Model loading took N GiB" counts them: between bounds, by a family's own shapes.

Norms, biases and the allocator's rounding are left to the bounds: starts that printed them lie within.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvplan.builtin.defaults import MODEL_BYTES
from kvplan.builtin.model import Model
from kvplan.errors import PlanError
from kvplan.figure import GIB, Figure, ceil_div, estimated
from kvplan.flags import EngineFlags
from kvplan.ranks import rank_heads, stage_bounds

# Methods that leave the KV cache alone, whatever the weights take.
_METHODS: Final = (
    *("fp8", "compressed-tensors", "gptq", "gptq_marlin", "awq", "awq_marlin", "mxfp4", "bitsandbytes", "fbgemm_fp8"),
    *("modelopt", "modelopt_fp4"),
)
_VOCABULARY_PADDING: Final = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py
_PREDICTION_KEYS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# What names no linear layer, or one that no method quantizes.
_NEVER_QUANTIZED: Final = (
    *("lm_head", "embed", "norm", "visual", "vision", "gate", "conv1d", "projector", "in_proj_ba", "in_proj_a"),
    *("in_proj_b", "mtp", "router", "merger"),
)


class Unknown(Exception):
    """The size is not known; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Elements on one rank: of linear layers, which a method may quantize, and of all else."""

    linear: int
    rest: int

    def bytes(self, element: int, linear: float) -> float:
        return self.rest * element + self.linear * linear


def check_quantization(model: Model, flags: EngineFlags) -> None:
    """Raises PlanError: the method is not known here, or vLLM would refuse the flag."""
    method, given = model.quantization_method, flags.quantization
    if model.quantization and method not in _METHODS:
        raise model.quantization.refused("quant_method", f"the built-in knows {', '.join(_METHODS)}")
    if given not in (None, "fp8", method) or (given == "fp8" and method not in (None, "fp8")):
        raise PlanError(f"--quantization: {given!r}; the built-in plans fp8, of weights in the model's dtype")


def weights_of(model: Model, flags: EngineFlags, stage: int, checkpoint_bytes: int | None, *, encodes: bool) -> Figure:
    """Return the weights of one rank of a pipeline stage. Raises Unknown, or PlanError where a key makes no sense."""
    part, whole = _held(model, flags, stage), _held(model, EngineFlags(), 0)
    element = MODEL_BYTES[flags.dtype or ""]
    try:
        linear = _linear_bytes(model, flags, element, encodes=encodes)
    except Unknown as exc:
        if checkpoint_bytes is None:
            raise Unknown(f"{exc}; the size of the checkpoint's files would give them") from exc
        return _of_checkpoint(model, flags, part.bytes(2, 2) / whole.bytes(2, 2), checkpoint_bytes, encodes=encodes)
    # One table of rotary positions, or several; the latent projections are kept a second time.
    table = model.longest * (model.text.optional("qk_rope_head_dim") or model.head_size) * element
    likely = part.bytes(element, linear)
    high = 1.012 * likely + 4 * table + (GIB // 2 if model.family.keeps == "latent" else 0)
    why = "by the family's shapes, from the config.json" + ("" if linear == element else ", linear layers in 8 bits")
    return estimated(round(0.997 * likely), round(1.001 * likely + table), round(high), why)


def _of_checkpoint(model: Model, flags: EngineFlags, share: float, size: int, *, encodes: bool) -> Figure:
    """Divide the checkpoint's bytes over the ranks; the bounds have what it has beside the model, or kernels pad."""
    stored = 2 if model.quantization else MODEL_BYTES.get(model.dtype or "bfloat16", 2)
    likely = size * share * (1 if model.quantization else MODEL_BYTES[flags.dtype or ""] / stored)
    extra = encodes or any(model.text.optional(key, 0) for key in _PREDICTION_KEYS)
    low, high = (0.9 if extra else 0.97) * likely, (1.08 if model.quantization else 1.03) * likely
    if flags.quantization == "fp8" and not model.quantization:
        low, likely = low / 2, 0.6 * likely
    if share < 1:  # an encoder may be whole on every rank
        low, high = 0.97 * low, 1.03 * high + encodes * min(size // 10, 2 * GIB)
    return estimated(round(low), round(likely), round(high), "the checkpoint's size, divided over the ranks")


def _linear_bytes(model: Model, flags: EngineFlags, element: int, *, encodes: bool) -> float:
    """Return the bytes of one element of a linear layer, with its scales. Raises Unknown: not all layers are known."""
    if encodes:
        raise Unknown("the shapes of its encoder are not followed")
    method, quantization = model.quantization_method, model.quantization
    if not quantization:
        return 1.0 if flags.quantization == "fp8" else element
    groups = [group.inside("weights") for group in quantization.inside("config_groups").objects()]
    is_fp8 = method == "fp8" or (
        method == "compressed-tensors"
        and groups != []
        and all((one.get("num_bits"), one.get("type")) == (8, "float") for one in groups)
    )
    if not is_fp8:
        raise Unknown(f"quantization_config: {method!r} decides their size")
    for key in ("ignore", "modules_to_not_convert", "ignored_layers"):
        for name in quantization.strings(key) or ():
            if not any(word in name for word in _NEVER_QUANTIZED):
                raise Unknown(
                    f"quantization_config.{key}: which layers {name[:100]!r} leaves in 16 bits is not followed"
                )
    return 1.001


def _held(model: Model, flags: EngineFlags, stage: int) -> _Held:
    """Count the elements of one rank. Raises Unknown: the file lacks a key that is needed."""
    text, ranks = _Sizes(model), flags.tensor_parallel_size
    first, last = stage_bounds(model.layers, flags.pipeline_parallel_size)[stage]
    hidden, linear, rest = text["hidden_size"], 0, 0
    for layer in range(first, last):
        mixer, plain = _mixer(model, text, layer, ranks)
        mlp, gates = _feed_forward(model, text, layer, flags)
        linear, rest = linear + mixer + mlp, rest + plain + gates
    rows = ceil_div(text["vocab_size"], _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    is_first, is_last = stage == 0, stage == flags.pipeline_parallel_size - 1
    tied = bool(model.text.get("tie_word_embeddings"))
    tables = int(is_first or (is_last and tied)) + int(is_last and not tied)
    return _Held(linear=linear, rest=rest + tables * ceil_div(rows, ranks) * hidden)


class _Sizes:
    """The file's numbers, needed: one that is absent leaves the weights unknown."""

    def __init__(self, model: Model) -> None:
        """Keep the language model's keys."""
        self._text = model.text

    def __getitem__(self, key: str) -> int:
        """Return a number; the first key that is there of several, with ``|`` between them."""
        found = next((value for one in key.split("|") if (value := self._text.optional(one)) is not None), None)
        if found is None:
            raise Unknown(f"{self._text.prefix}{key}: absent, and a whole number is needed for the weights")
        return found

    def split(self, key: str, ranks: int) -> int:
        """Return one rank's part. Raises PlanError: vLLM would refuse to divide it."""
        if self[key] % ranks:
            raise PlanError(f"--tensor-parallel-size: {ranks}; it must divide {key}, which is {self[key]}")
        return self[key] // ranks


def _mixer(model: Model, text: _Sizes, layer: int, ranks: int) -> tuple[int, int]:
    """Return the elements of a layer's attention or delta net: of its linear layers, and others."""
    hidden, heads = text["hidden_size"], model.heads // ranks
    if model.family.keeps == "latent":
        return _latent(model, text, heads, hidden)
    if model.linear[layer]:
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"] // ranks
        value_heads = text.split("linear_num_value_heads", ranks)
        values = value_heads * text["linear_value_head_dim"]
        return hidden * (2 * keys + 3 * values), 2 * value_heads * hidden
    # A hybrid's queries come with a gate of their output.
    queries = (
        3 * heads if model.family.keeps == "delta" and model.text.get("attn_output_gate") is not False else 2 * heads
    )
    return hidden * model.head_size * (queries + 2 * rank_heads(model.kv_heads, ranks)), 0


def _latent(model: Model, text: _Sizes, heads: int, hidden: int) -> tuple[int, int]:
    rope, latent = text["qk_rope_head_dim"], text["kv_lora_rank"]
    nope, value = text["qk_nope_head_dim"], text["v_head_dim"]
    query_rank = model.text.optional("q_lora_rank")
    queries = heads * (nope + rope)
    linear = hidden * queries if query_rank is None else query_rank * (hidden + queries)
    linear += hidden * (latent + rope) + heads * (nope + value) * latent + hidden * heads * value
    if model.is_sparse:
        width, index_heads = text["index_head_dim"], text["index_n_heads"]
        linear += (query_rank or hidden) * index_heads * width + hidden * (width + index_heads)
    return linear, 0


def _feed_forward(model: Model, text: _Sizes, layer: int, flags: EngineFlags) -> tuple[int, int]:
    hidden, ranks = text["hidden_size"], flags.tensor_parallel_size
    if not model.experts or _is_dense(model.text, layer):
        return 3 * hidden * text.split("intermediate_size", ranks), 0
    inner, spread = text["moe_intermediate_size|intermediate_size"], ranks * flags.data_parallel_size
    shared = model.text.optional("shared_expert_intermediate_size", 0) or 0
    shared += (model.text.optional("n_shared_experts", 0) or 0) * inner
    experts = (
        ceil_div(model.experts, spread) * inner if flags.enable_expert_parallel else model.experts * inner // spread
    )
    return 3 * hidden * (experts + shared // ranks), model.experts * hidden


def _is_dense(text: Any, layer: int) -> bool:  # noqa: ANN401
    """Return whether a layer of a mixture has one feed-forward part alone."""
    if layer < (text.optional("first_k_dense_replace", 0) or 0):
        return True
    listed = text.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise text.refused("mlp_only_layers", "a list of layers is needed")
    every = text.optional("decoder_sparse_step") or text.optional("moe_layer_freq") or 1
    offset = 0 if text.get("n_routed_experts") is not None else 1
    return layer in listed or (layer + offset) % every != 0


def is_left_out(encodes: tuple[str, ...], limits: Mapping[str, Any] | None) -> bool:
    """Return whether nothing may be given to the encoder, so that it is not loaded (0.32.0, models/interfaces.py)."""
    counts = [(limits or {}).get(name) for name in encodes]
    return all((one.get("count") if isinstance(one, Mapping) else one) == 0 for one in counts)
