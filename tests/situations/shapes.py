"""Shapes of a device's used bytes over time, and when each is full. A shape is drawn anew for each seed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, TypeAlias

from tests.situations.device import GIB, MIB

DEVICES: Final = (8 * GIB, 24 * GIB, 64 * GIB, 80 * GIB, 141 * GIB)
SLOWEST, FASTEST = 1 * MIB, 4 * GIB


@dataclass
class Course:
    """What one rank's device does."""

    total: float  # the device's bytes
    seconds: float  # how long it is watched
    used: Callable[[float], float]  # returns its used bytes at a second
    # Returns when it is full, as it goes at a second; infinite where it does not fill.
    full_at: Callable[[float], float]
    grower: str = "other_tensors_bytes"  # the component that grows
    # The bytes that the encoder cache may hold, of what is used beyond a quarter of the device.
    budget: float | None = None
    # When a remedy of the policy gave memory back (``relief``), or another process began (``restart``).
    cuts: Sequence[tuple[float, str]] = ()
    turns: Sequence[float] = ()  # when what it does changes: readings show that a moment later
    judged_from: float = 0.0  # before this second it cannot be told from a ramp


def never(_: float) -> float:
    return math.inf


@dataclass
class Dice:
    """What all shapes draw: a device, where it begins, its pace and its noise."""

    random: Random
    step: float
    total: float = field(init=False)
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.random.choice(DEVICES)
        self.start = self.total * self.random.uniform(0.4, 0.8)

    @property
    def room(self) -> float:
        return self.total - self.start

    def ramp_seconds(self) -> float:
        """A ramp of forty readings at least: less is over before anybody reads a forecast."""
        return max(30.0, 25 * self.step) * math.exp(self.random.uniform(0, 2.5))

    def pace(self) -> float:
        """A pace at which the room lasts for such a ramp."""
        return min(max(self.room / self.ramp_seconds(), SLOWEST), FASTEST)

    def noise(self, most: float) -> Callable[[float], float]:
        """Noise of at most so many bytes, the same whenever it is asked for."""
        sigma, seed = most * self.random.random() / 3, self.random.random()
        return lambda at: max(min(Random(f"{seed} {at:.3f}").gauss(0, sigma), most), -most)  # noqa: S311 - no secret


def line(dice: Dice, pace: float, noise: float, seconds: float) -> Course:
    shake, start, total = dice.noise(noise), dice.start, dice.total
    return Course(
        total,
        seconds,
        lambda at: min(start + pace * at + shake(at), total),
        lambda _: (total - start) / pace,
        grower=dice.random.choice(("other_tensors_bytes", "encoder_cache_bytes", "torch_cached_bytes")),
    )


def ramp(dice: Dice) -> Course:
    pace = dice.pace()
    return line(dice, pace, pace * dice.step / 2, dice.room / pace)


def slow_ramp(dice: Dice) -> Course:
    pace = dice.random.uniform(1, 8) * MIB
    return line(dice, pace, pace * dice.step, min(max(600.0, 60 * dice.step), dice.room / pace))


def leak_in_noise(dice: Dice) -> Course:
    pace = dice.random.uniform(1, 16) * MIB
    return line(dice, pace, pace * 30, min(max(900.0, 90 * dice.step), dice.room / pace))


def steps(dice: Dice) -> Course:
    """Each image takes its bytes at once."""
    pace, gap = dice.pace(), dice.random.uniform(1, 12)
    course = line(dice, pace, 0.0, dice.room / pace)
    course.used = lambda at: min(dice.start + pace * gap * math.floor(at / gap), dice.total)
    course.full_at = lambda _: gap * math.ceil(dice.room / (pace * gap))
    return course


def one_step(dice: Dice) -> Course:
    at, size, wide, shake = (
        dice.random.uniform(5, 60),
        dice.room * dice.random.uniform(0.05, 0.8),
        dice.random.uniform(0, 3),
        dice.noise(4 * MIB),
    )
    return Course(
        dice.total,
        150.0 + 10 * dice.step,
        lambda now: dice.start + size * min(max((now - at) / (wide or 1), 0), 1) + shake(now),
        never,
    )


def saw(dice: Dice) -> Course:
    """It falls by itself; the readings begin after a fall."""
    period, size = dice.random.uniform(8, 60) + 8 * dice.step, dice.room * dice.random.uniform(0.1, 0.9)
    return _teeth(dice, period, size, dice.noise(size / 50))


def _teeth(dice: Dice, period: float, size: float, shake: Callable[[float], float]) -> Course:
    return Course(
        dice.total,
        6 * period,
        lambda at: dice.start + size * (at / period % 1) + shake(at),
        lambda at: dice.room / (size / period) if at < period else math.inf,
        turns=(period,),
        judged_from=period,
    )


def plateau(dice: Dice) -> Course:
    """A rise that slackens, to a level under the device's end."""
    tau, size = dice.random.uniform(2, 120), dice.room * dice.random.uniform(0.1, 0.9)
    shake = dice.noise(min(size / 50, 32 * MIB))
    return Course(
        dice.total,
        6 * tau + 60 + 20 * dice.step,
        lambda at: dice.start + size * (1 - math.exp(-at / tau)) + shake(at),
        never,
    )


def neighbour(dice: Dice) -> Course:
    """Another process on the card grows, and rests."""
    pace, rest = dice.pace(), 60 + 10 * dice.step
    rise = dice.room / pace / 2
    shake = dice.noise(pace * dice.step / 4)

    def grown(at):
        return min(at, rise) + max(at - rise - rest, 0)

    return Course(
        dice.total,
        2 * rise + rest,
        lambda at: min(dice.start + pace * grown(at) + shake(at), dice.total),
        lambda at: 2 * rise if at < rise else 2 * rise + rest if at >= rise + rest else math.inf,
        grower="non_torch_bytes",
        turns=(rise, rise + rest),
    )


def restart(dice: Dice) -> Course:
    """A ramp, and another process that is still."""
    pace = dice.pace()
    end, shake = dice.room / pace * dice.random.uniform(0.3, 0.9), dice.noise(pace * dice.step / 4)
    return Course(
        dice.total,
        end + 60 + 10 * dice.step,
        lambda at: dice.start + (pace * at if at < end else dice.room / 3) + shake(at) * (at < end),
        lambda at: dice.room / pace if at < end else math.inf,
        cuts=((end, "restart"),),
    )


def relief_waves(dice: Dice) -> Course:
    period = dice.random.uniform(8, 60) + 6 * dice.step
    teeth = _teeth(dice, period, dice.room * 0.9, dice.noise(dice.room / 200))
    reliefs = tuple((n * period, "relief") for n in range(1, 6))
    return replace(teeth, cuts=reliefs, grower="torch_cached_bytes")


def load_stops(dice: Dice) -> Course:
    pace = dice.pace()
    end, shake = dice.room / pace * dice.random.uniform(0.2, 0.9), dice.noise(pace * dice.step / 4)
    return Course(
        dice.total,
        end + 60 + 10 * dice.step,
        lambda at: dice.start + pace * min(at, end) + shake(at),
        lambda at: dice.room / pace if at < end else math.inf,
        turns=(end,),
    )


def noise_alone(dice: Dice) -> Course:
    kind, size = dice.random.randrange(3), dice.room * math.exp(dice.random.uniform(-6, -2))
    shake, period = dice.noise(size), dice.random.uniform(1, 6)
    slow = [shake(-1.0 - n) for n in range(int(1000 / 5) + 2)]
    used = (
        shake,
        lambda at: size / 2 * math.sin(at / period) + shake(at) / 2,
        lambda at: slow[int(at // 5)] + (slow[int(at // 5) + 1] - slow[int(at // 5)]) * (at / 5 % 1),
    )[kind]
    return Course(dice.total, max(200.0, 60 * dice.step), lambda at: dice.start + used(at), never)


def cache_to_its_budget(dice: Dice) -> Course:
    """The encoder cache fills at one pace to its budget, an image at a time, and leaves some of the device."""
    pace, budget = dice.pace(), dice.start - dice.total / 4 + dice.room * dice.random.uniform(0.2, 0.9)
    end, each = (budget + dice.total / 4 - dice.start) / pace, dice.random.uniform(0, 0.02) * dice.room or 1.0
    return Course(
        dice.total,
        end + 60 + 10 * dice.step,
        lambda at: dice.start + min(each * math.floor(pace * at / each), pace * end),
        never,
        grower="encoder_cache_bytes",
        budget=budget,
    )


def accelerating(dice: Dice) -> Course:
    seconds = dice.ramp_seconds()
    return Course(dice.total, seconds, lambda at: dice.start + dice.room * (at / seconds) ** 2, lambda _: seconds)


def slowing(dice: Dice) -> Course:
    seconds = dice.ramp_seconds()
    return Course(dice.total, seconds, lambda at: dice.start + dice.room * (at / seconds) ** 0.5, lambda _: seconds)


def ramp_with_pauses(dice: Dice) -> Course:
    pace, on, off = dice.pace(), dice.random.uniform(10, 40), dice.random.uniform(4, 12)
    seconds = dice.room / pace
    full = seconds + off * math.floor(seconds / on)

    def grown(at: float) -> float:
        return at // (on + off) * on + min(at % (on + off), on)

    return Course(
        dice.total,
        full,
        lambda at: min(dice.start + pace * grown(at), dice.total),
        lambda at: seconds if at < on else full,
        turns=(on,),
    )


def ramp_with_jump(dice: Dice) -> Course:
    """Two ramps of one pace, and between them a step."""
    pace, share = dice.pace(), dice.random.uniform(0.1, 0.4)
    seconds = dice.room / pace * (1 - share)
    at = seconds * dice.random.uniform(0.2, 0.8)
    shake = dice.noise(pace * dice.step / 4)
    return Course(
        dice.total,
        seconds,
        lambda now: min(dice.start + pace * now + dice.room * share * (now >= at) + shake(now), dice.total),
        lambda now: dice.room / pace if now < at else seconds,
        turns=(at,),
    )


def rising_saw(dice: Dice) -> Course:
    """Each request takes and gives back; the floor below rises, and at the end a tooth meets the device's end."""
    pace, period = dice.pace(), dice.random.uniform(2, 30) + 2 * dice.step
    size = dice.room * dice.random.uniform(0.02, 0.3)
    end = next(n / 20 for n in range(10**7) if pace * n / 20 + size * (n / 20 / period % 1) >= dice.room)
    return Course(
        dice.total,
        end,
        lambda at: min(dice.start + pace * at + size * (at / period % 1), dice.total),
        lambda _: end,
        turns=(period,),
        judged_from=period,
    )


def images_by_chance(dice: Dice) -> Course:
    """Images of several sizes at times by chance, as users send them."""
    pace, gap = dice.pace(), dice.random.uniform(0.3, 4)
    at, held, events = 0.0, 0.0, []
    while held < dice.room:
        at += dice.random.expovariate(1 / gap)
        held += pace * gap * dice.random.choice((0.5, 1.0, 1.5))
        events.append((at, held))
    times = [one for one, _ in events]

    def used(now: float) -> float:
        done = bisect_right(times, now)
        return min(dice.start + (events[done - 1][1] if done else 0.0), dice.total)

    return Course(dice.total, at, used, lambda _: at, grower="encoder_cache_bytes")


def load_with_rests(dice: Dice) -> Course:
    """It grows while there is load; the engine idles between."""
    pace = dice.pace()
    busy = dice.room / pace * dice.random.uniform(0.05, 0.4)
    idle = busy * dice.random.uniform(0.3, 2)
    times = [(n * (busy + idle), n * busy) for n in range(int(dice.room / pace / busy) + 1)]
    full = next(at + dice.room / pace - done for at, done in reversed(times) if done < dice.room / pace)
    turns = tuple(turn for at, _ in times for turn in (at + busy, at + busy + idle) if turn < full)

    def grown(at: float) -> float:
        return at // (busy + idle) * busy + min(at % (busy + idle), busy)

    return Course(
        dice.total,
        full,
        lambda at: min(dice.start + pace * grown(at), dice.total),
        lambda at: dice.room / pace if at < busy else full,
        turns=turns,
    )


def noisy_ramp(dice: Dice) -> Course:
    pace = dice.pace()
    return line(dice, pace, dice.room / 20, dice.room / pace)


def jittering_ramp(dice: Dice) -> Course:
    """A slow one, of a counter that jitters by some MiB."""
    pace = dice.random.uniform(1, 8) * MIB
    return line(dice, pace, dice.random.uniform(1, 8) * MIB, min(max(600.0, 60 * dice.step), dice.room / pace))


def exponential(dice: Dice) -> Course:
    seconds = dice.ramp_seconds()
    return Course(
        dice.total,
        seconds,
        lambda at: dice.start + dice.room * math.expm1(3 * at / seconds) / math.expm1(3),
        lambda _: seconds,
    )


def two_paces(dice: Dice) -> Course:
    pace, other = dice.pace(), dice.random.choice((0.25, 0.5, 2, 4))
    turn = dice.room / pace * dice.random.uniform(0.2, 0.7)
    end = turn + (dice.room / pace - turn) / other
    return Course(
        dice.total,
        end,
        lambda at: min(dice.start + pace * (min(at, turn) + other * max(at - turn, 0)), dice.total),
        lambda at: dice.room / pace if at < turn else end,
        turns=(turn,),
    )


def load_that_begins(dice: Dice) -> Course:
    pace, rest = dice.pace(), dice.random.uniform(20, 400)
    end = rest + dice.room / pace
    shake = dice.noise(pace * dice.step / 4)
    return Course(
        dice.total,
        end,
        lambda at: min(dice.start + pace * max(at - rest, 0.0) + shake(at), dice.total),
        lambda _: end,
        judged_from=rest,
    )


def slow_rhythm(dice: Dice) -> Course:
    """It rises and falls with the hours, and is never full."""
    period = dice.random.uniform(600, 3600)
    return Course(
        dice.total,
        2 * period,
        lambda at: dice.start + dice.room * 0.3 * (1 - math.cos(2 * math.pi * at / period)),
        never,
    )


Shape: TypeAlias = Callable[[Dice], Course]
SHAPES: Final[dict[str, Shape]] = {
    "ramp": ramp,
    "slow ramp": slow_ramp,
    "steps": steps,
    "one step": one_step,
    "saw": saw,
    "plateau": plateau,
    "neighbour": neighbour,
    "restart": restart,
    "leak in noise": leak_in_noise,
    "relief waves": relief_waves,
    "load that stops": load_stops,
    "noise alone": noise_alone,
    "cache to its budget": cache_to_its_budget,
    "accelerating": accelerating,
    "slowing": slowing,
    "ramp with pauses": ramp_with_pauses,
    "slow rhythm": slow_rhythm,
    "ramp with a jump": ramp_with_jump,
    "rising saw": rising_saw,
    "images by chance": images_by_chance,
    "load with rests": load_with_rests,
    "noisy ramp": noisy_ramp,
    "jittering ramp": jittering_ramp,
    "exponential": exponential,
    "two paces": two_paces,
    "load that begins": load_that_begins,
}
