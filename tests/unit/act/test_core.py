"""The pure policy: what is done at which reading, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from highwater.act.decision import URGENT_COOLDOWN_SECONDS, Decision, decide
from highwater.act.pressure import Facts, unreachable
from highwater.act.rules import Rule
from highwater.act.state import MAX_RELAPSES, Action, LifeMemory, RuleMemory, begin, learn
from highwater.act.views import RuleView, rule_status, summary
from highwater.model.engine import MissingRank
from highwater.model.growth import Growth, RankGrowth
from highwater.model.rank import HostMemory, RankReading
from highwater.model.remedies import TRAITS, RemedyResult, Target
from highwater.model.report import Report
from tests.fakes.ranks import GIB, H100, MIB, reading, report

DEVICE = Rule(
    name="device", signal="device_free_bytes", remedies=("release", "trim_encoder_cache", "reset_encoder_cache")
)
REQUESTED = int(H100 * 0.95)  # slack 3.96 GiB: high 0.99, low 1.98
REST = REQUESTED - 3 * GIB
SHARE = Rule(name="mine", signal="device_used_ratio", high_water=0.96, low_water=0.94, remedies=("release",))


def full(free: float, *, cached: float = 0.0, encoder: float = 0.0, **more: Any) -> RankReading:
    """A rank with so many GiB free; of what is used so much is the reserve's and the encoder cache's."""
    cached_bytes, encoder_bytes = int(cached * GIB), int(encoder * GIB)
    other = H100 - int(free * GIB) - REST - cached_bytes - encoder_bytes
    sizes = {"cached": cached_bytes, "encoder": encoder_bytes, "other": other}
    return reading(rest=REST, requested=REQUESTED, **(sizes | more))


class Watch:
    """The policy with its memory, on a clock."""

    def __init__(self, *rules: Rule, **facts: Any) -> None:
        self.rules, self.facts = rules or (DEVICE,), Facts(life="a", **facts)
        self.memory, self.now = LifeMemory(), 1000.0
        self.decision = Decision()

    def look(self, *ranks: RankReading, after: float = 1.0, **more: Any) -> Action | None:
        return self.see(report(*ranks, **more), after=after)

    def see(self, seen: Report, *, after: float = 1.0) -> Action | None:
        self.now += after
        self.memory, self.decision = decide(self.rules, seen, self.facts, self.memory, self.now)
        return self.decision.action

    def remedy(self, *ranks: RankReading, **more: Any) -> str | None:
        """The name of the one that is run."""
        action = self.look(*ranks, **more)
        return None if action is None else action.remedy

    @property
    def view(self) -> RuleView:
        return self.decision.views[0]

    def act(
        self, before: RankReading | list[RankReading], after: RankReading | list[RankReading], **result: Any
    ) -> str:
        """Look, run what was decided, and take in the readings after it; the remedy's name."""
        return self._act(before, after, 1, result)

    def act_idle(self, before: RankReading, after: RankReading) -> str:
        """The same on an engine without requests."""
        return self._act(before, after, 0, {})

    def _act(
        self,
        before: RankReading | list[RankReading],
        after: RankReading | list[RankReading],
        running: int,
        result: dict[str, Any],
        seen: RankReading | None = None,
    ) -> str:
        befores = before if isinstance(before, list) else [before]
        action = self.look(*befores, running=running)
        assert action is not None
        self.memory = begin(self.memory, action)
        self.now += 0.5
        outcome = RemedyResult(**({"remedy": action.remedy, "outcome": "done"} | result))
        afters = after if isinstance(after, list) else [after]
        self.memory = learn(
            self.memory,
            action,
            outcome,
            before=befores,
            after=afters,
            seen=report(*(afters if seen is None else [seen])),
            facts=self.facts,
            now=self.now,
        )
        return action.remedy


# --- when the default rule acts ---


def test_while_enough_is_free_nothing_is_done():
    """Whatever the share of the device in use: 0.985 here."""
    watch = Watch()
    assert watch.look(full(1.2, cached=3.0)) is None
    assert (watch.view.phase, watch.view.level, watch.view.reason) == ("calm", "calm", None)


def test_under_high_water_what_can_be_given_back_is():
    watch = Watch()
    action = watch.look(full(0.9, cached=3.0))
    assert (action.remedy, action.why) == ("release", "short by 1.08 GiB on rank 0")
    assert watch.view.level == "short"


@pytest.mark.parametrize("engine", ["busy", "stuck", "not_answering", "gone", "starting", "sleeping"])
def test_an_engine_that_does_not_work_is_left_alone(engine):
    """No remedy would be run soon, or none may be."""
    watch = Watch()
    assert watch.look(full(0.1, cached=3.0), state=engine) is None
    assert watch.view.phase == "held"
    assert watch.view.level == ("held" if engine in {"starting", "sleeping"} else "urgent")


@pytest.mark.parametrize("odd", [{"asleep": ("weights", "kv_cache")}, {"asleep": ("kv_cache",)}, {"device": "cpu"}])
def test_a_rank_that_is_asleep_or_on_cpu_is_left_alone(odd):
    watch = Watch()
    assert watch.look(full(0.1, cached=3.0, **odd)) is None
    assert (watch.view.phase, watch.view.level, watch.view.finding) == ("held", "held", None)


def test_with_next_to_no_slack_there_is_no_rule_and_one_finding():
    watch = Watch()
    tight = reading(rest=H100 - 200 * MIB, cached=0, requested=H100 - 100 * MIB)
    assert watch.look(tight) is None
    assert watch.view.phase == "held"
    assert "leaves 100 MiB" in (watch.view.finding or "")


# --- only what can give ---


def test_where_nothing_can_be_given_the_shortage_is_told_and_nothing_is_done():
    watch = Watch()
    assert watch.look(full(0.3)) is None
    assert watch.view.finding == "short by 1.68 GiB on rank 0; nothing here to give back"
    assert watch.view.hindrance == ""
    assert (watch.view.level, watch.view.phase) == ("urgent", "urgent")


def test_an_encoder_cache_that_is_empty_is_never_trimmed_or_reset():
    watch = Watch()
    assert watch.act(full(0.3, cached=0.5), full(0.8)) == "release"
    assert [watch.look(full(0.3), after=3.0) for _ in range(40)] == [None] * 40


def test_a_gain_too_small_is_left():
    """Under 256 MiB a release costs more than it gives."""
    assert Watch().look(full(0.9, cached=0.2)) is None
    assert Watch().look(full(0.9, cached=0.25)) is not None


def test_on_a_small_device_the_gain_is_no_more_than_what_is_missing():
    """With 400 MiB of slack the waters are 200 and 360 MiB: 160 are all that a remedy may have to give."""
    total = 22 * GIB
    used = {"cached": 165 * MIB, "other": 85 * MIB}
    low_on = reading(total=total, requested=int(total * 0.98), rest=total - 400 * MIB, **used)
    assert Watch().remedy(low_on) == "release"


def test_a_remedy_refused_at_the_moment_is_tried_again_after_a_minute():
    """Requests that would not end, a call of somebody else's: that passes, unlike a figure that was too low."""
    rule = SHARE.model_copy(update={"remedies": ("reset_mm_cache",), "cooldown_seconds": 0.0})
    watch, over = Watch(rule), full(0.9)
    assert watch.act(over, over, outcome="refused", reason="requests ran on") == "reset_mm_cache"
    assert [watch.look(over) for _ in range(58)] == [None] * 58
    assert watch.look(over, after=2.0) is not None


def test_a_remedy_that_would_be_refused_is_not_asked_for():
    watch = Watch(unavailable={"trim_encoder_cache": "an encoder-cache connector is configured"})
    assert watch.remedy(full(0.3, encoder=2.0)) == "reset_encoder_cache"


def test_what_gave_less_than_it_had_to_waits_until_it_can_give_more():
    """A release of 1 GiB that gave nothing needs 1 GiB more before it is believed again."""
    watch = Watch()
    before = full(0.3, cached=1.0)
    assert watch.act(before, before) == "release"
    assert [watch.look(before, after=60.0) for _ in range(120)] == [None] * 120
    assert watch.look(full(0.3, cached=1.9)) is None
    assert watch.look(full(0.3, cached=2.0)) is not None


def test_what_gave_what_it_said_is_believed_again_at_any_size():
    watch = Watch()
    assert watch.act(full(0.3, cached=1.0), full(0.3, cached=1.0)) == "release"
    assert watch.look(full(0.3, cached=1.0)) is None
    watch.now += 60.0
    assert watch.act(full(0.3, cached=2.0), full(2.3)) == "release"
    assert watch.remedy(full(0.3, cached=1.0), after=60.0) == "release"


def test_the_workers_own_word_counts_for_a_release():
    watch = Watch()
    before = full(0.3, cached=1.0)
    watch.act(before, before, detail=({"rank": 0, "dp_rank": 0, "freed_bytes": GIB},))
    assert watch.look(before, after=URGENT_COOLDOWN_SECONDS - 0.1) is None
    assert watch.look(before, after=0.1) is not None


def test_a_remedy_is_judged_by_its_own_component():
    watch = Watch(encoder_is_profiled=False)
    before = full(0.9, cached=0.2, encoder=1.0)
    assert watch.act(before, full(1.1, encoder=1.0)) == "trim_encoder_cache"
    run = watch.memory.rules["device"].runs["trim_encoder_cache"]
    assert (run.is_effective, run.freed_bytes) == (False, 0)


def test_a_rank_between_the_waters_is_no_reason_to_go_on():
    """Only those that called for the relief count: rank 0 could give for hours what rank 1 does not get."""
    watch = Watch()
    befores = [full(1.5, cached=2.0), full(0.3, cached=1.0, rank=1)]
    assert watch.act(befores, [full(3.5), full(0.3, cached=1.0, rank=1)]) == "release"
    assert [watch.look(*befores, after=60.0) for _ in range(60)] == [None] * 60


def test_a_figure_that_is_not_known_is_tried_only_where_nothing_may_wait():
    unsure = {"releasable": None}
    assert Watch().look(full(0.8, cached=3.0, **unsure)) is None
    assert Watch().look(full(0.3, cached=3.0, **unsure)) is not None
    assert Watch().look(full(0.3, cached=0.1, **unsure)) is None


# --- the ladder ---


def test_release_comes_first_and_a_trim_follows_where_it_was_not_enough():
    watch = Watch()
    assert watch.act(full(0.2, cached=0.3, encoder=2.0), full(0.5 - 0.02, encoder=2.0)) == "release"
    action = watch.look(full(0.48, encoder=2.0))
    assert action is not None
    low = int(0.9 * (H100 - REQUESTED))
    low = min(low, 2 * ((H100 - REQUESTED) // 4))
    assert (action.remedy, action.target) == ("trim_encoder_cache", Target(free_bytes=low - full(0.48).free_bytes))  # type: ignore[operator]


def test_a_trim_waits_for_urgency_where_the_encoder_was_profiled():
    """vLLM counts on these bytes and would want them back; without a profile they were never its own."""
    short = full(0.8, encoder=2.0)
    assert Watch().look(short) is None
    assert Watch(encoder_is_profiled=False).remedy(short) == "trim_encoder_cache"


def test_a_reset_follows_a_trim_that_did_not_reach_high_water():
    watch = Watch()
    before = full(0.3, encoder=2.0, trimmable=int(0.4 * GIB))
    assert watch.act(before, full(0.45, encoder=1.6)) == "trim_encoder_cache"
    assert watch.remedy(full(0.45, encoder=1.6, trimmable=0)) == "reset_encoder_cache"


def test_without_urgency_the_encoder_cache_is_never_reset():
    watch = Watch(encoder_is_profiled=False, unavailable={"trim_encoder_cache": "refused"})
    assert watch.look(full(0.8, encoder=2.0)) is None


def test_each_remedy_runs_once_in_a_relief():
    watch = Watch()
    short = full(0.3, cached=1.0, encoder=1.0)
    assert watch.act(short, short, detail=({"freed_bytes": GIB},)) == "release"
    assert watch.act(short, full(0.3, cached=2.0)) == "trim_encoder_cache"
    assert watch.look(full(0.3, cached=2.0)) is None
    assert watch.view.phase == "resting"


def test_where_little_is_missing_little_is_enough():
    watch = Watch(encoder_is_profiled=False)
    assert watch.act(full(0.9, cached=1.0, encoder=0.1), full(1.9, encoder=0.1)) == "release"
    assert watch.act(full(1.9, encoder=0.1), full(2.0)) == "trim_encoder_cache"


def test_above_high_water_the_encoder_cache_is_not_reset_however_urgent():
    watch = Watch(unavailable={"trim_encoder_cache": "refused"})
    looks = [watch.look(full(1.2, encoder=2.0, retries=retries)) for retries in (3, 4)]
    assert (looks, watch.view.level) == ([None, None], "urgent")


# --- cooldown ---


def test_a_relief_that_reached_low_water_needs_no_rest():
    watch = Watch()
    assert watch.act(full(0.9, cached=2.0), full(2.9)) == "release"
    assert watch.look(full(0.9, cached=2.0), after=0.2) is not None


def test_after_a_relief_that_fell_short_the_rule_rests():
    watch = Watch()
    watch.act(full(0.9, cached=0.5), full(1.4))
    ended = watch.now
    assert watch.look(full(1.4)) is None
    assert watch.look(full(0.9, cached=0.5), after=30.0) is None
    assert (watch.view.phase, watch.view.cooldown_until) == ("resting", ended + 60.0)
    assert watch.look(full(0.3, cached=0.5)) is not None


def test_urgent_pressure_rests_five_seconds():
    watch = Watch()
    watch.act(full(0.1, cached=0.3), full(0.4))
    assert watch.look(full(0.4)) is None
    assert watch.look(full(0.1, cached=0.3), after=URGENT_COOLDOWN_SECONDS - 1.1) is None
    assert watch.look(full(0.1, cached=0.3), after=0.1) is not None


def test_an_allocation_that_was_retried_is_urgent():
    watch = Watch()
    assert watch.look(full(1.2, cached=1.0, retries=3)) is None
    action = watch.look(full(1.2, cached=1.0, retries=4))
    assert action is not None
    assert watch.view.level == "urgent"
    assert Watch().look(full(2.5, cached=1.0, retries=4)) is None


# --- one life ---


def test_a_new_life_remembers_nothing():
    watch = Watch()
    hopeless = full(0.3, cached=1.0)
    watch.act(hopeless, hopeless)
    assert watch.look(hopeless) is None
    watch.facts = replace(watch.facts, life="b")
    assert watch.look(hopeless, after=0.1) is not None


def test_hopeless_once_is_not_hopeless_for_ever():
    """Live tensors at 0.996; later the same fill is all reserve, and is given back in the first second."""
    watch = Watch()
    for _ in range(500):
        assert watch.look(full(0.3)) is None
    assert watch.look(full(0.3, cached=3.0)) is not None


# --- ranks ---


def test_a_rank_that_falls_silent_does_not_make_the_rule_calm():
    watch = Watch()
    watch.look(full(2.5), full(0.3, rank=1))
    lost = MissingRank(dp_rank=0, pp_rank=0, tp_rank=1, rank=1, status="silent")
    assert watch.look(full(2.5), missing=[lost]) is None
    assert (watch.view.level, watch.view.reason) == ("urgent", "rank 1 is silent: the last known level stands")
    action = watch.look(full(0.3, cached=2.0), missing=[lost])
    assert list(action.ranks) == [(0, 0)]


def test_an_old_reading_of_a_rank_is_silence():
    watch = Watch()
    watch.look(full(2.5), full(0.3, rank=1))
    assert watch.look(full(2.5), full(0.3, cached=3.0, rank=1, age_seconds=20.0)) is None
    assert watch.view.level == "urgent"


def test_each_rank_has_its_own_waters():
    watch = Watch()
    action = watch.look(full(3.0), full(0.9, cached=2.0, rank=1))
    assert list(action.ranks) == [(0, 1)]
    assert watch.view.worst.reading.rank == 1


# --- devices that are not the engine's alone ---


def test_on_a_shared_device_caches_are_not_given_away():
    """A release costs nothing; trim and reset would give the memory to the other process."""
    watch = Watch(shared_cards=frozenset({"node-a/gpu-0-0"}))
    assert watch.look(full(0.3, encoder=2.0)) is None
    assert "the device is shared with another engine" in (watch.view.reason or "")
    assert watch.remedy(full(0.3, encoder=2.0, cached=1.0)) == "release"


def test_what_grew_outside_pytorch_is_named():
    start = full(3.0)
    grown = replace(start, free_bytes=int(0.3 * GIB), used_bytes=H100 - int(0.3 * GIB))
    grown = replace(grown, components=replace(grown.components, non_torch_bytes=GIB + int(2.7 * GIB)))
    watch = Watch(baseline=(start,))
    assert watch.look(grown) is None
    assert "2.70 GiB more than at the start are held outside PyTorch" in (watch.view.finding or "")


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor", "Orin"])
def test_an_integrated_gpu_is_not_trimmed(name):
    """The host's memory is the device's: nothing would be gained."""
    watch = Watch(encoder_is_profiled=False)
    assert watch.look(full(0.8, encoder=2.0, name=name)) is None


# --- an idle engine ---


def test_an_idle_engine_is_tidied_once():
    watch = Watch()
    idle = {"running": 0}
    seen = [watch.look(full(2.5, cached=2.0), **idle) for _ in range(30)]
    assert seen == [None] * 30
    assert watch.act_idle(full(2.5, cached=2.0), full(4.5)) == "release"
    assert [watch.look(full(2.5, cached=2.0), **idle) for _ in range(300)] == [None] * 300
    watch.look(full(2.5, cached=2.0), running=1)
    seen = [watch.look(full(2.5, cached=2.0), **idle) for _ in range(32)]
    assert [action for action in seen if action is not None]


def test_requests_that_come_and_go_between_two_readings_are_traffic():
    watch = Watch()
    seen = [watch.look(full(2.5, cached=2.0), running=0, work_done=float(number // 10)) for number in range(300)]
    assert seen == [None] * 300
    assert [watch.look(full(2.5, cached=2.0), running=0, work_done=29.0) for _ in range(31)][-1] is not None


@pytest.mark.parametrize(
    "seen", [{"cached": 0.9}, {"cached": 2.0, "asleep": ("weights",)}, {"cached": 2.0, "device": "cpu"}]
)
def test_there_is_nothing_to_tidy(seen):
    watch = Watch()
    assert [watch.look(full(2.5, **seen), running=0) for _ in range(60)] == [None] * 60


def test_an_engine_that_does_not_tell_its_requests_is_never_idle():
    watch = Watch()
    assert [watch.look(full(2.5, cached=2.0), running=None) for _ in range(60)] == [None] * 60


def test_an_unknown_figure_is_learnt_by_one_idle_release():
    watch = Watch()
    unsure = full(2.5, cached=2.0, releasable=None)
    for _ in range(31):
        watch.look(unsure, running=0)
    assert watch.act_idle(unsure, unsure) == "release"
    watch.look(unsure, running=1)
    assert [watch.look(unsure, running=0) for _ in range(60)] == [None] * 60


# --- an operator's rules ---


def test_a_rule_by_share_acts_at_its_own_waters():
    watch = Watch(SHARE)
    used = int(0.955 * H100)
    assert watch.look(reading(rest=int(0.9 * H100), cached=used - int(0.9 * H100))) is None
    over = int(0.9 * H100)
    assert watch.remedy(reading(rest=over, cached=int(0.061 * H100))) == "release"


def test_high_water_must_be_sustained_without_a_break():
    watch = Watch(SHARE.model_copy(update={"sustain_seconds": 5.0}))
    low, over = reading(rest=int(0.9 * H100)), reading(rest=int(0.9 * H100), cached=int(0.061 * H100))

    def waits() -> list[bool]:
        return [watch.look(over) is None for _ in range(6)]

    assert waits() == [True] * 5 + [False]
    for interruption in ({}, {"stale": True}):
        watch.memory = LifeMemory(life="a")
        for _ in range(3):
            watch.look(over)
        watch.look(low if not interruption else over, **interruption)
        assert waits() == [True] * 5 + [False]
    watch.memory = LifeMemory(life="a")
    for _ in range(4):
        watch.look(over)
    watch.facts = replace(watch.facts, life="b")
    assert waits() == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("rest", "low", "key"),
    [
        pytest.param(0.95, 0.94, "mine.low_water: 0.94", id="rest between the waters"),
        pytest.param(0.97, 0.94, "mine.low_water: 0.94", id="rest over both"),
    ],
)
def test_a_rule_that_cannot_be_reached_at_rest_never_acts(rest, low, key):
    """It would act without end, on an idle engine too; it says why instead."""
    watch = Watch(SHARE.model_copy(update={"low_water": low, "remedies": tuple(TRAITS)}))
    start = reading(rest=int(rest * H100))
    watch.facts = replace(watch.facts, baseline=(start,))
    over = reading(rest=int(rest * H100), cached=int(0.02 * H100), encoder=int(0.005 * H100))
    assert [watch.look(over) for _ in range(3600)] == [None] * 3600
    assert watch.view.phase == "held"
    assert (watch.view.finding or "").startswith(key)
    assert f"uses {rest:.4g} at rest" in (watch.view.finding or "")


def test_free_bytes_of_an_operator_are_taken_at_their_word():
    rule = Rule(
        name="mine",
        signal="device_free_bytes",
        high_water=4 * GIB,
        low_water=5 * GIB,
        remedies=("trim_encoder_cache",),
    )
    action = Watch(rule).look(full(3.0, encoder=3.0))
    assert action is not None
    assert action.target == Target(free_bytes=2 * GIB + (full(3.0).free_bytes or 0) % 1)


def test_a_cache_rule_trims_to_low_water():
    rule = Rule(
        name="cache", signal="encoder_cache_bytes", high_water=2 * GIB, low_water=GIB, remedies=("trim_encoder_cache",)
    )
    action = Watch(rule).look(full(3.0, encoder=2.5))
    assert action.target == Target(keep_bytes=GIB)


def test_growth_is_shared_by_the_ranks():
    rule = Rule(
        name="grown", signal="device_growth_bytes", high_water=4 * GIB, low_water=GIB, remedies=("trim_encoder_cache",)
    )
    ranks = [full(3.0, encoder=2.5), full(3.0, encoder=2.5, rank=1)]
    watch = Watch(rule)
    action = watch.see(report(*ranks, growth=Growth(since_ready_bytes=5 * GIB)))
    assert action.target == Target(free_bytes=2 * GIB)


def host(used: float) -> HostMemory:
    return HostMemory(cgroup_used_bytes=int(used * GIB), cgroup_limit_bytes=100 * GIB)


def test_a_host_rule_runs_what_its_operator_named_and_not_in_vain_for_long():
    rule = Rule(name="host", signal="host_used_ratio", high_water=0.9, low_water=0.8, remedies=("reset_mm_cache",))
    watch = Watch(rule)
    before = full(3.0, host=host(95))
    assert watch.act(before, before) == "reset_mm_cache"
    seen = [watch.look(before, after=10.0) for _ in range(400)]
    assert [action is not None for action in seen].index(True) == pytest.approx(360, abs=2)


def test_the_three_resets_may_stand_in_a_rule():
    resets = ("reset_mm_cache", "reset_prefix_cache", "reset_encoder_cache")
    watch = Watch(SHARE.model_copy(update={"remedies": resets}))
    before = reading(rest=int(0.9 * H100), encoder=int(0.061 * H100))
    assert watch.act(before, before) == "reset_mm_cache"
    assert watch.act(before, before) == "reset_prefix_cache"
    assert watch.act(before, reading(rest=int(0.9 * H100))) == "reset_encoder_cache"
    watch.look(reading(rest=int(0.9 * H100)))
    assert watch.act(before, reading(rest=int(0.9 * H100))) == "reset_encoder_cache"


def test_rules_take_turns():
    grown = {"high_water": 1, "low_water": 0, "cooldown_seconds": 0.0}
    watch = Watch(
        Rule(name="cache", signal="encoder_cache_bytes", remedies=("reset_encoder_cache",), **grown),
        Rule(name="grown", signal="device_growth_bytes", remedies=("release",), **grown),
    )
    before, seen = full(2.5, cached=1.0, encoder=1.0), []
    for _ in range(4):
        action = watch.see(report(before, growth=Growth(since_ready_bytes=GIB)))
        seen.append(action.remedy)
        watch.memory = begin(watch.memory, action)
        watch.memory = learn(
            watch.memory,
            action,
            RemedyResult(remedy=action.remedy, outcome="done"),
            before=[before],
            after=[full(4.5)],
            seen=report(full(4.5), growth=Growth(since_ready_bytes=0)),
            facts=watch.facts,
            now=watch.now,
        )
    assert seen == ["reset_encoder_cache", "release"] * 2


def test_of_two_rules_the_urgent_one_goes_first():
    cache = Rule(
        name="cache", signal="encoder_cache_bytes", high_water=GIB, low_water=0, remedies=("trim_encoder_cache",)
    )
    action = Watch(cache, DEVICE).look(full(0.3, cached=3.0, encoder=2.0))
    assert (action.rule.name, action.remedy) == ("device", "release")


def test_on_cpu_a_release_has_no_figure():
    rule = Rule(name="grown", signal="device_growth_bytes", high_water=GIB, low_water=0, remedies=("release",))
    action = Watch(rule).see(report(full(2.5, device="cpu", releasable=None), growth=Growth(since_ready_bytes=GIB)))
    assert action.ranks[0, 0][0] is None


def test_an_observed_remedy_is_told_once():
    """Nothing was changed by it, so that nothing is learnt at the next poll."""
    watch = Watch()
    short = full(0.3, cached=2.0)
    assert watch.act(short, [], outcome="observed") == "release"
    assert [watch.look(short, after=10.0) for _ in range(300)] == [None] * 300


@pytest.mark.parametrize(("is_tidying", "cooldown_from"), [(True, 5.0), (False, 9.0)])
def test_an_observed_tidying_begins_no_cooldown(is_tidying, cooldown_from):
    watch = Watch()
    action = watch.look(full(0.3, cached=2.0))
    memory = LifeMemory(rules={action.rule.name: RuleMemory(cooldown_from=5.0)})
    observed, seen = RemedyResult(remedy=action.remedy, outcome="observed"), report()
    action = replace(action, is_tidying=is_tidying)
    memory = learn(memory, action, observed, before=[], after=[], seen=seen, facts=watch.facts, now=9.0)
    assert memory.rules[action.rule.name].cooldown_from == cooldown_from


# --- which rank the words name ---


@pytest.mark.parametrize(("dp_rank", "rank", "name"), [(0, 1, "rank 1"), (1, 0, "rank 1.0"), (2, 1, "rank 2.1")])
def test_the_policys_words_tell_two_engines_ranks_apart(dp_rank, rank, name):
    """Each engine numbers its ranks from 0."""
    other = full(3.9)
    watch = Watch()
    watch.look(other, full(3.5, dp_rank=dp_rank, rank=rank))
    assert f"{name} has " in summary(watch.decision.views, "calm")
    watch.look(other, full(0.5, dp_rank=dp_rank, rank=rank))
    assert f" on {name}" in (watch.view.reason or "")
    too_low = SHARE.model_copy(update={"low_water": 0.5})
    fullest = full(1.0, dp_rank=dp_rank, rank=rank, non_torch=GIB)
    assert f"cannot be reached: {name} uses " in unreachable(too_low, [fullest], []).text


def unmeasured(free: float, cached: float, **more: Any) -> RankReading:
    """A rank whose worker cannot say what a release would give back."""
    return replace(full(free, cached=cached, **more), releasable_bytes=None)


def test_what_the_worker_does_not_know_is_not_called_nothing():
    """6.5 GiB of reserve, of which a part may be fragments: what is known is the most that it can be."""
    watch = Watch()
    assert watch.look(unmeasured(0.9, 6.5)) is None
    reason = watch.view.reason or ""
    assert "what release could give back is not known: 6.50 GiB at most" in reason
    assert "nothing here" not in reason


def test_what_cannot_be_run_here_is_not_called_nothing_either():
    watch = Watch(unavailable={"release": "development mode is off"})
    assert watch.look(full(0.9, cached=2.0)) is None
    assert "release could give back 2.00 GiB" in (watch.view.reason or "")
    assert "and cannot: development mode is off" in (watch.view.reason or "")


def test_a_last_resort_is_said_to_wait_until_memory_is_very_short():
    watch = Watch(unavailable={"trim_encoder_cache": "refused"})
    assert watch.look(full(0.9, encoder=2.0)) is None
    assert "reset_encoder_cache could give back 2.00 GiB, once memory is very short" in (watch.view.reason or "")


def test_a_phase_is_known_since_it_began():
    watch, since = Watch(), []
    for free in (2.5, 2.5, 0.9, 0.9, 2.5):
        watch.look(full(free))
        since.append(watch.memory.rules["device"].since)
    assert since == [1001.0, 1001.0, 1003.0, 1003.0, 1005.0]


def test_too_little_is_said_with_its_size():
    watch = Watch()
    assert watch.look(full(0.9, cached=0.1)) is None
    assert "release could give back 0.10 GiB, too little" in (watch.view.reason or "")


def test_a_cooldown_is_said_only_while_memory_is_short():
    watch = Watch()
    watch.act(full(0.9, cached=0.5), full(1.4))
    assert watch.look(full(1.4)) is None
    assert watch.look(full(6.8), after=2.0) is None
    assert (watch.view.phase, watch.view.reason) == ("calm", None)


def test_a_relief_is_judged_by_the_readings_right_after_it():
    watch = Watch()
    watch._act(full(0.9, cached=2.0), full(2.9), 1, {}, seen=full(0.9, cached=2.0))
    assert watch.look(full(0.9), after=0.2) is None
    assert "did not reach low water" not in (watch.view.reason or "")


@pytest.mark.parametrize(
    ("full_in", "cache_room", "due"),
    [
        (100.0, None, 75.0),  # 3 of 4 GiB at one pace
        (None, None, None),
        (None, 3.5 * GIB, 30.0),  # the cache alone reaches high water, and not the device's end
        (None, 2.0 * GIB, None),
        (200.0, 3.5 * GIB, 30.6),  # at both paces
        (200.0, 2.0 * GIB, 100.0),  # the last GiB before high water at the others' pace
    ],
)
def test_high_water_is_foretold_at_the_cache_s_pace_until_that_is_full(full_in, cache_room, due):
    watch, rank = Watch(), full(4.0)
    watch.look(rank)
    grown = RankGrowth(
        rank=0,
        dp_rank=0,
        bytes_per_second=GIB / 10,
        seconds_to_full=full_in,
        cache_room_bytes=cache_room and int(cache_room),
    )
    seen = report(rank, growth=Growth(ranks=(grown,)))
    (shown,) = rule_status(watch.view, RuleMemory(), seen, {}, to_unix=0.0).ranks
    assert shown.seconds_to_high_water == (due if due is None else pytest.approx(due, rel=0.03))


def test_a_relief_goes_on_for_the_rank_that_nothing_was_read_of_right_after_it():
    watch = Watch()
    short = full(0.9, cached=2.0, rank=1)
    watch._act([full(0.9, cached=2.0), short], full(3.9), 1, {}, seen=short)
    assert watch.memory.rules[watch.rules[0].name].relief == ("release",)


def test_another_remedy_follows_a_release_whose_bytes_came_back_at_once():
    watch = Watch()
    assert watch.act(full(0.3, cached=3.0, encoder=4.0), full(3.3, encoder=4.0)) == "release"
    assert watch.remedy(full(0.3, cached=3.0, encoder=4.0)) == "trim_encoder_cache"


def test_release_is_first_again_once_its_bytes_stayed_away_for_a_while():
    watch = Watch()
    assert watch.act(full(0.3, cached=3.0, encoder=4.0), full(3.3, encoder=4.0)) == "release"
    assert watch.look(full(3.3, encoder=4.0), after=URGENT_COOLDOWN_SECONDS) is None
    assert watch.remedy(full(0.3, cached=3.0, encoder=4.0)) == "release"


def test_release_is_repeated_where_nothing_else_can_give():
    watch = Watch()
    assert watch.act(full(0.3, cached=3.0), full(3.3)) == "release"
    assert watch.remedy(full(0.3, cached=3.0)) == "release"


def test_without_urgency_the_cache_is_left_alone():
    """vLLM would want those bytes back."""
    watch = Watch()
    assert watch.act(full(0.9, cached=2.0, encoder=4.0), full(2.9, encoder=4.0)) == "release"
    assert watch.remedy(full(0.9, cached=2.0, encoder=4.0)) == "release"


def relapse(watch: Watch) -> None:
    assert watch.act(full(0.9, cached=2.0), full(2.9)) == "release"


def test_a_release_that_helps_for_moments_only_rests_after_three():
    watch = Watch()
    for _ in range(1 + MAX_RELAPSES):
        relapse(watch)
    for _ in range(50):
        assert watch.look(full(0.9, cached=2.0)) is None
    assert watch.view.phase == "resting"
    assert "in use again within moments" in (watch.view.reason or "")
    watch.now += 10
    relapse(watch)


def test_urgent_pressure_does_not_wait_for_that_rest():
    watch = Watch()
    for _ in range(1 + MAX_RELAPSES):
        relapse(watch)
    assert watch.look(full(0.9, cached=2.0)) is None
    assert watch.remedy(full(0.2, cached=2.7), after=0.2) == "release"


def test_bytes_that_stayed_away_for_a_while_are_no_relapse():
    watch = Watch()
    for _ in range(3 * MAX_RELAPSES):
        relapse(watch)
        assert watch.look(full(2.9), after=2 * URGENT_COOLDOWN_SECONDS) is None


def test_the_next_remedy_follows_one_that_failed():
    """One rank that cannot release must not keep the others' encoder outputs on their devices."""
    watch = Watch()
    short = full(0.2, cached=3.0, encoder=4.0)
    assert watch.act(short, [], outcome="failed") == "release"
    assert watch.act(short, full(3.0, encoder=1.2)) == "trim_encoder_cache"
