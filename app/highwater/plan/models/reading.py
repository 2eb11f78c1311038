"""Reads a config.json: the part that describes the language model, absent keys filled in as Transformers fills them.

A key that is absent takes the default of the configuration class that the model type names; `defaults.json` holds those
of Transformers 4.57 and 5.x for the keys that decide the size of a cache, and the names under which a type keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvplan.errors import PlanError, short

# In the order in which Transformers' get_text_config() and vLLM's wrappers look for the language model.
LANGUAGE_PARTS: Final = ("thinker_config", "text_config", "llm_config", "language_config", "language_model_config")
# Classes that throw their window away unless `use_sliding_window` is set (configuration_qwen2.py and its siblings).
WINDOW_ON_REQUEST: Final = frozenset(
    ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "smollm3")
)
# Beyond any model's; products of a few of them still have a size in bytes.
MAX_NUMBER: Final = 1 << 40
# A language model inside another's config.json often leaves its type out.
_WITH_TEXT_TYPE: Final = (
    "gemma3 gemma3n gemma4 glm4v llama4 qwen2_vl qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe"
)
LANGUAGE_TYPES: Final = {
    **{name: f"{name}_text" for name in _WITH_TEXT_TYPE.split()},
    **dict.fromkeys(("idefics3", "llava", "llava_next", "smolvlm"), "llama"),
    **dict.fromkeys(("mistral3", "pixtral"), "mistral"),
    "llava_onevision": "qwen2",
}


@cache
def _defaults() -> dict[str, dict[str, dict[str, Any]]]:
    text = Path(__file__).with_name("defaults.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


class Config:
    """One model's keys, with the defaults of its type; `prefix` is their place in the file, to name it in an error."""

    def __init__(self, values: Mapping[str, Any], model_type: str, prefix: str = "") -> None:
        """Keep a file's keys beside the defaults of a type."""
        self._values = values
        known = _defaults().get(model_type, {})
        self._defaults = known.get("keys", {})
        self._aliases = known.get("aliases", {})
        self.model_type = model_type
        self.prefix = prefix

    def get(self, key: str) -> Any:  # noqa: ANN401 - JSON
        """Return a key's value, else its default; None where there is neither."""
        for name in (key, self._aliases.get(key)):
            if name is not None and name in self._values:
                return self._values[name]
        default = self._defaults.get(key)
        return self._defaults.get(self._aliases.get(key, ""), default) if default is None else default

    def filled(self) -> dict[str, Any]:
        """Return every key of the file, and the defaults of its type for those that are absent."""
        values = {**self._defaults, **self._values}
        aliased = {key: values[name] for key, name in self._aliases.items() if key not in values and name in values}
        return {**values, **aliased}

    def gives(self, key: str) -> bool:
        return self._values.get(key) is not None

    def refused(self, key: str, value: object, right: str) -> PlanError:
        shown = "absent" if value is None else short(value)
        return PlanError(f"{self.prefix}{key}: {shown}; {right}")

    def optional(self, key: str, least: int = 1) -> int | None:
        """None where the file and its type say nothing. Raises PlanError: it is not a whole number, or out of range."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refused(key, value, f"a whole number of {least} or more is needed")
        if value > MAX_NUMBER:
            raise self.refused(key, value, f"{MAX_NUMBER} at most; no model has as many")
        return value

    def number(self, key: str, least: int = 1) -> int:
        """Raises PlanError: it is missing, not a whole number, or out of range."""
        value = self.optional(key, least)
        if value is None:
            raise self.refused(key, None, f"a whole number of {least} or more is needed")
        return value

    def names(self, key: str) -> tuple[str, ...] | None:
        """Return a list of names, one for each layer; None if there is none. Raises PlanError: it is no such list."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(x, str) for x in value):
            raise self.refused(key, value, "a list of names is needed, one for each layer")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return a nested object; an empty one where it is absent. Raises PlanError: the value is not an object."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.refused(key, value, "an object is needed")
        return value

    def inside(self, key: str) -> Config:
        """Return the keys of a nested object, which has no defaults of its own."""
        return Config(self.mapping(key), "", f"{self.prefix}{key}.")


def language_config(values: Mapping[str, Any]) -> Config:
    """Raises PlanError: the part that describes the language model is not an object."""
    part, outer, prefix = values, str(values.get("model_type") or ""), ""
    model_type = outer
    for _ in range(2):  # Qwen's Omni models nest twice
        for name in LANGUAGE_PARTS:
            inner = part.get(name)
            if inner is None:
                continue
            if not isinstance(inner, Mapping):
                raise PlanError(f"{prefix}{name}: {inner!r}; an object is needed")
            part, prefix = inner, f"{prefix}{name}."
            model_type = str(inner.get("model_type") or "") or LANGUAGE_TYPES.get(outer, "")
            break
    # Older files of some wrappers (Qwen2-VL) have the language model's keys at the top.
    return Config(part, LANGUAGE_TYPES.get(model_type, model_type), prefix)


def model_window(config: Config) -> int | None:
    """Return the window of a whole model: what vLLM's CacheConfig.sliding_window becomes.

    vLLM sets it from the language model's `sliding_window` unless its layers are of several types (engine/arg_utils.py,
    is_interleaved), and takes 0 for "no window" (config/model.py).
    """
    return None if len(set(layer_types(config) or ())) > 1 else window(config)


def window(config: Config) -> int | None:
    """Return the window that the configuration keeps; None where it has none or does not use it."""
    if config.model_type in WINDOW_ON_REQUEST and not config.get("use_sliding_window"):
        return None
    value = config.get("sliding_window")
    if value in (None, 0):
        return None
    return config.number("sliding_window")


def layer_types(config: Config) -> tuple[str, ...] | None:
    """Return each layer's type as the configuration class has it; None where it has none."""
    given = config.names("layer_types")
    layers = config.optional("num_hidden_layers")
    rule = _RULES.get(config.model_type)
    return given if given is not None or layers is None or rule is None else rule(config, layers)


def _every(layers: int, pattern: int, other: str = "sliding_attention") -> tuple[str, ...]:
    return tuple(other if (i + 1) % pattern else "full_attention" for i in range(layers))


def _by_pattern(otherwise: int) -> _Rule:
    return lambda config, layers: _every(layers, config.optional("sliding_window_pattern") or otherwise)


def _exaone(config: Config, layers: int) -> tuple[str, ...]:
    if window(config) is None:
        return ("full_attention",) * layers
    return _every(layers, config.number("sliding_window_pattern"))


def _qwen(config: Config, layers: int) -> tuple[str, ...]:
    """The first `max_window_layers` are full where a window is used."""
    first, slides = config.number("max_window_layers", 0), window(config) is not None
    return tuple("sliding_attention" if slides and i >= first else "full_attention" for i in range(layers))


_Rule: TypeAlias = Callable[[Config, int], tuple[str, ...]]
# What the configuration classes make of an absent `layer_types` (transformers/models/*/configuration_*.py).
_RULES: Final[Mapping[str, _Rule]] = {
    "cohere2": _by_pattern(4),
    "cwm": lambda _, layers: tuple("sliding_attention" if i % 4 else "full_attention" for i in range(layers)),
    **dict.fromkeys(("exaone4", "exaone_moe"), _exaone),
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), lambda _, layers: _every(layers, 2)),
    "gemma3_text": _by_pattern(6),
    "gemma3n_text": lambda _, layers: _every(layers, 5),
    "gemma4_text": lambda _, layers: (*_every(layers, 6)[:-1], "full_attention"),
    "ministral": lambda config, layers: ("sliding_attention" if window(config) else "full_attention",) * layers,
    "olmo3": lambda _, layers: _every(layers, 4),
    **dict.fromkeys(("qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3"), _qwen),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        lambda config, layers: _every(layers, config.optional("full_attention_interval") or 4, "linear_attention"),
    ),
}
