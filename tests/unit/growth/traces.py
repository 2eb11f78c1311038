"""Synthetic series of memory at idle floors: clean ones of five kinds over a day, and leaks of a known rate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from highwater.growth.judging import Judgement, judge
from highwater.growth.series import MAX_FLOORS, Bound, Floor, superfluous
from highwater.model.units import GIB, MIB

HOUR = 3600.0
Value = Callable[["Work"], float]


@dataclass
class Work:
    """The engine's work until now, in one of its lives."""

    random: random.Random
    at: float = 0.0
    born: float = 0.0
    requests: int = 0
    images: int = 0
    new_images: int = 0
    tokens: int = 0
    burst: int = 0
    load: float = 1.0
    largest: float = 0.0
    state: dict[str, float] = field(default_factory=dict)

    @property
    def age(self) -> float:
        return self.at - self.born

    def floor(self, value: float) -> Floor:
        wall = 1_700_000_000 + self.at
        return Floor(self.at, wall, value, self.requests, self.images, self.new_images, self.tokens)

    def serve(self, requests: int, *, image_share: float = 0.5, new_share: float = 0.5) -> None:
        self.burst = requests
        for _ in range(requests):
            self.requests += 1
            self.tokens += int(self.random.lognormvariate(6, 0.8))
            if self.random.random() < image_share:
                self.images += 1
                self.largest = max(self.largest, self.random.lognormvariate(0, 0.7))
                self.new_images += self.random.random() < new_share


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a trace is no secret


def bursts(work: Work, hours: float) -> Iterator[None]:
    """Bursts of very different sizes, with idle periods of seconds to many minutes."""
    while work.at < hours * HOUR:
        work.serve(max(int(work.random.lognormvariate(2.5, 1.0)), 1))
        work.at += work.random.expovariate(1 / 60) + work.random.lognormvariate(3.5, 1.0) + 5
        yield


def daily(work: Work, hours: float) -> Iterator[None]:
    """A rhythm of a day: ten times as many requests at its height as in the night."""
    phase = work.random.uniform(0, 2 * math.pi)
    while work.at < hours * HOUR:
        seconds = work.random.uniform(60, 300)
        work.load = 0.55 + 0.45 * math.sin(2 * math.pi * work.at / (24 * HOUR) + phase)
        work.serve(_poisson(work.random, 0.2 * work.load * seconds))
        work.at += seconds
        yield


def even(work: Work, hours: float) -> Iterator[None]:
    """Requests as they come, an idle period every few minutes."""
    while work.at < hours * HOUR:
        seconds = work.random.uniform(20, 240)
        work.serve(_poisson(work.random, 0.1 * seconds) + 1)
        work.at += seconds
        yield


def mixes(work: Work, hours: float) -> Iterator[None]:
    """An hour of text, then one of images, then one of images that repeat."""
    while work.at < hours * HOUR:
        part = int(work.at / HOUR) % 3
        seconds = work.random.uniform(20, 240)
        work.serve(
            _poisson(work.random, 0.1 * seconds) + 1,
            image_share=(0.02, 0.9, 0.9)[part],
            new_share=(1.0, 0.9, 0.1)[part],
        )
        work.at += seconds
        yield


def _poisson(source: random.Random, mean: float) -> int:
    return max(round(source.gauss(mean, math.sqrt(mean))), 0)


# --- what series do ---


def still(size: float, noise: float = 0.3 * MIB) -> Value:
    """Nothing but noise."""
    return lambda work: size + work.random.gauss(0, noise)


def spiky(size: float) -> Value:
    """Memory that is given back late at some floors."""
    return lambda work: size + (work.random.uniform(0, 300 * MIB) if work.random.random() < 0.1 else 0.0)


def following(size: float, swing: float) -> Value:
    """Memory that follows the load."""
    return lambda work: size + swing * work.load + work.random.gauss(0, 0.01 * swing)


def warming(size: float, requests: float) -> Value:
    """A warm-up by requests, as of kernels, heaps and tables that find their size."""
    return lambda work: size * (1 - math.exp(-work.requests / requests)) + work.random.gauss(0, 0.3 * MIB)


def learning(size: float) -> Value:
    """A workspace for the largest image so far: steps, ever more seldom."""
    return lambda work: size * work.largest + work.random.gauss(0, 0.2 * MIB)


def sawtooth(size: float, requests: int) -> Value:
    """Memory that is collected after so many requests."""
    return lambda work: size * (work.requests % requests) / requests + work.random.gauss(0, 0.2 * MIB)


def wandering(size: float, seconds: float) -> Value:
    """A heap that fragments and recovers: noise that is drawn back to its middle within so many seconds."""

    def value(work: Work) -> float:
        last, since = work.state.get("wander", 0.0), work.at - work.state.get("wandered", work.born)
        kept = math.exp(-since / seconds)
        now = last * kept + work.random.gauss(0, size * math.sqrt(1 - kept * kept))
        work.state |= {"wander": now, "wandered": work.at}
        return GIB + now

    return value


def cache(limit: float, a_new_image: float) -> Value:
    """A cache that fills with new images, up to its limit."""
    return lambda work: GIB + min(limit, work.new_images * a_new_image) + work.random.gauss(0, 0.3 * MIB)


def leaking(base: Value, rate: float, read: Callable[[Work], float]) -> Value:
    return lambda work: base(work) + rate * read(work)


def floors_of(
    pattern: Callable[[Work, float], Iterator[None]], value: Value, seed: int, *, hours: float
) -> Iterator[tuple[Work, Floor]]:
    work = Work(seeded(seed))
    for _ in pattern(work, hours):
        yield work, work.floor(value(work))


def verdicts(
    floors: Iterator[Floor], *, bounds: tuple[Bound, ...] = (), every: int = 1
) -> Iterator[tuple[Floor, Judgement]]:
    """Yield the verdict at each floor, on floors that are thinned as the sidecar thins them."""
    kept: list[Floor] = []
    before: Judgement | None = None
    for number, floor in enumerate(floors):
        kept.append(floor)
        if len(kept) > MAX_FLOORS:
            del kept[superfluous([one.at for one in kept])]
        if number % every == 0:
            before = judge(kept, before=before, bounds=bounds)
            yield floor, before


def changes(kinds: list[str]) -> int:
    return sum(one != two for one, two in pairwise(kinds))
