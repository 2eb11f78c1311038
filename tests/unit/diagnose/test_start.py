"""What the rule book finds in a start: missed bytes, an encoder that was not profiled, settings that contradict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.diagnose.case import Setup, of_report
from highwater.diagnose.finding import Finding
from highwater.diagnose.rules.book import explained, judged
from highwater.diagnose.rules.life import contradictions
from highwater.diagnose.rules.setup import known_start
from highwater.explain.explanation import explain
from highwater.http.text.budget import comparison
from highwater.model.engine import EngineStatus
from highwater.model.engine_budget import EncoderLimits, EngineBudget, KvCacheMade, StartMemory
from highwater.model.rank import Launch, TorchMemory
from highwater.model.report import Report
from tests.fakes.started import GIB
from tests.unit.explain.readings import GEMMA, LARGER, STORY, rank, story_rank

ENGINE = EngineStatus(url="http://engine", state="ready")


def found_of(reading, budget) -> list[Finding]:
    started = Report(engine=ENGINE, ranks=(reading,))
    return judged(of_report("start", started, explanation=explain([reading], lambda _: budget)))


def names(reading, budget) -> list[str]:
    return [finding.name for finding in found_of(reading, budget)]


def test_what_the_profile_missed_is_a_finding_with_the_setting_that_covers_it():
    (finding,) = found_of(story_rank(), STORY)
    assert (finding.name, finding.weight) == ("not_profiled", "clue")
    assert finding.figures["missed_bytes"] == sum(
        part.bytes for part in explain([story_rank()], lambda _: STORY).ranks[0].uncounted
    )
    assert "--kv-cache-memory-bytes" in [advice.setting for advice in finding.advice]


def test_it_weighs_more_where_it_does_not_fit():
    memory = replace(STORY.memory, total_bytes=(STORY.memory.requested_bytes or 0) + 2**20)
    (finding,) = found_of(story_rank(), replace(STORY, memory=memory))
    assert finding.weight == "likely"


def test_little_is_no_finding():
    assert names(rank(), STORY) == []


def started_with(estimate: int, *, counted: bool | None = True, captured: int = 783_831_531) -> EngineBudget:
    """A start of vLLM 0.26 beside a process that gave 20.5 GiB back during the profile."""
    memory = StartMemory(
        total_bytes=130_599_218_053,
        init_non_torch_bytes=9_105_330_668,
        init_free_bytes=121_493_887_385,
        requested_bytes=104_475_079_475,
        weights_bytes=23_622_320_128,
        peak_activation_bytes=3_221_225_472,
        non_torch_bytes=2_362_232_012,
        graphs_estimate_bytes=estimate,
        graphs_estimate_counted=counted,
        available_bytes=75_269_301_863 - (0 if counted is False else estimate),
        graphs_bytes=captured,
        utilization=0.8,
    )
    return replace(GEMMA, memory=memory, kv_cache=KvCacheMade())


@pytest.mark.parametrize("counted", [True, None])
def test_a_negative_estimate_of_graphs_makes_the_kv_cache_too_large(counted):
    reading, started = rank(total=130_599_218_053), started_with(-22_011_707_392, counted=counted)
    explanation = explain([reading], lambda _: started)
    (budget,) = explanation.ranks
    found = {finding.name: finding for finding in found_of(reading, started)}
    assert budget.part("graphs").bytes == -22_011_707_392
    assert budget.part("unexplained") is None
    assert str(budget.formula).endswith("- graphs' estimate")
    finding = found["negative_graphs_estimate"]
    assert (finding.weight, "21.23 GiB larger than the budget allows" in finding.title) == ("likely", True)
    assert "Counted rightly, 69.37 GiB" in finding.text
    assert [one.setting for one in finding.advice] == [
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
        "--kv-cache-memory-bytes",
    ]
    assert "not_profiled" not in found


@pytest.mark.parametrize(("estimate", "counted"), [(-22_011_707_392, False), (2**30, True), (0, True)])
def test_an_estimate_that_took_nothing_too_much_is_no_such_finding(estimate, counted):
    assert "negative_graphs_estimate" not in names(rank(), started_with(estimate, counted=counted))


def test_steps_above_the_profile_are_a_finding():
    at_rest = int(9.45 * GIB) + (STORY.kv_cache.tensor_bytes or 0)
    reading = replace(story_rank(), torch=TorchMemory(peak_allocated_bytes=at_rest + 6 * GIB))
    assert "activation_above_profile" in names(reading, STORY)


def test_an_encoder_that_was_not_profiled_is_a_finding():
    """vllm-ascend 0.12 keeps its result alone, and sized the pool without the encoder."""
    assert names(rank(total=65_452_113_920), replace(LARGER, encoder=STORY.encoder)) == ["encoder_not_profiled"]


@pytest.mark.parametrize(("by", "weight"), [(None, "note"), ("skip_mm_profiling", "clue")])
def test_check_only_notes_an_encoder_whose_rank_reports_no_reason(by, weight):
    reading = replace(rank(total=65_452_113_920), launch=Launch(encoder_unprofiled_by=by))
    explanation = explain([reading], lambda _: replace(LARGER, encoder=STORY.encoder))
    told = Report(engine=ENGINE, ranks=(reading,))
    found = known_start(of_report("set-up", told, explanation=explanation, setup=Setup(now=1.0, report=told)))
    assert isinstance(found, Finding)
    assert (found.name, found.weight) == ("encoder_not_profiled", weight)


def test_model_runner_v2_that_profiles_without_the_encoder_is_a_finding():
    """Before 0.27, where the encoder's budget is not known either."""
    old = replace(STORY, vllm_version="0.26.0", limits=replace(STORY.limits, v2_runner=True), encoder=EncoderLimits())
    found = {one.name: one for one in found_of(story_rank(), old)}
    assert "as if it needed no memory" in found["encoder_not_profiled"].title
    assert "V2_MODEL_RUNNER=0" in found["encoder_not_profiled"].advice[0].setting


@pytest.mark.parametrize("is_on", [True, None])
def test_an_npu_that_serves_images_without_expandable_segments_is_a_finding(is_on):
    started = replace(rank(), launch=Launch(expandable_segments=is_on))
    assert names(started, STORY) == []
    (found,) = found_of(replace(started, launch=Launch(expandable_segments=False)), STORY)
    assert found.name == "without_expandable_segments"
    assert [one.setting for one in found.advice] == ["PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"]


def test_a_size_that_was_given_is_to_be_less():
    given = replace(LARGER, encoder=STORY.encoder, kv_cache=replace(LARGER.kv_cache, given_bytes=20 * GIB))
    (finding,) = found_of(rank(total=65_452_113_920), given)
    (advice,) = [advice for advice in finding.advice if advice.setting == "--kv-cache-memory-bytes"]
    assert (finding.name, "give less" in advice.change) == ("encoder_not_profiled", True)
    assert "gpu_memory_utilization" not in finding.text
    assert "have to fit beside it" in finding.text


def test_a_served_name_that_is_not_known_now_has_not_moved():
    named, other, unnamed = (
        explained(Report(engine=ENGINE, ranks=(story_rank(),)), explain([story_rank()], lambda _: STORY, model=model))
        for model in ("served", "other", None)
    )
    assert comparison(named, unnamed) == []
    assert comparison(named, other) == [("model", "served", "other", "")]


CASES = [
    ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:256"}, "npu", "excludes max_split_size_mb"),
    ({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:256,max_split_size_mb:64"}, "npu", "sets max_split_size_mb 2 times"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"}, "cuda", "are both set, to different values"),
    ({"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "2"}, "npu", "TASK_QUEUE_ENABLE=2 has no effect"),
]


@pytest.mark.parametrize(("environment", "kind", "words"), CASES)
def test_settings_that_contradict_one_another_are_named(environment, kind, words):
    (problem,) = contradictions(environment, kind)
    assert words in problem
    assert "allocator_environment" in names(rank(kind=kind), replace(STORY, environment=environment))


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, "npu"),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, "npu"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:256"}, "cuda"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}, "cuda"),
        ({"TASK_QUEUE_ENABLE": "2"}, "npu"),
    ],
)
def test_settings_that_go_together_are_none(environment, kind):
    assert contradictions(environment, kind) == []


# What all of these say stands in golden/findings.txt.
FOUND = [
    (story_rank(), STORY),
    (rank(total=130_599_218_053), started_with(-22_011_707_392)),
    (
        replace(
            story_rank(),
            torch=TorchMemory(peak_allocated_bytes=int(9.45 * GIB) + (STORY.kv_cache.tensor_bytes or 0) + 6 * GIB),
        ),
        STORY,
    ),
    (rank(total=65_452_113_920), replace(LARGER, encoder=STORY.encoder)),
    (replace(rank(), launch=Launch(expandable_segments=False)), STORY),
    *((rank(kind=kind), replace(STORY, environment=environment)) for environment, kind, _ in CASES),
]
