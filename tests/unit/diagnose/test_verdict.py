"""The verdict: a row for each state and cause, with all that is said; and the moments of a server's life."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import pytest

from highwater.diagnose.engine_verdict import brief
from highwater.diagnose.verdict import JudgedReport, Reason, VerdictState, verdict
from highwater.http.text.report import status_text
from highwater.model.engine import MissingRank, Progress, StartFailure
from highwater.model.growth import Growth, GrowthRate, RankGrowth, RecentGrowth, SeriesGrowth
from highwater.model.policy import PolicyAct
from highwater.model.rank import Components, Device
from highwater.model.report import HostSummary, OpenIncident, ProxyLoad, ReliefNow, Report
from highwater.watch.recorder.progress import how_to_continue
from tests.fakes.engine import MIB
from tests.golden import golden
from tests.unit.terminal.reports import DEVICE, HELD, NOW, policy, pressure, ranks, report, short_policy

GIB = 1024 * MIB
GOLDEN = Path(__file__).parent / "golden" / "verdicts.txt"
RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"


def told(engine: dict[str, Any] | None = None, **changed: Any) -> Report:
    """A report of the story's two ranks as it is given out, with parts of it and of the engine's status changed."""
    made = replace(report(), growth=Growth(), now=NOW, proxy=ProxyLoad(requests_ended=9, requests_under_way=3))
    return replace(made, engine=replace(made.engine, since=NOW - 240, **(engine or {})), **changed)


def eight(fullest: float, **growth: Any) -> dict[str, Any]:
    """Eight ranks, of which rank 3 has so many GiB free; and its growth."""
    all_ranks = ranks(8)
    full = replace(all_ranks[3], free_bytes=int(fullest * GIB), releasable_bytes=int(1.85 * GIB))
    rules = tuple(pressure(number) for number in range(8))
    return {
        "ranks": (*all_ranks[:3], full, *all_ranks[4:]),
        "ranks_expected": 8,
        "ranks_reported": 8,
        "policy": policy(replace(DEVICE, ranks=rules)),
        "growth": Growth(**growth),
    }


def act(ago: float, *, reached: bool = True, gib: float = 6.4) -> PolicyAct:
    why = "short by 0.605 GiB on rank 0"
    at = NOW - ago
    return PolicyAct(
        at=at, rule="device", remedy="release", outcome="done", why=why, freed_bytes=int(gib * GIB), reached=reached
    )


def nothing_to_give(*, free: float | None = None, **changed: Any) -> tuple[Any, ...]:
    size = {} if free is None else {"free_bytes": int(free * GIB)}
    return tuple(replace(rank, releasable_bytes=0, trimmable_bytes=0, **size, **changed) for rank in ranks())


def growing(rank: int = 0, *, pace: float = 58 * MIB, **parts: int) -> RankGrowth:
    return RankGrowth(
        rank=rank, dp_rank=0, bytes_per_second=pace, component="encoder_cache_bytes", grown=Components(**parts)
    )


def died(memory: str, **changed: Any) -> dict[str, Any]:
    incident = OpenIncident(
        id="20261121T143233Z-died", kind="died", at=NOW - 240, summary="The engine died", memory=memory
    )
    return {"stale": True, "age_seconds": 241.0, "taken_at": NOW - 241, "incident": incident, **changed}


def leaking(days: float) -> SeriesGrowth:
    return SeriesGrowth(
        series="API server anonymous_bytes",
        owner="API server",
        measure="anonymous_bytes",
        place="host",
        unit="bytes",
        verdict="leak",
        text="it leaks",
        rate=GrowthRate(driver="request", per_driver=3.0 * MIB, low=2.9 * MIB, high=3.1 * MIB),
        exhausted_at=NOW + days * 86_400,
        limit_by="the container's limit",
    )


STILL = Growth(ranks=tuple(RankGrowth(rank=rank, dp_rank=0, bytes_per_second=0.0) for rank in range(2)))
LOADING = {"state": "starting", "is_loading": True, "loading_phase": "loading weights", "loading_since": NOW - 72}
NOT_READ = {"stale": True, "taken_at": None, "age_seconds": None, "ranks": (), "ranks_reported": 0}
FAILED = StartFailure(
    at=NOW - 40,
    recorder_instance="x",
    summary="the engine did not start: rank 0 failed in phase weights after 12.0 s: RuntimeError: no room",
    ranks=(),
)
ENDED = "the engine's last 3 starts ended before it was ready; the last one failed at 2026-11-21 14:32:33"
STUCK = Progress(
    verdict="stuck", since_seconds=70.0, ranks=(), summary="rank 1 has been in a step for 70 s; the others wait for it"
)
STARVED = Progress(
    verdict="stuck",
    since_seconds=30.0,
    ranks=(),
    summary="steps end without tokens while 3 requests wait",
    is_starved=True,
)
RESTING = replace(
    short_policy("resting"),
    rules=(
        replace(
            short_policy("resting").rules[0],
            reason="short by 0.605 GiB on rank 1; the last relief did not reach low water",
            hindrance="the last relief did not reach low water",
            rest_until=NOW + 42,
        ),
    ),
)
ACTING = replace(short_policy("acting", can_release=2 * GIB), acts=(act(16), act(32)))
HOST = HostSummary(processes=3)
FULL_HOST = "the engine's container keeps 62.0 GiB of 64.0 GiB (97 %) that the kernel cannot drop"
KILLED = "the kernel has killed 1 process of the engine's container for memory, the last one 12 s ago (counted there)"
CPU = tuple(replace(rank, device=Device(type="cpu"), releasable_bytes=None, trimmable_bytes=None) for rank in ranks(1))
MISSING = MissingRank(dp_rank=0, pp_rank=0, tp_rank=2, rank=2, status="dead")
SECOND_WAVE = policy(acts=tuple(act(16.0 * number) for number in range(1, 6)))
RELIEF = ReliefNow(
    remedy="reset_encoder_cache",
    trigger="policy",
    state="closing",
    seconds=3.2,
    requests_running=2,
    text="giving back: waits for 2 requests, 3 s",
    why="short by 0.605 GiB on rank 1",
)
REFUSED = replace(
    DEVICE, remedies=tuple(replace(one, unavailable="development mode is off") for one in DEVICE.remedies)
)

# What a case is about, and its report; golden/verdicts.txt has its state, exit status and reason, and all that is said.
CASES: dict[str, Report] = {
    "all is well": told(growth=STILL),
    "its growth is not known": told(),
    "busy": told({"state": "busy", "hint": "a step has lasted 12 s"}),
    "eight ranks, one fuller": told(**eight(4.34)),
    "mode observe": told(policy=policy(mode="observe")),
    "no rules": told(policy=replace(policy(), rules=())),
    "no rules, and little is free": told(**{**eight(0.25), "policy": replace(policy(), rules=())}),
    "a rank that is not read any more was short": told(
        ranks=ranks(1),
        ranks_expected=2,
        ranks_reported=1,
        policy=short_policy(),
    ),
    "only watched": told({"capabilities": {"collective_rpc": False}}, policy=policy(REFUSED)),
    "on CPU": told(ranks=CPU, ranks_expected=1, ranks_reported=1, policy=policy(HELD, level="held")),
    "a relief that did not reach its water": told(policy=RESTING),
    "a leak that lasts for weeks": told(growth=Growth(series=(leaking(20),))),
    "a past relief": told(policy=policy(acts=(act(9000),))),
    "host memory that may become short": told(host=replace(HOST, warnings=("/dev/shm can be too small",))),
    "grown since it was ready": told(
        growth=Growth(baseline_taken_at=NOW - 7200, ranks=(growing(0, pace=0.0, encoder_cache_bytes=2 * GIB),))
    ),
    "a remedy by hand runs": told(relief=replace(RELIEF, trigger="reclaim", why=None)),
    "a release every 16 s": told(policy=SECOND_WAVE, growth=Growth(refill_seconds=16.0)),
    "the same while it runs": told(policy=ACTING, relief=RELIEF),
    "twice, and not enough": told(policy=replace(RESTING, acts=(act(16, reached=False), act(32)))),
    "growing, full soon": told(
        **eight(
            2.34,
            seconds_to_full=40.0,
            component="encoder_cache_bytes",
            ranks=(replace(growing(3), seconds_to_full=40.0),),
            recent=RecentGrowth(rank=3, dp_rank=0, component="encoder_cache_bytes", bytes=int(1.9 * GIB), seconds=40.0),
        )
    ),
    "full in two hours": told(
        growth=Growth(seconds_to_full=7200.0, component="encoder_cache_bytes", ranks=(growing(),))
    ),
    "short, with something to give": told(policy=short_policy(can_release=GIB)),
    "short, all in use": told(
        policy=short_policy(),
        ranks=nothing_to_give(free=1.42),
        growth=Growth(
            recent=RecentGrowth(rank=1, dp_rank=0, component="other_tensors_bytes", bytes=int(6.7 * GIB), seconds=240.0)
        ),
    ),
    "short by a rule on the encoder cache": told(
        policy=policy(
            replace(
                DEVICE,
                name="cache",
                signal="encoder_cache_bytes",
                phase="short",
                ranks=(),
                reason="encoder_cache_bytes is 3.69 GiB over low water on rank 0",
            ),
            level="short",
        )
    ),
    "short on one rank of eight, and only others have much to give": told(
        **{
            **(of_eight := eight(1.42)),
            "ranks": tuple(
                replace(rank, releasable_bytes=205 * MIB) if rank.rank == 3 else rank for rank in of_eight["ranks"]
            ),
            "policy": policy(
                replace(
                    DEVICE,
                    phase="short",
                    ranks=tuple(pressure(rank, short_bytes=1640 * MIB * (rank == 3)) for rank in range(8)),
                    reason="short by 1.60 GiB on rank 3; release could give back 0.2 GiB, too little",
                    hindrance="release could give back 0.2 GiB, too little",
                ),
                level="short",
            ),
        }
    ),
    "short on a rank that can give a part": told(
        policy=short_policy(), ranks=tuple(replace(rank, releasable_bytes=512 * MIB) for rank in ranks())
    ),
    "short, and only observed": told(policy=short_policy(can_release=GIB, mode="observe")),
    "a neighbour takes 44 GiB": told(
        policy=short_policy(),
        ranks=nothing_to_give(free=1.42, shared_with="another process (pid 812, other.py)"),
        growth=Growth(
            recent=RecentGrowth(rank=1, dp_rank=0, component="non_torch_bytes", bytes=44 * GIB, seconds=60.0),
            ranks=(growing(1, pace=0.0, non_torch_bytes=44 * GIB),),
        ),
    ),
    "a neighbour takes 44 GiB, and memory is not short": told(
        ranks=tuple(replace(rank, shared_with="another process (pid 812, other.py)") for rank in ranks()),
        growth=Growth(
            baseline_taken_at=NOW - 7200,
            ranks=(growing(0, pace=0.0), growing(1, pace=0.0, non_torch_bytes=44 * GIB)),
        ),
    ),
    "the same beside a sidecar that knows no start": told(
        growth=Growth(recent=RecentGrowth(rank=1, dp_rank=0, component="non_torch_bytes", bytes=44 * GIB, seconds=13.0))
    ),
    "a cache that grows up to its budget": told(
        growth=Growth(ranks=(replace(growing(), cache_room_bytes=int(2.3 * GIB)),))
    ),
    "another rank than the fullest is full first": told(
        **eight(4.34, seconds_to_full=7200.0, ranks=(replace(growing(5), seconds_to_full=7200.0),)),
    ),
    "somebody outside, nobody knows who": told(
        policy=short_policy(),
        ranks=nothing_to_give(free=1.42),
        growth=Growth(ranks=(growing(1, pace=0.0, non_torch_bytes=44 * GIB),)),
    ),
    "a rest after a relief that was too small": told(policy=RESTING, ranks=nothing_to_give(free=2.0)),
    "host memory is short": told(host=replace(HOST, warnings=(FULL_HOST,), short=FULL_HOST)),
    "the kernel has killed one of its processes": told(host=replace(HOST, warnings=(KILLED,), short=KILLED)),
    "a leak that ends today": told(growth=Growth(series=(leaking(0.25),))),
    "very short": told(policy=short_policy("urgent", can_release=GIB)),
    "very short, all in use": told(policy=short_policy("urgent"), ranks=nothing_to_give(free=0.4)),
    "slow and very short": told({"state": "slow"}, policy=short_policy("urgent"), ranks=nothing_to_give(free=0.4)),
    "slow": told({"state": "slow", "hint": "GET /metrics: no response within 5 s"}),
    "slow and short": told({"state": "slow"}, policy=short_policy()),
    "a starved engine of several": told(
        {"starved": ("engine 1 has scheduled nothing of its 4 waiting requests for 20 s while others work",)}
    ),
    "paused": told({"state": "paused"}),
    "asleep": told({"state": "sleeping"}, policy=policy(level="held")),
    "loading": told({**LOADING, "last_start_seconds": 220.0}, **NOT_READ),
    "loading for the first time": told(LOADING, **NOT_READ),
    "a start failed and the next one loads": told(
        {**LOADING, "loading_since": NOW - 12}, start_failure=FAILED, **NOT_READ
    ),
    "a start failed": told({"state": "starting", "is_loading": False}, start_failure=FAILED, **NOT_READ),
    "nothing answers yet": told(
        {
            "state": "starting",
            "hint": "nothing answers yet at http://127.0.0.1:8000 (connection refused); is vLLM running there?",
        },
        **NOT_READ,
    ),
    "nothing has been asked yet": told({"state": "starting"}, **NOT_READ),
    "a process of a first one runs": told(
        {"state": "starting", "loading_process": "API server, pid 10", "loading_since": NOW - 72},
        **NOT_READ,
    ),
    "starts ended, and a process of the next one runs": told(
        {"state": "starting", "ended_starts": ENDED, "loading_process": "API server", "loading_since": NOW - 5},
        **NOT_READ,
    ),
    "a start failed, and nothing shows the next one": told({"state": "starting"}, start_failure=FAILED, **NOT_READ),
    "one that ended listens anew": told({"state": "starting", "restarts": 1}, **NOT_READ),
    "starts ended, by the log alone": told(
        {
            "state": "starting",
            "ended_starts": ENDED,
        },
        **NOT_READ,
    ),
    "the next one loads after a death": told(LOADING, **(died("device_full") | NOT_READ)),
    "it hangs, with an older incident open": told(
        {"state": "stuck"}, progress=STUCK, incident=died("device_full")["incident"]
    ),
    "it hangs": told({"state": "stuck"}, progress=STUCK),
    "it schedules nothing": told({"state": "stuck"}, progress=STARVED),
    "silent": told(
        {"state": "not_answering", "hint": "it has answered no call for 240 s (GET /health: no response)"},
        stale=True,
    ),
    "dead, killed by the kernel": told({"state": "gone", "is_loading": False}, **died("killed_by_kernel")),
    "dead, the device was full": told({"state": "gone", "is_loading": False}, **died("device_full")),
    "dead, memory was not short": told({"state": "gone", "is_loading": False}, **died("not_short")),
    "dead, its device had room": told({"state": "gone"}, **died("had_room")),
    "dead, nothing is known": told({"state": "gone"}, **died("unknown")),
    "dead, and a process is newer": told(
        {"state": "gone", "loading_process": "API server, pid 4711"}, **died("had_room")
    ),
    "dead before the sidecar began": told({"state": "gone", "is_loading": False}, stale=True, proxy=None),
    "stopped in order": told({"state": "gone", "stopped_at": NOW}, stale=True),
    "readings are stale": told(stale=True, age_seconds=42.0, policy=policy(level="unknown")),
    "nothing read yet": told(**NOT_READ),
    "workers hidden": told(
        {"capabilities": {"collective_rpc": False}, "hint": "start vLLM with --worker-extension-cls X"}, **NOT_READ
    ),
    "a rank is missing": told(ranks_expected=3, ranks_missing=(MISSING,)),
    "short, and a rank is missing": told(ranks_expected=3, policy=short_policy(can_release=GIB)),
    "a rule that cannot act": told(policy=policy(HELD, level="held")),
    "an incident of before": told(
        incident=OpenIncident(id="x", kind="out_of_memory", at=NOW - 900, summary="it ran out")
    ),
}


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def shown(name: str, found: Report) -> str:
    """The whole verdict, as it stands in the golden file."""
    judged = verdict(found)
    deed = judged.do
    parts = {
        "grew": judged.grew,
        "next": judged.next,
        "do": None
        if deed is None
        else f"{deed.text} -> {deed.path} {dict(deed.body or {}) or ''} {deed.bytes or ''}".strip(),
        "step": judged.step,
        "runbook": judged.runbook,
    }
    rows = [f"  {part:<8}{text}" for part, text in parts.items() if text is not None]
    return (
        "\n".join([f"# {name}: {judged.state} ({judged.exit_status}), {judged.reason}", judged.sentence, *rows]) + "\n"
    )


def test_all_that_is_said_is_the_golden_text():
    text = "\n".join(shown(name, found) for name, found in CASES.items())
    assert text == golden(GOLDEN, text)


def test_every_state_and_reason_has_a_case():
    judged = [verdict(found) for found in CASES.values()]
    assert {one.state for one in judged} == set(get_args(VerdictState))
    assert {one.reason for one in judged} == set(get_args(Reason))


@pytest.mark.parametrize("found", CASES.values(), ids=CASES)
def test_a_sentence_is_short_and_its_runbook_and_page_are_served(found):
    judged = verdict(found)
    assert len(judged.sentence.split()) <= 40
    assert "None" not in f"{judged.sentence}{judged.next or ''}{judged.grew or ''}"
    pages = [judged.runbook, None if judged.do is None or judged.do.body else judged.do.path]
    for page in pages:
        if page is not None and page.startswith("docs/runbooks/"):
            assert (RUNBOOKS / page.removeprefix("docs/runbooks/").replace(".html", ".md")).is_file()
    assert judged.state in ("fine", "keeps_up") or (judged.step and judged.runbook)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("short by 1 GiB; nothing to give", "short by 1 GiB"),
        ("nothing to give back (trim: off; reset: off); more", "nothing to give back (trim: off; reset: off)"),
        (f"it failed ({'x ' * 30}y) at once.", "it failed at once"),
        (f"rank 0 waits, {'x ' * 30}", "rank 0 waits …"),
        ("x " * 30, f"{'x ' * 24}…"),
        ("left open (a; b", "left open"),
        ("twice (a (b; c); d) open; shut", "twice (a (b; c); d) open"),
        (f"twice ({'x ' * 30}(b) c), so it is", "twice, so it is"),
    ],
)
def test_what_others_say_is_cut_where_a_clause_ends(said, shown):
    assert brief(said) == shown


def is_closed(text: str) -> bool:
    depths = list(accumulate((letter == "(") - (letter == ")") for letter in text))
    return not depths or (min(depths) >= 0 and depths[-1] == 0)


def test_nothing_is_cut_within_parentheses():
    """Of all that is said anywhere, alone and as the hint of an engine that is silent has it."""
    paragraphs = "\n".join(path.read_text("utf-8") for path in GOLDEN.parent.glob("*.txt")).split("\n\n")
    said = {" ".join(part.split()) for paragraph in paragraphs for part in (paragraph, *paragraph.splitlines())}
    said = set(filter(is_closed, said))
    assert len(said) > 300
    for text in said:
        for whole in (
            text,
            f"it has answered no call for 30 s ({text})",
            f"no rank writes ({text} ({text}); it waits)",
        ):
            assert is_closed(brief(whole)), whole


HELD_CORE = (
    "EngineCore (pid 11) has been stopped by a signal or a debugger for 12 s; requests wait until it goes on: "
    f"{how_to_continue([11])}"
)


@pytest.mark.parametrize("progress", [STARVED, replace(STARVED, verdict="idle", summary="no requests")])
@pytest.mark.parametrize("starved", [(), ("engine 1 schedules nothing: 3 waiting requests",)])
def test_a_process_that_is_held_is_the_cause_whatever_the_ranks_show(progress, starved):
    """It goes on, and nobody has to restart it."""
    hint = "; ".join((*starved, f"{HELD_CORE} ({progress.summary})"))
    judged = verdict(told({"state": "stuck", "hint": hint, "starved": starved}, progress=progress))
    assert (judged.reason, judged.sentence) == (
        "hung",
        "The engine has hung for 4 min: EngineCore (pid 11) has been stopped by a signal or a debugger for 12 s.",
    )
    assert (judged.step or "").startswith("Run `kill -CONT 11`, or detach the debugger; ")


def test_a_worker_that_is_held_is_told_how_to_go_on():
    lost = replace(STUCK, summary=f"rank 1 is held (stopped) for 9 s; 1 other rank alive; {how_to_continue([7, 8])}")
    judged = verdict(told({"state": "stuck", "hint": lost.summary}, progress=lost))
    assert (judged.step or "").startswith("Run `kill -CONT 7 8`, ")


def test_an_engine_that_is_silent_has_one_age():
    lost = replace(STUCK, verdict="unknown", summary="no rank writes: rank 0 has written nothing for 400 s; rank 1 too")
    hint = f"it has answered no call for 240 s (GET /health: no response) ({lost.summary})"
    assert verdict(told({"state": "not_answering", "hint": hint}, progress=lost)).sentence == (
        "The engine has answered nothing for 4 min: no rank writes: rank 0 has written nothing for 400 s."
    )


def test_what_lets_a_rule_act_is_the_thing_to_do():
    change = "Set low_water to 0.9 or more, or lower --gpu-memory-utilization"
    held = replace(HELD, reason=f"{HELD.name}.low_water: 0.4 cannot be reached. {change}", change=change)
    judged = verdict(told(policy=policy(held, level="held")))
    assert (judged.sentence, judged.do.text) == (
        f"Rule {HELD.name} cannot act: low_water: 0.4 cannot be reached.",
        change,
    )


def test_a_rank_that_is_short_is_the_worst_though_another_has_less_free():
    """By rules of their own, on devices of different sizes: the sentence, `status` and `top` name the same rank."""
    parts = eight(1.0)
    (rule,) = parts["policy"].rules
    short = (*rule.ranks[:5], replace(rule.ranks[5], short_bytes=1024 * MIB), *rule.ranks[6:])
    found = told(**{**parts, "policy": policy(replace(rule, ranks=short))})
    assert verdict(found).sentence.startswith("Rank 5 of 8 has too little free, ")
    assert JudgedReport.of(found).rank_order[0] == 5
    assert "\nworst  rank 5: " in status_text(JudgedReport.of(found), (), url="http://h", now=NOW, width=200)
