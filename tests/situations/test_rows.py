"""The policy in situations: the real sidecar beside a modelled engine, on virtual time."""

from __future__ import annotations

import pytest

from tests.situations.real_time import REAL_TIME, run_in_real_time
from tests.situations.rows import SITUATIONS
from tests.situations.run import run

# A day, and hours, of traffic.
LONG = frozenset({"a-day-of-traffic", "idle-then-burst"})


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "situation",
    [pytest.param(row, id=row.name, marks=pytest.mark.soak if row.name in LONG else ()) for row in SITUATIONS],
)
def test_every_goal_is_met(situation):
    result = run(situation)
    shown = "\n".join(result.events[:30])
    assert not result.missed, f"{situation.name}: {'; '.join(result.missed)}\n{shown}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("situation", [pytest.param(row, id=row.name) for row in REAL_TIME])
def test_every_goal_is_met_in_real_time(situation, tmp_path):
    assert run_in_real_time(situation, tmp_path) == []


def test_names_are_unique():
    names = [row.name for row in (*SITUATIONS, *REAL_TIME)]
    assert len(names) == len(set(names))
