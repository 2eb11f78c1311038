"""What vllm-ascend does otherwise, and the KV caches of the Ascend starts that were measured."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from highwater.plan import ascend
from highwater.plan.ascend import block_size
from highwater.units import GIB
from kvplan.generations import Span, generation_of
from kvplan.limits import Limits
from kvplan.pool import plan_pool
from kvplan.specs import FullAttention


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


RULES = tomllib.loads((Path(__file__).parents[3] / "docs" / "ascend_rules.toml").read_text(encoding="utf-8"))["rule"]


def _holds(rule: dict[str, Any], release: tuple[int, int]) -> bool:
    since, until = (tuple(map(int, rule[end].split("."))) if end in rule else None for end in ("since", "until"))
    assert since is not None
    return release in Span(since, until)


@pytest.mark.parametrize("release", [(0, minor) for minor in range(11, 33)])
def test_every_release_has_one_rule_for_each_of_these(release: tuple[int, int]) -> None:
    """A rule that ends has another after it, and the code's spans agree with the rules of the page."""
    effects = [rule["effect"] for rule in RULES if _holds(rule, release)]

    assert sum("encoder is profiled" in effect or "Images are not profiled" in effect for effect in effects) == 1
    assert sum("Mamba's page is" in effect for effect in effects) == 1
    assert sum(effect.startswith("The KV cache gets") for effect in effects) == 1
    for words, span in (
        ("Images are not profiled", ascend.SKIPS_ENCODER),
        ("total * utilization", ascend.COUNTS_THE_WHOLE_CARD),
        ("sliding window saves nothing", ascend.KEEPS_SLIDING_AS_FULL),
        ("`--kv-cache-memory-bytes` is taken", ascend.TAKES_KV_CACHE_MEMORY_BYTES),
        ("in several groups", ascend.SCALES_SEVERAL_GROUPS),
        ("An estimate of the ACL graphs", ascend.SUBTRACTS_GRAPHS),
        ("expandable_segments:True` unless", ascend.EXPANDABLE_SEGMENTS),
    ):
        assert any(words in effect for effect in effects) is (release in span), words


def test_every_rule_says_where_it_was_read() -> None:
    """The version that was read follows the rule, and the place is a file and a line."""
    for rule in RULES:
        assert rule["sources"]
        for version, path, line, _ in rule["sources"]:
            major, minor = (int(number) for number in version.split(".")[:2])
            assert _holds(rule, (major, minor)), rule
            assert path.endswith(".py")
            assert line > 0
