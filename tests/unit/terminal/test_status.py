"""The verdict on one screen, in each state; the ranks, what grows and what changed behind it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from highwater.diagnose.finding import Advice, FoundFinding
from highwater.diagnose.verdict import Deed, JudgedReport, Verdict
from highwater.http.text.report import ranks_text, since_text, status_text, why_text
from highwater.model.engine import Progress
from highwater.model.growth import SeriesGrowth
from highwater.model.rank import names_text
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event
from highwater.model.units import GIB
from highwater.terminal.status import status, status_json
from tests.unit.terminal.reports import NOW, as_json, event, is_golden, ranks, report, short_policy

RECLAIM = Deed(text="Reclaim 14.8 GiB", path="memory/reclaim", body={"remedies": ["release"], "mode": "safe"})
LOOK = Deed(text="See why it ended", path="memory/incidents/20261121T143233Z-died")
LAST = replace(
    event("release done, gave back 14.8 GiB in 0.30 s", at=NOW - 240),
    rule="device",
    why="no request ran for 30 s and 1.9 GiB are unused",
)
DIED = replace(event("the engine died", kind="incident", at=NOW - 100), incident="20261121T143233Z-died")

# Each state with its exit status, its sentence, what grew, what is next, and what to do.
VERDICTS = {
    "fine": (0, "7.6 GiB free on every rank. Nothing grows.", None, "At 1.5 GiB free Highwater gives back.", None),
    "keeps_up": (0, "It fills every 16 s and is given back each time.", None, "Next release in about 9 s.", None),
    "short": (
        1,
        "Rank 1 has 1.4 GiB free of 61.0 GiB, 0.6 GiB too little, and loses 58 MiB/s: it is full in 40 s.",
        "encoder cache +1.9 GiB in 40 s",
        "Highwater releases 14.8 GiB by itself; no request waits.",
        RECLAIM,
    ),
    "very_short": (2, "Rank 1 has 0.4 GiB free of 61.0 GiB and nothing is left to give back.", None, None, None),
    "slow": (1, "The engine is slow. Rank 0 has 7.6 GiB free.", None, None, None),
    "paused": (1, "The engine is paused. Rank 0 has 7.6 GiB free.", None, None, None),
    "sleeping": (1, "The engine is sleeping.", None, None, None),
    "starting": (1, "Loading weights for 1 min 12 s; the last start took 3 min 40 s.", None, None, None),
    "stuck": (2, "Rank 0 is in one step for 130 s.", None, None, LOOK),
    "silent": (2, "The engine does not answer for 70 s; its processes live.", None, None, LOOK),
    "dead": (2, "The engine died 4 min ago and nobody has restarted it. Memory was not short.", None, None, LOOK),
    "unknown": (1, "Nothing was read yet.", None, None, None),
    "cannot_act": (1, "The rule device cannot act: it is over its water at rest.", None, None, None),
}


def judged(state: str, **changed) -> JudgedReport:
    """A report with that state's verdict."""
    status, sentence, grew, then, do = VERDICTS[state]
    step = None if status == 0 else "Look at the ranks first."
    runbook = None if status == 0 else "docs/runbooks/HighwaterShort.html"
    verdict = Verdict(
        state=state, exit_status=status, reason="none", sentence=sentence, grew=grew, next=then, do=do, step=step,
        runbook=runbook,
    )  # fmt: skip
    return replace(report(**changed), verdict=verdict)


def screen(told: JudgedReport, events: tuple[Event, ...] = (LAST, DIED), **options) -> str:
    """What stands on 80 columns."""
    return status_text(told, events, now=NOW, **{"url": "http://127.0.0.1:8001", "width": 80, **options})


@pytest.mark.parametrize("state", VERDICTS)
def test_the_screen_of_a_state_is_the_golden_one(state):
    changed = {"policy": short_policy(can_release=2**30)} if "short" in state else {}
    shown = screen(judged(state, **changed))
    facts = [line.split()[0] for line in shown.splitlines() if not line.startswith(" ")]
    do = ["do"] if VERDICTS[state][0] else []
    assert facts[-6 - len(do) :] == ["worst", "grew", "next", *do, "step", "last", "look"]
    assert max(map(len, shown.splitlines())) <= 80
    assert is_golden(f"status_{state}", shown)


def test_without_a_sidecar_it_says_what_needs_one():
    shown = screen(judged("short"), (), url="http://gpu-7:8000", is_alone=True)
    assert shown.count("needs a sidecar") == 3
    assert "highwater serve --engine-url http://gpu-7:8000" in shown
    assert "reclaim" not in shown
    assert "acts at" not in shown, "no policy runs there"
    again = "--engine-url http://gpu-7:8000"
    assert " ".join(shown.split()).endswith(f"look highwater status {again} --why or --ranks, highwater check {again}")
    assert why_text(report(), [], 200, engine_url="http://gpu-7:8000").endswith(f"look   highwater check {again}")


def test_why_it_acted_is_said_once():
    why = LAST.why
    told = replace(LAST, summary=f"{LAST.summary}; why: {why}")
    assert " ".join(screen(judged("fine"), (told,)).split()).count(why) == 1
    assert " ".join(screen(judged("fine"), (LAST,)).split()).count(why) == 1


def test_a_screen_without_anything_to_tell():
    bare = judged("unknown", ranks=(), policy=None, taken_at=None, age_seconds=None, stale=True, encoder_cache=None)
    shown = screen(bare, ())
    assert "worst  no rank was read yet" in shown
    assert "last   none that the sidecar remembers" in shown
    assert "None" not in shown


def test_equal_ranks_are_one_row_and_the_least_free_is_first():
    crowd = list(ranks(8))
    crowd[3] = ranks(8, images=31)[3]
    head, _, first, *rest = ranks_text(report(ranks=tuple(crowd))).splitlines()
    assert head.split()[:3] == ["GiB", "of", "free"]
    assert first.split()[:3] == ["3", "60.96", "3.89"]
    assert [line.split()[:4] for line in rest] == [["0-2", "4-7", "x7", "60.96"]]
    assert max(map(len, (head, first, *rest))) <= 80


def test_what_no_rank_tells_is_no_column():
    bare = replace(ranks()[0], components=replace(ranks()[0].components, encoder_cache_bytes=None))
    assert "encoder" not in ranks_text(report(ranks=(bare,)))


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (["3"], "3"),
        (["0", "1", "2", "4"], "0-2 4 x4"),
        (["0", "2", "4", "6"], "0 2 4 .. x4"),
        (["1.0", "1.1"], "1.0 1.1 x2"),
    ],
)
def test_ranks_are_named_in_runs(labels, name):
    assert names_text(labels) == name


def test_why_is_short():
    change = Advice(setting="--max-num-seqs", change="Lower it, say to 32. Each takes memory.", cost="Less at once.")
    found = FoundFinding(
        name="x", weight="likely", title="it was planned too tightly", text="Long.", advice=(change,), where="start"
    )
    asked = FoundFinding(name="y", weight="note", title="not asked for", text="", where="set-up")
    flat = [series(verdict="flat"), series(verdict="not_known"), series(verdict="not_known")]
    told = report()
    told = replace(told, growth=replace(told.growth, series=tuple(flat)))
    shown = why_text(told, [found, asked], 80)
    assert shown.splitlines() == [
        "grows  1 flat",
        "why    it was planned too tightly; --max-num-seqs: Lower it, say to 32",
        "look   highwater growth, highwater explain",
    ]
    assert "no known cause was found" in why_text(report(), [], 80)
    slow = replace(
        told, progress=Progress(verdict="busy", since_seconds=12.0, ranks=(), summary="rank 0 is in one step for 12 s")
    )
    assert why_text(slow, [], 80).startswith("ranks  rank 0 is in one step for 12 s\ngrows  ")


def series(**changed) -> SeriesGrowth:
    """A series of memory that was judged."""
    known = {
        "series": "s", "owner": "EngineCore", "measure": "anonymous_bytes", "place": "host", "unit": "bytes",
        "text": "", "ground": "idle",
    }  # fmt: skip
    return SeriesGrowth(**{**known, **changed})


def test_for_programs_the_report_is_as_it_was_told():
    told = judged("dead")
    last = replace(event(), result=RemedyResult(remedy="release", outcome="done"))
    body = json.loads(json.dumps(status_json(told, as_json(told), [last])))
    assert (body["status"], body["exit_code"], body["reasons"]) == ("critical", 2, [told.verdict.sentence])
    assert (body["verdict"]["state"], body["verdict"]["do"]["path"]) == ("dead", LOOK.path)
    assert body["report"]["ranks"][0]["used_bytes"] == told.ranks[0].used_bytes
    assert body["last_reset"]["result"]["remedy"] == "release"


def test_what_changed_since_a_mark_is_a_row_for_each_rank():
    parts = {"encoder_cache_bytes": GIB, "kv_cache_bytes": None}
    told = [{"rank": number, "used_bytes": GIB, "components": parts} for number in range(3)]
    title, head, below, row = since_text("before bench", {"ranks": told}).splitlines()
    assert title == "since 'before bench'"
    assert (head.split(), below.split()) == (["GiB", "used", "encoder"], ["cache"])
    assert row.split() == ["0-2", "x3", "+1.00", "+1.00"]


@pytest.mark.parametrize("since", [None, {}, {"ranks": []}])
def test_nothing_known_since_a_mark_is_said(since):
    assert "nothing is known" in since_text("x", since)


def test_its_help_promises_no_number_of_lines():
    """An answer takes as many as its sentence and the terminal's width need."""
    assert "lines" not in status.help
