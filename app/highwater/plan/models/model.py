"""A whole config.json: which architecture it is, and everything of it that the KV cache depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from highwater.plan.models import attention
from highwater.plan.models.architectures import ARCHITECTURES, Architecture, served
from highwater.plan.models.kept import Indexer, Kept, Latent, Model, RecurrentState
from highwater.plan.models.length import length_of
from highwater.plan.models.reading import Config, language_config
from highwater.plan.models.recurrent import zamba2_head_size
from kvplan.errors import PlanError
from kvplan.versions import Release

# Keys that change what a cache holds, in ways that are not modelled here: a model that sets one is refused by name.
NOT_MODELLED: Final = {
    "index_topk_freq": "indexers that serve several layers are not modelled",
    "index_topk_pattern": "indexers that serve several layers are not modelled",
    "compress_ratios": "compressed latent caches are not modelled",
    "interleaved_sliding_window": "windows listed layer by layer are not modelled",
    "use_cla": "layers that share another's cache are not modelled",
    "per_layer_config": "layers with geometries of their own are not modelled",
}
# Each with the fewest that make sense.
LAYER_KEYS: Final = {"num_hidden_layers": 1, "num_layers": 1, "decoder_layers": 1, "num_nextn_predict_layers": 0}
# Sizes of every model that a start's memory depends on, checked where the file gives them.
SIZE_KEYS: Final = ("vocab_size", "hidden_size", "num_attention_heads")
MAX_LAYERS: Final = 4096
EXPERT_KEYS: Final = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def read_model(values: Mapping[str, Any], release: Release) -> Model:
    """Raises PlanError: the architecture is not known, or a key makes no sense."""
    name, architecture = _architecture(values, release)
    config = language_config(values)
    if not config.model_type:
        raise PlanError(f"{config.prefix}model_type: absent; Transformers' name of the configuration is needed")
    for key, least in LAYER_KEYS.items():
        if (config.optional(key, least) or 0) > MAX_LAYERS:
            raise config.refused(key, config.get(key), f"{MAX_LAYERS} at most; no model has as many")
    for key in SIZE_KEYS:
        config.optional(key)
    for key, why in NOT_MODELLED.items():
        value = config.get(key)
        # 1 is a frequency that leaves every layer as it is; true, which equals it, asks for the thing itself.
        if value and (value is True or value != 1):
            raise config.refused(key, value, why)
    kept = architecture.build(config)
    is_latent = any(isinstance(part, Latent) for part in kept)
    return Model(
        architecture=name,
        model_type=config.model_type,
        layers=max((part.layer for part in kept), default=-1) + 1
        if architecture.encoder_decoder
        else config.optional("num_hidden_layers") or max(one.layer for one in kept) + 1,
        attention_heads=0 if architecture.states_only else config.number("num_attention_heads"),
        kv_heads=0 if architecture.states_only else 1 if is_latent else attention.kv_heads(config),
        head_size=_head_size(config, architecture, kept),
        kept=kept,
        length=length_of(config, release),
        dtype=_dtype(values, config),
        quantization=_quantization(values, config),
        # A hybrid's class may serve a model without states (granite-4.0-micro).
        is_hybrid=architecture.hybrid and any(isinstance(part, RecurrentState) for part in kept),
        has_attention=not architecture.states_only,
        is_encoder_decoder=architecture.encoder_decoder,
        is_latent=is_latent,
        is_sparse=any(isinstance(part, Indexer) for part in kept),
        caches_states=architecture.caches_states,
        # get_mamba_chunk_size; Mamba 1 has no chunks.
        state_chunk=config.optional("mamba_chunk_size") or config.optional("chunk_size"),
        state_dtype=_state_dtype(config, architecture, release),
        encoder_tokens=(config.optional("max_source_positions") or 0) if architecture.encoder_decoder else 0,
        is_moe=any(config.optional(key, 0) for key in EXPERT_KEYS),
        unrotated_head_size=config.optional("qk_nope_head_dim") if is_latent else None,
    )


def _architecture(values: Mapping[str, Any], release: Release) -> tuple[str, Architecture]:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise PlanError(f"architectures: {names!r}; a list with vLLM's name of the model's class is needed")
    for name in names:
        known = ARCHITECTURES.get(name)
        if known is None:
            continue
        if release not in served()[name]:
            version = ".".join(map(str, release))
            raise PlanError(f"architectures: {name!r}; vLLM {version} does not have it, {served()[name]} does")
        return name, known
    raise PlanError(
        f"architectures: {names[0]!r} is not known here; a plan is only made for architectures whose layers were read"
        " in vLLM's source (highwater plan --list-architectures)"
    )


def _head_size(config: Config, architecture: Architecture, kept: tuple[Kept, ...]) -> int:
    if architecture.states_only:
        return 0
    if config.model_type == "zamba2":
        return zamba2_head_size(config)
    latent = next((part for part in kept if isinstance(part, Latent)), None)
    return attention.head_size(config) if latent is None else latent.width


def _dtype(values: Mapping[str, Any], config: Config) -> str | None:
    """The checkpoint's element type: the file's own, else the language model's, else the vision tower's."""
    vision = values.get("vision_config")
    places = (values, {key: config.get(key) for key in ("dtype", "torch_dtype")}, vision)
    for place in places:
        if isinstance(place, Mapping):
            dtype = place.get("dtype") or place.get("torch_dtype")
            if dtype is not None:
                return str(dtype).removeprefix("torch.")
    return None


def _quantization(values: Mapping[str, Any], config: Config) -> Mapping[str, Any]:
    for place in (values.get, config.get):
        for key in ("quantization_config", "compression_config"):
            described = place(key)
            if isinstance(described, Mapping):
                return described
            if described is not None:
                raise PlanError(f"quantization_config: {described!r}; an object is needed")
    return {}


def _state_dtype(config: Config, architecture: Architecture, release: Release) -> str | None:
    """The states' element type that a configuration names, which vLLM reads from 0.13 on."""
    if architecture.own_state_dtype is None or release < (0, 13, 0):
        return None
    named = config.get(architecture.own_state_dtype)
    if named is not None:
        return str(named)
    return next((name for since, name in reversed(architecture.state_dtypes) if since <= release), None)
