"""The rules of each version: which are known, and which hold where."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvplan.errors import PlanError
from kvplan.generations import CHANGES, NEWEST_KNOWN, OLDEST_KNOWN, Generation, generation_of


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


def test_a_newer_version_gets_the_newest_rules_and_a_note() -> None:
    newest, newer = generation_of("0.33.1"), generation_of("0.34.0")
    assert newest.note is None
    assert newer.note is not None
    assert "0.34.0" in newer.note
    assert "0.33.0" in newer.note
    assert newer.null_block_reserved is newest.null_block_reserved is True


def test_a_version_before_0_12_gets_the_oldest_rules_that_were_read_and_a_note() -> None:
    """0.11 counted states, pages and groups otherwise; engines of it are met, and none is tested."""
    assert "the rules of that" in (generation_of("0.11.2").note or "")


def test_a_development_version_says_whose_rules_it_gets() -> None:
    assert "0.19.2" in (generation_of("0.19.2rc1.dev8+g4b7f5ea1a").note or "")


def test_the_changes_are_in_order_and_change_something() -> None:
    """A rule that is set to what it already is would be a mistake in the table."""
    rules = {field.name: field.default for field in fields(Generation)}
    assert [change.since for change in CHANGES] == sorted(change.since for change in CHANGES)
    for change in CHANGES:
        assert OLDEST_KNOWN < change.since <= NEWEST_KNOWN
        for name, value in change.rules.items():
            assert rules[name] != value, (change.since, name)
            rules[name] = value


def test_every_change_names_its_source() -> None:
    assert all(":" in change.source for change in CHANGES)


def test_the_printed_tokens_changed_their_meaning_with_0_20_1() -> None:
    """What two logs of one model show: 75,456 tokens on 0.20.0, and concurrency times length after."""
    assert generation_of("0.20.0").tokens_printed == "blocks"
    assert generation_of("0.20.1").tokens_printed == "length"
