"""The running engine under other flags: what is exact, what is carried over, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from highwater.explain.live import grant_live, live_json, plan_live
from highwater.explain.live_engine import LiveEngine, LiveWorker, live_engine
from highwater.explain.wish import ImageTokens, parse_wish
from highwater.model.engine_budget import EncoderLimits, StartMemory
from kvplan import PlanError
from kvplan.pool import plan_pool
from tests.fakes import started
from tests.fakes.started import GIB
from tests.unit.explain.readings import budget_of, rank


def engine_of(worker: object, version: str, ranks: int, returned: int | None = None, device: str = "npu") -> LiveEngine:
    budget = budget_of(worker, version, returned)  # type: ignore[arg-type]
    return live_engine([LiveWorker(rank(number, kind=device), budget) for number in range(ranks)])


def with_budget(engine: LiveEngine, **changes: Any) -> LiveEngine:
    """Return the engine as it would be if every worker had reported so."""
    budget = replace(engine.workers[0].budget, **changes)
    return live_engine([replace(worker, budget=budget) for worker in engine.workers])


@pytest.fixture(name="story")
def _story() -> LiveEngine:
    return engine_of(started.story(), "0.12.0", 2)


@pytest.fixture(name="newer")
def _newer() -> LiveEngine:
    return engine_of(started.story(), "0.19.0", 2)


@pytest.fixture(name="hybrid")
def _hybrid() -> LiveEngine:
    return engine_of(started.qwen3_next(), "0.12.0", 2, device="cuda")


@pytest.fixture(name="larger")
def _larger() -> LiveEngine:
    return engine_of(started.larger_story(), "0.12.0", 2, returned=21_540_531_712)


def test_without_a_change_the_plan_is_the_engine_as_it_runs(story: LiveEngine) -> None:
    answer = live_json(story, plan_live(story, {"max_model_len": 65_536}))
    assert (answer["kv_cache"]["blocks"], answer["kv_cache"]["tokens"]) == (5_040, 645_120)
    assert answer["changed"] == {}
    assert answer["kv_cache"]["grades"]["blocks"] == answer["kv_cache"]["grades"]["available_bytes"] == "engine"
    assert answer["command_line"] is None


def test_the_lengths_that_were_tried_by_hand_are_answered(larger: LiveEngine) -> None:
    fits = plan_live(larger, {"max_model_len": 163_000}).pool
    assert (fits.fits, fits.blocks) == (True, 1_283)
    too_long = plan_live(larger, {"max_model_len": 165_000}).pool
    assert (too_long.fits, too_long.max_model_len_that_fits) == (False, 164_224)
    assert live_json(larger, plan_live(larger, {"max_model_len": 163_000}))["command_line"] == (
        "vllm serve MODEL --max-model-len 163000"
    )


def test_eight_bit_keys_and_values_double_the_blocks(story: LiveEngine) -> None:
    before, after = plan_live(story, {}).pool, plan_live(story, {"kv_cache_dtype": "fp8"}).pool
    assert after.bytes_per_block * 2 == before.bytes_per_block
    assert after.blocks in {2 * before.blocks, 2 * before.blocks + 1}


def test_given_bytes_are_exact_and_change_nothing_else(newer: LiveEngine) -> None:
    plan = plan_live(newer, {"kv_cache_memory_bytes": 1_000 * 9 * 1024**2 + 1})
    assert (plan.pool.blocks, plan.available.grade) == (1_000, "exact")


@pytest.mark.parametrize(
    ("given", "fits", "said"),
    [
        ({"kv_cache_memory_bytes": 46 * GIB}, True, "5.42 GiB are left"),
        # 60.61 GiB were free before: 9.19 GiB of weights leave 51.42, of which the start took 4.42 more.
        ({"kv_cache_memory_bytes": 50 * GIB}, None, "1.42 GiB are left"),
        ({"kv_cache_memory_bytes": 52 * GIB}, False, "vLLM runs out of memory"),
        ({"num_gpu_blocks_override": 52 * GIB // (9 * 1024**2)}, False, "vLLM runs out of memory"),
        ({"kv_cache_memory_bytes": 2**47, "max_num_seqs": 64}, False, "vLLM runs out of memory"),
    ],
)
def test_a_cache_of_given_bytes_is_judged_by_the_card(newer: LiveEngine, given, fits, said) -> None:
    """vLLM takes them without a look at the rest; of the card, weights and what the start measured are known."""
    plan = plan_live(newer, given)
    answer = live_json(newer, plan)["kv_cache"]
    assert (answer["fits"], said in answer["on_card"]) == (fits, True), answer["on_card"]
    assert (answer["max_model_len_that_fits"] == 0) == (fits is False)
    assert (answer["refusal"] is not None) == (fits is False)


def test_on_a_gpu_every_version_takes_bytes() -> None:
    on_cuda = engine_of(started.story(), "0.12.0", 2, device="cuda")
    assert plan_live(on_cuda, {"kv_cache_memory_bytes": 2**33}).available.grade == "exact"


def test_a_share_has_no_effect_on_an_engine_that_runs_with_given_bytes(newer: LiveEngine) -> None:
    """Its workers report what the share would have been, all the same."""
    engine = replace(newer, flags=replace(newer.flags, kv_cache_memory_bytes=newer.available_bytes[0]))
    with pytest.raises(PlanError, match=r"gpu_memory_utilization: 0.5 has no effect .* the engine runs with it"):
        plan_live(engine, {"gpu_memory_utilization": 0.5})


def test_fewer_blocks_than_fit_are_made_as_given(story: LiveEngine) -> None:
    plan = plan_live(story, {"num_gpu_blocks_override": 1_000, "max_model_len": 32_768})
    assert (plan.pool.blocks, plan.pool.tokens, plan.fits, plan.card) == (1_000, 128_000, True, None)


def test_a_wish_is_not_granted_by_bytes_that_the_card_does_not_have(newer: LiveEngine) -> None:
    """Nor is an engine that runs with given bytes taken to have measured what else it needs."""
    budget = newer.workers[0].budget
    engine = with_budget(
        newer,
        memory=replace(budget.memory, requested_bytes=None, peak_activation_bytes=None),
        kv_cache=replace(budget.kv_cache, given_bytes=newer.available_bytes[0]),
    )
    more = plan_live(engine, {"kv_cache_memory_bytes": int(46 * GIB)})
    assert more.fits is None
    assert "is not known" in more.card.why
    for no_more in ({"max_model_len": 32_768}, {"max_num_seqs": 4}, {"kv_cache_memory_bytes": int(30 * GIB)}):
        plan = plan_live(engine, no_more)
        assert (plan.fits, plan.card) == (True, None)
    assert plan_live(engine, {"max_num_batched_tokens": 65_536}).fits is None
    assert plan_live(engine, {"kv_cache_memory_bytes": int(60 * GIB)}).fits is False


def test_a_start_that_reports_no_device_is_compared_with_the_workers_reading(newer: LiveEngine) -> None:
    given = replace(newer.workers[0].budget, memory=StartMemory())
    seen = replace(newer, workers=tuple(replace(worker, budget=given) for worker in newer.workers))
    assert plan_live(seen, {"kv_cache_memory_bytes": 200 * GIB}).fits is False
    blind = replace(
        seen, workers=tuple(replace(one, reading=replace(one.reading, total_bytes=None)) for one in seen.workers)
    )
    plan = plan_live(blind, {"kv_cache_memory_bytes": 200 * GIB})
    assert (plan.fits, plan.card.why) == (
        None,
        "The engine does not report the bytes of its device: nothing was compared.",
    )


def test_another_utilization_moves_the_budget_by_its_share_of_the_device(story: LiveEngine) -> None:
    plan = plan_live(story, {"gpu_memory_utilization": 0.9})
    memory = story.workers[0].budget.memory
    moved = plan.available.each[0] - story.available_bytes[0]
    assert moved == int(memory.total_bytes * 0.9) - memory.requested_bytes
    assert plan.available.grade == "measured"


@pytest.mark.parametrize(
    ("version", "device", "rounded"),
    [("0.13.0", "cuda", math.floor), ("0.14.0", "cuda", math.ceil), ("0.14.0", "npu", math.floor)],
)
def test_a_requested_share_is_rounded_as_the_version_rounds_it(
    version: str, device: str, rounded: Callable[[float], int]
) -> None:
    engine = engine_of(started.story(), version, 2, device=device)
    memory = engine.workers[0].budget.memory
    product = memory.total_bytes * 0.9
    assert not product.is_integer()
    moved = plan_live(engine, {"gpu_memory_utilization": 0.9}).available.each[0] - engine.available_bytes[0]
    assert moved == rounded(product) - memory.requested_bytes


@pytest.mark.parametrize(
    ("flags", "images", "moved"),
    [
        pytest.param({"max_num_batched_tokens": 65_536}, None, (-1, -1, 0), id="in proportion to the tokens, or not"),
        pytest.param({"max_num_seqs": 4}, None, (0, 0, 0.5), id="fewer sequences are not taken to free memory"),
        pytest.param({"max_num_seqs": 16}, None, (0, -1, 0), id="more of them lower the bound alone"),
        pytest.param({}, 1, (0, 0, 0.75), id="fewer images may free their part"),
        pytest.param({}, 0, (0, 0, 1), id="no images"),
    ],
)
def test_another_step_moves_the_peak_between_bounds(
    story: LiveEngine, flags: dict[str, Any], images: int | None, moved: tuple[float, float, float]
) -> None:
    """The peak of 3.86 GiB was measured with 32,768 tokens, 8 sequences and 4 images."""
    available = plan_live(story, flags, images).available
    sizes = [story.available_bytes[0] + round(int(3.86 * GIB) * part) for part in moved]
    assert [available.each[0], available.low, available.high] == pytest.approx(sizes, abs=1)
    assert available.grade == "estimated"


# The peak of activation in GiB by a step's tokens and requests, as vLLM 0.32.0 answers on `meta` with model runner V1:
# `python -m highwater_worker.plan -- VLLM_USE_V2_MODEL_RUNNER=0 VLLM_USE_FLASHINFER_SAMPLER=0 vllm serve ...`.
STEPS = ((8192, 1024), (16384, 1024), (32768, 1024), (2048, 1024), (2048, 256), (8192, 256), (8192, 64), (8192, 2048),
         (65536, 8))  # fmt: skip
PEAKS = {
    "Llama-3.1-8B": (1.889, 1.951, 3.660, 1.842, 0.546, 0.941, 0.941, 3.617, 7.285),
    "gpt-oss-20b": (2.889, 2.933, 3.021, 2.856, 0.835, 0.868, 0.412, 5.585, 2.941),
    "Mistral-Small-3.1 w8a8": (1.947, 3.660, 7.285, 1.889, 0.562, 1.848, 1.848, 3.717, 14.535),
    "Qwen1.5-MoE": (2.474, 2.803, 3.459, 2.228, 0.701, 0.947, 0.613, 4.511, 4.660),
    "gemma-2-2b": (3.623, 3.658, 3.728, 3.597, 1.027, 1.053, 0.633, 7.050, 4.816),
}


@pytest.mark.parametrize("peaks", PEAKS.values(), ids=PEAKS)
def test_the_bounds_hold_what_vllm_itself_says_of_another_step(story: LiveEngine, peaks: tuple[float, ...]) -> None:
    sizes = {step: int(peak * GIB) for step, peak in zip(STEPS, peaks, strict=True)}
    for (tokens, requests), peak in sizes.items():
        memory = replace(story.workers[0].budget.memory, peak_activation_bytes=peak, available_bytes=2**40)
        limits = replace(story.workers[0].budget.limits, max_num_batched_tokens=tokens, max_num_seqs=requests)
        engine = with_budget(story, memory=memory, limits=limits)
        for (others, more), true in sizes.items():
            found = plan_live(engine, {"max_num_batched_tokens": others, "max_num_seqs": more}).available
            if (others, more) != (tokens, requests):
                assert found.low <= 2**40 - (true - peak) <= found.high, (tokens, requests, others, more)


def test_graphs_grow_and_shrink_with_the_sequences_in_the_bounds(story: LiveEngine) -> None:
    memory = replace(
        story.workers[0].budget.memory, graphs_estimate_bytes=GIB, graphs_estimate_counted=True,
        available_bytes=story.available_bytes[0] - GIB,
    )  # fmt: skip
    engine = with_budget(story, memory=memory)
    more, fewer = (plan_live(engine, {"max_num_seqs": number}).available for number in (16, 4))
    assert more.low == engine.available_bytes[0] - int(3.86 * GIB) - GIB
    assert fewer.high == engine.available_bytes[0] + int(3.86 * GIB) // 2 + GIB // 2


def test_ranks_that_do_not_run_yet_are_planned_by_their_stage() -> None:
    budget = replace(budget_of(started.story(), "0.12.0"), parallel={"pipeline_parallel_size": 2})
    lighter = replace(budget.memory, weights_bytes=GIB, available_bytes=(budget.memory.available_bytes or 0) + 8 * GIB)
    workers = [
        LiveWorker(rank(0, pp_rank=0), budget), LiveWorker(rank(1, pp_rank=1), replace(budget, memory=lighter)),
    ]  # fmt: skip
    engine = live_engine(workers)
    heavy, light = (round((worker.budget.memory.weights_bytes or 0) / 2) for worker in workers)
    first, second = engine.available_bytes
    each = plan_live(engine, {"tensor_parallel_size": 2}).available.each
    assert each == (first + heavy, first + heavy, second + light, second + light)


def test_more_ranks_split_the_heads_and_estimate_the_weights(story: LiveEngine) -> None:
    """Eight KV heads on 4 ranks: two each; half of the 9.19 GiB of weights are freed at most."""
    plan = plan_live(story, {"tensor_parallel_size": 4})
    assert plan.pool.bytes_per_block * 2 == plan_live(story, {}).pool.bytes_per_block
    assert len(plan.available.each) == 4
    assert plan.available.low == story.available_bytes[0]
    assert plan.available.high == plan.available.each[0] == story.available_bytes[0] + round(int(9.1948 * GIB) / 2)
    on_8, on_16 = (plan_live(story, {"tensor_parallel_size": ranks}).pool.bytes_per_block for ranks in (8, 16))
    assert on_8 == on_16  # one head each, as there are eight


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_head_a_rank_does_not_show_how_many_there_are(ranks: int) -> None:
    worker = started.started(
        specs=[started.full(1, 128, 16)] * 4,
        groups=[started.group(started.full(1, 128, 16), 4)],
        blocks=100,
        block_bytes=4 * 8192,
        limits={"max_model_len": 1_000, "max_num_batched_tokens": 2_048, "max_num_seqs": 8},
        memory={"available_kv_cache_memory_bytes": 100 * 4 * 8192},
        runner={"model_memory_usage": 1_000},
        parallel={"tensor_parallel_size": ranks},
    )
    engine = engine_of(worker, "0.19.0", ranks, device="cuda")
    with pytest.raises(PlanError, match=f"each of the {ranks} ranks keeps one KV head"):
        plan_live(engine, {"tensor_parallel_size": ranks // 2})
    assert plan_live(engine, {"tensor_parallel_size": 8}).pool.bytes_per_block == 4 * 8192


def test_states_that_are_kept_once_a_request_have_blocks_as_long_as_the_length(hybrid: LiveEngine) -> None:
    """Else a request of twice the length would be planned with two states."""
    longer = plan_live(hybrid, {"max_model_len": 400_000}).pool
    assert [group.blocks_per_request for group in longer.groups if group.kind == "mamba"] == [1, 1, 1]


@pytest.mark.parametrize("flags", [{"kv_cache_dtype": "fp8"}, {"tensor_parallel_size": 4}])
def test_blocks_that_would_be_aligned_anew_are_refused_by_name(hybrid: LiveEngine, flags: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=rf"{next(iter(flags))}: .*highwater plan -- vllm serve MODEL"):
        plan_live(hybrid, flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_model_length": 1}, "max_model_length: there is no such key; known: max_model_len,"),
        ({"max_model_len": 0}, "max_model_len: 0 must be a whole number of 1 to"),
        ({"max_model_len": True}, "max_model_len: True must be a whole number"),
        ({"max_num_seqs": 2.5}, "max_num_seqs: 2.5 must be a whole number"),
        ({"max_num_batched_tokens": "8k"}, "max_num_batched_tokens: '8k' must be a whole number"),
        ({"tensor_parallel_size": 2_000_000}, "tensor_parallel_size: 2000000 must be a whole number of 1 to 1024"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: 1.5 must be a share"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype: 'int3' cannot be planned from the running engine; known: auto,"),
        ({"block_size": 64}, "block_size: 64 is not how the engine runs"),
        ({"kv_cache_memory_bytes": 1_000, "gpu_memory_utilization": 0.5}, "gpu_memory_utilization: 0.5 has no effect"),
        ({"gpu_memory_utilization": 1.0}, r"gpu_memory_utilization: 1\.0 .* at most 0\.99"),  # 60.61 of 60.96 GiB free
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: 3; the model's 8 KV heads must be divisible by it"),
        ({"kv_cache_dtype": []}, r"kv_cache_dtype: \[\] must be a word"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens: 7 is less than max_num_seqs, 8; vLLM refuses that"),
        ({"max_model_len": "x" * 10_000}, r"max_model_len: 'x+\.\.\. must be a whole number"),
        (
            {"kv_cache_memory_bytes": 1_000},
            "kv_cache_memory_bytes: 1000 has no effect .* from 0.19 on; give gpu_memory",
        ),
    ],
)
def test_what_cannot_be_planned_is_named(story: LiveEngine, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"^{message}") as raised:
        plan_live(story, flags)
    assert len(str(raised.value)) < 300


def test_fewer_images_a_prompt_are_in_the_command_line_and_make_an_estimate(story: LiveEngine) -> None:
    answer = live_json(story, plan_live(story, {}, 1))
    assert answer["command_line"] == "vllm serve MODEL --limit-mm-per-prompt '{\"image\": 1}'"
    assert answer["kv_cache"]["grades"]["blocks"] == "estimated"


def test_the_encoders_budget_follows_the_batched_tokens(story: LiveEngine) -> None:
    """It is never under the largest item: 16,384 embeddings of an image of 4096 x 4096."""
    now, less = (live_json(story, plan_live(story, flags))["encoder"] for flags in ({}, {"max_num_batched_tokens": 8}))
    assert (now["cache_embeddings"], now["items"]["image"]) == (32_768, {"max_embeddings": 16_384, "cached": 2})
    assert (less["cache_embeddings"], less["items"]["image"]["cached"]) == (16_384, 1)


def test_an_encoders_budget_that_is_not_known_stays_so(story: LiveEngine) -> None:
    """Model runner V2 that was not seen to profile it: how large an item is decides, too."""
    plan = plan_live(with_budget(story, encoder=EncoderLimits()), {"max_num_batched_tokens": 8})
    assert plan.encoder == EncoderLimits()


def test_a_wish_that_fits_needs_lengths_and_numbers_only(story: LiveEngine) -> None:
    granted = grant_live(story, parse_wish("8 x 32k + 4 images of 2042 tokens each"))
    assert granted.fits
    assert granted.chosen.flags == {"max_model_len": 32_768 + 4 * 2_042, "max_num_seqs": 8}


def test_images_without_a_size_are_as_large_as_those_in_the_encoder_cache(story: LiveEngine) -> None:
    seen, largest = (grant_live(story, parse_wish("1 x 1k + 2 images"), cached).image for cached in (300, None))
    assert seen == ImageTokens(embeddings=300, prompt_tokens=300)
    assert largest == ImageTokens(embeddings=16_384, prompt_tokens=16_384)


def test_images_of_other_modalities_alone_or_in_pixels_are_refused(story: LiveEngine) -> None:
    encoder = story.workers[0].budget.encoder
    of_audio = with_budget(story, encoder=replace(encoder, max_tokens_per_item={"audio": 750}))
    with pytest.raises(PlanError, match="2 images: this engine takes none"):
        grant_live(of_audio, parse_wish("1 x 1k + 2 images of 20 tokens"))
    with pytest.raises(PlanError, match=r"image of 1920x1080 .* give the tokens"):
        grant_live(story, parse_wish("8 x 32k + 4 images of 1080p each"))


def test_a_wish_too_large_for_the_engine_takes_the_smallest_change_that_holds_it(larger: LiveEngine) -> None:
    """8 x 32k are 262,144 tokens, 164,224 there are: 8-bit keys and values hold them, fewer or shorter are offered."""
    granted = grant_live(larger, parse_wish("8 x 32k"))
    assert not granted.fits
    assert granted.chosen.flags["kv_cache_dtype"] == "fp8"
    fewer, shorter = granted.nearest[:2]
    assert (fewer.conversations, fewer.fits) == (5, True)
    assert (shorter.conversations, shorter.length, shorter.fits) == (8, 160 * 128, True)
    assert "8 x 256 blocks" in granted.proof


def test_a_thousand_ranks_are_sized_as_few(story: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(workers: Any, *rest: Any) -> Any:
        asked.append(len(workers))
        return plan_pool(workers, *rest)

    monkeypatch.setattr("highwater.explain.live.plan_pool", counted)
    plan_live(story, {"tensor_parallel_size": 1024})
    assert asked == [1]
