"""The policy as a state machine: what must hold whatever the signal does and however remedies go."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.policy import BACKOFF_FIRST_SECONDS, BACKOFF_MOST_SECONDS, Rule, RuleMemory, decide, judge

TOP = 100  # values are integers up to it, so that a mirrored one is exact
RISING = Rule(
    name="r", signal="encoder_cache_bytes", high_water=80, low_water=60, min_effect_bytes=5, remedies=("a", "b")
)
values = st.integers(0, TOP)


class PolicyMachine(RuleBasedStateMachine):
    """A rule on a rising signal, and beside it its mirror image on a falling one."""

    @initialize(sustain=st.sampled_from([0.0, 10.0]), cooldown=st.sampled_from([0.0, 30.0]))
    def start(self, sustain: float, cooldown: float) -> None:
        self.rule = replace(RISING, sustain_seconds=sustain, cooldown_seconds=cooldown)
        self.mirror = replace(self.rule, signal="device_free_bytes", high_water=TOP - 80, low_water=TOP - 60)
        self.memory = self.mirrored = RuleMemory()
        self.now = 1000.0
        self.running: str | None = None
        self.ran_at: dict[str, float] = {}
        self.backoffs: dict[str, tuple[float, float, float]] = {}  # backoff, until, the signal then
        self.relieved_at: float | None = None
        self.reached_since: float | None = None

    @precondition(lambda self: self.running is None)
    @rule(value=st.none() | values, seconds=st.sampled_from([0.0, 1.0, 9.0, 31.0, 61.0, 4000.0]))
    def read(self, value: int | None, seconds: float) -> None:
        self.now += seconds
        before = self.memory
        self.memory, decision = decide(self.rule, before, value, self.now)
        other = None if value is None else TOP - value
        self.mirrored, mirrored = decide(self.mirror, self.mirrored, other, self.now)
        assert decision == mirrored
        if value is None:
            assert (decision.action, self.memory) == ("none", before)
            return
        if self.rule.relieved(value):
            assert self.memory.phase in {"below", "cooling"}
        if self.at_rest(before):
            self.track(value)
        if decision.action == "act":
            assert decision.remedy is not None
            self.may_act(before, value, decision.remedy)
            self.running = decision.remedy

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
        told = {"outcome": outcome, "freed_bytes": freed, "now": self.now}
        self.memory = judge(self.rule, self.memory, remedy, value=value, **told)
        other = None if value is None else TOP - value
        self.mirrored = judge(self.mirror, self.mirrored, remedy, value=other, **told)

        self.ran_at[remedy] = self.now
        relieved = value is not None and self.rule.relieved(value)
        if outcome == "done" and ((freed or 0) >= 5 or relieved):
            self.backoffs.pop(remedy, None)
        elif outcome != "observed":
            last = self.backoffs.get(remedy, (BACKOFF_FIRST_SECONDS / 2, 0.0, 0.0))[0]
            backoff = min(last * 2, BACKOFF_MOST_SECONDS)
            self.backoffs[remedy] = (backoff, self.now + backoff, RISING.high_water if value is None else value)
        assert self.memory.phase == ("cooling" if relieved else "above")
        self.reached_since = None
        if relieved:
            self.relieved_at = self.now

    @invariant()
    def the_backoffs_are_the_models(self) -> None:
        worn = {name: (entry.backoff_seconds, entry.retry_at) for name, entry in self.memory.worn_out.items()}
        assert worn == {name: entry[:2] for name, entry in self.backoffs.items()}

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
TestPolicy.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
