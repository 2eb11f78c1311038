"""What vllm-ascend does otherwise, and the KV caches of the Ascend starts that were measured."""

from __future__ import annotations

import pytest

from highwater.plan.ascend import (
    RULES,
    block_size,
    counts_the_whole_card,
    keeps_sliding_as_full,
    kv_cache_memory_bytes_counts,
    profiles_encoder,
    scales_several_groups,
    splits_every_block,
    takes_off_graphs,
)
from highwater.plan.generations import generation_of
from highwater.plan.limits import Limits
from highwater.plan.pool import plan_pool
from highwater.plan.specs import FullAttention
from highwater.units import GIB


@pytest.mark.parametrize(
    ("layers", "available", "blocks", "tokens"),
    [
        # Qwen3-VL-8B on two NPUs: "44.30 GiB", 645,120 tokens; and with all that the profile did not count.
        (36, round(44.30 * GIB), 5040, 645_120),
        (36, round(43.54 * GIB), 4953, 633_984),
        # Qwen3-VL-32B on two NPUs: "Available memory: 21540531712".
        (64, 21_540_531_712, 1283, 164_224),
    ],
)
def test_the_kv_caches_of_the_measured_starts_come_out_to_the_block(
    layers: int, available: int, blocks: int, tokens: int
) -> None:
    """8 KV heads of 128 over two ranks, in 16 bits, 128 tokens a block."""
    size = block_size(None, reuses_blocks=True)
    layer = FullAttention(block_size=size, kv_heads=4, head_size=128, element_bytes=2)
    rank = {f"layers.{number}": layer for number in range(layers)}
    limits = Limits(max_model_len=65536, max_num_batched_tokens=32768, max_num_seqs=8)

    pool = plan_pool([rank, rank], [available, available], limits, generation_of("0.12.0"))

    assert (pool.blocks, pool.tokens) == (blocks, tokens)


@pytest.mark.parametrize(
    ("given", "reuses", "expected"), [(None, False, 128), (64, True, 128), (256, True, 128), (64, False, 64)]
)
def test_a_block_holds_128_tokens_unless_nothing_reuses_blocks(
    given: int | None, *, reuses: bool, expected: int
) -> None:
    """With prefix caching or chunked prefill another size is replaced."""
    assert block_size(given, reuses_blocks=reuses) == expected


@pytest.mark.parametrize("release", [(0, minor) for minor in range(11, 33)])
def test_every_release_has_one_rule_for_each_of_these(release: tuple[int, int]) -> None:
    """A rule that ends has another after it, and the questions agree with the rules."""
    effects = [rule.effect for rule in RULES if rule.holds(release)]

    assert sum("encoder is profiled" in effect or "Images are not profiled" in effect for effect in effects) == 1
    assert sum("Mamba's page is" in effect for effect in effects) == 1
    assert sum(effect.startswith("The KV cache gets") for effect in effects) == 1
    assert any("The encoder is profiled" in effect for effect in effects) is profiles_encoder(release)
    assert any("total * utilization" in effect for effect in effects) is counts_the_whole_card(release)
    assert any("sliding window saves nothing" in effect for effect in effects) is keeps_sliding_as_full(release)
    assert any("`--kv-cache-memory-bytes` is taken" in effect for effect in effects) is kv_cache_memory_bytes_counts(
        release
    )
    assert any("in several groups" in effect for effect in effects) is scales_several_groups(release)
    assert any("An estimate of the ACL graphs" in effect for effect in effects) is takes_off_graphs(release)
    assert any("expandable_segments:True` unless" in effect for effect in effects) is splits_every_block(release)


def test_every_rule_says_where_it_was_read() -> None:
    """The version that was read follows the rule, and the place is a file and a line."""
    for rule in RULES:
        assert rule.sources
        for source in rule.sources:
            major, minor = (int(number) for number in source.version.split(".")[:2])
            assert rule.holds((major, minor)), rule
            assert source.path.endswith(".py")
            assert source.line > 0
