"""The version that brought a rule has it, and the last one before does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from highwater.plan.models.model import read_model
from highwater.plan.resolve import Resolved, resolve
from highwater.units import GIB
from kvplan.flags import EngineFlags
from kvplan.generations import generation_of
from kvplan.grouping import group_layers
from kvplan.limits import Limits
from kvplan.specs import FullAttention, Layers, SlidingWindow

LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256)
FULL = FullAttention(block_size=16, kv_heads=4, head_size=128, element_bytes=2, indexes_by_block_stride=True)
SLIDING = SlidingWindow(
    block_size=16, kv_heads=4, head_size=128, element_bytes=2, window=1024, indexes_by_block_stride=True
)
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
WHISPER = LLAMA | {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 1280,
    "decoder_layers": 32,
    "decoder_attention_heads": 20,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "hidden_size": 1280,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "max_position_embeddings": 448,
}
# Kimi's delta attention in three of four layers, MLA in the fourth.
KIMI_LINEAR = LLAMA | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}


def resolved(values: dict[str, Any], version: str, **flags: Any) -> Resolved:
    """Resolve flags for a model and a version."""
    generation = generation_of(version)
    return resolve(EngineFlags(**flags), read_model(values, generation.release), generation)


def groups_of(version: str, layers: Layers, *, hybrid_manager: bool = True) -> list[tuple[str, int]]:
    """Return each group's kind and number of layers."""
    limits = replace(LIMITS, hybrid_manager=hybrid_manager)
    return [(group.kind, len(group.layers)) for group in group_layers(layers, limits, generation_of(version))]


def test_the_largest_cards_take_16384_tokens_a_step_from_0_28_on() -> None:
    """A card of 180 GiB; smaller ones keep 8,192: `EngineArgs.get_batch_defaults`, run of 0.26 to 0.33."""
    for version, device, tokens in (("0.27.1", 180, 8192), ("0.28.0", 180, 16384), ("0.28.0", 140, 8192)):
        limits = resolved(LLAMA, version, device_bytes=device * GIB).limits
        assert limits.max_num_batched_tokens == tokens, (version, device)


def test_cross_attention_is_sized_by_a_step_from_0_13_on() -> None:
    """Before, by the encoder's own length; a step is never shorter than the model."""
    for version, given, tokens in (("0.12.0", 2048, 1500), ("0.13.0", 2048, 2048), ("0.32.0", None, 8192)):
        limits = resolved(WHISPER, version, max_num_batched_tokens=given).limits
        assert limits.max_encoder_tokens == tokens, version


def test_pages_are_padded_whatever_the_kernel_indexes_by_from_0_29_on() -> None:
    """A page that does not divide: up to 0.28 the kernel's stride decides."""
    odd = replace(FULL, head_size=80)
    assert groups_of("0.28.0", {"a": SLIDING, "b": odd}) == [("sliding", 1), ("full", 1)]
    without_stride = {"a": SLIDING, "b": replace(odd, indexes_by_block_stride=False)}
    assert groups_of("0.29.0", without_stride) == [("sliding", 1), ("full", 1)]


def test_windows_kept_whole_keep_their_stride_from_0_28_on() -> None:
    """Before, they lost it and shared no spec with the other layers."""
    layers = {f"layers.{place}": FULL if place % 6 == 5 else SLIDING for place in range(12)}
    assert groups_of("0.27.0", layers, hybrid_manager=False) == [("mixed", 12)]
    assert groups_of("0.28.0", layers, hybrid_manager=False) == [("full", 12)]


def test_the_blocks_of_a_hybrid_with_mla_are_multiples_of_128_from_0_28_on() -> None:
    """Before, of the smallest block of its kernel, which is 16 on a card of compute capability 9.0."""
    before, after = (resolved(KIMI_LINEAR, version).blocks.attention for version in ("0.27.0", "0.28.0"))
    assert (before % 16, after % 128) == (0, 0)
    assert before % 128 != 0
    assert after == -(-before // 128) * 128
