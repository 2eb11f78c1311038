"""Real starts of vLLM, planned from the models' config.json: what they printed is what the printed GiB allow."""

from __future__ import annotations

from collections import Counter

import pytest

from highwater.plan.offline import OfflinePlan, plan_offline, read_config
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags
from tests.support.printed_pools import CONFIGS, GIB, HALF_A_DIGIT, REFUSED, STARTS, Start, start

# The rows of the same source that are no checks of the pool's size, one by one; the others are START or REFUSED.
NOT_A_CHECK = {
    26: "refused before the pool is sized: the free memory was less than the requested share",
    28: "asks for more than the model allows: see test_a_length_above_the_models_is_refused",
    30: "refused, and no figure is printed",
}


def window(one: Start) -> tuple[OfflinePlan, OfflinePlan]:
    """Return the plans at both ends of what the printed GiB may stand for."""
    values = read_config(str(CONFIGS / f"{one.config}.json"))
    ends = (one.gib - HALF_A_DIGIT, one.gib + HALF_A_DIGIT)
    low, high = (plan_offline(values, one.flags(int(end * GIB)), one.version) for end in ends)
    return low, high


@pytest.mark.parametrize("one", STARTS, ids=lambda one: f"{one.row} {one.config}")
def test_a_start_prints_what_was_planned(one: Start):
    """Blocks, tokens and concurrency are between those of the least and the most that the printed GiB stand for."""
    low, high = (plan.pool for plan in window(one))
    assert low.fits
    if one.blocks is not None:
        assert low.blocks <= one.blocks <= high.blocks
    if one.tokens is not None:
        assert low.tokens is not None
        assert high.tokens is not None
        assert low.tokens <= one.tokens <= high.tokens
    if one.concurrency is not None:
        assert low.max_concurrency is not None
        assert high.max_concurrency is not None
        assert round(low.max_concurrency, 2) <= one.concurrency <= round(high.max_concurrency, 2)
    if one.groups:
        assert Counter((group.kind, group.layers) for group in low.groups) == {
            (kind, layers): count for kind, layers, count in one.groups
        }


@pytest.mark.parametrize(("one", "needed_gib", "longest"), REFUSED, ids=lambda one: str(getattr(one, "row", "")))
def test_a_start_that_vllm_refused_is_planned_as_refused(one: Start, needed_gib: float | None, longest: int | None):
    """With the same need, and the same estimate of what would fit."""
    low, high = (plan.pool for plan in window(one))
    assert not low.fits
    assert not high.fits
    if needed_gib is not None:
        assert round(low.needed_bytes / GIB, 2) == pytest.approx(needed_gib, abs=0.011)
    if longest is not None:
        assert low.max_model_len_that_fits <= longest <= high.max_model_len_that_fits


def test_a_length_above_the_models_is_refused():
    """Row 28: phi-2 with 8,192 tokens."""
    with pytest.raises(PlanError, match=r"--max-model-len: 8192; the model allows 2048 \(max_position_embeddings\)"):
        window(start(28, "phi-2", 60.0))


def test_no_row_is_left_out_without_a_reason():
    """A row is a start, a refusal, or named with the reason why it checks nothing."""
    rows = {one.row for one in STARTS} | {one.row for one, _, _ in REFUSED} | set(NOT_A_CHECK)
    assert rows == {
        2, 4, 6, 8, 9, 10, 12, 14, 16, 17, 18, 19, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 49, 50,
        52, 54, 56, 58,
    }  # fmt: skip


def test_the_stories_own_command_line_closes():
    """Qwen3-VL-32B on two cards: 21,540,531,712 bytes are 1,283 blocks of 128, 164,224 tokens."""
    values = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "dtype": "bfloat16",
        },
    }
    flags = EngineFlags(
        platform="ascend", kv_cache_memory_bytes=21_540_531_712, tensor_parallel_size=2, max_model_len=163_000
    )
    pool = plan_offline(values, flags, "0.12.0").pool
    assert (pool.blocks, pool.tokens) == (1283, 164_224)
