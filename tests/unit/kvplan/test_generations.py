"""The rules of each version: which are known, and which hold where."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvplan import PlanError
from kvplan.generations import (
    ASCEND_SKIPS_ENCODER,
    ASCEND_TAKES_KV_CACHE_BYTES,
    CHANGES,
    NEWEST_KNOWN,
    OLDEST_KNOWN,
    Generation,
    Span,
    generation_of,
    requested_bytes,
)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.11.0", (0, 11, 0)),
        ("0.19", (0, 19, 0)),
        ("v0.20.1", (0, 20, 1)),
        ("0.12.0rc1", (0, 12, 0)),
        ("0.12.0.post2", (0, 12, 0)),
        ("0.18.0+cpu", (0, 18, 0)),
        ("0.19.2rc1.dev8+g4b7f5ea1a", (0, 19, 2)),
    ],
)
def test_a_version_is_read_as_vllm_writes_it(version: str, release: tuple[int, int, int]) -> None:
    assert generation_of(version).release == release


@pytest.mark.parametrize("version", ["", "latest", "0", "0.x", "0.19.0 or so", "0.10.2"])
def test_what_is_no_known_version_is_refused_by_its_key(version: str) -> None:
    with pytest.raises(PlanError, match=r"^vllm_version: "):
        generation_of(version)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.34.0", ("0.34.0", "0.33.0")),
        ("0.11.2", ("older", "the rules of that")),  # it counted states, pages and groups otherwise
        ("0.19.2rc1.dev8+g4b7f5ea1a", ("the rules of 0.19.2",)),
    ],
)
def test_a_version_that_was_not_read_says_whose_rules_it_gets(version: str, said: tuple[str, ...]) -> None:
    assert all(word in (generation_of(version).note or "") for word in said)


def test_a_patch_of_the_newest_version_and_what_is_newer_have_its_rules() -> None:
    newest, newer = generation_of("0.33.1"), generation_of("0.34.0")
    assert newest.note is None
    assert newer.null_block_reserved is newest.null_block_reserved is True


def test_the_changes_are_in_order_and_change_something() -> None:
    """A rule that is set to what it already is would be a mistake in the table."""
    rules = {field.name: field.default for field in fields(Generation)}
    assert [change.since for change in CHANGES] == sorted(change.since for change in CHANGES)
    for change in CHANGES:
        assert OLDEST_KNOWN < change.since <= NEWEST_KNOWN
        assert ":" in change.source
        for name, value in change.rules.items():
            assert rules[name] != value, (change.since, name)
            rules[name] = value


def test_the_printed_tokens_changed_their_meaning_with_0_20_1() -> None:
    """What two logs of one model show: 75,456 tokens on 0.20.0, and concurrency times length after."""
    assert generation_of("0.20.0").tokens_printed == "blocks"
    assert generation_of("0.20.1").tokens_printed == "length"


RULES = tomllib.loads((Path(__file__).parents[3] / "docs" / "ascend_rules.toml").read_text(encoding="utf-8"))["rule"]


def holds(rule: dict[str, Any], release: tuple[int, int]) -> bool:
    since, until = (tuple(map(int, rule[end].split("."))) if end in rule else None for end in ("since", "until"))
    return release in Span(since, until)


@pytest.mark.parametrize("release", [(0, minor) for minor in range(11, 33)])
def test_the_spans_are_those_of_the_page(release: tuple[int, int]) -> None:
    effects = [rule["effect"] for rule in RULES if holds(rule, release)]
    for words, span in (
        ("The encoder is not profiled", ASCEND_SKIPS_ENCODER),
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
