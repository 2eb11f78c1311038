"""A rank's budget sums exactly, names what was counted nowhere, and shows null where a figure is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.explain.budget import Observed, RankBudget, Suggestion, encoder_bytes, rank_budget
from highwater.explain.explanation import encoder_view, explain
from highwater.model.engine_budget import EncoderLimits, EngineBudget, KvCacheMade, StartMemory
from highwater.model.rank import Components, EncoderCache, StartPhase, TorchMemory
from tests.fakes.started import GIB
from tests.unit.explain.readings import (
    GEMMA,
    LARGER,
    QWEN3_NEXT,
    STORY,
    STORY_NON_TORCH,
    STORY_START,
    other,
    rank,
    story_rank,
)


def sizes(budget: RankBudget) -> dict[str, int]:
    return {part.key: part.bytes for part in budget.parts}


def gib(budget: RankBudget) -> dict[str, float]:
    return {key: round(size / GIB, 2) for key, size in sizes(budget).items()}


def test_the_story_is_explained():
    budget = rank_budget(STORY, story_rank())
    assert round((budget.total_bytes or 0) / GIB, 2) == 60.96
    assert round((budget.requested_bytes or 0) / GIB, 2) == 57.91
    assert round((budget.available_bytes or 0) / GIB, 2) == 44.30
    assert gib(budget) == {
        "weights": 9.19, "activation": 3.86, "non_torch": 0.56, "kv_cache": 44.29, "null_block": 0.01, "rounding": 0.0,
    }  # fmt: skip


def test_what_the_storys_formula_counts_nowhere_is_named():
    budget = rank_budget(STORY, story_rank())
    missed = {part.key: round(part.bytes / GIB, 3) for part in budget.uncounted}
    assert missed == {"persistent": 0.255, "non_torch_uncounted": 0.502}
    assert round((budget.fully_counted_bytes or 0) / GIB, 2) == 43.54
    outside = (budget.outside_bytes or 0) - sum(part.bytes for part in budget.uncounted)
    assert budget.left_bytes == outside


@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        (LARGER, {"weights": 31.46, "kv_cache": 20.03, "null_block": 0.02, "rounding": 0.01, "profiled": 3.34}),
        (GEMMA, {"weights": 51.45, "activation": 3.99, "non_torch": 0.26, "kv_cache": 19.53}),
        (QWEN3_NEXT, {"weights": 74.28, "activation": 5.58, "non_torch": 1.38, "kv_cache": 44.58}),
    ],
)
def test_starts_of_others_are_explained(engine, parts):
    budget = rank_budget(engine, rank(total=65_452_113_920))
    assert parts.items() <= gib(budget).items()
    assert sum(part.bytes for part in budget.parts) == budget.requested_bytes


WITHOUT_A_PEAK = replace(STORY.memory, peak_activation_bytes=None)
V2 = {"limits": replace(STORY.limits, v2_runner=True)}


# By version and runner: tests/unit/explain/test_launch.py.
@pytest.mark.parametrize(
    ("changes", "profiled"),
    [
        ({"vllm_version": "0.12.0rc1", "memory": WITHOUT_A_PEAK}, False),
        ({"vllm_version": "0.13.0", "memory": WITHOUT_A_PEAK}, None),
        ({"vllm_version": "0.32.0", **V2, "encoder": EncoderLimits(cache_size=16_384)}, True),
        ({"vllm_version": "0.32.0", **V2, "encoder": EncoderLimits()}, None),
        ({"vllm_version": "0.26.0", **V2, "encoder": EncoderLimits()}, False),
    ],
)
def test_an_encoder_was_profiled_where_that_was_seen(changes, profiled: bool | None):
    view = encoder_view(replace(STORY, **changes), story_rank())
    assert view.is_profiled is profiled


SIZES = st.none() | st.integers(0, 2**40)
MEMORIES = st.builds(
    StartMemory,
    total_bytes=SIZES,
    init_free_bytes=SIZES,
    init_non_torch_bytes=SIZES,
    utilization=st.none() | st.floats(0, 1),
    requested_bytes=SIZES,
    weights_bytes=SIZES,
    peak_activation_bytes=st.none() | st.integers(-(2**30), 2**40),
    non_torch_bytes=st.none() | st.integers(-(2**30), 2**40),
    total_consumed_bytes=SIZES,
    graphs_estimate_bytes=st.none() | st.integers(-(2**30), 2**36),
    graphs_estimate_counted=st.none() | st.booleans(),
    graphs_bytes=SIZES,
    available_bytes=SIZES,
    returned_bytes=SIZES,
)
CACHES = st.builds(KvCacheMade, blocks=st.none() | st.integers(0, 10**6), tensor_bytes=SIZES, given_bytes=SIZES)
PHASES = st.lists(
    st.builds(
        StartPhase, name=st.sampled_from(["before", "init", "weights"]), at=st.just(0.0), seconds=st.just(1.0),
        total_bytes=SIZES, free_bytes=SIZES, used_bytes=SIZES, allocated_bytes=SIZES,
    ),
    max_size=3,
)  # fmt: skip


ENGINES = st.builds(EngineBudget, memory=MEMORIES, kv_cache=CACHES)
COMPONENTS = st.builds(Components, non_torch_bytes=SIZES, weights_bytes=SIZES)


@given(ENGINES, PHASES, st.sampled_from(["npu", "cuda", "cpu"]), COMPONENTS)
def test_the_parts_sum_exactly_whatever_is_known(engine, phases, kind, components):
    """To what was requested, or to the whole; nothing unknown counts as 0."""
    budget = rank_budget(engine, rank(kind=kind, total=None, components=components, start=phases))
    whole = budget.total_bytes if budget.requested_bytes is None else budget.requested_bytes
    if budget.parts:
        assert sum(part.bytes for part in budget.parts) == whole
    if whole is None or budget.counting is None:
        assert budget.parts == ()
    assert len({part.key for part in budget.parts}) == len(budget.parts)


NEW = other(
    replace(STORY, vllm_version="0.27.0"),
    blocks=4_900,
    non_torch_bytes=None,
    total_consumed_bytes=int(10.01 * GIB),
    peak_activation_bytes=int(3.86 * GIB) + 10**9,
    graphs_estimate_bytes=10**9,
    graphs_estimate_counted=True,
    available_bytes=(STORY.memory.requested_bytes or 0) - int(10.01 * GIB) - int(3.86 * GIB) - 10**9,
)


def test_from_0_27_on_persistent_tensors_are_counted():
    parts = sizes(rank_budget(NEW, rank(start=STORY_START)))
    assert parts["persistent"] == int(9.45 * GIB) - (STORY.memory.weights_bytes or 0)
    assert parts["weights"] + parts["persistent"] + parts["non_torch"] == int(10.01 * GIB)
    assert (parts["activation"], parts["graphs"]) == (int(3.86 * GIB), 10**9)
    assert "unexplained" not in parts


CAPTURED = other(NEW, graphs_bytes=700_000_000)


def test_the_size_that_the_log_suggests_has_graphs_off_it_twice():
    """As 0.27 to 0.33 compute it: their estimate in the peak, and what was captured, and a margin of 150 MiB."""
    memory = CAPTURED.memory
    printed = (
        memory.requested_bytes - (memory.total_consumed_bytes + memory.peak_activation_bytes + memory.graphs_bytes)
        - 150 * 2**20
    )  # fmt: skip
    found = rank_budget(CAPTURED, rank(start=STORY_START)).suggestion
    assert found == Suggestion(bytes=printed, counted_once_bytes=printed + 10**9, lost_bytes=10**9)
    words = explain([rank()], lambda _: CAPTURED).paragraph
    assert f"--kv-cache-memory={printed} (" in words
    assert f"counted once it is {printed + 10**9} (" in words
    assert "0.931 GiB are lost." in words
    assert "STARTUP_PLAN" not in words
    stored = replace(CAPTURED, environment={"VLLM_ENABLE_STARTUP_PLAN": "1"})
    assert "VLLM_ENABLE_STARTUP_PLAN keeps it for the next start" in explain([rank()], lambda _: stored).paragraph


@pytest.mark.parametrize(
    "engine",
    [
        other(GEMMA, graphs_bytes=GIB),
        other(CAPTURED, graphs_estimate_counted=False),
        other(CAPTURED, graphs_estimate_bytes=0),
        other(CAPTURED, given=5),
    ],
    ids=["0.19: the peak is without", "not counted", "no graphs", "given: none is printed"],
)
def test_a_size_that_is_right_is_not_spoken_of(engine: EngineBudget):
    assert rank_budget(engine, rank()).suggestion is None


def test_a_suggestion_that_lacks_a_figure_says_which():
    unseen = rank_budget(NEW, rank()).suggestion
    assert (unseen.bytes, unseen.counted_once_bytes, unseen.lost_bytes) == (None, None, 10**9)
    assert "nothing saw what was captured" in unseen.missing
    planned = replace(other(CAPTURED, given=5), environment={"VLLM_ENABLE_STARTUP_PLAN": "1"})
    used = rank_budget(planned, rank()).suggestion
    assert (used.bytes, used.lost_bytes) == (None, None)
    assert used.missing in explain([rank()], lambda _: planned).paragraph


def test_without_the_phases_they_are_one_part():
    parts = sizes(rank_budget(NEW, rank()))
    assert parts["weights"] + parts["consumed"] == int(10.01 * GIB)


def test_what_the_profile_returned_beats_what_it_found():
    less = other(NEW, blocks=4_800, returned_bytes=(NEW.memory.available_bytes or 0) - 2**30)
    budget = rank_budget(less, rank(start=STORY_START))
    assert budget.part("mm_ipc").bytes == 2**30
    assert sum(part.bytes for part in budget.parts) == budget.requested_bytes


STORY_LEFT = STORY.memory.available_bytes or 0


def rescaled(version: str, stored: float, returned: float) -> EngineBudget:
    sizes = {"available_bytes": int(STORY_LEFT * stored), "returned_bytes": int(STORY_LEFT * stored * returned)}
    return other(replace(STORY, ascend_version=version), blocks=2_000, **sizes)


@pytest.mark.parametrize("version", ["0.27.1rc1", "0.28.0rc1", "0.30.0rc2", "0.30.0.post1", "1.0"])
@pytest.mark.parametrize("stored", [0.5, 1.5], ids=["several groups", "shared buffers"])
@pytest.mark.parametrize("returned", [1, 0.9], ids=["as stored", "in whole blocks"])
def test_what_vllm_ascend_rescales_is_named(version: str, stored: float, returned: float):
    budget = rank_budget(rescaled(version, stored, returned), rank(start=STORY_START))
    parts = sizes(budget)
    left = STORY_LEFT - parts["kv_cache"] - parts["null_block"] - parts["rounding"]
    assert abs(parts["rescaled"] - left) <= 1
    assert not parts.keys() & {"mm_ipc", "unexplained"}
    assert sum(parts.values()) == budget.requested_bytes


@pytest.mark.parametrize("version", ["0.18.0", "0.23.0", "0.23.0.post1"])
def test_an_older_vllm_ascend_rescales_nothing(version: str):
    budget = rank_budget(rescaled(version, 0.5, 1), rank(start=STORY_START))
    assert (budget.part("rescaled"), budget.part("unexplained") is None) == (None, False)


@pytest.mark.parametrize(("more", "key"), [(16, "bytes"), (-16, "bytes"), (17, "unexplained")])
def test_a_few_bytes_are_rounding_and_more_is_not_explained(more: int, key: str):
    exact = sum(part.bytes for part in rank_budget(STORY, rank()).parts if part.key != "bytes")
    assert rank_budget(other(STORY, requested_bytes=exact + more), rank()).parts[-1].key == key


def test_figures_that_sum_have_no_part_for_it():
    assert rank_budget(rescaled("0.30.0rc2", 1, 1), rank(start=STORY_START)).part("rescaled") is None


def test_an_estimate_that_was_not_taken_off_is_no_part():
    """As before 0.21: the sum shows it where the variable cannot be read."""
    assert rank_budget(GEMMA, rank()).part("graphs") is None
    counted = (GEMMA.memory.available_bytes or 0) - (GEMMA.memory.graphs_estimate_bytes or 0)
    requested = GEMMA.memory.requested_bytes
    parts = (GEMMA.memory.weights_bytes, GEMMA.memory.peak_activation_bytes, GEMMA.memory.non_torch_bytes)
    assert sum(size or 0 for size in parts) + (GEMMA.memory.available_bytes or 0) == requested
    budget = rank_budget(other(GEMMA, blocks=15_000, block_bytes=1_310_720, available_bytes=counted), rank())
    assert budget.part("graphs").bytes == GEMMA.memory.graphs_estimate_bytes


def test_graphs_beyond_the_estimate_are_counted_nowhere():
    """gemma-3-27b: 1.14 GiB captured, nothing set aside."""
    budget = rank_budget(other(GEMMA, graphs_bytes=int(1.14 * GIB)), rank())
    assert budget.part("graphs_uncounted").bytes == int(1.14 * GIB)
    (row,) = [row for row in budget.observed if row.key == "graphs"]
    assert (row.title, row.profiled_bytes, row.risk_bytes) == ("graphs (estimated 1.05 GiB)", 0, int(1.14 * GIB))


def test_a_given_kv_cache_has_no_budget():
    given_bytes = STORY.kv_cache.tensor_bytes
    memory = StartMemory(total_bytes=STORY.memory.total_bytes, utilization=0.95, requested_bytes=5, weights_bytes=9)
    engine = replace(STORY, memory=memory, kv_cache=replace(STORY.kv_cache, given_bytes=given_bytes))
    budget = rank_budget(engine, rank())
    assert (budget.counting, budget.requested_bytes, budget.outside_bytes) == ("given", None, None)
    assert sum(part.bytes for part in budget.parts) == budget.total_bytes
    assert budget.parts[-1].key == "unprofiled"


def test_on_cpu_the_process_is_taken_off_what_was_requested():
    memory = StartMemory(requested_bytes=10 * GIB, returned_bytes=8 * GIB, utilization=0.4)
    engine = EngineBudget(memory=memory, kv_cache=KvCacheMade(blocks=1_024, tensor_bytes=8 * GIB))
    budget = rank_budget(engine, rank(kind="cpu", components=Components(weights_bytes=GIB)))
    parts = sizes(budget)
    assert (budget.counting, parts["weights"], parts["process"]) == ("cpu", GIB, GIB)
    assert sum(parts.values()) == 10 * GIB
    assert budget.observed == ()


def peak_seen(peak: int) -> Observed:
    budget = rank_budget(STORY, replace(story_rank(), torch=TorchMemory(peak_allocated_bytes=peak)))
    return next(row for row in budget.observed if row.key == "activation")


def test_a_peak_above_the_profile_is_a_risk_with_its_settings():
    row = peak_seen(int(9.45 * GIB) + (STORY.kv_cache.tensor_bytes or 0) + 5 * GIB)
    assert row.observed_bytes == 5 * GIB
    assert row.risk_bytes == 5 * GIB - (STORY.memory.peak_activation_bytes or 0)
    assert "--max-num-batched-tokens" in row.settings


def test_a_peak_of_the_start_says_nothing():
    row = peak_seen(int(13.3 * GIB))
    assert (row.observed_bytes, row.risk_bytes) == (None, None)


def test_the_encoder_cache_is_measured_by_what_it_holds():
    assert encoder_bytes(STORY, rank()) == 32_768 * 4_096 * 2
    held = EncoderCache(entries=1, device_bytes=16_384 * 32_768, embeds=16_384)
    assert encoder_bytes(STORY, rank(encoder=held)) == 32_768 * 32_768


def test_an_empty_encoder_cache_measures_nothing():
    shown = encoder_view(STORY, rank(encoder=EncoderCache(entries=1, device_bytes=0, embeds=16_384)))
    assert shown is not None
    assert (shown.cache_bytes, shown.bytes_grade) == (32_768 * 4_096 * 2, "estimated")


def test_the_encoder_cache_is_that_of_the_rank_that_holds_most_on_device_and_host():
    spilled = EncoderCache(entries=9, device_bytes=10, host_bytes=5_000, embeds=9)
    readings = [rank(0, encoder=EncoderCache(entries=1, device_bytes=20, embeds=1)), rank(1, encoder=spilled)]
    shown = explain(readings, lambda _: STORY).encoder
    assert shown is not None
    assert shown.held_bytes == spilled.device_bytes


def test_a_worker_that_says_nothing_has_no_parts():
    budget = rank_budget(EngineBudget(), rank(components=Components(non_torch_bytes=STORY_NON_TORCH)))
    assert (budget.parts, budget.uncounted, budget.observed) == ((), (), ())
    assert (budget.requested_bytes, budget.available_bytes, budget.left_bytes) == (None, None, None)
