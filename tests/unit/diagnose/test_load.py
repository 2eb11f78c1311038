"""Each rule for a measured load: the seed story changed so that it has something to say, and when it is silent.

What it says then stands in golden/findings.txt (test_wording.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.diagnose.case import of_load
from highwater.diagnose.evidence import Experiment, Gap, Moment
from highwater.diagnose.finding import ADVICE, Finding, all_advice
from highwater.diagnose.rules.book import RULES, judged
from highwater.model.engine import EngineLoad
from highwater.model.policy import RankPressure
from highwater.model.rank import Budget, Components, Device, EncoderCache, HostMemory, RankReading, TorchMemory
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event
from tests.unit.terminal.measure.story import CACHED, GROWN, MIB, START, moment, story

GIB = 1024 * MIB
ROOT = Path(__file__).resolve().parents[3]
LAST = "after trim_encoder_cache"


def at(e: Experiment, name: str, **parts: int) -> Experiment:
    """The experiment with another reading at that moment."""
    old = e.moment(name)
    made = moment(name, old.title, old.at, **parts)
    return replace(e, moments=tuple(made if each is old else each for each in e.moments))


def changed(e: Experiment, name: str, rank: int, **values: object) -> Experiment:
    """The experiment with other values of one rank at that moment; components and torch by their own names."""
    old = e.moment(name)
    ranks = tuple(_with(point, values) if point.rank == rank else point for point in old.ranks)
    made = Moment(name=name, title=old.title, at=old.at, ranks=ranks)
    return replace(e, moments=tuple(made if each is old else each for each in e.moments))


def _with(point: RankReading, values: dict[str, object]) -> RankReading:
    parts = {name: value for name, value in values.items() if name in Components.__dataclass_fields__}
    torch = {name: value for name, value in values.items() if name in TorchMemory.__dataclass_fields__}
    own = {name: value for name, value in values.items() if name not in parts and name not in torch}
    moved = sum(value - getattr(point.components, name) for name, value in parts.items())
    made = replace(point, components=replace(point.components, **parts), torch=replace(point.torch, **torch))
    return replace(made, used_bytes=point.used_bytes + moved, **own)


def event(kind: str, **values: object) -> Event:
    return Event(id=1, at=START + 10, kind=kind, summary="it happened", **values)


def findings(e: Experiment) -> list[Finding]:
    return judged(of_load(e))


def found(name: str, e: Experiment) -> Finding | None:
    return next((finding for finding in findings(e) if finding.name == name), None)


def ended(**values: object) -> Experiment:
    return replace(STORY, load=replace(STORY.load, **values))


def with_policy(*ranks: RankPressure, mode: str = "observe") -> Experiment:
    rules = (replace(STORY.policy.rules[0], ranks=ranks),)
    return replace(STORY, policy=replace(STORY.policy, rules=rules, mode=mode))


STORY = story()
FIRST, SECOND = STORY.policy.rules[0].ranks
HELD = EncoderCache(entries=31, device_bytes=2 * GIB, capacity_embeds=16_384, embeds=8_192)
# Recorders list the entries without embeddings: the budget in bytes is by what all entries hold together.
UNSIZED = replace(
    STORY,
    caches=tuple(
        replace(seen, largest=tuple(replace(row, embeds=None) for row in seen.largest)) for seen in STORY.caches
    ),
)
HALF_UNSIZED = changed(changed(UNSIZED, "after", 0, encoder_cache=HELD), "after", 1, encoder_cache=HELD)
GREW_ON_HOST = changed(
    STORY,
    "after",
    0,
    host_memory=HostMemory(rss_bytes=7 * GIB, cgroup_used_bytes=132 * GIB, cgroup_limit_bytes=512 * GIB),
)
UNSEEN = changed(STORY, "after", 0, peak_allocated_bytes=60 * GIB)
TROUBLE = changed(changed(STORY, "before", 0, alloc_retries=3), "after", 0, alloc_retries=5, ooms=1)
GAVE = event("reset", trigger="policy", result=RemedyResult(remedy="release", outcome="done", credited_bytes=GIB))
ACTED = replace(STORY, events=(GAVE, GAVE, replace(GAVE, trigger="reclaim")))
NOTHING_FREED = RemedyResult(
    remedy="reset_mm_cache", outcome="done", freed_bytes=0, frees="images", does_not_free="device memory"
)
IDLE = tuple((START + second, EngineLoad(requests_running=0, requests_waiting=0)) for second in range(60))
OTHERS = tuple((START + at, EngineLoad(requests_running=2, requests_waiting=0)) for at in (-1, 63))

# Its weight and words stand in golden/findings.txt.
FOUND: list[tuple[str, Experiment]] = [
    ("growth", at(STORY, "after", encoder=GROWN * 84 // 100, cached=CACHED + GROWN * 16 // 100)),
    ("growth", at(STORY, "after", encoder=GROWN // 2, cached=CACHED + GROWN // 2)),
    ("no_growth", at(STORY, "after", encoder=10 * MIB)),
    ("no_growth", at(STORY, "after", encoder=0)),
    ("headroom", STORY),
    ("headroom", at(STORY, "peak")),
    # On CPU other processes use the machine's memory too: total less used is not what is left.
    ("headroom", changed(STORY, "peak", 0, free_bytes=100 * MIB)),
    ("encoder_cache", STORY),
    ("encoder_cache", at(STORY, "after", encoder=GIB)),
    ("encoder_cache", UNSIZED),
    ("encoder_cache", HALF_UNSIZED),
    ("unused_reserve", STORY),
    ("non_torch_growth", changed(STORY, "after", 0, non_torch_bytes=3 * GIB)),
    ("kv_pool", STORY),
    ("kv_pool", changed(STORY, "after", 1, kv_cache_bytes=GIB)),
    # Ranks of one machine have one figure.
    ("host_growth", GREW_ON_HOST),
    ("skew", changed(STORY, "peak", 1, non_torch_bytes=3 * GIB)),
    ("transient_peak", STORY),
    ("unseen_peak", UNSEEN),
    ("unseen_peak", replace(UNSEEN, recorded=False)),
    ("alloc_retries", TROUBLE),
    ("ooms", TROUBLE),
    ("over_high_water", STORY),
    ("over_high_water", with_policy(replace(SECOND, high_free_bytes=1000 * MIB))),
    ("policy_acted", ACTED),
    ("others_acted", ACTED),
    ("ineffective_remedies", replace(STORY, remedies=(NOTHING_FREED,))),
    ("refused_remedies", STORY),
    ("refused_remedies", replace(STORY, remedies=tuple(replace(step, outcome="failed") for step in STORY.remedies))),
    ("gave_back", STORY),
    ("gave_back", at(STORY, LAST, encoder=GROWN // 2)),
    ("no_remedy", replace(STORY, remedies=(), moments=STORY.moments[:4])),
    ("load_failed", ended(exit_code=1)),
    ("load_failed", ended(exit_code=137, signal_name="SIGKILL")),
    ("load_failed", ended(exit_code=0, interrupted=True)),
    ("engine_incident", replace(STORY, events=(event("incident"),))),
    ("engine_restarted", changed(STORY, LAST, 0, pid=9999)),
    ("stale_readings", replace(STORY, gaps=(Gap(start=START + 10, end=START + 40),))),
    ("no_traffic", at(replace(STORY, traffic=IDLE), "peak")),
    ("other_traffic", replace(STORY, traffic=OTHERS)),
]
NOT_FOUND: list[tuple[str, Experiment]] = [
    ("growth", at(STORY, "after", encoder=10 * MIB)),
    ("growth", at(STORY, "after", encoder=0)),
    ("no_growth", STORY),
    ("unused_reserve", at(STORY, "after", cached=500 * MIB)),
    ("non_torch_growth", STORY),
    ("host_growth", STORY),
    ("host_growth", replace(GREW_ON_HOST, device=Device(type="cpu"))),
    ("skew", STORY),
    ("transient_peak", at(STORY, "peak", encoder=GROWN)),
    ("unseen_peak", STORY),
    ("alloc_retries", STORY),
    ("ooms", STORY),
    ("over_high_water", with_policy(FIRST, SECOND, mode="act")),
    ("over_high_water", with_policy(replace(FIRST, high_free_bytes=500 * MIB))),
    ("over_high_water", with_policy()),
    ("policy_acted", replace(STORY, events=(replace(GAVE, at=START + 1000),))),
    ("others_acted", STORY),
    ("ineffective_remedies", STORY),
    ("gave_back", replace(STORY, moments=STORY.moments[:4])),
    ("no_remedy", STORY),
    ("load_failed", STORY),
    ("engine_incident", STORY),
    ("engine_restarted", STORY),
    ("stale_readings", STORY),
    ("no_traffic", STORY),
    ("no_traffic", at(replace(STORY, traffic=IDLE[:2]), "peak")),
    ("other_traffic", STORY),
]


@pytest.mark.parametrize(("name", "e"), NOT_FOUND)
def test_it_is_not_found(name, e):
    assert found(name, e) is None


def test_nothing_is_said_of_what_is_not_known():
    e = STORY
    nothing = dict.fromkeys(("total_bytes", "free_bytes", "used_bytes", "used_ratio", "encoder_cache"))
    parts = {"torch": TorchMemory(), "components": Components(), "budget": Budget(), "host_memory": HostMemory()}
    bare = tuple(
        replace(m, ranks=tuple(replace(reading, **nothing, **parts) for reading in m.ranks)) for m in e.moments
    )
    empty = replace(e, moments=bare, remedies=(), caches=(), traffic=(), events=(), policy=None, series={})
    # Of the version alone something is known.
    assert {finding.name for finding in findings(empty)} <= {"encoder_not_profiled"}
    assert findings(replace(empty, moments=())) == []


def test_every_finding_is_documented():
    page = (ROOT / "docs" / "experiment.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", "\n".join(re.findall(r"(?m)^\| (`.*?) \|", page))))
    assert documented == {rule.name for rule in RULES if "load" in rule.where}


def test_the_story_is_told_the_weightiest_first():
    told = findings(STORY)
    weights = [("likely", "clue", "note").index(finding.weight) for finding in told]
    assert weights == sorted(weights)
    assert told[0].name == "headroom"
    assert len({finding.name for finding in told}) == len(told)


def test_advice_is_given_once_and_only_what_this_engine_can_follow():
    """vLLM 0.12 has no reset of the encoder cache."""
    advice = all_advice(findings(STORY))
    assert len(set(advice)) == len(advice)
    assert ADVICE["trim_encoder_cache"] in advice
    assert ADVICE["reset_encoder_cache"] not in advice


def test_other_workers_than_at_the_start_are_not_compared():
    assert changed(STORY, LAST, 0, pid=9999).change("before", LAST, "used_bytes") is None
