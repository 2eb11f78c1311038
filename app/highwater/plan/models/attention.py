"""Models of attention layers: full, sliding, chunked, latent, and the encoder-decoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from highwater.plan.models.kept import Attention, Cross, Indexer, Kept, Latent
from highwater.plan.models.reading import Config, layer_types, model_window, window

# Language models whose layers are alike or follow their types.
_WRAPPED: Final = """
cohere cohere2 gemma gemma2 gemma3_text gpt_oss granite internlm2 llama mistral mixtral phi3 qwen2 qwen2_moe qwen3
qwen3_moe
"""
WRAPPED: Final = frozenset(_WRAPPED.split())
# Those of them that vLLM serves with its Qwen2Model.
QWEN2: Final = frozenset({"qwen2", "qwen3"})
SLIDING = "sliding_attention"
FULL = "full_attention"


def kv_heads(config: Config) -> int:
    """A whole model's (vLLM's get_total_num_kv_heads). Raises PlanError: they do not divide the attention heads."""
    heads, queries = _kv_heads(config), config.number("num_attention_heads")
    if heads > queries or queries % heads:
        raise config.refused("num_key_value_heads", heads, f"it must divide the {queries} attention heads")
    return heads


def _kv_heads(config: Config) -> int:
    match config.model_type:
        case "falcon" | "RefinedWeb" | "RefinedWebModel":
            if not config.get("new_decoder_architecture") and config.get("multi_query"):
                return 1
        case "gpt_bigcode":
            return 1 if config.get("multi_query") else config.number("num_attention_heads")
        case "chatglm":
            if not config.get("multi_query_attention"):
                return config.number("num_attention_heads")
        case "mpt" | "dbrx":
            return config.inside("attn_config").optional("kv_n_heads") or config.number("num_attention_heads")
        case _:
            pass
    for key in ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"):
        heads = config.optional(key)
        if heads is not None:
            return heads
    return config.number("num_attention_heads")


def head_size(config: Config) -> int:
    """Return the size of one head (vLLM's get_head_size, without MLA).

    Raises PlanError: neither ``head_dim`` nor a hidden size that the heads divide is given.
    """
    for key in ("head_dim", "hidden_size_per_head"):
        size = config.optional(key)
        if size is not None:
            return size
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    if hidden % heads:
        raise config.refused("hidden_size", hidden, f"{heads} heads must divide it, or head_dim must be given")
    return hidden // heads


def self_attention(
    layer: int,
    heads: int,
    size: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    name: str | None = None,
) -> Attention:
    """Return the attention of a decoder's layer; `name` is given if it differs from most models'."""
    name = name or f"model.layers.{layer}.self_attn.attn"
    return Attention(layer=layer, name=name, kv_heads=heads, head_size=size, window=window, chunk=chunk)


def uniform(config: Config) -> tuple[Kept, ...]:
    """Layers that are all alike: full, or sliding where the model as a whole has a window.

    Raises PlanError: the config is one of MLA.
    """
    if config.gives("kv_lora_rank"):
        raise config.refused("kv_lora_rank", config.get("kv_lora_rank"), "MLA is not known for this architecture")
    return _layers(config, (model_window(config),) * config.number("num_hidden_layers"))


def qwen2(config: Config) -> tuple[Kept, ...]:
    """Layers all alike; vLLM's Qwen2Model asserts that (models/qwen2.py, and SeedOssModel in models/seed_oss.py).

    Raises PlanError: only some layers have a window, which vLLM refuses.
    """
    first, layers = config.optional("max_window_layers", 0), config.number("num_hidden_layers")
    types = set(layer_types(config) or ())
    # SeedOss has no types: there, a window is enough.
    slides_in_part = len(types) > 1 or (not types and first is not None and window(config) is not None)
    if slides_in_part and first != layers:
        raise config.refused(
            "max_window_layers", first, f"vLLM needs {layers} here, a window in some layers only fails"
        )
    return uniform(config)


def by_layer_type(config: Config) -> tuple[Kept, ...]:
    """Layers whose type says whether they slide; where no layer has a type, as the model as a whole.

    Raises PlanError: a layer slides, and the config has no window.
    """
    types = _types(config)
    if types is None:
        return uniform(config)
    slides = window(config)
    if SLIDING in types and slides is None:
        raise config.refused("sliding_window", config.get("sliding_window"), "its layer_types slide")
    whole = model_window(config)
    return _layers(config, tuple(slides if each == SLIDING else whole for each in types))


def wrapped(config: Config) -> tuple[Kept, ...]:
    """The language model inside a wrapper, which may be one of many. Raises PlanError: it is not a known one."""
    if config.model_type not in WRAPPED:
        raise config.refused("model_type", config.model_type, f"inside this architecture, {sorted(WRAPPED)} are known")
    return (qwen2 if config.model_type in QWEN2 else by_layer_type)(config)


def alternating(config: Config) -> tuple[Kept, ...]:
    """Every other layer slides, from the first on (gpt-oss: models/gpt_oss.py takes the index, not layer_types)."""
    slides = config.number("sliding_window")
    return _layers(config, tuple(slides if i % 2 == 0 else None for i in range(config.number("num_hidden_layers"))))


def gemma3n(config: Config) -> tuple[Kept, ...]:
    """Layers by type, the last of which read an earlier layer's cache and keep none.

    Raises PlanError: as many layers as there are, or more, would share a cache.
    """
    shared = config.optional("num_kv_shared_layers", 0) or 0
    kept = by_layer_type(config)
    if shared >= len(kept):
        raise config.refused("num_kv_shared_layers", shared, f"fewer than the {len(kept)} layers are needed")
    return kept[: len(kept) - shared]


def gemma4(config: Config) -> tuple[Kept, ...]:
    """Layers by type, full ones with heads of their own, the last of which may read an earlier layer's cache."""
    full_size = config.optional("global_head_dim") or 512
    full_heads = kv_heads(config)
    if config.get("attention_k_eq_v"):
        full_heads = config.optional("num_global_key_value_heads") or full_heads
    return tuple(
        replace(part, kv_heads=full_heads, head_size=full_size)
        if isinstance(part, Attention) and part.window is None
        else part
        for part in gemma3n(config)
    )


def llama4(config: Config) -> tuple[Kept, ...]:
    """Chunked layers, and full ones where there are no rotary positions.

    Raises PlanError: ``no_rope_layers`` has not one entry a layer.
    """
    layers, chunk = config.number("num_hidden_layers"), config.optional("attention_chunk_size")
    every = config.number("no_rope_layer_interval")
    rotary = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(rotary, list) or len(rotary) != layers:
        raise config.refused("no_rope_layers", rotary, f"a list of {layers} is needed, 0 where there are no positions")
    heads, size = kv_heads(config), head_size(config)
    return tuple(self_attention(i, heads, size, chunk=chunk if rotary[i] else None) for i in range(layers))


def mimo_v2(config: Config) -> tuple[Kept, ...]:
    """Full and sliding layers with heads of their own each; values are padded to the size of keys.

    Raises PlanError: ``hybrid_layer_pattern`` has not one entry a layer.
    """
    layers = config.number("num_hidden_layers")
    pattern = config.get("hybrid_layer_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise config.refused("hybrid_layer_pattern", pattern, f"a list of {layers} is needed, 1 where a layer slides")
    slides = config.optional("sliding_window_size") or config.number("sliding_window")
    return tuple(
        self_attention(i, config.number("swa_num_key_value_heads"), config.number("swa_head_dim"), window=slides)
        if kind == 1
        else self_attention(i, kv_heads(config), head_size(config))
        for i, kind in enumerate(pattern)
    )


def latent_width(config: Config) -> int:
    """Return the elements of one token's latent vector."""
    return config.number("kv_lora_rank") + config.number("qk_rope_head_dim", 0)


def latent(config: Config) -> tuple[Kept, ...]:
    """MLA in every layer, with an indexer beside it where the model attends to chosen tokens only."""
    width = latent_width(config)
    index = None
    if config.get("index_topk") is not None:
        index_head = config.number("index_head_dim")
        index = index_head + index_head // 128 * 4
    kept: list[Kept] = []
    for i in range(config.number("num_hidden_layers")):
        kept.append(Latent(layer=i, name=f"model.layers.{i}.self_attn.attn", width=width))
        if index is not None:
            kept.append(Indexer(layer=i, name=f"model.layers.{i}.self_attn.indexer.k_cache", width_bytes=index))
    return tuple(kept)


def longcat(config: Config) -> tuple[Kept, ...]:
    """Two MLA modules in every layer."""
    width = latent_width(config)
    layers = config.optional("num_layers") or config.number("num_hidden_layers") // 2
    return tuple(
        Latent(layer=i, name=f"model.layers.{i}.self_attn.{part}.attn", width=width)
        for i in range(layers)
        for part in range(2)
    )


def whisper(config: Config) -> tuple[Kept, ...]:
    """A decoder's own cache, and the encoder's output in every layer; the encoder keeps nothing."""
    layers, heads = config.number("decoder_layers"), config.number("decoder_attention_heads")
    size = config.number("d_model") // heads
    kept: list[Kept] = []
    for i in range(layers):
        name = f"model.decoder.layers.{i}"
        kept.append(self_attention(i, heads, size, name=f"{name}.self_attn.attn"))
        kept.append(Cross(layer=i, name=f"{name}.encoder_attn.attn", kv_heads=heads, head_size=size))
    return tuple(kept)


def nemotron_nas(config: Config) -> tuple[Kept, ...]:
    """Layers with heads of their own each, some without attention.

    Raises PlanError: ``block_configs`` is missing, or a block of it is invalid.
    """
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or not blocks:
        raise config.refused("block_configs", blocks, "a list of blocks is needed")
    heads, size = config.number("num_attention_heads"), head_size(config)
    kept: list[Kept] = []
    for i, block in enumerate(blocks):
        part = block.get("attention", {}) if isinstance(block, dict) else block
        if not isinstance(part, dict):
            raise config.refused(f"block_configs[{i}].attention", part, "an object is needed")
        if part.get("no_op") or part.get("replace_with_linear"):
            continue
        group = part.get("n_heads_in_group")
        if isinstance(group, bool) or not isinstance(group, int) or not 1 <= group <= heads:
            right = f"a whole number from 1 to the {heads} attention heads is needed"
            raise config.refused(f"block_configs[{i}].attention.n_heads_in_group", group, right)
        kept.append(self_attention(i, heads // group, size))
    return tuple(kept)


def _types(config: Config) -> tuple[str, ...] | None:
    types, layers = layer_types(config), config.number("num_hidden_layers")
    if types is None:
        return None
    if len(types) != layers:
        raise config.refused("layer_types", f"{len(types)} types", f"one for each of the {layers} layers is needed")
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise config.refused("layer_types", unknown[0], f"{SLIDING} and {FULL} are known for this architecture")
    return types


def _layers(config: Config, windows: tuple[int | None, ...]) -> tuple[Kept, ...]:
    heads, size = kv_heads(config), head_size(config)
    return tuple(self_attention(i, heads, size, window=each) for i, each in enumerate(windows))
