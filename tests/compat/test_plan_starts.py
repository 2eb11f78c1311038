"""Planned command lines on real CPU engines of three versions: those that start, and those that vLLM refuses."""

from __future__ import annotations

import pytest

from highwater.demo.environment import ensure_environment
from tests.engines import ALL_RECIPES
from tests.support.plan_starts import STARTS, differences, plan_of, start_all

# Each start takes seconds on two free cores, and the versions have up to 15.
pytestmark = pytest.mark.timeout(1800, func_only=True)


@pytest.mark.parametrize("version", STARTS)
def test_each_start_and_each_refusal_has_the_planned_numbers(
    version: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(f"starts-{version}")
    starts = STARTS[version]
    environment = ensure_environment(version, recipes=ALL_RECIPES, announce=print)
    plans = [plan_of(environment, start, folder) for start in starts]
    outcomes = start_all(environment, starts, folder)
    wrong = {
        start.name: found
        for start, (status, plan), outcome in zip(starts, plans, outcomes, strict=True)
        if (found := differences(status, plan, outcome)) or outcome.started is not start.fits
    }
    assert wrong == {}, {
        name: (found, outcomes[[s.name for s in starts].index(name)].answer) for name, found in wrong.items()
    }


def test_fifteen_command_lines_start_and_fifteen_are_refused() -> None:
    fits = [start.fits for starts in STARTS.values() for start in starts]
    assert fits.count(True) >= 15
    assert fits.count(False) >= 15
