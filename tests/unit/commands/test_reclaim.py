"""What `reclaim` asks for, and what came of it as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.commands.reclaim import Reclaimed, known_remedies, reclaim_text, succeeded, wanted
from highwater.readings.rank import Components, RankReading
from highwater.readings.remedy import RemedyResult
from highwater.relief.remedies import REMEDIES
from tests.fakes.incident import reading

GIB = 2**30


def rank(used: int, cache: int, **key) -> RankReading:
    return reading(0, used=used, components=Components(encoder_cache_bytes=cache), **key)


DONE = Reclaimed(
    RemedyResult(
        remedy="reset_encoder_cache",
        outcome="done",
        seconds=0.34,
        quiesced_by="gate",
        held_seconds=0.2,
        credited_bytes=3 * GIB,
        freed_bytes=2 * GIB,
    ),
    (rank(9 * GIB, 3 * GIB),),
    (rank(6 * GIB, 0),),
)
REFUSED = Reclaimed(RemedyResult(remedy="release", outcome="refused", reason="it sleeps"))


def ended(outcome: str, reason: str | None = None) -> Reclaimed:
    return DONE._replace(result=replace(DONE.result, outcome=outcome, reason=reason))


def test_the_remedies_are_those_that_there_are():
    """For shell completion."""
    assert known_remedies() == sorted(remedy.name for remedy in REMEDIES)


def test_remedies_go_out_in_their_order():
    """With dashes too; none means that the sidecar chooses."""
    assert wanted(["release", "reset-mm-cache"], None) == ["release", "reset_mm_cache"]
    assert wanted([], None) == []


def test_a_size_is_for_the_trim():
    """Alone, or among others."""
    trim = {"remedy": "trim_encoder_cache", "free_bytes": GIB}
    assert wanted([], GIB) == [trim]
    assert wanted(["release", "trim_encoder_cache"], GIB) == ["release", trim]


def test_a_size_without_a_trim_is_a_mistake():
    """Instead of being left out."""
    with pytest.raises(ValueError, match="trim_encoder_cache is not among"):
        wanted(["release"], GIB)


def test_what_was_freed_is_told_by_rank_and_component():
    """With what is in use now; components of which nothing came are left out."""
    shown = reclaim_text([DONE], dry_run=False)
    row = shown.splitlines()[2].split()
    assert row == ["reset_encoder_cache", "done", "gate", "3.00", "GiB", "2.00", "GiB", "0.34", "0.20", "s"]
    assert shown.splitlines()[-3].split() == ["encoder", "cache", "3.00", "GiB"]
    assert shown.splitlines()[-1].split() == ["used", "now", "6.00", "GiB"]
    assert "other tensors" not in shown


def test_ranks_of_several_engines_are_told_apart():
    """By the engine's number."""
    several = Reclaimed(DONE.result, (rank(9, 3), rank(9, 3, dp_rank=1)), (rank(6, 0), rank(6, 0, dp_rank=1)))
    assert "rank 1.0" in reclaim_text([several], dry_run=False)


def test_a_refusal_says_why():
    """And nothing of what was not freed."""
    shown = reclaim_text([REFUSED], dry_run=False)
    assert "release: it sleeps" in shown
    assert "used now" not in shown


def test_a_reason_of_several_remedies_is_said_once():
    """With the names of all that it holds for."""
    other = REFUSED._replace(result=replace(REFUSED.result, remedy="reset_mm_cache"))
    shown = reclaim_text([REFUSED, other], dry_run=False)
    assert "release, reset_mm_cache: it sleeps" in shown
    assert shown.count("it sleeps") == 1


def test_a_dry_run_tells_no_sizes():
    """There are none."""
    shown = reclaim_text([ended("observed", "dry run")], dry_run=True)
    assert "would be" in shown
    assert "freed" not in shown


@pytest.mark.parametrize(
    ("results", "well"),
    [([DONE], True), ([DONE, REFUSED], False), ([ended("failed")], False), ([], False)],
)
def test_all_must_have_gone_well(results, well):
    """Also nothing at all is no success."""
    assert succeeded(results) == well
    assert reclaim_text(results, dry_run=False)
