"""The weights of one rank, as "Model loading took N GiB" counts them: between bounds, by a family's own shapes.

Norms, biases and the allocator's rounding are left to the bounds: starts that printed them lie within.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvplan import GIB, MIB, EngineFlags, Figure, PlanError, ceil_div, estimated
from kvplan.builtin.model import MODEL_BYTES, Model
from kvplan.specs import rank_heads, stage_bounds

# Methods that leave the KV cache alone, whatever the weights take.
_METHODS: Final = (
    *("fp8", "compressed-tensors", "gptq", "gptq_marlin", "awq", "awq_marlin", "mxfp4", "bitsandbytes", "fbgemm_fp8"),
    *("modelopt", "modelopt_fp4"),
)
_VOCABULARY_PADDING: Final = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py
_TABLE_IN_EVERY_STAGE: Final = ("gemma", "cohere")  # 0.32.0, models/gemma2.py: also those between first and last
_PREDICTION_KEYS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Parts of names of what is no linear layer, or is never quantized.
_NEVER_QUANTIZED: Final = (
    *("lm_head", "embed", "norm", "visual", "vision", "conv1d", "projector", "in_proj_ba", "in_proj_a"),
    *("in_proj_b", "mtp", "router", "merger"),
)


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements on one rank: of linear layers, which a method may quantize, and of all else."""

    linear: int
    rest: int

    def __add__(self, other: _Elements) -> _Elements:
        return _Elements(self.linear + other.linear, self.rest + other.rest)

    def bytes(self, linear: float, rest: int) -> float:
        return self.linear * linear + self.rest * rest


def check_quantization(model: Model, flags: EngineFlags) -> None:
    """Raises PlanError: the method is not known here, or vLLM would refuse the flag."""
    method, given = model.quantization_method, flags.quantization
    if model.quantization and method not in _METHODS:
        raise model.quantization.refused("quant_method", f"the built-in knows {', '.join(_METHODS)}")
    if given not in (None, method or "fp8"):
        raise PlanError(f"--quantization: {given!r}; the built-in plans fp8, of weights in the model's dtype")


def weights_of(model: Model, flags: EngineFlags, stage: int, checkpoint_bytes: int | None, *, encodes: bool) -> Figure:
    """Return the weights of one rank of a pipeline stage. Raises PlanError: they are not known, and why."""
    part, element, keys = _elements(model, flags, stage), MODEL_BYTES[flags.dtype or ""], model.quantization
    # The bytes of one element of a linear layer, with its scales; None: the method's are not known.
    linear: float | None = None
    if not encodes and not keys:
        linear = 1 if flags.quantization == "fp8" else element
    elif not encodes:
        groups = [group.inside("weights") for group in keys.inside("config_groups").objects()]
        schemes = {(str(one.get("num_bits")), str(one.get("type"))) for one in groups}
        kept = ("ignore", "modules_to_not_convert", "ignored_layers")
        names = [name for key in kept for name in keys.strings(key) or ()]
        # A gate (of experts, of a shared one) is named in full, so that it is no gate_proj.
        covers_all = all(
            name.rstrip("$*").endswith("gate") or any(word in name for word in _NEVER_QUANTIZED) for name in names
        )
        is_fp8 = model.quantization_method == "fp8" or schemes == {("8", "float")}
        linear = 1.001 if is_fp8 and covers_all else None
    if linear is None:
        if checkpoint_bytes is None:
            what = "the size of its encoder" if encodes else f"what {model.quantization_method} makes of its weights"
            raise PlanError(f"{what} is not known without the size of the checkpoint's files")
        share = part.bytes(2, 2) / _elements(model, EngineFlags(), 0).bytes(2, 2)
        # The bounds have what a checkpoint has beside the model, or kernels pad.
        is_quantized, likely = bool(model.quantization), checkpoint_bytes * share
        if not is_quantized:
            likely *= element / MODEL_BYTES.get(model.dtype or "bfloat16", 2)
        beside = bool(model.family.encodes) or any(model.text.optional(key, 0) for key in _PREDICTION_KEYS)
        low, high = (0.9 if beside else 0.97) * likely, (1.08 if is_quantized else 1.03) * likely
        if flags.quantization == "fp8" and not is_quantized:
            low, likely = low / 2, 0.6 * likely
        if share < 1:  # an encoder may be whole on every rank
            low = 0.97 * low
            high = 1.03 * high + bool(model.family.encodes) * min(checkpoint_bytes // 10, 2 * GIB)
        why = "the checkpoint's size, divided over the ranks"
    else:
        likely, why = part.bytes(linear, element), "by the family's own shapes"
        # The latent projections are kept a second time.
        low, high = 0.997 * likely, 1.012 * likely + (GIB // 2 if model.family.mixer == "latent" else 0)
    # One table of rotary positions, or two, or one with several times the rows.
    table = model.rotary_rows * model.head_size * element
    return estimated(round(low), round(1.001 * likely + table), round(high + 2 * table) + GIB // 4, why)


def _elements(model: Model, flags: EngineFlags, stage: int) -> _Elements:
    text, ranks = model.text, flags.tensor_parallel_size
    first, last = stage_bounds(model.layers, flags.pipeline_parallel_size)[stage]
    hidden, elements = text.number("hidden_size"), _Elements(0, 0)
    for layer in range(first, last):
        elements += _mixer(model, layer, hidden, ranks) + _feed_forward(model, layer, hidden, flags)
    rows = ceil_div(text.number("vocab_size"), _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    is_first, is_last, tied = stage == 0, last == model.layers, bool(text.get("tie_word_embeddings"))
    is_first |= model.model_type.startswith(_TABLE_IN_EVERY_STAGE)
    tables = int(is_first or (is_last and tied)) + int(is_last and not tied)
    return elements + _Elements(0, tables * ceil_div(rows, ranks) * hidden)


def _mixer(model: Model, layer: int, hidden: int, ranks: int) -> _Elements:
    text, heads = model.text, model.heads // ranks
    if model.family.mixer == "latent":
        numbers = ("qk_rope_head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        rope, latent, nope, value = map(text.number, numbers)
        query_rank, queries = text.optional("q_lora_rank"), heads * (nope + rope)
        linear = hidden * queries if query_rank is None else query_rank * (hidden + queries)
        linear += hidden * (latent + rope) + heads * (nope + value) * latent + hidden * heads * value
        if model.is_sparse:
            width, index_heads = text.number("index_head_dim"), text.number("index_n_heads")
            linear += (query_rank or hidden) * index_heads * width + hidden * (width + index_heads)
        return _Elements(linear, 0)
    if model.linear[layer]:
        keys = text.number("linear_num_key_heads") * text.number("linear_key_head_dim") // ranks
        value_heads = text.number("linear_num_value_heads") // ranks
        values = value_heads * text.number("linear_value_head_dim")
        return _Elements(hidden * (2 * keys + 3 * values), 2 * value_heads * hidden)
    # A hybrid's queries come with a gate of their output.
    is_gated = model.family.mixer == "delta" and text.get("attn_output_gate") is not False
    width = model.head_size * ((2 + is_gated) * heads + 2 * rank_heads(model.kv_heads, ranks))
    return _Elements(hidden * width, 0)


def _feed_forward(model: Model, layer: int, hidden: int, flags: EngineFlags) -> _Elements:
    text, ranks = model.text, flags.tensor_parallel_size
    is_dense = not model.experts
    if model.experts:  # of whose layers some may have one feed-forward part alone
        listed = text.get("mlp_only_layers") or []
        if not isinstance(listed, list):
            raise text.refused("mlp_only_layers", "a list of layers is needed")
        every = text.optional("decoder_sparse_step") or text.optional("moe_layer_freq") or 1
        place = layer + (0 if text.get("n_routed_experts") is not None else 1)
        is_first = layer < (text.optional("first_k_dense_replace", 0) or 0)
        is_dense = is_first or layer in listed or place % every != 0
    if is_dense:
        return _Elements(3 * hidden * (text.number("intermediate_size") // ranks), 0)
    inner = text.optional("moe_intermediate_size") or text.number("intermediate_size")
    shared = text.optional("shared_expert_intermediate_size", 0) or (text.optional("n_shared_experts", 0) or 0) * inner
    spread = ranks * flags.data_parallel_size
    # Whole experts, of which the first ranks may have one more, or a part of each.
    experts = (
        ceil_div(model.experts, spread) * inner if flags.enable_expert_parallel else model.experts * inner // spread
    )
    return _Elements(3 * hidden * (experts + shared // ranks), model.experts * hidden)


def activation_of(model: Model, flags: EngineFlags) -> Figure:
    """Estimate the peak of a run of `max_num_batched_tokens` tokens that samples for `max_num_seqs` requests.

    Likely is what the second model runner, the newest version's default, holds on PyTorch's meta device; the upper
    bound is that of the first one, whose sampler keeps several copies of the logits. Raises PlanError: a key is
    missing, or makes no sense.
    """
    text, ranks = model.text, flags.tensor_parallel_size
    tokens, requests = flags.max_num_batched_tokens or 0, flags.max_num_seqs or 0
    element, hidden, chosen = MODEL_BYTES[flags.dtype or ""], text.number("hidden_size"), 0
    inner = experts = text.optional("moe_intermediate_size") or text.number("intermediate_size")
    if model.experts:
        inner, chosen = (
            text.optional("shared_expert_intermediate_size", 0) or 0,
            text.optional("num_experts_per_tok") or 1,
        )
    match model.family.mixer:  # the width of what one layer's attention or delta net projects a token to
        case "delta":
            keys = text.number("linear_num_key_heads") * text.number("linear_key_head_dim")
            width = 2 * (keys + text.number("linear_num_value_heads") * text.number("linear_value_head_dim"))
        case "latent":
            width = model.heads * (text.number("qk_nope_head_dim") + text.number("qk_rope_head_dim"))
        case "attention":
            width = (model.heads + 2 * model.kv_heads) * model.head_size
    passing = tokens * element * (5 * hidden + max(3 * inner, 4 * width) // ranks)
    logits, state = min(requests, tokens) * text.number("vocab_size"), tokens * hidden * element
    # Two buffers of fused experts, in which each token is once for each of its experts.
    buffers = tokens * element * chosen * (max(2 * experts // ranks, hidden) + max(experts // ranks, hidden))
    likely = max(passing, 4 * logits + state) + buffers + 36 * MIB
    first_runner = round(15.3 * logits) + 3 * state + 128 * MIB + buffers
    high = max(round(1.3 * passing) + 128 * MIB + 2 * buffers, first_runner)
    why = f"a profiling run of {tokens} tokens that samples for {requests} requests"
    return estimated(round(0.65 * passing), likely, high, why)
