"""The report as an operator reads it at a terminal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from highwater.act.governor import PolicyStore
from highwater.act.rules import PolicySettings
from highwater.diagnose.verdict import JudgedReport
from highwater.http.text.control import policy_text
from highwater.http.text.report import report_text as text_of
from highwater.model.engine import EngineStatus, MissingRank, Progress, StartedRank, StartFailure
from highwater.model.growth import Growth
from highwater.model.policy import PolicyStatus
from highwater.model.rank import Components, Device, EncoderCacheTotals, Note, StartPhase, device_title
from highwater.model.report import DoorFigure, DoorState, Report
from highwater.model.units import gib, gib_text, mib, table
from highwater.process.state_file import StateFile
from tests.fakes.engine import FakeEngine
from tests.unit.terminal.reports import DEVICE, HELD, policy, ranks, report, short_policy

STATUS = EngineStatus(
    url="http://engine:8000",
    state="ready",
    version="0.32.0",
    model="Qwen/Qwen3-VL-32B-Instruct",
    requests_running=3,
    kv_cache_usage_ratio=0.41,
)


def report_text(told: Report) -> str:
    """A report's text, judged as a sidecar does."""
    return text_of(JudgedReport.of(told))


@pytest.fixture
def story() -> Report:
    fake = FakeEngine()
    fake.serve_images()
    ranks = fake.readings()
    return Report(
        taken_at=1.0,
        age_seconds=0.4,
        stale=False,
        engine=STATUS,
        ranks_expected=2,
        ranks_reported=2,
        ranks=ranks,
        encoder_cache=EncoderCacheTotals.of(ranks),
        growth=Growth(since_ready_bytes=2 * 3782 * 1024**2, bytes_per_second=-(1024.0**2)),
        policy=PolicyStatus(level="short", mode="observe", summary="short by 100 MiB on rank 0"),
    )


MIB = 1024**2


def phase(name, used_mib, seconds=1.0, **more):
    """A phase of a start on an accelerator."""
    return StartPhase(
        name=name, at=0.0, seconds=seconds, used_bytes=None if used_mib is None else used_mib * MIB, **more
    )


def test_a_start_is_shown_phase_by_phase(story):
    first, second = story.ranks
    first = replace(first, start=(phase("before", 3400), phase("weights", 33_400, 41.26), phase("warm_up", 57_766)))
    second = replace(second, start=(phase("before", 3200), phase("weights", 33_200, 39.0)))
    text = report_text(replace(story, ranks=(first, second)))
    assert (
        "start: GiB after        0      1     s\n"
        "------------------  -----  -----  ----\n"
        "before               3.32   3.12   1.0\n"
        "weights             32.62  32.42  41.3\n"
        "warm_up             56.41      -   1.0\n"
    ) in text


def test_a_start_that_failed_is_shown_with_its_reason():
    """Also where no rank is left. On CPU nothing is on a device: there it is the process's memory."""
    phases = (phase("init", None, rss_bytes=400 * MIB), phase("weights", None, error="RuntimeError: no room"))
    rank = StartedRank(rank=0, dp_rank=0, host="a", pid=7, status="dead", phases=phases)
    failure = StartFailure(at=1.0, recorder_instance="x", summary="the engine's start failed: why", ranks=(rank,))
    text = report_text(replace(report(), ranks=(), start_failure=failure))
    assert (
        "the engine's start failed: why\n"
        "start: GiB after         0    s\n"
        "------------------  ------  ---\n"
        "init                  0.39  1.0\n"
        "weights             failed  1.0\n"
    ) in text


def test_the_story_at_a_terminal(story):
    assert report_text(story) == (
        "SHORT: Rank 0 has 3.89 GiB free of 60.96 GiB, and Highwater only watches.\n"
        "next: Nothing is given back by itself: the policy has no rules.\n"
        "step: `highwater reclaim` gives memory back now; `highwater policy mode act` lets Highwater do so by itself.\n"
        "vLLM 0.32.0 Qwen/Qwen3-VL-32B-Instruct at http://engine:8000: ready, 2 of 2 ranks, read 0.4 s ago\n"
        "GiB, by rank             0      1\n"
        "-------------------  -----  -----\n"
        "device npu               0      1\n"
        "total                60.96  60.96\n"
        "used                 57.06  57.06\n"
        "- weights            29.30  29.30\n"
        "- KV cache           20.06  20.06\n"
        "- encoder cache       3.69   3.69\n"
        "- other tensors       0.25   0.25\n"
        "- allocator reserve   2.61   2.61\n"
        "- non-torch           1.15   1.15\n"
        "releasable            2.61   2.61\n"
        "free                  3.89   3.89\n"
        "used ratio           0.936  0.936\n"
        "encoder cache: 31 entries, 7.39 GiB on devices, capacity 16,384 embeddings, oldest 0.0 s\n"
        "growth: +7.39 GiB since ready, -0.001 GiB/s now (2 ranks together)\n"
        "requests: 3 running, 0 waiting, KV cache 41.0 % used\n"
        "policy: short (observe): short by 100 MiB on rank 0\n"
    )


def test_the_rules_say_where_they_act_and_what_could_be_given_back():
    told = report(
        policy=short_policy(can_release=100 * 1024**2),
        progress=Progress(verdict="progressing", since_seconds=1.0, ranks=(), summary="steps begin and end"),
        growth=Growth(
            since_ready_bytes=0, bytes_per_second=2e6, seconds_to_full=8_100.0, component="other_tensors_bytes"
        ),
        ranks_missing=(MissingRank(dp_rank=1, pp_rank=0, tp_rank=0, status="dead"),),
    )
    text = report_text(told)
    assert "missing: dp 1 pp 0 tp 0 (dead)\n" in text
    assert "\nacts at, free" in text
    assert ", full in 2 h 15 min (other tensors), +0.002 GiB/s now (2 ranks together)\n" in text
    assert "progress: steps begin and end\n" in text
    assert "rule device: short, free 1.43 GiB (acts below 1.52 GiB, stops at 3.05 GiB)" in text
    assert text.endswith("could give there: release 0.098 GiB\n")


def test_a_rule_that_is_held_says_why():
    text = report_text(report(policy=policy(DEVICE, replace(HELD, name="own"))))
    assert next(line for line in text.splitlines() if line.startswith("rule own")).endswith(f"; {HELD.reason}")


@pytest.mark.parametrize(
    ("phases", "word"), [(("held",), "cannot act"), (("held", "calm"), "fine"), (("calm",), "fine")]
)
def test_where_no_rule_can_act_the_policy_is_not_said_to_be_fine(phases, word):
    """Memory was not short when the engine hung: the level stays, and the line beside the reason says what is so."""
    rules = tuple(replace(DEVICE, phase=phase) for phase in phases)
    held = replace(policy(*rules), summary="the engine is stuck: nothing is run until it answers soon again")
    assert f"\npolicy: {word} (act): the engine is stuck: " in report_text(report(policy=held))
    store = PolicyStore(StateFile(None), PolicySettings())
    assert f"\n{word}: the engine is stuck: " in policy_text(held, (), store, ())


def test_before_the_first_reading_it_says_what_is_missing():
    status = EngineStatus(url="http://engine:8000", state="starting", hint="nothing answers yet")
    assert report_text(Report(engine=status)) == (
        "UNKNOWN: Nothing answers yet; whether an engine starts is not known.\n"
        "step: Look whether vLLM runs, and whether `engine_url` names its address; a start shows once vLLM has "
        "imported its packages, within a minute or so, where it writes into `recorder_dir` (HIGHWATER_RECORDER_DIR).\n"
        "vLLM (version unknown) at http://engine:8000: starting, 0 of ? ranks, never read (STALE)\n"
    )


def test_what_is_not_known_is_a_dash(story):
    ranks = tuple(replace(r, used_ratio=None, components=Components(), free_bytes=None) for r in story.ranks)
    text = report_text(replace(story, ranks=ranks))
    assert len(re.findall(r" - +-$", text, re.MULTILINE)) == 8
    assert "0.936" not in text


def test_notes_and_problems_are_shown_in_full(story):
    noted = replace(story.ranks[1], notes=(Note(name="torch", reason="no memory_stats"),))
    policy = PolicyStatus(level="urgent", mode="act", summary="short by 900 MiB on rank 0; nothing here to give back")
    text = report_text(replace(story, ranks=(noted,), policy=policy, stale=True))
    assert "note: rank 1: torch: no memory_stats\n" in text
    assert "policy: very short (act): short by 900 MiB on rank 0; nothing here to give back\n" in text
    assert "(STALE)" in text


def test_data_parallel_ranks_have_different_titles(story):
    ranks = (story.ranks[0], replace(story.ranks[0], dp_rank=1), replace(story.ranks[0], rank=None))
    (header,) = [line for line in report_text(replace(story, ranks=ranks)).splitlines() if line.startswith("GiB")]
    assert header.split() == ["GiB,", "by", "rank", "0", "1.0", "?"]


def test_eight_ranks_fit_a_terminal():
    told = report(ranks=ranks(8), ranks_expected=8, ranks_reported=8)
    table = report_text(told).partition("GiB, by rank")[2].partition("\nencoder cache:")[0]
    assert max(map(len, f"GiB, by rank{table}".splitlines())) <= 80


@pytest.mark.parametrize(
    ("device", "title"),
    [
        (Device(type="npu", index=3), "npu:3"),
        (Device(type="cuda", index=0), "cuda:0"),
        (Device(type="cpu"), "cpu"),
        (Device(), "unknown"),
    ],
)
def test_a_device_is_named_as_torch_does(device, title):
    assert device_title(device) == title


@pytest.mark.parametrize(
    ("size", "signed", "shown"),
    [
        (None, False, "-"),
        (0, False, "0.0"),
        (3_965_714_432, False, "3,782.0"),
        (-(1024**2), False, "-1.0"),
        (-100, False, "0.0"),
        (1024**2, True, "+1.0"),
    ],
)
def test_bytes_are_shown_as_mib(size, signed, shown):
    assert mib(size, signed=signed) == shown


@pytest.mark.parametrize(
    ("size", "signed", "column", "words"),
    [
        (None, False, "-", "-"),
        (0, True, "+0.00", "0 GiB"),
        (3_965_714_432, False, "3.69", "3.69 GiB"),
        (-(2**28), True, "-0.25", "-0.25 GiB"),
        (2**28, True, "+0.25", "+0.25 GiB"),
    ],
)
def test_bytes_are_shown_as_gib(size, signed, column, words):
    assert (gib(size, signed=signed), gib_text(size, signed=signed)) == (column, words)


def test_a_table_without_rows_is_its_head():
    assert table(["a", "b"], []).split() == ["a", "b", "---", "---"]


def second_engines(dp_rank: int | None, rank: int | None) -> Report:
    """A report of two engines' ranks, the second one with a note; and that rank's start failed before."""
    first, second = report().ranks
    start = (phase("init", 400),)
    noted = replace(
        second, dp_rank=dp_rank, rank=rank, start=start, notes=(Note(name="total_bytes", reason="not supported"),)
    )
    failed = StartedRank(rank=rank, dp_rank=dp_rank, host="a", pid=7, status="dead", phases=start)
    failure = StartFailure(at=1.0, recorder_instance="x", summary="the engine's start failed: why", ranks=(failed,))
    return replace(report(), ranks=(replace(first, rank=0, start=start), noted), start_failure=failure)


@pytest.mark.parametrize(
    ("dp_rank", "rank", "note", "column", "failed"),
    [
        (0, 1, "note: rank 1: ", "0 1", "1"),
        (1, 0, "note: rank 1.0: ", "0 1.0", "1.0"),
        (None, None, "note: rank ?: ", "0 ?", "?"),
    ],
)
def test_two_engines_ranks_are_told_apart_everywhere(dp_rank, rank, note, column, failed):
    """Each engine numbers its ranks from 0; where the number is not known, nobody reads "rank None"."""
    text = report_text(second_engines(dp_rank, rank))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"{note}total_bytes: not supported" in text
    assert f"GiB, by rank {column}" in lines
    assert f"start: GiB after {column} s" in lines
    assert f"start: GiB after {failed} s" in lines


def test_relief_that_keeps_up_is_said_instead_of_a_forecast():
    growth = Growth(since_ready_bytes=0, bytes_per_second=4e8, refill_seconds=16.0)
    text = report_text(replace(report(), growth=growth))
    assert ", fills each 16 s, given back each time, +0.373 GiB/s now (2 ranks together)\n" in text


def test_images_at_the_door_are_said_once_there_were_some():
    one, two = DoorFigure(taken=4, limit=1024), DoorFigure(taken=2**28, limit=2**30)
    quiet = DoorState(mode="on", why="", requests_waiting=0, decoded_bytes=two, encoder_tokens=one, items=one)
    assert "images" not in report_text(report(door=quiet))
    busy = replace(quiet, requests_total=9, requests_waiting=3, refused_total=2, held_for="a rank is very short")
    assert (
        "images: door on: 4 in flight, 0.25 GiB of 1.00 GiB once decoded; 3 requests waiting for room; "
        "nobody is let in: a rank is very short; 2 refused"
    ) in report_text(report(door=busy))
    assert "2 refused if the door were on" in report_text(report(door=replace(busy, mode="observe")))
