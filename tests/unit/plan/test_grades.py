"""Each part of a budget says how well it is known, and a sum is known as well as its worst part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.plan.answer import plan_json
from highwater.plan.budget import rank_budget
from highwater.plan.offline import plan_offline
from kvplan.figure import GRADES, add, estimated, exact, measured
from kvplan.flags import EngineFlags
from tests.fakes.started import GIB
from tests.unit.plan.readings import STORY, STORY_START, rank, story_rank


def test_persistent_tensors_are_measured_where_no_formula_counts_them() -> None:
    """Up to 0.25: they are what was allocated after loading, less the weights, and the engine has no such figure."""
    uncounted = {part.key: part.grade for part in rank_budget(STORY, story_rank(), STORY_START).uncounted}
    assert uncounted == {"persistent": "measured", "non_torch_uncounted": "measured"}


def test_persistent_tensors_are_measured_where_the_formula_counts_them() -> None:
    """From 0.27 on, within the engine's own sum: the rest of it follows."""
    consumed = replace(STORY.memory, non_torch_bytes=None, total_consumed_bytes=10 * GIB)
    budget = rank_budget(replace(STORY, vllm_version="0.27.0", memory=consumed), rank(), STORY_START)
    grades = {part.key: part.grade for part in budget.parts}
    assert budget.counting == "consumed"
    assert (grades["weights"], grades["persistent"], grades["non_torch"]) == ("engine", "measured", "exact")


def test_a_sum_is_known_as_well_as_its_worst_part() -> None:
    """The bounds add up too."""
    total = add([exact(10, "a rule"), measured(5, "a start"), estimated(1, 2, 4, "a guess")], "all of them")
    assert (total.grade, total.low, total.bytes, total.high) == ("estimated", 16, 17, 19)
    assert add([exact(1, "a rule"), measured(1, "a start")], "both").grade == "measured"
    assert add([], "nothing").grade == "exact"
    assert GRADES == ("engine", "exact", "measured", "estimated")


CONFIGS = Path(__file__).parent / "configs"
BATCH = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}


def plan_grades(config: str, version: str = "0.32.0", **flags) -> set[str]:
    values = json.loads((CONFIGS / f"{config}.json").read_text("utf-8"))
    planned = plan_offline(values, EngineFlags(**flags), version)
    grades = plan_json(planned, "m")["kv_cache"]["grades"]
    # Whether a card holds given bytes follows from estimates.
    assert flags.get("device_bytes") is None or grades.pop("fits", "estimated") == "estimated"
    return set(grades.values())


@pytest.mark.parametrize(
    ("config", "version", "flags", "grade"),
    [
        ("llama-3.1-8b", "0.32.0", {}, "exact"),
        ("gemma-3-27b", "0.32.0", {}, "estimated"),
        ("gemma-3-27b", "0.32.0", BATCH, "exact"),
        ("gemma-3-27b", "0.30.0", {"device_bytes": 192 * GIB}, "exact"),
        ("gemma-3-27b", "0.32.0", {"device_bytes": 141 * GIB}, "exact"),
        ("gemma-3-27b", "0.32.0", {"device_bytes": 80 * GIB}, "estimated"),
        ("gemma-3-27b", "0.32.0", {"device_bytes": 24 * GIB}, "exact"),
        ("qwen3.6-35b-a3b-nvfp4", "0.27.0", {}, "exact"),
        ("llama-3.1-8b", "0.32.0", {"device_bytes": 80 * GIB}, "exact"),
        ("kimi-k2", "0.32.0", {}, "estimated"),
        ("kimi-k2", "0.32.0", {"compute_capability": "9.0"}, "exact"),
        ("kimi-k2", "0.32.0", {"block_size": 64}, "exact"),
        ("llama-3.1-8b", "0.33.4", {}, "exact"),
        ("llama-3.1-8b", "0.34.0", {}, "estimated"),
        ("llama-3.1-8b", "1.7", {}, "estimated"),
        ("llama-3.1-8b", "0.32.1.dev8+g4b7f5ea1a", {}, "estimated"),
    ],
)
def test_no_figure_is_exact_that_rests_on_an_assumed_default(config, version, flags, grade) -> None:
    """Of a card that is not named, or an A100 among those of 80 GB."""
    assert plan_grades(config, version, kv_cache_memory_bytes=40 * GIB, **flags) == {grade}


@pytest.mark.parametrize(
    ("changed", "version", "said"),
    [
        ({"torch_dtype": None}, "0.32.0", "no dtype"),
        ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 1280,
          "decoder_layers": 2, "decoder_attention_heads": 32}, "0.32.0", "cross attention"),
        ({"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "num_hidden_layers": 2,
          "hybrid_layer_pattern": [0, 1], "swa_num_key_value_heads": 8, "swa_head_dim": 192}, "0.32.0", "MiMo"),
    ],
)  # fmt: skip
def test_what_a_figure_rests_on_is_said(changed, version, said) -> None:
    values = json.loads((CONFIGS / "llama-3.1-8b.json").read_text("utf-8")) | changed
    plan = plan_json(plan_offline(values, EngineFlags(kv_cache_memory_bytes=40 * GIB), version), "m")
    assert set(plan["kv_cache"]["grades"].values()) == {"estimated"}
    assert any(note.startswith("Not exact: ") and said in note for note in plan["notes"])


def test_the_rules_of_an_older_version_are_said_once() -> None:
    values = json.loads((CONFIGS / "llama-3.1-8b.json").read_text("utf-8"))
    notes = plan_offline(values, EngineFlags(kv_cache_memory_bytes=40 * GIB), "1.7").notes
    assert [note for note in notes if "1.7" in note] == [
        "Not exact: vLLM 1.7 is newer than 0.33.0, the newest that was read; the rules of that are used."
    ]


def test_a_device_with_a_drafter_has_no_budget() -> None:
    """Its weights are counted nowhere: the bounds would not hold."""
    values = json.loads((CONFIGS / "qwen3.6-35b-a3b-nvfp4.json").read_text("utf-8"))
    for method, is_unknown in (("mtp", True), ("ngram", False)):
        drafter = json.dumps({"method": method, "num_speculative_tokens": 1, "prompt_lookup_max": 2})
        planned = plan_offline(values, EngineFlags(device_bytes=80 * GIB, speculative_config=drafter))
        assert ("drafter" in str(planned.why_unknown)) is is_unknown, planned.why_unknown
