"""Each transition of a rule: a reading and a time go in, a decision comes out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from app.policy import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MOST_SECONDS,
    FALLING_SIGNALS,
    HOUR_SECONDS,
    SIGNAL_REMEDIES,
    Decision,
    Effect,
    HourlyBudget,
    Rule,
    RuleMemory,
    Trial,
    baseline_problem,
    decide,
    effect,
    judge,
    resting_value,
    signal_value,
    target,
    usable_from,
)
from app.policy_settings import DEFAULT_RULES
from app.readings import UNNEEDED, EngineStatus, Growth, RankFreed, Report, Target
from app.remedies import REMEDIES
from tests.fakes.engine import CACHED, IMAGE_BYTES, IMAGES, MIB, TOTAL, USED_AFTER, USED_READY, FakeEngine

RULE = Rule(
    name="device",
    signal="device_used_ratio",
    high_water=0.93,
    low_water=0.90,
    sustain_seconds=5.0,
    cooldown_seconds=60.0,
    min_effect_bytes=32 * MIB,
    remedies=("release", "reset_encoder_cache"),
)
ABOVE = RuleMemory(phase="above", since=1.0)
NOTHING = Decision()


def freed_bytes(freed: int | None) -> Effect | None:
    return None if freed is None else Effect(judged_bytes=freed, total_bytes=freed)


def tried(memory, remedy, now, *, freed: int | None = 0, value: float = 0.95, outcome="done", rule=RULE) -> RuleMemory:
    """How the memory stands after that remedy ran."""
    trial = Trial(at=now, outcome=outcome, effect=freed_bytes(freed))
    return judge(rule, replace(memory, phase="acting"), remedy, trial, value=value)


def test_below_high_water_nothing_happens():
    """A rule at rest stays at rest."""
    assert decide(RULE, RuleMemory(), 0.929, 10.0) == (RuleMemory(), NOTHING)


def test_high_water_must_be_sustained():
    """Nothing before sustain_seconds, the first remedy once they are over; high water itself counts."""
    memory, decision = decide(RULE, RuleMemory(), 0.93, 10.0)
    assert (memory.phase, memory.reached_since, decision) == ("below", 10.0, NOTHING)
    memory, decision = decide(RULE, memory, 0.94, 14.9)
    assert (memory.phase, decision) == ("below", NOTHING)
    memory, decision = decide(RULE, memory, 0.94, 15.0)
    assert (memory.phase, decision) == ("acting", Decision(action="act", remedy="release"))


def test_a_dip_starts_the_wait_anew():
    """Sustained means without a break."""
    memory, _ = decide(RULE, RuleMemory(), 0.95, 10.0)
    memory, _ = decide(RULE, memory, 0.92, 13.0)
    memory, decision = decide(RULE, memory, 0.95, 16.0)
    assert (memory.reached_since, decision) == (16.0, NOTHING)


@pytest.mark.parametrize("phase", ["below", "above", "acting", "cooling", "futile"])
def test_no_fresh_reading_no_action(phase):
    """Without a value nothing is done and nothing is forgotten."""
    memory = RuleMemory(phase=phase, reached_since=1.0)
    assert decide(RULE, memory, None, 1e6) == (memory, NOTHING)


def test_no_second_action_while_one_runs():
    """One remedy at a time."""
    assert decide(RULE, RuleMemory(phase="acting"), 1.0, 100.0) == (RuleMemory(phase="acting"), NOTHING)


def test_relief_rests_the_rule():
    """At low water after a remedy: cooling, for cooldown_seconds."""
    memory = tried(ABOVE, "release", 100.0, freed=64 * MIB, value=0.90)
    assert (memory.phase, memory.cooling_until, memory.worn_out) == ("cooling", 160.0, {})


def test_no_reset_inside_cooldown():
    """However high the signal: nothing until the rest is over, and then the wait starts anew."""
    cooling = tried(ABOVE, "release", 100.0, freed=64 * MIB, value=0.5)
    assert decide(RULE, cooling, 1.0, 159.9) == (cooling, NOTHING)
    memory, decision = decide(RULE, cooling, 1.0, 160.0)
    assert (memory.phase, memory.reached_since, decision) == ("below", 160.0, NOTHING)


def test_not_enough_tries_the_next_remedy_at_once():
    """What helped but not enough rests for cooldown_seconds; the next in order is tried."""
    memory = tried(ABOVE, "release", 100.0, freed=64 * MIB, value=0.92)
    assert (memory.phase, memory.worn_out) == ("above", {})
    memory, decision = decide(RULE, memory, 0.92, 101.0)
    assert decision.remedy == "reset_encoder_cache"


def test_the_ladder_starts_again_after_a_rest():
    """Remedies that help are not worn out: they only rest."""
    memory = tried(ABOVE, "release", 100.0, freed=64 * MIB, value=0.92)
    memory = tried(memory, "reset_encoder_cache", 101.0, freed=64 * MIB, value=0.92)
    assert decide(RULE, memory, 0.92, 159.0) == (memory, NOTHING)
    assert decide(RULE, memory, 0.92, 160.0)[1].remedy == "release"


def test_between_the_waters_a_rule_that_is_above_goes_on():
    """Hysteresis: it stops at low water, not at high water."""
    assert decide(RULE, ABOVE, 0.91, 10.0)[1].remedy == "release"
    memory, decision = decide(RULE, ABOVE, 0.90, 10.0)
    assert (memory.phase, decision) == ("below", NOTHING)


@pytest.mark.parametrize(
    ("outcome", "freed"),
    [("done", 32 * MIB - 1), ("done", None), ("refused", None), ("failed", 64 * MIB)],
)
def test_too_little_wears_a_remedy_out(outcome, freed):
    """Less than min_effect_bytes, refused or failed: a backoff, and the next remedy's turn."""
    memory = tried(ABOVE, "release", 100.0, freed=freed, outcome=outcome)
    assert memory.worn_out["release"].retry_at == 100.0 + BACKOFF_FIRST_SECONDS
    assert decide(RULE, memory, 0.95, 101.0)[1].remedy == "reset_encoder_cache"


def test_of_what_was_only_observed_nothing_is_learnt():
    """It rests like any other, and a backoff from before it stays as it was."""
    memory = tried(ABOVE, "release", 100.0, freed=None, outcome="observed")
    assert (memory.worn_out, memory.trials["release"].at) == ({}, 100.0)
    assert decide(RULE, memory, 0.95, 101.0)[1].remedy == "reset_encoder_cache"
    worn = tried(ABOVE, "release", 100.0)
    assert tried(worn, "release", 200.0, freed=None, outcome="observed").worn_out == worn.worn_out


def test_all_worn_out_is_futile_until_a_backoff_is_over():
    """Nothing more is tried; the first backoff that ends brings the remedy back."""
    memory = tried(tried(ABOVE, "release", 100.0), "reset_encoder_cache", 110.0)
    memory, decision = decide(RULE, memory, 0.95, 159.0)
    assert (memory.phase, decision) == ("futile", NOTHING)
    assert decide(RULE, memory, 0.95, 160.0)[1].remedy == "release"


def test_a_worn_out_remedy_comes_back_when_the_signal_has_moved():
    """Half the way from low to high water is news; anything less is not. It still rests its cooldown."""
    memory = tried(tried(ABOVE, "release", 100.0), "reset_encoder_cache", 100.0)
    worn = {name: replace(entry, retry_at=1e6) for name, entry in memory.worn_out.items()}
    memory = replace(memory, worn_out=worn)
    assert decide(RULE, memory, 0.964, 170.0)[1] == NOTHING
    assert decide(RULE, memory, 0.966, 159.0)[1] == NOTHING
    assert decide(RULE, memory, 0.966, 170.0)[1].remedy == "release"


def test_the_backoff_doubles_up_to_its_cap_and_help_forgives():
    """60 s, 120 s ... one hour; the first success starts over."""
    memory, seen = ABOVE, []
    for round_number in range(8):
        memory = tried(memory, "release", round_number * 1e5)
        seen.append(memory.worn_out["release"].backoff_seconds)
    assert seen == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, BACKOFF_MOST_SECONDS, BACKOFF_MOST_SECONDS]
    memory = tried(memory, "release", 1e7, freed=64 * MIB)
    assert memory.worn_out == {}
    assert tried(memory, "release", 2e7).worn_out["release"].backoff_seconds == BACKOFF_FIRST_SECONDS


def test_a_remedy_that_frees_no_bytes_is_judged_by_the_signal():
    """reset_prefix_cache frees blocks: relief is proof enough."""
    memory = tried(ABOVE, "release", 100.0, freed=0, value=0.5)
    assert (memory.phase, memory.worn_out) == ("cooling", {})


def test_relief_by_itself_needs_no_remedy():
    """From futile back to rest when the traffic has gone."""
    memory, decision = decide(RULE, RuleMemory(phase="futile", reached_since=1.0), 0.5, 100.0)
    assert (memory.phase, memory.reached_since, memory.since, decision) == ("below", None, 100.0, NOTHING)


def test_a_falling_signal_is_mirrored():
    """Free bytes: less is worse, and low water lies over high water."""
    rule = replace(RULE, signal="device_free_bytes", high_water=2e9, low_water=6e9, sustain_seconds=0.0)
    assert decide(rule, RuleMemory(), 2.1e9, 1.0)[1] == NOTHING
    memory, decision = decide(rule, RuleMemory(), 2e9, 1.0)
    assert decision.remedy == "release"
    memory = tried(memory, "release", 2.0, freed=64 * MIB, value=6e9, rule=rule)
    assert memory.phase == "cooling"
    assert rule.moved(1e9, since=3e9)
    assert not rule.moved(3e9, since=1e9)


def test_what_a_remedy_freed_last_is_remembered():
    """For /policy; a measurement that failed forgets nothing, and its outcome is told all the same."""
    memory = tried(tried(ABOVE, "release", 100.0, freed=5), "release", 200.0, freed=None, outcome="failed")
    assert memory.trials["release"] == Trial(at=200.0, outcome="failed", effect=freed_bytes(5))


def test_what_freed_nothing_never_helped():
    """Also where no least effect is asked for: the ladder would go round for ever."""
    rule = replace(RULE, min_effect_bytes=0)
    assert set(tried(ABOVE, "release", 100.0, freed=0, rule=rule).worn_out) == {"release"}
    assert set(tried(ABOVE, "release", 100.0, freed=None, rule=rule).worn_out) == {"release"}
    assert tried(ABOVE, "release", 100.0, freed=1, rule=rule).worn_out == {}


def test_a_remedy_is_judged_by_the_worst_rank_alone():
    """Much freed where there was room anyway relieves nobody."""
    trial = Trial(at=100.0, outcome="done", effect=Effect(judged_bytes=0, total_bytes=64 * MIB))
    assert set(judge(RULE, replace(ABOVE, phase="acting"), "release", trial, value=0.95).worn_out) == {"release"}


def test_it_is_told_when_a_remedy_may_run_again():
    """After its rest, or its backoff where that is longer, unless the signal has moved meanwhile."""
    assert usable_from(RULE, ABOVE, "release", 0.95) < 0
    helped = tried(ABOVE, "release", 100.0, freed=64 * MIB)
    assert usable_from(RULE, helped, "release", 0.95) == 160.0
    worn = tried(tried(ABOVE, "release", 100.0), "release", 200.0)
    assert usable_from(RULE, worn, "release", 0.95) == usable_from(RULE, worn, "release", None) == 320.0
    assert usable_from(RULE, worn, "release", 0.97) == 260.0


# --- the budget ---


def test_a_budget_counts_the_last_hour_only():
    """Each one that was started leaves it an hour later, to the second."""
    budget = HourlyBudget(most=2).spend(0.0).spend(100.0)
    assert (budget.allows(3599.0), budget.allows_from(3599.0)) == (False, HOUR_SECONDS)
    assert (budget.allows(3600.0), budget.allows_from(3600.0)) == (True, 3600.0)
    assert budget.recent(3600.0) == (100.0,)
    assert budget.spend(3600.0).started == (100.0, 3600.0)


def test_a_budget_that_was_lowered_waits_for_enough_to_leave():
    """Three spent of what is now two: the second oldest must leave too."""
    budget = replace(HourlyBudget(most=3).spend(1.0).spend(2.0).spend(3.0), most=2)
    assert budget.allows_from(10.0) == 3602.0
    assert not budget.allows(3601.0)
    assert budget.allows(3602.0)


def test_a_budget_of_none_never_allows():
    """And no time is told at which it would."""
    assert (HourlyBudget(most=0).allows(1e9), HourlyBudget(most=0).allows_from(1e9)) == (False, None)


def test_nothing_is_done_over_budget():
    """What would be done is told, and the rule stays above: it is not futile."""
    spent = HourlyBudget(most=1).spend(50.0)
    memory, decision = decide(RULE, ABOVE, 0.95, 100.0, spent)
    assert (memory.phase, decision) == ("above", Decision(action="over_budget", remedy="release"))
    assert decide(RULE, memory, 0.95, 3650.0, spent)[1] == Decision(action="act", remedy="release")


# --- the baseline ---


def test_a_rule_under_the_baseline_is_reported():
    """It would fire for ever: vLLM takes its share of the device by design."""
    problem = baseline_problem(RULE, 0.95)
    assert problem is not None
    assert "device_used_ratio" in problem
    assert "Raise it, or lower the engine's --gpu-memory-utilization" in problem
    assert baseline_problem(RULE, 0.9254) is None
    assert baseline_problem(RULE, None) is None


@pytest.mark.parametrize(
    ("signal", "high", "value", "advice"),
    [
        (
            "device_free_bytes",
            6e9,
            5e9,
            "at or over the engine's own baseline .* Lower it, or lower",
        ),
        ("host_used_ratio", 0.5, 0.6, "at or under .* Raise it, or free memory on the host"),
    ],
)
def test_the_advice_fits_the_signal(signal, high, value, advice):
    """Less free is worse; and no setting of the engine's frees the host."""
    problem = baseline_problem(replace(RULE, signal=signal, high_water=high, low_water=high), value)
    assert problem is not None
    assert re.search(advice, problem)


@pytest.mark.parametrize(
    ("signal", "value"),
    [("device_used_ratio", USED_READY / TOTAL), ("device_free_bytes", TOTAL - USED_READY), ("host_used_ratio", 0.25)],
)
def test_encoder_outputs_are_no_part_of_the_baseline(signal, value):
    """A sidecar that is started beside a busy engine meets a full cache, and a reset takes that away."""
    fake = FakeEngine()
    fake.serve_images()
    assert resting_value(signal, fake.readings()) == value


def test_signals_that_start_at_nothing_have_no_baseline():
    """Growth, cache and KV use are 0 at rest, and no high water may lie there."""
    judged = {signal for signal in SIGNAL_REMEDIES if resting_value(signal, FakeEngine().readings()) is not None}
    assert judged == {"device_used_ratio", "device_free_bytes", "host_used_ratio"}
    assert all(resting_value(signal, ()) is None for signal in SIGNAL_REMEDIES)


@pytest.mark.parametrize("signal", SIGNAL_REMEDIES)
def test_every_remedy_of_a_signal_exists(signal):
    """The policy names no remedy that nobody can run."""
    assert SIGNAL_REMEDIES[signal]
    assert set(SIGNAL_REMEDIES[signal]) <= {remedy.name for remedy in REMEDIES}


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: rule.name)
def test_the_default_rules_own_all_that_can_lower_their_signal(rule):
    """A reset that cannot help only costs cache hits; one that can is not left out."""
    assert rule.rule().remedies == SIGNAL_REMEDIES[rule.signal]


# --- signals ---


def report(fake: FakeEngine | None = None) -> Report:
    fake = fake or FakeEngine()
    status = EngineStatus(url="http://engine", state="ready", kv_cache_usage_ratio=0.41)
    growth = Growth(since_ready_bytes=7, host_since_ready_bytes=9)
    return Report(engine=status, stale=False, ranks=fake.readings(), growth=growth)


@pytest.mark.parametrize(
    ("signal", "value"),
    [
        ("device_used_ratio", USED_AFTER / TOTAL),
        ("device_free_bytes", TOTAL - USED_AFTER),
        ("device_growth_bytes", 7),
        ("encoder_cache_bytes", IMAGES * IMAGE_BYTES),
        ("host_used_ratio", 0.25),
        ("host_growth_bytes", 9),
        ("kv_cache_usage_ratio", 0.41),
    ],
)
def test_a_signal_is_that_of_the_worst_rank(signal, value):
    """One full device is enough to fail a request; the fullest counts, and an average would hide it."""
    fake = FakeEngine()
    fake.serve_images()
    fake.workers[0].forget_entries()
    fake.workers[0].release()
    assert signal_value(signal, report(fake)) == value


@pytest.mark.parametrize("signal", SIGNAL_REMEDIES)
def test_a_signal_that_nobody_told_is_none(signal):
    """No ranks, no load: not known, and so nothing is done."""
    assert signal_value(signal, Report(engine=EngineStatus(url="http://engine", state="ready"))) is None


def test_less_is_worse_only_for_what_is_free():
    """The mirrored signals are named."""
    assert set(SIGNAL_REMEDIES) >= FALLING_SIGNALS == {"device_free_bytes"}


# --- how far a trim goes ---


def full_on_rank_1(count: int = IMAGES) -> Report:
    """Rank 1 holds that many images, rank 0 one."""
    fake = FakeEngine()
    fake.serve_images(count)
    first = fake.workers[0]
    first.entries = dict(list(first.entries.items())[:1])
    return report(fake)


@pytest.mark.parametrize(
    ("signal", "low", "free_bytes"),
    [
        ("device_used_ratio", 0.951, USED_AFTER - int(0.951 * TOTAL)),
        ("device_free_bytes", TOTAL - USED_AFTER + 1000 * MIB, 1000 * MIB),
        ("device_free_bytes", TOTAL - USED_AFTER + 0.5, 32 * MIB),
        ("device_used_ratio", 0.5, IMAGES * IMAGE_BYTES),
    ],
    ids=["down to low water", "up to low water", "never less than an effect", "never more than is there"],
)
def test_a_trim_goes_to_low_water_on_the_worst_rank(signal, low, free_bytes):
    """Least harm: what is not needed stays on the device."""
    assert target(replace(RULE, signal=signal, low_water=low), full_on_rank_1()) == Target(free_bytes=free_bytes)


def test_growth_is_shared_out_among_the_ranks():
    """It is summed over them; a trim frees on each."""
    grown = replace(full_on_rank_1(), growth=Growth(since_ready_bytes=1001 * MIB + 1))
    rule = replace(RULE, signal="device_growth_bytes", high_water=MIB, low_water=MIB)
    assert target(rule, grown) == Target(free_bytes=500 * MIB + 1)


def test_a_cache_is_trimmed_to_what_it_may_keep():
    """On every rank the same low water, exactly."""
    rule = replace(RULE, signal="encoder_cache_bytes", high_water=2000.0, low_water=1000.5)
    assert target(rule, full_on_rank_1()) == Target(keep_bytes=1000)


@pytest.mark.parametrize("signal", [name for name, remedies in SIGNAL_REMEDIES.items() if "trim" not in str(remedies)])
def test_signals_that_no_trim_lowers_have_no_target(signal):
    """The remedies that take none ignore it."""
    assert target(replace(RULE, signal=signal), full_on_rank_1()) == UNNEEDED


@pytest.mark.parametrize("signal", ["device_used_ratio", "device_free_bytes", "device_growth_bytes"])
def test_where_nothing_is_known_a_trim_takes_nothing(signal):
    """None would mean all that is not needed."""
    nobody = Report(engine=EngineStatus(url="http://engine", state="ready"))
    assert target(replace(RULE, signal=signal), nobody) == Target(free_bytes=0)


# --- what a remedy did ---


def before_and_after(change) -> tuple:
    """Readings around a change of an engine with two ranks, of which rank 1 is the fullest."""
    fake = FakeEngine()
    fake.serve_images()
    fake.workers[1].entries["more"] = IMAGE_BYTES
    before = fake.readings()
    change(fake.workers)
    return before, fake.readings()


def by_rank(first: int | None, second: int | None) -> tuple[RankFreed, ...]:
    return tuple(RankFreed(rank=rank, dp_rank=0, freed_bytes=size) for rank, size in enumerate((first, second)))


@pytest.mark.parametrize("signal", ["device_used_ratio", "device_free_bytes"])
def test_a_device_signal_is_judged_where_it_is_worst(signal):
    """Rank 0 gave back plenty; rank 1 is the fullest, and gave back nothing."""
    seen = before_and_after(lambda workers: workers[0].release())
    assert effect(signal, *seen) == Effect(judged_bytes=0, total_bytes=CACHED, ranks=by_rank(CACHED, 0))
    seen = before_and_after(lambda workers: workers[1].release())
    assert effect(signal, *seen) == Effect(judged_bytes=CACHED, total_bytes=CACHED, ranks=by_rank(0, CACHED))


def test_growth_is_judged_by_all_ranks_together():
    """As it is counted."""
    seen = before_and_after(lambda workers: workers[0].release())
    freed = effect("device_growth_bytes", *seen)
    assert freed is not None
    assert (freed.judged_bytes, freed.total_bytes) == (CACHED, CACHED)


def test_a_cache_signal_is_judged_by_the_cache():
    """What goes back to the allocator counts, though the device does not see it yet."""
    seen = before_and_after(lambda workers: [worker.forget_entries() for worker in workers])
    held = IMAGES * IMAGE_BYTES
    ranks = by_rank(held, held + IMAGE_BYTES)
    expected = Effect(judged_bytes=held + IMAGE_BYTES, total_bytes=2 * held + IMAGE_BYTES, ranks=ranks)
    assert effect("encoder_cache_bytes", *seen) == expected


@pytest.mark.parametrize("signal", ["host_used_ratio", "host_growth_bytes"])
def test_ranks_of_one_host_count_once(signal):
    """Both see the same memory."""

    def less(workers):
        for worker in workers:
            worker.host_used -= 64 * MIB

    expected = Effect(judged_bytes=64 * MIB, total_bytes=64 * MIB, ranks=by_rank(64 * MIB, 64 * MIB))
    assert effect(signal, *before_and_after(less)) == expected


def test_ranks_are_told_apart_by_their_engine_too():
    """Data-parallel engines number their ranks from 0 each."""
    before, after = before_and_after(lambda workers: workers[0].release())
    there = [replace(before[1], dp_rank=1, rank=0), before[0]]
    now = [replace(after[0]), replace(after[1], dp_rank=1, rank=0)]
    freed = effect("device_used_ratio", there, now)
    assert freed is not None
    assert (freed.judged_bytes, freed.total_bytes) == (0, CACHED)


def test_what_was_not_measured_has_no_effect_to_tell():
    """No reading after it, no worst rank in it, or blocks instead of bytes: None, never 0."""
    before, after = before_and_after(lambda workers: workers[0].release())
    assert effect("device_used_ratio", before, ()) is None
    assert effect("kv_cache_usage_ratio", before, after) is None
    lost = effect("device_used_ratio", before, after[:1])
    assert lost == Effect(judged_bytes=None, total_bytes=CACHED, ranks=by_rank(CACHED, 0)[:1])
