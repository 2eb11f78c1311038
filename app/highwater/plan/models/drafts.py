"""The layers that a drafter (an EAGLE head or multi-token prediction) adds to the KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from highwater.plan.json_file import read_object
from highwater.plan.models import attention
from highwater.plan.models.kept import Attention, Indexer, Kept, Latent, Model
from highwater.plan.models.reading import language_config
from kvplan.errors import PlanError

MAX_DRAFT_BYTES: Final = 8 << 20
FLAG: Final = "--speculative-config"
# They draft from the text or from heads that keep nothing.
KEEP_NOTHING: Final = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
PREDICTION_KEYS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_EAGLE: Final = frozenset({"eagle", "eagle3"})
_EAGLE_HEADS: Final = frozenset(
    {
        "EagleLlamaForCausalLM",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
        "LlamaForCausalLM",
        "Eagle3Speculator",
        "Eagle3DraftModel",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    tokens: int = 0  # drafted at a time
    kept: tuple[Kept, ...] = ()


def read_draft(text: str | None, target: Mapping[str, Any], model: Model) -> Draft:
    """Return what `--speculative-config` adds to a model with this config.json; None: it was not given.

    Raises PlanError: the method is not known here, or its configuration cannot be read.
    """
    if text is None:
        return Draft()
    given = speculative_object(text)
    tokens = given.get("num_speculative_tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise PlanError(f"{FLAG}: num_speculative_tokens: {tokens!r}; a whole number of 1 or more is needed")
    method = str(given.get("method") or "")
    if method in KEEP_NOTHING:
        return Draft(tokens=tokens)
    if method == "mtp" or method.endswith("_mtp"):
        return Draft(tokens=tokens, kept=_prediction_layers(target, model))
    if method in _EAGLE:
        return Draft(tokens=tokens, kept=_eagle_layers(given.get("model"), model))
    raise PlanError(f"{FLAG}: method: {method!r}; ngram, suffix, medusa, mtp, eagle and eagle3 can be planned")


def speculative_object(text: str) -> Mapping[str, Any]:
    """Return the object that `--speculative-config` holds. Raises PlanError: the text is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise PlanError(f"{FLAG}: {text!r} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise PlanError(f"{FLAG}: {text!r}; a JSON object is needed")
    return value


def _prediction_layers(target: Mapping[str, Any], model: Model) -> tuple[Kept, ...]:
    """The prediction layers keep what a layer of full attention of their model keeps."""
    config = language_config(target)
    layers = next((count for key in PREDICTION_KEYS if (count := config.optional(key, 0))), 0)
    if not layers:
        raise PlanError(f"{FLAG}: mtp; the model's config.json has no {' or '.join(PREDICTION_KEYS)}")
    whole = [
        part for part in model.kept if isinstance(part, Latent) or (isinstance(part, Attention) and not part.window)
    ]
    if not whole:
        raise PlanError(f"{FLAG}: mtp; the model has no layer of full attention to take the geometry of")
    first = whole[0]
    index = next((part for part in model.kept if isinstance(part, Indexer)), None)
    kept: list[Kept] = []
    for i in range(layers):
        place = model.layers + i
        kept.append(replace(first, layer=place, name=f"model.layers.{place}.mtp_block.self_attn.attn"))
        if index is not None:
            name = f"model.layers.{place}.mtp_block.self_attn.indexer.k_cache"
            kept.append(replace(index, layer=place, name=name))
    return tuple(kept)


def _eagle_layers(place: object, model: Model) -> tuple[Kept, ...]:
    if not isinstance(place, str) or not place:
        raise PlanError(f"{FLAG}: model: {place!r}; the folder of the draft model is needed")
    path = Path(place)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = read_object(path, MAX_DRAFT_BYTES, "a draft model's config.json")
    except PlanError as exc:
        raise PlanError(f"{FLAG}: model: {exc}") from exc
    names = values.get("architectures")
    if not isinstance(names, list) or not names or str(names[0]) not in _EAGLE_HEADS:
        raise PlanError(
            f"{FLAG}: model: {path}: architectures: {names!r}; one of {', '.join(sorted(_EAGLE_HEADS))} is needed"
        )
    # vLLM's speculators format keeps the layer's own configuration inside.
    inner = values.get("transformer_layer_config")
    config = language_config(inner if isinstance(inner, dict) else values)
    heads, size = attention.kv_heads(config), attention.head_size(config)
    layers = config.optional("num_hidden_layers") or 1
    return tuple(attention.self_attention(model.layers + i, heads, size) for i in range(layers))
