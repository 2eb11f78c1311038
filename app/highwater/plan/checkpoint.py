"""The tensors of a checkpoint, with their names, shapes and bytes, and the keys of a config.json that decide them.

Names are those of Hugging Face checkpoints. Nothing here knows of ranks: `weights` says which rank holds what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from highwater.plan.json_file import ConfigJson
from highwater.plan.models.reading import MAX_NUMBER, language_config
from highwater.units import ceil_div
from kvplan.errors import PlanError, short

_MAX_RATIO: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    bits: int  # the size of one element
    # It is of a floating point type of 16 bits or more, so that vLLM loads it in the model's dtype.
    floating: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return ceil_div(self.elements * self.bits, 8)


def weight(name: str, *shape: int) -> Tensor:
    """Return the weight of a module, in 16 bits."""
    return Tensor(f"{name}.weight", shape, 16)


def module(name: str, rows: int, *columns: int, bias: bool = False) -> Iterator[Tensor]:
    """Yield the tensors of a module, in 16 bits: its weight, and a bias of as many elements as that has rows."""
    yield weight(name, rows, *columns)
    if bias:
        yield Tensor(f"{name}.bias", (rows,), 16)


# Keys that only the weights need and that config.json files leave to the defaults of Transformers' classes.
_DEFAULTS: Mapping[str, ConfigJson] = {
    "gemma3_text": {"vocab_size": 262208, "rope_local_base_freq": 10000.0},
    "gemma2": {"vocab_size": 256000},
    "gemma": {"vocab_size": 256000},
    "qwen2_vl_text": {"vocab_size": 152064},
    "qwen2_5_vl_text": {"vocab_size": 152064},
}
# What a wrapper says at its top for all its parts.
_SHARED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config", "vocab_size")


def text_config(config: ConfigJson) -> ConfigJson:
    """Return the part of a config.json that describes the language model, with the defaults of its type."""
    read = language_config(config)
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    return {**_DEFAULTS.get(read.model_type, {}), **shared, **read.filled()}


def architecture(config: ConfigJson) -> str:
    """Return the architecture that a config.json names; raises PlanError where it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise PlanError(
            f"architectures is {names!r} in the config.json: it should be a list that names one architecture"
        )
    return names[0]


def whole(config: ConfigJson, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_NUMBER) -> int:
    """Return the first key's value; raises PlanError: none and no ``default``, or no whole number within bounds."""
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


def ratio(config: ConfigJson, *keys: str, default: float) -> float:
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


def entries(config: ConfigJson, key: str) -> Sequence[Any]:
    """Return a list, empty where the key is absent; raises PlanError where the value is no list."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise PlanError(f"{key} is {short(value)} in the config.json: it should be a list")
    return value


def heads_of(text: ConfigJson) -> tuple[int, int, int]:
    """Return the attention heads, the KV heads and the width of a head; one head where a model has no attention."""
    heads = whole(text, "num_attention_heads", "n_head", default=1)  # Pure Mamba has none.
    kv_heads = whole(text, "num_key_value_heads", default=heads)
    hidden = whole(text, "hidden_size", "n_embd", "d_model")
    return heads, kv_heads, whole(text, "head_dim", default=max(1, hidden // heads))
