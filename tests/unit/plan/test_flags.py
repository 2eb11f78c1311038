"""Flags that are left out take the default of their version; what vLLM would refuse is refused."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.plan.models.model import read_model
from highwater.plan.resolve import Resolved, resolve
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags
from kvplan.generations import generation_of

GIB = 1 << 30
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
GRANITE = (
    LLAMA
    | MAMBA2
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
    }
)
LFM2 = LLAMA | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"] * 16,
}
LATENT = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
}
QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
}
LLAMA4 = LLAMA | {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}


def resolved(values: dict[str, Any] = LLAMA, version: str = "0.19.0", **flags: Any) -> Resolved:
    """Resolve flags for a model and a version."""
    generation = generation_of(version)
    return resolve(EngineFlags(**flags), read_model(values, generation.release), generation)


@pytest.mark.parametrize(
    ("platform", "device", "version", "expected"),
    [
        ("cuda", 24 * GIB, "0.19.0", (2048, 256)),
        ("cuda", 80 * GIB, "0.19.0", (8192, 1024)),
        ("cuda", 180 * GIB, "0.19.0", (8192, 1024)),
        ("cuda", 180 * GIB, "0.32.0", (16384, 1024)),
        ("cpu", None, "0.23.0", (2048, 128)),
        ("ascend", 64 * GIB, "0.18.0", (2048, 256)),
    ],
)
def test_the_size_of_a_step_follows_the_card(platform: Any, device: int | None, version: str, expected: Any):
    """As `vllm serve` chooses it."""
    limits = resolved(platform=platform, device_bytes=device, version=version).limits
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == expected


def test_a_card_that_is_not_named_is_said_so():
    """The plan names what it assumed."""
    assert "70 to 160 GiB" in resolved().notes[0]
    assert resolved(max_num_batched_tokens=2048, max_num_seqs=8).notes == ()


@pytest.mark.parametrize(("version", "share"), [("0.19.0", 0.9), ("0.20.0", 0.92), ("0.32.0", 0.92)])
def test_the_share_of_the_card_is_the_versions(version: str, share: float):
    """0.92 from 0.20 on; none where bytes are given."""
    assert resolved(version=version).flags.gpu_memory_utilization == share
    assert resolved(version=version, kv_cache_memory_bytes=GIB).flags.gpu_memory_utilization is None


@pytest.mark.parametrize(
    ("values", "version", "on"),
    [(LLAMA, "0.12.0", True), (GRANITE, "0.23.0", False), (GRANITE, "0.27.1", False), (GRANITE, "0.28.0", True)],
)
def test_prefix_caching_is_on_by_default_but_for_hybrids_before_0_28(values: dict[str, Any], version: str, on: bool):
    """As vLLM's `_set_default_chunked_prefill_and_prefix_caching_args` has it, run of 0.26 to 0.33."""
    assert resolved(values, version).limits.prefix_caching is on


@pytest.mark.parametrize(
    ("values", "version", "mode"),
    [(GRANITE, "0.27.1", "all"), (LFM2, "0.19.0", "align"), (GRANITE, "0.28.0", "align"), (LLAMA, "0.19.0", "none")],
)
def test_the_cache_mode_of_states_follows_model_and_version(values: dict[str, Any], version: str, mode: str):
    """All states where the model can, until 0.27, else the last of each block (MambaModelConfig, run 0.26 to 0.33)."""
    assert resolved(values, version, enable_prefix_caching=True).limits.mamba_cache_mode == mode
    assert resolved(values, version, enable_prefix_caching=False).limits.mamba_cache_mode == "none"


@pytest.mark.parametrize(("version", "on"), [("0.12.0", False), ("0.13.0", False), ("0.14.0", True)])
def test_steps_are_scheduled_ahead_from_0_14_on(version: str, on: bool):
    """Unless said otherwise, and never on a CPU."""
    assert resolved(version=version).limits.async_scheduling is on
    assert not resolved(version=version, platform="cpu", async_scheduling=True).limits.async_scheduling
    assert resolved(version=version, async_scheduling=True).limits.async_scheduling


@pytest.mark.parametrize(
    ("values", "version", "platform", "is_default"),
    [
        (LLAMA, "0.25.1", "cuda", False),
        (LLAMA, "0.26.0", "cuda", True),
        (LLAMA | {"num_local_experts": 8}, "0.26.0", "cuda", False),
        (GRANITE, "0.28.0", "cuda", False),
        (GRANITE, "0.29.0", "cuda", True),
        (LLAMA, "0.32.0", "cpu", False),
    ],
)
def test_the_second_runner_is_the_default_of_ever_more_models(
    values: dict[str, Any], version: str, platform: Any, is_default: bool
):
    """It schedules ahead with several pipeline stages too, which sliding windows reserve for."""
    assert resolved(values, version, platform=platform).limits.v2_model_runner is is_default


@pytest.mark.parametrize(("version", "separate"), [("0.13.0", False), ("0.14.0", True)])
def test_chunked_layers_have_groups_of_their_own_from_0_14_on(version: str, separate: bool):
    """Before, the hybrid manager was disabled for them."""
    assert resolved(LLAMA4, version, max_model_len=8192).limits.hybrid_manager is separate


@pytest.mark.parametrize(
    ("version", "capability", "dtype", "block"),
    [
        ("0.12.0", "9.0", None, 64),
        ("0.12.0", "10.0", None, 128),
        ("0.12.0", "8.0", None, 16),
        ("0.15.0", "10.0", None, 64),
        ("0.19.0", "9.0", None, 16),
        ("0.19.0", "9.0", "fp8", 64),
        ("0.19.0", "10.0", "fp8", 32),
        ("0.19.0", "8.9", None, 16),
    ],
)
def test_mlas_block_is_that_of_its_kernel(version: str, capability: str, dtype: str | None, block: int):
    """The kernel is chosen by card, version and cache type."""
    found = resolved(LATENT, version, compute_capability=capability, kv_cache_dtype=dtype, max_model_len=8192)
    assert found.blocks.attention == block


@pytest.mark.parametrize(
    ("quantization", "version", "expected"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "0.19.0", "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "0.19.0", "auto"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "0.19.0", "fp8_e4m3"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "0.19.0", "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "0.12.0", "auto"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "0.19.0", "auto"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "0.32.0", "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "0.19.0", "auto"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "0.20.0", "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "0.32.0", "auto"),
        (
            {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
            "0.19.0",
            "fp8_e4m3",
        ),
    ],
)
def test_a_checkpoint_may_want_a_cache_of_eight_bits(quantization: dict[str, Any], version: str, expected: str):
    """Where `--kv-cache-dtype` is auto."""
    assert resolved(LLAMA | {"quantization_config": quantization}, version).elements.cache == expected


@pytest.mark.parametrize(("version", "expected"), [("0.20.0", "fp8"), ("0.23.0", "bfloat16")])
def test_up_to_0_22_the_checkpoints_scheme_wins(version: str, expected: str):
    """Even over a cache type that was asked for."""
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    found = resolved(LLAMA | {"quantization_config": scheme}, version, kv_cache_dtype="bfloat16")
    assert found.elements.cache == expected


@pytest.mark.parametrize(
    ("dtype", "cache", "head_bytes"),
    [
        ("bfloat16", None, 512),
        ("float32", None, 1024),
        ("bfloat16", "fp8", 256),
        ("bfloat16", "nvfp4", 144),
        ("bfloat16", "int8_per_token_head", 264),
    ],
)
def test_the_bytes_of_a_head_follow_the_element_type(dtype: str, cache: str | None, head_bytes: int):
    """Key and value of one token and one head of 128."""
    elements = resolved(dtype=dtype, kv_cache_dtype=cache, version="0.23.0").elements
    packed = elements.token_head_bytes(128)
    assert (2 * 128 * elements.cache_bytes if packed is None else packed) == head_bytes


@pytest.mark.parametrize(("named", "expected"), [("float32", "bfloat16"), (None, "bfloat16"), ("float16", "float16")])
def test_a_float32_checkpoint_is_served_in_bfloat16(named: str | None, expected: str):
    """And so is one that names no type, with a note."""
    found = resolved(LLAMA | {"torch_dtype": named})
    assert found.elements.model == expected
    assert any("no dtype" in note for note in found.notes) is (named is None)


PLATFORMS: tuple[tuple[dict[str, Any], str, str, int | str], ...] = (
    (LLAMA, "cuda", "0.23.0", 16),
    (LLAMA, "cpu", "0.23.0", 128),
    (LLAMA, "ascend", "0.18.0", 128),
    (LFM2, "cpu", "0.12.0", 16),
    (LFM2, "cpu", "0.19.0", "0.18 to 0.20 do not align a hybrid's pages"),
    (LFM2, "cpu", "0.23.0", 128),
    (LFM2, "ascend", "0.18.0", "from 0.16 on lays out a hybrid's states"),
    (LFM2, "ascend", "0.12.0", "for qwen3_next only, and this model is 'lfm2'"),
    (LATENT, "cpu", "0.23.0", "vLLM serves MLA there from 0.28 on"),
    (LATENT, "cpu", "0.32.0", 16),
)


@pytest.mark.parametrize(("values", "platform", "version", "expected"), PLATFORMS)
def test_the_block_is_the_platforms(values: dict[str, Any], platform: Any, version: str, expected: int | str):
    """And what a platform does not serve, or serves in a way that is not modelled, is refused."""
    if isinstance(expected, str):
        with pytest.raises(PlanError, match=expected):
            resolved(values, version, platform=platform)
    else:
        assert resolved(values, version, platform=platform).blocks.attention == expected


@pytest.mark.parametrize(("asked", "noted"), [(None, False), (128, False), (64, True), (256, True)])
def test_on_ascend_another_block_size_is_replaced_and_a_note_says_so(asked: int | None, *, noted: bool):
    """Of `--block-size 64` vllm-ascend makes 128 tokens a block."""
    found = resolved(version="0.18.0", platform="ascend", block_size=asked)

    assert found.blocks.attention == 128
    assert any(f"--block-size: {asked}; vllm-ascend makes it 128" in note for note in found.notes) is noted


@pytest.mark.parametrize("asked", [None, 64])
def test_on_ascend_a_hybrids_block_grows_by_multiples_of_128(asked: int | None):
    """Qwen3-Next on four ranks, up to 0.15: states of 274,432 bytes, 1,024 bytes of keys and values a token."""
    blocks = resolved(QWEN3_NEXT, "0.12.0", platform="ascend", tensor_parallel_size=4, block_size=asked).blocks

    assert (blocks.attention, blocks.state_page_bytes) == (384, 384 * 1024)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_model_len": 0}, "--max-model-len: 0; a whole number of 1 or more"),
    ({"max_model_len": 131073}, r"--max-model-len: 131073; the model allows 131072 \(max_position_embeddings\)"),
    ({"tensor_parallel_size": 3}, "--tensor-parallel-size: 3; the model's 32 attention heads"),
    ({"pipeline_parallel_size": 33}, "--pipeline-parallel-size: 33; the model has 32 layers"),
    ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization: 1.5; more than 0, and 1 at most"),
    ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization: nan"),
    ({"block_size": 24}, "--block-size: 24; attention kernels take multiples of 16"),
    ({"kv_cache_dtype": "fp6"}, "--kv-cache-dtype: 'fp6'; for vLLM 0.19.0 these can be planned: auto"),
    ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype: 'nvfp4'; for vLLM 0.19.0"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, "--kv-cache-dtype: 'fp8_ds_mla'; it is the format of models with sparse MLA"),
    ({"dtype": "int8"}, "--dtype: 'int8'; auto or one of"),
    ({"mamba_cache_dtype": "fp8"}, "--mamba-cache-dtype: 'fp8'; vLLM 0.19.0 takes auto, float32, float16"),
    ({"mamba_cache_mode": "some"}, "--mamba-cache-mode: 'some'; vLLM 0.19.0 takes one of none, align, all"),
    ({"mamba_block_size": 64}, "--mamba-block-size: 64; vLLM takes it with prefix caching only"),
    ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, "--max-num-batched-tokens: 64; vLLM refuses less than"),
    ({"compute_capability": "hopper"}, "--compute-capability: 'hopper'; write it as 9.0"),
    ({"speculative_config": "eagle"}, "--speculative-config: 'eagle' is not JSON"),
)


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=lambda one: "" if isinstance(one, str) else str(one))
def test_a_flag_that_vllm_would_refuse_is_refused(flags: dict[str, Any], message: str):
    """The error names the flag, the value and what would be right."""
    with pytest.raises(PlanError, match=message):
        resolved(**flags)
