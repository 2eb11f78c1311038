"""A sweep compares what two planners both answer; here both are made up."""

from __future__ import annotations

from tests.support.asked_sweep import FIGURES, FLAGS, Case, Figures, cases, compare

CHOSEN = [Case("m", {}, {"max_model_len": length}, 1 << 30) for length in (1024, 2048)]
POOL: Figures = dict.fromkeys(FIGURES, 8)


def test_the_same_figures_are_no_difference() -> None:
    assert compare(CHOSEN, lambda _: POOL, lambda _: POOL | {"groups": []}) == (2, ())


def test_each_figure_that_differs_is_named_with_its_case() -> None:
    outcome = compare(CHOSEN[:1], lambda _: POOL, lambda _: {**POOL, "blocks": 9})
    assert outcome == (1, ("m (max_model_len=1024; 1073741824 bytes): blocks is 8, and 9 in vLLM",))


def test_what_vllm_refuses_must_not_be_planned() -> None:
    outcome = compare(CHOSEN[:1], lambda _: POOL, lambda _: {"refused": "no"})
    assert outcome.differences == (f"{CHOSEN[0]}: it is planned, and refused by vLLM: no",)


def test_only_what_both_answer_counts_and_vllm_is_not_asked_in_vain() -> None:
    asked: list[Case] = []
    outcome = compare(CHOSEN, lambda case: None if case == CHOSEN[0] else POOL, asked.append)
    assert (outcome, asked) == ((0, ()), CHOSEN[1:])


def test_a_sample_is_the_same_every_time_and_the_sweep_has_every_flag() -> None:
    assert cases(sample=5) == cases(sample=5)
    seen = {(name, value) for case in cases() for name, value in case.flags.items()}
    assert seen == {(name, value) for name, values in FLAGS.items() for value in values if value is not None}
