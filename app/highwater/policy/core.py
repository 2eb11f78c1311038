"""The decision: rules, a report, facts about the engine and the memory of its life go in; at most one remedy comes out.

Pure: no I/O, no clock, no logging. For each rule::

            calm ──(high water for sustain_seconds, or urgent)──► relief: the first remedy in order that can give
              ▲                                                     │  ▲    enough, then the next, each at most once
              │◄────────── low water reached: no cooldown ──────────┤  └───────── measured after each ◄──┐
              │                                                     ├── one can ──► acting ─────────────┘
              │◄── nothing could give or was run: no cooldown ──────┤    (reported once: "short, nothing to give back")
              └── cooldown_seconds, 5 s while urgent ◄──────────────┘    remedies were run and low water not reached,
                                                                         or for moments only, three times running

A remedy is run where the workers say that it can give ``min_gain_bytes`` or what is missing. One that gave less than
that waits until its figure has grown by what it fell short of; where it has no figure, for an hour. One that was
refused is repeated after a minute (``learning``). No list of given-up remedies is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from highwater.accounting.remedies import TRAITS
from highwater.policy.gains import is_integrated, possible_gain
from highwater.policy.memory import MAX_RELAPSES, LastReading, LifeMemory, RuleMemory
from highwater.policy.pressure import Facts, Pressure, is_reached, is_relieved, pressures, unreachable
from highwater.policy.rules import Rule
from highwater.policy.tidying import may_tidy, tidying_ranks, tidying_text, with_idleness
from highwater.policy.wording import cooldown_text, held_text, reason_text, short_text
from highwater.readings.policy import PolicyLevel, RulePhase
from highwater.readings.rank import RankKey
from highwater.readings.remedy import UNNEEDED, Target
from highwater.readings.report import Report

URGENT_COOLDOWN_SECONDS: Final = 5.0
# How long an allocation that had to be retried counts as a sign of pressure.
RETRY_SECONDS: Final = 10.0
# A rank whose reading is this much older than the newest is silent.
SILENT_SECONDS: Final = 10.0
# From the best to the worst: where nothing is known or nothing may be done, nothing is worse either.
LEVELS: Final[tuple[PolicyLevel, ...]] = ("unknown", "held", "calm", "short", "urgent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One remedy to run.

    ``ranks`` are where it is to help: the bytes that it can give there (None: no figure), and those that it must give
    to count as effective.
    """

    rule: Rule
    remedy: str
    why: str
    target: Target = UNNEEDED
    ranks: Mapping[RankKey, tuple[int | None, int]] = field(default_factory=dict)
    is_tidying: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleView:
    """One rule at one report.

    ``reason`` is None where all is calm, ``worst`` without a known value. ``finding`` is what an operator should hear
    of once: that memory is short and nothing can be given back (``is_helpless``), or why the rule can never act here.
    """

    rule: Rule
    level: PolicyLevel
    phase: RulePhase
    reason: str | None = None
    pressures: tuple[Pressure, ...] = ()
    worst: Pressure | None = None
    is_helpless: bool = False
    finding: str | None = None
    cooldown_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision for one report: at most one remedy, and every rule."""

    action: Action | None = None
    views: tuple[RuleView, ...] = ()

    @property
    def level(self) -> PolicyLevel:
        return max((view.level for view in self.views), key=LEVELS.index, default="calm")


def decide(
    rules: Sequence[Rule], report: Report, facts: Facts, memory: LifeMemory, now: float
) -> tuple[LifeMemory, Decision]:
    """Decide on one report.

    Of several rules that have something to do an urgent one goes first, then the one that has not acted for longest.
    """
    if memory.life != facts.life:
        memory = LifeMemory(life=facts.life)
    memory = with_idleness(memory, report, now)
    views, memories, actions = [], dict(memory.rules), []
    for rule in rules:
        rule_memory, view, action = _judge(rule, memories.get(rule.name, RuleMemory()), report, facts, now)
        if rule_memory.phase != view.phase or rule_memory.since is None:
            rule_memory = replace(rule_memory, phase=view.phase, since=now)
        memories[rule.name] = rule_memory
        views.append(view)
        if action is None and may_tidy(rule, memory, report, facts, now):
            ranks = tidying_ranks(rule, view.pressures, rule_memory)
            if ranks:
                why = tidying_text(ranks)
                action = Action(rule=rule, remedy="release", why=why, ranks=ranks, is_tidying=True)
        if action is not None:
            actions.append(action)
    urgent = {view.rule.name for view in views if view.level == "urgent"}

    def order(action: Action) -> tuple[bool, bool, float]:
        runs = memories[action.rule.name].runs.values()
        return action.is_tidying, action.rule.name not in urgent, max((run.at for run in runs), default=-math.inf)

    return replace(memory, rules=memories), Decision(action=min(actions, key=order, default=None), views=tuple(views))


# --- one rule ---


def _judge(
    rule: Rule, memory: RuleMemory, report: Report, facts: Facts, now: float
) -> tuple[RuleMemory, RuleView, Action | None]:
    ranks = tuple(pressures(rule, report, facts))
    held = _held_view(rule, report, facts, ranks)
    if held is not None:
        return replace(memory, reached_since=None, relief=None), held, None
    silent = _silent(memory, report)
    fresh = [pressure for pressure in ranks if pressure.key not in silent]
    memory = _with_ranks(rule, memory, fresh, now)
    halted = replace(memory, reached_since=None, relief=None)
    counted = [pressure for pressure in fresh if pressure.note is None]
    levels = (memory.ranks[key].level for key in {*silent, *(pressure.key for pressure in counted)})
    level: PolicyLevel = max(levels, key=LEVELS.index, default="calm")
    view = RuleView(
        rule=rule,
        level=level,
        phase="calm",
        pressures=ranks,
        worst=_worst(rule, counted),
        finding=next((pressure.note for pressure in ranks if pressure.is_finding), None),
    )
    if not report.engine.traits.takes_remedies:
        text = f"the engine is {report.engine.state_text}: nothing is run until it answers soon again"
        return halted, replace(view, phase="held", reason=text), None
    if not counted:
        text = held_text(ranks, silent)
        return halted, replace(view, phase="held", level=level if silent else "held", reason=text), None

    memory, action, is_helpless = _step(rule, memory, counted, facts, now)
    cooldown_until = None if memory.relief is not None else _cooldown_until(rule, memory, urgent=level == "urgent")
    phase: RulePhase = level if level == "short" or level == "urgent" else "calm"  # noqa: PLR1714 - narrows the type
    # While memory is not short, nothing waits for a cooldown.
    is_cooling_down = phase != "calm" and cooldown_until is not None and now < cooldown_until
    if is_cooling_down:
        phase = "resting"
    cooldown = cooldown_text(memory) if is_cooling_down else None
    reason = reason_text(rule, level, counted, facts, is_helpless=is_helpless, silent=silent, cooldown=cooldown)
    view = replace(
        view,
        phase=phase,
        reason=reason,
        is_helpless=is_helpless,
        finding=reason if is_helpless else view.finding,
        cooldown_until=cooldown_until if is_cooling_down else None,
    )
    return memory, view, action


def _held_view(rule: Rule, report: Report, facts: Facts, ranks: tuple[Pressure, ...]) -> RuleView | None:
    if report.engine.traits.lacks_weights:
        text = f"the engine is {report.engine.state}"
        return RuleView(rule=rule, level="held", phase="held", reason=text, pressures=ranks)
    if report.stale:
        text = f"no fresh reading of the workers (the engine is {report.engine.state_text})"
        return RuleView(rule=rule, level="unknown", phase="held", reason=text)
    problem = unreachable(rule, facts.baseline, report.ranks)
    if problem is None:
        return None
    return RuleView(rule=rule, level="held", phase="held", reason=problem, pressures=ranks, finding=problem)


def _step(
    rule: Rule, memory: RuleMemory, counted: Sequence[Pressure], facts: Facts, now: float
) -> tuple[RuleMemory, Action | None, bool]:
    """Begin a relief, go on with it, or end it; the last value is True if memory is short with nothing to give back."""
    over = frozenset(pressure.key for pressure in counted if _is_over(rule, memory, pressure, now))
    since = memory.reached_since if memory.reached_since is not None else now
    memory = replace(memory, reached_since=since if over else None).ended_if_relieved(rule, counted)
    if memory.relief is None:
        if not over or now - since < rule.sustain_seconds:
            return memory, None, False
        urgent, relapsed = any(_is_urgent(memory, pressure, now) for pressure in counted), _has_relapsed(memory, now)
        if urgent and relapsed:
            relapsing = replace(memory, relief=("release",), relief_ranks=over, cooldown_from=None)
            action = _next_action(rule, relapsing, counted, facts, now)
            if action is not None:
                return relapsing, action, False
        if relapsed and memory.relapses == MAX_RELAPSES and memory.cooldown_from is None and not urgent:
            memory = replace(memory, cooldown_from=memory.runs["release"].at)
        cooldown_until = _cooldown_until(rule, memory, urgent=urgent)
        if cooldown_until is not None and now < cooldown_until and not (urgent and memory.relapses == MAX_RELAPSES):
            return memory, None, False
        relapses = min(memory.relapses + 1, MAX_RELAPSES) if relapsed else 0
        memory = replace(memory, relief=(), relief_ranks=frozenset(), cooldown_from=None, relapses=relapses)
    memory = replace(memory, relief_ranks=memory.relief_ranks | over)
    action = _next_action(rule, memory, counted, facts, now)
    if action is not None:
        return memory, action, False
    # Where nothing was run, no cooldown is needed: it acts as soon as there is something to give back.
    ended = max((memory.runs[name].at for name in memory.relief or () if name in memory.runs), default=None)
    return replace(memory, relief=None, cooldown_from=ended, relapses=0), None, bool(over) and not memory.relief


def _cooldown_until(rule: Rule, memory: RuleMemory, *, urgent: bool) -> float | None:
    if memory.cooldown_from is None:
        return None
    return memory.cooldown_from + (URGENT_COOLDOWN_SECONDS if urgent else rule.cooldown_seconds)


def _has_relapsed(memory: RuleMemory, now: float) -> bool:
    """Return whether the last release helped for seconds only: the steps took back what they work with.

    A remedy that gives other bytes goes first then. To release the same bytes again would only hold the steps up, and
    the engine dies of what grows beside them.
    """
    run = memory.runs.get("release")
    return run is not None and run.is_effective and now - run.at < URGENT_COOLDOWN_SECONDS


def _next_action(
    rule: Rule, memory: RuleMemory, counted: Sequence[Pressure], facts: Facts, now: float
) -> Action | None:
    needy = [
        pressure for pressure in counted if pressure.key in memory.relief_ranks and not is_relieved(rule, pressure)
    ]
    for remedy in rule.ordered_remedies:
        if remedy in (memory.relief or ()) or remedy in facts.unavailable:
            continue
        able = {
            pressure.key: (size, pressure)
            for pressure in needy
            if _is_wise(rule, remedy, pressure, facts, urgent=_is_urgent(memory, pressure, now))
            for size in [_can_give(rule, remedy, memory, pressure, now)]
            if size is None or size > 0
        }
        if not able:
            continue
        neediest = max((pressure for _, pressure in able.values()), key=lambda pressure: pressure.need_bytes)
        target = Target(free_bytes=neediest.need_bytes)
        if rule.signal == "encoder_cache_bytes":
            target = Target(keep_bytes=max(math.floor(rule.low_water or 0.0), 0))
        return Action(
            rule=rule,
            remedy=remedy,
            why=short_text(neediest, rule),
            target=target if TRAITS[remedy].takes_target else UNNEEDED,
            ranks={key: (size, _required_gain(pressure)) for key, (size, pressure) in able.items()},
        )
    return None


def _is_wise(rule: Rule, remedy: str, pressure: Pressure, facts: Facts, *, urgent: bool) -> bool:
    """Return whether the remedy is wise on this rank; what an operator's own rule names is run where it can give."""
    traits = TRAITS[remedy]
    if traits.moves_to_host and is_integrated(pressure.reading):
        return False  # it would move the bytes within the same memory
    if not rule.is_derived or traits.default_use == "always":
        return True
    if pressure.reading.card in facts.shared_cards:
        return False  # the bytes would go to whoever else uses the device
    if traits.default_use == "last_resort":
        return urgent and is_reached(rule, pressure)
    # Where the KV pool was sized with the encoder's budget in mind, vLLM will want these bytes back.
    return urgent or not facts.encoder_is_profiled


def _can_give(rule: Rule, remedy: str, memory: RuleMemory, pressure: Pressure, now: float) -> int | None:
    """Return the bytes that the remedy can give on this rank; 0 where too few, ``None`` where it has no figure."""
    gain = possible_gain(remedy, rule.signal, pressure.reading)
    wait = memory.wait(remedy, pressure.key)
    if wait is not None and now < wait.until:
        has_grown = gain.size is not None and wait.figure_bytes is not None and gain.size >= wait.figure_bytes
        if not has_grown:
            return 0
    if gain.size is None:
        return None
    if not gain.is_certain and rule.is_derived and not _is_urgent(memory, pressure, now):
        return 0  # only an upper bound: worth a try only where nothing may wait
    return gain.size if gain.size >= _required_gain(pressure) else 0


def _required_gain(pressure: Pressure) -> int:
    return max(min(pressure.gain_bytes, pressure.need_bytes), 1)


def _is_over(rule: Rule, memory: RuleMemory, pressure: Pressure, now: float) -> bool:
    if is_reached(rule, pressure):
        return True
    return rule.is_derived and pressure.need_bytes > 0 and _has_retried(memory, pressure, now)


def _is_urgent(memory: RuleMemory, pressure: Pressure, now: float) -> bool:
    return pressure.is_urgent or (pressure.need_bytes > 0 and _has_retried(memory, pressure, now))


def _has_retried(memory: RuleMemory, pressure: Pressure, now: float) -> bool:
    rank = memory.ranks.get(pressure.key)
    return rank is not None and now < rank.retried_at + RETRY_SECONDS


# --- ranks ---


def _with_ranks(rule: Rule, memory: RuleMemory, fresh: Sequence[Pressure], now: float) -> RuleMemory:
    ranks = dict(memory.ranks)
    for pressure in fresh:
        before = ranks.pop(pressure.key, LastReading(level="calm"))
        if pressure.note is not None:
            continue
        retries, earlier = pressure.reading.torch.alloc_retries, before.alloc_retries
        has_risen = retries is not None and earlier is not None and retries > earlier
        after = LastReading(
            level="calm",
            alloc_retries=retries if retries is not None else earlier,
            retried_at=now if has_risen else before.retried_at,
        )
        updated = replace(memory, ranks={pressure.key: after})
        if _is_over(rule, updated, pressure, now):
            after = replace(after, level="urgent" if _is_urgent(updated, pressure, now) else "short")
        ranks[pressure.key] = after
    return replace(memory, ranks=ranks)


def _silent(memory: RuleMemory, report: Report) -> list[RankKey]:
    newest = min((reading.age_seconds for reading in report.ranks), default=0.0)
    recent = {reading.key for reading in report.ranks if reading.age_seconds - newest <= SILENT_SECONDS}
    return sorted(memory.ranks.keys() - recent)


def _worst(rule: Rule, counted: Sequence[Pressure]) -> Pressure | None:
    known = [pressure for pressure in counted if pressure.value is not None]
    if rule.is_derived:
        return min(known, key=lambda pressure: (pressure.value or 0) - (pressure.high or 0), default=None)
    pick = min if rule.signal == "device_free_bytes" else max
    return pick(known, key=lambda pressure: pressure.value or 0, default=None)
