"""A config.json is read as Transformers and vLLM read it; what is not known is refused by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from highwater.plan.models.architectures import ARCHITECTURES, served
from highwater.plan.models.model import read_model
from highwater.plan.offline import OfflinePlan, plan_offline
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags
from kvplan.specs import LayerSpec, MambaState, MlaAttention, SlidingWindow
from kvplan.versions import NEWEST_KNOWN, OLDEST_KNOWN

RELEASE = (0, 19, 0)
SMALL: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}


def config(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    """Return a small model's config.json."""
    return {"architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16"} | SMALL | keys


def planned(values: dict[str, Any], version: str = "0.19.0", **flags: Any) -> OfflinePlan:
    """Plan a model with a GiB for its KV cache."""
    return plan_offline(values, EngineFlags(**({"kv_cache_memory_bytes": 1 << 30} | flags)), version)


def specs(values: dict[str, Any], version: str = "0.19.0", **flags: Any) -> list[LayerSpec]:
    """Return the specs of a model's layers, in order."""
    return list(planned(values, version, **flags).layers[0].values())


def kinds(values: dict[str, Any], version: str = "0.19.0", **flags: Any) -> Counter[str]:
    """Count a model's layers by kind."""
    return Counter(type(spec).__name__ for spec in specs(values, version, **flags))


LLAMA = config("LlamaForCausalLM", "llama", max_position_embeddings=8192)
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
GATED = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "num_key_value_heads": 8}

# The layers that vLLM 0.23's own models report for the same files.
LAYERS = (
    (LLAMA, {"FullAttention": 8}),
    (config("MistralForCausalLM", "mistral", sliding_window=4096), {"SlidingWindow": 8}),
    (config("MistralForCausalLM", "mistral"), {"SlidingWindow": 8}),
    (config("MistralForCausalLM", "mistral", sliding_window=None), {"FullAttention": 8}),
    (config("Qwen2ForCausalLM", "qwen2", sliding_window=4096), {"FullAttention": 8}),
    (config("Qwen2ForCausalLM", "qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=0),
     {"SlidingWindow": 8}),
    (config("Starcoder2ForCausalLM", "starcoder2", sliding_window=4096), {"SlidingWindow": 8}),
    (config("Gemma2ForCausalLM", "gemma2"), {"SlidingWindow": 4, "FullAttention": 4}),
    (config("Gemma3ForCausalLM", "gemma3_text"), {"SlidingWindow": 7, "FullAttention": 1}),
    (config("Cohere2ForCausalLM", "cohere2"), {"SlidingWindow": 6, "FullAttention": 2}),
    (config("Olmo3ForCausalLM", "olmo3"), {"SlidingWindow": 6, "FullAttention": 2}),
    (config("Exaone4ForCausalLM", "exaone4"), {"SlidingWindow": 6, "FullAttention": 2}),
    (config("GptOssForCausalLM", "gpt_oss"), {"SlidingWindow": 4, "FullAttention": 4}),
    (config("Gemma3nForCausalLM", "gemma3n_text", num_kv_shared_layers=3), {"SlidingWindow": 4, "FullAttention": 1}),
    (config("Llama4ForCausalLM", "llama4_text"), {"ChunkedLocal": 6, "FullAttention": 2}),
    (config("DeepseekV3ForCausalLM", "deepseek_v3", **LATENT), {"MlaAttention": 8}),
    (config("DeepseekV32ForCausalLM", "deepseek_v32", index_topk=2048, index_head_dim=128, **LATENT),
     {"MlaAttention": 16}),
    (config("LongcatFlashForCausalLM", "longcat_flash", num_layers=4, **LATENT), {"MlaAttention": 8}),
    (config("Mamba2ForCausalLM", "mamba2", num_heads=16, head_dim=64), {"MambaState": 8}),
    (config("JambaForCausalLM", "jamba"), {"MambaState": 7, "FullAttention": 1}),
    (config("GraniteMoeHybridForCausalLM", "granitemoehybrid", layer_types=["mamba"] * 7 + ["attention"], **MAMBA2),
     {"MambaState": 7, "FullAttention": 1}),
    (config("FalconH1ForCausalLM", "falcon_h1", **MAMBA2), {"MambaState": 8, "FullAttention": 8}),
    (config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M-M*-MEM", num_hidden_layers=8),
     {"MambaState": 4, "FullAttention": 1}),
    (config("Qwen3NextForCausalLM", "qwen3_next", **GATED), {"MambaState": 6, "FullAttention": 2}),
    (config("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "full_attention"] * 4),
     {"MambaState": 4, "FullAttention": 4}),
    (config("MiniMaxText01ForCausalLM", "minimax_text_01", attn_type_list=[0] * 7 + [1], head_dim=64),
     {"MambaState": 7, "FullAttention": 1}),
    (config("WhisperForConditionalGeneration", "whisper", decoder_layers=4, decoder_attention_heads=6,
            d_model=384, hidden_size=384,
            num_attention_heads=6),
     {"FullAttention": 4, "CrossAttention": 4}),
)  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), LAYERS, ids=lambda one: one.get("architectures", [""])[0])
def test_layers_are_those_of_vllms_own_model(values: dict[str, Any], expected: dict[str, int]):
    """Kind by kind."""
    assert kinds(values) == expected


def test_older_files_of_wrappers_have_their_language_model_at_the_top():
    """Qwen2-VL: its window is not used unless the file says so, as in Qwen2."""
    values = config("Qwen2VLForConditionalGeneration", "qwen2_vl", sliding_window=32768, use_sliding_window=False)
    assert kinds(values) == {"FullAttention": 8}


def test_a_wrapper_follows_its_language_model():
    """PaliGemma around Gemma 2 slides; around a model that is not known here it is refused."""
    text = SMALL | {"model_type": "gemma2"}
    values = {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma", "text_config": text}
    assert kinds(values) == {"SlidingWindow": 4, "FullAttention": 4}
    with pytest.raises(PlanError, match=r"text_config.model_type: 'odd'; inside this architecture"):
        planned(values | {"text_config": text | {"model_type": "odd"}})


def test_absent_keys_take_the_defaults_of_the_models_type():
    """gemma-3-4b's text_config names neither heads nor head size: Transformers' are 8, 4 and 256."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    first = specs(values)[0]
    assert isinstance(first, SlidingWindow)
    assert (first.kv_heads, first.head_size, first.window) == (4, 256, 1024)


@pytest.mark.parametrize(
    ("ranks", "heads"), [(1, 2), (2, 1), (4, 1), (8, 1)], ids=["one", "split", "repeated", "repeated more"]
)
def test_kv_heads_are_split_and_then_repeated(ranks: int, heads: int):
    """A rank has at least one."""
    assert {spec.kv_heads for spec in specs(LLAMA, tensor_parallel_size=ranks)} == {heads}  # type: ignore[attr-defined]


def test_a_latent_cache_is_not_split():
    """Every rank keeps the whole latent vector."""
    values = config("DeepseekV3ForCausalLM", "deepseek_v3", **LATENT)
    assert {spec.page_bytes for spec in specs(values, tensor_parallel_size=8)} == {16 * 576 * 2}


def test_sparse_attention_packs_its_cache_in_eight_bits():
    """656 bytes a token for the latent vector, and 132 for the indexer's keys."""
    values = config("DeepseekV32ForCausalLM", "deepseek_v32", index_topk=2048, index_head_dim=128, **LATENT)
    latent, index = specs(values, kv_cache_dtype="fp8")[:2]
    assert isinstance(latent, MlaAttention)
    assert (latent.block_size, latent.page_bytes, index.page_bytes) == (64, 64 * 656, 64 * 132)


def test_zamba2_without_a_head_size_has_twice_the_plain_one():
    """As its configuration class fills it in: 2 x 512 / 8."""
    zamba = config("Zamba2ForCausalLM", "zamba2", layers_block_type=["mamba", "hybrid"] * 4, n_mamba_heads=16)
    zamba |= {"mamba_ngroups": 1, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2}
    zamba.pop("attention_head_dim", None)
    attention = next(spec for spec in specs(zamba) if not isinstance(spec, MambaState))
    assert attention.head_size == 128


def test_a_hybrids_block_grows_until_its_page_holds_a_state():
    """Qwen3-Next on one card: 2 heads of 256 in bfloat16 are 2,048 bytes a token, a state is 1,097,728 bytes."""
    values = config("Qwen3NextForCausalLM", "qwen3_next", head_dim=256, **GATED)
    plan = planned(values)
    state = next(spec for spec in plan.layers[0].values() if isinstance(spec, MambaState))
    assert state.content_bytes == 3 * 8192 * 2 + 32 * 128 * 128 * 2
    assert plan.resolved.blocks.attention == 544
    assert {spec.page_bytes for spec in plan.layers[0].values()} == {544 * 2048}


def test_states_in_float32_where_the_models_configuration_says_so():
    """Qwen3.5 names `mamba_ssm_dtype`; a flag beats it."""
    values = config("Qwen3_5ForConditionalGeneration", "qwen3_5_text", mamba_ssm_dtype="float32", **GATED)
    state = next(spec for spec in specs(values) if isinstance(spec, MambaState))
    assert state.element_bytes == (2, 4)
    state = next(spec for spec in specs(values, mamba_ssm_cache_dtype="float16") if isinstance(spec, MambaState))
    assert state.element_bytes == (2, 2)


@pytest.mark.parametrize(("version", "size"), [("0.12.0", 2), ("0.19.0", 2), ("0.20.0", 4), ("0.32.0", 4)])
def test_nemotrons_states_are_in_float32_from_0_20_on(version: str, size: int):
    """Unless its configuration names another type."""
    pattern = {"hybrid_override_pattern": "M-M*-MEM"}
    values = config("NemotronHForCausalLM", "nemotron_h", **pattern)
    state = next(spec for spec in specs(values, version) if isinstance(spec, MambaState))
    assert state.element_bytes == (2, size)
    values = config("NemotronHForCausalLM", "nemotron_h", mamba_ssm_cache_dtype="float16", **pattern)
    state = next(spec for spec in specs(values, version) if isinstance(spec, MambaState))
    assert state.element_bytes == (2, 2)


def test_a_hybrids_class_without_states_is_no_hybrid():
    """granite-4.0-micro: all attention, so the blocks stay as they are."""
    values = config("GraniteMoeHybridForCausalLM", "granitemoehybrid", layer_types=["attention"] * 8, **MAMBA2)
    assert planned(values).resolved.blocks.attention == 16


def test_a_pipeline_gives_left_over_layers_to_the_stages_before_the_last():
    """Eight layers on three stages: 2, 3, 3 would be wrong; vLLM's are 3, 3, 2."""
    plan = planned(LLAMA, pipeline_parallel_size=3)
    assert [len(worker) for worker in plan.layers] == [3, 3, 2]


def test_prediction_layers_are_added_where_they_are_asked_for():
    """Multi-token prediction keeps what a layer of its model keeps."""
    values = config("DeepseekV3ForCausalLM", "deepseek_v3", num_nextn_predict_layers=1, **LATENT)
    asked = '{"method": "mtp", "num_speculative_tokens": 1}'
    assert len(specs(values)) == 8
    assert len(specs(values, speculative_config=asked)) == 9


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}}, 65536),
        ({"max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 131072),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "longrope"}}, 4096),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"max_position_embeddings": 8192, "seq_length": 2048}, 2048),
    ],
)  # fmt: skip
def test_the_length_is_derived_as_vllm_derives_it(keys: dict[str, Any], expected: int):
    """Where none is asked for."""
    assert planned(config("LlamaForCausalLM", "llama", **keys)).resolved.limits.max_model_len == expected


@pytest.mark.parametrize(
    ("kind", "version", "expected"),
    [("yarn", "0.29.0", 131072), ("yarn", "0.30.0", 32768), ("yarn", "0.32.0", 32768),
     ("deepseek_yarn", "0.29.0", 131072), ("deepseek_yarn", "0.32.0", 32768), ("linear", "0.32.0", 131072)],
)  # fmt: skip
def test_yarn_multiplies_the_length_up_to_0_29_only(kind: str, version: str, expected: int):
    """From 0.30 on `max_position_embeddings` is taken as scaled already."""
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32768}
    values = config("LlamaForCausalLM", "llama", max_position_embeddings=32768, rope_scaling=rope)
    assert planned(values, version).resolved.limits.max_model_len == expected


REFUSED = (
    ({**LLAMA, "architectures": ["NoSuchForCausalLM"]}, r"architectures: 'NoSuchForCausalLM' is not known"),
    ({**LLAMA, "architectures": None}, r"architectures: None; a list"),
    ({**LLAMA, "num_hidden_layers": -1}, r"num_hidden_layers: -1; a whole number of 1 or more"),
    ({**LLAMA, "num_hidden_layers": 2.5}, r"num_hidden_layers: 2.5; a whole number"),
    ({**LLAMA, "num_hidden_layers": True}, r"num_hidden_layers: True; a whole number"),
    ({**LLAMA, "num_key_value_heads": "8"}, r"num_key_value_heads: '8'; a whole number"),
    ({**LLAMA, "hidden_size": 500}, r"hidden_size: 500; 8 heads must divide it"),
    ({**LLAMA, "dtype": "int3", "torch_dtype": None}, r"dtype: 'int3'; one of float32"),
    ({**LLAMA, "model_type": None}, r"model_type: absent"),
    (config("Qwen3ForCausalLM", "qwen3", kv_lora_rank=512), r"kv_lora_rank: 512; MLA is not known"),
    ({**LLAMA, "compress_ratios": [4]}, r"compress_ratios: \[4\]; compressed latent caches are not modelled"),
    (
        config("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", use_cla=True, cla_share_factor=2),
        r"use_cla: True; layers that share another's cache are not modelled",
    ),
    (
        config("Qwen2ForCausalLM", "qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=4),
        r"max_window_layers: 4; vLLM needs 8 here, a window in some layers only fails",
    ),
    (
        config(
            "LlavaOnevisionForConditionalGeneration",
            "qwen2",
            layer_types=["full_attention", "sliding_attention"] * 4,
            max_window_layers=4,
        ),
        r"max_window_layers: 4; vLLM needs 8 here",
    ),
    (
        config("SeedOssForCausalLM", "seed_oss", sliding_window=4096, max_window_layers=4),
        r"max_window_layers: 4; vLLM needs 8 here",
    ),
    ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0}}, r"original_max_position_embeddings: absent"),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": -2}}, r"rope_scaling.factor: -2; a number above 0"),
    ({**LLAMA, "text_config": 7}, r"text_config: 7; an object is needed"),
    ({**LLAMA, "quantization_config": "fp8"}, r"quantization_config: 'fp8'; an object is needed"),
    (config("Gemma2ForCausalLM", "gemma2", layer_types=["sliding_attention"]), r"layer_types: '1 types'"),
    (config("Gemma2ForCausalLM", "gemma2", layer_types=["odd"] * 8), r"layer_types: 'odd'"),
    (config("DeepseekV3ForCausalLM", "deepseek_v3", **(LATENT | {"kv_lora_rank": None})), r"kv_lora_rank: absent"),
    (config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="MM"), r"num_hidden_layers: 8; 2 types"),
    (config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="MMMMMMX*"), r"layer_types: 'X'"),
    (config("Zamba2ForCausalLM", "zamba2"), r"layers_block_type: absent"),
)


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda one: one if isinstance(one, str) else "")
def test_a_configuration_that_makes_no_sense_gives_no_plan(values: dict[str, Any], message: str):
    """The error names the key, the value and what would be right."""
    with pytest.raises(PlanError, match=message):
        planned(values)


def test_an_architecture_that_a_version_lacks_is_refused():
    """Gemma 4 came with 0.19."""
    values = config("Gemma4ForCausalLM", "gemma4_text")
    with pytest.raises(
        PlanError, match=r"'Gemma4ForCausalLM'; vLLM 0\.12\.0 does not have it, 0\.19\.0 and newer does"
    ):
        read_model(values, (0, 12, 0))
    assert read_model(values, RELEASE).architecture == "Gemma4ForCausalLM"


def test_an_architecture_that_a_version_no_longer_has_is_refused():
    """MPT went with 0.29; every patch of 0.28 has it."""
    values = config("MPTForCausalLM", "mpt")
    with pytest.raises(PlanError, match=r"'MPTForCausalLM'; vLLM 0\.32\.0 does not have it, 0\.11\.0 to 0\.28 does"):
        read_model(values, (0, 32, 0))
    assert read_model(values, (0, 28, 9)).architecture == "MPTForCausalLM"


def test_every_architecture_names_the_versions_that_have_it():
    """No version that is planned for is left open, and none is named that has no rules."""
    assert served().keys() == ARCHITECTURES.keys()
    assert all(OLDEST_KNOWN <= one.since <= NEWEST_KNOWN for one in served().values())
    assert all(one.until is None or one.since[:2] < one.until <= NEWEST_KNOWN[:2] for one in served().values())


def test_every_architecture_has_a_rule():
    """And the families that people serve most are there."""
    assert all(callable(one.build) for one in ARCHITECTURES.values())
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"} <= set(
        ARCHITECTURES
    )
