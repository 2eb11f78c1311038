"""A running engine beside a command line: the answer is recorded, the engine is one whose figures are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from highwater.explain.beside import ask_beside, beside, beside_text, card_name, is_command, why_not
from highwater.explain.explanation import Explanation, explain
from highwater.explain.roads import Answer
from highwater.model.engine_budget import EngineBudget, EngineLimits, StartMemory
from highwater.model.rank import Device
from tests.fakes.started import GIB
from tests.unit.explain.readings import GEMMA, STORY, rank, story_rank

# Llama-3.1-8B at 32,768 tokens on vLLM 0.32.0, as `python -m highwater_worker.plan` answered.
ANSWER: Answer = json.loads((Path(__file__).parent / "answers" / "llama-3.1-8b.json").read_text("utf-8"))
ENGINE = EngineBudget(
    vllm_version="0.32.0",
    architecture="LlamaForCausalLM",
    memory=StartMemory(
        total_bytes=85_028_765_696,
        init_free_bytes=84_500_000_000,
        utilization=0.9,
        requested_bytes=76_525_889_127,
        weights_bytes=16_094_076_928,
        total_consumed_bytes=16_394_076_928,
        peak_activation_bytes=2_000_000_000 + GIB,
        graphs_estimate_bytes=GIB,
        graphs_estimate_counted=True,
        graphs_bytes=GIB // 2,
        available_bytes=76_525_889_127 - 16_394_076_928 - 2_000_000_000 - GIB,
    ),
    kv_cache=replace(GEMMA.kv_cache, blocks=None, tensor_bytes=None, max_concurrency=16.5),
    limits=EngineLimits(max_model_len=8_192, max_num_batched_tokens=8_192, max_num_seqs=1_024),
    parallel={"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
)


def explanation_of(budget: EngineBudget = ENGINE, *, name: str | None = "NVIDIA H100 80GB HBM3") -> Explanation:
    reading = replace(rank(kind="cuda", total=None), device=Device(type="cuda", index=0, name=name))
    return explain([reading], lambda _: budget)


def asked(answer: Answer, budget: EngineBudget = ENGINE) -> list[tuple[int | None, Mapping[str, int]]]:
    questions: list[tuple[int | None, Mapping[str, int]]] = []

    def ask(device_bytes: int | None, measured: Mapping[str, int]) -> Answer:
        questions.append((device_bytes, dict(measured)))
        return answer

    assert ask_beside(explanation_of(budget), ask) is answer
    return questions


def with_config(section: str, **values: Any) -> Answer:
    return {**ANSWER, "config": {**ANSWER["config"], section: {**ANSWER["config"][section], **values}}}


def test_each_part_has_both_sides_and_the_flags_that_moved_it() -> None:
    """A flag that differs is shown with both values, else those that the part depends on."""
    explanation = explanation_of()
    rows, (pool,) = {row.what: row for row in beside(explanation, ANSWER)}, explanation.pools
    assert [(row.here, row.there) for row in rows.values()] == [
        (16_094_076_928, 16_094_076_928),
        (2_000_000_000, 1_010_848_256),
        (300_000_000, 262_144_000 + 134_456_832),
        (GIB, 824_633_721),
        (ENGINE.memory.available_bytes, 59_900_304_704),
        (pool.tokens, 456_992),
        (16.5, 13.9462890625),
        (pool.max_model_len_that_fits, 32_768),
    ]
    assert rows["KV cache"].moved_by == ("--gpu-memory-utilization 0.9 -> 0.92",)
    assert rows["requests at once"].moved_by == ("--max-model-len 8192 -> 32768",)
    assert rows["peak activation"].moved_by[0] == "--max-num-batched-tokens"
    assert (rows["weights"].low, rows["weights"].high, rows["weights"].grade) == (
        16_094_076_928, 16_597_016_832, "estimated",
    )  # fmt: skip


def test_vllm_is_asked_for_this_card_with_what_was_measured() -> None:
    """Of a start with nothing apart, graphs alone; of one whose phases were seen, what is outside torch too."""
    assert asked(ANSWER) == [(85_028_765_696, {"graphs": GIB})]
    old = replace(STORY, parallel=ENGINE.parallel, limits=ENGINE.limits)
    assert asked(ANSWER, old) == [(STORY.memory.total_bytes, {"non_torch": STORY.memory.non_torch_bytes})]


@pytest.mark.parametrize(
    ("answer", "held"),
    [
        (with_config("parallel", tensor_parallel_size=2), {}),
        (with_config("scheduler", max_num_seqs=64), {"non_torch": int(0.56 * GIB)}),
        (with_config("model", enforce_eager=True), {"non_torch": int(0.56 * GIB)}),
        (with_config("model", _architecture="Gemma3ForCausalLM"), {"non_torch": int(0.56 * GIB)}),
        (with_config("scheduler", max_num_batched_tokens=64), None),
    ],
)
def test_what_was_measured_of_another_start_is_not_taken_for_this(answer: Answer, held: Mapping[str, int]) -> None:
    memory = replace(STORY.memory, graphs_estimate_bytes=GIB, graphs_estimate_counted=True)
    questions = asked(answer, replace(STORY, memory=memory, parallel=ENGINE.parallel, limits=ENGINE.limits))
    assert questions[0][1].keys() == {"non_torch", "graphs"}
    assert [measured for _, measured in questions[1:]] == ([] if held is None else [held])


def test_a_refusal_and_what_was_guessed_stand_in_the_text() -> None:
    pool = {**ANSWER["kv_cache"], "fits": False, "refusal": "no such length"}
    refused = {**ANSWER, "status": "does_not_fit", "kv_cache": pool, "guessed": ["ranks are alike"]}
    lines = beside_text(explanation_of(), refused).splitlines()
    assert lines[0].endswith("beside that command line, as vLLM 0.32.0 answers: does not fit")
    assert (lines[1], lines[-1]) == ("no such length", "guessed: ranks are alike")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ANSWER, None),
        ({"status": "refused", "refusal": {"message": "no such length"}}, "refused: no such length"),
        ({"status": "cannot_be_asked", "error": "no config.json", "help": "copy it"},
         "cannot be asked: no config.json: copy it"),
        ({"status": "invalid", "error": "max_len is unknown"}, "invalid: max_len is unknown"),
    ],
)  # fmt: skip
def test_an_answer_without_figures_says_why(answer: Answer, why: str | None) -> None:
    assert why_not(answer) == why


def test_the_table_has_sizes_between_bounds_and_numbers() -> None:
    lines = {
        line[:22].strip(): " ".join(line[22:].split()) for line in beside_text(explanation_of(), ANSWER).splitlines()
    }
    assert lines["peak activation"].startswith("1.86 GiB 0.941 GiB -943 MiB 0.793 GiB to 1.14 GiB --max-num")
    assert lines["requests at once"].startswith("16.50 13.95 -2.55 estimated --max-model-len 8192 -> 32768")


def test_an_engine_whose_start_is_not_known_is_shown_beside_it_all_the_same() -> None:
    nothing = explain([story_rank()], lambda _: None)
    assert ask_beside(nothing, lambda size, measured: {"size": size, "measured": measured}) == {
        "size": None, "measured": {},
    }  # fmt: skip
    assert {row.here for row in beside(nothing, ANSWER)} == {None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve MODEL --max-num-seqs 64", True),
        ("  VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0 vllm serve MODEL", True),
        ("python3 -m vllm.entrypoints.openai.api_server --model M", True),
        ("/opt/venv/bin/vllm serve \\\n  MODEL", True),
        ("docker run image vllm serve MODEL", True),
        ("before.json", False),
        ("vllm-before.json", False),
        ("serve.json", False),
        ("our vllm start.json", False),
    ],
)
def test_a_command_line_is_told_from_a_file(text: str, *, expected: bool) -> None:
    assert is_command(text) is expected


def test_the_card_is_found_by_the_drivers_name() -> None:
    assert card_name(explanation_of()) == "H100"
    assert card_name(explanation_of(name="NVIDIA X9000")) is None
    assert card_name(explain([story_rank()], lambda _: STORY)) == "910B"
    assert card_name(Explanation()) is None
