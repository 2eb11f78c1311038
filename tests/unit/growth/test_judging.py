"""The verdict: leaks of a known rate are found with their driver, and nothing else is one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.growth.judging import judge
from highwater.growth.series import Bound, Floor, Happening
from highwater.model.units import GIB, MIB
from tests.unit.growth.traces import (
    Value,
    Work,
    bursts,
    cache,
    changes,
    daily,
    even,
    floors_of,
    following,
    leaking,
    learning,
    mixes,
    sawtooth,
    seeded,
    spiky,
    still,
    verdicts,
    wandering,
    warming,
)

FILLS_CACHE = frozenset({"new_image", "image", "1k_tokens"})
# Written down by `curl "$SIDECAR/memory/growth?series=EngineCore anonymous_bytes"` beside `make soak`.
SOAK = Path(__file__).parent / "soak_engine_core.json"
# The same of a worker on a CPU that leaks nothing, with what its encoder cache held at each floor.
CPU_WORKER = Path(__file__).parent / "cpu_worker.json"

CLEAN: dict[str, tuple[object, Value, tuple[Bound, ...]]] = {
    "bursts": (bursts, spiky(GIB), ()),
    "bursts, collected": (bursts, sawtooth(200 * MIB, 150), ()),
    "bursts, a heap that wanders": (bursts, wandering(50 * MIB, 600), ()),
    "a daily rhythm": (daily, following(GIB, 300 * MIB), ()),
    "a slow warm-up": (even, warming(500 * MIB, 100), ()),
    "a slower warm-up": (even, warming(500 * MIB, 300), ()),
    "image mixes, a workspace": (mixes, learning(200 * MIB), ()),
    "image mixes, a cache": (
        mixes,
        cache(4 * GIB, 2 * MIB),
        (Bound(limit=5 * GIB, what="the processor cache", drivers=frozenset({"new_image", "image"})),),
    ),
}


def steady(values: Iterable[float], *, requests: Sequence[int] = (3, 9, 1, 7)) -> list[Floor]:
    """Floors with these values, half a minute apart; images and tokens of every second do not go with the requests."""
    done = images = new_images = tokens = 0
    floors = []
    for number, value in enumerate(values):
        count = requests[number % len(requests)]
        done += count
        images += (1, 0, 9, 2, 0)[number % 5]
        new_images += (1, 0, 2, 1, 0, 6)[number % 6]
        tokens += count * (300, 2000, 500)[number % 3]
        floors.append(Floor(30.0 * number, 1.7e9 + 30 * number, value, done, images, new_images, tokens))
    return floors


def line(
    count: int, rate: float, *, noise: float = 0.0, seed: int = 1, requests: Sequence[int] = (3, 9, 1, 7)
) -> list[Floor]:
    """Floors that rise with the requests."""
    source = seeded(seed)
    floors = steady([0.0] * count, requests=requests)
    return [one._replace(value=GIB + rate * one.requests + source.gauss(0, noise)) for one in floors]


@pytest.mark.slow("days of a simulated engine")
@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", CLEAN)
def test_a_clean_day_shows_no_leak_at_any_moment(kind: str, seed: int) -> None:
    pattern, value, bounds = CLEAN[kind]
    kinds = [one.kind for _, one in verdicts((f for _, f in floors_of(pattern, value, seed, hours=24)), bounds=bounds)]
    assert len(kinds) > 300
    assert "leak" not in kinds


@pytest.mark.slow("days of a simulated engine")
@pytest.mark.parametrize("seed", range(3))
def test_restarts_show_no_leak(seed: int) -> None:
    source = seeded(seed)
    for life in range(12):
        floors = (f for _, f in floors_of(even, warming(400 * MIB, source.uniform(20, 200)), life, hours=2))
        assert "leak" not in {one.kind for _, one in verdicts(floors)}


def _hourly(work: Work) -> float:
    return work.at / 3600


LEAKS = {
    "request": (0.2 * MIB, lambda work: work.requests),
    "image": (1.0 * MIB, lambda work: work.images),
    "new_image": (1.0 * MIB, lambda work: work.new_images),
    "1k_tokens": (0.4 * MIB, lambda work: work.tokens / 1000),
    "hour": (100.0 * MIB, _hourly),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow("hours of a simulated engine"))])
@pytest.mark.parametrize("driver", LEAKS)
def test_a_leak_under_noise_is_found_with_its_rate_and_driver(driver: str, seed: int) -> None:
    rate, read = LEAKS[driver]
    floors = [f for _, f in floors_of(bursts, leaking(still(GIB, MIB), rate, read), seed, hours=5)]
    judged = [one for _, one in verdicts(iter(floors))]
    last = judged[-1]
    assert last.kind == "leak"
    assert driver in {last.leak.driver, *last.leak.also}
    if last.leak.driver == driver:
        assert last.leak.line.slope == pytest.approx(rate, rel=0.2)
    assert changes([one.kind for one in judged[len(judged) // 3 :]]) <= 1


def test_the_driver_is_named_where_it_stands_out() -> None:
    floors = line(40, 6.0)
    found = judge(floors, unit="count")
    assert (found.kind, found.leak.driver) == ("leak", "request")
    assert found.leak.line.slope == pytest.approx(6.0)


@settings(max_examples=30, deadline=None)
@given(
    rate=st.floats(0.3, 50),
    noise=st.floats(0, 1),
    count=st.integers(24, 80),
    shift=st.integers(0, 10**12),
    later=st.integers(0, 10**7),
    seed=st.integers(0, 99),
)
def test_verdicts_do_not_depend_on_origin(
    *, rate: float, noise: float, count: int, shift: int, later: int, seed: int
) -> None:
    """Neither on how much there was, nor on when it began, nor on what had been done before.

    Shifts are whole: floors every 30 s make windows of exactly a bound's length, which rounding would take under it.
    """
    floors = line(count, rate * MIB, noise=noise * MIB, seed=seed)
    moved = [Floor(f.at + later, f.wall + later, f.value + shift, *(count + 1e6 for count in f[3:])) for f in floors]
    one, other = judge(floors), judge(moved)
    assert one.kind == other.kind
    if one.leak is not None and other.leak is not None:
        assert other.leak.line.slope == pytest.approx(one.leak.line.slope, rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(rate=st.floats(0.3, 5), factor=st.floats(1, 1000), seed=st.integers(0, 99))
def test_a_leak_of_more_bytes_is_the_same_leak(rate: float, factor: float, seed: int) -> None:
    floors = line(40, rate * MIB, seed=seed)
    larger = judge([f._replace(value=f.value * factor) for f in floors])
    assert judge(floors).kind == larger.kind == "leak"
    assert larger.leak.line.slope == pytest.approx(rate * MIB * factor, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(rate=st.floats(0.3, 50), noise=st.floats(0, 2), count=st.integers(16, 80), seed=st.integers(0, 99))
def test_a_leak_run_backwards_is_none(rate: float, noise: float, count: int, seed: int) -> None:
    floors = line(count, rate * MIB, noise=noise * MIB, seed=seed)
    backwards = [f._replace(value=g.value) for f, g in zip(floors, reversed(floors), strict=True)]
    assert judge(backwards).kind == "flat"


@settings(max_examples=20, deadline=None)
@given(gaps=st.lists(st.integers(8, 30), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_gaps_do_not_hide_a_leak(gaps: list[int], seed: int) -> None:
    floors = line(60, 2.0 * MIB, noise=0.2 * MIB, seed=seed, requests=(5,))
    pause, kept = 0.0, []
    for number, floor in enumerate(floors):
        pause += 3600.0 if number in itertools.accumulate(gaps) else 0.0
        kept.append(floor._replace(at=floor.at + pause, wall=floor.wall + pause))
    assert judge(kept).kind == "leak"


def test_few_floors_are_no_evidence() -> None:
    floors = line(40, 4.0 * MIB)
    kinds = [judge(floors[:count]).kind for count in range(1, 30)]
    assert kinds.index("leak") + 1 == 3 + 12 + 2
    assert set(kinds[: kinds.index("leak")]) == {"not_known"}


def test_a_short_time_is_no_evidence() -> None:
    floors = [f._replace(at=f.at / 10) for f in line(40, 4.0 * MIB)]
    assert judge(floors).kind == "not_known"
    assert "240 s" in judge(floors).why


def test_growth_under_a_mebibyte_is_none() -> None:
    total = line(40, 1.0)[-1].requests - line(40, 1.0)[3].requests
    assert judge(line(40, 0.9 * MIB / total)).kind == "flat"
    assert judge(line(40, 1.4 * MIB / total)).kind == "leak"


def test_the_first_floors_do_not_count() -> None:
    assert judge(steady([0.0] * 3 + [GIB] * 20)).kind == "flat"
    assert judge(steady([0.0] * 12 + [GIB] * 20)).kind == "step"


def test_a_step_is_named_with_its_event() -> None:
    floors = steady([GIB] * 12 + [GIB + 256 * MIB] * 12)
    events = [Happening(100.0, "something earlier"), Happening(floors[11].at + 10, "the engine woke up")]
    found = judge(floors, happenings=events)
    assert (found.kind, found.step.size, found.step.what) == ("step", 256 * MIB, "the engine woke up")
    assert (found.step.after, found.step.until) == (floors[11], floors[12])


def test_a_step_by_the_largest_requests_says_so() -> None:
    floors = steady([GIB] * 12 + [GIB + 256 * MIB] * 12)
    more = 4000 * (floors[12].requests - floors[11].requests)
    floors = [f if n < 12 else f._replace(tokens=f.tokens + more) for n, f in enumerate(floors)]
    step = judge(floors).step
    assert step.what == "requests of a new largest size (4,300 tokens each)"


def test_spikes_are_neither_leak_nor_step() -> None:
    assert judge(steady([GIB + (200 * MIB if n % 5 == 4 else 0) for n in range(40)])).kind == "flat"


def test_a_cache_below_its_bound_is_a_plateau_and_beyond_it_a_leak() -> None:
    bound = Bound(limit=GIB + 300 * MIB, what="the processor cache", drivers=frozenset({"new_image", "request"}))
    floors = line(60, 2.0 * MIB)
    inside = judge([f for f in floors if f.value < bound.limit], bounds=[bound])
    assert (inside.kind, inside.bound) == ("plateau", bound)
    assert judge(floors, bounds=[bound]).kind == "leak"


def test_growth_by_another_driver_is_not_the_bounds() -> None:
    """A leak per request is no processor cache, though there would be room in it."""
    bound = Bound(limit=16 * GIB, what="the processor cache", drivers=frozenset({"new_image"}))
    work = seeded(3)
    floors, images = [], 0.0
    for floor in line(40, 4.0 * MIB):
        images += work.randrange(0, 12)
        floors.append(floor._replace(images=images, new_images=images))
    assert judge(floors, bounds=[bound]).kind == "leak"


def test_what_levels_off_is_a_plateau() -> None:
    values = [GIB + 500 * MIB * min(n / 30, 1.0) for n in range(80)]
    assert judge(steady(values)).kind == "plateau"


def test_a_leak_that_breaks_off_keeps_its_verdict() -> None:
    """Without new requests there is no evidence against it: the same floor again and again."""
    floors = line(40, 4.0 * MIB)
    found = judge(floors)
    still_there = [floors[-1]._replace(at=floors[-1].at + 30 * n, wall=floors[-1].wall + 30 * n) for n in range(1, 12)]
    assert judge([*floors, *still_there], before=found).kind == "leak"


def test_a_leak_that_bends_loses_its_verdict_once() -> None:
    floors, before, kinds = line(100, 4.0 * MIB), None, []
    floors = [f._replace(value=min(f.value, floors[50].value)) for f in floors]
    for count in range(20, 100):
        before = judge(floors[:count], before=before)
        kinds.append(before.kind)
    assert "leak" not in kinds[kinds.index("leak") :][kinds.count("leak") :]
    assert kinds[31 + 4] == "leak"
    assert kinds[31 + 10] != "leak"
    assert kinds[-1] == "plateau"


def test_a_fall_by_half_ends_a_leak() -> None:
    floors = line(40, 4.0 * MIB)
    end = floors[-1]
    after = [end._replace(value=GIB, at=end.at + 30 * n) for n in range(1, 6)]
    found = judge(floors)
    assert judge([*floors, *after[:1]], before=found).kind == "leak"
    assert judge([*floors, *after[:2]], before=found).kind != "leak"


def test_a_later_leak_is_found_beside_hours_without() -> None:
    """Ten hours flat, then half an hour of a leak: found with its own rate, not with one spread over the day."""
    floors = line(120, 0.0, noise=0.1 * MIB, requests=(1, 30, 2, 2, 40, 1, 5))
    begun = floors[80].requests
    floors = [f._replace(value=f.value + 2 * MIB * max(f.requests - begun, 0.0)) for f in floors]
    found = judge(floors)
    assert found.leak.line.slope == pytest.approx(2 * MIB, rel=0.2)


def test_a_rise_with_the_load_is_not_known() -> None:
    """Requests come ever faster and memory rises with them: what it does when they become fewer will settle it."""
    floors = [Floor(n * 60.0, n * 60.0, GIB + n * 10 * MIB, n * (10 + n)) for n in range(60)]
    assert judge(floors).kind == "not_known"
    even_load = [f._replace(requests=f.at) for f in floors]
    assert judge(even_load).kind == "leak"


def test_what_was_there_before_is_no_growth() -> None:
    tooth = [GIB + n * 10 * MIB for n in range(30)]
    floors = steady([*tooth, *tooth[:28]])
    assert judge(floors).kind != "leak"
    reset = Happening(floors[30].at - 1, "reset_encoder_cache", is_reset=True)
    assert judge(floors, happenings=[reset]).kind == "leak"


@pytest.mark.parametrize(("scatters", "kind"), [(5, "not_known"), (7, "not_known"), (14, "leak")])
def test_a_rise_counts_beside_the_scatter_about_it(scatters: float, kind: str) -> None:
    """Floors that lie now above and now below the line: growth of five times that is no evidence yet."""
    floors = line(60, 0.0, requests=(5,))
    share = [number / 56 for number in range(60)]
    # Three on each side: of two neighbours in one bin the lower one would count.
    zigzag = [20 * MIB if number // 3 % 2 else -20 * MIB for number in range(60)]
    values = [GIB + part * scatters * 20 * MIB + off for part, off in zip(share, zigzag, strict=True)]
    assert judge([f._replace(value=value) for f, value in zip(floors, values, strict=True)]).kind == kind


def test_a_driver_is_named_by_a_clear_margin_only() -> None:
    clear = judge(line(60, 1.0 * MIB, noise=1.0 * MIB)).leak
    alike = judge(line(60, 1.0 * MIB, noise=1.0 * MIB, requests=(4, 6))).leak
    assert clear is not None
    assert alike is not None
    assert (clear.driver, clear.also) == ("request", ())
    assert (alike.driver, alike.also) == ("hour", ("request",))


SHAPES = {
    "steps in a row": ([GIB + 100 * MIB * (number // 10) for number in range(50)], False),
    "what slows down": ([GIB + 10 * MIB * min(number, 15 + number / 2) for number in range(60)], False),
    "what slows down by a seventh": ([GIB + 10 * MIB * min(n, 30 + 0.86 * (n - 30)) for n in range(60)], False),
    # Half of what is missing comes with every 40 floors; its last quarter alone would be straight.
    "the tail of a curve": ([GIB + 4096 * MIB * (1 - 0.5 ** (number / 40)) for number in range(200)], False),
    "a leak after a short warm-up": ([GIB + MIB * min(8 * number, 60 + 2 * number) for number in range(60)], True),
}


@pytest.mark.parametrize(("values", "is_leak"), SHAPES.values(), ids=SHAPES)
def test_only_what_goes_on_straight_is_a_leak(values: list[float], is_leak: bool) -> None:
    assert (judge(steady(values, requests=(5,))).kind == "leak") is is_leak


def test_a_step_holds_nearly_all_growth() -> None:
    climbing = [GIB + 10 * MIB * number + (100 * MIB if number >= 20 else 0) for number in range(40)]
    assert judge(steady(climbing)).kind != "step"
    source = seeded(5)
    noisy = [GIB + source.gauss(0, 80 * MIB) + (150 * MIB if number >= 20 else 0) for number in range(40)]
    assert judge(steady(noisy)).kind != "step"


def test_an_event_long_before_a_step_did_not_make_it() -> None:
    floors = steady([GIB] * 12 + [GIB + 256 * MIB] * 12)
    early = judge(floors, happenings=[Happening(floors[11].at - 200, "too early")]).step
    late = judge(floors, happenings=[Happening(floors[11].at - 50, "just before")]).step
    assert early is not None
    assert (early.what, late.what) == (None, "just before")


def test_a_bound_is_passed_a_twentieth_beyond_it() -> None:
    rising = line(40, 2.0 * MIB)
    top = rising[-1].value
    near, far = (Bound(limit=top / share, what="a cache") for share in (1.04, 1.25))
    assert judge(rising, bounds=[near]).kind == "plateau"
    assert judge(rising, bounds=[far]).kind == "leak"


@pytest.mark.parametrize(("scatters", "kind"), [(3, "not_known"), (5, "leak")])
def test_scatter_in_the_first_half_counts_too(scatters: float, kind: str) -> None:
    floors = line(60, 0.0, requests=(5,))
    off = [(20 * MIB if number // 3 % 2 else -20 * MIB) if number < 30 else 0 for number in range(60)]
    values = [GIB + number / 56 * scatters * 20 * MIB + part for number, part in enumerate(off)]
    assert judge([f._replace(value=value) for f, value in zip(floors, values, strict=True)]).kind == kind


def test_beyond_its_usual_range_by_half_of_it() -> None:
    """A series that has moved by 200 MiB must leave that range clearly before a straight rise in it counts."""
    swing = [GIB + 200 * MIB * (number % 4 // 2) for number in range(40)]
    barely = [*swing, *(GIB + 8 * MIB * number for number in range(28))]
    clearly = [*swing, *(GIB + 24 * MIB * number for number in range(28))]
    assert judge(steady(barely, requests=(5,))).kind != "leak"
    assert judge(steady(clearly, requests=(5,))).kind == "leak"


@pytest.mark.parametrize(("share", "kind"), [(0.3, "leak"), (0.7, "not leak")])
def test_what_was_given_back_at_rest_ends_a_leak(share: float, kind: str) -> None:
    """Without a request, so that no growth was to be expected; four floors low, when it is judged again."""
    floors = line(40, 4.0 * MIB)
    found, end = judge(floors), floors[-1]
    grown = end.value - floors[3].value
    values = [end.value] * 14 + [end.value - share * grown] * 4
    later = [end._replace(value=value, at=end.at + 30 * number) for number, value in enumerate(values, 1)]
    assert (judge([*floors, *later], before=found).kind == "leak") is (kind == "leak")


def test_a_step_takes_five_floors_on_each_side() -> None:
    assert judge(steady([GIB] * 30 + [GIB + 256 * MIB] * 3)).kind != "step"
    assert judge(steady([GIB] * 12 + [GIB + 256 * MIB] * 6)).kind == "step"


def test_six_floors_make_a_verdict() -> None:
    early = judge(steady([GIB] * 8))
    assert (early.kind, early.why) == (
        "not_known",
        "5 of 6 floors so far, the first 3 of a start not counted; one is taken after each burst of requests, and "
        "every 60 s while no request comes",
    )
    assert judge(steady([GIB] * 9)).kind == "flat"


def test_a_cache_of_images_of_all_sizes_is_a_plateau_by_its_tokens() -> None:
    floors = [Floor(*row) for row in json.loads(SOAK.read_text())["floors"]]
    bound = Bound(limit=4 * GIB, what="the processor cache", drivers=FILLS_CACHE, is_above_start=True)
    before, kinds = None, []
    for count in range(4, len(floors) + 1):
        before = judge(floors[:count], bounds=[bound], before=before)
        kinds.append(before.kind)
    assert "leak" not in kinds
    assert "plateau" in kinds
    # Without that bound it is what it looks like: the test would see a leak if there were one.
    assert "leak" in {judge(floors[:count]).kind for count in range(40, len(floors) + 1)}


def test_a_worker_on_a_cpu_leaks_nothing_beside_its_encoder_cache() -> None:
    """A real one, whose cache filled: with it the process rises straight, without it it does not."""
    recorded = json.loads(CPU_WORKER.read_text())
    whole = [Floor(*row) for row in recorded["floors"]]
    own = [
        floor._replace(value=floor.value - held) for floor, held in zip(whole, recorded["encoder_cache"], strict=True)
    ]
    with_cache, without = ({judge(floors[:count]).kind for count in range(4, 24)} for floors in (whole, own))
    assert "leak" in with_cache
    assert "leak" not in without


def test_what_follows_requests_as_well_as_tokens_is_not_the_caches() -> None:
    """A leak per request, with tokens in proportion: text has tokens too."""
    bound = Bound(limit=4 * GIB, what="the processor cache", drivers=FILLS_CACHE, is_above_start=True)
    floors = [floor._replace(tokens=500 * floor.requests) for floor in line(40, 3.0 * MIB)]
    assert judge(floors, bounds=[bound]).kind == "leak"
