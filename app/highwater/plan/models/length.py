"""The longest sequence that a model allows, as vLLM derives it (config/model.py, _get_and_verify_max_len)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from highwater.plan.models.reading import MAX_NUMBER, Config
from kvplan.versions import Release

# model_arch_config_convertor.py, derive_max_model_len_and_key: the smallest of these counts.
LENGTH_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Scaled positions that `max_position_embeddings` already counts.
COUNTED_ALREADY: Final = frozenset({"su", "longrope", "llama3"})
# From this release on YaRN's count too; up to then its original length was multiplied (config/model.py in 0.30.0).
YARN_COUNTED_SINCE: Final[Release] = (0, 30, 0)
YARN_KINDS: Final = frozenset({"yarn", "deepseek_yarn", "deepseek_llama_scaling"})
# The length that vLLM takes where neither the model nor a flag gives one.
UNNAMED_LENGTH: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    longest: float | None  # the derived maximum; None: the configuration names none
    key: str | None  # the key that it was read from
    default: int  # the length that vLLM takes where none is given
    override: int | None  # `model_max_length`, up to which a longer one may be given


def length_of(config: Config, release: Release) -> Length:
    longest, key = math.inf, None
    for name in LENGTH_KEYS:
        value = config.optional(name)
        if value is not None and value < longest:
            longest, key = value, name
    override = config.optional("model_max_length")
    if override is not None:
        longest, key = override, "model_max_length"
    if key is None:
        return Length(longest=None, key=None, default=UNNAMED_LENGTH, override=None)
    ropes = _ropes(config)
    if "gemma3" not in config.model_type:
        longest = _scaled(config, ropes, longest, release)
    default = int(longest)
    if any(_kind(rope) == "longrope" for rope in ropes):
        default = config.optional("original_max_position_embeddings") or default
    return Length(longest=longest, key=key, default=default, override=override)


def _scaled(config: Config, ropes: list[Mapping[str, Any]], longest: float, release: Release) -> float:
    counted = COUNTED_ALREADY | YARN_KINDS if release >= YARN_COUNTED_SINCE else COUNTED_ALREADY
    factor = 1.0
    for rope in ropes:
        kind = _kind(rope)
        if kind in counted:
            continue
        given = rope.get("factor")
        if given is not None:
            if not _is_positive(given):
                raise config.refused("rope_scaling.factor", given, f"a number above 0 is needed, {MAX_NUMBER} at most")
            factor = float(given)
        if kind == "yarn":
            original = rope.get("original_max_position_embeddings")
            if not _is_positive(original):
                right = f"a whole number of at most {MAX_NUMBER} is needed where positions are scaled by yarn"
                raise config.refused("rope_scaling.original_max_position_embeddings", original, right)
            longest = float(original)
    return longest * factor


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER


def _ropes(config: Config) -> list[Mapping[str, Any]]:
    """The rotary parameters, one for each layer type where they are kept so."""
    parameters = config.mapping("rope_parameters") or config.mapping("rope_scaling")
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or ([parameters] if parameters else [])


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
