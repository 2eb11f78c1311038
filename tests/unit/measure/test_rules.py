"""Each rule: what it says of the seed story changed so that it has something to say, and when it is silent."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.diagnose.advice import ADVICE
from highwater.diagnose.finding import Finding, all_advice
from highwater.diagnose.rules.book import ANYWHERE, KNOWN_CAUSES
from highwater.measure import rules as load_rules
from highwater.measure.experiment import Experiment, Gap, Moment
from highwater.measure.rules import LOAD_RULES, findings
from highwater.readings.engine import EngineLoad
from highwater.readings.event import Event
from highwater.readings.policy import RankPressure, RuleStatus
from highwater.readings.rank import Budget, Components, Device, EncoderCache, HostMemory, RankReading, TorchMemory
from highwater.readings.remedy import RemedyResult
from highwater.units import size_text
from tests.unit.measure.story import CACHED, GROWN, MIB, START, moment, story

GIB = 1024 * MIB
ROOT = Path(__file__).resolve().parents[3]


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


def found(name: str, e: Experiment) -> Finding | None:
    """What the rule book or the load's own rules say under that name."""
    return next((finding for finding in findings(e) if finding.name == name), None)


def test_nothing_is_said_of_what_is_not_known():
    """No finding rests on a number that is not there."""
    e = story()
    nothing = dict.fromkeys(("total_bytes", "free_bytes", "used_bytes", "used_ratio", "encoder_cache"))
    parts = {"torch": TorchMemory(), "components": Components(), "budget": Budget(), "host_memory": HostMemory()}
    bare = tuple(
        replace(m, ranks=tuple(replace(reading, **nothing, **parts) for reading in m.ranks)) for m in e.moments
    )
    empty = replace(e, moments=bare, remedies=(), caches=(), traffic=(), events=(), policy=None, series={})
    # Of the version alone something is known.
    assert {finding.name for finding in findings(empty)} <= {"encoder_not_profiled"}
    assert findings(replace(empty, moments=())) == ()


def test_every_finding_is_documented():
    """Under its name, and no others are."""
    page = (ROOT / "docs" / "experiment.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", "\n".join(re.findall(r"(?m)^\| (`.*?) \|", page))))
    names = {rule.__name__ for rule in (*KNOWN_CAUSES, *ANYWHERE, *LOAD_RULES)}
    assert documented == names


def test_the_story_is_told_the_weightiest_first():
    """What the operator of the story needed to know, and nothing twice."""
    found = findings(story())
    weights = [("likely", "clue", "note").index(finding.weight) for finding in found]
    assert weights == sorted(weights)
    assert found[0].name == "headroom"
    assert len({finding.name for finding in found}) == len(found)


def test_advice_is_given_once_and_only_what_this_engine_can_follow():
    """vLLM 0.12 has no reset of the encoder cache."""
    advice = all_advice(findings(story()))
    assert len(set(advice)) == len(advice)
    assert ADVICE["trim_encoder_cache"] in advice
    assert ADVICE["reset_encoder_cache"] not in advice


def test_growth_names_the_component_and_the_reset_that_does_not_touch_it():
    """The sentence of the story."""
    e = at(story(), "after", encoder=GROWN * 84 // 100, cached=CACHED + GROWN * 16 // 100)
    title = found("growth", e).title
    assert "84% encoder cache, which reset_mm_cache does not touch; trim or reset the encoder cache" in title
    assert title.startswith("used memory grew by 7.39 GiB over 2 ranks under the load: ")


def test_growth_of_two_kinds_names_both():
    """Where no component has most of it."""
    e = at(story(), "after", encoder=GROWN // 2, cached=CACHED + GROWN // 2)
    assert "50% allocator reserve and 50% encoder cache" in found("growth", e).title


def host(used: int, rss: int) -> HostMemory:
    return HostMemory(rss_bytes=rss * GIB, cgroup_used_bytes=used * GIB, cgroup_limit_bytes=512 * GIB)


@pytest.mark.parametrize("encoder", [10 * MIB, 0])
def test_no_growth_is_told_too(encoder):
    """A few MiB move by themselves."""
    e = at(story(), "after", encoder=encoder)
    assert found("growth", e) is None
    assert f"moved by {size_text(2 * encoder, signed=True)}" in found("no_growth", e).title
    assert load_rules.no_growth(story()) is None


def test_headroom_is_told_in_images():
    """Of the largest size seen; little of it is to be acted on."""
    finding = load_rules.headroom(story())
    assert finding.weight == "likely"
    assert "rank 0 had 572 MiB left (0.9%): room for 4 more cached images" in finding.title
    roomy = load_rules.headroom(at(story(), "peak"))
    assert (roomy.weight, "room for 38 more" in roomy.title) == ("note", True)


def test_headroom_is_what_the_table_calls_free():
    """On CPU other processes use the machine's memory too: total less used is not what is left."""
    e = changed(story(), "peak", 0, free_bytes=100 * MIB)
    assert "rank 0 had 100 MiB left" in load_rules.headroom(e).title


def test_a_plateau_is_no_leak():
    """The budget in bytes, by the entries' own size."""
    full = found("encoder_cache", story())
    assert "It was full (100% of 3.70 GiB): more load makes it no larger." in full.text
    half = at(story(), "after", encoder=GIB)
    assert "27% full and can grow by 2.70 GiB more" in found("encoder_cache", half).text


def test_a_plateau_is_seen_where_recorders_list_the_entries():
    """Those have no embeddings: the budget in bytes is by what all entries hold together."""
    e = story()
    unsized = [replace(seen, largest=tuple(replace(row, embeds=None) for row in seen.largest)) for seen in e.caches]
    e = replace(e, caches=tuple(unsized))
    assert "% full" not in found("encoder_cache", e).text
    cache = EncoderCache(entries=31, device_bytes=2 * GIB, capacity_embeds=16_384, embeds=8_192)
    told = found("encoder_cache", changed(changed(e, "after", 0, encoder_cache=cache), "after", 1, encoder_cache=cache))
    assert "50% full and can grow by 2.00 GiB more" in told.text


def test_fragmentation_tells_the_allocators_settings():
    """Reserved and not allocated, on the fullest rank; those of the NPU."""
    finding = found("unused_reserve", story())
    assert "held 5.6" in finding.title
    assert "on rank 0 that no tensor used" in finding.title
    assert ADVICE["npu_expandable_segments"] in finding.advice
    assert ADVICE["npu_max_split"] in finding.advice
    assert found("unused_reserve", at(story(), "after", cached=500 * MIB)) is None


def test_non_torch_growth_is_not_pytorchs():
    """Workspaces, collectives, other processes."""
    e = changed(story(), "after", 0, non_torch_bytes=3 * GIB)
    finding = load_rules.non_torch_growth(e)
    assert "grew by 1.85 GiB" in finding.title
    assert ADVICE["hccl_buffsize"] in finding.advice
    assert load_rules.non_torch_growth(story()) is None


def test_the_kv_pool_does_not_move_by_design():
    """And if it does, that is worth a look."""
    assert "40.12 GiB, before and after, by design" in load_rules.kv_pool(story()).title
    moved = changed(story(), "after", 1, kv_cache_bytes=GIB)
    assert load_rules.kv_pool(moved).weight == "clue"


def test_host_growth_points_at_the_processor_cache():
    """Ranks of one machine tell one figure; on CPU the host is the device."""
    e = changed(story(), "after", 0, host_memory=host(132, 7))
    finding = load_rules.host_growth(e)
    assert "host memory grew by 4.00 GiB under the load; the workers themselves by 1.00 GiB" in finding.title
    assert ADVICE["mm_processor_cache"] in finding.advice
    assert load_rules.host_growth(replace(e, device=Device(type="cpu"))) is None
    assert load_rules.host_growth(story()) is None


def test_skew_names_the_component():
    """The fullest rank runs out first."""
    e = changed(story(), "peak", 1, non_torch_bytes=3 * GIB)
    finding = found("skew", e)
    assert "rank 1 used 1.85 GiB more than rank 0" in finding.title
    assert "non-torch" in finding.text
    assert found("skew", story()) is None


def test_a_peak_above_what_is_left_is_needed_on_the_way():
    """300 MiB a rank of the story are other tensors."""
    assert "600 MiB over" in load_rules.transient_peak(story()).title
    assert load_rules.transient_peak(at(story(), "peak", encoder=GROWN)) is None


def test_pytorchs_own_record_shows_what_no_reading_saw():
    """Only where the load raised it."""
    e = changed(story(), "after", 0, peak_allocated_bytes=60 * GIB)
    finding = load_rules.unseen_peak(e)
    assert "rank 0 had" in finding.title
    assert finding.advice == ()
    assert load_rules.unseen_peak(replace(e, recorded=False)).advice[0].setting == "recorder_dir"
    assert load_rules.unseen_peak(story()) is None


def test_allocator_trouble_counts_what_came_under_the_load():
    """Retries and errors from before it are not its own."""
    e = changed(changed(story(), "before", 0, alloc_retries=3), "after", 0, alloc_retries=5, ooms=1)
    assert "tried again 2 times" in found("alloc_retries", e).title
    assert "gave up once" in found("ooms", e).title
    assert found("alloc_retries", e).weight == found("ooms", e).weight == "likely"
    assert found("alloc_retries", story()) is found("ooms", story()) is None


def test_a_policy_that_only_observes_is_told_what_it_let_pass():
    """Mode act would have done something."""
    finding = load_rules.over_high_water(story())
    assert "rank 0 had 572 MiB free at the peak, less than high water (1.52 GiB)" in finding.title
    assert "would have run release," in finding.text
    assert load_rules.over_high_water(replace(story(), policy=replace(story().policy, mode="act"))) is None


def test_each_rank_is_held_against_its_own_high_water():
    """What leaves enough free on one device may be too little on another."""
    e = story()
    (rule,) = e.policy.rules
    first, second = rule.ranks

    def said(*ranks: RankPressure) -> Finding | None:
        rules: tuple[RuleStatus, ...] = (replace(rule, ranks=ranks),)
        return load_rules.over_high_water(replace(e, policy=replace(e.policy, rules=rules)))

    assert said(replace(second, high_free_bytes=1000 * MIB)).title.startswith("rank 1 had")
    assert said(replace(first, high_free_bytes=500 * MIB)) is None
    assert said() is None


def test_what_the_policy_did_is_part_of_the_figures():
    """Growth and peak would be higher without it; what others did is told apart."""
    done = event("reset", trigger="policy", result=RemedyResult(remedy="release", outcome="done", credited_bytes=GIB))
    acted = replace(story(), events=(done, done, replace(done, trigger="reclaim")))
    assert "acted 2 times under the load and gave back 2.00 GiB" in load_rules.policy_acted(acted).title
    assert "asked for a reset while the load ran, which gave back 1.00 GiB" in load_rules.others_acted(acted).title
    late = replace(story(), events=(replace(done, at=START + 1000),))
    assert load_rules.policy_acted(late) is None


def test_a_remedy_that_answers_well_and_frees_nothing_is_named():
    """200 says nothing of memory."""
    step = RemedyResult(
        remedy="reset_mm_cache", outcome="done", freed_bytes=0, frees="images", does_not_free="device memory"
    )
    finding = load_rules.ineffective_remedies(replace(story(), remedies=(step,)))
    assert finding.title == "reset_mm_cache was done and freed nothing on the device"
    assert "frees images, and not device memory" in finding.text
    assert load_rules.ineffective_remedies(story()) is None


def test_a_refused_remedy_is_told_with_its_reason():
    """One that failed weighs more."""
    finding = load_rules.refused_remedies(story())
    assert (finding.weight, "can hang vLLM 0.12.0" in finding.text) == ("note", True)
    failed = tuple(replace(step, outcome="failed") for step in story().remedies)
    assert load_rules.refused_remedies(replace(story(), remedies=failed)).weight == "clue"


def test_what_came_back_and_what_did_not():
    """And where the rest is."""
    e = story()
    assert "gave back all of the growth of 7.39 GiB and 10.91 GiB that was held before" in load_rules.gave_back(e).title
    stays = replace(e, moments=e.moments[:4])
    assert load_rules.gave_back(stays) is None
    last = "after trim_encoder_cache"
    finding = load_rules.gave_back(at(e, last, encoder=GROWN // 2))
    assert "of the growth of 7.39 GiB, 3.69 GiB did not come back" in finding.title
    assert "in encoder cache" in finding.text


def test_without_remedies_it_is_told_how_to_try_them():
    """Where there is something to give back."""
    e = replace(story(), remedies=(), moments=story().moments[:4])
    assert "--remedies all" in load_rules.no_remedy(e).text
    assert load_rules.no_remedy(story()) is None


@pytest.mark.parametrize(
    ("values", "weight", "told"),
    [
        ({"exit_code": 1}, "likely", "failed with exit code 1 after 1 min 2 s"),
        ({"exit_code": 137, "signal_name": "SIGKILL"}, "likely", "exit code 137 (SIGKILL)"),
        ({"exit_code": 0, "interrupted": True}, "clue", "was interrupted after 1 min 2 s"),
    ],
)
def test_a_load_that_failed_casts_doubt(values, weight, told):
    """How it ended, and that the figures are of less than was meant."""
    e = story()
    finding = load_rules.load_failed(replace(e, load=replace(e.load, **values)))
    assert (finding.weight, told in finding.title) == (weight, True)
    assert load_rules.load_failed(e) is None


def test_an_incident_under_the_load_is_pointed_at():
    """What is kept of it says more."""
    finding = load_rules.engine_incident(replace(story(), events=(event("incident"),)))
    assert "highwater incidents" in finding.text
    assert load_rules.engine_incident(story()) is None


def test_other_workers_than_at_the_start_are_not_compared():
    """Their difference is no growth."""
    e = changed(story(), "after trim_encoder_cache", 0, pid=9999)
    assert load_rules.engine_restarted(e).weight == "likely"
    assert e.change("before", "after trim_encoder_cache", "used_bytes") is None
    assert load_rules.engine_restarted(story()) is None


def test_times_without_a_reading_are_told():
    """The peak may be higher than shown."""
    e = replace(story(), gaps=(Gap(start=START + 10, end=START + 40),))
    assert "for 30 s under the load there was no reading" in load_rules.stale_readings(e).title
    assert load_rules.stale_readings(story()) is None


def test_a_load_that_never_reached_the_engine_is_suspected():
    """Nothing ran in many readings, and nothing moved."""
    idle = tuple((START + second, EngineLoad(requests_running=0, requests_waiting=0)) for second in range(60))
    e = at(replace(story(), traffic=idle), "peak")
    assert "no request was seen" in load_rules.no_traffic(e).title
    assert load_rules.no_traffic(replace(e, traffic=idle[:2])) is None
    assert load_rules.no_traffic(story()) is None


def test_requests_of_others_are_told():
    """Before the load, or after it."""
    e = story()
    before = (START - 1, EngineLoad(requests_running=2, requests_waiting=0))
    after = (START + 63, EngineLoad(requests_running=1, requests_waiting=0))
    assert "before the load and after it" in load_rules.other_traffic(replace(e, traffic=(before, after))).title
    assert load_rules.other_traffic(e) is None
