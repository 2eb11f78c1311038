"""Whether the ranks move: every row of the verdict, and beside it what only nearly looks so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.watch.recorder.contents import RankProgress
from highwater.watch.recorder.progress import Demand, judge, requested_since
from tests.golden import golden

GOLDEN = Path(__file__).with_name("golden") / "progress.txt"


def idle(**beside) -> Demand:
    return Demand(**{"requests_running": 0, "requests_waiting": 0} | beside)


IDLE = idle()
RUNNING = Demand(requests_running=2, requests_waiting=1)
WAITING = Demand(requests_running=0, requests_waiting=1)
UNTOLD = Demand()


@dataclass(frozen=True)
class Rank:
    """What is needed of a record."""

    title: str
    status: str = "alive"
    age_seconds: float = 0.1
    progress: RankProgress | None = None
    pid: int = 77


def rank(number: int = 0, status: str = "alive", age: float = 0.1, **progress) -> Rank:
    steps = {"steps_begun": 50, "last_step_age_seconds": 600.0}
    return Rank(f"rank {number}", status, age, RankProgress(**steps | progress))


def stepping(number: int = 0, seconds: float = 0.02, **progress) -> Rank:
    return rank(number, step_seconds=seconds, last_step_age_seconds=seconds, **progress)


def lost(status: str, age: float = 6.0, number: int = 1) -> Rank:
    return rank(number, status, age)


def calling(seconds: float, number: int = 0, rpc: str = "trim") -> Rank:
    return rank(number, rpc=rpc, rpc_seconds=seconds)


def untold(number: int = 1) -> Rank:
    return Rank(f"rank {number}")


def looping(tokens_age_seconds: float) -> Rank:
    return rank(last_step_age_seconds=0.0, tokens_age_seconds=tokens_age_seconds, is_out_of_work=True)


def waits(
    *, capacity: int = 0, deferred: int = 0, usage: float = 0.0, connector: str | None = None, **beside
) -> Demand:
    return Demand(
        requests_running=0,
        requests_waiting=capacity + deferred,
        waiting_by_reason={"capacity": capacity, "deferred": deferred},
        kv_cache_usage_ratio=usage,
        kv_connector=connector,
        **beside,
    )


LOOPING = looping(30.0)
QUIET = rank()
LATELY = rank(last_step_age_seconds=9.9)
NEVER = rank(steps_begun=0, last_step_age_seconds=None)

# The ranks, the demand, how long there have been requests, the verdict, since when; its words: golden/progress.txt.
ROWS: dict[str, tuple[list[Rank], Demand, float, str, float | None]] = {
    # a rank is lost
    "a silent rank": ([stepping(), lost("silent", 30)], RUNNING, 60, "stuck", 30),
    "a silent rank that may be swapped out": ([QUIET, lost("silent", 29)], IDLE, 0, "unknown", None),
    "a dead rank": ([stepping(), lost("dead")], RUNNING, 60, "stuck", 6),
    "a stopped rank": ([stepping(), lost("stopped")], RUNNING, 60, "stuck", 6),
    "a dead rank of an idle engine": ([QUIET, lost("dead")], IDLE, 0, "stuck", 6),
    "what to do": ([QUIET, lost("stopped")], IDLE, 0, "stuck", 6),
    "two lost": ([QUIET, lost("dead", 8), lost("stopped", 7, 2)], IDLE, 0, "stuck", 8),
    "lost at the limit": ([stepping(), lost("stopped", 5.0)], RUNNING, 60, "stuck", 5),
    "lost, nearly": ([stepping(), lost("dead", 4.9)], RUNNING, 60, "progressing", None),
    "lost, nearly, at rest": ([QUIET, lost("silent", 4.9)], RUNNING, 60, "unknown", None),
    "held by a signal, all of them": ([lost("stopped")], IDLE, 0, "stuck", 6),
    "held, nearly": ([lost("stopped", 4.9)], IDLE, 0, "unknown", None),
    "dead, all of them": ([lost("dead"), lost("dead", 7, 2)], RUNNING, 60, "unknown", None),
    "silent, all of them": ([lost("silent")], RUNNING, 60, "unknown", None),
    "ended, all of them": ([lost("ended")], IDLE, 0, "unknown", None),
    "ended, one of them": ([stepping(), lost("ended", 99)], RUNNING, 60, "progressing", None),
    "ended, one of them, at rest": ([QUIET, lost("ended", 99)], RUNNING, 60, "unknown", None),
    "lost in a step, nearly": ([QUIET, rank(1, "silent", 4.9, step_seconds=130)], IDLE, 0, "unknown", None),
    "nobody": ([], RUNNING, 60, "unknown", None),
    # a rank is in a step, or in a call of ours
    "a step": ([stepping(), stepping(1)], RUNNING, 60, "progressing", None),
    "a step nobody asked for": ([stepping()], IDLE, 0, "progressing", None),
    "a short step": ([stepping(seconds=0.9)], RUNNING, 60, "progressing", None),
    "a long step": ([stepping(seconds=1.0)], RUNNING, 60, "busy", 1),
    "a very long step": ([stepping(seconds=120.0)], RUNNING, 200, "busy", 120),
    "a step too long": ([stepping(seconds=120.1)], RUNNING, 200, "stuck", 120.1),
    "a step too long, idle by count": ([stepping(seconds=130)], IDLE, 0, "stuck", 130),
    "the longest of several": ([stepping(), stepping(1, 130)], RUNNING, 200, "stuck", 130),
    "a long step beside ranks at rest": ([QUIET, stepping(1, 50)], RUNNING, 60, "busy", 50),
    "a long step of an unasked engine, a call waiting": (
        [stepping(seconds=40)],
        idle(unanswered_seconds=39),
        0,
        "busy",
        40,
    ),
    "a long step beside one that tells nothing": ([untold(), stepping(seconds=50)], RUNNING, 60, "busy", 50),
    "where it is": ([stepping(seconds=50, stack=("a.py:8 all_reduce", "b.py:1 run"))], RUNNING, 60, "busy", 50),
    "a call": ([calling(0.9)], IDLE, 0, "idle", 600),
    "a long call": ([calling(1.0)], IDLE, 0, "busy", 1),
    "a call too long": ([calling(121)], IDLE, 0, "stuck", 121),
    "a call in a longer step": ([stepping(seconds=3, rpc="trim", rpc_seconds=2.0)], RUNNING, 60, "busy", 3),
    "a call that is none": ([rank(rpc_seconds=50.0)], IDLE, 0, "idle", 600),
    # no rank is in a step, and the loop owes one
    "a call since the last step": ([rank(last_step_age_seconds=10.0)], idle(unanswered_seconds=50), 0, "stuck", 10),
    "requests, no step": ([QUIET], RUNNING, 12, "stuck", 12),
    "waiting only": ([QUIET], WAITING, 60, "stuck", 60),
    "since the last step": ([rank(last_step_age_seconds=15.0)], RUNNING, 60, "stuck", 15),
    "at the limits": ([rank(last_step_age_seconds=10.0)], RUNNING, 10.0, "stuck", 10),
    "never a step": ([NEVER], WAITING, 60, "stuck", 60),
    "a call and requests": ([QUIET], idle(requests_running=1, unanswered_seconds=11), 60, "stuck", 11),
    "a call alone": ([QUIET], idle(unanswered_seconds=10.0), 0, "stuck", 10),
    "a call, the engine held": ([QUIET], Demand(is_held=True, unanswered_seconds=30), 0, "busy", 30),
    "a step too long, the engine held": ([stepping(seconds=130)], Demand(is_held=True), 0, "busy", 130),
    "stopped, the engine held": ([QUIET, lost("stopped")], Demand(is_held=True), 0, "busy", 6),
    "dead, the engine held": ([QUIET, lost("dead")], Demand(is_held=True), 0, "stuck", 6),
    "our call behind another's": (
        [rank(call="reload_weights", call_seconds=40.0), QUIET],
        idle(unanswered_seconds=41),
        0,
        "busy",
        40,
    ),
    "requests behind another's call": ([rank(call="wake_up", call_seconds=40.0)], RUNNING, 60, "busy", 40),
    "another's call, however long": ([rank(call="profile", call_seconds=3600.0)], IDLE, 0, "busy", 3600),
    "a first step that compiles": ([stepping(seconds=599.0, steps_begun=10)], RUNNING, 600, "busy", 599),
    "a first step too long": ([stepping(seconds=601.0, steps_begun=10)], RUNNING, 700, "stuck", 601),
    "a compilation, however long": ([stepping(seconds=9e3, is_compiling=True)], RUNNING, 9e3, "busy", 9e3),
    "a new shape that compiles": ([stepping(seconds=300.0, is_compiling=True)], RUNNING, 400, "busy", 300),
    "under way here, the engine tells nothing": ([QUIET], Demand(proxied_requests=3), 30, "stuck", 30),
    # and what is only near it
    "requests for nearly long enough": ([QUIET], RUNNING, 9.9, "unknown", None),
    "requests after an idle hour": ([rank(last_step_age_seconds=3600.0)], WAITING, 0.5, "unknown", None),
    "the first request": ([NEVER], WAITING, 0.5, "unknown", None),
    "a step lately": ([LATELY], RUNNING, 60, "progressing", None),
    "a step lately, on one": ([QUIET, rank(1, last_step_age_seconds=3.0)], RUNNING, 60, "progressing", None),
    "a step lately, a call waiting": ([LATELY], idle(unanswered_seconds=50), 0, "idle", 9.9),
    "the loop answers": ([QUIET], idle(requests_running=1, answer_age_seconds=3), 60, "unknown", None),
    "the loop answered once": ([QUIET], idle(requests_running=1, answer_age_seconds=10.0), 60, "stuck", 60),
    "a call that waits for nearly long enough": ([QUIET], idle(unanswered_seconds=9.9), 0, "idle", 600),
    "held on purpose": ([QUIET], Demand(requests_running=0, requests_waiting=5, is_held=True), 60, "idle", 600),
    "under way here, none in the engine": ([QUIET], idle(proxied_requests=3), 60, "idle", 600),
    "one tells nothing": ([QUIET, untold()], RUNNING, 60, "unknown", None),
    # steps without tokens
    "nothing is scheduled, for want of room": (
        [LOOPING],
        waits(capacity=1, usage=0.983, connector="HoldConnector (kv_producer)"),
        75,
        "stuck",
        30,
    ),
    "no connector": ([LOOPING], waits(capacity=1, usage=0.5, connector=""), 75, "stuck", 30),
    "perhaps a connector": ([LOOPING], waits(capacity=1, usage=0.5), 75, "stuck", 30),
    "room in the KV cache": ([LOOPING], waits(capacity=1, usage=0.0), 75, "stuck", 30),
    "for as long as requests wait": ([LOOPING], waits(capacity=2), 12, "stuck", 12),
    "one of two deferred": ([LOOPING], waits(capacity=1, deferred=1), 75, "unknown", 30),
    "one of two deferred, for long": ([looping(700.0)], waits(capacity=1, deferred=1), 700, "stuck", 700),
    "a session whose client is silent": ([QUIET], waits(deferred=1), 75, "unknown", None),
    "an item that never fits loops": (
        [LOOPING],
        Demand(requests_running=1, requests_waiting=0, kv_cache_usage_ratio=0.2),
        75,
        "stuck",
        30,
    ),
    "starved, nearly": ([LOOPING], waits(capacity=1), 9.9, "unknown", 9.9),
    "tokens a moment ago": ([looping(0.9)], waits(capacity=1), 75, "progressing", None),
    "tokens on another rank": ([LOOPING, looping(0.5)], waits(capacity=1), 75, "progressing", None),
    "an older package": ([LOOPING, rank(last_step_age_seconds=0.0)], waits(capacity=1), 75, "progressing", None),
    "starved, with one in a long step": ([LOOPING, stepping(1, 12.0)], waits(capacity=1), 75, "busy", 12),
    "deferred": ([looping(3600.0)], waits(deferred=1, connector=""), 3600, "unknown", 3600),
    "deferred, the connector not known": ([looping(3600.0)], waits(deferred=1), 3600, "unknown", 3600),
    "deferred, as by a transfer": ([looping(599.0)], waits(deferred=1, connector="Nixl"), 3600, "unknown", 599),
    "deferred for too long": ([looping(600.0)], waits(deferred=1, connector="Nixl"), 3600, "stuck", 600),
    "no reasons": ([looping(599.0)], WAITING, 3600, "unknown", 599),
    "no reasons, for too long": ([looping(600.0)], WAITING, 3600, "stuck", 600),
    "blocks of no request alone": ([LOOPING], idle(kv_cache_usage_ratio=0.9), 0, "idle", 0.0),
    "starved while held": ([LOOPING], waits(capacity=3, is_held=True), 75, "idle", 0.0),
    "the counts unknown": ([LOOPING], Demand(proxied_requests=3), 75, "progressing", None),
    # no requests
    "idle": ([QUIET, rank(1)], IDLE, 0, "idle", 600),
    "idle just now": ([rank(last_step_age_seconds=0.1)], IDLE, 0, "idle", 0.1),
    "idle from the start": ([NEVER], IDLE, 0, "idle", None),
    "idle, the loop answers": ([QUIET], Demand(answer_age_seconds=2), 0, "idle", 600),
    "idle, or not: the engine does not tell": ([QUIET], UNTOLD, 0, "unknown", None),
    "a step lately: the engine does not tell": ([LATELY], UNTOLD, 0, "progressing", None),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_verdict_is_that_of_the_table(row):
    ranks, demand, requested_seconds, *expected = row
    progress = judge(ranks, demand, requested_seconds=requested_seconds)
    assert [progress.verdict, progress.since_seconds] == expected
    assert len(progress.ranks) == len(ranks)


def test_the_summaries_are_the_golden_ones():
    summaries = (
        f"{name}: {judge(ranks, demand, requested_seconds=seconds).summary}\n"
        for name, (ranks, demand, seconds, *_) in ROWS.items()
    )
    text = "".join(summaries)
    assert text == golden(GOLDEN, text)


def test_the_longest_step_is_the_operators_word():
    ranks = [stepping(seconds=200)]
    assert judge(ranks, RUNNING, max_step_seconds=300).verdict == "busy"
    assert judge(ranks, RUNNING, max_step_seconds=60).verdict == "stuck"


def test_only_a_loop_that_goes_on_is_starved():
    starved = judge([LOOPING], waits(capacity=1), requested_seconds=75)
    hung = judge([stepping(seconds=130)], RUNNING, requested_seconds=200)
    assert [(one.verdict, one.is_starved) for one in (starved, hung)] == [("stuck", True), ("stuck", False)]


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (stepping(seconds=2, stack=("a.py:8 forward",)), "rank 0 is in one step for 2.0 s, at a.py:8 forward"),
        (calling(12, rpc="release"), "rank 0 is in our call release for 12 s"),
        (QUIET, "rank 0 is in no step, the last one 600 s ago"),
        (NEVER, "rank 0 is in no step yet"),
        (untold(0), "rank 0 has written no sample yet"),
        (lost("ended", 3, 0), "rank 0 ended its recorder 3.0 s ago"),
        (lost("silent", 3, 0), "rank 0 has written nothing for 3.0 s"),
    ],
)
def test_each_rank_is_told_in_words(one, words):
    assert judge([one], IDLE).ranks == (words,)


def test_since_when_there_are_requests_is_kept_by_the_caller():
    since = requested_since(None, RUNNING, 5.0)
    assert since == 5.0
    assert requested_since(since, WAITING, 9.0) == 5.0
    for none in (IDLE, UNTOLD, Demand(requests_running=3, requests_waiting=0, is_held=True)):
        assert requested_since(since, none, 10.0) is None
    assert requested_since(None, Demand(proxied_requests=1), 5.0) == 5.0


seconds = st.none() | st.floats(0, 1000)
movings = st.builds(
    RankProgress,
    steps_begun=st.integers(0, 5),
    step_seconds=seconds,
    last_step_age_seconds=seconds,
    rpc=st.none() | st.just("memory"),
    rpc_seconds=seconds,
)
statuses = st.sampled_from(["alive", "silent", "dead", "stopped", "ended"])
ranks_of_any_kind = st.lists(
    st.builds(
        Rank, title=st.just("rank 0"), status=statuses, age_seconds=st.floats(0, 100), progress=st.none() | movings
    ),
    max_size=4,
)
demands = st.builds(
    Demand,
    requests_running=st.none() | st.integers(0, 3),
    requests_waiting=st.none() | st.integers(0, 3),
    proxied_requests=st.integers(0, 3),
    unanswered_seconds=seconds,
    answer_age_seconds=seconds,
    is_held=st.booleans(),
)


@given(ranks=ranks_of_any_kind, demand=demands, requested=st.floats(0, 1000))
def test_there_is_a_verdict_on_anything(ranks, demand, requested):
    progress = judge(ranks, demand, requested_seconds=requested)
    assert progress.verdict in {"progressing", "idle", "busy", "stuck", "unknown"}
    assert progress.summary
    assert len(progress.ranks) == len(ranks)


@given(
    ages=st.lists(st.none() | st.floats(0, 1e6), min_size=1, max_size=4),
    proxied=st.integers(0, 5),
    requested=st.floats(0, 1e6),
    call=st.none() | st.floats(0, 9.9),
)
def test_an_engine_that_is_asked_for_nothing_is_never_stuck(ages, proxied, requested, call):
    demand = idle(proxied_requests=proxied, unanswered_seconds=call)
    ranks = [rank(number, last_step_age_seconds=age) for number, age in enumerate(ages)]
    assert judge(ranks, demand, requested_seconds=requested).verdict == "idle"


@given(step=st.floats(0, 120), demand=demands, requested=st.floats(0, 1e6))
def test_one_long_step_is_never_stuck(step, demand, requested):
    assert judge([stepping(seconds=step), rank(1)], demand, requested_seconds=requested).verdict in {
        "progressing",
        "busy",
    }


def test_a_loop_that_hangs_is_stuck_and_not_starved():
    """A request waits for room, and the last step ended ten minutes ago: no loop goes on that could schedule it."""
    hung = rank(last_step_age_seconds=600.0, tokens_age_seconds=600.0, is_out_of_work=True)
    told = judge([hung], waits(capacity=1, unanswered_seconds=60.0), requested_seconds=75)
    assert (told.verdict, told.since_seconds, told.is_starved) == ("stuck", 60.0, False)
    assert "the engine's loop schedules no work: a call has waited for 60 s" in told.summary
