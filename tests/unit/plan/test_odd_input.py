"""Any config.json and any flags give a plan or an error that names the key: never a crash, never a hang."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from highwater.plan.answer import plan_json, plan_text
from highwater.plan.models.architectures import ARCHITECTURES
from highwater.plan.offline import plan_offline, read_config
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags

FOLDER = Path(__file__).parent / "configs"
# One of each kind: full, sliding, two head sizes, MLA, recurrent.
CONFIGS = [
    FOLDER / f"{name}.json" for name in ("phi-2", "gemma-2-2b", "gemma-4-26b-a4b", "kimi-k2", "qwen3.6-35b-a3b-nvfp4")
]
ODD: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 2.5, 1e308, float("nan"), float("inf"), 10**30, "", "8", [], [1], ["odd"], {},
    {"rope_type": "yarn"}, {"factor": float("nan")}, {"a": {"b": {}}}, [None],
)  # fmt: skip
KEYS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window",
    "layer_types", "rope_scaling", "rope_parameters", "max_position_embeddings", "model_max_length", "model_type",
    "architectures", "quantization_config", "torch_dtype", "dtype", "kv_lora_rank", "num_kv_shared_layers",
    "global_head_dim", "text_config", "vision_config", "linear_num_value_heads", "no_rope_layers",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "num_nextn_predict_layers",
)  # fmt: skip


def tried(values: dict[str, Any], version: str = "0.19.0", **flags: Any) -> str | None:
    """Plan; return the error's text, or None where there is a plan, whose answer can be written."""
    try:
        plan = plan_offline(values, EngineFlags(**({"kv_cache_memory_bytes": 1 << 34} | flags)), version)
    except PlanError as exc:
        return str(exc)
    json.dumps(plan_json(plan, "model"))
    plan_text(plan)
    return None


def places(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the file's own object and those of its language model."""
    return [values, *(inner for key in ("text_config",) if isinstance(inner := values.get(key), dict))]


@pytest.mark.whole("every odd value of every key of a model's file")
@pytest.mark.untraced
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_any_value_of_a_key_gives_a_plan_or_a_plan_error(path: Path):
    """Each key of the file and those that decide the size of a cache, one odd value after the other."""
    whole = read_config(str(path))
    for place, keys in enumerate(places(dict(whole))):
        for key in sorted({*keys, *KEYS}):
            for odd in ODD:
                values = copy.deepcopy(dict(whole))
                places(values)[place][key] = copy.deepcopy(odd)
                error = tried(values)
                assert error is None or ": " in error


QUANTIZED = {
    "compressed-tensors": {"kv_cache_scheme": {"num_bits": 8}, "ignore": ["lm_head"], "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "float", "group_size": 128, "strategy": "tensor",
                    "block_structure": [128, 128]}}}},
    "modelopt": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
                 "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
    "fp8": {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "gptq": {"bits": 4, "group_size": 128},
}  # fmt: skip
BASE = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
NESTED = (
    BASE | {"architectures": ["MPTForCausalLM"], "model_type": "mpt", "attn_config": {"kv_n_heads": 2}},
    BASE | {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "block_configs": [
        {"attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False}},
        {"attention": {"no_op": True}}]},
    BASE | {"architectures": ["LlamaForCausalLM"], "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
    BASE | {"architectures": ["LlamaForCausalLM"], "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}},
    {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "text_config": BASE | {
        "model_type": "qwen2_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
     "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 512, "mlp_ratio": 4, "num_heads": 4,
                       "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}},
    {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": BASE | {
        "model_type": "qwen3_vl_text", "num_key_value_heads": 4},
     "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 16,
                       "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0, 1]}},
    *(BASE | {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": method} | inner}
      for method, inner in QUANTIZED.items()),
)  # fmt: skip


def nested_places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to everything below the top of a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if at:
            yield (*at, key)
        yield from nested_places(inner, (*at, key))


@pytest.mark.whole("every odd value of every key of a model's file")
@pytest.mark.parametrize(
    "flags", [{}, {"kv_cache_memory_bytes": None, "device_bytes": 80 << 30}], ids=["bytes", "device"]
)
@pytest.mark.parametrize("whole", NESTED, ids=lambda one: one.get("quantization_config", one).get("quant_method") or
                         one["architectures"][0])  # fmt: skip
def test_any_value_of_a_nested_key_gives_a_plan_or_a_plan_error(whole: dict[str, Any], flags: dict[str, Any]):
    """With the bytes given, and with those of a device, whose weights depend on other keys."""
    assert tried(whole, "0.28.0", **flags) is None
    for *way, last in nested_places(whole):
        for odd in (*ODD, -4, 0.5, "x", [[]], {"x": [1]}):
            values = copy.deepcopy(whole)
            place: Any = values
            for key in way:
                place = place[key]
            place[last] = copy.deepcopy(odd)
            error = tried(values, "0.28.0", **flags)
            assert error is None or ": " in error


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_takes_odd_values(name: str):
    """Several keys at once, the same for each run."""
    chance = random.Random(name)  # noqa: S311 - test data
    model_types = ("llama", "qwen2", "falcon", "nemotron_h", "deepseek_v3", "bamba", "gemma4_text", "whisper", "mpt")
    for _ in range(40):
        values = {key: chance.choice(ODD) for key in chance.sample(KEYS, 8)}
        values |= {"architectures": [name], "model_type": chance.choice(model_types)}
        error = tried(values)
        assert error is None or ": " in error


@pytest.mark.parametrize("flag", sorted(EngineFlags.__dataclass_fields__))
def test_any_value_of_a_flag_gives_a_plan_or_a_plan_error(flag: str):
    """Of the kinds that a command line can hand over."""
    whole = dict(read_config(str(CONFIGS[0])))
    default = EngineFlags.__dataclass_fields__[flag].default
    texts = ("", "odd", "{}", "[]", "null", '{"method": "mtp", "num_speculative_tokens": 1}')
    numbers = (-1, 0, 1, 3, 10**30)
    for odd in numbers if flag not in TEXT_FLAGS else texts:
        if flag != "platform" and not isinstance(default, bool):
            error = tried(whole, **{flag: odd})
            assert error is None or ": " in error


TEXT_FLAGS = {
    "compute_capability", "dtype", "kv_cache_dtype", "mamba_cache_dtype", "mamba_cache_mode", "mamba_ssm_cache_dtype",
    "quantization", "speculative_config",
}  # fmt: skip
