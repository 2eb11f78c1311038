"""`python -m tests.situations.forecast`: the forecast on shapes of memory, printed and in docs/growth.md.

The readings pass through the sidecar's own history. The exit status is 1 where a bound is missed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

from tabulate import tabulate

from bench.page import replaced
from highwater.model.engine import EngineStatus
from highwater.model.growth import growth_since_ready
from highwater.model.rank import Components, Device, EncoderCache, RankReading
from highwater.model.remedies import RemedyResult
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.watch.history import History
from tests.fakes.clock import FakeClock
from tests.situations import busy
from tests.situations.device import MIB
from tests.situations.shapes import SHAPES, Course, Dice

PAGE: Final = Path(__file__).resolve().parent.parent.parent / "docs" / "growth.md"
SEEDS: Final = 8
STEPS: Final = (0.2, 1.0, 5.0)
COLUMNS: Final = ("shape", "readings", "with a forecast", "largest error", "wrong", "undone by a change")
WITHIN: Final = 0.3
ALWAYS: Final = frozenset({"ramp", "slow ramp", "load that begins", "jittering ramp"})
NEVER: Final = frozenset(
    {"one step", "saw", "plateau", "relief waves", "noise alone", "cache to its budget", "slow rhythm"}
)
LEAST_GIVEN: Final = 0.8
JUDGED: Final = 60  # readings of one course that are judged, about
ENGINE: Final = EngineStatus(url="http://engine", state="ready")


@dataclass
class Outcome:
    """What was foretold of one shape."""

    shape: str
    readings: int = 0
    given: int = 0
    worst: float = 0.0  # the largest error of a forecast, as a share of what came; less than a reading is no error
    # Those beyond the bound, and those of what never came as memory went then.
    wrong: list[str] = field(default_factory=list)
    undone: int = 0  # right as memory went then, which changed before it was full

    def judge(
        self, said: float | None, due: float, *, step: float, turned_ago: float, where: str, turns_in: float = math.inf
    ) -> None:
        """Compare a forecast with what then happened, both in seconds; ``due`` is infinite where it never came."""
        if turned_ago <= max(3.0, 3 * step):
            return  # three readings, or seconds, are what it takes to see it
        self.readings += 1
        if said is None:
            return
        self.given += 1
        self.undone += turns_in < due < math.inf
        error = math.inf if due == math.inf else 0.0 if abs(said - due) <= step else abs(said - due) / due
        self.worst = max(self.worst, error)
        if error > WITHIN:
            self.wrong.append(f"{where}: full in {said:.0f} s was said, and it was {due:.0f} s")

    @property
    def missed(self) -> list[str]:
        share = self.given / max(self.readings, 1)
        too_few = [f"a forecast in {share:.0%} of the readings"] if self.shape in ALWAYS and share < LEAST_GIVEN else []
        too_many = [f"{self.given} forecasts"] if self.shape in NEVER and self.given else []
        return [*self.wrong, *too_few, *too_many]


def said(course: Course, step: float, ranks: int) -> Iterator[tuple[float, float | None, str | None]]:
    """Yield the seconds, and what the report says then: in how long the first device is full, and what grows on it."""
    clock = FakeClock(0.0)
    history = History(4000, clocks=Clocks(clock, clock))
    cuts, pid, began = list(course.cuts), 1, 0.0
    count = int(course.seconds / step)
    for number in range(count):
        clock.now = number * step
        while cuts and clock.now >= cuts[0][0]:
            _, kind = cuts.pop(0)
            if kind == "restart":
                pid, began = pid + 1, clock.now
            else:
                done = RemedyResult(remedy="release", outcome="done", credited_bytes=1)
                history.record("reset", "release done", trigger="policy", result=done)
        shown = tuple(_reading(course, clock.now, rank, pid) for rank in range(ranks))
        if number % max(count // JUDGED, 1) == 0:
            growth = growth_since_ready((), shown, history.tracks(shown, min(clock.now - began, 600.0)))
            yield clock.now, growth.seconds_to_full, growth.component
        history.add(Report(taken_at=clock.now, age_seconds=0.0, stale=False, engine=ENGINE, ranks=shown))


def _reading(course: Course, at: float, rank: int, pid: int) -> RankReading:
    used = int(course.used(at)) if rank == 0 else int(course.total / 3)
    rest = int(course.total / 4)
    parts = replace(Components(weights_bytes=rest), **{course.grower: used - rest})
    return RankReading(
        rank=rank,
        dp_rank=0,
        pid=pid,
        taken_at=at,
        device=Device(type="cuda", index=rank, physical_index=rank),
        total_bytes=int(course.total),
        used_bytes=used,
        free_bytes=int(course.total) - used,
        components=parts,
        encoder_cache=_encoder_cache(course, used - rest) if rank == 0 and course.budget is not None else None,
    )


def _encoder_cache(course: Course, held: int) -> EncoderCache:
    """Return a cache with an embedding for each MiB."""
    return EncoderCache(
        entries=1, device_bytes=held, embeds=held // MIB, capacity_embeds=int((course.budget or 0) // MIB)
    )


def outcome_of(shape: str, seeds: Iterable[int]) -> Outcome:
    """Run one shape with these seeds, at each distance of readings; every fourth one with eight ranks."""
    outcome = Outcome(shape)
    for step in STEPS:
        for seed in seeds:
            course = SHAPES[shape](Dice(Random(f"{shape} {seed} {step}"), step))  # noqa: S311 - shapes are no secret
            for at, seconds, component in said(course, step, ranks=8 if seed % 4 == 3 else 1):
                if at <= course.judged_from:
                    continue
                changes = (*course.turns, *(cut for cut, kind in course.cuts if kind == "restart"))
                turns_in = min((turn - at for turn in changes if turn > at), default=math.inf)
                turned_ago = min((at - turn for turn in course.turns if turn <= at), default=math.inf)
                where = f"seed {seed}, a reading each {step:g} s, at {at:.1f} s"
                due = course.full_at(at) - at
                outcome.judge(seconds, due, step=step, turned_ago=turned_ago, where=where, turns_in=turns_in)
                if seconds is not None and component != course.grower:
                    outcome.wrong.append(f"{where}: {component} is named, and {course.grower} grew")
    return outcome


def rows(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    return [
        (
            one.shape,
            f"{one.readings:,}",
            f"{one.given / max(one.readings, 1):.0%}",
            "-" if not one.given else "never came" if one.worst == math.inf else f"{one.worst:.0%}",
            f"{len(one.wrong):,}",
            f"{one.undone:,}",
        )
        for one in outcomes
    ]


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the sums over all shapes, for the page."""
    readings, given = (sum(counts) for counts in zip(*((one.readings, one.given) for one in outcomes), strict=True))
    wrong, undone = sum(len(one.wrong) for one in outcomes), sum(one.undone for one in outcomes)
    return (
        f"Of {readings:,} readings of {len(outcomes)} shapes {given / readings:.0%} had a forecast: {wrong:,} were "
        f"wrong, {undone:,} undone by a change."
    )


def main() -> None:
    """Run all shapes, print both tables, and write their sums into the page: forecasts, and verdicts under load."""
    outcomes = [outcome_of(shape, range(SEEDS)) for shape in SHAPES]
    rates = [busy.rates_of(shape, range(SEEDS)) for shape in (*busy.SHAPES, *busy.INDISTINCT)]
    text = PAGE.read_text(encoding="utf-8")
    for name, of, columns, said_of_it in (
        ("forecast", rows(outcomes), COLUMNS, summary(outcomes)),
        ("verdicts under load", busy.rows(rates), busy.COLUMNS, busy.summary(rates)),
    ):
        print(tabulate(of, columns, tablefmt="simple", disable_numparse=True))
        text = replaced(text, name, f"end of {name}", f"\n{said_of_it}\n\n")
    PAGE.write_text(text, encoding="utf-8")
    missed = [f"{one.shape}: {what}" for one in outcomes for what in one.missed]
    missed += [what for one in rates if one.shape in busy.SHAPES for what in one.missed]
    print("\n".join(missed))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
