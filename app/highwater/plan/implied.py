"""The tensors that a config.json implies: the language model's, by the family of its architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from highwater.plan.checkpoint import Tensor, architecture, entries, heads_of, module, text_config, weight, whole
from highwater.plan.json_file import ConfigJson
from highwater.plan.vision_towers import tower_tensors
from kvplan.errors import PlanError


def implied_tensors(config: ConfigJson) -> tuple[Tensor, ...]:
    """Return the tensors of a checkpoint with this config, in 16 bits and before any quantization.

    Raises PlanError: the architecture is unknown, or a key is missing or makes no sense.
    """
    name = architecture(config)
    family = FAMILIES.get(name)
    if family is None:
        raise PlanError(
            f"architectures is {name!r} in the config.json: the weights of this architecture cannot be derived from"
            " a config.json; give the folder that holds its safetensors files"
        )
    return (*tower_tensors(config), *_language(text_config(config), family, tied(config)))


def tied(config: ConfigJson) -> bool:
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


def _language(text: ConfigJson, family: Family, tied_head: bool) -> Iterator[Tensor]:
    hidden = whole(text, "hidden_size", "n_embd", "d_model")
    vocab = whole(text, "vocab_size")
    yield weight("model.embed_tokens", vocab, hidden)
    if family.positions is not None:
        rows = whole(text, "max_position_embeddings", "n_positions") + family.positions
        yield weight("model.embed_positions", rows, hidden)
    for layer in range(whole(text, "num_hidden_layers", "n_layer")):
        yield from _layer(text, family, layer, f"model.layers.{layer}", hidden)
    if family.norms:
        yield from module("model.norm", hidden, bias=family.norm_bias)
    if not tied_head:
        yield weight("lm_head", vocab, hidden)
    if family.head_bias:
        yield Tensor("lm_head.bias", (vocab,), 16)


def _layer(text: ConfigJson, family: Family, layer: int, name: str, hidden: int) -> Iterator[Tensor]:
    if family.attention == "mla":
        yield from _latent_attention(text, f"{name}.self_attn", hidden)
    elif family.attention == "gdn" and not _is_full_attention(text, layer):
        yield from _delta_net(text, f"{name}.linear_attn", hidden)
    else:
        yield from _attention(text, family, f"{name}.self_attn", hidden)
    yield from _feed_forward(text, family, layer, f"{name}.mlp", hidden)
    for norm in range(family.norms):
        yield from module(f"{name}.norm_{norm}", hidden, bias=family.norm_bias)


def _attention(text: ConfigJson, family: Family, name: str, hidden: int) -> Iterator[Tensor]:
    heads, kv_heads, width = heads_of(text)
    declared = bool(text.get("attention_bias") or text.get("use_bias"))
    qkv_bias = declared or bool(text.get("use_qkv_bias")) if family.qkv_bias is None else family.qkv_bias
    output_bias = declared if family.output_bias is None else family.output_bias
    # A gated output (Qwen3-Next, Qwen3.5) doubles the query projection.
    queries = 2 * heads if family.attention == "gdn" and text.get("attn_output_gate", True) else heads
    for part, rows in (("q_proj", queries), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        yield from module(f"{name}.{part}", rows * width, hidden, bias=qkv_bias)
    yield from module(f"{name}.o_proj", hidden, heads * width, bias=output_bias)
    if family.qk_norm:
        wide = family.qk_norm == "width"
        yield weight(f"{name}.q_norm", heads * width if wide else width)
        yield weight(f"{name}.k_norm", kv_heads * width if wide else width)
    if family.sinks:
        yield Tensor(f"{name}.sinks", (heads,), 16)


def _latent_attention(text: ConfigJson, name: str, hidden: int) -> Iterator[Tensor]:
    heads = whole(text, "num_attention_heads")
    latent, rope = whole(text, "kv_lora_rank"), whole(text, "qk_rope_head_dim")
    nope, value = whole(text, "qk_nope_head_dim"), whole(text, "v_head_dim")
    query_rank = whole(text, "q_lora_rank", default=0, least=0)
    if query_rank:
        yield weight(f"{name}.q_a_proj", query_rank, hidden)
        yield weight(f"{name}.q_a_layernorm", query_rank)
        yield weight(f"{name}.q_b_proj", heads * (nope + rope), query_rank)
    else:
        yield weight(f"{name}.q_proj", heads * (nope + rope), hidden)
    yield weight(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden)
    yield weight(f"{name}.kv_a_layernorm", latent)
    yield weight(f"{name}.kv_b_proj", heads * (nope + value), latent)
    yield weight(f"{name}.o_proj", hidden, heads * value)


def _is_full_attention(text: ConfigJson, layer: int) -> bool:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return bool(kinds[layer] == "full_attention")
    return (layer + 1) % whole(text, "full_attention_interval", default=4) == 0


def _delta_net(text: ConfigJson, name: str, hidden: int) -> Iterator[Tensor]:
    keys = whole(text, "linear_num_key_heads") * whole(text, "linear_key_head_dim")
    value_heads = whole(text, "linear_num_value_heads")
    values = value_heads * whole(text, "linear_value_head_dim")
    yield weight(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
    yield weight(f"{name}.in_proj_ba", 2 * value_heads, hidden)
    yield weight(f"{name}.conv1d", 2 * keys + values, 1, whole(text, "linear_conv_kernel_dim"))
    yield Tensor(f"{name}.A_log", (value_heads,), 32, floating=False)
    yield Tensor(f"{name}.dt_bias", (value_heads,), 32, floating=False)
    yield weight(f"{name}.norm", whole(text, "linear_value_head_dim"))
    yield weight(f"{name}.out_proj", hidden, values)


def _feed_forward(text: ConfigJson, family: Family, layer: int, name: str, hidden: int) -> Iterator[Tensor]:
    experts = whole(text, "num_experts", "num_local_experts", "n_routed_experts", default=0, least=0)
    if not experts or _is_dense(text, layer):
        inner = whole(text, "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        yield from _mlp(text, family, name, hidden, inner)
        return
    inner = whole(text, "moe_intermediate_size", "intermediate_size")
    yield from module(f"{name}.gate", experts, hidden, bias=family.router_bias)
    if text.get("topk_method") == "noaux_tc" or text.get("scoring_func") == "sigmoid":
        yield Tensor(f"{name}.gate.e_score_correction_bias", (experts,), 32, floating=False)
    # All experts of a layer as one tensor each, as vLLM keeps them: thousands of small ones would only take time.
    for part in ("gate_proj", "up_proj"):
        yield from module(f"{name}.experts.{part}", experts * inner, hidden, bias=family.router_bias)
    yield from module(f"{name}.experts.down_proj", experts * hidden, inner, bias=family.router_bias)
    yield from _shared_experts(text, family, name, hidden, inner)


def _shared_experts(text: ConfigJson, family: Family, name: str, hidden: int, inner: int) -> Iterator[Tensor]:
    gated_size = whole(text, "shared_expert_intermediate_size", default=0, least=0)
    if gated_size:
        yield from _mlp(text, family, f"{name}.shared_expert", hidden, gated_size)
        yield weight(f"{name}.shared_expert_gate", 1, hidden)
    elif str(text.get("model_type", "")).startswith("llama4"):
        yield from _mlp(text, family, f"{name}.shared_expert", hidden, inner)
    elif shared := whole(text, "n_shared_experts", default=0, least=0):
        yield from _mlp(text, family, f"{name}.shared_experts", hidden, shared * inner)


def _is_dense(text: ConfigJson, layer: int) -> bool:
    if layer < whole(text, "first_k_dense_replace", default=0, least=0) or layer in entries(text, "mlp_only_layers"):
        return True
    if str(text.get("model_type", "")).startswith("llama4"):
        if text.get("moe_layers") is not None:
            return layer not in entries(text, "moe_layers")
        return (layer + 1) % whole(text, "interleave_moe_layer_step", default=1) != 0
    if "n_routed_experts" in text:
        return layer % whole(text, "moe_layer_freq", default=1) != 0
    return (layer + 1) % whole(text, "decoder_sparse_step", default=1) != 0


def _mlp(text: ConfigJson, family: Family, name: str, hidden: int, inner: int) -> Iterator[Tensor]:
    bias = bool(text.get("mlp_bias")) if family.mlp_bias is None else family.mlp_bias
    for part in ("gate_proj", "up_proj") if family.gated else ("up_proj",):
        yield from module(f"{name}.{part}", inner, hidden, bias=bias)
    yield from module(f"{name}.down_proj", hidden, inner, bias=bias)
