"""An engine's pool explained: its own figures beside the arithmetic, and what its headline number means."""

from __future__ import annotations

from dataclasses import replace

from highwater.explain.explanation import explain
from highwater.model.engine_budget import EngineBudget
from tests.unit.explain.readings import GEMMA, LARGER, QWEN3_NEXT, STORY, other, rank, story_rank


def pool_of(*budgets: EngineBudget):
    readings = [story_rank(number) for number in range(len(budgets))]
    (pool,) = explain(readings, lambda reading: budgets[reading.rank]).pools
    return pool


def test_the_storys_pool_is_explained():
    pool = pool_of(STORY)
    assert (pool.blocks, pool.tokens, pool.differences, pool.problem) == (5_040, 645_120, (), None)
    assert [(one.tokens, one.requests) for one in pool.conversations] == [
        (1_024, 629),
        (8_192, 78),
        (65_536, 9),
    ]
    assert (pool.fully_counted_blocks, pool.fully_counted_tokens) == (4_953, 633_984)


def test_the_larger_models_tokens_are_computed():
    """Its worker logged bytes alone: 1,283 blocks, 164,224 tokens."""
    pool = pool_of(LARGER)
    assert (pool.blocks, pool.tokens, pool.tokens_grade) == (1_283, 164_224, "exact")


def test_a_hybrid_pools_headline_is_called_what_it_is():
    """Qwen3-Next: 7,162 blocks, 973,760 tokens, 14.77 requests of the maximum length."""
    pool = pool_of(QWEN3_NEXT)
    assert (pool.tokens, round(pool.max_concurrency, 2)) == (973_760, 14.77)
    assert "divided by 4 groups, times the smallest block (7,162 // 4 x 544)" in pool.tokens_meaning
    newer = pool_of(replace(QWEN3_NEXT, vllm_version="0.23.0"))
    assert "the maximum concurrency times the maximum length" in newer.tokens_meaning
    assert "shorter requests of a hybrid model hold fewer" in newer.tokens_meaning


def test_only_a_hybrid_model_is_called_one():
    assert "hybrid" not in pool_of(replace(STORY, vllm_version="0.23.0")).tokens_meaning


def test_a_given_size_is_no_share_of_the_device():
    given = other(STORY, given=STORY.memory.available_bytes)
    words = explain([story_rank()], lambda _: given, model="Qwen3-VL-8B").paragraph
    assert (
        "rank 0 of 60.96 GiB. The KV cache's size was given, not a share of the device. Of 60.96 GiB the KV " in words
    )
    assert "Of that" not in words


def test_the_rank_with_the_fewest_bytes_binds():
    made = other(STORY, blocks=4_926)
    pool = pool_of(made, other(made, available_bytes=(STORY.memory.available_bytes or 0) - 2**30))
    assert (pool.binding_rank, pool.planned_blocks, pool.differences) == (1, 4_926, ())


def test_a_difference_is_shown():
    made = other(STORY, blocks=5_000)
    pool = pool_of(replace(made, kv_cache=replace(made.kv_cache, size_tokens=7)))
    assert pool.differences == (
        "blocks: the engine has 5,000, the arithmetic of 0.12.0 gives 5,040",
        "tokens: the engine has 7, the arithmetic of 0.12.0 gives 645,120",
    )
    assert (pool.tokens, pool.tokens_grade) == (7, "engine")


def test_what_cannot_be_planned_is_shown_all_the_same():
    pool = pool_of(replace(GEMMA, vllm_version="0.10.2"))
    assert pool.problem == "vllm_version: '0.10.2' is older than the oldest version known, 0.11.0"
    assert (pool.blocks, pool.tokens, pool.conversations) == (15_997, None, ())


def test_numbers_that_make_no_pool_are_a_reason_too():
    odd = replace(STORY, limits=replace(STORY.limits, max_model_len=0))
    assert pool_of(odd).blocks == 5_040


def test_every_data_parallel_engine_has_a_pool():
    readings = [rank(0), replace(rank(0), dp_rank=1)]
    assert [pool.dp_rank for pool in explain(readings, lambda _: STORY).pools] == [0, 1]


def test_a_rank_whose_start_is_not_known_is_named():
    explanation = explain([rank(0), rank(1)], lambda reading: STORY if reading.rank else None, why_missing="no file")
    assert (explanation.problems, len(explanation.ranks)) == (("rank 0: no file",), 1)


def test_the_paragraph_can_be_pasted():
    words = explain([story_rank()], lambda _: STORY, model="Qwen3-VL-8B").paragraph
    for figure in ("57.91 GiB requested = 60.96 GiB x 0.95", "weights 9.19", "peak activation 3.86", "non-torch 0.56",
                   "44.30 GiB are left", "645,120 tokens", "0.255", "0.502", "43.54", "633,984"):  # fmt: skip
        assert figure in words
    assert "4096 x 4096 pixels" in words
    assert "one request of 65,536 tokens takes 4.50 GiB, so 9 fit" in words
