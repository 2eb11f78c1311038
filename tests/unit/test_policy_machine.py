"""The policy as a state machine: what must hold whatever the signal does and however remedies go."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.policy import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MOST_SECONDS,
    Effect,
    HourlyBudget,
    Rule,
    RuleMemory,
    Trial,
    decide,
    judge,
    signal_value,
    target,
    usable_from,
)
from app.readings import EngineStatus, Growth, Report
from tests.fakes.engine import FakeEngine

TOP = 100  # values are integers up to it, so that a mirrored one is exact
HOUR = 3600.0
RISING = Rule(
    name="r", signal="encoder_cache_bytes", high_water=80, low_water=60, min_effect_bytes=5, remedies=("a", "b")
)
# At the waters, just beside them, and beyond by enough to count as moved.
values = st.sampled_from([0, 60, 61, 79, 80, 90, 100]) | st.integers(0, TOP)


def freed_bytes(freed: int | None) -> Effect | None:
    return None if freed is None else Effect(judged_bytes=freed, total_bytes=freed)


class PolicyMachine(RuleBasedStateMachine):
    """A rule on a rising signal, and beside it its mirror image on a falling one."""

    @initialize(
        sustain=st.sampled_from([0.0, 10.0]),
        cooldown=st.sampled_from([0.0, 30.0, 90.0]),
        least=st.sampled_from([0, 5]),
        most=st.sampled_from([0, 1, 3, 1000]),
    )
    def start(self, sustain: float, cooldown: float, least: int, most: int) -> None:
        self.rule = replace(RISING, sustain_seconds=sustain, cooldown_seconds=cooldown, min_effect_bytes=least)
        self.mirror = replace(self.rule, signal="device_free_bytes", high_water=TOP - 80, low_water=TOP - 60)
        self.memory = self.mirrored = RuleMemory()
        self.budget = HourlyBudget(most=most)
        self.now = 1000.0
        self.value = 0
        self.running: str | None = None
        self.started: list[float] = []
        self.ran_at: dict[str, float] = {}
        self.backoffs: dict[str, tuple[float, float, float]] = {}  # backoff, until, the signal then
        self.relieved_at: float | None = None
        self.reached_since: float | None = None

    @precondition(lambda self: self.running is None)
    @rule(value=st.none() | values, seconds=st.sampled_from([0.0, 1.0, 9.0, 25.0, 31.0, 61.0, 1800.0, 4000.0]))
    def read(self, value: int | None, seconds: float) -> None:
        self.now += seconds
        before = self.memory
        self.memory, decision = decide(self.rule, before, value, self.now, self.budget)
        other = None if value is None else TOP - value
        self.mirrored, mirrored = decide(self.mirror, self.mirrored, other, self.now, self.budget)
        assert decision == mirrored
        if value is None:
            assert (decision.action, self.memory) == ("none", before), "acted on stale data"
            return
        self.value = value
        if self.rule.relieved(value):
            assert self.memory.phase in {"below", "cooling"}
        if self.at_rest(before):
            self.track(value)
        if decision.action == "none":
            assert not self.must_act(value), "the signal has moved, or every wait is over"
            return
        assert decision.remedy is not None
        self.may_act(before, value, decision.remedy)
        spent = len([at for at in self.started if self.now - at < HOUR])
        assert (decision.action == "act") == (spent < self.budget.most), "the hourly budget"
        if decision.action == "act":
            self.running = decision.remedy
            self.started.append(self.now)
            self.budget = self.budget.spend(self.now)

    def at_rest(self, memory: RuleMemory) -> bool:
        return memory.phase == "below" or (memory.phase == "cooling" and self.now >= memory.cooling_until)

    def track(self, value: int) -> None:
        if not self.rule.reached(value):
            self.reached_since = None
        elif self.reached_since is None:
            self.reached_since = self.now

    def may_act(self, before: RuleMemory, value: int, remedy: str) -> None:
        assert not self.rule.relieved(value)
        cooldown = self.rule.cooldown_seconds
        assert self.relieved_at is None or self.now - self.relieved_at >= cooldown, "inside the cooldown after relief"
        assert self.now - self.ran_at.get(remedy, -1e9) >= cooldown, "the same remedy twice within the cooldown"
        _, until, then = self.backoffs.get(remedy, (0.0, 0.0, 0.0))
        assert self.now >= until or value - then >= 10, "worn out, and the signal has not moved"
        if self.at_rest(before):
            assert self.reached_since is not None
            assert self.now - self.reached_since >= self.rule.sustain_seconds

    def must_act(self, value: int) -> bool:
        """Whether a rule that is above or futile has a remedy that nothing holds back."""

        def is_free(remedy: str) -> bool:
            _, until, then = self.backoffs.get(remedy, (0.0, 0.0, 0.0))
            rested = self.now - self.ran_at.get(remedy, -1e9) >= self.rule.cooldown_seconds
            return rested and (self.now >= until or value - then >= 10)

        return self.memory.phase in {"above", "futile"} and any(map(is_free, self.rule.remedies))

    @precondition(lambda self: self.running is not None)
    @rule(
        outcome=st.sampled_from(["done", "done", "done", "refused", "failed", "observed"]),
        freed=st.none() | st.integers(-5, 20),
        value=st.none() | values,
        seconds=st.sampled_from([0.0, 2.0]),
    )
    def finish(self, outcome, freed, value, seconds) -> None:
        remedy, self.running = self.running or "", None
        assert decide(self.rule, self.memory, TOP, self.now)[1].action == "none", "two remedies at once"
        self.now += seconds
        self.value = self.value if value is None else value
        trial = Trial(at=self.now, outcome=outcome, effect=freed_bytes(freed))
        self.memory = judge(self.rule, self.memory, remedy, trial, value=value)
        other = None if value is None else TOP - value
        self.mirrored = judge(self.mirror, self.mirrored, remedy, trial, value=other)

        self.ran_at[remedy] = self.now
        relieved = value is not None and self.rule.relieved(value)
        if outcome == "done" and ((freed or 0) >= max(self.rule.min_effect_bytes, 1) or relieved):
            self.backoffs.pop(remedy, None)
        elif outcome != "observed":
            last = self.backoffs.get(remedy, (BACKOFF_FIRST_SECONDS / 2, 0.0, 0.0))[0]
            backoff = min(last * 2, BACKOFF_MOST_SECONDS)
            self.backoffs[remedy] = (backoff, self.now + backoff, RISING.high_water if value is None else value)
        assert self.memory.phase == ("cooling" if relieved else "above")
        self.reached_since = None
        if relieved:
            self.relieved_at = self.now

    @precondition(lambda self: self.running is None)
    @rule(value=values)
    def come_to_an_end(self, value: int) -> None:
        """Were the signal to stay and the remedies to do nothing, the rule would soon be at rest, or give up.

        Soon: after what is left of a cooldown, the wait for high water, and the rest of each remedy; that is within 200
        seconds here, and no remedy gets more than two tries.
        """
        memory, now, tries = self.memory, self.now, 0
        for _ in range(45):
            now += 5.0
            memory, decision = decide(self.rule, memory, value, now, HourlyBudget(most=1000))
            if decision.action == "act":
                tries += 1
                trial = Trial(at=now, outcome="done", effect=freed_bytes(0))
                memory = judge(self.rule, memory, decision.remedy or "", trial, value=value)
            elif memory.phase == "futile" or (memory.phase == "below" and not self.rule.reached(value)):
                break
        else:
            raise AssertionError("neither at rest nor futile")
        assert tries <= 2 * len(self.rule.remedies)

    @invariant()
    def the_backoffs_are_the_models(self) -> None:
        worn = {name: (entry.backoff_seconds, entry.retry_at) for name, entry in self.memory.worn_out.items()}
        assert worn == {name: entry[:2] for name, entry in self.backoffs.items()}

    @invariant()
    def what_is_told_is_what_is_done(self) -> None:
        """A remedy of which the status says that it may run is one that would be chosen, and only such."""
        if self.memory.phase in {"above", "futile"} and not self.rule.relieved(self.value):
            chosen = decide(self.rule, self.memory, self.value, self.now)[1].remedy
            usable = [n for n in self.rule.remedies if usable_from(self.rule, self.memory, n, self.value) <= self.now]
            assert chosen == (usable[0] if usable else None)

    @invariant()
    def acting_is_acting(self) -> None:
        assert (self.memory.phase == "acting") == (self.running is not None)

    @invariant()
    def both_sides_agree(self) -> None:
        assert self.memory.phase == self.mirrored.phase
        assert self.memory.cooling_until == self.mirrored.cooling_until
        assert set(self.memory.worn_out) == set(self.mirrored.worn_out)

    @invariant()
    def futile_means_that_all_are_worn_out(self) -> None:
        assert self.memory.phase != "futile" or set(self.memory.worn_out) == set(self.rule.remedies)


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


# --- how far a trim goes ---

GIB = 1024**3


@st.composite
def reports(draw) -> Report:
    """An engine of one to three ranks, each with its own cache and its own fill."""
    fake = FakeEngine(tensor_parallel=draw(st.integers(1, 3)))
    for worker in fake.workers:
        worker.cached = draw(st.integers(0, 4 * GIB))
        worker.entries = {"image": draw(st.integers(0, 3 * GIB))}
    growth = Growth(since_ready_bytes=draw(st.none() | st.integers(-GIB, 8 * GIB)))
    return Report(engine=EngineStatus(url="http://engine", state="ready"), ranks=fake.readings(), growth=growth)


def with_less(report: Report, trimmed: int) -> Report:
    """The report as it would be with so many bytes less on every rank."""
    ranks = tuple(
        replace(
            rank,
            used_bytes=rank.used_bytes - trimmed,
            used_ratio=(rank.used_bytes - trimmed) / rank.total_bytes,
            free_bytes=rank.free_bytes + trimmed,
        )
        for rank in report.ranks
    )
    grown = report.growth.since_ready_bytes
    growth = Growth(since_ready_bytes=grown - trimmed * len(ranks) if grown is not None else None)
    return replace(report, ranks=ranks, growth=growth)


LOW_WATERS = {
    "device_used_ratio": st.floats(0.75, 1),
    "device_free_bytes": st.floats(0, 14 * GIB),
    "device_growth_bytes": st.floats(-GIB, 8 * GIB),
}


@settings(max_examples=300, deadline=None)
@given(
    report=reports(),
    water=st.sampled_from(sorted(LOW_WATERS)).flatmap(lambda name: st.tuples(st.just(name), LOW_WATERS[name])),
    least=st.integers(0, GIB // 4),
)
def test_a_trim_is_just_enough(report, water, least):
    """Never negative, never more than is there; down to low water if that much is there, and not a byte further."""
    signal, low = water
    rule = replace(RISING, signal=signal, low_water=low, min_effect_bytes=least)
    trimmed = target(rule, report).free_bytes
    pick = {"device_used_ratio": lambda rank: -rank.used_ratio, "device_free_bytes": lambda rank: rank.free_bytes}
    worst = min(report.ranks, key=pick.get(signal, lambda rank: -rank.components.encoder_cache_bytes))
    there = worst.components.encoder_cache_bytes
    assert trimmed is not None
    assert 0 <= trimmed <= there
    relieved = {
        taken: rule.relieved(signal_value(signal, with_less(report, taken)) or 0) for taken in (trimmed, trimmed - 1)
    }
    if signal == "device_growth_bytes" and report.growth.since_ready_bytes is None:
        assert trimmed <= least
        return
    assert relieved[trimmed] or trimmed == there, "too little"
    assert not relieved[trimmed - 1] or trimmed <= least, "too much"


@given(report=reports(), low=st.floats(0, 4 * GIB))
def test_a_cache_keeps_what_low_water_allows(report, low):
    """Never a negative size, and never over low water."""
    kept = target(replace(RISING, low_water=low), report).keep_bytes
    assert kept is not None
    assert 0 <= kept <= low < kept + 1
