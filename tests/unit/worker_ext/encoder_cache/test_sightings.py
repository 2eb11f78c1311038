"""Ages are lower bounds, and forgotten with their entries."""

from __future__ import annotations

from highwater_worker.encoder_cache.encoder_outputs import Sightings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_entry_ages_from_its_first_sight():
    """The clock starts with us."""
    clock = Clock()
    sightings = Sightings(clock)
    assert sightings.ages({"a": 1}) == {"a": 0.0}
    clock.now += 7
    assert sightings.ages({"a": 1, "b": 2}) == {"a": 7.0, "b": 0.0}


def test_an_entry_made_anew_starts_again():
    """Same hash, other storage: evicted and computed again between two calls."""
    clock = Clock()
    sightings = Sightings(clock)
    sightings.ages({"a": 1})
    clock.now += 7
    assert sightings.ages({"a": 2}) == {"a": 0.0}


def test_what_is_gone_is_forgotten():
    """The memory of entries is as large as the cache."""
    clock = Clock()
    sightings = Sightings(clock)
    sightings.ages({"a": 1})
    sightings.ages({})
    clock.now += 7
    assert sightings.ages({"a": 1}) == {"a": 0.0}


def test_no_more_is_remembered_than_allowed():
    """A bound whatever the engine holds; beyond it an age is 0, still a lower bound."""
    clock = Clock()
    sightings = Sightings(clock, maximum=1)
    sightings.ages({"a": 1, "b": 2})
    clock.now += 7
    assert sightings.ages({"a": 1, "b": 2}) == {"a": 7.0, "b": 0.0}
