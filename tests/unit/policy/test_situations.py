"""The policy on a small model of a device and its allocator: whole situations, traffic first and then none.

What an allocator takes again and how fast is modelled; every decision is the policy's own. Sizes are GiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from highwater.policy.core import Action, decide
from highwater.policy.learning import begin, learn
from highwater.policy.memory import LifeMemory
from highwater.policy.pressure import Facts
from highwater.policy.rules import Rule
from highwater.policy.settings import DEFAULT_RULES
from highwater.readings.rank import RankReading
from highwater.readings.remedy import RemedyResult
from tests.fakes.ranks import GIB, reading, report

DEFAULT = DEFAULT_RULES[0]
BUSY, IDLE = 1800.0, 300.0
# An image's activations and an operator's workspace must fit into what is free.
FULL = 0.15
ASCEND, H100 = 60.96, 79.1


@dataclass
class Device:
    """One rank's device: what is live, what the allocator keeps, and what a remedy gives back.

    Attributes:
        total: Of the device.
        base: Weights, KV pool and what is outside PyTorch at rest.
        utilization: vLLM's share; ``None``: it does not say what it asked for.
        peak: What the allocator takes for activations under load; ``live`` of it is in use at any moment.
        peak_rate: How fast it takes it, in GiB a second.
        cache: The encoder cache's size when full, filled at ``cache_rate``.
        fragments_rate: Blocks kept that nobody can use; only a release gives them back.
        neighbour: What somebody else takes, after ten minutes.
    """

    total: float
    base: float
    utilization: float | None
    peak: float = 0.0
    peak_rate: float = 1.0
    live: float = 0.4
    cache: float = 0.0
    cache_rate: float = 0.0
    fragments_rate: float = 0.0
    neighbour: float = 0.0
    npu: bool = False
    _peak: float = field(default=0.0, init=False)
    _cache: float = field(default=0.0, init=False)
    _fragments: float = field(default=0.0, init=False)
    _other: float = field(default=0.0, init=False)

    @property
    def free(self) -> float:
        return self.total - self.base - self._peak - self._cache - self._fragments - self._other

    def pass_by(self, seconds: float, now: float, *, busy: bool) -> None:
        if self.neighbour and now > 600.0:
            self._other = self.neighbour
        if not busy:
            return
        self._peak = min(self._peak + self.peak_rate * seconds, self.peak)
        self._cache = min(self._cache + self.cache_rate * seconds, self.cache)
        self._fragments += self.fragments_rate * seconds

    def run(self, action: Action, *, busy: bool) -> None:
        if action.remedy == "trim_encoder_cache":
            self._cache -= min(self._cache, (action.target.free_bytes or 0) / GIB)
        if action.remedy == "reset_encoder_cache":
            self._cache = 0.0
        self._peak = min(self._peak, self.live * self.peak) if busy else 0.0
        self._fragments = 0.0

    def reading(self, now: float, *, busy: bool) -> RankReading:
        live = min(self._peak, self.live * self.peak) if busy else 0.0
        other = self._peak - live + self._fragments
        return reading(
            total=int(self.total * GIB),
            rest=int((self.base + self._other) * GIB),
            encoder=int(self._cache * GIB),
            cached=int(other * GIB),
            other=int(live * GIB),
            requested=int(self.total * self.utilization * GIB) if self.utilization is not None else None,
            taken_at=now,
            device="npu" if self.npu else "cuda",
            non_torch=int((1.0 + self._other) * GIB),
        )


@dataclass
class Outcome:
    """What happened."""

    died_at: float | None = None
    actions: Counter[str] = field(default_factory=Counter)
    idle_actions: int = 0
    in_vain: int = 0
    helpless_seconds: float = 0.0
    first_urgent_at: float | None = None
    first_action_at: float | None = None


def live_through(device: Device, rule: Rule = DEFAULT, *, profiled: bool = True) -> Outcome:
    """Half an hour of traffic, then none; readings a second apart, five a second while less than low is free."""
    facts = Facts(life="a", baseline=(device.reading(0.0, busy=False),), encoder_is_profiled=profiled)
    memory, outcome, now, step = LifeMemory(), Outcome(), 0.0, 1.0
    while now < BUSY + IDLE:
        busy = now < BUSY
        device.pass_by(step, now, busy=busy)
        now += step
        if device.free <= FULL:
            outcome.died_at = now
            return outcome
        before = device.reading(now, busy=busy)
        seen = report(before, running=int(busy))
        memory, decision = decide([rule], seen, facts, memory, now)
        (view,) = decision.views
        outcome.helpless_seconds += step if view.is_helpless else 0.0
        if view.level == "urgent" and outcome.first_urgent_at is None:
            outcome.first_urgent_at = now
        step = 0.2 if any(one.need_bytes for one in view.pressures) else 1.0
        if decision.action is None:
            continue
        outcome.first_action_at = outcome.first_action_at or now
        outcome.actions[decision.action.remedy] += 1
        outcome.idle_actions += not busy
        memory = begin(memory, decision.action)
        device.run(decision.action, busy=busy)
        now += 0.4
        after = device.reading(now, busy=busy)
        memory = learn(
            memory,
            decision.action,
            RemedyResult(remedy=decision.action.remedy, outcome="done"),
            before=[before],
            after=[after],
            seen=report(after, running=int(busy)),
            facts=facts,
            now=now,
        )
        run = memory.rules[rule.name].runs[decision.action.remedy]
        outcome.in_vain += not run.is_effective
    return outcome


def story_8b(fragments_rate: float = 0.0, cache_rate: float = 0.2) -> Device:
    """The story's 8B at 0.95."""
    device = Device(ASCEND, 55.0, 0.95, peak=1.9, peak_rate=0.4, cache=1.15, cache_rate=cache_rate, npu=True)
    return replace(device, fragments_rate=fragments_rate)


def vlm(utilization: float) -> Device:
    """A vision model on an H100 that uses what it asked for at its peak."""
    return Device(H100, utilization * H100 - 2.4, utilization, peak=3.0, peak_rate=1.0, cache=0.7, cache_rate=0.05)


FITS: dict[str, Callable[[], Device]] = {
    "the story's 32B at 0.90": lambda: Device(
        ASCEND, 53.37, 0.9, peak=2.4, peak_rate=0.05, cache=0.64, cache_rate=0.02, npu=True
    ),
    "H100 at 0.90, images": lambda: vlm(0.90),
    "H100 at 0.92, images": lambda: vlm(0.92),
    "H100 at 0.95, images": lambda: vlm(0.95),
    "H100 at 0.95, text": lambda: Device(H100, 0.95 * H100 - 0.9, 0.95, peak=1.5),
    "L4 at 0.90, text": lambda: Device(22.0, 0.9 * 22 - 0.8, 0.90, peak=1.2),
    "L4 at 0.98, text": lambda: Device(22.0, 0.98 * 22 - 0.8, 0.98, peak=0.8),
    "8 GiB at 0.92, text": lambda: Device(8.0, 0.92 * 8 - 0.5, 0.92, peak=0.5),
    "a MIG slice at 0.92": lambda: Device(9.75, 0.92 * 9.75 - 0.5, 0.92, peak=0.5),
    "--kv-cache-memory-bytes": lambda: Device(H100, 70.0, None, peak=3.0),
    "a neighbour takes 36 GiB": lambda: replace(vlm(0.5), neighbour=36.0),
}


@pytest.mark.slow("hours of a simulated engine")
@pytest.mark.parametrize("situation", FITS)
def test_steady_traffic_that_fits_is_left_alone(situation):
    """Nothing while it lasts; at most one release when the traffic has gone, and no remedy that gains nothing."""
    outcome = live_through(FITS[situation]())
    assert outcome.died_at is None
    assert sum(outcome.actions.values()) == outcome.idle_actions <= 1
    assert outcome.in_vain == 0


@pytest.mark.slow("hours of a simulated engine")
@pytest.mark.parametrize("rate", [0.08, 0.16, 0.5])
def test_fragments_do_not_kill(rate):
    """The run that died of it: several GiB in blocks that nobody could use. They are given back at any rate."""
    outcome = live_through(story_8b(rate))
    assert outcome.died_at is None
    assert outcome.actions["release"] >= 5
    assert outcome.in_vain == 0


def test_the_story_s_8b_is_not_fought():
    """At rest it uses 0.902 of the device: the share of the old default was under that, and was fought without end."""
    outcome = live_through(story_8b())
    assert (outcome.died_at, outcome.idle_actions, outcome.in_vain) == (None, 1, 0)
    assert sum(outcome.actions.values()) <= 31


@pytest.mark.slow("hours of a simulated engine")
def test_where_nothing_can_help_nothing_is_done():
    """A neighbour takes nearly all that is left: it is told, and the cache is not given away to it."""
    outcome = live_through(replace(vlm(0.5), neighbour=0.5 * H100 + 0.3, peak=0.0))
    assert outcome.died_at is None
    assert outcome.helpless_seconds > BUSY / 2
    assert sum(outcome.actions.values()) == 0


@pytest.mark.parametrize("rate", [0.05, 0.5, 2.0])
def test_the_first_remedy_comes_within_two_seconds_of_urgency(rate):
    """Measured from the reading that shows it."""
    outcome = live_through(story_8b(rate))
    assert outcome.first_action_at is not None
    if outcome.first_urgent_at is not None:
        assert outcome.first_action_at <= outcome.first_urgent_at + 2.0
