"""Each transition of a rule: a reading and a time go in, a decision comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.policy import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MOST_SECONDS,
    FALLING_SIGNALS,
    SIGNAL_REMEDIES,
    Decision,
    Rule,
    RuleMemory,
    baseline_problem,
    decide,
    judge,
    signal_value,
)
from app.policy_settings import DEFAULT_RULES
from app.readings import EngineStatus, Growth, Report
from app.remedies import REMEDIES
from tests.fakes.engine import IMAGE_BYTES, IMAGES, MIB, TOTAL, USED_AFTER, FakeEngine

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


def tried(memory, remedy, now, *, freed: int | None = 0, value: float = 0.95, **how) -> RuleMemory:
    """How the memory stands after that remedy ran."""
    how = {"outcome": "done", **how}
    return judge(RULE, replace(memory, phase="acting"), remedy, freed_bytes=freed, value=value, now=now, **how)


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
    assert (memory.worn_out, memory.last_run) == ({}, {"release": 100.0})
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
    memory = judge(rule, memory, "release", outcome="done", freed_bytes=64 * MIB, value=6e9, now=2.0)
    assert memory.phase == "cooling"
    assert rule.moved(1e9, since=3e9)
    assert not rule.moved(3e9, since=1e9)


def test_what_a_remedy_freed_last_is_remembered():
    """For /policy; a measurement that failed forgets nothing."""
    memory = tried(ABOVE, "release", 100.0, freed=5)
    assert tried(memory, "release", 200.0, freed=None, outcome="failed").last_freed == {"release": 5}


def test_a_rule_under_the_baseline_is_reported():
    """It would fire for ever: vLLM takes its share of the device by design."""
    problem = baseline_problem(RULE, 0.95)
    assert problem is not None
    assert "device_used_ratio" in problem
    assert "--gpu-memory-utilization" in problem
    assert baseline_problem(RULE, 0.9254) is None
    assert baseline_problem(RULE, None) is None


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
