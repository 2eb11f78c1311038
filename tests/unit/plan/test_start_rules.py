"""The rules of a start that a running engine's budget follows are those of the page about Ascend."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvplan.generations import ASCEND_SKIPS_ENCODER, ASCEND_TAKES_KV_CACHE_BYTES, Span, requested_bytes

RULES = tomllib.loads((Path(__file__).parents[3] / "docs" / "ascend_rules.toml").read_text(encoding="utf-8"))["rule"]


def holds(rule: dict[str, Any], release: tuple[int, int]) -> bool:
    since, until = (tuple(map(int, rule[end].split("."))) if end in rule else None for end in ("since", "until"))
    assert since is not None
    return release in Span(since, until)


@pytest.mark.parametrize("release", [(0, minor) for minor in range(11, 33)])
def test_the_spans_are_those_of_the_page(release: tuple[int, int]) -> None:
    effects = [rule["effect"] for rule in RULES if holds(rule, release)]
    for words, span in (
        ("Images are not profiled", ASCEND_SKIPS_ENCODER),
        ("`--kv-cache-memory-bytes` is taken", ASCEND_TAKES_KV_CACHE_BYTES),
    ):
        assert any(words in effect for effect in effects) is (release in span), words


@pytest.mark.parametrize(
    ("release", "platform", "expected"),
    [((0, 13), "cuda", 90), ((0, 14), "cuda", 91), ((0, 32), "cuda", 91), ((0, 32), "ascend", 90)],
)
def test_a_share_is_rounded_up_from_0_14_on_but_on_ascend(
    release: tuple[int, int], platform: str, expected: int
) -> None:
    assert requested_bytes(101, 0.9, release, platform) == expected
