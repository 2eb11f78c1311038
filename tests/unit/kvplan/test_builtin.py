"""The built-in: what starts printed, the newest version's defaults, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplan import EngineFlags, PlanError
from kvplan.builtin import Start, read_start
from kvplan.builtin.model import FAMILIES
from kvplan.generations import NEWEST_KNOWN, generation_of, text_of
from kvplan.pool import KvPool, plan_pool
from tests.support.builtin_models import MODELS
from tests.support.printed_pools import CONFIGS, GIB, HALF_A_DIGIT, REFUSED, STARTS
from tests.support.printed_pools import Start as PrintedPool
from tests.support.recorded_starts import STARTS as PARTS
from tests.support.recorded_starts import RecordedStart

# It plans neither the architectures nor a drafter.
NOT_PLANNED = {"llama-4-scout", "phi-2", "gemma-4-26b-a4b", "kimi-k2"}
# Up to 0.16 the sampler sorted the logits, which took more than twice as much.
SORTED = ("0.15.0",)
DENSE = {**MODELS["llama"], "num_hidden_layers": 32, "intermediate_size": 8192}


def start(name: str = "llama", *, keys: dict[str, Any] | None = None, **flags: Any) -> Start:
    return read_start({**MODELS[name], **(keys or {})}, EngineFlags(**flags))


def pool_of(plan: Start, available: int) -> KvPool:
    return plan_pool(plan.workers, [available] * len(plan.workers), plan.limits, generation_of(text_of(NEWEST_KNOWN)))


def tried(keys: dict[str, Any], name: str = "llama", **flags: Any) -> str:
    with pytest.raises(PlanError) as refused:
        start(name, keys=keys, **flags)
    return str(refused.value)


# --- what starts printed ---


@pytest.mark.parametrize(
    "one", [one for one in STARTS if one.config not in NOT_PLANNED], ids=lambda one: f"{one.row} {one.config}"
)
def test_a_pool_is_what_the_start_printed(one: PrintedPool) -> None:
    config = json.loads((CONFIGS / f"{one.config}.json").read_text())
    low, high = (
        pool_of(read_start(config, one.flags(size)), size)
        for size in (int((one.gib - HALF_A_DIGIT) * GIB), int((one.gib + HALF_A_DIGIT) * GIB))
    )
    assert low.max_concurrency
    assert high.max_concurrency
    assert low.blocks <= (one.blocks or low.blocks) <= high.blocks
    printed = one.concurrency or low.max_concurrency
    assert low.max_concurrency - HALF_A_DIGIT <= printed <= high.max_concurrency + HALF_A_DIGIT


@pytest.mark.parametrize(
    ("one", "needed_gib"),
    [(one, needed) for one, needed, _ in REFUSED if one.config not in NOT_PLANNED],
    ids=lambda one: str(getattr(one, "row", "")),
)
def test_a_start_that_vllm_refused_is_planned_as_refused(one: PrintedPool, needed_gib: float) -> None:
    config = json.loads((CONFIGS / f"{one.config}.json").read_text())
    size = int((one.gib + HALF_A_DIGIT) * GIB)
    pool = pool_of(read_start(config, one.flags(size)), size)
    assert not pool.fits
    assert round(pool.needed_bytes / GIB, 2) == pytest.approx(needed_gib, abs=0.011)


def parts_of(one: RecordedStart, checkpoint_bytes: int | None = None, **more: Any) -> Start:
    flags = EngineFlags(
        tensor_parallel_size=one.tensor_parallel,
        quantization=one.quantization,
        max_num_batched_tokens=8192,
        max_num_seqs=1024,
        max_model_len=2048,
        **more,
    )
    return read_start(one.config, flags, checkpoint_bytes=checkpoint_bytes)


PLANNED = [
    one for one in PARTS if one.config["architectures"][0] not in ("PhiForCausalLM", "Llama4ForConditionalGeneration")
]
TEXT = [one for one in PLANNED if "vision_config" not in one.config]


@pytest.mark.parametrize("one", TEXT, ids=str)
def test_weights_and_activation_lie_within_the_bounds(one: RecordedStart) -> None:
    plan = parts_of(one)
    if plan.weights:
        assert plan.weights[0].low <= one.weights * GIB <= plan.weights[0].high
    else:
        assert "mxfp4" in (plan.why_unknown or "")
    if one.version not in SORTED:
        assert plan.activation.low <= one.activation * GIB <= plan.activation.high


# By their parameters, 2 bytes each; gpt-oss's files have 4 bits for most, and its kernels pad them.
CHECKPOINTS = {
    "gpt-oss-20b": 13_760_000_000,
    "gemma-3-4b": 2 * 4_300_000_000,
    "gemma-3-12b": 2 * 12_190_000_000,
    "gemma-3-27b": 2 * 27_430_000_000,
}


@pytest.mark.parametrize("one", [one for one in PLANNED if one.name in CHECKPOINTS], ids=str)
def test_the_size_of_the_files_gives_weights_that_shapes_do_not(one: RecordedStart) -> None:
    """Encoders and quantized weights; without it they are not known, and the reason says what would give them."""
    without = parts_of(one)
    assert without.weights == ()
    assert "the size of the checkpoint's files" in (without.why_unknown or "")
    (weights,) = parts_of(one, CHECKPOINTS[one.name]).weights
    assert weights.low <= one.weights * GIB <= weights.high


def test_an_encoder_that_is_given_nothing_is_not_loaded() -> None:
    """Then the text's weights and activation are all; else both are not known, and it is said."""
    gemma = next(one for one in PLANNED if one.name == "gemma-3-4b")
    assert parts_of(gemma).activation is None
    assert "encoder" in (parts_of(gemma).why_unknown or "")
    without = parts_of(gemma, limit_mm_per_prompt={"image": 0})
    assert without.why_unknown is None
    assert without.weights[0].high < gemma.weights * GIB


def test_stages_and_ranks_share_the_weights() -> None:
    whole = start(keys=DENSE).weights[0].bytes
    stages = start(keys=DENSE, pipeline_parallel_size=2).weights
    ranks = start(keys=DENSE, tensor_parallel_size=4).weights
    assert whole == pytest.approx(sum(stage.bytes for stage in stages), rel=0.01)
    assert whole == pytest.approx(4 * ranks[0].bytes, rel=0.05)


# --- the newest version's defaults ---


@pytest.mark.parametrize(
    ("gib", "name", "step"),
    [
        (None, None, (8192, 1024)),
        (22.4, "NVIDIA L4", (2048, 256)),
        (79.19, "NVIDIA H100 80GB HBM3", (8192, 1024)),
        (79.25, "NVIDIA A100-SXM4-80GB", (2048, 256)),
        (178.35, "NVIDIA B200", (16384, 1024)),
    ],
)
def test_a_step_is_sized_by_the_card_and_an_a100_by_its_name(
    gib: float | None, name: str | None, step: tuple[int, int]
) -> None:
    """0.32.0, engine/arg_utils.py, get_batch_defaults."""
    plan = start(device_bytes=None if gib is None else int(gib * GIB), device_name=name)
    assert (plan.flags.max_num_batched_tokens, plan.flags.max_num_seqs) == step
    assert bool(plan.notes) is (name is None)


def test_a_short_model_has_shorter_steps_and_a_short_step_fewer_requests() -> None:
    assert start(max_model_len=2, max_num_seqs=100).flags.max_num_batched_tokens == 200
    assert start(max_num_batched_tokens=100).flags.max_num_seqs == 100


def test_a_share_of_the_card_is_092_by_default() -> None:
    """0.32.0, vllm/config/cache.py."""
    assert start().flags.gpu_memory_utilization == 0.92


@pytest.mark.parametrize(
    ("flags", "mode"),
    [({}, "align"), ({"mamba_cache_mode": "none"}, "align"), ({"enable_prefix_caching": False}, "none")],
)
def test_a_hybrid_caches_prefixes_and_aligns_its_states(flags: dict[str, Any], mode: str) -> None:
    """On by default since 0.28; a state stands for a block then, else for the whole length."""
    plan = start("qwen3-next", **flags)
    state = plan.workers[0]["model.layers.0.linear_attn"]
    assert plan.limits.mamba_cache_mode == mode
    assert state.block_size == (plan.flags.block_size if mode == "align" else plan.flags.max_model_len)


def test_a_hybrids_figures_are_doubted_as_0_33_keeps_a_state_more() -> None:
    """On Hopper, with prefix caching: 1,088 tokens a block where 0.32 has 1,056."""
    assert "0.33 keeps one more state" in start("qwen3-next").doubts[0]
    assert not start("qwen3-next", enable_prefix_caching=False).doubts


def test_the_kernels_of_mla_decide_its_block() -> None:
    blocks = {
        (capability, cache): start("deepseek-v3", compute_capability=capability, kv_cache_dtype=cache).flags.block_size
        for capability, cache in (("8.0", None), ("9.0", None), ("9.0", "fp8"), ("10.0", None), ("10.0", "fp8"))
    }
    assert list(blocks.values()) == [16, 16, 64, 32, 32]
    assert "compute capability" in start("deepseek-v3").doubts[0]
    assert not start("deepseek-v3", compute_capability="9.0").doubts


def test_gemma_has_its_table_of_words_in_every_stage() -> None:
    first, between, _ = start("gemma2", pipeline_parallel_size=3).weights
    assert first == between


def test_a_type_has_the_name_that_vllm_shows() -> None:
    assert [start(dtype=name).flags.dtype for name in ("half", "float")] == ["float16", "float32"]


def test_windows_doubt_a_step_that_nobody_gave_and_a_model_its_type() -> None:
    assert any("Windows" in doubt for doubt in start("mistral").doubts)
    assert not start("mistral", max_num_batched_tokens=2048, max_num_seqs=64).doubts
    assert "no dtype" in start(keys={"torch_dtype": None}).doubts[0]


# --- what it refuses ---


def test_every_architecture_has_a_configuration_that_is_put_to_vllm() -> None:
    """tests/own_engine/test_builtin_by_vllm.py asks for all of them."""
    assert {name for model in MODELS.values() for name in model["architectures"]} == set(FAMILIES)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"architectures": ["KimiK3ForCausalLM"]}, "architectures: 'KimiK3ForCausalLM' is not among those that the"),
        ({"architectures": None}, "architectures: absent is not among those"),
        ({"model_type": None}, "model_type: absent"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers: 5000; 4096 at most"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types: "),
        ({"layer_types": ["conv"] * 12}, "layer_types: 'conv' is not among those"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 6}, "sliding_window: absent"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3; it must divide the 16"),
        ({"hidden_size": 2049}, "hidden_size: 2049; 16 heads must divide it"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: 512"),
        ({"use_cla": True}, "use_cla: True; the built-in does not plan models that set it"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: 8192"),
        ({"rope_scaling": {"type": "longrope"}}, "two lengths"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor: -1; a number above 0"),
        ({"torch_dtype": "int8"}, "dtype: 'int8'; one of"),
        (
            {"quantization_config": {"quant_method": "new"}},
            "quantization_config.quant_method: 'new'; the built-in knows",
        ),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}}, "kv_cache_quant_algo"),
    ],
)
def test_what_the_file_says_and_the_built_in_does_not_plan_is_refused_by_key_and_value(
    keys: dict[str, Any], said: str
) -> None:
    assert said in tried(keys)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"platform": "ascend"}, "--platform: 'ascend'"),
        ({"speculative_config": '{"method": "mtp"}'}, "--speculative-config: "),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype: 'nvfp4'; the built-in plans auto, "),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size: 2"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size: 3; it must divide num_attention_heads, which is 16"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0 must be a whole number"),
        ({"pipeline_parallel_size": 13}, "--pipeline-parallel-size: 13; the model has 12 layers"),
        ({"max_model_len": 50_000}, "--max-model-len: 50000; the model allows 32768 (max_position_embeddings)"),
        ({"max_num_batched_tokens": 10, "max_num_seqs": 20}, "--max-num-batched-tokens: 10; vLLM refuses less than"),
        ({"block_size": 20}, "--block-size: 20"),
        ({"quantization": "awq"}, "--quantization: 'awq'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: 1.5 must be"),
        ({"compute_capability": "7.5"}, "--compute-capability: '7.5'; the built-in plans 8.0 and newer"),
        ({"compute_capability": "new"}, "--compute-capability: 'new'"),
        ({"dtype": "int4"}, "--dtype: 'int4'"),
        ({"dtype": "float32", "quantization": "fp8"}, "--dtype: 'float32'; vLLM serves this model in bfloat16"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel: True; vLLM refuses it for a model without"),
    ],
)
def test_flags_that_vllm_refuses_or_the_built_in_does_not_plan_are_named(flags: dict[str, Any], said: str) -> None:
    assert said in tried({}, **flags)


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("deepseek-v3", {"block_size": 64}, "--block-size: 64"),
        ("deepseek-v3", {"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype: 'fp8_e5m2'; no kernel of vLLM's"),
        ("deepseek-v32", {"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype: 'fp8_e4m3'; no kernel of vLLM's"),
        ("deepseek-v3", {"dtype": "float32"}, "--dtype: 'float32'; vLLM serves this model in"),
        ("deepseek-v3", {"compute_capability": "12.0"}, "--compute-capability: 12.0; for MLA the built-in plans 8.x"),
        ("deepseek-v32", {"compute_capability": "10.0"}, "--compute-capability: 10.0; for MLA the built-in plans 9.0"),
        ("gpt-oss", {"kv_cache_dtype": "fp8", "compute_capability": "8.0"}, "--kv-cache-dtype: 'fp8'; vLLM serves"),
        ("gemma3", {"compute_capability": "10.0"}, "--compute-capability: 10.0; for Gemma 3"),
        ("gemma2", {"dtype": "float16"}, "--dtype: 'float16'; vLLM serves this model in bfloat16"),
        ("gpt-oss", {"dtype": "float16"}, "--dtype: 'float16'"),
        (
            "qwen3-next",
            {"mamba_ssm_cache_dtype": "int8"},
            "--mamba-ssm-cache-dtype: 'int8'; the built-in plans auto alone",
        ),
        ("qwen3-next", {"tensor_parallel_size": 32}, "--tensor-parallel-size: 32"),
    ],
)
def test_what_one_family_refuses(name: str, flags: dict[str, Any], said: str) -> None:
    assert said in tried({}, name, **flags)


def test_a_head_that_blackwells_kernel_does_not_take_is_refused() -> None:
    """0.32.0, v1/attention/backends/mla/flashinfer_mla.py."""
    assert "qk_nope_head_dim: 96; on 10.0" in tried({"qk_nope_head_dim": 96}, "deepseek-v3", compute_capability="10.0")


@pytest.mark.parametrize(
    ("quantization", "element"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, 1),
        ({"quant_method": "fp8", "kv_cache_scheme": None}, 2),
    ],
)
def test_a_checkpoint_may_ask_for_a_cache_in_8_bits(quantization: dict[str, Any], element: int) -> None:
    plan = start(keys={"quantization_config": quantization})
    assert plan.workers[0]["model.layers.0.self_attn.attn"].content_bytes == 16 * 8 * 128 * 2 * element


def test_layers_that_a_method_leaves_in_16_bits_make_the_weights_unknown() -> None:
    method = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
    assert start(keys={"quantization_config": method}).weights
    method["modules_to_not_convert"] = ["model.layers.0.mlp.gate_proj"]
    plan = start(keys={"quantization_config": method})
    assert (plan.weights, plan.activation is None) == ((), False)
