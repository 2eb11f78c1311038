"""Wishes: the grammar, the smallest command line, and the proof where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.explain.wish import (
    EXAMPLE,
    Granted,
    Images,
    ImageTokens,
    Planner,
    Wish,
    changes,
    fitting_conversations,
    grant,
    parse_wish,
    wish_json,
)
from kvplan import Limits, PlanError
from kvplan.generations import generation_of
from kvplan.pool import KvPool, plan_pool
from kvplan.specs import FullAttention

IMAGE = ImageTokens(embeddings=2_040, prompt_tokens=2_042)
BLOCK_BYTES = 16 * 2 * 64 * 2 * 2


def planner(blocks: int, *, per_utilization: int = 0) -> Planner:
    """Return a planner of one layer with so many blocks of 16 tokens, and more of them where more is asked for."""

    def plan(flags: Mapping[str, Any]) -> KvPool:
        if "tensor_parallel_size" in flags:
            raise PlanError("tensor_parallel_size: cannot be planned here")
        size = 1 if "kv_cache_dtype" in flags else 2
        layer = FullAttention(block_size=16, kv_heads=2, head_size=64, element_bytes=size)
        more = per_utilization if "gpu_memory_utilization" in flags else 0
        limits = Limits(
            max_model_len=flags["max_model_len"], max_num_seqs=flags["max_num_seqs"], max_num_batched_tokens=2_048
        )
        return plan_pool([{"layer": layer}], [(blocks + more) * BLOCK_BYTES], limits, generation_of("0.19.0"))

    return plan


def granted(text: str, blocks: int, **options: Any) -> Granted:
    more = options.pop("per_utilization", 0)
    steps = changes(options.pop("utilization", None), options.pop("kv_cache_dtype", None), 1)
    return grant(parse_wish(text), planner(blocks, per_utilization=more), steps, image=IMAGE, **options)


@pytest.mark.parametrize(
    ("text", "tokens", "images"),
    [
        ("8 x 32k", (8, 32_768), None),
        ("8x32768", (8, 32_768), None),
        ("  1 X 1M tokens ", (1, 1_048_576), None),
        (EXAMPLE, (8, 32_768), Images(count=4, width=1_920, height=1_080)),
        ("2 x 1k + 1 image of 4K", (2, 1_024), Images(count=1, width=3_840, height=2_160)),
        ("2 x 9 + 3 images of 640\u00d7480", (2, 9), Images(count=3, width=640, height=480)),
        ("2 x 9 + 3 images of 2040 tokens each", (2, 9), Images(count=3, tokens=2_040)),
        ("2 x 9 + 3 images", (2, 9), Images(count=3)),
    ],
)
def test_a_wish_is_read(text: str, tokens: tuple[int, int], images: Images | None) -> None:
    assert parse_wish(text) == Wish(conversations=tokens[0], tokens=tokens[1], images=images)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "wish: '' is not understood from '' on"),
        ("eight of 32k", "wish: 'eight of 32k' is not understood from 'eight of 32k' on, where a number of conver"),
        ("8 x 32k and more", "wish: '8 x 32k and more' is not understood from 'and more' on"),
        ("8 x 32k + 4 videos", "wish: '8 x 32k + 4 videos' is not understood from '+ 4 videos' on"),
        ("8 x 32k + 4 images of 999p", "wish: '999p' is not a known size of an image; known: 720p, 1080p"),
        ("0 x 32k", "wish: conversations 0: must be 1 to 100000"),
        ("8 x 900000000000000000000", "wish: length 900000000000000000000: must be 1 to"),
        ("1 x 1 + 1 images of 0x9", "wish: pixels 0: must be 1 to 100000"),
        ("9" * 300, "wish: 300 characters are too many"),
    ],
)
def test_what_is_not_understood_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_wish(text)
    assert str(raised.value).startswith(message)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    wish = None
    with suppress(PlanError):
        wish = parse_wish(text)
    assert wish is None or wish.conversations >= 1


def test_a_wish_that_just_fits_has_the_smallest_flags() -> None:
    """Two of 160 tokens take 20 blocks, and vLLM keeps one itself."""
    result = granted("2 x 160", 21)
    assert result.fits
    assert result.chosen.flags == {"max_model_len": 160, "max_num_seqs": 2}
    assert result.chosen.needed_bytes == result.chosen.available_bytes == 21 * BLOCK_BYTES
    assert set(result.reasons) == set(result.chosen.flags)
    assert result.nearest == ()


def test_with_a_block_less_the_nearest_are_fewer_or_shorter_conversations() -> None:
    """Nineteen blocks hold one of 160 tokens, or two of 144."""
    result = granted("2 x 160", 20, kv_cache_dtype="fp8")
    assert (result.fits, result.chosen) == (False, None)
    assert [(option.conversations, option.length, option.fits) for option in result.nearest] == [
        (1, 160, True),
        (2, 144, True),
    ]
    assert result.proof == (
        "2 conversations of 160 tokens take 2 x 10 blocks and the null block, 21 in all, of 8,192 bytes on a rank: "
        "172,032 bytes (168 KiB). There are 20 blocks, 163,840 bytes (160 KiB)."
    )


@pytest.mark.parametrize(
    ("blocks", "more"),
    [
        (20, {"gpu_memory_utilization"}),
        (12, {"kv_cache_dtype"}),
        (10, {"gpu_memory_utilization", "kv_cache_dtype"}),
    ],
)
def test_the_smallest_change_under_which_it_fits_is_chosen(blocks: int, more: set[str]) -> None:
    result = granted("2 x 160", blocks, per_utilization=1, utilization=0.9)
    assert set(result.chosen.flags) == {"max_model_len", "max_num_seqs"} | more


def test_a_change_that_cannot_be_planned_is_reported_and_the_others_tried() -> None:
    result = granted("2 x 160", 12)
    assert result.chosen is not None
    assert result.refused == ("tensor_parallel_size: cannot be planned here",) * 3


def test_images_come_on_top_of_the_length_and_into_the_command_line() -> None:
    result = granted("1 x 1k + 2 images of 1080p", 1_000)
    assert result.length == 1_024 + 2 * 2_042
    assert result.chosen.flags["limit_mm_per_prompt"] == {"image": 2}
    assert "limit_mm_per_prompt" in result.reasons
    assert wish_json(result)["image"] == {"embeddings": 2_040, "prompt_tokens": 2_042}


def test_a_limit_of_images_that_is_there_already_is_not_repeated() -> None:
    result = granted("1 x 1k + 2 images of 1080p", 1_000, images_per_prompt=2)
    assert "limit_mm_per_prompt" not in result.chosen.flags


def test_images_whose_tokens_are_not_known_are_refused() -> None:
    with pytest.raises(PlanError, match="the tokens of an image are not known; give them"):
        grant(parse_wish("1 x 1k + 2 images"), planner(100), [], image=None)


@settings(max_examples=50)
@given(st.integers(1, 50), st.integers(1, 3_000), st.integers(2, 2_000))
def test_what_is_offered_fits_and_nothing_larger_does(conversations: int, length: int, blocks: int) -> None:
    """One conversation more, or one token more, would not fit: the nearest is the nearest."""
    result = grant(Wish(conversations=conversations, tokens=length), planner(blocks), [], image=None)
    plan = planner(blocks)

    def fits(count: int, tokens: int) -> bool:
        pool = plan({"max_model_len": tokens, "max_num_seqs": count})
        return pool.fits and fitting_conversations(pool) >= count

    assert result.fits is fits(conversations, length)
    for option in result.nearest:
        assert fits(option.conversations, option.length)
        larger = (option.conversations + 1, length) if option.length == length else (conversations, option.length + 1)
        assert not fits(*larger)


def test_a_conversation_is_not_shortened_to_less_than_its_images() -> None:
    """Two images of 2,042 tokens are left out only with the conversation."""
    nearest = granted("2 x 1k + 2 images of 1080p", 400, kv_cache_dtype="fp8").nearest
    assert [(option.conversations, option.length) for option in nearest] == [(1, 1_024 + 2 * 2_042)]
    assert all(option.flags["limit_mm_per_prompt"] == {"image": 2} for option in nearest)
