"""The tensors of the vision towers that a config.json implies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from highwater.plan.checkpoint import Tensor, architecture, entries, module, ratio, text_config, weight, whole
from highwater.plan.json_file import ConfigJson

# Each is built: a config.json from elsewhere may name any number.
_MAX_LAYERS: Final = 1024


def tower_tensors(config: ConfigJson) -> Iterator[Tensor]:
    """Those of the projector too; none of a model of text. Raises PlanError: a key is missing or makes no sense."""
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return
    kind = architecture(config)
    text_hidden = whole(text_config(config), "hidden_size")
    if kind.startswith("Qwen"):
        yield from _qwen_vision(tower, kind, text_hidden)
    elif kind == "Llama4ForConditionalGeneration":
        yield from _llama4_vision(tower, text_hidden)
    elif kind == "Mistral3ForConditionalGeneration":
        yield from _pixtral(config, tower, text_hidden)
    elif kind == "Gemma3ForConditionalGeneration":
        yield from _siglip(tower, text_hidden)


def _block(name: str, hidden: int, inner: int, *, gated: bool = False, bias: bool = True) -> Iterator[Tensor]:
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from module(f"{name}.self_attn.{part}", hidden, hidden, bias=bias)
    if gated:
        yield from module(f"{name}.mlp.gate_proj", inner, hidden, bias=bias)
    yield from module(f"{name}.mlp.fc1", inner, hidden, bias=bias)
    yield from module(f"{name}.mlp.fc2", hidden, inner, bias=bias)
    for norm in ("layer_norm1", "layer_norm2"):
        yield from module(f"{name}.{norm}", hidden, bias=bias)


def _siglip(tower: ConfigJson, text_hidden: int) -> Iterator[Tensor]:
    hidden, inner = whole(tower, "hidden_size"), whole(tower, "intermediate_size")
    patch = whole(tower, "patch_size")
    name = "vision_tower.vision_model"
    yield from module(f"{name}.embeddings.patch_embedding", hidden, 3, patch, patch, bias=True)
    yield weight(f"{name}.embeddings.position_embedding", (whole(tower, "image_size") // patch) ** 2, hidden)
    for layer in range(whole(tower, "num_hidden_layers", most=_MAX_LAYERS)):
        yield from _block(f"{name}.encoder.layers.{layer}", hidden, inner)
    yield from module(f"{name}.post_layernorm", hidden, bias=True)
    yield Tensor("multi_modal_projector.mm_input_projection_weight", (hidden, text_hidden), 16)
    yield weight("multi_modal_projector.mm_soft_emb_norm", hidden)


def _pixtral(config: ConfigJson, tower: ConfigJson, text_hidden: int) -> Iterator[Tensor]:
    hidden, inner = whole(tower, "hidden_size"), whole(tower, "intermediate_size")
    patch = whole(tower, "patch_size")
    yield weight("vision_tower.patch_conv", hidden, 3, patch, patch)
    yield weight("vision_tower.ln_pre", hidden)
    for layer in range(whole(tower, "num_hidden_layers", most=_MAX_LAYERS)):
        yield from _block(f"vision_tower.transformer.layers.{layer}", hidden, inner, gated=True, bias=False)
    merge = whole(config, "spatial_merge_size", default=2)
    projector = "multi_modal_projector"
    yield weight(f"{projector}.norm", hidden)
    yield weight(f"{projector}.patch_merger.merging_layer", hidden, hidden * merge * merge)
    yield weight(f"{projector}.linear_1", text_hidden, hidden)
    yield weight(f"{projector}.linear_2", text_hidden, text_hidden)


def _llama4_vision(tower: ConfigJson, text_hidden: int) -> Iterator[Tensor]:
    hidden, inner = whole(tower, "hidden_size"), whole(tower, "intermediate_size")
    patch = whole(tower, "patch_size")
    patches = (whole(tower, "image_size") // patch) ** 2 + 1
    yield weight("vision_model.patch_embedding.linear", hidden, 3 * patch * patch)
    yield Tensor("vision_model.positional_embedding_vlm", (patches, hidden), 16)
    for layer in range(whole(tower, "num_hidden_layers", most=_MAX_LAYERS)):
        yield from _block(f"vision_model.model.layers.{layer}", hidden, inner)
    shuffled = int(hidden / ratio(tower, "pixel_shuffle_ratio", default=0.5) ** 2)
    projected = whole(tower, "projector_input_dim", default=4096)
    output = whole(tower, "vision_output_dim", "projector_output_dim", default=4096)
    yield weight("vision_model.vision_adapter.mlp.fc1", projected, shuffled)
    yield weight("vision_model.vision_adapter.mlp.fc2", output, projected)
    yield weight("multi_modal_projector.linear_1", text_hidden, output)


def _qwen_vision(tower: ConfigJson, kind: str, text_hidden: int) -> Iterator[Tensor]:
    first = kind == "Qwen2VLForConditionalGeneration"
    hidden = whole(tower, "embed_dim") if first else whole(tower, "hidden_size")
    inner = int(hidden * ratio(tower, "mlp_ratio", default=4)) if first else whole(tower, "intermediate_size")
    patch, frames = whole(tower, "patch_size"), whole(tower, "temporal_patch_size", default=2)
    merged = hidden * whole(tower, "spatial_merge_size", default=2) ** 2
    gated = kind == "Qwen2_5_VLForConditionalGeneration"
    later = not first and not gated
    yield from module("visual.patch_embed.proj", hidden, 3, frames, patch, patch, bias=later)
    if later:
        yield weight("visual.pos_embed", whole(tower, "num_position_embeddings", default=2304), hidden)
    for layer in range(whole(tower, "depth", most=_MAX_LAYERS)):
        yield from _block(f"visual.blocks.{layer}", hidden, inner, gated=gated)
    mergers = 1 + (len(entries(tower, "deepstack_visual_indexes")) if later else 0)
    for merger in range(mergers):
        yield from module(f"visual.merger_{merger}.fc1", merged, merged, bias=True)
        yield from module(f"visual.merger_{merger}.fc2", text_hidden, merged, bias=True)
        yield weight(f"visual.merger_{merger}.norm", merged if merger else hidden)
