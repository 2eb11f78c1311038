"""The forecast: when each device is full at its pace."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest

from highwater.model.growth import (
    RecentGrowth,
    growth_since_ready,
    refill_seconds,
    seconds_until,
    time_to_full,
    without_forecast,
)
from highwater.model.pace import HASTY, Track, pace_of
from highwater.model.rank import EncoderCache
from tests.unit.model.story import story

MIB, GIB = 1024**2, 1024**3
PACE = 16.0 * MIB
RANK = story(images=True)[0]


def ramp(seconds: int, *, pace: float = PACE, flat: int = 0) -> list[float]:
    """Used bytes second by second: a rise, and then rest."""
    return [pace * min(at, seconds) for at in range(seconds + flat + 1)]


def track(used: list[float], **more: object) -> Track:
    return Track([float(at) for at in range(len(used))], used, **more)


def foretold(used: list[float], **more: object) -> float | None:
    return time_to_full(RANK, track(used, **more)).seconds_to_full


def test_each_device_is_full_at_its_own_pace():
    ranks = story(images=True)
    grown = growth_since_ready((), ranks, {(0, 0): track(ramp(60)), (0, 1): track(ramp(0, flat=60))})
    first, second = grown.ranks
    assert first.seconds_to_full == pytest.approx(ranks[0].free_bytes / PACE)
    assert (second.bytes_per_second, second.seconds_to_full) == (0.0, None)
    assert (grown.seconds_to_full, grown.bytes_per_second) == (first.seconds_to_full, pytest.approx(PACE))


def test_it_takes_five_seconds_and_a_sixth_of_the_time_foretold():
    due = RANK.free_bytes / PACE
    assert foretold(ramp(int(due / 6) - 1)) is None
    assert foretold(ramp(int(due / 6) + 1)) == pytest.approx(due)
    assert foretold(ramp(4, pace=PACE * 100)) is None


@pytest.mark.parametrize("flat", [4, 15, 40])
def test_a_rise_that_has_ended_foretells_nothing(flat):
    assert foretold(ramp(60, flat=flat)) is None


def test_what_was_before_a_cut_does_not_count():
    """A reset, a mark or another state: the growth after it is another one."""
    used = [*ramp(60), *(PACE * 60 + PACE * 4 * at for at in range(1, 61))]
    whole, cut = (time_to_full(RANK, track(used, cut_at=at)).bytes_per_second for at in (-math.inf, 60.0))
    assert cut == pytest.approx(PACE * 4)
    assert PACE * 2 < whole < PACE * 4
    assert foretold(used[:63], cut_at=60.0) is None


def test_below_a_level_that_memory_came_down_from_nothing_is_foretold():
    wave = ramp(40, pace=PACE * 2)
    assert foretold([*wave, *wave[:40]]) is None
    assert foretold([*wave, *ramp(100, pace=PACE * 2)]) is not None


def test_relief_that_keeps_up_has_its_rhythm_said():
    wave = ramp(16, pace=400.0 * MIB)[:16]
    full = replace(RANK, free_bytes=8 * GIB)
    waves = track(wave * 3, cut_at=31.5, reliefs=(15.5, 31.5), policy_reliefs=(15.5, 31.5))
    grown = time_to_full(full, waves)
    assert (grown.refill_seconds, grown.seconds_to_full) == (16.0, None)
    assert refill_seconds(full, replace(waves, policy_reliefs=(31.5,))) is None, "the others were by hand"
    assert refill_seconds(replace(full, free_bytes=40 * GIB), waves) is None, "it was never nearly full"
    ripples = replace(waves, used=[value / 400 for value in waves.used])
    assert refill_seconds(full, ripples) is None, "16 MiB are no filling"
    risen = [*wave * 2, *(value + 4e9 for value in wave)]
    assert refill_seconds(full, replace(waves, used=risen)) is None
    assert refill_seconds(full, track([*wave * 2, *[0.0] * 40], policy_reliefs=(15.5, 31.5))) is None


def relieved(grower: str, *, since: int) -> tuple[float | None, list[float]]:
    """What is foretold so long after a release whose last reading is of its very moment, and the used bytes."""
    before, kept = ramp(60), 40 * PACE
    other = [*before, *(PACE * (60 + at) for at in range(1, since + 1))]
    cached = [*[kept] * 61, *[0.0] * since]
    if grower == "torch_cached_bytes":  # the reserve itself grows again
        other, cached = [0.0] * len(cached), [*before, *(PACE * at for at in range(since))]
    used = [sum(both) for both in zip(other, cached, strict=True)]
    parts = {"other_tensors_bytes": other, "torch_cached_bytes": cached}
    shown = track(used, cut_at=60.0, reliefs=(60.0,), part=lambda name: parts.get(name, ()))
    return time_to_full(replace(RANK, free_bytes=int(PACE * 30)), shown).seconds_to_full, used


@pytest.mark.parametrize("since", [8, 20, 59])
def test_what_a_relief_gave_back_is_no_fall_of_its_own_where_another_part_grows(since):
    left, used = relieved("other_tensors_bytes", since=since)
    assert used[61] < used[60] - PACE * 30
    assert left == pytest.approx(30.0)


def test_what_a_relief_took_from_may_be_taken_from_again():
    assert relieved("torch_cached_bytes", since=30)[0] is None


def test_the_growth_of_late_is_that_of_the_rank_that_is_full_first():
    ranks = [replace(rank, free_bytes=int(PACE * 200)) for rank in story(images=True)]
    ranks[0] = replace(ranks[0], free_bytes=int(PACE * 100))
    parts = {"other_tensors_bytes": ramp(60, pace=PACE * 4)}
    fast = track(ramp(60, pace=PACE * 4), part=lambda name: parts.get(name, ()))
    grown = growth_since_ready((), ranks, {(0, 0): track(ramp(0, flat=60)), (0, 1): fast})
    assert grown.seconds_to_full == pytest.approx(50.0)
    assert (grown.recent.rank, grown.recent.component) == (1, "other_tensors_bytes")


def test_the_component_that_grows_is_named():
    used = ramp(90)
    parts = {"other_tensors_bytes": used, "torch_cached_bytes": [0.0] * 91}
    assert time_to_full(RANK, track(used, part=lambda name: parts.get(name, ()))).component == "other_tensors_bytes"
    assert time_to_full(RANK, track(used)).component is None


def test_the_policys_pace_is_of_the_last_half_second_and_passes_over_cuts():
    used = Track([0.0, 10.0, 10.2, 10.6], [0.0, 0.0, 2.0, 6.0], cut_at=10.5)
    assert pace_of(used, HASTY).bytes_per_second == pytest.approx(10.0)
    assert pace_of(used) is None
    assert pace_of(Track([0.0], [1.0]), HASTY) is None


def test_readings_with_gaps_of_any_length_are_no_error():
    dice = Random(7)  # noqa: S311 - no secret
    for _ in range(300):
        at = list(accumulate(dice.choice((0.02, 0.2, 1.0, 30.0, 4000.0)) for _ in range(dice.randrange(1, 30))))
        used = [dice.choice((0.0, 1.0, 2e9, 1e15, float(place))) for place in range(len(at))]
        shown = Track(at, used, cut_at=dice.choice((-math.inf, at[0], at[-1], math.inf)), reliefs=at[::3])
        left = time_to_full(RANK, shown).seconds_to_full
        assert left is None or 0 <= left <= 86_400


def with_cache(*, budget: float, others: float = 0.0, seconds: int = 60):
    """A cache that grows by ``PACE`` and has so large a budget, beside other tensors with a pace of their own."""
    parts = {"encoder_cache_bytes": ramp(seconds), "other_tensors_bytes": ramp(seconds, pace=others)}
    held = int(parts["encoder_cache_bytes"][-1])
    cache = EncoderCache(entries=1, device_bytes=held, embeds=held // 1024, capacity_embeds=int(budget) // 1024)
    used = [sum(both) for both in zip(*parts.values(), strict=True)]
    return time_to_full(replace(RANK, encoder_cache=cache), track(used, part=lambda name: parts.get(name, ())))


@pytest.mark.parametrize("passed", [0.95, 1.0, 1.5])
def test_an_encoder_cache_fills_no_device_beyond_its_budget(passed):
    grown = with_cache(budget=PACE * 60 * passed)
    assert (grown.seconds_to_full, grown.component) == (None, "encoder_cache_bytes")
    assert grown.cache_room_bytes == pytest.approx(max(PACE * 60 * (passed - 1), 0), abs=1024)


@pytest.mark.parametrize("budget", [PACE * 60 + RANK.free_bytes + MIB, PACE * 50])
def test_a_budget_beyond_the_device_or_one_that_does_not_hold_changes_no_forecast(budget):
    grown = with_cache(budget=budget)
    assert grown.seconds_to_full == pytest.approx(RANK.free_bytes / PACE)
    assert grown.cache_room_bytes is None


def test_what_else_grows_fills_the_device_beside_a_cache_with_a_budget():
    room = PACE * 20
    grown = with_cache(budget=PACE * 60 + room, others=PACE)
    assert grown.seconds_to_full == pytest.approx((RANK.free_bytes - room) / PACE, rel=0.01)
    assert grown.component == "other_tensors_bytes"


def test_a_growth_that_quickens_foretells_nothing():
    used = [PACE * at * at / 60 for at in range(61)]
    assert foretold(used) is None


@pytest.mark.parametrize("pace", [None, -1e9, 0.0, 1000.0, 70_000.0])
def test_what_is_noise_or_far_away_is_no_forecast(pace):
    assert seconds_until(10**12, pace) is None
    assert seconds_until(None, 1e9) is None
    assert seconds_until(10**12, 1e9) == 1_000.0


# --- the growth since the engine became ready ---


def test_growth_is_counted_from_the_baseline():
    grown = growth_since_ready(story(), story(images=True))
    assert grown.since_ready_bytes == 2 * 3_965_714_432
    assert (grown.bytes_per_second, grown.host_since_ready_bytes) == (None, 0)


def test_the_first_device_that_is_full_counts():
    ranks = tuple(replace(rank, free_bytes=4096 * 1024**2) for rank in story())
    tracks = {
        rank.key: Track([float(at) for at in range(20)], [float(size * 1024**2 * at) for at in range(20)])
        for rank, size in zip(ranks, (64, 128), strict=True)
    }
    grown = growth_since_ready((), ranks, tracks)
    assert [round(one.seconds_to_full or 0) for one in grown.ranks] == [64, 32]
    assert grown.seconds_to_full == pytest.approx(32.0)
    assert grown.bytes_per_second == pytest.approx(192 * 1024**2)


def test_the_pace_of_all_is_unknown_where_that_of_one_is():
    ranks = story()
    still = Track([float(at) for at in range(20)], [5.0] * 20)
    assert growth_since_ready((), ranks, {ranks[0].key: still}).bytes_per_second is None
    assert growth_since_ready((), ranks, {rank.key: still for rank in ranks}).bytes_per_second == 0.0


# --- what has grown most lately ---


def test_what_grew_most_on_the_fullest_rank_is_named_with_size_and_time():
    first, fullest = story(images=True)
    fullest = replace(fullest, free_bytes=1)
    at = [10.0 * number for number in range(7)]
    sizes = {"encoder_cache_bytes": [0.0] * 3 + [GIB] * 4, "torch_cached_bytes": [2 * GIB] * 3 + [0.0] * 4}
    used = [sum(parts) for parts in zip(*sizes.values(), strict=True)]
    tracks = {fullest.key: Track(at, [one - used[3] for one in used], part=lambda name: sizes.get(name, ()))}
    assert growth_since_ready((), (first, fullest), tracks).recent is None, "less is in use than before"
    sizes["torch_cached_bytes"] = [0.0] * 7
    tracks = {fullest.key: Track(at, sizes["encoder_cache_bytes"], part=lambda name: sizes.get(name, ()))}
    grown = growth_since_ready((), (first, fullest), tracks).recent
    assert grown == RecentGrowth(rank=1, dp_rank=0, component="encoder_cache_bytes", bytes=GIB, seconds=40.0)
    assert without_forecast(growth_since_ready((), (first, fullest), tracks)).recent is None


def test_each_rank_has_its_change_since_it_was_ready_by_component():
    was, now = story()[0], story(images=True)[0]
    (grown,) = growth_since_ready((was,), (now,)).ranks
    assert grown.grown.encoder_cache_bytes == now.components.encoder_cache_bytes
    assert growth_since_ready((), (now,)).ranks[0].grown is None
