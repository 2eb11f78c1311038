"""Any config.json and any flags give a plan or an error that names the key: never a crash, never a hang."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from highwater.plan.answer import plan_json, plan_text
from highwater.plan.errors import PlanError
from highwater.plan.flags import EngineFlags
from highwater.plan.models.architectures import ARCHITECTURES
from highwater.plan.offline import plan_offline, read_config

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


def tried(values: dict[str, Any], **flags: Any) -> str | None:
    """Plan; return the error's text, or None where there is a plan, whose answer can be written."""
    try:
        plan = plan_offline(values, EngineFlags(**({"kv_cache_memory_bytes": 1 << 34} | flags)), "0.19.0")
    except PlanError as exc:
        return str(exc)
    json.dumps(plan_json(plan, "model"))
    plan_text(plan)
    return None


def places(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the file's own object and those of its language model."""
    return [values, *(inner for key in ("text_config",) if isinstance(inner := values.get(key), dict))]


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
