"""The bytes that the weights of one rank take, as vLLM's "Model loading took N GiB" counts them.

From the headers of safetensors files where a folder has them, else from the config.json. Tensors are split over ranks
by the rules of vLLM's parallel layers (`model_executor/layers/linear.py`, `vocab_parallel_embedding.py`,
`fused_moe/layer.py`), joined as vLLM joins them (`qkv_proj`, `gate_up_proj`, `w13`), and counted as torch's allocator
counts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from highwater.plan.allocator import allocated_at_least, allocated_bytes
from highwater.plan.checkpoint import Tensor, heads_of, ratio, text_config, whole
from highwater.plan.implied import implied_tensors, tied
from highwater.plan.json_file import ConfigJson
from highwater.plan.models.elements import MODEL_BYTES, served_type
from highwater.plan.quantization import Quantization, quantization_of, quantized
from highwater.units import ceil_div, round_up
from kvplan.errors import PlanError
from kvplan.figure import Figure, estimated, exact
from kvplan.ranks import stage_bounds

_SCALE_BYTES = 4
_VOCABULARY_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE of vocab_parallel_embedding.py, 0.11 to 0.32.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    tensor: int = 1
    pipeline: int = 1
    stage: int = 0  # the pipeline stage of the rank, from 0
    experts: int = 1  # the ranks that whole experts are spread over; 1: every rank holds a part of each
    expandable_segments: bool = False  # the allocator splits every block


def weights_from_config(
    config: ConfigJson, ranks: Ranks, *, quantization: str | None = None, dtype: str | None = None
) -> Figure:
    scheme = quantization_of(config, quantization)
    low, likely, high = _held(config, implied_tensors(config), ranks, dtype, scheme)
    slack = max(scheme.slack if scheme else 0.0, 0.002)
    named = f"{scheme.name} weights" if scheme else "weights in the model's dtype"
    why = f"{named}, from the config.json: no safetensors files were given"
    return estimated(round(low * (1 - slack)), likely, round(high * (1 + slack)), why)


def weights_from_files(
    config: ConfigJson,
    tensors: Iterable[Tensor],
    ranks: Ranks,
    *,
    quantization: str | None = None,
    dtype: str | None = None,
) -> Figure:
    """Return the weights of one rank as the headers of a checkpoint's files give them."""
    stored_quantized = bool(config.get("quantization_config") or text_config(config).get("quantization_config"))
    scheme = None if stored_quantized else quantization_of(config, quantization)
    low, likely, high = _held(config, tensors, ranks, dtype, scheme)
    source = "from the headers of the safetensors files"
    if scheme is not None or stored_quantized:
        why = f"{source}; kernels may pad and repack quantized weights"
        return estimated(round(low * 0.98), likely, round(high * 1.03), why)
    if low == high:
        return exact(likely, source)
    why = f"{source}; how some tensors are split, or in what order they fill the allocator's blocks, is not known"
    return estimated(round(low * 0.999), likely, round(high * 1.001), why)


def _held(
    config: ConfigJson, tensors: Iterable[Tensor], ranks: Ranks, dtype: str | None, scheme: Quantization | None
) -> tuple[int, int, int]:
    """Count what one rank holds, at least, likely and at most: its parts of the tensors, joined, and rotary tables."""
    text = text_config(config)
    element = element_bytes(dtype or model_dtype(config))
    if scheme is not None:
        tensors = tuple(part for tensor in tensors for part in quantized(tensor, scheme))
    split = _Splitter(config, text, ranks)
    joined: dict[str, list[int]] = {}
    for tensor in sorted(_stacked(tensors), key=_load_order):
        if not split.is_loaded(tensor):
            continue
        low, high = split.elements(tensor)
        bits = element * 8 if tensor.floating else tensor.bits
        if scheme is not None and scheme.experts_only and bits < element * 8:
            high = round(high * _kernel_padding(text, tensor, ranks))
        names = (pattern.subn(replacement, tensor.name) for pattern, replacement in _JOINS)
        part = joined.setdefault(next((text for text, count in names if count), tensor.name), [0, 0])
        part[0] += ceil_div(low * bits, 8)
        part[1] += ceil_div(high * bits, 8)
    # Four scales of one number each that every attention layer keeps for a quantized KV cache
    # (attention/layer.py: set_default_quant_scales).
    scales = [_SCALE_BYTES] * 4 * sum(name.endswith(("qkv_proj.weight", "kv_b_proj.weight")) for name in joined)
    tables = rotary_tables(config, element) + scales
    sizes = [[part[side] for part in joined.values()] + tables for side in (0, 1)]
    counted = [allocated_bytes(side, expandable_segments=ranks.expandable_segments) for side in sizes]
    low, high = min(counted), max(counted)
    # What differs for MXFP4 is the padding, and the padded layout is the usual one.
    padded = scheme is not None and scheme.experts_only
    likely = high if low == high or padded else (low + high) // 2
    if not ranks.expandable_segments:
        low = min(low, *map(allocated_at_least, sizes))
    return low, likely, high


def _kernel_padding(text: ConfigJson, tensor: Tensor, ranks: Ranks) -> float:
    """Return how much larger the kernel's layout of MXFP4 experts is: Hopper's pads widths to 256.

    It explains gpt-oss-20b's 13.64 and 7.01 GiB on an H100 (vLLM 0.19, TP 1 and 2), of 12.87 and 6.48 unpadded.
    """
    if ".experts." not in tensor.name:
        return 1.0
    hidden, inner = whole(text, "hidden_size"), whole(text, "intermediate_size")
    inner = inner if ranks.experts > 1 else ceil_div(inner, ranks.tensor)
    wide = round_up(inner, 64)
    if "down_proj" in tensor.name:
        return round_up(wide, 256) / inner
    return round_up(2 * wide, 256) * round_up(hidden, 256) / (2 * inner * hidden)


def model_dtype(config: ConfigJson) -> str:
    declared = text_config(config)
    named = (place.get(key) for place in (config, declared) for key in ("dtype", "torch_dtype"))
    name = next((str(name) for name in named if name), "")
    return served_type(name.removeprefix("torch."))


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of the model's dtype. Raises PlanError: the dtype is unknown."""
    name = dtype.removeprefix("torch.")
    if name not in MODEL_BYTES:
        raise PlanError(f"dtype is {dtype!r}: it should be one of {', '.join(MODEL_BYTES)}")
    return MODEL_BYTES[name]


# --- which tensors are loaded, and how much of them a rank holds ---

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_NOT_LOADED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.masked_bias|\.attn\.bias$|^mtp\.|\.position_ids$)")
_VISION = re.compile(r"^(?:model\.)?(?:vision_|visual\.|vit\.|vpm\.|multi_modal_projector|mlp1\.)")
_VOCABULARY = re.compile(
    r"(?:embed_tokens|lm_head|wte|word_embeddings|embed_in|embed_out|tok_embeddings)\.(?:weight|bias)$"
)
_COLUMN = re.compile(
    r"\.(?:q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|gate_up_proj|w1|w3|fc1|c_fc|fc_in|dense_h_to_4h|linear_1|"
    r"in_proj_qkvz|in_proj_ba|in_proj_qkv|in_proj_z|in_proj_a|in_proj_b|conv1d|A_log|dt_bias|sinks)(?:\.|$)"
)
_KV_COLUMN = re.compile(r"\.(?:k_proj|v_proj)\.")
_FUSED_QKV = re.compile(r"\.(?:qkv_proj|qkv|query_key_value|c_attn|W_pack|wqkv|Wqkv|attn\.qkv)\.")
_ROW = re.compile(r"\.(?:o_proj|down_proj|w2|fc2|c_proj|fc_out|out_proj|dense|dense_4h_to_h|wo|linear_2|attn\.proj)\.")
_REPLICATED = re.compile(
    r"(norm|\bln_|\.gate\.|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|fused_qkv_a|indexer|patch_|pos_embed|"
    r"position|embed_positions|wpe|merging_layer|mm_input_projection)"
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w2)")
_PER_TENSOR = re.compile(r"(scale|scale_2|zero_point|scale_inv)$")


class _Splitter:
    """Counts the elements of a tensor that one rank holds."""

    def __init__(self, config: ConfigJson, text: ConfigJson, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layers = whole(text, "num_hidden_layers", "n_layer")
        self._heads, self._kv_heads, _ = heads_of(text)
        self._tied = tied(config)
        self._first, self._last = stage_bounds(self._layers, ranks.pipeline)[ranks.stage]
        if self._heads % ranks.tensor:
            raise PlanError(
                f"--tensor-parallel-size is {ranks.tensor}, num_attention_heads is {self._heads}: vLLM needs a size"
                " that divides the heads"
            )

    def is_loaded(self, tensor: Tensor) -> bool:
        """Return whether this rank's pipeline stage holds a part of the tensor."""
        name = tensor.name
        if _NOT_LOADED.search(name) or (self._tied and "lm_head.weight" in name):
            return False
        if _VISION.match(name):
            return self._ranks.stage == 0
        layer = _LAYER.search(name)
        if layer is not None:
            number = int(layer[1])
            return number < self._layers and self._first <= number < self._last
        if self._ranks.pipeline == 1:
            return True
        at_end = self._ranks.stage == self._ranks.pipeline - 1
        if _VOCABULARY.search(name) and "lm_head" not in name and "embed_out" not in name:
            return self._ranks.stage == 0 or (at_end and self._tied)
        return at_end if re.search(r"lm_head|embed_out|norm|ln_f", name) else self._ranks.stage == 0

    def elements(self, tensor: Tensor) -> tuple[int, int]:
        """Return the least and the most elements that a rank may hold; they differ where the rule is not known."""
        name, size, tensor_ranks = tensor.name, tensor.elements, self._ranks.tensor
        if _VOCABULARY.search(name):
            rows = round_up(tensor.shape[0], _VOCABULARY_PADDING)
            part = ceil_div(rows, tensor_ranks) * (size // tensor.shape[0])
            return part, part
        if self._ranks.experts > 1 and _EXPERTS.search(name):
            # Each rank holds whole experts: an equal share, the first ranks one more.
            return size // self._ranks.experts, ceil_div(size, self._ranks.experts)
        if tensor_ranks == 1 or size == 1 or _REPLICATED.search(name):
            return size, size
        return self._split(tensor, vision=_VISION.match(name) is not None)

    def _split(self, tensor: Tensor, *, vision: bool) -> tuple[int, int]:
        name, size, ranks = tensor.name, tensor.elements, self._ranks.tensor
        part = ceil_div(size, ranks)
        high = part
        if _KV_COLUMN.search(name) and not vision:
            part = high = size * max(1, self._kv_heads // ranks) // self._kv_heads
        elif _FUSED_QKV.search(name) and not vision:
            heads = self._heads // ranks + 2 * max(1, self._kv_heads // ranks)
            part = high = size * heads // (self._heads + 2 * self._kv_heads)
        elif _ROW.search(name):
            # Each rank adds its part of the sum: a bias and the scale of a whole row belong to the sum.
            if name.endswith(".bias") or (_PER_TENSOR.search(name) and tensor.shape[-1] == 1):
                part = high = size
        elif not any(rule.search(name) for rule in (_COLUMN, _KV_COLUMN, _FUSED_QKV, _EXPERTS)):
            high = size
        return part, high


# --- how vLLM joins tensors ---


def _stacked(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Join a layer's experts, of which a checkpoint has hundreds, to one tensor for each projection, as vLLM does."""
    stacked: dict[tuple[str, tuple[int, ...], int, bool], int] = {}
    for tensor in tensors:
        name, shape = tensor.name, tensor.shape
        rows = 1
        if ".experts." in name and shape:
            name, count = _EXPERT.subn(".experts.", name)
            rows, shape = (shape[0], (0, *shape[1:])) if count else (1, shape)
        key = (name, shape, tensor.bits, tensor.floating)
        stacked[key] = stacked.get(key, 0) + rows
    for (name, shape, bits, floating), rows in stacked.items():
        full = (rows, *shape[1:]) if shape[:1] == (0,) else shape
        yield Tensor(name, full, bits, floating)


_JOINS: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"\.experts\.(?:gate_proj|up_proj|w1|w3)\."), ".experts.w13_"),
    (re.compile(r"\.experts\.(?:down_proj|w2)\."), ".experts.w2_"),
    (re.compile(r"\.(?:q_proj|k_proj|v_proj)\."), ".qkv_proj."),
    (re.compile(r"\.(?:gate_proj|up_proj|w1|w3)\."), ".gate_up_proj."),
    (re.compile(r"\.(?:q_a_proj|kv_a_proj_with_mqa)\."), ".fused_qkv_a_proj."),
)


def _load_order(tensor: Tensor) -> tuple[int, int]:
    """Order tensors as vLLM makes them, as far as it matters to the allocator: by layer, the vision tower first."""
    layer = _LAYER.search(tensor.name)
    if _VISION.match(tensor.name):
        at_end = layer is None and re.search(r"projector|merger|adapter|post_layernorm", tensor.name) is not None
        return 0, int(layer[1]) if layer else (1 << 30 if at_end else -1)
    if layer is not None:
        return 2, int(layer[1])
    return (1, 0) if "embed" in tensor.name or "wte" in tensor.name else (3, 0)


# --- tables of rotary positions ---


def rotary_tables(config: ConfigJson, element: int) -> list[int]:
    """Return the sizes of the tables of cosines and sines that vLLM keeps beside the weights.

    One for each kind of rotary embedding (`rotary_embedding/__init__.py: get_rope` shares them between layers), for as
    many positions as the scaling reaches: a table of Llama 4's 10 million positions takes 2.5 GiB on every rank. Raises
    PlanError: ``rope_scaling`` is not an object.
    """
    text = text_config(config)
    if any(key in text for key in ("n_positions", "word_embed_proj_dim")) or "num_attention_heads" not in text:
        return []
    _, _, width = heads_of(text)
    width = whole(text, "qk_rope_head_dim", default=width)
    positions = whole(text, "max_position_embeddings", "n_positions", default=8192)
    kinds = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(kinds, Mapping):
        raise PlanError(f"rope_scaling is {kinds!r} in the config.json: it should be an object")
    nested = [kind for kind in kinds.values() if isinstance(kind, Mapping)]
    shapes = {_rotary_shape(kind, text, positions, width) for kind in (nested or [kinds])}
    if "rope_local_base_freq" in text and not nested:
        shapes.add((positions, width))
    # gpt-oss keeps its table in 32 bits (models/gpt_oss.py: dtype=torch.float32).
    size = 4 if text.get("model_type") == "gpt_oss" else element
    return [rows * columns * size for rows, columns in sorted(shapes)]


def _rotary_shape(rope: Mapping[str, Any], text: ConfigJson, positions: int, width: int) -> tuple[int, int]:
    factor = ratio(rope, "factor", default=1)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    share = ratio({**text, **rope}, "partial_rotary_factor", "rotary_pct", default=1)
    # Gemma 4's rotates a part, but keeps numbers for the whole width (gemma4_rope.py).
    columns = whole(text, "global_head_dim", default=width) if kind == "proportional" else int(width * share)
    if kind in {"yarn", "deepseek_yarn"}:
        rows = int(whole(rope, "original_max_position_embeddings", default=positions) * factor)
    elif kind in {"linear", "dynamic", "ntk"}:
        rows = int(positions * factor)
    elif kind == "longrope":
        rows = positions + whole({**text, **rope}, "original_max_position_embeddings", default=0, least=0)
    else:
        rows = positions
    if "mrope_section" in rope:
        rows *= 4
    return rows, columns
