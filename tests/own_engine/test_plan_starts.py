"""Planned command lines on the real engine: two that start, two that vLLM refuses. `tests/compat` has all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.plan_starts import STARTS, differences, plan_of, start_all

if TYPE_CHECKING:
    from pathlib import Path

    from highwater.demo.environment import EngineEnvironment

pytestmark = pytest.mark.soak

SHAPES = ("full", "sliding")


def test_two_starts_and_two_refusals_have_the_planned_numbers(
    engine_environment: EngineEnvironment, tmp_path: Path
) -> None:
    version = engine_environment.version
    chosen = [
        next(start for start in STARTS[version] if (start.shape, start.fits) == (shape, fits))
        for fits in (True, False)
        for shape in SHAPES
    ]
    plans = [plan_of(engine_environment, start, tmp_path) for start in chosen]
    outcomes = start_all(engine_environment, chosen, tmp_path)
    assert [outcome.started for outcome in outcomes] == [start.fits for start in chosen]
    found = [differences(status, plan, outcome) for (status, plan), outcome in zip(plans, outcomes, strict=True)]
    assert found == [[], [], [], []]
