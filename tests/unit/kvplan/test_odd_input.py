"""Any config.json gives a plan or an error that names the key: never a crash, never a hang."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan import EngineFlags, PlanError
from kvplan.builtin import read_start
from kvplan.generations import generation_of
from kvplan.pool import plan_pool
from tests.support.builtin_models import MODELS

# One of each kind, with few layers: full, windows by a pattern, MLA with an indexer, a wrapped hybrid with experts.
KINDS = ("llama-linear", "gemma3", "deepseek-v32", "qwen3.5-moe")
ODD: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 2.5, 1e308, float("nan"), float("inf"), 10**30, "", "8", [], [1], ["odd"], {},
    {"rope_type": "yarn"}, {"factor": float("nan")}, {"quant_method": "fp8", "ignore": 1}, {"a": {"b": {}}}, [None],
)  # fmt: skip
KEYS = (
    *("layer_types", "rope_scaling", "rope_parameters", "model_max_length", "quantization_config", "dtype"),
    *("sliding_window", "sliding_window_pattern", "text_config", "vision_config", "use_sliding_window", "head_dim"),
    *("kv_lora_rank", "index_topk", "mlp_only_layers", "decoder_sparse_step", "num_experts", "n_shared_experts"),
    *("mamba_ssm_dtype", "num_nextn_predict_layers", "attn_output_gate"),
)


def tried(values: dict[str, Any]) -> str | None:
    try:
        start = read_start(values, EngineFlags(), checkpoint_bytes=1 << 34)
        plan_pool(start.workers, [1 << 34] * len(start.workers), start.limits, generation_of("0.33.0"))
    except PlanError as exc:
        return str(exc)
    return None


def is_named(error: str | None) -> bool:
    return error is None or (": " in error and len(error) < 500)


@pytest.mark.untraced
@pytest.mark.parametrize("name", KINDS)
def test_any_value_of_a_key_gives_a_plan_or_a_plan_error(name: str) -> None:
    whole = {**MODELS[name]}
    inner = whole.get("text_config") or whole
    for key in sorted({*whole, *KEYS}):
        for odd in ODD:
            assert is_named(tried({**whole, key: odd}))
    for key in sorted({*inner, *KEYS}):
        for odd in ODD:
            inside = {**inner, "num_hidden_layers": 4, "layer_types": None, key: odd}
            assert is_named(tried({**whole, "text_config": inside}))


@pytest.mark.parametrize("values", [{}, {"architectures": "LlamaForCausalLM"}, {"architectures": [1]}])
def test_what_is_no_model_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="architectures: "):
        read_start(values, EngineFlags())
