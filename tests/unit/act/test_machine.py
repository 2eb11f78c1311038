"""The policy as a state machine: what must hold whatever the device does and however remedies go."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from highwater.act.decision import URGENT_COOLDOWN_SECONDS, decide
from highwater.act.pressure import Facts, possible_gain
from highwater.act.rules import Rule
from highwater.act.state import Action, LifeMemory, begin, learn
from highwater.model.rank import RankReading
from highwater.model.remedies import RemedyResult
from highwater.model.report import Report
from tests.fakes.ranks import GIB, MIB, reading, report

TOTAL = 16 * GIB
REQUESTED = 14 * GIB  # slack 2 GiB: high 512 MiB, low 1 GiB
HIGH, LOW = 512 * MIB, GIB
REST = 12 * GIB
DERIVED = Rule(
    name="device", signal="device_free_bytes", remedies=("release", "trim_encoder_cache", "reset_encoder_cache")
)
OWN = DERIVED.model_copy(update={"name": "own", "high_water": HIGH, "low_water": LOW})
LADDER = DERIVED.ordered_remedies
sizes = st.sampled_from([0, 100, 255, 256, 300, 700, 1500]).map(lambda mib: mib * MIB)


@st.composite
def ranks(draw, rank: int = 0) -> RankReading:
    """Any fill of one device: what is free, and of what is used how much could come back."""
    free = draw(st.sampled_from([0, 100, 255, 256, 257, 511, 512, 513, 900, 1024, 1500, 3000])) * MIB
    cached, encoder = draw(sizes), draw(sizes)
    trimmable = draw(st.none() | sizes.map(lambda size: min(size, encoder)))
    other = TOTAL - REST - free - cached - encoder
    if other < 0:
        cached, encoder, other = 0, 0, TOTAL - REST - free
        trimmable = None if trimmable is None else 0
    return reading(
        rank,
        total=TOTAL,
        rest=REST,
        requested=REQUESTED,
        cached=cached,
        encoder=encoder,
        other=other,
        trimmable=trimmable,
        releasable=draw(st.sampled_from([cached, None])),
    )


class PolicyMachine(RuleBasedStateMachine):
    """One rule on one or two ranks; remedies end in any way, and the engine's life may end at any time."""

    @initialize(own=st.booleans(), profiled=st.booleans(), count=st.sampled_from([1, 2]))
    def start(self, own: bool, profiled: bool, count: int) -> None:
        self.rule, self.count = OWN if own else DERIVED, count
        self.facts = Facts(life="0", encoder_is_profiled=profiled)
        self.memory, self.now, self.lives = LifeMemory(), 1000.0, 0
        self.running: Action | None = None
        self.seen: Report | None = None
        self.ended_at = -1e9  # of the last remedy in this life
        self.in_vain: dict[str, int] = {}  # what the remedy could give when it was in vain, and must exceed
        self.urgent_since: float | None = None

    @precondition(lambda self: self.running is None)
    @rule(data=st.data(), seconds=st.sampled_from([0.2, 1.0, 4.9, 5.0, 61.0]), stale=st.booleans(), idle=st.booleans())
    def look(self, data, seconds: float, stale: bool, idle: bool) -> None:
        self.now += seconds
        found = [data.draw(ranks(number)) for number in range(self.count)]
        self.seen = report(*found, stale=stale, running=0 if idle else 1)
        self.memory, decision = decide([self.rule], self.seen, self.facts, self.memory, self.now)
        action = decision.action
        if stale:
            assert action is None, "acted on stale data"
            assert decision.views[0].level == "unknown"
            return
        worst = min(one.free_bytes or 0 for one in found)
        assert (decision.views[0].level in {"short", "urgent"}) == (
            worst < HIGH or (worst == HIGH and self.rule is OWN)
        )
        if action is None:
            self.must_not_have_acted_too_late(found)
            return
        self.may_act(action, found)
        self.memory, self.running = begin(self.memory, action), action

    def may_act(self, action: Action, found: list[RankReading]) -> None:
        """It can give, on a rank that needs it, and it is asked for no more than that."""
        assert action.ranks
        for one in found:
            if (one.dp_rank or 0, one.rank or 0) not in action.ranks:
                continue
            size = possible_gain(action.remedy, self.rule.signal, one).size
            free = one.free_bytes or 0
            need = LOW - free
            if not action.is_tidying:
                assert need > 0
                assert size is not None
                assert size >= min(256 * MIB, need), "it cannot give that much"
            if action.target.free_bytes is not None and self.count == 1:
                assert action.target.free_bytes == need, "no more than is needed"
            if action.remedy == "reset_encoder_cache" and self.rule.is_derived:
                assert free < HIGH / 2, "the cache is dropped under urgent pressure only"

    def must_not_have_acted_too_late(self, found: list[RankReading]) -> None:
        """Urgent, five seconds after the last remedy, with a release to be had: then it is had."""
        if self.count > 1 or self.now - self.ended_at < URGENT_COOLDOWN_SECONDS:
            return
        (one,) = found
        known = self.memory.rules[self.rule.name].runs.get("release")
        waits = known.waits if known is not None else {}
        if (one.free_bytes or 0) < HIGH / 2 and (one.releasable_bytes or 0) >= 512 * MIB and not waits:
            again, decision = decide([self.rule], self.seen, self.facts, self.memory, self.now)  # type: ignore[arg-type]
            assert decision.action is not None, "urgent, able, and nothing done at two readings"
            del again

    @precondition(lambda self: self.running is not None)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["done", "done", "done", "refused", "failed", "observed"]),
        measured=st.booleans(),
    )
    def finish(self, data, outcome: str, measured: bool) -> None:
        action, self.running = self.running, None
        assert action is not None
        assert self.seen is not None
        self.now += 0.5
        self.ended_at = self.now
        after = [data.draw(ranks(number)) for number in range(self.count)] if measured else []
        result = RemedyResult(remedy=action.remedy, outcome=outcome)  # type: ignore[arg-type]
        self.memory = learn(
            self.memory,
            action,
            result,
            before=self.seen.ranks,
            after=after,
            seen=report(*after),
            facts=self.facts,
            now=self.now,
        )
        run = self.memory.rules[self.rule.name].runs[action.remedy]
        assert (run.at, run.outcome) == (self.now, outcome)
        assert not (run.is_effective and outcome != "done")
        assert all((one.freed_bytes or 0) >= 0 for one in run.ranks)

    @precondition(lambda self: self.running is None)
    @rule()
    def die(self) -> None:
        """Another engine: it is looked at as if nothing had ever been seen."""
        self.lives += 1
        self.facts = replace(self.facts, life=str(self.lives))
        self.ended_at = -1e9
        if self.seen is not None:
            fresh = decide([self.rule], self.seen, self.facts, LifeMemory(), self.now)
            assert decide([self.rule], self.seen, self.facts, self.memory, self.now) == fresh

    @invariant()
    def times_are_not_ahead(self) -> None:
        for known in getattr(self, "memory", LifeMemory()).rules.values():
            assert known.cooldown_from is None or known.cooldown_from <= self.now
            assert set(known.relief or ()) <= set(LADDER)


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@settings(max_examples=100, deadline=None)
@given(before=ranks(), free=st.integers(0, LOW - 1))
def test_what_can_be_given_is_given_at_the_first_urgent_reading(before, free):
    lacking = replace(before, free_bytes=min(free, HIGH // 2 - 1), releasable_bytes=GIB)
    memory, decision = decide([DERIVED], report(before), Facts(life="a"), LifeMemory(), 1.0)
    if decision.action is not None:
        return
    _, decision = decide([DERIVED], report(lacking), Facts(life="a"), memory, 1.2)
    assert decision.action.remedy == "release"


@settings(max_examples=100, deadline=None)
@given(
    before=ranks(),
    after=ranks(),
    outcome=st.sampled_from(["done", "failed", "refused"]),
    own=st.booleans(),
)
def test_under_urgent_pressure_no_rest_is_longer_than_five_seconds(before, after, outcome, own):
    chosen = OWN if own else DERIVED
    memory, decision = decide([chosen], report(before), Facts(life="a"), LifeMemory(), 1.0)
    assume(decision.action is not None)
    assert decision.action is not None
    memory = begin(memory, decision.action)
    result = RemedyResult(remedy=decision.action.remedy, outcome=outcome)
    memory = learn(
        memory,
        decision.action,
        result,
        before=[before],
        after=[after],
        seen=report(after),
        facts=Facts(life="a"),
        now=2.0,
    )
    # More than any remedy can have been short of its word.
    plenty = {"releasable_bytes": 8 * GIB, "trimmable_bytes": 0}
    urgent = replace(before, free_bytes=100 * MIB, used_bytes=TOTAL - 100 * MIB, **plenty)
    urgent = replace(urgent, components=replace(urgent.components, encoder_cache_bytes=0))
    now = 2.0
    while now < 2.0 + URGENT_COOLDOWN_SECONDS + 0.4:
        now += 0.2
        memory, decision = decide([chosen], report(urgent), Facts(life="a"), memory, now)
        if decision.action is not None:
            return
    raise AssertionError(f"still resting {now - 2.0:.1f} s after the last remedy")
