"""The forecast: when each device is full at its pace."""

from __future__ import annotations

import pytest

from highwater.accounting.growth_since_ready import growth_since_ready
from highwater.accounting.time_to_full import seconds_until
from tests.unit.accounting.story import story


def test_each_device_is_full_at_its_own_pace():
    """The first one is the report's; one that does not fill, or was watched for moments only, foretells nothing."""
    ranks = story(images=True)
    pace = 16 * 1024 * 1024
    fast = [(10.0 * number, float(pace * 10 * number)) for number in range(7)]
    grown = growth_since_ready((), ranks, [], {(0, 0): fast, (0, 1): [(at, 5.0) for at, _ in fast]})
    first, second = grown.ranks
    assert first.seconds_to_full == pytest.approx(ranks[0].free_bytes / pace)
    assert (second.bytes_per_second, second.seconds_to_full) == (0.0, None)
    assert grown.seconds_to_full == first.seconds_to_full
    moments = growth_since_ready((), ranks, [], {(0, 0): [(at / 100, used) for at, used in fast]})
    assert (moments.ranks[0].bytes_per_second, moments.seconds_to_full) == (None, None)


@pytest.mark.parametrize("pace", [None, -1e9, 0.0, 1000.0, 70_000.0])
def test_what_is_noise_or_far_away_is_no_forecast(pace):
    """A day is as far as anybody looks."""
    assert seconds_until(10**12, pace) is None
    assert seconds_until(None, 1e9) is None
    assert seconds_until(10**12, 1e9) == 1_000.0
