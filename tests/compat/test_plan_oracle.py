"""The planned KV pool beside vLLM's own functions of every minor version that is known."""

from __future__ import annotations

from itertools import pairwise

import pytest

from highwater.terminal.demo.engine import DEFAULT_VERSION
from kvplan.generations import CHANGES, NEWEST_KNOWN, OLDEST_KNOWN
from tests.oracles import BORROWED, disagreements

from .conftest import VERSIONS

MUCH_ASKED = ("0.12.0", "0.18.0", "0.23.0", "0.27.0", DEFAULT_VERSION)
OTHERS = sorted(set(BORROWED) - set(MUCH_ASKED))


@pytest.mark.parametrize("asked", MUCH_ASKED)
def test_a_thousand_random_caches_are_planned_as_vllm_makes_them(asked: str) -> None:
    assert disagreements(asked, count=1000, seed=1) == []


@pytest.mark.parametrize("asked", OTHERS)
def test_every_other_version_is_planned_as_it_is(asked: str) -> None:
    assert disagreements(asked, count=300, seed=2) == []


def test_the_rules_between_any_two_changes_are_asked() -> None:
    """A version that has one change and not yet the next: without it the change would be tried by nothing."""
    asked = [tuple(map(int, version.split("."))) for version in (*MUCH_ASKED, *OTHERS, *VERSIONS)]
    begins = sorted({OLDEST_KNOWN, *(change.since for change in CHANGES)})
    spans = pairwise([*begins, (NEWEST_KNOWN[0] + 1,)])
    assert [first for first, after in spans if not any(first <= release < after for release in asked)] == []
