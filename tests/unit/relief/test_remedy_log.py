"""The line of a remedy's event."""

from __future__ import annotations

import pytest

from highwater.readings.remedy import RemedyResult
from highwater.relief.relief import summary_of
from highwater.units import MIB


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (0, ""),
        (MIB - 1, ""),
        (1 - MIB, ""),
        (MIB, "; 9.0 MiB less in use now"),
        (-MIB, "; 7.0 MiB less in use now"),
    ],
)
def test_what_traffic_changed_is_said_from_one_mebibyte_on(beside, words):
    result = RemedyResult(
        remedy="release", outcome="done", seconds=0.5, credited_bytes=8 * MIB, freed_bytes=8 * MIB + beside
    )
    assert summary_of(result) == f"release done, gave back 8.0 MiB in 0.50 s{words}"
