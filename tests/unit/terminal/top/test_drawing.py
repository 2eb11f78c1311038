"""What stands on the screen, at any size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.diagnose.verdict import Deed, Verdict
from highwater.model.engine import MissingRank, Progress
from highwater.model.growth import Growth
from highwater.terminal.client import report_of
from highwater.terminal.top.drawing import Drawing, Look
from highwater.terminal.top.feed import View
from tests.fakes.engine import MIB
from tests.unit.terminal.reports import (
    DEVICE,
    HELD,
    NOW,
    as_json,
    event,
    is_golden,
    policy,
    pressure,
    ranks,
    report,
    short_policy,
)
from tests.unit.terminal.top import screens

ALL = Look()


def view(*, minutes: int = 2, **changed) -> View:
    """A view with a past of so many minutes in which the encoder cache filled, and a reset."""
    images = changed.pop("images", 31)
    made = View("http://127.0.0.1:8001", report(), 100.0)
    seconds = minutes * 60
    for second in range(seconds + 1):
        count = images * second // max(seconds, 1)
        made = made.with_report(report(taken_at=NOW - seconds + second, ranks=ranks(images=count)), 100.0)
    made = made.with_history({}, [event("reset_encoder_cache done, gave back 3,782.0 MiB in 0.40 s", at=NOW - 30)])
    return made.with_report(replace(made.report, **changed), 100.0)


def drawn(made: View, width: int = 100, height: int | None = None, *, now: float = 100.0, look: Look = ALL) -> str:
    """The screen in letters, without what only aligns columns."""
    return "\n".join(" ".join(line.split()) for line in screens.drawn(Drawing(made, now, look, height), width, height))


FULL = view()


def test_the_storys_numbers_are_read_at_a_glance():
    shown = drawn(FULL)
    for words in (
        "vLLM 0.32.0 Qwen/Qwen3-VL-32B-Instruct",
        "ranks 2 of 2",
        "acts at 1.52 GiB free",
        "93.6 % 57.06 GiB of 60.96 GiB",
        "encoder cache 3.69 GiB",
        "+3.69 GiB",
        "3 running, 1 waiting, KV cache 41.0 % used",
        "31 entries, 7.39 GiB on devices",
        "policy: fine, acts",
        "1 action in the last hour",
        "fine device: free 7.59 GiB acts below 1.52 GiB, stops at 3.05 GiB",
        "reset_encoder_cache done, gave back 3,782.0 MiB in 0.40 s",
    ):
        assert words in shown, words


def test_each_rank_has_a_bar_with_its_parts_and_the_mark():
    (bar,) = [line for line in drawn(FULL, 300).splitlines() if line.startswith("0-1 x2 ")]
    cells = bar.split()[2]
    assert [letter for letter in "WKEOCN|" if letter not in cells] == []
    assert cells.index("W") < cells.index("K") < cells.index("E") < cells.index("N") <= len(cells)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 300])
@pytest.mark.parametrize("height", [1, 5, 10, 20, 24, 40, 100])
def test_it_fits_whatever_the_terminal(width, height):
    """No line longer, no line more; `drawn` checks."""
    assert drawn(FULL, width, height)
    crowd = replace(FULL.report, ranks=ranks(16, images=31), ranks_expected=16)
    assert drawn(replace(FULL, report=crowd).without_sidecar("gone " * 40, 100.0), width, height)


def test_where_there_is_room_each_rank_tells_what_is_free():
    assert "57.06 GiB of 60.96 GiB 3.89 GiB free" in drawn(FULL, 120)


def test_sixteen_ranks_on_a_small_terminal_are_the_worst_off():
    crowd = [ranks(16, images=number)[number] for number in range(16)]
    crowd[11] = ranks(16, images=31)[11]
    shown = drawn(replace(FULL, report=replace(FULL.report, ranks=tuple(crowd), ranks_expected=16)), 80, 24)
    assert "11 npu:11 " in shown
    assert "more, better off" in shown
    assert "rank 11 npu:11, the worst off" in shown


def test_all_ranks_are_there_where_there_is_room():
    crowd = tuple(ranks(16, images=2 * number)[number] for number in range(16))
    shown = drawn(replace(FULL, report=replace(FULL.report, ranks=crowd, ranks_expected=16)))
    assert all(f"{number} npu:{number} " in shown for number in range(16))
    by_number = replace(FULL, report=replace(FULL.report, ranks=crowd, ranks_expected=16))
    lines = drawn(by_number, 120, 50, look=Look(by_number=True)).splitlines()
    assert [line.split()[0] for line in lines if " npu:" in line][:16] == [str(number) for number in range(16)]


def test_equal_ranks_are_one_row():
    crowd = list(ranks(8))
    crowd[3] = ranks(8, images=31)[3]
    shown = drawn(replace(FULL, report=replace(FULL.report, ranks=tuple(crowd), ranks_expected=8)), 120)
    rows = [line.partition(" WW")[0] for line in shown.splitlines() if line.endswith("GiB free") and "WWW" in line]
    assert rows == ["3 npu:3", "0-1 x2", "2 4-7 x5"]  # the first two have a rule's line, the others none


# --- the whole screen ---


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_whole_screen_is_the_golden_one(width, height):
    verdict = Verdict(
        state="short",
        exit_status=1,
        reason="growing",
        sentence="Rank 1 has 3.89 GiB free of 60.96 GiB and loses 58 MiB/s.",
        grew="encoder cache +3.69 GiB in 14 min",
        next="Highwater gives back at 1.52 GiB free.",
        do=Deed(text="Reclaim 14.8 GiB"),
        step="See in `highwater status --why` which part grows; `highwater reclaim` gives back what nobody uses.",
    )
    made = view(minutes=14)
    told = replace(made, report=replace(made.report, verdict=verdict))
    shown = screens.drawn(Drawing(told, 100.0, ALL, height), width, height)
    assert len(shown) == height
    assert is_golden(f"top_{width}x{height}", "\n".join(line.rstrip() for line in shown))
    assert shown[-1].startswith("q quit  ? help  1 all")
    assert sum(not line.strip() for line in shown) <= 1


@pytest.mark.parametrize(
    ("key", "there", "not_there"),
    [
        ("2", "ranks 2 of 2", "policy: fine"),
        ("3", "the worst off", "ranks 2 of 2"),
        ("4", "policy: fine", "ranks 2 of 2"),
        ("5", "reset_encoder_cache done", "ranks 2 of 2"),
        ("?", "the worst off first, equal ones in one row", "ranks 2 of 2"),
    ],
)
def test_a_key_shows_one_view_and_the_first_shows_all(key, there, not_there):
    look = Look().after(key)
    shown = drawn(FULL, 100, 24, look=look)
    assert (there in shown, not_there in shown, "FINE: " in shown) == (True, False, True)
    assert look.after("1") == Look()
    assert Look().after("?").after("?") == Look()
    assert look.after("x") == look


def test_a_long_verdict_is_wrapped_and_loses_nothing():
    words = " ".join(["word"] * 18)
    told = Verdict(
        state="short", exit_status=1, reason="growing", sentence=f"{words} one.", grew=f"{words} two.",
        next=f"{words} three.", do=Deed(text="Reclaim 14.8 GiB"), step=f"{words} four.",
    )  # fmt: skip
    shown = drawn(view(minutes=0, verdict=told), 80, 24)
    assert [end for end in ("one.", "two.", "three.", "do: Reclaim 14.8 GiB", "four.") if end not in shown] == []
    assert "do: " not in drawn(view(minutes=0, verdict=replace(told, state="fine", exit_status=0)), 80, 24)


def test_sizes_are_in_gib_and_a_policy_that_cannot_act_does_not_act():
    made = view(minutes=0, policy=policy(HELD, level="held"), ranks=ranks())
    shown = drawn(made, 120)
    assert [unit for unit in ("MiB", " B ") if unit in shown.partition("events")[0]] == []
    assert "policy: cannot act -" in shown


def test_rows_have_one_scale():
    """What moves by a byte is flat beside what moves by gigabytes."""
    lines = [line for line in drawn(FULL, 120).splitlines() if line.startswith(("E encoder", "N non-torch"))]
    assert [line.split()[-1] for line in lines] == ["GiB", "="]


def test_ranks_of_several_engines_and_hosts_are_told_apart():
    first, _ = ranks()
    both = (replace(first, dp_rank=0), replace(first, dp_rank=1, host="node-b"))
    shown = drawn(replace(FULL, report=replace(FULL.report, ranks=both)))
    assert "0 npu:0 node-a" in shown
    assert "1.0 npu:0 node-b" in shown


def test_a_missing_rank_is_named():
    gone = MissingRank(dp_rank=1, pp_rank=0, tp_rank=0, status="dead", used_bytes=60_572_041_216)
    shown = drawn(view(minutes=0, ranks_missing=(gone,), ranks_expected=3))
    assert "ranks 2 of 3" in shown
    assert "dp 1 pp 0 tp 0 is missing: dead, had 56.41 GiB in use" in shown


def test_a_sidecar_that_has_gone_is_said_with_the_age():
    shown = drawn(FULL.without_sidecar("no sidecar answers at http://127.0.0.1:8001", 103.0), now=110.0)
    assert "NO SIDECAR, was ready" in shown
    assert "no news for 7.0 s, trying again: no sidecar answers" in shown
    assert "read 10 s ago" in shown
    assert "57.06 GiB" in shown


def test_an_engine_that_is_not_there_leaves_a_screen_all_the_same():
    shown = drawn(View("http://s", report(
        state="starting", hint="nothing answers yet at http://127.0.0.1:8000", version=None, ranks=(), ranks_reported=0,
        ranks_expected=None, taken_at=None, age_seconds=None, stale=True, encoder_cache=None, growth=Growth(),
        policy=None,
    ), 100.0), 80, 24)  # fmt: skip
    assert "starting" in shown
    assert "Nothing answers yet" in shown
    assert "never read STALE" in shown
    assert "no reading of any worker yet" in shown
    assert "None" not in shown


def test_a_rank_of_which_little_is_known_has_a_line():
    bare = replace(ranks()[0], total_bytes=None, used_bytes=None, used_ratio=None)
    shown = drawn(view(minutes=0, ranks=(bare,)), 80, 24)
    assert "- of -" in shown
    assert "None" not in shown


def test_growth_tells_when_the_memory_is_full():
    rule = replace(DEVICE, ranks=(pressure(0, seconds_to_high_water=6_480.0), pressure(1)))
    growth = Growth(since_ready_bytes=3_965_517_824, bytes_per_second=2e6, seconds_to_full=8_100.0)
    shown = drawn(view(minutes=0, growth=growth, policy=policy(rule)))
    assert "+3.69 GiB since ready, high water in 1 h 48 min, full in 2 h 15 min, +0.002 GiB/s" in shown


def test_a_shortage_says_what_is_missing_where():
    shown = drawn(view(minutes=0, policy=short_policy(can_release=100 * MIB, can_trim=700 * MIB)))
    assert "short device: free 1.43 GiB acts below 1.52 GiB" in shown
    assert "! short by 620 MiB on rank 1" in shown
    helpless = drawn(view(minutes=0, policy=short_policy("urgent")))
    assert "! short by 620 MiB on rank 1; nothing here to give back" in helpless


def test_a_rule_that_cannot_act_says_why():
    bare = replace(HELD, name="bare", high_water=None, low_water=None, ranks=())
    shown = drawn(view(minutes=0, policy=policy(DEVICE, bare, level="held")))
    assert "cannot act bare: used -" in shown
    assert "! bare: device.low_water: 0.4 of device_used_ratio cannot be reached" in shown


def test_ranks_that_act_at_different_fills_tell_the_span():
    rule = replace(DEVICE, ranks=(pressure(0), pressure(1, high_free_bytes=512 * MIB)))
    assert "acts at 0.50 GiB to 1.52 GiB free" in drawn(view(minutes=0, policy=policy(rule)))


def test_an_engine_that_is_stuck_is_said():
    stuck = Progress(verdict="stuck", since_seconds=130.0, ranks=(), summary="rank 0 is in one step for 130 s")
    assert "progress rank 0 is in one step for 130 s" in drawn(view(minutes=0, progress=stuck))


def test_nothing_that_a_terminal_obeys_is_drawn():
    """Whatever a model is called, an event says, a host is named."""
    evil = "a\x1b[2J\x1b]0;title\x07b\r\n\u202ec\x9b31m"
    told = as_json(report(hint=evil))
    told["engine"]["model"] = evil
    told["ranks"][0] |= {"host": evil, "device": {"type": evil, "index": 0, "name": evil}}
    told["policy"] |= {"summary": evil}
    told["policy"]["rules"][0] |= {"name": evil, "reason": evil, "phase": "held"}
    told["policy"]["rules"][0]["ranks"][0] |= {"note": evil}
    shown = drawn(view(minutes=0).with_report(report_of(told), 100.0))
    assert all(letter.isprintable() or letter == "\n" for letter in shown)


def test_wide_letters_do_not_break_the_lines():
    """They take two cells each; `drawn` checks."""
    assert "模型" in drawn(view(minutes=0).with_report(report_of(_named("模型" * 60)), 100.0), 60, 20)


def _named(model: str) -> dict:
    told = as_json(report())
    told["engine"]["model"] = model
    return told


@pytest.mark.parametrize(("dp_rank", "number", "name"), [(0, 1, "1"), (1, 0, "1.0"), (1, None, "1.?")])
def test_ranks_of_two_engines_are_told_apart(dp_rank, number, name):
    first, second = ranks(images=31)
    second = replace(second, dp_rank=dp_rank, rank=number, used_ratio=1.0, free_bytes=0, used_bytes=second.total_bytes)
    made = replace(FULL.report, ranks=(first, second))
    lines = drawn(replace(FULL, report=made)).splitlines()
    assert [line for line in lines if line.startswith(f"{name} npu:1 ")]
    assert [line for line in lines if f"rank {name} npu:1, the worst off" in line]
