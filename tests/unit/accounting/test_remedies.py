"""A remedy's row says all that the policy and the accounting ask about it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from highwater.accounting import remedies
from highwater.accounting.components import COMPONENT_NAMES
from highwater.accounting.remedies import GAIN_FIELDS, TRAITS, PossibleGain, RemedyTraits, credit
from highwater.policy import core, gains
from highwater.policy.core import decide
from highwater.policy.memory import LifeMemory
from highwater.policy.pressure import Facts
from highwater.policy.rules import SIGNAL_REMEDIES, Rule
from highwater.readings.policy import RankPressure
from highwater.readings.rank import Components
from tests.fakes.ranks import GIB, H100, reading, report


@pytest.mark.parametrize("row", TRAITS.values(), ids=list(TRAITS))
def test_a_row_agrees_with_itself(row: RemedyTraits):
    """Its components and signals are known; what measures itself or needs a release has a component for the bytes."""
    named = (row.components, *row.components_on.values())
    assert {component for components in named for component in components} <= set(COMPONENT_NAMES)
    assert set(row.lowers) <= set(SIGNAL_REMEDIES)
    assert all(named) or not row.has_own_figure
    assert not row.needs_release or len(row.components) == 1


def test_every_gain_that_a_rank_shows_is_of_one_remedy():
    """The report, the terminal, the dashboard and the incidents take both from the rows."""
    shown = [field.name for field in fields(RankPressure) if field.name.startswith("can_")]
    assert list(GAIN_FIELDS.values()) == shown


@pytest.mark.parametrize(
    ("remedy", "given", "gain"),
    [
        ("trim_encoder_cache", {"encoder": 9, "trimmable": 4}, PossibleGain(4, is_certain=True)),
        ("trim_encoder_cache", {"encoder": 9, "trimmable": 0}, PossibleGain(0, is_certain=True)),
        ("trim_encoder_cache", {"encoder": 9, "trimmable": None}, PossibleGain(9, is_certain=False)),
        ("reset_encoder_cache", {"encoder": 9, "trimmable": 4}, PossibleGain(9, is_certain=True)),
        ("release", {"cached": 9, "releasable": 4}, PossibleGain(4, is_certain=True)),
        ("release", {"cached": 9, "releasable": 0}, PossibleGain(0, is_certain=True)),
        ("release", {"cached": 9, "releasable": None, "split": 2}, PossibleGain(7, is_certain=False)),
        ("release", {"cached": 9, "releasable": None, "split": 10}, PossibleGain(0, is_certain=False)),
        ("release", {"cached": 9, "device": "cpu"}, PossibleGain(None)),
        ("reset_mm_cache", {"encoder": 9, "cached": 9}, PossibleGain(None)),
    ],
)
def test_what_a_remedy_can_give_is_the_workers_figure_or_a_bound(
    remedy: str, given: dict[str, Any], gain: PossibleGain
):
    """Without the worker's figure it is an upper bound, and not certain: the policy does not act on a bound alone."""
    assert TRAITS[remedy].can_give(reading(**given)) == gain


def test_a_row_is_all_that_the_policy_needs_of_a_new_remedy(monkeypatch: pytest.MonkeyPatch):
    """It is chosen where it can give enough, and credited with its own component."""
    row = RemedyTraits(
        name="drop_graphs",
        frees="captured graphs",
        does_not_free="the rest",
        lowers=("device_free_bytes",),
        can_give=lambda reading: PossibleGain(reading.components.other_tensors_bytes),
        components=("other_tensors_bytes",),
    )
    for module in (core, gains, remedies):
        monkeypatch.setattr(module, "TRAITS", {**TRAITS, row.name: row})
    rule = Rule(name="device", signal="device_free_bytes").model_copy(update={"remedies": (row.name,)})
    full = reading(rest=H100 - 2 * GIB - 100, other=2 * GIB)
    _, decision = decide([rule], report(full), Facts(), LifeMemory(), 1.0)
    assert decision.action is not None
    assert (decision.action.remedy, decision.action.ranks[0, 0][0]) == (row.name, 2 * GIB)
    after = replace(full, components=replace(full.components, other_tensors_bytes=GIB))
    assert credit(row.name, [full], [after]).components == Components(other_tensors_bytes=GIB)
