"""A start's budget: bounds that hold every recorded start, each version's sums, an earlier start's measures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.plan.estimates import (
    MeasuredStart,
    ModelFacts,
    StartBudget,
    estimate_start,
    formula,
    requested_bytes,
)
from highwater.plan.implied import implied_tensors
from highwater.plan.measured import read_start
from highwater.units import GIB, MIB
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags
from kvplan.generations import generation_of
from tests.support.recorded_starts import DEVICE_GIB, LLAMA_8B, QWEN3_VL_8B, QWEN3_VL_32B, STARTS, RecordedStart

DEVICE = round(DEVICE_GIB * GIB)
FLAGS = EngineFlags(
    device_bytes=DEVICE, gpu_memory_utilization=0.95, max_num_batched_tokens=8192, max_num_seqs=1024, dtype="auto"
)
MEASURED = MeasuredStart(
    version="0.19.0",
    platform="cuda",
    architecture="LlamaForCausalLM",
    weights_bytes=round(14.99 * GIB),
    activation_bytes=round(1.89 * GIB),
    non_torch_bytes=round(0.25 * GIB),
    graphs_bytes=round(0.87 * GIB),
    max_num_batched_tokens=8192,
    max_num_seqs=1024,
)


def budget_of(start: RecordedStart) -> StartBudget:
    """Return the estimate of a recorded start."""
    flags = replace(FLAGS, tensor_parallel_size=start.tensor_parallel, quantization=start.quantization)
    return estimate_start(ModelFacts(config=start.config), flags, generation_of(start.version))


def llama(flags: EngineFlags = FLAGS, version: str = "0.19.0", measured: MeasuredStart | None = None) -> StartBudget:
    """Return a budget of Llama-3.1-8B."""
    return estimate_start(ModelFacts(config=LLAMA_8B), flags, generation_of(version), measured)


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_each_part_of_a_recorded_start_is_within_its_bounds(start: RecordedStart) -> None:
    """Weights, activation peak, non-torch and graphs."""
    budget = budget_of(start)
    parts = (
        (budget.weights, start.weights),
        (budget.activation, start.activation),
        (budget.non_torch, start.non_torch),
        (budget.graphs, start.graphs),
    )

    for figure, logged in parts:
        if logged is not None:
            assert figure.low <= logged * GIB <= figure.high, figure
            assert figure.why


@pytest.mark.parametrize("start", [start for start in STARTS if start.kv is not None], ids=str)
def test_the_kv_cache_of_a_recorded_start_is_close_to_the_estimate(start: RecordedStart) -> None:
    """Within the interval, and within 1 GiB of what is called likely."""
    available = budget_of(start).available
    assert start.kv is not None

    assert available.low <= start.kv * GIB <= available.high
    assert available.bytes / GIB == pytest.approx(start.kv, abs=1.0)


@pytest.mark.parametrize("start", [start for start in STARTS if start.activation and start.version >= "0.17"], ids=str)
def test_the_likely_activation_peak_is_that_of_the_starts(start: RecordedStart) -> None:
    """Within 5 percent for dense models; a mixture of experts is given 20."""
    mixture = any(".experts." in tensor.name for tensor in implied_tensors(start.config))

    assert budget_of(start).activation.bytes / GIB == pytest.approx(start.activation, rel=0.2 if mixture else 0.05)


# --- what nobody named ---


@pytest.mark.parametrize(
    ("limits", "has_bound"), [({}, False), ({"video": 0}, False), ({"video": 0, "image": 0}, True)]
)
def test_an_encoder_whose_largest_item_is_not_known_leaves_no_lower_bound(
    limits: dict[str, int], *, has_bound: bool
) -> None:
    """Qwen3-VL-32B on 0.11.0 was profiled with a video of 153,600 tokens, and had 6.28 GiB (vllm issue 27466)."""
    flags = replace(FLAGS, device_bytes=round(79.14 * GIB), gpu_memory_utilization=0.98, limit_mm_per_prompt=limits)
    available = estimate_start(ModelFacts(config=QWEN3_VL_32B), flags, generation_of("0.11.0")).available

    assert (available.low > 0) is has_bound
    assert has_bound or available.low <= 6.28 * GIB <= available.high


def test_the_weights_of_qwen3_vl_have_buffers_of_a_step() -> None:
    """62.63 GiB were logged by 0.11.0 (vllm issue 27466), with 8,192 batched tokens; 62.40 are in the checkpoint."""
    weights = estimate_start(ModelFacts(config=QWEN3_VL_32B), FLAGS, generation_of("0.11.0")).weights
    assert weights.bytes / GIB == pytest.approx(62.63, abs=0.01)
    files = ModelFacts(config=QWEN3_VL_32B, tensors=implied_tensors(QWEN3_VL_32B))
    exact, either = (
        estimate_start(files, FLAGS, generation_of("0.11.0"), smallest_step=step).weights
        for step in (None, (2048, 256))
    )
    assert either.low == exact.low - 3 * 6144 * 5120 * 2
    assert (either.bytes, either.high, either.grade) == (exact.bytes, exact.high, "estimated")


def test_without_images_and_videos_the_tower_may_not_be_loaded() -> None:
    """The bounds have room for both: versions and models differ."""
    generation = generation_of("0.32.0")
    model = ModelFacts(config=QWEN3_VL_32B, tensors=implied_tensors(QWEN3_VL_32B))
    flags = replace(FLAGS, limit_mm_per_prompt={"image": 0, "video": 0})
    text = {key: part for key, part in QWEN3_VL_32B.items() if key != "vision_config"}

    weights = estimate_start(model, flags, generation).weights
    assert weights.grade == "estimated"
    assert weights.high == estimate_start(model, FLAGS, generation).weights.high
    assert weights.low <= estimate_start(ModelFacts(config=text), FLAGS, generation).weights.bytes < weights.bytes - GIB


def test_the_largest_image_counts_where_it_is_larger_than_a_step() -> None:
    """16,384 embeddings, of whatever a step has."""
    pixels = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    model = ModelFacts(config=QWEN3_VL_32B, preprocessor=pixels)

    def peak(tokens: int) -> int:
        flags = replace(FLAGS, max_num_batched_tokens=tokens, max_num_seqs=8, limit_mm_per_prompt={"video": 0})
        return estimate_start(model, flags, generation_of("0.32.0")).activation.high

    assert peak(2048) > peak(16_384) - 2048 * MIB > 0
    assert peak(65_536) > 2 * peak(16_384)


def test_up_to_0_12_each_image_was_padded_to_all_of_them() -> None:
    """32 of Gemma 3's fit into a step of 8,192 tokens."""
    gemma = next(start for start in STARTS if start.name == "gemma-3-27b")
    old, new = (
        estimate_start(ModelFacts(config=gemma.config), FLAGS, generation_of(version)).activation
        for version in ("0.12.0", "0.13.0")
    )
    assert old.high - new.high > 30 * 8192 * 5376 * 2


def test_the_bounds_hold_for_the_smallest_steps_that_a_card_may_have() -> None:
    """An A100 has an H100's size, and 256 sequences in place of 1,024."""
    a100 = replace(FLAGS, max_num_batched_tokens=2048, max_num_seqs=256)
    model, generation = ModelFacts(config=LLAMA_8B), generation_of("0.19.0")
    either = estimate_start(model, FLAGS, generation, smallest_step=(2048, 256)).available
    assert either.low <= estimate_start(model, FLAGS, generation).available.bytes <= either.high
    assert either.low <= estimate_start(model, a100, generation).available.bytes <= either.high
    assert estimate_start(model, FLAGS, generation).available.high < either.high


# --- sums and rounding ---


@pytest.mark.parametrize(
    ("release", "platform", "rounded_up"),
    [((0, 13), "cuda", False), ((0, 14), "cuda", True), ((0, 32), "cuda", True), ((0, 23), "ascend", False)],
)
def test_requested_is_rounded_as_the_version_does(release: tuple[int, int], platform: str, *, rounded_up: bool) -> None:
    """From 0.14 on vLLM rounds up; vllm-ascend never does."""
    total = 85_029_158_912

    requested = requested_bytes(total, 0.95, release, platform)

    assert requested == (math.ceil(total * 0.95) if rounded_up else int(total * 0.95))


def test_what_is_left_is_requested_less_its_parts_from_bound_to_bound() -> None:
    """The interval's lower end has every part at its highest."""
    budget = llama()
    parts = (budget.weights, budget.activation, budget.non_torch)

    assert budget.available.bytes == budget.requested_bytes - sum(part.bytes for part in parts)
    assert budget.available.low == budget.requested_bytes - sum(part.high for part in parts)
    assert budget.available.high == budget.requested_bytes - sum(part.low for part in parts)
    assert budget.available.grade == "estimated"


@pytest.mark.parametrize(("version", "subtracted"), [("0.18.0", False), ("0.19.1", False), ("0.20.0", True)])
def test_graphs_are_taken_off_from_0_20_on(version: str, *, subtracted: bool) -> None:
    """VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is on there by default."""
    budget = llama(version=version)
    parts = (budget.weights, budget.activation, budget.non_torch, *((budget.graphs,) if subtracted else ()))

    assert budget.graphs_are_subtracted is subtracted
    assert budget.available.bytes == budget.requested_bytes - sum(part.bytes for part in parts)


@pytest.mark.parametrize(
    ("release", "platform", "said"),
    [
        ((0, 19), "cuda", "weights + torch peak increase + non-torch increase)"),
        ((0, 25), "cuda", "estimate of the graphs"),
        ((0, 27), "cuda", "consumed since the start"),
        ((0, 12), "ascend", "what of the card is used beside torch's tensors"),
        ((0, 27), "ascend", "weights + torch peak increase + non-torch increase)"),
    ],
)
def test_the_formula_of_the_version_is_said(release: tuple[int, int], platform: str, said: str) -> None:
    """In words."""
    assert said in formula(release, platform)


def test_where_the_parts_are_more_than_the_card_nothing_is_left_and_the_reason_is_said() -> None:
    """Sizes are never below 0."""
    budget = llama(replace(FLAGS, device_bytes=12 * GIB))

    assert (budget.available.bytes, budget.available.low, budget.available.high) == (0, 0, 0)
    assert "what a start takes (17." in (budget.refusal or "")
    assert "vLLM's share of the card (11.40 GiB)" in (budget.refusal or "")
    assert llama().refusal is None


def test_given_bytes_are_taken_as_they_are() -> None:
    """--kv-cache-memory-bytes, except by the versions of vllm-ascend that ignore it."""
    given = replace(FLAGS, kv_cache_memory_bytes=5 * GIB)

    assert (llama(given).available.bytes, llama(given).available.grade) == (5 * GIB, "exact")
    ignoring = llama(replace(given, platform="ascend"), "0.18.0").available
    assert ignoring.bytes != 5 * GIB
    assert "ignores --kv-cache-memory-bytes" in ignoring.why
    assert llama(replace(given, platform="ascend"), "0.23.0").available.bytes == 5 * GIB


@pytest.mark.parametrize(
    "missing", ["device_bytes", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs"]
)
def test_a_flag_that_is_needed_is_named(missing: str) -> None:
    """With what would be right."""
    key = {"device_bytes": "--device"}.get(missing, "--" + missing.replace("_", "-"))

    with pytest.raises(PlanError, match=key):
        llama(replace(FLAGS, **{missing: None}))


def test_files_make_the_weights_exact() -> None:
    """The rest stays an estimate."""
    model = ModelFacts(config=LLAMA_8B, tensors=implied_tensors(LLAMA_8B))

    budget = estimate_start(model, FLAGS, generation_of("0.19.0"))

    assert budget.weights.grade == "exact"
    assert budget.available.grade == "estimated"


def test_the_budget_is_a_part_of_the_plans_json() -> None:
    """Each part with its bounds, its grade and its reason."""
    budget = llama().as_json()

    assert set(budget["activation_bytes"]) == {"bytes", "low", "high", "grade", "why"}
    assert budget["graphs_bytes"]["subtracted"] is False
    assert budget["total_bytes"] == DEVICE


# --- an earlier start ---


def test_a_start_with_the_same_flags_gives_its_measures_again() -> None:
    """Then nothing is estimated."""
    budget = llama(measured=MEASURED)

    assert {part.grade for part in (budget.weights, budget.activation, budget.non_torch)} == {"measured"}
    assert budget.available.grade == "measured"
    assert budget.available.low == budget.available.high
    assert budget.available.bytes / GIB == pytest.approx(58.10, abs=0.02)


def test_other_batched_tokens_move_the_measured_peak() -> None:
    """An estimate again, with bounds, from where the measure was."""
    moved = llama(replace(FLAGS, max_num_batched_tokens=16384), measured=MEASURED).activation

    assert moved.grade == "estimated"
    assert moved.low <= moved.bytes <= moved.high
    assert MEASURED.activation_bytes is not None
    assert moved.bytes > MEASURED.activation_bytes
    assert "measured with 8192 tokens" in moved.why


@pytest.mark.parametrize(
    "other",
    [
        {"version": "0.20.0"},
        {"platform": "ascend"},
        {"architecture": "Qwen2ForCausalLM"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
)
def test_a_start_of_another_kind_measures_nothing_for_this_one(other: dict[str, object]) -> None:
    """Another version, platform, model or division into ranks."""
    assert llama(measured=replace(MEASURED, **other)) == llama()


@pytest.mark.parametrize("weights", [None, round(8.49 * GIB), round(33.88 * GIB)])
def test_a_start_whose_weights_cannot_be_these_was_of_another_model(weights: int | None) -> None:
    """Another size of the same architecture, or another quantization: nothing of it is taken."""
    assert llama(measured=replace(MEASURED, weights_bytes=weights)) == llama()


def test_what_the_start_did_not_report_is_estimated() -> None:
    """Null is never 0."""
    nothing = replace(MEASURED, activation_bytes=None, non_torch_bytes=None, graphs_bytes=None)
    budget = llama(measured=nothing)

    assert budget.weights.grade == "measured"
    assert (budget.activation, budget.non_torch, budget.graphs) == (
        llama().activation,
        llama().non_torch,
        llama().graphs,
    )


# --- what `highwater explain --json` wrote ---


def explained(**ranks: object) -> dict[str, object]:
    """Return an answer of `GET /memory/budget`, as far as a plan reads it."""
    parts = [{"key": key, "bytes": size} for key, size in ranks.items()]
    return {
        "explanation": {
            "vllm_version": "0.19.0",
            "architecture": "LlamaForCausalLM",
            "limits": {"max_num_batched_tokens": 8192, "max_num_seqs": 1024},
            "parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": None},
            "ranks": [{"device": {"type": "npu"}, "parts": parts}, {"device": {"type": "npu"}, "parts": []}],
        }
    }


def test_a_start_is_read_from_what_explain_wrote(tmp_path: Path) -> None:
    """Parts that it does not have are not known."""
    file = tmp_path / "before.json"
    file.write_text(json.dumps(explained(weights=16, activation=4, kv_cache=9)))

    assert read_start(file) == MeasuredStart(
        version="0.19.0",
        platform="ascend",
        architecture="LlamaForCausalLM",
        weights_bytes=16,
        activation_bytes=4,
        tensor_parallel_size=2,
        max_num_batched_tokens=8192,
        max_num_seqs=1024,
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"explanation": {"ranks": [1]}}', "[" * 100_000])
def test_a_file_that_describes_no_start_is_refused(tmp_path: Path, text: str) -> None:
    """By its name."""
    file = tmp_path / "before.json"
    file.write_text(text)

    with pytest.raises(PlanError, match=r"before\.json.* .*highwater explain --json"):
        read_start(file)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """With the reason."""
    with pytest.raises(PlanError, match=r"before\.json: cannot be read: No such file"):
        read_start(tmp_path / "before.json")


# --- Ascend ---


@pytest.mark.parametrize(("version", "profiled"), [("0.12.0", False), ("0.13.0", True)])
def test_ascend_profiles_images_from_0_13_on(version: str, *, profiled: bool) -> None:
    """Before, what the encoder takes is in no budget."""
    flags = replace(FLAGS, platform="ascend", tensor_parallel_size=2)
    with_images, without = (
        estimate_start(ModelFacts(config=config), flags, generation_of(version)).activation.high
        for config in (QWEN3_VL_8B, {**QWEN3_VL_8B, "vision_config": None})
    )

    assert (with_images > without) is profiled


def test_the_ascend_story_is_within_the_bounds() -> None:
    """Qwen3-VL-8B on two NPUs: 9.19 of weights, a peak of 3.86 with images, 0.56 of non-torch."""
    flags = EngineFlags(
        platform="ascend",
        tensor_parallel_size=2,
        device_bytes=round(60.96 * GIB),
        gpu_memory_utilization=0.95,
        max_num_batched_tokens=32768,
        max_num_seqs=8,
    )
    # That start profiled the encoder, as releases from 0.13 on do.
    budget = estimate_start(ModelFacts(config=QWEN3_VL_8B), flags, generation_of("0.13.0"))

    assert budget.requested_bytes / GIB == pytest.approx(57.91, abs=0.005)
    assert budget.weights.low <= 9.19 * GIB <= budget.weights.high
    assert budget.activation.low <= 3.86 * GIB <= budget.activation.high
    assert budget.non_torch.low <= 0.56 * GIB <= budget.non_torch.high
    assert budget.available.low <= 44.30 * GIB <= budget.available.high


# --- the CPU engine ---


def test_a_cpu_engine_has_no_budget_of_parts() -> None:
    """It takes what is given, or the node's memory less what it has resident."""
    with pytest.raises(PlanError, match="known to a running engine only"):
        llama(replace(FLAGS, platform="cpu"))


def test_from_0_27_on_tensors_beside_the_weights_count() -> None:
    """The part outside torch has room for them."""
    before, after = llama(version="0.26.0").non_torch, llama(version="0.27.0").non_torch

    assert after.bytes > before.bytes
    assert "beside the weights" in after.why
