"""The families that the built-in plans, and what a config.json says of a model of one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvplan import PlanError, short

MODEL_BYTES: Final = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_UNKNOWN: Final = "is not among those that the built-in plans"
_MAX_LAYERS: Final = 4096
_EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The caches of its layers: keys and values, one latent vector (MLA), or mostly a gated delta net's state."""

    mixer: Literal["attention", "latent", "delta"] = "attention"
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
    Family(mixer="latent"): """
        DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM
    """,
    Family(mixer="delta"): "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
    Family(mixer="delta", encodes=_VIDEOS): "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration",
}
FAMILIES: Final = {name: family for family, names in _FAMILIES.items() for name in names.split()}
# Keys that change what a layer keeps, in ways that the built-in does not follow.
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
    names = outer.strings("architectures") or ()
    if (name := next((one for one in names if one in FAMILIES), None)) is None:
        raise PlanError(f"architectures: {short(names[0]) if names else 'absent'} {_UNKNOWN}")
    family = FAMILIES[name]
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
    is_latent = family.mixer == "latent"
    if is_latent:
        kv_heads, head_size = 1, text.number("kv_lora_rank") + text.number("qk_rope_head_dim")
    else:
        if text.get("kv_lora_rank") is not None:
            raise text.refused("kv_lora_rank", "MLA is not known for this architecture")
        kv_heads, given = text.number("num_key_value_heads"), text.optional("head_dim")
        hidden = text.number("hidden_size")
        if kv_heads > heads or heads % kv_heads:
            raise text.refused("num_key_value_heads", f"it must divide the {heads} attention heads")
        if given is None and hidden % heads:
            raise text.refused("hidden_size", f"{heads} heads must divide it, or head_dim must be given")
        head_size = given or hidden // heads
    longest, length_key, rotary_rows = longest_of(model_type, text)
    windows, linear = _kinds(family.mixer, model_type, text, layers)
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
        kv_heads=kv_heads,
        head_size=head_size,
        windows=windows,
        linear=linear,
        is_sparse=is_latent and text.optional("index_topk") is not None,
        experts=next((count for key in _EXPERT_KEYS if (count := text.optional(key, 0))), 0),
        longest=longest,
        length_key=length_key,
        rotary_rows=rotary_rows,
        dtype=next((str(one).removeprefix("torch.") for one in dtypes if one is not None), None),
        quantization=quantization,
        quantization_method=None if method is None else str(method),
    )


def _types(text: Keys, layers: int, known: tuple[str, ...], pattern: int | None) -> tuple[str, ...] | None:
    """Return each layer's type: as listed, else every `pattern`-th full; None: neither."""
    listed = text.strings("layer_types")
    if listed is None:
        return (pattern and tuple(known[0] if (i + 1) % pattern else _FULL for i in range(layers))) or None
    if len(listed) != layers:
        raise text.refused("layer_types", f"one for each of the {layers} layers is needed, not {len(listed)}")
    if odd := sorted({*listed} - {*known}):
        raise PlanError(f"{text.prefix}layer_types: {short(odd[0])} {_UNKNOWN} ({', '.join(known)})")
    return listed


def _kinds(mixer: str, model_type: str, text: Keys, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return each layer's window, by its type, else that of the whole model; and which are gated delta nets."""
    windows: tuple[int | None, ...] = (None,) * layers
    attention = (False,) * layers
    if mixer == "delta":
        types = _types(text, layers, (_LINEAR, _FULL), text.optional("full_attention_interval"))
        if types is None:
            raise text.refused("layer_types", "one for each layer is needed, or full_attention_interval")
        if set(types) != {_LINEAR, _FULL}:
            raise text.refused("layer_types", f"both {_LINEAR} and {_FULL} are needed in a hybrid model")
        return windows, tuple(one == _LINEAR for one in types)
    if mixer == "latent":
        return windows, attention
    if model_type.startswith("qwen"):
        # Their classes throw the window away unless `use_sliding_window` is set; vLLM takes none in some layers only.
        if text.get("use_sliding_window"):
            raise text.refused("use_sliding_window", "the built-in plans these models without their window")
        _types(text, layers, (_FULL,), None)
        return windows, attention
    if model_type == "gpt_oss":  # models/gpt_oss.py goes by the place, whatever is listed
        text.pop("layer_types", None)
    window = text.optional("sliding_window", 0) or None
    types = _types(text, layers, (_SLIDING, _FULL), text.optional("sliding_window_pattern"))
    if types is not None and window is None and _SLIDING in types:
        raise text.refused("sliding_window", "a window is needed, as its layer_types slide")
    return tuple(window if one == _SLIDING else None for one in types or (_SLIDING,) * layers), attention


# --- Reads the keys of a config.json that decide a size: what makes no sense is refused by its name and value ---

# Beyond any model's; products of a few of them still have a size in bytes.
MAX_NUMBER: Final = 1 << 40
_GEMMA: Final = {"head_dim": 256, "vocab_size": 256000, "tie_word_embeddings": True, "sliding_window": 4096}
_DELTA: Final = {"head_dim": 256, "full_attention_interval": 4}
# What Transformers' configuration classes make of an absent key, where files leave it out (by model type).
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    "gemma": {**_GEMMA, "sliding_window": None},
    "gemma2": {**_GEMMA, "sliding_window_pattern": 2},
    "gemma3_text": {
        **_GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "vocab_size": 262208, "sliding_window_pattern": 6,
    },
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
}  # fmt: skip
# Their number of KV heads has a default of its own; all others take that of the attention heads.
_OWN_KV_HEADS: Final = ("mistral", "mixtral", "qwen2", "qwen3", "gemma", "cohere2", "minimax", "glm4", "ernie")
_LENGTH_KEYS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
# Scaled positions that `max_position_embeddings` already counts (0.32.0, model_arch_config_convertor.py).
_COUNTED_ALREADY: Final = frozenset({"llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default", "mrope"})


class Keys(dict[str, Any]):
    """One object of a config.json; `prefix` is its place in the file, to name it in an error."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        super().__init__(values)
        self.prefix = prefix

    def refused(self, key: str, expected: str) -> PlanError:
        value = self.get(key)
        return PlanError(f"{self.prefix}{key}: {'absent' if value is None else short(value)}; {expected}")

    def optional(self, key: str, least: int = 1) -> int | None:
        """Raises PlanError: it is not a whole number, or out of range."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_NUMBER:
            raise self.refused(key, f"a whole number from {least} to {MAX_NUMBER} is needed")
        return value

    def number(self, key: str) -> int:
        """Raises PlanError: it is missing, not a whole number, or out of range."""
        value = self.optional(key)
        if value is None:
            raise self.refused(key, "a whole number of 1 or more is needed")
        return value

    def strings(self, key: str) -> tuple[str, ...] | None:
        """Raises PlanError: the value is there, and is no list of strings."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.refused(key, "a list of names is needed")
        return tuple(value)

    def inside(self, key: str) -> Keys:
        """Return a nested object, an empty one where it is absent. Raises PlanError: the value is no object."""
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            raise self.refused(key, "an object is needed")
        return Keys(value or {}, f"{self.prefix}{key}.")

    def objects(self) -> list[Keys]:
        return [self.inside(key) for key, value in self.items() if isinstance(value, Mapping)]


def text_keys(outer: Keys) -> tuple[str, Keys]:
    """Return the model type and the keys of the language model: those of ``text_config``, or the file's own.

    Keys that its type fills in are filled in. Raises PlanError: the part is no object, or names no type.
    """
    keys = outer.inside("text_config") or outer
    model_type = keys.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise keys.refused("model_type", "Transformers' name of the configuration is needed")
    shared = {key: outer[key] for key in ("tie_word_embeddings", "vocab_size") if outer.get(key) is not None}
    text = Keys({**_DEFAULTS.get(model_type, {}), **shared, **keys}, keys.prefix)
    if text.get("num_key_value_heads") is None and not model_type.startswith(_OWN_KV_HEADS):
        text["num_key_value_heads"] = text.get("num_attention_heads")
    return model_type, text


def longest_of(model_type: str, text: Keys) -> tuple[int, str, int]:
    """Return the longest sequence that the model allows, the key that says so, and the rows of its rotary table.

    Follows `_get_and_verify_max_len` (0.32.0, vllm/config/model.py). Raises PlanError: no length is named.
    """
    lengths = {key: value for key in _LENGTH_KEYS if (value := text.optional(key)) is not None}
    if not lengths:
        raise text.refused("max_position_embeddings", "a whole number of 1 or more is needed")
    key = "model_max_length" if "model_max_length" in lengths else min(lengths, key=lambda name: lengths[name])
    rows, scaled = float(lengths[key]), text.inside("rope_parameters") or text.inside("rope_scaling")
    for rope in scaled.objects() or [scaled]:
        kind, factor = str(rope.get("rope_type") or rope.get("type") or "default"), rope.get("factor")
        if kind in ("su", "longrope"):
            raise rope.refused("rope_type", "the built-in does not plan models of two lengths")
        if kind in _COUNTED_ALREADY or factor is None:
            continue
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MAX_NUMBER:
            raise rope.refused("factor", "a number above 0 is needed")
        rows *= factor
    if not 1 <= rows <= MAX_NUMBER:
        raise scaled.refused("factor", f"positions from 1 to {MAX_NUMBER} are needed")
    # Gemma 3's count already, and its table has them all.
    return lengths[key] if "gemma3" in model_type else math.floor(rows), f"{text.prefix}{key}", math.floor(rows)
