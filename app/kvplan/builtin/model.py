"""The families that the built-in plans, and what a config.json says of a model of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvplan.builtin.config import Keys, longest_of, text_keys
from kvplan.errors import PlanError

_UNKNOWN: Final = "is not among those that the built-in plans"
_MAX_LAYERS: Final = 4096
_EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The caches of the layers: keys and values, one latent vector (MLA), or a gated delta net's state in most."""

    keeps: Literal["attention", "latent", "delta"] = "attention"
    encodes: tuple[str, ...] = ()  # what an encoder beside it takes
    wraps: tuple[str, ...] = ()  # the model types that a wrapper may have inside; empty: its own


_IMAGES, _VIDEOS = ("image",), ("image", "video")
_FAMILIES: Final = {
    Family(): """
        CohereForCausalLM Cohere2ForCausalLM Ernie4_5ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM
        Glm4ForCausalLM Glm4MoeForCausalLM GptOssForCausalLM GraniteForCausalLM LlamaForCausalLM
        MiniMaxM2ForCausalLM MistralForCausalLM MixtralForCausalLM Phi3ForCausalLM
        Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
    """,
    Family(encodes=_IMAGES): "Gemma3ForConditionalGeneration",
    Family(encodes=_IMAGES, wraps=("mistral",)): "Mistral3ForConditionalGeneration",
    Family(encodes=_VIDEOS): """
        Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    """,
    Family(keeps="latent"): """
        DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM
    """,
    Family(keeps="delta"): "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
    Family(keeps="delta", encodes=_VIDEOS): "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration",
}
FAMILIES: Final = {name: family for family, names in _FAMILIES.items() for name in names.split()}
# Keys that change what a layer keeps, in ways that are not followed here.
_NOT_PLANNED: Final = (
    *("attention_chunk_size", "compress_ratios", "dual_chunk_attention_config", "index_topk_freq"),
    *("index_topk_pattern", "interleaved_sliding_window", "num_kv_shared_layers", "per_layer_config", "use_cla"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as its memory goes; every number is a whole model's."""

    architecture: str
    family: Family
    model_type: str
    text: Keys
    layers: int
    heads: int
    kv_heads: int  # 1 where one latent vector serves all heads
    head_size: int  # of a key and of a value; of the latent vector
    windows: tuple[int | None, ...]  # of each layer, in tokens; None: it keeps all
    linear: tuple[bool, ...]  # which layers are gated delta nets
    is_sparse: bool  # an indexer picks the tokens that MLA attends to
    experts: int  # of a layer; 0: dense
    longest: int
    length_key: str
    rotary_rows: int  # the positions of a table of cosines and sines
    dtype: str | None  # of the checkpoint
    quantization: Keys  # no keys: weights in the model's dtype
    quantization_method: str | None


def read_model(config: Mapping[str, Any]) -> Model:
    """Raises PlanError: the built-in does not plan it, or a key makes no sense."""
    outer = Keys(config)
    name, family = _family(outer)
    model_type, text = text_keys(outer)
    if family.wraps and model_type not in family.wraps:
        raise text.refused("model_type", f"inside {name} it {_UNKNOWN} ({', '.join(family.wraps)})")
    for key in _NOT_PLANNED:
        # A frequency of 1 leaves every layer as it is.
        if (value := text.get(key)) and (value is True or value != 1):
            raise text.refused(key, "the built-in does not plan models that set it")
    layers, heads = text.number("num_hidden_layers"), text.number("num_attention_heads")
    if layers > _MAX_LAYERS:
        raise text.refused("num_hidden_layers", f"{_MAX_LAYERS} at most; no model has as many")
    is_latent = family.keeps == "latent"
    longest, length_key, rotary_rows = longest_of(model_type, text)
    quantization = outer.inside("quantization_config") or text.inside("quantization_config")
    method = quantization.get("quant_method")
    dtypes = (keys.get(key) for keys in (outer, text) for key in ("dtype", "torch_dtype"))
    return Model(
        architecture=name,
        family=family,
        model_type=model_type,
        text=text,
        layers=layers,
        heads=heads,
        kv_heads=1 if is_latent else _kv_heads(text, heads),
        head_size=sum(map(text.number, ("kv_lora_rank", "qk_rope_head_dim"))) if is_latent else _head_size(text, heads),
        windows=(None,) * layers if family.keeps != "attention" else _windows(model_type, text, layers),
        linear=_linear(text, layers) if family.keeps == "delta" else (False,) * layers,
        is_sparse=is_latent and text.optional("index_topk") is not None,
        experts=next((count for key in _EXPERT_KEYS if (count := text.optional(key, 0))), 0),
        longest=longest,
        length_key=length_key,
        rotary_rows=rotary_rows,
        dtype=next((str(one).removeprefix("torch.") for one in dtypes if one is not None), None),
        quantization=quantization,
        quantization_method=None if method is None else str(method),
    )


def _family(config: Keys) -> tuple[str, Family]:
    names = config.strings("architectures") or ()
    known = next((name for name in names if name in FAMILIES), None)
    if known is None:
        shown = repr(names[0][:100]) if names else "absent"
        raise PlanError(f"architectures: {shown} {_UNKNOWN}")
    return known, FAMILIES[known]


def _kv_heads(text: Keys, heads: int) -> int:
    kv_heads = text.number("num_key_value_heads")
    if kv_heads > heads or heads % kv_heads:
        raise text.refused("num_key_value_heads", f"it must divide the {heads} attention heads")
    return kv_heads


def _head_size(text: Keys, heads: int) -> int:
    if text.get("kv_lora_rank") is not None:
        raise text.refused("kv_lora_rank", "MLA is not known for this architecture")
    given, hidden = text.optional("head_dim"), text.number("hidden_size")
    if given is None and hidden % heads:
        raise text.refused("hidden_size", f"{heads} heads must divide it, or head_dim must be given")
    return given or hidden // heads


def _types(text: Keys, layers: int, known: tuple[str, ...], pattern: int | None) -> tuple[str, ...] | None:
    """Return each layer's type: as listed, else every `pattern`-th full; None: neither."""
    listed = text.strings("layer_types")
    if listed is None:
        return (pattern and tuple(known[0] if (i + 1) % pattern else _FULL for i in range(layers))) or None
    if len(listed) != layers:
        raise text.refused("layer_types", f"one for each of the {layers} layers is needed, not {len(listed)}")
    if odd := sorted({*listed} - {*known}):
        raise PlanError(f"{text.prefix}layer_types: {odd[0][:100]!r} {_UNKNOWN} ({', '.join(known)})")
    return listed


def _windows(model_type: str, text: Keys, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: by its type, else that of the whole model."""
    if model_type.startswith("qwen"):
        # Their classes throw the window away unless `use_sliding_window` is set; vLLM takes none in some layers only.
        if text.get("use_sliding_window"):
            raise text.refused("use_sliding_window", "the built-in plans these models without their window")
        _types(text, layers, (_FULL,), None)
        return (None,) * layers
    if model_type == "gpt_oss":  # models/gpt_oss.py goes by the place, whatever is listed
        text.pop("layer_types", None)
    window = text.optional("sliding_window", 0) or None
    types = _types(text, layers, (_SLIDING, _FULL), text.optional("sliding_window_pattern"))
    if types is None:
        return (window,) * layers
    if window is None and _SLIDING in types:
        raise text.refused("sliding_window", "a window is needed, as its layer_types slide")
    return tuple(window if one == _SLIDING else None for one in types)


def _linear(text: Keys, layers: int) -> tuple[bool, ...]:
    types = _types(text, layers, (_LINEAR, _FULL), text.optional("full_attention_interval"))
    if types is None:
        raise text.refused("layer_types", "one for each layer is needed, or full_attention_interval")
    if set(types) != {_LINEAR, _FULL}:
        raise text.refused("layer_types", f"both {_LINEAR} and {_FULL} are needed in a hybrid model")
    return tuple(one == _LINEAR for one in types)
