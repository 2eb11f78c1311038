"""The verdict: every row of its table, and what only nearly looks so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.model.engine import STATES, EngineLoad, EngineState, EngineStatus, Progress
from highwater.model.report import Report
from highwater.process.errors import EngineError
from highwater.watch.round import SILENT_API_SECONDS, Contact, EngineVerdict, KnownBefore, ProcessSigns, Round, decide

ROOT = Path(__file__).parents[3]
LOST = {name for name, traits in STATES.items() if traits.is_lost}
Seen: TypeAlias = tuple[ProcessSigns, Round]
UP = EngineVerdict(state="ready", since=0.0, reason=None, has_answered=True)


def saw(
    contact: Contact = "answered",
    *,
    failure: str | None = None,
    workers: str | None = None,
    is_silent: bool = False,
    sleeping: bool | None = None,
    stopped: str | None = None,
    is_start_under_way: bool = False,
    **seen,
) -> Seen:
    """A round that came so far, after which nothing of an engine is left where its `workers` have ended so."""
    signs = ProcessSigns(failure_text=failure, stopped=stopped, is_start_under_way=is_start_under_way)
    return signs, Round(
        before=KnownBefore(last=Report(engine=EngineStatus(url="http://e", state="ready"))),
        contact=contact,
        failure=None if contact == "answered" else EngineError(failure),
        records=() if workers is None else (SimpleNamespace(status=workers),),
        serves_models=not is_silent,
        load=None if sleeping is None else EngineLoad(sleeping=sleeping),
        **seen,
    )


def moves(verdict: str, seconds: float | None = None) -> Progress:
    return Progress(verdict=verdict, since_seconds=seconds, ranks=(), summary=f"the ranks are {verdict}")


def after(*rounds: Seen, before: EngineVerdict = UP, every: float = 1.0) -> EngineVerdict:
    for number, (signs, seen) in enumerate(rounds):
        before = decide(before, seen, signs, 100.0 + number * every, max_step_seconds=120.0)
    return before


REFUSED = saw(contact="refused", failure="refused")
LATE = saw(contact="late", failure="late")
CALL_LATE = saw(contact="worker_call_late", failure="late")
BROKEN = saw(contact="broken", failure="broken")
ANSWERED = saw(contact="answered")

STOPPED = "EngineCore (pid 11) has been stopped"

ROWS = [
    ("it answers", [ANSWERED], "ready"),
    ("one refusal", [REFUSED], "ready"),
    ("two refusals", [REFUSED, REFUSED], "gone"),
    ("two refusals with an answer between", [REFUSED, ANSWERED, REFUSED], "ready"),
    ("one refusal, its workers dead", [saw(contact="refused", workers="dead")], "gone"),
    ("one refusal, its workers ended in order", [saw(contact="refused", workers="ended")], "gone"),
    ("connections that break", [BROKEN] * 20, "slow"),
    ("an API server that is late", [LATE], "slow"),
    ("an API server that is late, the core idle", [saw(contact="late", progress=moves("idle"))], "slow"),
    ("an API server that is late, the core in steps", [saw(contact="late", progress=moves("progressing"))], "slow"),
    ("an API server that is late in a long step", [saw(contact="late", progress=moves("busy", 5.0))], "busy"),
    ("a worker call that is late, no recorder", [CALL_LATE], "busy"),
    (
        "a worker call that is late among steps",
        [saw(contact="worker_call_late", progress=moves("progressing"))],
        "ready",
    ),
    ("a worker call that is late, nobody in a step", [saw(contact="worker_call_late", progress=moves("idle"))], "slow"),
    ("a step of nine seconds", [saw(contact="answered", progress=moves("busy", 9.0))], "ready"),
    ("a step of ten seconds", [saw(contact="answered", progress=moves("busy", 10.0))], "busy"),
    ("recorders that say stuck", [saw(contact="answered", progress=moves("stuck", 130.0))], "stuck"),
    ("an API server without workers", [saw(contact="answered", workers="dead")], "stuck"),
    ("a stopped EngineCore", [saw(contact="answered", stopped=STOPPED)], "stuck"),
    ("a stopped API server", [saw(contact="late", stopped=STOPPED)], "stuck"),
    (
        "stopped at each look by a tracer, and its workers step",
        [saw(contact="answered", stopped=STOPPED, progress=moves("progressing"))],
        "ready",
    ),
    ("a stopped EngineCore that goes on", [saw(contact="answered", stopped=STOPPED), ANSWERED], "ready"),
    ("asleep, and stopped by a debugger", [saw(contact="answered", sleeping=True, stopped=STOPPED)], "sleeping"),
    ("asleep", [saw(contact="answered", sleeping=True)], "sleeping"),
    ("paused", [saw(contact="answered", paused=True)], "paused"),
    ("paused, then late", [saw(contact="answered", paused=True), CALL_LATE], "paused"),
]


@pytest.mark.parametrize(("rounds", "state"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_state_is_that_of_the_table(rounds, state):
    assert after(*rounds).state == state


def test_a_stopped_process_is_named_before_the_ranks_that_wait_for_it():
    assert after(saw(contact="answered", stopped=STOPPED, progress=moves("stuck"))).reason == (
        f"{STOPPED} (the ranks are stuck)"
    )


def test_what_never_answered_is_starting_however_long_it_does_not():
    for seen in (REFUSED, LATE, BROKEN):
        assert after(*[seen] * 50, before=EngineVerdict(), every=60.0).state == "starting"


@pytest.mark.parametrize("seen", [LATE, CALL_LATE, BROKEN], ids=["late", "call", "broken"])
def test_no_answer_for_longer_than_any_step_is_no_hang(seen):
    verdict = after(*[seen] * 3, every=60.0)
    assert (verdict.state, verdict.since) == ("not_answering", 100.0), "since the last answer"
    assert after(seen, seen, ANSWERED, seen, every=60.0).state != "not_answering", "an answer begins it anew"


LOADS = saw(contact="refused", is_start_under_way=True)


def test_an_engine_that_ended_stays_gone_until_something_shows_that_the_next_one_loads():
    gone = after(REFUSED, REFUSED)
    assert {after(*[seen] * 30, before=gone, every=60.0).state for seen in (REFUSED, BROKEN)} == {"gone"}
    for shown in (LATE, LOADS):
        loading = after(shown, before=gone)
        assert (loading.state, after(*[shown] * 30, before=loading, every=60.0).state) == ("starting", "starting")
        assert after(REFUSED, before=loading).state == "gone", "it is no more, and nothing loads"
    assert after(ANSWERED, before=gone).state == after(LOADS, ANSWERED, before=gone).state == "ready"
    assert after(ANSWERED, REFUSED, before=gone).state == "ready", "the end of the former one is over"


def test_a_dead_engine_behind_an_api_server_is_gone_at_once():
    """It says so itself; a sidecar that comes later is told the same, and nothing else counts while it does."""
    dead = saw(contact="dead", failure="dead")
    assert after(dead).state == after(dead, before=EngineVerdict()).state == "gone"
    assert after(*[dead] * 9, saw(contact="dead", is_start_under_way=True), every=60.0).state == "gone"
    assert after(dead, LOADS).state == "starting"
    assert after(dead, LATE).state == "gone", "the same process, which now hangs"
    assert after(dead, REFUSED, LATE).state == "starting"


@pytest.mark.parametrize(
    ("progress", "state"),
    [
        (None, "not_answering"),
        (moves("unknown"), "not_answering"),
        (moves("idle"), "slow"),
        (moves("progressing"), "slow"),
        (moves("busy", 50.0), "busy"),
    ],
)
def test_an_api_server_that_serves_nothing_gets_no_more_requests_unless_recorders_see_the_engine(progress, state):
    """Out of service, and not restarted: a stall that recorders see is one that it comes back from."""
    seen = saw(contact="late", failure="late", is_silent=True, progress=progress)
    verdict = after(*[seen] * 3, every=SILENT_API_SECONDS / 2)
    assert verdict.state == state
    assert after(*[seen] * 2, every=SILENT_API_SECONDS / 2).state == ("busy" if state == "busy" else "slow")
    assert after(ANSWERED, before=verdict).state == "ready"


def test_an_api_server_that_serves_beside_its_metrics_is_slow():
    quiet = saw(contact="late", is_silent=True)
    assert after(quiet, quiet, LATE, quiet, every=9.0).state == "slow"
    assert after(*[CALL_LATE] * 10, quiet, every=6.0).state == "slow"


def test_a_starved_engine_is_stuck():
    starved = Progress(verdict="stuck", since_seconds=12.0, ranks=(), summary="nothing is scheduled", is_starved=True)
    assert after(saw(contact="answered", progress=starved)).state == "stuck"


def test_what_follows_from_a_state_is_said_once():
    assert tuple(STATES) == get_args(EngineState)
    for traits in STATES.values():
        assert traits.is_up or not (traits.serves or traits.answers or traits.takes_remedies or traits.is_held)
        assert not (traits.is_up and (traits.is_lost or traits.is_absent or traits.is_hung))
        assert (traits.level == "bad") == (traits.is_hung or traits.is_lost)
    assert [name for name, traits in STATES.items() if traits.level == "good"] == ["ready"]


def test_nobody_else_keeps_a_list_of_states():
    """Which states mean what is said in model/engine.py: a second list is forgotten when a state is added."""
    home = ROOT / "app" / "highwater" / "model" / "engine.py"
    states = set(get_args(EngineState))

    def is_list(node: ast.AST) -> bool:
        literals = node.elts if isinstance(node, ast.Set | ast.Tuple | ast.List) else ()
        names = {one.value for one in literals if isinstance(one, ast.Constant)}
        return len(names) > 1 and names <= states

    texts = {path: path.read_text("utf-8") for path in (ROOT / "app").rglob("*.py")}
    # Only files with two names of states in quotes are parsed.
    trees = {
        path: ast.parse(text)
        for path, text in texts.items()
        if len(states & {*re.findall(r"[\"'](\w+)[\"']", text)}) > 1
    }
    assert home in trees
    lists = {path: [node.lineno for node in ast.walk(tree) if is_list(node)] for path, tree in trees.items()}
    assert {path: lines for path, lines in lists.items() if lines and path != home} == {}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "app" / "highwater" / "dashboard").glob("*.js")), ids=lambda path: path.name
)
def test_the_page_keeps_no_list_of_states_either(path):
    lists = re.findall(r"\[([^\[\]]*)\]", path.read_text("utf-8"))
    names = [set(re.findall(r'"(\w+)"', one)) for one in lists]
    assert not [one for one in names if len(one) > 1 and one <= set(get_args(EngineState))]


def test_a_state_is_told_in_words():
    engine = EngineStatus(url="http://e", state="not_answering", hint="a call is late")
    assert engine.in_words == "the engine is not answering: a call is late"


seens = st.builds(
    saw,
    contact=st.sampled_from(get_args(Contact)),
    failure=st.none() | st.just("f"),
    progress=st.none() | st.builds(moves, st.sampled_from(["progressing", "idle", "busy"]), st.floats(0, 500)),
    sleeping=st.none() | st.booleans(),
    paused=st.none() | st.booleans(),
)


@given(rounds=st.lists(seens, max_size=30), every=st.floats(0.1, 300))
def test_without_a_recorders_word_and_without_refusals_nobody_restarts_the_engine(rounds, every):
    """Whatever else is late or breaks, for however long, unless the API server itself says that its engine is dead."""
    before = UP
    for number, (signs, seen) in enumerate(rounds):
        if seen.contact not in {"refused", "dead"}:
            before = decide(before, seen, signs, number * every, max_step_seconds=120.0)
            assert before.state not in LOST
