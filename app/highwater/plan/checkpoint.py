"""The tensors of a checkpoint: names, shapes and bytes, from its files' headers or from what a config.json implies.

Names are those of Hugging Face checkpoints. Nothing here knows of ranks: `weights` says which rank holds what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from highwater.plan.errors import PlanError, short
from highwater.plan.json_file import Config
from highwater.plan.models.reading import MAX_NUMBER, language_config
from highwater.units import ceil_div

_MAX_RATIO: Final = 1_000_000
# Each is built: a config.json from elsewhere may name any number.
_MAX_TOWER_LAYERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    bits: int  # the size of one element
    # It is of a floating point type of 16 bits or more, so that vLLM loads it in the model's dtype.
    floating: bool = True

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size in the checkpoint."""
        return ceil_div(self.elements * self.bits, 8)


# Keys that only the weights need and that config.json files leave to the defaults of Transformers' classes.
_DEFAULTS: Mapping[str, Config] = {
    "gemma3_text": {"vocab_size": 262208, "rope_local_base_freq": 10000.0},
    "gemma2": {"vocab_size": 256000},
    "gemma": {"vocab_size": 256000},
    "qwen2_vl_text": {"vocab_size": 152064},
    "qwen2_5_vl_text": {"vocab_size": 152064},
}
# What a wrapper says at its top for all its parts.
_SHARED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config", "vocab_size")


def text_config(config: Config) -> Config:
    """Return the part of a config.json that describes the language model, with the defaults of its type."""
    read = language_config(config)
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    return {**_DEFAULTS.get(read.model_type, {}), **shared, **read.filled()}


def architecture(config: Config) -> str:
    """Return the architecture that a config.json names; raises PlanError where it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise PlanError(
            f"architectures is {names!r} in the config.json: it should be a list that names one architecture"
        )
    return names[0]


def whole(config: Config, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_NUMBER) -> int:
    """Return the first of several keys that is present, as a whole number.

    Raises:
        PlanError: None is present and there is no default, or the value is no whole number, too small or too large.
    """
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            right = f"a whole number of {least} to {most}"
            raise PlanError(f"{key} is {short(value)} in the config.json: it should be {right}")
        return value
    if default is None:
        raise PlanError(f"{' or '.join(keys)} is missing in the config.json: a whole number is needed")
    return default


def ratio(config: Config, *keys: str, default: float) -> float:
    """Return the first of several keys that is present, as a number above zero; raises PlanError for another value."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _MAX_RATIO:
            raise PlanError(
                f"{key} is {short(value)} in the config.json: it should be a number above 0, up to {_MAX_RATIO}"
            )
        return float(value)
    return default


def entries(config: Config, key: str) -> Sequence[Any]:
    """Return a list, empty where the key is absent; raises PlanError where the value is no list."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise PlanError(f"{key} is {short(value)} in the config.json: it should be a list")
    return value


def implied_tensors(config: Config) -> tuple[Tensor, ...]:
    """Return the tensors of a checkpoint with this config, in 16 bits and before any quantization.

    Raises:
        PlanError: The architecture is unknown, or a key is missing or makes no sense.
    """
    name = architecture(config)
    family = FAMILIES.get(name)
    if family is None:
        raise PlanError(
            f"architectures is {name!r} in the config.json: the weights of this architecture cannot be derived from"
            " a config.json; give the folder that holds its safetensors files"
        )
    return (*_vision(config), *_language(text_config(config), family, tied(config)))


def tied(config: Config) -> bool:
    """Return whether the output layer is the input embedding."""
    text = text_config(config)
    family = FAMILIES.get(architecture(config))
    default = family.tied if family else False
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", default)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The layout of the layers of related architectures."""

    gated: bool = True  # the feed-forward part has a gate beside its up projection
    norms: int = 2  # of the residual stream in one layer
    norm_bias: bool = False  # norms have a bias
    qkv_bias: bool | None = None  # biases of the query, key and value projections; None: as `attention_bias` says
    output_bias: bool | None = None  # a bias of the attention's output projection; None: as `attention_bias` says
    mlp_bias: bool | None = None  # biases of the feed-forward projections; None: as `mlp_bias` says
    head_bias: bool = False  # the output layer has a bias
    qk_norm: str = ""  # ``head``: queries and keys are normed head by head; ``width``: over all heads at once
    sinks: bool = False  # each head has an attention sink
    router_bias: bool = False  # the router and the experts have biases
    tied: bool = False  # the output layer is the input embedding where the config says nothing
    # the rows that a table of learned positions has beyond `max_position_embeddings`; None: no table.
    positions: int | None = None
    attention: str = "full"  # ``full``, ``mla`` or ``gdn`` (three gated delta nets to one full attention)


_BIASED: Final = partial(Family, gated=False, norm_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True)
_BY_FAMILY: Final = {
    Family(): """
        LlamaForCausalLM LLaMAForCausalLM XverseForCausalLM AquilaModel AquilaForCausalLM CwmForCausalLM
        MistralForCausalLM Mistral3ForConditionalGeneration MixtralForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
        InternLM2ForCausalLM InternLM3ForCausalLM BaichuanForCausalLM BaiChuanForCausalLM DeciLMForCausalLM
        Phi3ForCausalLM Ernie4_5ForCausalLM SmolLM3ForCausalLM Llama4ForCausalLM Llama4ForConditionalGeneration
        DeepseekForCausalLM
    """,
    Family(qkv_bias=True, output_bias=False): """
        Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
        SeedOssForCausalLM GlmForCausalLM
    """,
    Family(qk_norm="head"): """
        Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
        Exaone4ForCausalLM
    """,
    Family(attention="gdn", qk_norm="head"): """
        Qwen3NextForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
    """,
    Family(attention="mla"): "DeepseekV2ForCausalLM DeepseekV3ForCausalLM KimiK2ForCausalLM",
    Family(tied=True): "GemmaForCausalLM",
    Family(tied=True, norms=4): "Gemma2ForCausalLM",
    Family(tied=True, norms=4, qk_norm="head"): "Gemma3ForCausalLM Gemma3ForConditionalGeneration",
    Family(norms=1, tied=True): "CohereForCausalLM Cohere2ForCausalLM",
    Family(norms=4, qkv_bias=True, output_bias=False): "Glm4ForCausalLM",
    Family(norm_bias=True): "StableLmForCausalLM",
    Family(norms=0): "OlmoForCausalLM",
    Family(qk_norm="width"): "Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM",
    Family(qkv_bias=True, output_bias=True, sinks=True, router_bias=True): "GptOssForCausalLM",
    _BIASED(): "GPTNeoXForCausalLM",
    _BIASED(norms=1, head_bias=True): "PhiForCausalLM",
    _BIASED(tied=True): "Starcoder2ForCausalLM",
    _BIASED(tied=True, positions=0): "GPT2LMHeadModel",
    _BIASED(tied=True, positions=2): "OPTForCausalLM",
}
FAMILIES: Final = {name: family for family, names in _BY_FAMILY.items() for name in names.split()}


def _language(text: Config, family: Family, tied_head: bool) -> Iterator[Tensor]:
    hidden = whole(text, "hidden_size", "n_embd", "d_model")
    vocab = whole(text, "vocab_size")
    yield _weight("model.embed_tokens", vocab, hidden)
    if family.positions is not None:
        rows = whole(text, "max_position_embeddings", "n_positions") + family.positions
        yield _weight("model.embed_positions", rows, hidden)
    for layer in range(whole(text, "num_hidden_layers", "n_layer")):
        yield from _layer(text, family, layer, f"model.layers.{layer}", hidden)
    if family.norms:
        yield from _norm("model.norm", hidden, family)
    if not tied_head:
        yield _weight("lm_head", vocab, hidden)
    if family.head_bias:
        yield Tensor("lm_head.bias", (vocab,), 16)


def _layer(text: Config, family: Family, layer: int, name: str, hidden: int) -> Iterator[Tensor]:
    if family.attention == "mla":
        yield from _latent_attention(text, f"{name}.self_attn", hidden)
    elif family.attention == "gdn" and not _is_full_attention(text, layer):
        yield from _delta_net(text, f"{name}.linear_attn", hidden)
    else:
        yield from _attention(text, family, f"{name}.self_attn", hidden)
    yield from _feed_forward(text, family, layer, f"{name}.mlp", hidden)
    for norm in range(family.norms):
        yield from _norm(f"{name}.norm_{norm}", hidden, family)


def heads_of(text: Config) -> tuple[int, int, int]:
    """Return the attention heads, the KV heads and the width of a head; one head where a model has no attention."""
    heads = whole(text, "num_attention_heads", "n_head", default=1)  # Pure Mamba has none.
    kv_heads = whole(text, "num_key_value_heads", default=heads)
    hidden = whole(text, "hidden_size", "n_embd", "d_model")
    return heads, kv_heads, whole(text, "head_dim", default=max(1, hidden // heads))


def _attention(text: Config, family: Family, name: str, hidden: int) -> Iterator[Tensor]:
    heads, kv_heads, width = heads_of(text)
    declared = bool(text.get("attention_bias") or text.get("use_bias"))
    qkv_bias = declared or bool(text.get("use_qkv_bias")) if family.qkv_bias is None else family.qkv_bias
    output_bias = declared if family.output_bias is None else family.output_bias
    # A gated output (Qwen3-Next, Qwen3.5) doubles the query projection.
    queries = 2 * heads if family.attention == "gdn" and text.get("attn_output_gate", True) else heads
    yield from _linear(f"{name}.q_proj", queries * width, hidden, bias=qkv_bias)
    yield from _linear(f"{name}.k_proj", kv_heads * width, hidden, bias=qkv_bias)
    yield from _linear(f"{name}.v_proj", kv_heads * width, hidden, bias=qkv_bias)
    yield from _linear(f"{name}.o_proj", hidden, heads * width, bias=output_bias)
    if family.qk_norm:
        wide = family.qk_norm == "width"
        yield Tensor(f"{name}.q_norm.weight", (heads * width if wide else width,), 16)
        yield Tensor(f"{name}.k_norm.weight", (kv_heads * width if wide else width,), 16)
    if family.sinks:
        yield Tensor(f"{name}.sinks", (heads,), 16)


def _latent_attention(text: Config, name: str, hidden: int) -> Iterator[Tensor]:
    heads = whole(text, "num_attention_heads")
    latent, rope = whole(text, "kv_lora_rank"), whole(text, "qk_rope_head_dim")
    nope, value = whole(text, "qk_nope_head_dim"), whole(text, "v_head_dim")
    query_rank = whole(text, "q_lora_rank", default=0, least=0)
    if query_rank:
        yield _weight(f"{name}.q_a_proj", query_rank, hidden)
        yield Tensor(f"{name}.q_a_layernorm.weight", (query_rank,), 16)
        yield _weight(f"{name}.q_b_proj", heads * (nope + rope), query_rank)
    else:
        yield _weight(f"{name}.q_proj", heads * (nope + rope), hidden)
    yield _weight(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden)
    yield Tensor(f"{name}.kv_a_layernorm.weight", (latent,), 16)
    yield _weight(f"{name}.kv_b_proj", heads * (nope + value), latent)
    yield _weight(f"{name}.o_proj", hidden, heads * value)


def _is_full_attention(text: Config, layer: int) -> bool:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return bool(kinds[layer] == "full_attention")
    return (layer + 1) % whole(text, "full_attention_interval", default=4) == 0


def _delta_net(text: Config, name: str, hidden: int) -> Iterator[Tensor]:
    keys = whole(text, "linear_num_key_heads") * whole(text, "linear_key_head_dim")
    value_heads = whole(text, "linear_num_value_heads")
    values = value_heads * whole(text, "linear_value_head_dim")
    yield _weight(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
    yield _weight(f"{name}.in_proj_ba", 2 * value_heads, hidden)
    yield Tensor(f"{name}.conv1d.weight", (2 * keys + values, 1, whole(text, "linear_conv_kernel_dim")), 16)
    yield Tensor(f"{name}.A_log", (value_heads,), 32, floating=False)
    yield Tensor(f"{name}.dt_bias", (value_heads,), 32, floating=False)
    yield Tensor(f"{name}.norm.weight", (whole(text, "linear_value_head_dim"),), 16)
    yield _weight(f"{name}.out_proj", hidden, values)


def _feed_forward(text: Config, family: Family, layer: int, name: str, hidden: int) -> Iterator[Tensor]:
    experts = whole(text, "num_experts", "num_local_experts", "n_routed_experts", default=0, least=0)
    if not experts or _is_dense(text, layer):
        inner = whole(text, "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        yield from _mlp(text, family, name, hidden, inner)
        return
    inner = whole(text, "moe_intermediate_size", "intermediate_size")
    yield _weight(f"{name}.gate", experts, hidden)
    if family.router_bias:
        yield Tensor(f"{name}.gate.bias", (experts,), 16)
    if text.get("topk_method") == "noaux_tc" or text.get("scoring_func") == "sigmoid":
        yield Tensor(f"{name}.gate.e_score_correction_bias", (experts,), 32, floating=False)
    # All experts of a layer as one tensor each, as vLLM keeps them: thousands of small ones would only take time.
    part = f"{name}.experts"
    yield from _linear(f"{part}.gate_proj", experts * inner, hidden, bias=family.router_bias)
    yield from _linear(f"{part}.up_proj", experts * inner, hidden, bias=family.router_bias)
    yield from _linear(f"{part}.down_proj", experts * hidden, inner, bias=family.router_bias)
    yield from _shared_experts(text, family, name, hidden, inner)


def _shared_experts(text: Config, family: Family, name: str, hidden: int, inner: int) -> Iterator[Tensor]:
    gated_size = whole(text, "shared_expert_intermediate_size", default=0, least=0)
    if gated_size:
        yield from _mlp(text, family, f"{name}.shared_expert", hidden, gated_size)
        yield _weight(f"{name}.shared_expert_gate", 1, hidden)
    elif str(text.get("model_type", "")).startswith("llama4"):
        yield from _mlp(text, family, f"{name}.shared_expert", hidden, inner)
    elif shared := whole(text, "n_shared_experts", default=0, least=0):
        yield from _mlp(text, family, f"{name}.shared_experts", hidden, shared * inner)


def _is_dense(text: Config, layer: int) -> bool:
    if layer < whole(text, "first_k_dense_replace", default=0, least=0):
        return True
    if layer in entries(text, "mlp_only_layers"):
        return True
    if str(text.get("model_type", "")).startswith("llama4"):
        if text.get("moe_layers") is not None:
            return layer not in entries(text, "moe_layers")
        return (layer + 1) % whole(text, "interleave_moe_layer_step", default=1) != 0
    if "n_routed_experts" in text:
        return layer % whole(text, "moe_layer_freq", default=1) != 0
    return (layer + 1) % whole(text, "decoder_sparse_step", default=1) != 0


def _mlp(text: Config, family: Family, name: str, hidden: int, inner: int) -> Iterator[Tensor]:
    bias = bool(text.get("mlp_bias")) if family.mlp_bias is None else family.mlp_bias
    if family.gated:
        yield from _linear(f"{name}.gate_proj", inner, hidden, bias=bias)
    yield from _linear(f"{name}.up_proj", inner, hidden, bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, bias=bias)


def _vision(config: Config) -> Iterator[Tensor]:
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return
    kind = architecture(config)
    text_hidden = whole(text_config(config), "hidden_size")
    if kind.startswith("Qwen"):
        yield from _qwen_vision(tower, kind, text_hidden)
    elif kind == "Llama4ForConditionalGeneration":
        yield from _llama4_vision(tower, text_hidden)
    elif kind == "Mistral3ForConditionalGeneration":
        yield from _pixtral(config, tower, text_hidden)
    elif kind == "Gemma3ForConditionalGeneration":
        yield from _siglip(tower, text_hidden)


def _block(name: str, hidden: int, inner: int, *, gated: bool = False, bias: bool = True) -> Iterator[Tensor]:
    """One layer of a vision transformer."""
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from _linear(f"{name}.self_attn.{part}", hidden, hidden, bias=bias)
    if gated:
        yield from _linear(f"{name}.mlp.gate_proj", inner, hidden, bias=bias)
    yield from _linear(f"{name}.mlp.fc1", inner, hidden, bias=bias)
    yield from _linear(f"{name}.mlp.fc2", hidden, inner, bias=bias)
    for norm in ("layer_norm1", "layer_norm2"):
        yield Tensor(f"{name}.{norm}.weight", (hidden,), 16)
        if bias:
            yield Tensor(f"{name}.{norm}.bias", (hidden,), 16)


def _siglip(tower: Config, text_hidden: int) -> Iterator[Tensor]:
    hidden, inner = whole(tower, "hidden_size"), whole(tower, "intermediate_size")
    patch = whole(tower, "patch_size")
    name = "vision_tower.vision_model"
    yield Tensor(f"{name}.embeddings.patch_embedding.weight", (hidden, 3, patch, patch), 16)
    yield Tensor(f"{name}.embeddings.patch_embedding.bias", (hidden,), 16)
    yield _weight(f"{name}.embeddings.position_embedding", (whole(tower, "image_size") // patch) ** 2, hidden)
    for layer in range(whole(tower, "num_hidden_layers", most=_MAX_TOWER_LAYERS)):
        yield from _block(f"{name}.encoder.layers.{layer}", hidden, inner)
    yield Tensor(f"{name}.post_layernorm.weight", (hidden,), 16)
    yield Tensor(f"{name}.post_layernorm.bias", (hidden,), 16)
    yield Tensor("multi_modal_projector.mm_input_projection_weight", (hidden, text_hidden), 16)
    yield Tensor("multi_modal_projector.mm_soft_emb_norm.weight", (hidden,), 16)


def _pixtral(config: Config, tower: Config, text_hidden: int) -> Iterator[Tensor]:
    hidden, inner = whole(tower, "hidden_size"), whole(tower, "intermediate_size")
    patch = whole(tower, "patch_size")
    yield Tensor("vision_tower.patch_conv.weight", (hidden, 3, patch, patch), 16)
    yield Tensor("vision_tower.ln_pre.weight", (hidden,), 16)
    for layer in range(whole(tower, "num_hidden_layers", most=_MAX_TOWER_LAYERS)):
        yield from _block(f"vision_tower.transformer.layers.{layer}", hidden, inner, gated=True, bias=False)
    merge = whole(config, "spatial_merge_size", default=2)
    projector = "multi_modal_projector"
    yield Tensor(f"{projector}.norm.weight", (hidden,), 16)
    yield _weight(f"{projector}.patch_merger.merging_layer", hidden, hidden * merge * merge)
    yield _weight(f"{projector}.linear_1", text_hidden, hidden)
    yield _weight(f"{projector}.linear_2", text_hidden, text_hidden)


def _llama4_vision(tower: Config, text_hidden: int) -> Iterator[Tensor]:
    hidden, inner = whole(tower, "hidden_size"), whole(tower, "intermediate_size")
    patch = whole(tower, "patch_size")
    patches = (whole(tower, "image_size") // patch) ** 2 + 1
    yield _weight("vision_model.patch_embedding.linear", hidden, 3 * patch * patch)
    yield Tensor("vision_model.positional_embedding_vlm", (patches, hidden), 16)
    for layer in range(whole(tower, "num_hidden_layers", most=_MAX_TOWER_LAYERS)):
        yield from _block(f"vision_model.model.layers.{layer}", hidden, inner)
    shuffled = int(hidden / ratio(tower, "pixel_shuffle_ratio", default=0.5) ** 2)
    yield _weight("vision_model.vision_adapter.mlp.fc1", whole(tower, "projector_input_dim", default=4096), shuffled)
    output = whole(tower, "vision_output_dim", "projector_output_dim", default=4096)
    yield _weight("vision_model.vision_adapter.mlp.fc2", output, whole(tower, "projector_input_dim", default=4096))
    yield _weight("multi_modal_projector.linear_1", text_hidden, output)


def _qwen_vision(tower: Config, kind: str, text_hidden: int) -> Iterator[Tensor]:
    first = kind == "Qwen2VLForConditionalGeneration"
    hidden = whole(tower, "embed_dim") if first else whole(tower, "hidden_size")
    inner = int(hidden * ratio(tower, "mlp_ratio", default=4)) if first else whole(tower, "intermediate_size")
    patch, frames = whole(tower, "patch_size"), whole(tower, "temporal_patch_size", default=2)
    merged = hidden * whole(tower, "spatial_merge_size", default=2) ** 2
    gated = kind == "Qwen2_5_VLForConditionalGeneration"
    later = not first and not gated
    yield Tensor("visual.patch_embed.proj.weight", (hidden, 3, frames, patch, patch), 16)
    if later:
        yield Tensor("visual.patch_embed.proj.bias", (hidden,), 16)
        yield _weight("visual.pos_embed", whole(tower, "num_position_embeddings", default=2304), hidden)
    for layer in range(whole(tower, "depth", most=_MAX_TOWER_LAYERS)):
        yield from _block(f"visual.blocks.{layer}", hidden, inner, gated=gated)
    mergers = 1 + (len(entries(tower, "deepstack_visual_indexes")) if later else 0)
    for merger in range(mergers):
        yield from _linear(f"visual.merger_{merger}.fc1", merged, merged, bias=True)
        yield from _linear(f"visual.merger_{merger}.fc2", text_hidden, merged, bias=True)
        yield Tensor(f"visual.merger_{merger}.norm.weight", (merged if merger else hidden,), 16)


def _weight(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(f"{name}.weight", (rows, columns), 16)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[Tensor]:
    yield _weight(name, rows, columns)
    if bias:
        yield Tensor(f"{name}.bias", (rows,), 16)


def _norm(name: str, width: int, family: Family) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), 16)
    if family.norm_bias:
        yield Tensor(f"{name}.bias", (width,), 16)
