"""Pressure that is back within moments of a release: the steps took back what they work with."""

from __future__ import annotations

from highwater.policy.core import URGENT_COOLDOWN_SECONDS
from highwater.policy.memory import MAX_RELAPSES
from tests.unit.policy.test_core import Watch, full


def test_another_remedy_follows_a_release_whose_bytes_came_back_at_once():
    watch = Watch()
    assert watch.act(full(0.3, cached=3.0, encoder=4.0), full(3.3, encoder=4.0)) == "release"
    action = watch.look(full(0.3, cached=3.0, encoder=4.0))
    assert action is not None
    assert action.remedy == "trim_encoder_cache"


def test_release_is_first_again_once_its_bytes_stayed_away_for_a_while():
    watch = Watch()
    assert watch.act(full(0.3, cached=3.0, encoder=4.0), full(3.3, encoder=4.0)) == "release"
    assert watch.look(full(3.3, encoder=4.0), after=URGENT_COOLDOWN_SECONDS) is None
    action = watch.look(full(0.3, cached=3.0, encoder=4.0))
    assert action is not None
    assert action.remedy == "release"


def test_release_is_repeated_where_nothing_else_can_give():
    watch = Watch()
    assert watch.act(full(0.3, cached=3.0), full(3.3)) == "release"
    action = watch.look(full(0.3, cached=3.0))
    assert action is not None
    assert action.remedy == "release"


def test_without_urgency_the_cache_is_left_alone():
    """vLLM would want those bytes back."""
    watch = Watch()
    assert watch.act(full(0.9, cached=2.0, encoder=4.0), full(2.9, encoder=4.0)) == "release"
    action = watch.look(full(0.9, cached=2.0, encoder=4.0))
    assert action is not None
    assert action.remedy == "release"


def relapse(watch: Watch) -> None:
    assert watch.act(full(0.9, cached=2.0), full(2.9)) == "release"


def test_a_release_that_helps_for_moments_only_rests_after_three():
    watch = Watch()
    for _ in range(1 + MAX_RELAPSES):
        relapse(watch)
    for _ in range(50):
        assert watch.look(full(0.9, cached=2.0)) is None
    assert watch.view.phase == "resting"
    assert "in use again within moments" in (watch.view.reason or "")
    watch.now += 10
    relapse(watch)


def test_urgent_pressure_does_not_wait_for_that_rest():
    watch = Watch()
    for _ in range(1 + MAX_RELAPSES):
        relapse(watch)
    assert watch.look(full(0.9, cached=2.0)) is None
    action = watch.look(full(0.2, cached=2.7), after=0.2)
    assert action is not None
    assert action.remedy == "release"


def test_bytes_that_stayed_away_for_a_while_are_no_relapse():
    watch = Watch()
    for _ in range(3 * MAX_RELAPSES):
        relapse(watch)
        assert watch.look(full(2.9), after=2 * URGENT_COOLDOWN_SECONDS) is None


def test_the_next_remedy_follows_one_that_failed():
    """One rank that cannot release must not keep the others' encoder outputs on their devices."""
    watch = Watch()
    short = full(0.2, cached=3.0, encoder=4.0)
    assert watch.act(short, [], outcome="failed") == "release"
    assert watch.act(short, full(3.0, encoder=1.2)) == "trim_encoder_cache"
