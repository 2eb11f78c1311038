"""Pressure that is back within moments of a release: the steps took back what they work with."""

from __future__ import annotations

from app.policy.core import URGENT_REST_SECONDS
from tests.unit.test_policy import Watch, full


def test_another_remedy_follows_a_release_whose_bytes_came_back_at_once():
    """Encoder outputs grew until the steps' own reserve does not fit beside them; giving that back again is no help."""
    watch = Watch()
    assert watch.act(full(0.3, cached=3.0, encoder=4.0), full(3.3, encoder=4.0)) == "release"
    action = watch.look(full(0.3, cached=3.0, encoder=4.0))
    assert action is not None
    assert action.remedy == "trim_encoder_cache"


def test_release_is_first_again_once_its_bytes_stayed_away_for_a_while():
    watch = Watch()
    assert watch.act(full(0.3, cached=3.0, encoder=4.0), full(3.3, encoder=4.0)) == "release"
    assert watch.look(full(3.3, encoder=4.0), after=URGENT_REST_SECONDS) is None
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
