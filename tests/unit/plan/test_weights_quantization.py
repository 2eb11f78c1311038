"""How schemes of quantization are understood, and what they leave as it is."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.plan.checkpoint import Tensor
from highwater.plan.quantization import is_ignored, quantization_of, quantized
from kvplan.errors import PlanError
from tests.support.recorded_starts import LLAMA_8B

UP = Tensor("model.layers.0.mlp.up_proj.weight", (256, 512), 16)


def stored(described: dict[str, Any], tensor: Tensor = UP) -> int:
    """Return the bytes that are stored of a tensor."""
    scheme = quantization_of({**LLAMA_8B, "quantization_config": described}, None)
    assert scheme is not None
    return sum(part.bytes for part in quantized(tensor, scheme))


def compressed(bits: int, kind: str, strategy: str, **more: object) -> dict[str, Any]:
    """Return a description as llm-compressor writes it."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (compressed(8, "float", "channel"), 256 * 512 + 256 * 4),
        (compressed(8, "float", "tensor"), 256 * 512 + 4),
        (compressed(8, "float", "block", block_structure=[128, 128]), 256 * 512 + 2 * 4 * 4),
        (compressed(4, "float", "tensor_group", group_size=16), 256 * 512 // 2 + 256 * 32),
        (compressed(8, "int", "channel"), 256 * 512 + 256 * 4),
        (compressed(4, "int", "group", group_size=128), 256 * 512 // 2 + 256 * 4 * 2),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 256 * 512 + 2 * 4 * 4),
        ({"quant_method": "fp8"}, 256 * 512 + 4),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 256 * 512 // 2 + 256 * 4 * 2 + 256 * 4 // 2),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 256 * 512 // 2 + 256 * 8 * 2 + 256 * 8 // 2),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 256 * 512 + 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 256 * 512 // 2 + 256 * 32),
        ({"quant_method": "fbgemm_fp8"}, 256 * 512 + 256 * 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 256 * 512 // 2 + 256 * 8 * 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 256 * 512 + 256 * 4),
        ({"quant_method": "mxfp4"}, 256 * 512 * 2),
    ],
)
def test_a_scheme_stores_weights_and_scales(described: dict[str, Any], expected: int) -> None:
    """Of a matrix of 256 rows and 512 columns; MXFP4 quantizes experts only."""
    assert stored(described) == expected


def test_mxfp4_packs_experts() -> None:
    """Half a byte a weight, and a byte for 32 of them."""
    experts = Tensor("model.layers.0.mlp.experts.gate_proj.weight", (256, 512), 16)

    assert stored({"quant_method": "mxfp4"}, experts) == 256 * 512 // 2 + 256 * 16


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.input_layernorm.weight",
        "vision_tower.encoder.layers.0.mlp.fc1.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ],
)
def test_embeddings_routers_norms_and_towers_stay_as_they_are(name: str) -> None:
    """Also where the config does not say so."""
    tensor = Tensor(name, (256, 512), 16)

    assert stored({"quant_method": "fp8"}, tensor) == tensor.bytes


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("model.layers.0.mlp.up_proj", True),
        ("model.layers.0.mlp", True),
        ("up_proj", True),
        ("re:.*up_proj$", True),
        ("model.layers.0*", True),
        ("re:[", False),
        ("down_proj", False),
        ("model.layers.1", False),
    ],
)
def test_a_config_names_what_it_ignores_whole_in_part_or_as_a_pattern(name: str, *, ignored: bool) -> None:
    """A pattern that is none names nothing."""
    assert is_ignored("model.layers.0.mlp.up_proj", (name,)) is ignored


def test_vllm_quantizes_while_it_loads_where_a_flag_says_so() -> None:
    """--quantization fp8 of a checkpoint in 16 bits."""
    scheme = quantization_of(LLAMA_8B, "fp8")

    assert scheme is not None
    assert scheme.bits == 8
    assert quantization_of(LLAMA_8B, None) is None


@pytest.mark.parametrize(
    ("described", "flag", "named"),
    [
        (None, "gguf", "--quantization is 'gguf'"),
        ({"quant_method": "novel"}, None, "quant_method is 'novel'"),
        (compressed(3, "int", "group", group_size=128), None, "'compressed-tensors'"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, None, "'compressed-tensors'"),
    ],
)
def test_an_unknown_scheme_is_refused_by_name(described: object, flag: str | None, named: str) -> None:
    """It is never guessed."""
    with pytest.raises(PlanError, match=named):
        quantization_of({**LLAMA_8B, "quantization_config": described}, flag)
