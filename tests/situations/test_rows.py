"""The policy in situations: the real sidecar beside a modelled engine, on virtual time."""

from __future__ import annotations

import pytest

from tests.situations.real_time import REAL_TIME, run_in_real_time
from tests.situations.rows import SITUATIONS
from tests.situations.run import run

# A day, and hours, of traffic; and what another row shows at another size, rate or sign.
BY_NAME = frozenset({"a-day-of-traffic", "idle-then-burst", "story-32b-90", "fragments-slow", "clock-forward"}) | {
    *("h100-90-images", "h100-92-images", "h100-92-text", "h100-95-text", "l4-98", "mig-92")
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "situation",
    [pytest.param(row, id=row.name, marks=pytest.mark.soak if row.name in BY_NAME else ()) for row in SITUATIONS],
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
