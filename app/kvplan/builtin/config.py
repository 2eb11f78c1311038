"""Reads the keys of a config.json that decide a size: what makes no sense is refused by its name and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from kvplan.errors import PlanError, short

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
        """Keep a copy of the object."""
        super().__init__(values)
        self.prefix = prefix

    def refused(self, key: str, right: str) -> PlanError:
        value = self.get(key)
        return PlanError(f"{self.prefix}{key}: {'absent' if value is None else short(value)}; {right}")

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
        """Return every object inside this one."""
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
