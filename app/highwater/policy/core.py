"""The decision: rules, a report, facts about the engine and what is remembered of its life go in; one remedy or none.

Pure: no I/O, no clock, no logging. ``decide`` looks, ``learn`` takes in how a remedy went. For each rule::

            calm ──(high water for sustain_seconds, or urgent)──► relief: the first remedy in order that can give
              ▲                                                     │  ▲    enough, then the next, each at most once
              │◄──────────── low water reached: no rest ────────────┤  └───────── measured after each ◄──┐
              │                                                     ├── one can ──► acting ─────────────┘
              │◄── nothing could give, nothing was run: no rest ────┤    (reported once: "short, nothing to give back")
              └── rest: cooldown_seconds, 5 s while urgent ◄────────┘    remedies were run and low water not reached,
                                                                         or for moments only, three times running

What is remembered is each remedy's last action and outcome, the relief in progress, and each rank's last figures, and
it goes with the engine's life. There is no list of remedies given up: a remedy is run where the workers say that it
can give ``min_gain_bytes`` or what is missing. One that gave less than that waits until its figure has grown by what it
fell short of; where it has no figure, for an hour. One that was refused is tried again after a minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from highwater.accounting.attribution import RankKey, card, rank_key
from highwater.policy.gains import freed, is_integrated, word
from highwater.policy.pressure import Facts, Pressure, is_reached, is_relieved, pressures, unreachable
from highwater.policy.rules import FILL_SIGNALS, MIN_GAIN_BYTES, Rule
from highwater.readings import (
    UNNEEDED,
    ActionOutcome,
    Outcome,
    PolicyLevel,
    RankFreed,
    RankReading,
    RemedyResult,
    Report,
    RulePhase,
    Target,
)
from highwater.units import MIB

URGENT_REST_SECONDS: Final = 5.0
# How long an allocation that had to be retried counts as a sign of pressure.
RETRY_SECONDS: Final = 10.0
# A rank whose reading is that much older than the newest one's is silent.
SILENT_SECONDS: Final = 10.0
INEFFECTIVE_SECONDS: Final = 3600.0
# A refusal that could not be foreseen is one of the moment: requests that would not end, a call of somebody else's.
REFUSED_SECONDS: Final = 60.0
# A release holds the steps up. Bytes that are in use again within moments, so many times running, are what the engine
# works with: as long as nothing is urgent, it rests then.
MAX_RELAPSES: Final = 3
IDLE_SECONDS: Final = 30.0
MIN_TIDY_BYTES: Final = 1024 * MIB
TIDY_SHARE: Final = 0.02
# From the best to the worst: where nothing is known or nothing may be done, nothing is worse either.
LEVELS: Final[tuple[PolicyLevel, ...]] = ("unknown", "held", "calm", "short", "urgent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The end of an ineffective or refused remedy's wait on one rank: either of two conditions.

    Attributes:
        figure_bytes: What it must be able to give; ``None`` where it has no figure.
        until: The time.
    """

    figure_bytes: int | None = None
    until: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """A remedy's last action and outcome in this life, for one rule.

    Attributes:
        at: When it ended.
        outcome: What became of it.
        is_effective: Whether it gave what it had to.
        reason: Why not, or what the engine said.
        freed_bytes: What it freed, over all ranks; ``None`` where that was not measured.
        ranks: The same by rank.
        waits: What it waits for, by rank.
    """

    at: float
    outcome: Outcome
    is_effective: bool = False
    reason: str | None = None
    freed_bytes: int | None = None
    ranks: tuple[RankFreed, ...] = ()
    waits: Mapping[RankKey, Wait] = field(default_factory=dict)

    @property
    def judged(self) -> ActionOutcome:
        """The outcome, by what it gave."""
        return "ineffective" if self.outcome == "done" and not self.is_effective else self.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The policy's memory of one rank for one rule.

    Attributes:
        level: How it stood at its last fresh reading.
        alloc_retries: The allocator's count then.
        retried_at: When that was last seen to rise.
    """

    level: PolicyLevel
    alloc_retries: int | None = None
    retried_at: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMemory:
    """The policy's memory of one rule. Times are the caller's seconds.

    Attributes:
        phase: As it was last.
        since: When it entered it.
        reached_since: Since when the signal has been at high water, without a break in fresh readings.
        relief: The remedies that the relief in progress has run; ``None`` where none is in progress.
        relief_ranks: The ranks that called for it.
        rest_from: When the last relief ended that did not reach low water, or not for long; ``None`` where it did.
        relapses: How many reliefs running began moments after a release that had helped.
        runs: Each remedy's last run.
        ranks: Each rank's last figures.
    """

    phase: RulePhase = "calm"
    since: float | None = None
    reached_since: float | None = None
    relief: tuple[str, ...] | None = None
    relief_ranks: frozenset[RankKey] = frozenset()
    rest_from: float | None = None
    relapses: int = 0
    runs: Mapping[str, LastRun] = field(default_factory=dict)
    ranks: Mapping[RankKey, RankMemory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeMemory:
    """The policy's memory of one life of the engine.

    Attributes:
        life: Its id.
        rules: By rule's name.
        idle_since: Since when no request is known to run or wait; ``None`` while one does, or nobody knows.
        is_tidied: Whether this idle period has had its release.
        work_done: The engine's counters of work, when they were last known.
    """

    life: str = ""
    rules: Mapping[str, RuleMemory] = field(default_factory=dict)
    idle_since: float | None = None
    is_tidied: bool = False
    work_done: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One remedy to run.

    Attributes:
        rule: For which rule.
        remedy: Its name.
        why: In words.
        target: How far a trim goes.
        ranks: What it can give, and what it must give to count as effective, on each rank for which it is run.
        is_tidying: Whether it only tidies an idle engine.
    """

    rule: Rule
    remedy: str
    why: str
    target: Target = UNNEEDED
    ranks: Mapping[RankKey, tuple[int | None, int]] = field(default_factory=dict)
    is_tidying: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleView:
    """One rule, as it stands at one report.

    Attributes:
        rule: The rule.
        level: How the memory stands by it.
        phase: What the rule does about it.
        reason: One sentence; ``None`` where all is calm.
        pressures: Its ranks.
        worst: The rank that is worst off; ``None`` without a known one.
        is_helpless: Whether memory is short and nothing here can be given back.
        finding: What an operator should hear of once: that, or why the rule can never act here.
        rest_until: When its rest ends; ``None`` where it has none.
    """

    rule: Rule
    level: PolicyLevel
    phase: RulePhase
    reason: str | None = None
    pressures: tuple[Pressure, ...] = ()
    worst: Pressure | None = None
    is_helpless: bool = False
    finding: str | None = None
    rest_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision for one report: at most one remedy, and how every rule stands."""

    action: Action | None = None
    views: tuple[RuleView, ...] = ()


def decide(
    rules: Sequence[Rule], report: Report, facts: Facts, memory: LifeMemory, now: float
) -> tuple[LifeMemory, Decision]:
    """Look at one report.

    Args:
        rules: One of those that have something to do does it: an urgent one first, then who has not acted for longest.
        report: The last one, with its age.
        facts: What else is known of the engine.
        memory: What is remembered of its life.
        now: The time, in seconds.
    """
    if memory.life != facts.life:
        memory = LifeMemory(life=facts.life)
    memory = _idle(memory, report, now)
    views, memories, actions = [], dict(memory.rules), []
    for rule in rules:
        looked, view, action = _look(rule, memories.get(rule.name, RuleMemory()), report, facts, now)
        if looked.phase != view.phase or looked.since is None:
            looked = replace(looked, phase=view.phase, since=now)
        memories[rule.name] = looked
        views.append(view)
        if action is None and _may_tidy(rule, memory, report, facts, now):
            action = _tidy(view, looked)
        if action is not None:
            actions.append(action)
    urgent = {view.rule.name for view in views if view.level == "urgent"}

    def turn(action: Action) -> tuple[bool, bool, float]:
        runs = memories[action.rule.name].runs.values()
        return action.is_tidying, action.rule.name not in urgent, max((run.at for run in runs), default=-math.inf)

    return replace(memory, rules=memories), Decision(action=min(actions, key=turn, default=None), views=tuple(views))


# --- one rule ---


def _look(
    rule: Rule, memory: RuleMemory, report: Report, facts: Facts, now: float
) -> tuple[RuleMemory, RuleView, Action | None]:
    held = _hold(report)
    if held is not None:
        level, reason = held
        memory = replace(memory, reached_since=None, relief=None)
        shown = tuple(pressures(rule, report, facts)) if level == "held" else ()
        view = RuleView(rule=rule, level=level, phase="held", reason=reason, pressures=shown)
        return memory, view, None

    problem = unreachable(rule, facts.baseline, report.ranks)
    if problem is not None:
        memory = replace(memory, reached_since=None, relief=None)
        shown = tuple(pressures(rule, report, facts))
        view = RuleView(rule=rule, level="held", phase="held", reason=problem, pressures=shown, finding=problem)
        return memory, view, None

    found = tuple(pressures(rule, report, facts))
    silent = _silent(memory, report)
    fresh = [one for one in found if one.key not in silent]
    memory = _remember_ranks(rule, memory, fresh, now)
    counted = [one for one in fresh if one.note is None]
    level = _worst_level(memory.ranks[key].level for key in {*silent, *(one.key for one in counted)})
    view = RuleView(
        rule=rule,
        level=level,
        phase="calm",
        pressures=found,
        worst=_worst(rule, counted),
        finding=next((one.note for one in found if one.is_finding), None),
    )
    if not report.engine.traits.takes_remedies:
        doing = report.engine.state.replace("_", " ")
        view = replace(view, phase="held", reason=f"the engine is {doing}: nothing is run until it answers soon again")
        return replace(memory, reached_since=None, relief=None), view, None
    if not counted:
        view = replace(view, phase="held", level=level if silent else "held", reason=_held_words(found, silent))
        return replace(memory, reached_since=None, relief=None), view, None

    memory, action, is_helpless = _climb(rule, memory, counted, facts, now)
    rest_until = _rest_until(rule, memory, level)
    is_resting = memory.relief is None and rest_until is not None and now < rest_until
    phase: RulePhase = "resting" if is_resting else "urgent" if level == "urgent" else "calm"
    if level == "short" and not is_resting:
        phase = "short"
    words = _words(
        rule,
        level,
        counted,
        facts,
        is_helpless=is_helpless,
        silent=silent,
        rest=_why_rest(memory) if is_resting else None,
    )
    view = replace(
        view,
        phase=phase,
        reason=words,
        is_helpless=is_helpless,
        finding=words if is_helpless else view.finding,
        rest_until=rest_until if is_resting else None,
    )
    return memory, view, action


def _hold(report: Report) -> tuple[PolicyLevel, str] | None:
    """Why the rule may not act at all now, with the level that this is; ``None`` where it may."""
    state = report.engine.state
    if report.engine.traits.lacks_weights:
        return "held", f"the engine is {state}"
    if report.stale:
        return "unknown", f"no fresh reading of the workers (the engine is {state.replace('_', ' ')})"
    return None


def _climb(
    rule: Rule, memory: RuleMemory, counted: Sequence[Pressure], facts: Facts, now: float
) -> tuple[RuleMemory, Action | None, bool]:
    """One step of a relief: begin it, go on with it, or end it; and whether memory is short with nothing to give."""
    over = frozenset(one.key for one in counted if _is_over(rule, memory, one, now))
    since = memory.reached_since if memory.reached_since is not None else now
    memory = replace(memory, reached_since=since if over else None)
    memory = _end_if_relieved(rule, memory, counted)
    if memory.relief is None:
        if not over or now - since < rule.sustain_seconds:
            return memory, None, False
        urgent, relapsed = any(_is_urgent(memory, one, now) for one in counted), _has_relapsed(memory, now)
        if urgent and relapsed:
            going_on = replace(memory, relief=("release",), relief_ranks=over, rest_from=None)
            action = _next(rule, going_on, counted, facts, now)
            if action is not None:
                return going_on, action, False
        if relapsed and memory.relapses == MAX_RELAPSES and memory.rest_from is None and not urgent:
            memory = replace(memory, rest_from=memory.runs["release"].at)
        if _is_at_rest(rule, memory, now, urgent=urgent):
            return memory, None, False
        relapses = min(memory.relapses + 1, MAX_RELAPSES) if relapsed else 0
        memory = replace(memory, relief=(), relief_ranks=frozenset(), rest_from=None, relapses=relapses)
    memory = replace(memory, relief_ranks=memory.relief_ranks | over)
    action = _next(rule, memory, counted, facts, now)
    if action is not None:
        return memory, action, False
    # Where nothing was run, nothing needs a rest: it acts as soon as there is something to give back.
    ended = max((memory.runs[name].at for name in memory.relief or () if name in memory.runs), default=None)
    return replace(memory, relief=None, rest_from=ended, relapses=0), None, bool(over) and not memory.relief


def _is_at_rest(rule: Rule, memory: RuleMemory, now: float, *, urgent: bool) -> bool:
    if memory.rest_from is None or (urgent and memory.relapses == MAX_RELAPSES):
        return False
    return now < memory.rest_from + (URGENT_REST_SECONDS if urgent else rule.cooldown_seconds)


def _end_if_relieved(rule: Rule, memory: RuleMemory, counted: Sequence[Pressure]) -> RuleMemory:
    """A relief that reached low water on the ranks that called for it needs no rest."""
    asked = [one for one in counted if one.key in memory.relief_ranks]
    if memory.relief is None or not all(is_relieved(rule, one) for one in asked):
        return memory
    return replace(memory, relief=None, rest_from=None)


def _has_relapsed(memory: RuleMemory, now: float) -> bool:
    """Return whether the last release helped for seconds only: the steps took back what they work with.

    Where another remedy can give, it is its turn then. To release the same bytes again would only hold the steps up,
    and the engine dies of what grows beside them.
    """
    run = memory.runs.get("release")
    return run is not None and run.is_effective and now - run.at < URGENT_REST_SECONDS


def _next(rule: Rule, memory: RuleMemory, counted: Sequence[Pressure], facts: Facts, now: float) -> Action | None:
    """The first remedy in order that can give enough on a rank in need."""
    needy = [one for one in counted if one.key in memory.relief_ranks and not is_relieved(rule, one)]
    for remedy in rule.remedies:
        if remedy in (memory.relief or ()) or remedy in facts.unavailable:
            continue
        able = {
            one.key: (size, one)
            for one in needy
            if _may(rule, remedy, one, facts, urgent=_is_urgent(memory, one, now))
            for size in [_can_give(rule, remedy, memory, one, now)]
            if size is None or size > 0
        }
        if not able:
            continue
        need = max(one.need_bytes for _, one in able.values())
        return Action(
            rule=rule,
            remedy=remedy,
            why=_short(max((one for _, one in able.values()), key=lambda one: one.need_bytes), rule),
            target=_target(rule, remedy, need),
            ranks={key: (size, _gain(one)) for key, (size, one) in able.items()},
        )
    return None


def _may(rule: Rule, remedy: str, one: Pressure, facts: Facts, *, urgent: bool) -> bool:
    """Return whether the remedy is wise on this rank; an operator's own waters and remedies are taken at their word."""
    if remedy == "trim_encoder_cache" and is_integrated(one.reading):
        return False  # it would move the bytes within the same memory
    if not rule.is_derived or remedy not in {"trim_encoder_cache", "reset_encoder_cache"}:
        return True
    if card(one.reading) in facts.shared_cards:
        return False  # the bytes would go to whoever else uses the device
    if remedy == "reset_encoder_cache":
        return urgent and is_reached(rule, one)
    # Where the KV pool was sized with the encoder's budget in mind, vLLM will want these bytes back.
    return urgent or not facts.encoder_is_profiled


def _can_give(rule: Rule, remedy: str, memory: RuleMemory, one: Pressure, now: float) -> int | None:
    """Return what the remedy can give on this rank; 0 where it is too little, ``None`` where it has no figure."""
    said = word(remedy, rule.signal, one.reading)
    run = memory.runs.get(remedy)
    wait = run.waits.get(one.key) if run is not None else None
    if wait is not None and now < wait.until and not _has_grown(said.size, wait):
        return 0
    if said.size is None:
        return None
    if not said.is_certain and rule.is_derived and not _is_urgent(memory, one, now):
        return 0  # no more than a bound: worth a try only where nothing may wait
    return said.size if said.size >= _gain(one) else 0


def _has_grown(size: int | None, wait: Wait) -> bool:
    return size is not None and wait.figure_bytes is not None and size >= wait.figure_bytes


def _gain(one: Pressure) -> int:
    """Return what a remedy must be able to give to be worth running: never more than what is missing."""
    return max(min(one.gain_bytes, one.need_bytes), 1)


def _target(rule: Rule, remedy: str, need: int) -> Target:
    if remedy != "trim_encoder_cache":
        return UNNEEDED
    if rule.signal == "encoder_cache_bytes":
        return Target(keep_bytes=max(math.floor(rule.low_water or 0.0), 0))
    return Target(free_bytes=need)


def _is_over(rule: Rule, memory: RuleMemory, one: Pressure, now: float) -> bool:
    """Return whether the rank needs relief: at high water, or an allocation had to be retried under low water."""
    if is_reached(rule, one):
        return True
    return rule.is_derived and one.need_bytes > 0 and _has_retried(memory, one, now)


def _is_urgent(memory: RuleMemory, one: Pressure, now: float) -> bool:
    return one.is_urgent or (one.need_bytes > 0 and _has_retried(memory, one, now))


def _has_retried(memory: RuleMemory, one: Pressure, now: float) -> bool:
    known = memory.ranks.get(one.key)
    return known is not None and now < known.retried_at + RETRY_SECONDS


def _rest_until(rule: Rule, memory: RuleMemory, level: PolicyLevel) -> float | None:
    if memory.rest_from is None:
        return None
    return memory.rest_from + (URGENT_REST_SECONDS if level == "urgent" else rule.cooldown_seconds)


# --- ranks ---


def _remember_ranks(rule: Rule, memory: RuleMemory, fresh: Sequence[Pressure], now: float) -> RuleMemory:
    ranks = dict(memory.ranks)
    for one in fresh:
        was, retries = ranks.get(one.key), one.reading.torch.alloc_retries
        known = was.alloc_retries if was is not None else None
        retried_at = was.retried_at if was is not None else -math.inf
        if retries is not None and known is not None and retries > known:
            retried_at = now
        if one.note is not None:
            ranks.pop(one.key, None)
            continue
        ranks[one.key] = RankMemory(
            level="calm", alloc_retries=retries if retries is not None else known, retried_at=retried_at
        )
        looked = replace(memory, ranks=ranks)
        if _is_over(rule, looked, one, now):
            level: PolicyLevel = "urgent" if _is_urgent(looked, one, now) else "short"
            ranks[one.key] = replace(ranks[one.key], level=level)
    return replace(memory, ranks=ranks)


def _silent(memory: RuleMemory, report: Report) -> dict[RankKey, PolicyLevel]:
    """Ranks that were heard of before and are not now, or not lately, with the level that they had."""
    newest = min((reading.age_seconds for reading in report.ranks), default=0.0)
    heard = {rank_key(reading) for reading in report.ranks if reading.age_seconds - newest <= SILENT_SECONDS}
    return {key: known.level for key, known in memory.ranks.items() if key not in heard}


def _worst(rule: Rule, counted: Sequence[Pressure]) -> Pressure | None:
    known = [one for one in counted if one.value is not None]
    if rule.is_derived:
        return min(known, key=lambda one: (one.value or 0) - (one.high or 0), default=None)
    pick = min if rule.signal == "device_free_bytes" else max
    return pick(known, key=lambda one: one.value or 0, default=None)


def _worst_level(levels: Iterable[PolicyLevel]) -> PolicyLevel:
    return max(levels, key=LEVELS.index, default="calm")


# --- an idle engine ---


def _idle(memory: LifeMemory, report: Report, now: float) -> LifeMemory:
    engine = report.engine
    is_idle = not report.stale and engine.requests_running == 0 and engine.requests_waiting == 0
    # A short request may come and go between two readings; it leaves its tokens in the counters.
    has_worked = None not in {engine.work_done, memory.work_done} and engine.work_done != memory.work_done
    memory = replace(memory, work_done=engine.work_done if engine.work_done is not None else memory.work_done)
    if not is_idle:
        return replace(memory, idle_since=None, is_tidied=False)
    if has_worked:
        return replace(memory, idle_since=now, is_tidied=False)
    return memory if memory.idle_since is not None else replace(memory, idle_since=now)


def _may_tidy(rule: Rule, memory: LifeMemory, report: Report, facts: Facts, now: float) -> bool:
    if not rule.is_derived or "release" not in rule.remedies or "release" in facts.unavailable:
        return False
    if memory.is_tidied or memory.idle_since is None or now - memory.idle_since < IDLE_SECONDS or report.stale:
        return False
    return report.engine.traits.takes_remedies and not any(reading.asleep_tags for reading in report.ranks)


def _tidy(view: RuleView, memory: RuleMemory) -> Action | None:
    """One release in each idle period, where it gives back much: what a benchmark left, nobody needs."""
    rule, run = view.rule, memory.runs.get("release")
    able: dict[RankKey, tuple[int | None, int]] = {}
    for one in view.pressures:
        if one.reading.device.type == "cpu" or not one.reading.total_bytes:
            continue
        said = word("release", rule.signal, one.reading)
        enough = max(MIN_TIDY_BYTES, int(TIDY_SHARE * one.reading.total_bytes))
        wait = run.waits.get(one.key) if run is not None else None
        if said.size is None or said.size < enough or (wait is not None and said.size < (wait.figure_bytes or 0)):
            continue
        if not said.is_certain and run is not None:
            continue  # a figure that is only a bound is tried once: that one release may teach the worker its own
        able[one.key] = (said.size, rule.min_gain_bytes)
    if not able:
        return None
    most = max(size or 0 for size, _ in able.values())
    why = f"no request for {IDLE_SECONDS:.0f} s and {most // MIB:,} MiB that nobody uses"
    return Action(rule=rule, remedy="release", why=why, ranks=able, is_tidying=True)


# --- how it went ---


def begin(memory: LifeMemory, action: Action) -> LifeMemory:
    """The action is started: it is part of the relief, or it was this idle period's release."""
    known = memory.rules.get(action.rule.name, RuleMemory())
    if action.is_tidying:
        return replace(memory, is_tidied=True)
    known = replace(known, relief=(*(known.relief or ()), action.remedy))
    return replace(memory, rules={**memory.rules, action.rule.name: known})


def learn(
    memory: LifeMemory,
    action: Action,
    result: RemedyResult,
    *,
    before: Sequence[RankReading],
    after: Sequence[RankReading],
    seen: Report,
    facts: Facts,
    now: float,
) -> LifeMemory:
    """Take in how the action went.

    Args:
        memory: As it was when the action was begun. If the life has ended meanwhile, hand in none of it.
        action: What was run.
        result: What became of it.
        before: The readings before it.
        after: The readings after it; empty where there were none.
        seen: The last report, which brought these.
        facts: What else is known of the engine.
        now: When it ended.
    """
    rule, remedy = action.rule, action.remedy
    known = memory.rules.get(rule.name, RuleMemory())
    ranks: tuple[RankFreed, ...] = ()
    freed_bytes = None
    if result.outcome in {"done", "failed"} and after:
        ranks, freed_bytes = freed(remedy, rule.signal, result, before, after)
    run = LastRun(
        at=now,
        outcome=result.outcome,
        reason=result.reason,
        freed_bytes=freed_bytes,
        ranks=ranks,
        waits=known.runs[remedy].waits if remedy in known.runs else {},
    )
    run = _judge(action, run, after, now)
    ends = result.outcome == "observed"  # it changed nothing, and so would the next one
    relief = None if ends else known.relief
    rest_from = now if ends and not action.is_tidying else known.rest_from
    known = replace(known, runs={**known.runs, remedy: run}, relief=relief, rest_from=rest_from)
    if ends:
        known = replace(known, relapses=0)
    if not seen.stale and after:
        # Now, or the next wave would be taken for a relief that has not helped.
        known = _end_if_relieved(rule, known, pressures(rule, seen, facts))
    return replace(memory, rules={**memory.rules, rule.name: known})


def _judge(action: Action, run: LastRun, after: Sequence[RankReading], now: float) -> LastRun:
    """Return the run with whether it gave enough on any of its ranks, and what it waits for where it did not."""
    gave = {rank_key(one): one.freed_bytes or 0 for one in run.ranks}
    left = {rank_key(one): word(action.remedy, action.rule.signal, one).size for one in after}
    waits, effective = dict(run.waits), False
    for key, (said, gain) in action.ranks.items():
        given = gave.get(key, gain)  # what was not measured is taken to have helped
        if run.outcome == "done" and given >= gain:
            waits.pop(key, None)
            effective = True
        elif run.outcome == "done":
            figure = None if said is None else (left.get(key) or 0) + max(gain, said - given)
            waits[key] = Wait(figure_bytes=figure, until=now + INEFFECTIVE_SECONDS if figure is None else math.inf)
        elif run.outcome in {"refused", "observed"}:
            figure = None if said is None else said + gain
            seconds = REFUSED_SECONDS if run.outcome == "refused" else INEFFECTIVE_SECONDS
            waits[key] = Wait(figure_bytes=figure, until=now + seconds)
    return replace(run, waits=waits, is_effective=effective)


# --- in words ---


def _short(one: Pressure, rule: Rule) -> str:
    dp_rank, rank = one.key
    where = f"rank {rank}" if not dp_rank else f"rank {dp_rank}.{rank}"
    missing = f"{math.ceil(one.need_bytes / MIB):,} MiB"
    if rule.signal in FILL_SIGNALS:
        return f"short by {missing} on {where}"
    return f"{rule.signal} is {missing} over low water on {where}"


def _words(
    rule: Rule,
    level: PolicyLevel,
    counted: Sequence[Pressure],
    facts: Facts,
    *,
    is_helpless: bool,
    silent: Mapping[RankKey, PolicyLevel],
    rest: str | None,
) -> str | None:
    parts = []
    if level in {"short", "urgent"}:
        needy = sorted(counted, key=lambda one: -one.need_bytes)
        if needy[0].need_bytes > 0:
            parts.append(_short(needy[0], rule))
        kept = sum(one.reading.trimmable_bytes or 0 for one in needy) if is_helpless and level == "short" else 0
        if kept >= MIN_GAIN_BYTES and rule.is_derived and "trim_encoder_cache" not in facts.unavailable:
            parts.append(
                f"{kept // MIB:,} MiB of encoder outputs could be trimmed, and are kept until it is urgent, as vLLM "
                "would want them back; `highwater reclaim trim_encoder_cache` does it now"
            )
        elif is_helpless:
            parts.append("nothing here to give back" + _because(rule, facts))
            parts += [text for text in (_shared(rule, needy, facts), _elsewhere(needy, facts)) if text]
    if rest is not None:
        parts.append(rest)
    if silent:
        parts.append(_silence(silent))
    return "; ".join(parts) or None


def _why_rest(memory: RuleMemory) -> str:
    last = max(memory.runs.values(), key=lambda run: run.at, default=None)
    if last is not None and last.outcome == "observed":
        return "a remedy would have been run and was only observed; the next one is looked for after the cooldown"
    if memory.relapses == MAX_RELAPSES:
        return f"what release gives back was in use again within moments, {MAX_RELAPSES} times running: cooldown"
    return "the last relief did not reach low water: cooldown"


def _because(rule: Rule, facts: Facts) -> str:
    blocked = [f"{name}: {why}" for name in rule.remedies if (why := facts.unavailable.get(name)) is not None]
    return f" ({'; '.join(blocked)})" if blocked else ""


def _shared(rule: Rule, needy: Sequence[Pressure], facts: Facts) -> str | None:
    if not rule.is_derived or not any(card(one.reading) in facts.shared_cards for one in needy):
        return None
    return "the device is shared with another engine: trim and reset, which would feed that one, are left to you"


def _elsewhere(needy: Sequence[Pressure], facts: Facts) -> str | None:
    """Return in words what grew outside PyTorch since the engine became ready: no remedy reaches it."""
    was = {rank_key(reading): reading.components.non_torch_bytes for reading in facts.baseline}
    now, then = needy[0].reading.components.non_torch_bytes, was.get(needy[0].key)
    if now is None or then is None or now - then < MIN_GAIN_BYTES:
        return None
    grown = (now - then) // MIB
    return f"{grown:,} MiB more than at the start are held outside PyTorch, by libraries or by other processes there"


def _silence(silent: Mapping[RankKey, PolicyLevel]) -> str:
    names = ", ".join(str(rank) if not dp_rank else f"{dp_rank}.{rank}" for dp_rank, rank in sorted(silent))
    verb = "rank {} is silent" if len(silent) == 1 else "ranks {} are silent"
    return verb.format(names) + ": the last known level stands"


def _held_words(found: Sequence[Pressure], silent: Mapping[RankKey, PolicyLevel]) -> str:
    notes = list(dict.fromkeys(one.note for one in found if one.note is not None))
    return "; ".join([*notes, *([_silence(silent)] if silent else [])]) or "no rank is known"
