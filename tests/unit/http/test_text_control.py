"""What control calls did, as the sidecar's own text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from highwater.act.relief import RemedyOutcome
from highwater.http.text.control import (
    marked_text,
    reclaim_text,
    restored_text,
    snapshots_text,
    stacks_text,
    taken_text,
)
from highwater.model.rank import Components, RankReading
from highwater.model.remedies import TRAITS, RemedyResult
from highwater.watch.history import Mark
from highwater.watch.snapshots import RankSnapshot, RankStacks, Taken
from tests.fakes.incident import reading

GIB = 2**30


def rank(used: int, cache: int, **key) -> RankReading:
    return reading(0, used=used, components=Components(encoder_cache_bytes=cache), **key)


DONE = RemedyOutcome(
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
REFUSED = RemedyOutcome(RemedyResult(remedy="release", outcome="refused", reason="it sleeps"), (), ())


def ended(outcome: str, reason: str | None = None) -> RemedyOutcome:
    return replace(DONE, result=replace(DONE.result, outcome=outcome, reason=reason))


def test_what_was_freed_is_told_by_rank_and_component():
    shown = reclaim_text([DONE], dry_run=False)
    row = shown.splitlines()[2].split()
    assert row == ["reset_encoder_cache", "done", "gate", "3.00", "GiB", "2.00", "GiB", "0.34", "0.20", "s"]
    assert shown.splitlines()[-3].split() == ["encoder", "cache", "3.00", "GiB"]
    assert shown.splitlines()[-1].split() == ["used", "now", "6.00", "GiB"]
    assert "other tensors" not in shown


def test_what_gave_nothing_back_says_what_it_frees():
    frees = TRAITS["reset_mm_cache"].frees
    other = replace(DONE.result, remedy="reset_mm_cache", credited_bytes=0, frees=frees, does_not_free="device memory")
    shown = reclaim_text([DONE, replace(DONE, result=other)], dry_run=False)
    said = "processed images in the API server's and EngineCore's host memory, not device memory"
    assert [line for line in shown.splitlines() if "frees" in line] == [f"reset_mm_cache: frees {said}"]


def test_ranks_of_several_engines_are_told_apart():
    several = RemedyOutcome(DONE.result, (rank(9, 3), rank(9, 3, dp_rank=1)), (rank(6, 0), rank(6, 0, dp_rank=1)))
    assert "rank 1.0" in reclaim_text([several], dry_run=False)


def test_a_refusal_says_why():
    shown = reclaim_text([REFUSED], dry_run=False)
    assert "release: it sleeps" in shown
    assert "used now" not in shown


def test_a_reason_of_several_remedies_is_said_once():
    other = replace(REFUSED, result=replace(REFUSED.result, remedy="reset_mm_cache"))
    shown = reclaim_text([REFUSED, other], dry_run=False)
    assert "release, reset_mm_cache: it sleeps" in shown
    assert shown.count("it sleeps") == 1


def test_a_dry_run_tells_what_could_come_back():
    could = replace(ended("observed", "dry run").result, can_give_bytes=3 * GIB)
    shown = reclaim_text([replace(DONE, result=could)], dry_run=True).splitlines()
    assert shown[0].split() == ["remedy", "would", "be", "could", "give", "back"]
    assert shown[2].split() == ["reset_encoder_cache", "done", "3.00", "GiB"]


def test_nothing_done_is_said():
    assert reclaim_text([], dry_run=False) == "nothing was done\n"


def test_a_mark_names_the_command_that_compares():
    marked = Mark("before bench", 0.0, (rank(1, 1),))
    assert marked_text(marked).endswith("highwater status --since 'before bench'\n")
    assert marked_text(replace(marked, ranks=())).endswith("so there is nothing to compare with later\n")


def test_nothing_to_bring_back_is_said():
    nothing = {"rank": 0, "restored_entries": 0, "restored_bytes": 0, "left_entries": 0}
    assert restored_text([]) == restored_text([nothing]) == "nothing was on the host\n"
    assert "nothing" not in restored_text([nothing | {"left_entries": 5}]), "it could not be brought back"


@pytest.mark.parametrize(("name", "head"), [("a", "snapshot a is written:"), (None, "would write, now:")])
def test_a_snapshot_names_its_files(name, head):
    path = name and "/run/a.pickle"
    one = RankSnapshot(rank=0, dp_rank=None, host=None, path=path, bytes=4 * 2**20, segments=9, blocks=9,
                       trace_entries=0, free_bytes=None, elapsed_ms=20.0)  # fmt: skip
    lines = taken_text(Taken(name, (one,))).splitlines()
    assert (lines[0], lines[-1].split()) == (head, ["0", "4.0", "MiB", "0.02", "s", path or "-"])


@pytest.mark.parametrize(
    ("now", "before", "words"),
    [(True, False, "recorded for 10 min"), (False, True, "not recorded any more"), (False, False, "not recorded now")],
)
def test_stacks_are_recorded_for_so_long(now, before, words):
    one = RankStacks(rank=0, dp_rank=None, recording=now, was_recording=before, seconds_left=600.0, entries=1)
    assert stacks_text([one]) == f"rank 0: allocation stacks are {words}\n"


@pytest.mark.parametrize(
    ("files", "folder", "problem", "last"),
    [
        ([("/memory/snapshots/a", 2**20)], Path("/run"), None, "1.0 MiB  /memory/snapshots/a"),
        ([], Path("/run"), None, "there are no snapshots in /run"),
        ([], None, None, "recorder_dir is not set"),
        ([], Path("/run"), "it cannot be read", "it cannot be read"),
    ],
)
def test_snapshots_are_listed_by_the_path_that_fetches_them(files, folder, problem, last):
    assert snapshots_text(files, folder, problem).splitlines()[-1] == last
