"""Blocks, tokens, needs and refusals, by the rules of each version."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan import Limits, PlanError
from kvplan.generations import generation_of
from kvplan.pool import KvPool, plan_pool
from kvplan.specs import CrossAttention, FullAttention, Layers, LayerSpec, MambaState, MlaAttention, SlidingWindow
from tests.kv_cases import plan, random_questions

LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256)
FULL = FullAttention(block_size=16, kv_heads=4, head_size=128, element_bytes=2)
PAGE = FULL.page_bytes
SLIDING = SlidingWindow(block_size=16, kv_heads=4, head_size=128, element_bytes=2, window=1024)
STATE = MambaState(block_size=16, shapes=((PAGE // 4,),), element_bytes=(4,), speculative_blocks=1)


def layers(count: int, spec: LayerSpec = FULL, name: str = "layers") -> Layers:
    return {f"{name}.{place}": spec for place in range(count)}


def pool_of(model: Layers, blocks: int, version: str = "0.32.0", limits: Limits = LIMITS) -> KvPool:
    return plan_pool([model], [blocks * PAGE], limits, generation_of(version))


def test_the_null_block_is_taken_off_from_0_29_on() -> None:
    """512 blocks are one request of 8,192 tokens: enough before, and one too few since."""
    assert pool_of(layers(1), 512, "0.28.0").fits
    refused = pool_of(layers(1), 512, "0.29.0")
    assert (refused.fits, refused.blocks, refused.max_model_len_that_fits) == (False, 512, 511 * 16)
    assert refused.refusal.available_bytes == 511 * PAGE
    assert pool_of(layers(1), 513, "0.29.0").fits


def test_a_window_reserves_for_the_step_under_way_and_from_0_26_on_for_all_of_them() -> None:
    limits = replace(LIMITS, async_scheduling=True)
    assert pool_of(layers(1, SLIDING), 600, "0.25.1", limits).groups[0].blocks_per_request == 192 + 1
    assert pool_of(layers(1, SLIDING), 600, "0.26.0", limits).groups[0].blocks_per_request == 320 + 1


@pytest.mark.parametrize(
    ("stages", "second_runner", "steps"), [(1, False, 2), (1, True, 2), (4, False, 4), (4, True, 5)]
)
def test_how_many_steps_may_be_under_way(stages: int, second_runner: bool, steps: int) -> None:
    limits = replace(LIMITS, async_scheduling=True, pipeline_parallel_size=stages, v2_model_runner=second_runner)
    assert limits.max_in_flight_tokens == steps * 2048


@pytest.mark.parametrize(
    ("version", "mode", "blocks"),
    [
        ("0.12.0", "none", 512),
        ("0.15.0", "none", 2),
        ("0.15.0", "align", 3),
        ("0.21.0", "all", 512),
        ("0.22.0", "all", 513),
    ],
)
def test_a_state_takes_blocks_by_its_cache_mode(version: str, mode: str, blocks: int) -> None:
    pool = pool_of(layers(1, STATE), 600, version, replace(LIMITS, mamba_cache_mode=mode))
    assert pool.groups[0].blocks_per_request == blocks


def test_a_cache_mode_that_a_version_lacks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"mamba_cache_mode: 'all' .* must be none or align"):
        pool_of(layers(1, STATE), 600, "0.32.0", replace(LIMITS, mamba_cache_mode="all"))


def test_before_0_19_only_the_first_group_was_checked() -> None:
    model = layers(2, SLIDING) | layers(2, name="full")
    assert pool_of(model, 2 * 400, "0.18.0").fits
    assert not pool_of(model, 2 * 400, "0.19.0").fits


def test_before_0_17_a_pipeline_was_checked_as_one_worker() -> None:
    """16 and 32 layers, compared as 48 with the smallest device."""
    stages = [layers(16, name="first"), layers(32, name="second")]
    room = [512 * 32 * PAGE] * 2
    assert not plan_pool(stages, room, LIMITS, generation_of("0.16.0")).fits
    fitting = plan_pool(stages, room, LIMITS, generation_of("0.17.0"))
    assert (fitting.fits, fitting.binding_worker, fitting.blocks) == (True, 1, 512)


def test_the_smallest_worker_decides_the_blocks_of_all() -> None:
    pool = plan_pool([layers(2), layers(2)], [2000 * PAGE, 1800 * PAGE], LIMITS, generation_of("0.23.0"))
    assert (pool.blocks, pool.binding_worker, pool.available_bytes) == (900, 1, 1800 * PAGE)


def test_an_ordered_number_of_blocks_replaces_the_check_from_0_20_1_on() -> None:
    ordered = replace(LIMITS, num_gpu_blocks_override=100)
    old, new = pool_of(layers(1), 600, "0.20.0", ordered), pool_of(layers(1), 600, "0.20.1", ordered)
    assert (old.fits, old.blocks) == (True, 100)
    assert (new.fits, new.blocks, new.max_model_len_that_fits) == (False, 100, 1600)


def test_context_parallelism_multiplies_the_tokens_and_bars_windows() -> None:
    spread = replace(LIMITS, decode_context_parallel_size=4)
    pool = pool_of(layers(1), 600, "0.19.0", spread)
    assert (pool.groups[0].blocks_per_request, pool.tokens) == (128, 600 * 16 * 4)
    with pytest.raises(PlanError, match="decode_context_parallel_size: 4"):
        pool_of(layers(1, SLIDING), 600, "0.19.0", spread)


def test_cross_attention_keeps_the_encoders_tokens() -> None:
    cross = CrossAttention(block_size=16, kv_heads=4, head_size=128, element_bytes=2)
    pool = pool_of(layers(1, cross), 600, limits=replace(LIMITS, max_encoder_tokens=1500))
    assert pool.groups[0].blocks_per_request == 94
    with pytest.raises(PlanError, match="max_encoder_tokens"):
        pool_of(layers(1, cross), 600)


@pytest.mark.parametrize("available", [0, -5])
def test_no_memory_at_all_is_refused_in_vllms_words(available: int) -> None:
    pool = plan_pool([layers(1)], [available], LIMITS, generation_of("0.19.0"))
    assert (pool.fits, pool.blocks, pool.max_model_len_that_fits) == (False, 0, 0)
    assert pool.refusal.message == "No available memory for the cache blocks."


def test_gib_are_written_as_each_version_writes_them() -> None:
    for version, text in (("0.12.0", "(7.00 GiB"), ("0.19.0", "(7.0 GiB")):
        refusal = pool_of(layers(28), 28, version, replace(LIMITS, max_model_len=131072)).refusal
        assert text in refusal.message


@pytest.mark.parametrize(
    ("workers", "available"), [([], []), ([layers(1)], []), ([{}], [1]), ([layers(1), {}], [1 << 30, 1 << 30])]
)
def test_what_is_no_model_is_refused(workers: list[Layers], available: list[int]) -> None:
    with pytest.raises(PlanError):
        plan_pool(workers, available, LIMITS, generation_of("0.19.0"))


def test_the_longest_length_fits_and_one_token_more_does_not() -> None:
    refused = 0
    for question in random_questions("0.32.0", count=60, seed=7):
        pool = plan(question, "0.32.0")
        if isinstance(pool, PlanError) or pool.fits or pool.max_model_len_that_fits == 0:
            continue
        refused += 1
        for length, fits in ((pool.max_model_len_that_fits, True), (pool.max_model_len_that_fits + 1, False)):
            again = plan(replace(question, limits=replace(question.limits, max_model_len=length)), "0.32.0")
            assert not isinstance(again, PlanError)
            assert again.fits is fits
    assert refused > 10


HEADS = {"block_size": 16, "kv_heads": 8, "head_size": 128, "element_bytes": 2}
LATENT = {"block_size": 64, "kv_heads": 1, "head_size": 576, "element_bytes": 1}


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        pytest.param(FullAttention(**HEADS), 2 * 16 * 8 * 128 * 2, id="a key and a value of every token and head"),
        pytest.param(FullAttention(**HEADS, head_size_v=64), 16 * 8 * (128 + 64) * 2, id="a value of its own size"),
        pytest.param(MlaAttention(**LATENT), 64 * 576, id="MLA: one vector"),
        pytest.param(MlaAttention(**LATENT, token_head_bytes=656), 64 * 656, id="MLA: packed"),
        pytest.param(
            MambaState(block_size=544, shapes=((3, 1024), (8, 64, 128)), element_bytes=(2, 4)),
            3 * 1024 * 2 + 8 * 64 * 128 * 4,
            id="a state, whatever its block",
        ),
        pytest.param(SlidingWindow(**HEADS, window=512, page_bytes_padded=98304), 98304, id="padded"),
    ],
)
def test_what_a_layer_takes_of_a_block(spec: LayerSpec, size: int) -> None:
    assert spec.page_bytes == size


def test_a_value_as_wide_as_its_key_has_no_size_of_its_own() -> None:
    assert FullAttention(**HEADS, head_size_v=128) == FullAttention(**HEADS)
