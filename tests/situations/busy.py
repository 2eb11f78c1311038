"""Verdicts on an engine that is never idle, by its windows of load: shapes that leak, and shapes that only look so.

A shape is drawn anew for each seed: the load, second by second, and a series that is read each second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

from highwater.growth.judging import Judgement, judge
from highwater.growth.series import MAX_FLOORS, WINDOW_SECONDS, Bound, Floor, superfluous
from tests.situations.device import GIB, MIB

HOURS: Final = 4.0
WITHIN: Final = 0.3  # a leak's rate
COLUMNS: Final = ("load that never ends", "verdicts", "right", "not known", "wrong")


@dataclass
class Load:
    """Requests as they come and go: each second some arrive, and of those under way some end."""

    random: Random
    pace: Callable[[float], float] | None = None  # the requests that arrive each second; ``None``: as many as end
    under_way: int = 3
    lasts: Callable[[float], float] = lambda _: 4.0  # the seconds that a request takes
    images: float = 0.0  # the images of a request; ``tokens``: its tokens
    tokens: Callable[[float], float] = lambda _: 300.0
    at: float = 0.0
    ended: int = 0
    seen_images: float = 0.0
    made: float = 0.0
    state: dict[str, float] = field(default_factory=dict)

    def second(self) -> None:
        self.at += 1
        ended = some_of(self.random, self.under_way, 1 / self.lasts(self.at))
        self.ended += ended
        self.seen_images += some_of(self.random, ended, self.images)
        self.made += self.under_way * self.tokens(self.at) / self.lasts(self.at) * self.random.uniform(0.8, 1.2)
        arrived = ended if self.pace is None else poisson(self.random, self.pace(self.at))
        self.under_way += arrived - ended


def some_of(random: Random, count: int, share: float) -> int:
    """Of so many each with this chance; of very many about."""
    if count < 100:
        return sum(random.random() < share for _ in range(count))
    return min(max(round(random.gauss(count * share, math.sqrt(count * share * (1 - share)))), 0), count)


def poisson(random: Random, mean: float) -> int:
    count, left = 0, random.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + random.expovariate(1.0)
    return count


Series = Callable[[Load], float]


@dataclass
class Shape:
    """A load, and the series under it; ``bounds`` as the sidecar knows them."""

    load: Callable[[Random], Load]
    series: Callable[[Random], Series]
    bounds: tuple[Bound, ...] = ()
    hours: float = HOURS


# --- loads ---


def constant(random: Random) -> Load:
    seconds = random.uniform(1, 20)
    return Load(random, under_way=random.randrange(1, 40), lasts=lambda _: seconds, images=random.choice((0.0, 0.5)))


def arriving(random: Random) -> Load:
    pace, seconds = random.uniform(0.2, 4), random.uniform(2, 30)
    return Load(random, lambda _: pace, under_way=int(pace * seconds), lasts=lambda _: seconds, images=0.3)


def rising(random: Random) -> Load:
    low, high, seconds = random.uniform(0.2, 1), random.uniform(2, 8), random.uniform(2, 30)
    hours = random.uniform(0.2, HOURS)
    return Load(
        random,
        lambda at: low + (high - low) * min(at / hours / 3600, 1.0),
        under_way=int(low * seconds),
        lasts=lambda _: seconds,
    )


def queueing(random: Random) -> Load:
    """More requests come than the engine ends, which works at one pace."""
    more = random.uniform(0.02, 0.5)
    load = Load(random, under_way=8)
    load.lasts = lambda _: max(load.under_way / 2.0, 1.0)  # two end each second, however many wait
    load.pace = lambda _: 2.0 + more
    return load


def daily(random: Random) -> Load:
    pace, phase, seconds = random.uniform(1, 4), random.uniform(0, 6.3), random.uniform(2, 20)
    period = random.uniform(1, 12) * 3600
    return Load(random, lambda at: pace * (0.6 + 0.4 * math.sin(6.283 * at / period + phase)), lasts=lambda _: seconds)


def long_requests(random: Random) -> Load:
    """A benchmark: all began at once, and hold more with each token, for an hour."""
    return Load(random, under_way=random.randrange(16, 256), lasts=lambda _: math.inf, tokens=lambda _: 1.0)


def longer_prompts(random: Random) -> Load:
    """As many requests as before, of ever more tokens."""
    load, more = constant(random), random.uniform(0.5, 3)
    load.tokens = lambda at: 300 * (1 + more * at / 3600 / HOURS)
    return load


def constant_with_images(random: Random) -> Load:
    load = constant(random)
    load.images = 0.5
    return load


# --- series ---


def noise(random: Random) -> Callable[[], float]:
    sigma = random.uniform(0.1, 8) * MIB
    return lambda: random.gauss(0, sigma)


def held(random: Random, base: Series) -> Series:
    """What requests under way hold, with noise, above a base."""
    each, shake = random.uniform(0.1, 8) * MIB, noise(random)
    return lambda load: base(load) + each * load.under_way + shake()


def flat(random: Random) -> Series:
    size = random.uniform(0.3, 4) * GIB
    return held(random, lambda _: size)


def leaked(load: Load, size: float) -> float:
    """Note what has leaked, for who judges the verdict."""
    load.state["leaked"] = size
    return size


def leak_by_the_clock(random: Random) -> Series:
    """From 2 to 240 MiB a minute."""
    rate, size = math.exp(random.uniform(math.log(2), math.log(240))) * MIB / 60, random.uniform(0.3, 2) * GIB
    return held(random, lambda load: size + leaked(load, rate * load.at))


def leak_by_request(random: Random) -> Series:
    rate, size = random.uniform(0.1, 4) * MIB, random.uniform(0.3, 2) * GIB
    return held(random, lambda load: size + leaked(load, rate * load.ended))


def warm_up(random: Random) -> Series:
    size, tau = random.uniform(50, 1500) * MIB, math.exp(random.uniform(math.log(30), math.log(3600)))
    return held(random, lambda load: GIB + size * (1 - math.exp(-load.at / tau)))


def cache(random: Random) -> Series:
    each = random.uniform(0.5, 4) * MIB
    return held(random, lambda load: GIB + min(each * load.seen_images, 4 * GIB))


def one_step(random: Random) -> Series:
    at, size = random.uniform(0.1, 0.9) * HOURS * 3600, random.uniform(50, 2000) * MIB
    return held(random, lambda load: GIB + size * (load.at > at))


def collected(random: Random) -> Series:
    """A heap that is collected each few minutes."""
    period, size = random.uniform(60, 1500), random.uniform(20, 600) * MIB
    return held(random, lambda load: GIB + size * (load.at / period % 1))


def collected_late(random: Random) -> Series:
    """A heap that is collected each few hours: until it was once, it only rises."""
    period, size = random.uniform(1, 4) * 3600, random.uniform(200, 2000) * MIB
    return held(random, lambda load: GIB + size * (load.at / period % 1))


def by_bytes(random: Random) -> Series:
    """As many requests, images and tokens as before, of ever more bytes."""
    each, more = random.uniform(1, 8) * MIB, random.uniform(0.5, 3)
    return lambda load: GIB + each * load.under_way * (1 + more * load.at / 3600 / HOURS)


def wandering(random: Random) -> Series:
    """A heap that fragments and recovers."""
    size, seconds = random.uniform(5, 60) * MIB, random.uniform(60, 1800)

    def base(load: Load) -> float:
        kept = math.exp(-1 / seconds)
        load.state["wander"] = load.state.get("wander", 0.0) * kept + random.gauss(0, size * math.sqrt(1 - kept * kept))
        return GIB + load.state["wander"]

    return held(random, base)


def by_load(random: Random) -> Series:
    """What requests under way hold is most of it."""
    each, size = random.uniform(4, 40) * MIB, random.uniform(0.1, 2) * GIB
    return held(random, lambda load: size + each * load.under_way)


def by_tokens(random: Random) -> Series:
    """What requests under way hold grows with each token of theirs."""
    each = random.uniform(5, 40) * 1024
    return held(random, lambda load: GIB + each * load.made)


def by_size(random: Random) -> Series:
    """What a request holds follows its tokens."""
    each = random.uniform(5, 40) * 1024
    return held(random, lambda load: GIB + each * load.under_way * load.tokens(load.at))


IMAGES: Final = Bound(
    limit=4 * GIB, what="a cache's limit", drivers=frozenset({"new_image", "image"}), is_above_start=True
)
SHAPES: Final[dict[str, Shape]] = {
    "leak by the clock": Shape(constant, leak_by_the_clock),
    "leak by request": Shape(arriving, leak_by_request),
    "leak beside a rhythm": Shape(daily, leak_by_the_clock),
    "level": Shape(constant, flat),
    "level, requests by chance": Shape(arriving, flat),
    "warm-up": Shape(constant, warm_up),
    "cache that fills": Shape(lambda random: Load(random, images=0.5), cache, bounds=(IMAGES,)),
    "one step": Shape(arriving, one_step),
    "heap that is collected": Shape(arriving, collected),
    "heap that wanders": Shape(constant, wandering),
    "load that rises": Shape(rising, by_load),
    "queue that grows": Shape(queueing, by_load),
    "rhythm of the load": Shape(daily, by_load),
    "long requests": Shape(long_requests, by_tokens, hours=1.0),
    "longer prompts": Shape(longer_prompts, by_size),
}
# No figure tells these from a leak: they are counted, and held to no bound.
INDISTINCT: Final[dict[str, Shape]] = {
    "bigger images": Shape(constant_with_images, by_bytes),
    "heap that is collected each few hours": Shape(constant, collected_late),
}


@dataclass
class Rates:
    """The verdicts on one shape, as counts."""

    shape: str
    right: int = 0
    unknown: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def verdicts(self) -> int:
        return self.right + self.unknown + len(self.wrong)

    @property
    def missed(self) -> list[str]:
        """What must not be: a leak where there is none, or a hundredth of the verdicts wrong otherwise."""
        false = [what for what in self.wrong if what.endswith(": leak")]
        return false or (self.wrong if len(self.wrong) > self.verdicts / 100 else [])

    def judge(self, found: Judgement, leak: float | None, where: str) -> None:
        """Compare a verdict with what the series does: ``leak`` bytes an hour, or none."""
        rate = None if found.leak is None else found.leak.lines.get("hour")
        if found.kind == "not_known":
            self.unknown += 1
        elif (found.kind == "leak") != (leak is not None):
            self.wrong.append(f"{where}: {found.kind}")
        elif leak is not None and rate is not None and abs(rate.slope - leak) > WITHIN * leak:
            self.wrong.append(f"{where}: {rate.slope / MIB:.0f} MiB an hour were said, and it is {leak / MIB:.0f}")
        else:
            self.right += 1


def windows(load: Load, series: Series, hours: float) -> Iterator[Floor]:
    """Yield the lowest value of each window, as the watch takes it."""
    while load.at < hours * 3600:
        lowest, under_way = math.inf, []
        for _ in range(int(WINDOW_SECONDS)):
            load.second()
            lowest = min(lowest, series(load))
            under_way.append(load.under_way)
        yield Floor(
            load.at,
            load.at,
            lowest,
            load.ended,
            load.seen_images,
            load.seen_images,
            load.made,
            in_flight=sum(under_way) / len(under_way),
        )


def rates_of(name: str, seeds: Iterable[int], *, every: int = 4) -> Rates:
    """Judge one shape with these seeds, at each window, and count each of so many."""
    shape, rates = {**SHAPES, **INDISTINCT}[name], Rates(name)
    for seed in seeds:
        random = Random(f"{name} {seed}")  # noqa: S311 - shapes are no secret
        load, series = shape.load(random), shape.series(random)
        kept: list[Floor] = []
        before: Judgement | None = None
        for number, floor in enumerate(windows(load, series, shape.hours)):
            kept.append(floor)
            if len(kept) > MAX_FLOORS:
                del kept[superfluous([one.at for one in kept])]
            if number % every == 0:
                before = judge(kept, ground="equal_work", before=before, bounds=shape.bounds)
                leak = None if "leaked" not in load.state else load.state["leaked"] / load.at * 3600
                rates.judge(before, leak, f"{name}, seed {seed}, at {floor.at:.0f} s")
    return rates


def rows(rates: Iterable[Rates]) -> list[tuple[str, ...]]:
    return [
        (
            one.shape,
            f"{one.verdicts:,}",
            *(f"{count / one.verdicts:.0%}" for count in (one.right, one.unknown)),
            f"{len(one.wrong):,}",
        )
        for one in rates
    ]


def summary(rates: Iterable[Rates]) -> str:
    """Return the loads by how often they are judged rightly, those that are misjudged by name, for the page."""
    judged = list(rates)
    plain = [one for one in judged if one.shape in SHAPES]
    verdicts, right, wrong = (
        sum(counts) for counts in zip(*((one.verdicts, one.right, len(one.wrong)) for one in plain), strict=True)
    )
    taken = ", ".join(
        f"*{one.shape}* in {len(one.wrong) / one.verdicts:.0%}" for one in judged if one.shape not in SHAPES
    )
    return (
        f"Of {verdicts:,} verdicts on {len(plain)} kinds of load {right / verdicts:.0%} were right, {wrong:,} wrong, "
        f"the others *not known*. Two more are called a leak and are none: {taken} of the verdicts."
    )
