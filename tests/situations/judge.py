"""A count of what happened, from the model's truth: the sidecar is never asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.situations.device import GIB, MIB, DeviceFullError
from tests.situations.engine import EngineModel
from tests.situations.worker import ModelWorker

if TYPE_CHECKING:
    from tests.situations.situation import Situation

MIN_GAIN = 256 * MIB
"""A remedy that gave its own component less was in vain; on a small device, less than the way from high to low."""
MIN_SLACK = 256 * MIB
FIRST_SECONDS, NEXT_SECONDS = 2.0, 6.0
"""The time from urgent pressure to the first remedy, and from a remedy's end to the next where that did not suffice."""
SETTLING_SECONDS = 3.0
"""After an engine became ready nobody is late: the sidecar has yet to find it."""
TAIL_SECONDS = 1.0
"""A release that follows a trim or reset so closely belongs to it."""
IN_VAIN_AN_HOUR = 1
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Marks:
    """The free bytes below which there is pressure on one rank."""

    high: int
    low: int


def marks(total: int, requested: int | None, rest: int) -> Marks | None:
    """The contract's marks; None where the plan leaves too little to speak of pressure.

    ``requested`` is what the engine was configured to take, ``None`` where that did not size anything; ``rest`` is used
    at rest, by everybody, without encoder outputs, releasable reserve and other tensors.
    """
    slack = total - max(requested or 0, rest)
    if slack < MIN_SLACK:
        return None
    high = min(max(slack // 4, 512 * MIB), slack // 2, 2 * GIB)
    return Marks(high, min(2 * high, slack * 9 // 10))


@dataclass(frozen=True, slots=True)
class Remedy:
    """One remedy, with the release that followed it."""

    kind: str
    began_at: float
    ended_at: float
    gave: tuple[int, ...]
    was_working: bool
    worth: int = MIN_GAIN

    @property
    def in_vain(self) -> bool:
        """Return whether no rank got back what is worth a remedy."""
        return max(self.gave, default=0) < self.worth


@dataclass(slots=True)
class _Episode:
    """Urgent pressure on one rank, from when it began."""

    since: float
    answered: bool = False
    is_reported: bool = False


@dataclass
class Outcome:
    """The outcome of one situation."""

    deaths: list[str] = field(default_factory=list)
    covered_deaths: list[str] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    given_back: int = 0
    seconds_short: float = 0.0
    first_delays: list[float] = field(default_factory=list)
    next_delays: list[float] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    crowded_idle_periods: list[str] = field(default_factory=list)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def by_kind(self) -> Counter[str]:
        return Counter(remedy.kind for remedy in self.remedies)

    @property
    def in_vain(self) -> list[Remedy]:
        """Those that gave nothing worth it."""
        return [remedy for remedy in self.remedies if remedy.in_vain]

    def in_vain_within_an_hour(self) -> int:
        times = [remedy.began_at for remedy in self.in_vain]
        return max((sum(at <= time < at + _HOUR for time in times) for at in times), default=0)


class Judge:
    """Watches an engine, which reports everything to it.

    With ``cache_counts`` encoder outputs that nobody needs count among what could be given back: where they are what
    filled the device. Elsewhere the next images would want those bytes back.
    """

    def __init__(self, engine: EngineModel, *, cache_counts: bool = False) -> None:
        self.outcome = Outcome()
        self._engine = engine
        self._cache_counts = cache_counts
        self._began_at = engine.clock()
        self._marks: dict[int, Marks | None] = {}
        self._episodes: dict[int, _Episode] = {}
        self._ended_at: float | None = None
        self._unrelieved: set[int] = set()
        self._was_idle = False
        self._idle_releases = 0

    # --- what the engine reports ---

    def began(self) -> None:
        """A life began: its plan gives the marks."""
        options = self._engine.options
        self._episodes.clear()
        for worker in self._engine.workers:
            memory = worker.memory
            sized = options.kv_cache_memory_bytes is None
            requested = int(memory.card.total * options.utilization) if sized else None
            rest = memory.card.total - memory.card.free - memory.plan.other
            self._marks[memory.index] = marks(memory.card.total, requested, rest)

    def looked(self, seconds: float) -> None:
        engine = self._engine
        now = engine.clock()
        if not engine.is_ready:
            self._episodes.clear()
            return
        if any(self._is_short(worker) for worker in engine.workers):
            self.outcome.seconds_short += seconds
        is_idle = not engine.is_working and not engine.is_asleep
        if is_idle and not self._was_idle:
            self._idle_releases = 0
        self._was_idle = is_idle
        for worker in engine.workers:
            self._look_at_pressure(worker, now)

    def remedy(self, kind: str, began_at: float, gave: tuple[int, ...]) -> None:
        """One operation that gives memory back ended: so many bytes of its own component on each rank."""
        outcome, now = self.outcome, self._engine.clock()
        if kind == "release":
            outcome.given_back += sum(gave)
        last = outcome.remedies[-1] if outcome.remedies else None
        follows = last is not None and began_at - last.ended_at < TAIL_SECONDS
        same = last is not None and ((last.kind == kind == "trim") or (kind == "release" and last.kind != "release"))
        if last is not None and follows and same:
            # The rest of one relief: further rounds of a trim, and the release that shows the device its bytes.
            added = tuple(map(sum, zip(last.gave, gave, strict=True))) if kind != "release" else last.gave
            outcome.remedies[-1] = replace(last, ended_at=now, gave=added)
            self._remember_end(now)
            return
        self._answer(began_at)
        outcome.remedies.append(Remedy(kind, began_at, now, gave, self._engine.is_working, self._worth()))
        self._remember_end(now)
        if kind == "release" and self._was_idle:
            self._idle_releases += 1
            if self._idle_releases == 2:
                outcome.crowded_idle_periods.append(f"at {began_at - self._began_at:.0f} s")

    def died(self, error: DeviceFullError) -> None:
        engine, at = self._engine, self._engine.clock() - self._began_at
        worker = next(worker for worker in engine.workers if worker.memory is error.rank)
        could_give = error.rank.releasable + (worker.trimmable if self._cache_counts else 0)
        text = f"rank {error.rank.index} at {at:.0f} s: {error}"
        self.outcome.deaths.append(text)
        if error.free + could_give >= error.nbytes:
            self.outcome.covered_deaths.append(f"{text}, {could_give / MIB:.0f} MiB could be given back")

    def finish(self) -> Outcome:
        self.outcome.seconds = self._engine.clock() - self._began_at
        return self.outcome

    def _remember_end(self, now: float) -> None:
        self._ended_at = now
        self._unrelieved = {
            worker.memory.index
            for worker in self._engine.workers
            if (found := self._marks.get(worker.memory.index)) is not None and worker.memory.card.free < found.low
        }

    def _worth(self) -> int:
        known = [found.low - found.high for found in self._marks.values() if found is not None]
        return min([MIN_GAIN, *known])

    # --- pressure ---

    def _is_short(self, worker: ModelWorker) -> bool:
        found = self._marks.get(worker.memory.index)
        return found is not None and not self._engine.is_asleep and worker.memory.card.free < found.high

    def _is_urgent(self, worker: ModelWorker, now: float) -> bool:
        found, engine = self._marks.get(worker.memory.index), self._engine
        if found is None or worker.is_silent or engine.is_asleep or now < engine.stuck_until:
            return False
        if now - engine.ready_at < SETTLING_SECONDS:
            return False
        can_trim = worker.trimmable - worker.memory.plan.image if self._cache_counts else 0
        return worker.memory.card.free < found.high // 2 and max(worker.memory.releasable, can_trim) >= MIN_GAIN

    def _look_at_pressure(self, worker: ModelWorker, now: float) -> None:
        index = worker.memory.index
        if not self._is_urgent(worker, now):
            self._episodes.pop(index, None)
            return
        if index not in self._episodes:
            # What comes back within moments of a relief that fell short is the same pressure: its rest is due.
            again = index in self._unrelieved and now - (self._ended_at or 0.0) <= NEXT_SECONDS
            self._episodes[index] = _Episode(now, answered=again)
        episode = self._episodes[index]
        since = (self._ended_at or 0.0) if episode.answered else episode.since
        limit = NEXT_SECONDS if episode.answered else FIRST_SECONDS
        if now - since > limit and not episode.is_reported and not self._engine.is_held:
            episode.is_reported = True
            which = "next" if episode.answered else "first"
            at = since - self._began_at
            self.outcome.late.append(f"no {which} remedy within {limit:g} s of {at:.0f} s on rank {index}")

    def _answer(self, began_at: float) -> None:
        for episode in self._episodes.values():
            if episode.answered:
                self.outcome.next_delays.append(max(0.0, began_at - (self._ended_at or 0.0)))
            else:
                self.outcome.first_delays.append(max(0.0, began_at - episode.since))
            episode.answered, episode.is_reported = True, False


def missed_goals(outcome: Outcome, due: Situation) -> Sequence[str]:
    missed = []
    if outcome.covered_deaths:
        missed.append(f"died {_times(outcome.covered_deaths)} though it was covered: {outcome.covered_deaths[0]}")
    uncovered = [death for death in outcome.deaths if not _is_among(death, outcome.covered_deaths)]
    if uncovered and not due.may_die:
        missed.append(f"died {_times(uncovered)}: {uncovered[0]}")
    under_traffic = [remedy for remedy in outcome.remedies if remedy.was_working]
    if due.fits and under_traffic:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(r.kind for r in under_traffic).items())
        missed.append(f"remedies under steady traffic that fits: {kinds}")
    if outcome.crowded_idle_periods:
        missed.append(f"more than one release in an idle period ({', '.join(outcome.crowded_idle_periods[:3])})")
    in_vain = outcome.in_vain_within_an_hour()
    if in_vain > IN_VAIN_AN_HOUR:
        missed.append(f"{in_vain} remedies in vain within an hour")
    if outcome.late:
        missed.append(f"late {_times(outcome.late)}: {outcome.late[0]}")
    if due.most_remedies is not None and len(outcome.remedies) > due.most_remedies:
        missed.append(f"{len(outcome.remedies)} remedies where {due.most_remedies} are due at most")
    if len(outcome.remedies) < due.needs:
        missed.append(f"{len(outcome.remedies)} remedies where {due.needs} are due at least")
    return [*missed, *outcome.problems]


def _is_among(death: str, covered: Sequence[str]) -> bool:
    return any(text.startswith(death) for text in covered)


def _times(found: Sequence[str]) -> str:
    return "once" if len(found) == 1 else f"{len(found)} times"
