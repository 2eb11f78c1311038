"""The decision: rules, a report, facts about the engine and the memory of its life go in; at most one remedy comes out.

Pure: no I/O, no clock, no logging. For each rule::

            calm ──(high water for sustain_seconds, or urgent)──► relief: the first remedy in order that can give
              ▲                                                     │  ▲    enough, then the next, each at most once
              │◄────────── low water reached: no cooldown ──────────┤  └───────── measured after each ◄──┐
              │                                                     ├── one can ──► acting ─────────────┘
              │◄── nothing could give or was run: no cooldown ──────┤    (reported once: "short, nothing to give back")
              └── cooldown_seconds, 5 s while urgent ◄──────────────┘    remedies were run and low water not reached,
                                                                         or for moments only, three times running

A remedy is run if the workers say that it can give ``min_gain_bytes``, or all that is missing. If it gave less, it is
run again once its figure has grown by what it fell short of, or after an hour if it has no figure. If it was refused,
it is tried again after a minute (``state.learn``).

Tidying is something else: one release in each idle period, if it gives back much, such as what a benchmark left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from highwater.act.pressure import Facts, Pressure, is_reached, is_relieved, possible_gain, pressures, unreachable
from highwater.act.rules import Rule
from highwater.act.state import MAX_RELAPSES, Action, LastReading, LifeMemory, RuleMemory
from highwater.act.views import RuleView, cooldown_text, held_text, reason_text, short_text
from highwater.model.policy import PolicyLevel, RulePhase
from highwater.model.rank import RankKey, rank_title
from highwater.model.remedies import TRAITS, UNNEEDED, Target
from highwater.model.report import Report
from highwater.model.units import MIB, gib_text

URGENT_COOLDOWN_SECONDS: Final = 5.0
# How long an allocation that had to be retried counts as a sign of pressure.
RETRY_SECONDS: Final = 10.0
# A rank whose reading is this much older than the newest is silent.
BEHIND_SECONDS: Final = 10.0
TIDY_AFTER_SECONDS: Final = 30.0
MIN_TIDY_BYTES: Final = 1024 * MIB
TIDY_SHARE: Final = 0.02
# From the best to the worst: where nothing is known or nothing may be done, nothing is worse either.
LEVELS: Final[tuple[PolicyLevel, ...]] = ("unknown", "held", "calm", "short", "urgent")
# Product names of GPUs that share the machine's memory: moving encoder outputs to the host frees nothing there.
_INTEGRATED: Final = ("GB10", "Jetson", "Orin", "Thor", "Xavier", "Tegra")


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
    memory = memory.with_idleness(report, now)
    views, memories, actions = [], dict(memory.rules), []
    for rule in rules:
        turn = _Turn(rule, facts, now, memories.get(rule.name, RuleMemory()))
        view = turn.judge(report)
        if turn.memory.phase != view.phase or turn.memory.since is None:
            turn.memory = replace(turn.memory, phase=view.phase, since=now)
        memories[rule.name] = turn.memory
        views.append(view)
        action = turn.action or turn.tidy(memory, report, view.pressures)
        if action is not None:
            actions.append(action)
    urgent = {view.rule.name for view in views if view.level == "urgent"}

    def order(action: Action) -> tuple[bool, bool, float]:
        runs = memories[action.rule.name].runs.values()
        return action.is_tidying, action.rule.name not in urgent, max((run.at for run in runs), default=-math.inf)

    return replace(memory, rules=memories), Decision(action=min(actions, key=order, default=None), views=tuple(views))


# --- one rule ---


@dataclass(slots=True)
class _Turn:
    """One rule at one report: its memory as it becomes, and the remedy that is to run."""

    rule: Rule
    facts: Facts
    now: float
    memory: RuleMemory
    counted: Sequence[Pressure] = ()  # the ranks that are fresh, and not left out by a note
    action: Action | None = None
    is_helpless: bool = False  # memory is short with nothing to give back

    def judge(self, report: Report) -> RuleView:
        rule, ranks = self.rule, tuple(pressures(self.rule, report, self.facts))
        if (held := self._held(report, ranks)) is not None:
            self._halt()
            return held
        newest = min((reading.age_seconds for reading in report.ranks), default=0.0)
        recent = {reading.key for reading in report.ranks if reading.age_seconds - newest <= BEHIND_SECONDS}
        silent = sorted(self.memory.ranks.keys() - recent)
        fresh = [pressure for pressure in ranks if pressure.key not in silent]
        self._read(fresh)
        self.counted = [pressure for pressure in fresh if pressure.note is None]
        keys = {*silent, *(pressure.key for pressure in self.counted)}
        level: PolicyLevel = max((self.memory.ranks[key].level for key in keys), key=LEVELS.index, default="calm")
        # By what each is beyond its own high water: below it where less is worse.
        known, sign = [one for one in self.counted if one.value is not None], 1 if rule.traits.falls else -1
        view = RuleView(
            rule=rule,
            level=level,
            phase="calm",
            pressures=ranks,
            worst=min(known, key=lambda one: sign * ((one.value or 0) - (one.high or 0)), default=None),
            finding=next((pressure.note for pressure in ranks if pressure.is_finding), None),
        )
        if not report.engine.traits.takes_remedies:
            self._halt()
            text = f"the engine is {report.engine.state_text}: nothing is run until it answers soon again"
            return replace(view, phase="held", reason=text)
        if not self.counted:
            self._halt()
            return replace(view, phase="held", level=level if silent else "held", reason=held_text(ranks, silent))

        self._step()
        until = None if self.memory.relief is not None else self._cooldown_until(urgent=level == "urgent")
        phase: RulePhase = level if level == "short" or level == "urgent" else "calm"  # noqa: PLR1714 - narrows the type
        # While memory is not short, nothing waits for a cooldown.
        is_cooling_down = phase != "calm" and until is not None and self.now < until
        cooldown = cooldown_text(self.memory) if is_cooling_down else None
        reason, hindrance = reason_text(
            rule, level, self.counted, self.facts, is_helpless=self.is_helpless, silent=silent, cooldown=cooldown
        )
        return replace(
            view,
            phase="resting" if is_cooling_down else phase,
            reason=reason,
            hindrance=hindrance,
            is_helpless=self.is_helpless,
            finding=reason if self.is_helpless else view.finding,
            cooldown_until=until if is_cooling_down else None,
        )

    def _held(self, report: Report, ranks: tuple[Pressure, ...]) -> RuleView | None:
        view = RuleView(rule=self.rule, level="held", phase="held", pressures=ranks)
        if report.engine.traits.lacks_weights:
            return replace(view, reason=f"the engine is {report.engine.state}")
        if report.stale:
            text = f"no fresh reading of the workers (the engine is {report.engine.state_text})"
            return replace(view, level="unknown", reason=text, pressures=())
        problem = unreachable(self.rule, self.facts.baseline, report.ranks)
        if problem is None:
            return None
        return replace(view, reason=problem.text, change=problem.change, finding=problem.text)

    def _halt(self) -> None:
        self.memory = replace(self.memory, reached_since=None, relief=None)

    def _read(self, fresh: Sequence[Pressure]) -> None:
        """Remember each rank's level, and when its allocator had to retry."""
        ranks = dict(self.memory.ranks)
        for pressure in fresh:
            before = ranks.pop(pressure.key, LastReading(level="calm"))
            if pressure.note is not None:
                continue
            retries, earlier = pressure.reading.torch.alloc_retries, before.alloc_retries
            has_risen = retries is not None and earlier is not None and retries > earlier
            ranks[pressure.key] = LastReading(
                level="calm",
                alloc_retries=retries if retries is not None else earlier,
                retried_at=self.now if has_risen else before.retried_at,
            )
        self.memory = replace(self.memory, ranks=ranks)
        for pressure in fresh:
            if pressure.note is None and self._is_over(pressure):
                level: PolicyLevel = "urgent" if self._is_urgent(pressure) else "short"
                ranks[pressure.key] = replace(ranks[pressure.key], level=level)

    # --- a relief ---

    def _step(self) -> None:
        """Begin a relief, go on with it, or end it."""
        over = frozenset(pressure.key for pressure in self.counted if self._is_over(pressure))
        since = self.memory.reached_since if self.memory.reached_since is not None else self.now
        memory = replace(self.memory, reached_since=since if over else None)
        self.memory = memory.ended_if_relieved(self.rule, self.counted)
        if self.memory.relief is None:
            is_due = bool(over) and self.now - since >= self.rule.sustain_seconds
            if not is_due or not self._begin(over):
                return
        memory = self.memory = replace(self.memory, relief_ranks=self.memory.relief_ranks | over)
        self.action = self._next_action()
        if self.action is None:
            # Where nothing was run, no cooldown is needed: it acts as soon as there is something to give back.
            ended = max((memory.runs[name].at for name in memory.relief or () if name in memory.runs), default=None)
            self.memory = replace(memory, relief=None, cooldown_from=ended, relapses=0)
            self.is_helpless = bool(over) and not memory.relief

    def _begin(self, over: frozenset[RankKey]) -> bool:
        """Begin a relief; return False where a cooldown stands in the way.

        It is a relapse if the last release helped for seconds only: the steps took back what they work with. A remedy
        that gives other bytes goes first then. To release the same bytes again would only hold the steps up, and the
        engine dies of what grows beside them.
        """
        memory, run = self.memory, self.memory.runs.get("release")
        is_relapse = run is not None and run.is_effective and self.now - run.at < URGENT_COOLDOWN_SECONDS
        is_worn_out = memory.relapses == MAX_RELAPSES
        is_urgent = any(self._is_urgent(pressure) for pressure in self.counted)
        if is_urgent and is_relapse:
            self.memory = replace(memory, relief=("release",), relief_ranks=over, cooldown_from=None)
            if self._next_action() is not None:
                return True
            self.memory = memory
        if run is not None and is_relapse and is_worn_out and memory.cooldown_from is None and not is_urgent:
            memory = self.memory = replace(memory, cooldown_from=run.at)
        until = self._cooldown_until(urgent=is_urgent)
        if until is not None and self.now < until and not (is_urgent and is_worn_out):
            return False
        relapses = min(memory.relapses + 1, MAX_RELAPSES) if is_relapse else 0
        self.memory = replace(memory, relief=(), relief_ranks=frozenset(), cooldown_from=None, relapses=relapses)
        return True

    def _cooldown_until(self, *, urgent: bool) -> float | None:
        if self.memory.cooldown_from is None:
            return None
        return self.memory.cooldown_from + (URGENT_COOLDOWN_SECONDS if urgent else self.rule.cooldown_seconds)

    def _next_action(self) -> Action | None:
        rule, memory = self.rule, self.memory
        needy = [one for one in self.counted if one.key in memory.relief_ranks and not is_relieved(rule, one)]
        for remedy in rule.ordered_remedies:
            if remedy in (memory.relief or ()) or remedy in self.facts.unavailable:
                continue
            able = {
                pressure.key: (size, pressure)
                for pressure in needy
                if self._is_wise(remedy, pressure)
                for size in [self._can_give(remedy, pressure)]
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
                ranks={key: (size, pressure.required_bytes) for key, (size, pressure) in able.items()},
            )
        return None

    def _is_wise(self, remedy: str, pressure: Pressure) -> bool:
        """Return whether it is wise on this rank; what an operator's own rule names is run where it can give."""
        traits, urgent = TRAITS[remedy], self._is_urgent(pressure)
        if traits.moves_to_host and any(name in (pressure.reading.device.name or "") for name in _INTEGRATED):
            return False  # it would move the bytes within the same memory
        if not self.rule.is_derived or traits.default_use == "always":
            return True
        if pressure.reading.card in self.facts.shared_cards:
            return False  # the bytes would go to whoever else uses the device
        if traits.default_use == "last_resort":
            return urgent and is_reached(self.rule, pressure)
        # Where the KV pool was sized with the encoder's budget in mind, vLLM will want these bytes back.
        return urgent or not self.facts.encoder_is_profiled

    def _can_give(self, remedy: str, pressure: Pressure) -> int | None:
        """Return the bytes that the remedy can give on this rank; 0 where too few, ``None`` where it has no figure."""
        gain = possible_gain(remedy, self.rule.signal, pressure.reading)
        wait = self.memory.wait(remedy, pressure.key)
        if wait is not None and self.now < wait.until:
            has_grown = gain.size is not None and wait.figure_bytes is not None and gain.size >= wait.figure_bytes
            if not has_grown:
                return 0
        if gain.size is None:
            return None
        if not gain.is_certain and self.rule.is_derived and not self._is_urgent(pressure):
            return 0  # only an upper bound: worth a try only where nothing may wait
        return gain.size if gain.size >= pressure.required_bytes else 0

    def _is_over(self, pressure: Pressure) -> bool:
        return is_reached(self.rule, pressure) or (self.rule.is_derived and self._has_retried(pressure))

    def _is_urgent(self, pressure: Pressure) -> bool:
        return pressure.is_urgent or self._has_retried(pressure)

    def _has_retried(self, pressure: Pressure) -> bool:
        """Return whether low water is not reached and the allocator had to retry just now."""
        rank = self.memory.ranks.get(pressure.key)
        return pressure.need_bytes > 0 and rank is not None and self.now < rank.retried_at + RETRY_SECONDS

    def tidy(self, life: LifeMemory, report: Report, ranks: Sequence[Pressure]) -> Action | None:
        """Return the one release of an idle period, where it gives back much."""
        rule = self.rule
        if not rule.is_derived or "release" not in rule.ordered_remedies or "release" in self.facts.unavailable:
            return None
        if life.is_tidied or life.idle_since is None or self.now - life.idle_since < TIDY_AFTER_SECONDS:
            return None
        if not report.engine.traits.takes_remedies or any(reading.asleep_tags for reading in report.ranks):
            return None
        able: dict[RankKey, tuple[int, int]] = {}
        for pressure in ranks:
            reading = pressure.reading
            if reading.device.traits.is_host_memory or not reading.total_bytes:
                continue
            gain, wait = possible_gain("release", rule.signal, reading), self.memory.wait("release", pressure.key)
            enough = max(MIN_TIDY_BYTES, int(TIDY_SHARE * reading.total_bytes), (wait and wait.figure_bytes) or 0)
            # An upper bound is tried once: that one release may teach the worker its own figure.
            if gain.size is not None and gain.size >= enough and (gain.is_certain or "release" not in self.memory.runs):
                able[pressure.key] = (gain.size, rule.min_gain_bytes)
        if not able:
            return None
        fullest = max(able, key=lambda key: able[key][0])
        where = f" on rank {rank_title(*fullest)}" if len(ranks) > 1 else ""
        why = f"no request for {TIDY_AFTER_SECONDS:.0f} s and {gib_text(able[fullest][0])} unused{where}"
        return Action(rule=rule, remedy="release", why=why, ranks=able, is_tidying=True)
