"""Each rule: what it says of the seed story changed so that it has something to say, and when it is silent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.experiment import findings as rules
from app.experiment.experiment import (
    Experiment,
    Gap,
    Happened,
    Moment,
    RankPoint,
    RemedyStep,
    Traffic,
)
from app.experiment.findings import RULES, all_advice, findings, size
from app.incidents import advice as known
from app.readings import Components, Device, TorchMemory
from tests.unit.experiment.story import CACHED, GROWN, MIB, START, TOTAL, moment, story

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


def _with(point: RankPoint, values: dict[str, object]) -> RankPoint:
    parts = {name: value for name, value in values.items() if name in Components.__dataclass_fields__}
    torch = {name: value for name, value in values.items() if name in TorchMemory.__dataclass_fields__}
    own = {name: value for name, value in values.items() if name not in parts and name not in torch}
    moved = sum(value - getattr(point.components, name) for name, value in parts.items())
    made = replace(point, components=replace(point.components, **parts), torch=replace(point.torch, **torch))
    return replace(made, used_bytes=point.used_bytes + moved, **own)


def event(kind: str, **values: object) -> Happened:
    return Happened(at=START + 10, kind=kind, summary="it happened", **values)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_nothing_of_what_is_not_known(rule):
    """No finding rests on a number that is not there."""
    e = story()
    bare = tuple(
        replace(m, ranks=tuple(RankPoint(rank=p.rank, pid=p.pid, at=p.at) for p in m.ranks)) for m in e.moments
    )
    empty = replace(e, moments=bare, steps=(), caches=(), traffic=(), events=(), rules=(), series={})
    assert rule(empty) is None
    assert rule(replace(empty, moments=())) is None


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_documented(rule):
    """And goes by the name of its finding."""
    assert f"`{rule.__name__}`" in (ROOT / "docs" / "experiment.md").read_text()
    finding = rule(story())
    assert finding is None or finding.name == rule.__name__


def test_the_story_is_told_the_weightiest_first():
    """What the operator of the story needed to know, and nothing twice."""
    found = findings(story())
    weights = [("act", "look", "note").index(finding.weight) for finding in found]
    assert weights == sorted(weights)
    assert found[0].name == "headroom"
    assert len({finding.name for finding in found}) == len(found)


def test_advice_is_given_once_and_only_what_this_engine_can_follow():
    """vLLM 0.12 has no reset of the encoder cache."""
    advice = all_advice(findings(story()))
    assert len(set(advice)) == len(advice)
    assert known.TRIM_ENCODER_CACHE in advice
    assert known.RESET_ENCODER_CACHE not in advice


def test_growth_names_the_component_and_the_reset_that_does_not_touch_it():
    """The sentence of the story."""
    e = at(story(), "after", encoder=GROWN * 84 // 100, cached=CACHED + GROWN * 16 // 100)
    title = rules.growth(e).title
    assert "is 84% encoder cache, which reset_mm_cache does not touch; trim or reset the encoder cache" in title
    assert title.startswith("the load's growth of 7.39 GiB over 2 ranks")


def test_growth_of_two_kinds_names_both():
    """Where no component has most of it."""
    e = at(story(), "after", encoder=GROWN // 2, cached=CACHED + GROWN // 2)
    assert "is 50% allocator reserve and 50% encoder cache" in rules.growth(e).title


@pytest.mark.parametrize(("encoder", "told"), [(10 * MIB, "as before"), (0, "as before")])
def test_no_growth_is_told_too(encoder, told):
    """A few MiB move by themselves."""
    finding = rules.growth(at(story(), "after", encoder=encoder))
    assert (finding.weight, told in finding.title) == ("note", True)


def test_headroom_is_told_in_images():
    """Of the largest size seen; little of it is to be acted on."""
    finding = rules.headroom(story())
    assert finding.weight == "act"
    assert "rank 0 had 572 MiB left (0.9%): room for 4 more cached images" in finding.title
    roomy = rules.headroom(at(story(), "peak"))
    assert (roomy.weight, "room for 38 more" in roomy.title) == ("note", True)


def test_a_plateau_is_no_leak():
    """The budget in bytes, by the entries' own size."""
    full = rules.encoder_plateau(story())
    assert "stands at its budget (3.69 GiB of about 3.70 GiB a rank)" in full.title
    e = story()
    half = replace(e, caches=tuple(replace(each, device_bytes=GIB) for each in e.caches))
    assert "27% full and can grow by 2.70 GiB more" in rules.encoder_plateau(half).title


def test_fragmentation_tells_the_allocators_settings():
    """Reserved and not allocated, on the fullest rank; those of the NPU."""
    finding = rules.fragmentation(story())
    assert "holds 5.65 GiB on rank 0 that no tensor uses" in finding.title
    assert known.NPU_EXPANDABLE_SEGMENTS in finding.advice
    assert known.NPU_MAX_SPLIT in finding.advice
    assert rules.fragmentation(at(story(), "after", cached=500 * MIB)) is None


def test_non_torch_growth_is_not_pytorchs():
    """Workspaces, collectives, other processes."""
    e = changed(story(), "after", 0, non_torch_bytes=3 * GIB)
    finding = rules.non_torch_growth(e)
    assert "grew by 1.85 GiB" in finding.title
    assert known.HCCL_BUFFSIZE in finding.advice
    assert rules.non_torch_growth(story()) is None


def test_the_kv_pool_does_not_move_by_design():
    """And if it does, that is worth a look."""
    assert "40.12 GiB, before and after, by design" in rules.kv_pool(story()).title
    moved = changed(story(), "after", 1, kv_cache_bytes=GIB)
    assert rules.kv_pool(moved).weight == "look"


def test_host_growth_points_at_the_processor_cache():
    """Ranks of one machine tell one figure; on CPU the host is the device."""
    e = changed(story(), "after", 0, host_used_bytes=132 * GIB, host_rss_bytes=7 * GIB)
    finding = rules.host_growth(e)
    assert "host memory grew by 4.00 GiB under the load; the workers themselves by 1.00 GiB" in finding.title
    assert known.MM_PROCESSOR_CACHE in finding.advice
    assert rules.host_growth(replace(e, device=Device(type="cpu"))) is None
    assert rules.host_growth(story()) is None


def test_skew_names_the_component():
    """The fullest rank runs out first."""
    e = changed(story(), "peak", 1, non_torch_bytes=3 * GIB)
    finding = rules.skew(e)
    assert "rank 1 used 1.85 GiB more than rank 0" in finding.title
    assert "non-torch" in finding.text
    assert rules.skew(story()) is None


def test_a_peak_above_what_is_left_is_needed_on_the_way():
    """300 MiB a rank of the story are other tensors."""
    assert "600 MiB over" in rules.transient_peak(story()).title
    assert rules.transient_peak(at(story(), "peak", encoder=GROWN)) is None


def test_pytorchs_own_record_shows_what_no_reading_saw():
    """Only where the load raised it."""
    e = changed(story(), "after", 0, peak_allocated_bytes=60 * GIB)
    finding = rules.unseen_peak(e)
    assert "rank 0 had" in finding.title
    assert finding.advice == ()
    assert rules.unseen_peak(replace(e, recorded=False)).advice[0].setting == "recorder_dir"
    assert rules.unseen_peak(story()) is None


def test_allocator_trouble_counts_what_came_under_the_load():
    """Retries and errors from before it are not its own."""
    e = changed(changed(story(), "before", 0, alloc_retries=3), "after", 0, alloc_retries=5, ooms=1)
    assert "tried again 2 times and gave up once" in rules.allocator_trouble(e).title
    assert rules.allocator_trouble(story()) is None


def test_a_policy_that_only_observes_is_told_what_it_let_pass():
    """Mode act would have done something."""
    finding = rules.over_high_water(story())
    assert "rank 0 had 572 MiB free at the peak, less than high water (1.52 GiB)" in finding.title
    assert "would have run release," in finding.text
    assert rules.over_high_water(replace(story(), policy_mode="act")) is None


def test_each_rank_is_held_against_its_own_high_water():
    """What leaves enough free on one device may be too little on another."""
    (rule,) = story().rules
    second = replace(rule, high_free={(0, 1): 1000 * MIB})
    assert rules.over_high_water(replace(story(), rules=(second,))).title.startswith("rank 1 had")
    assert rules.over_high_water(replace(story(), rules=(replace(rule, high_free={(0, 0): 500 * MIB}),))) is None
    assert rules.over_high_water(replace(story(), rules=(replace(rule, high_free={}),))) is None


def test_what_the_policy_did_is_part_of_the_figures():
    """Growth and peak would be higher without it; what others did is told apart."""
    done = event("reset", trigger="policy", remedy="release", freed_bytes=GIB)
    acted = replace(story(), events=(done, done, replace(done, trigger="reclaim")))
    assert "acted 2 times under the load and freed 2.00 GiB" in rules.policy_acted(acted).title
    assert "asked for a reset while the load ran, which freed 1.00 GiB" in rules.others_acted(acted).title
    late = replace(story(), events=(replace(done, at=START + 1000),))
    assert rules.policy_acted(late) is None


def test_a_remedy_that_answers_well_and_frees_nothing_is_named():
    """200 says nothing of memory."""
    step = RemedyStep(
        remedy="reset_mm_cache", outcome="done", freed_bytes=0, frees="images", does_not_free="device memory"
    )
    finding = rules.ineffective_remedies(replace(story(), steps=(step,)))
    assert finding.title == "reset_mm_cache was done and freed nothing on the device"
    assert "frees images, and not device memory" in finding.text
    assert rules.ineffective_remedies(story()) is None


def test_a_refused_remedy_is_told_with_its_reason():
    """One that failed weighs more."""
    finding = rules.refused_remedies(story())
    assert (finding.weight, "can hang vLLM 0.12.0" in finding.text) == ("note", True)
    failed = tuple(replace(step, outcome="failed") for step in story().steps)
    assert rules.refused_remedies(replace(story(), steps=failed)).weight == "look"


def test_what_came_back_and_what_did_not():
    """And where the rest is."""
    e = story()
    assert "gave back all of the growth of 7.39 GiB and 10.91 GiB that was held before" in rules.gave_back(e).title
    stays = replace(e, moments=e.moments[:4])
    assert rules.gave_back(stays) is None
    last = "after trim_encoder_cache"
    finding = rules.gave_back(at(e, last, encoder=GROWN // 2))
    assert "of the growth of 7.39 GiB, 3.69 GiB did not come back" in finding.title
    assert "in encoder cache" in finding.text


def test_without_remedies_it_is_told_how_to_try_them():
    """Where there is something to give back."""
    e = replace(story(), steps=(), moments=story().moments[:4])
    assert "--remedies all" in rules.no_remedy(e).text
    assert rules.no_remedy(story()) is None


@pytest.mark.parametrize(
    ("values", "weight", "told"),
    [
        ({"exit_code": 1}, "act", "failed with exit code 1 after 62 s"),
        ({"exit_code": 137, "signal_name": "SIGKILL"}, "act", "exit code 137 (SIGKILL)"),
        ({"exit_code": 0, "interrupted": True}, "look", "was interrupted after 62 s"),
    ],
)
def test_a_load_that_failed_casts_doubt(values, weight, told):
    """How it ended, and that the figures are of less than was meant."""
    e = story()
    finding = rules.load_failed(replace(e, load=replace(e.load, **values)))
    assert (finding.weight, told in finding.title) == (weight, True)
    assert rules.load_failed(e) is None


def test_an_incident_under_the_load_is_pointed_at():
    """The black box knows more of it."""
    finding = rules.engine_incident(replace(story(), events=(event("incident"),)))
    assert "highwater incidents" in finding.text
    assert rules.engine_incident(story()) is None


def test_other_workers_than_at_the_start_are_not_compared():
    """Their difference is no growth."""
    e = changed(story(), "after trim_encoder_cache", 0, pid=9999)
    assert rules.engine_restarted(e).weight == "act"
    assert e.change("before", "after trim_encoder_cache", "used_bytes") is None
    assert rules.engine_restarted(story()) is None


def test_times_without_a_reading_are_told():
    """The peak may be higher than shown."""
    e = replace(story(), gaps=(Gap(start=START + 10, end=START + 40),))
    assert "for 30 s under the load there was no reading" in rules.stale_readings(e).title
    assert rules.stale_readings(story()) is None


def test_a_load_that_never_reached_the_engine_is_suspected():
    """Nothing ran in many readings, and nothing moved."""
    idle = tuple(Traffic(at=START + second, running=0, waiting=0) for second in range(60))
    e = at(replace(story(), traffic=idle), "peak")
    assert "no request was seen" in rules.no_traffic(e).title
    assert rules.no_traffic(replace(e, traffic=idle[:2])) is None
    assert rules.no_traffic(story()) is None


def test_requests_of_others_are_told():
    """Before the load, or after it."""
    e = story()
    before = Traffic(at=START - 1, running=2, waiting=0)
    after = Traffic(at=START + 63, running=1, waiting=0)
    assert "before the load and after it" in rules.other_traffic(replace(e, traffic=(before, after))).title
    assert rules.other_traffic(e) is None


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 MiB"), (1_500_000, "1.4 MiB"), (122 * MIB, "122 MiB"), (TOTAL, "60.96 GiB")]
)
def test_sizes_are_told_in_the_unit_that_fits(count, told):
    """GiB from one on."""
    assert size(count) == told
