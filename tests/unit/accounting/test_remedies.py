"""A remedy's row says all that the policy and the accounting ask about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.accounting import freed, remedies
from highwater.accounting.components import COMPONENT_NAMES
from highwater.accounting.freed import credit
from highwater.accounting.remedies import TRAITS, PossibleGain, RemedyTraits
from highwater.policy import core, gains
from highwater.policy.core import decide
from highwater.policy.memory import LifeMemory
from highwater.policy.pressure import Facts
from highwater.policy.rules import SIGNAL_REMEDIES, Rule
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
    for module in (core, freed, gains, remedies):
        monkeypatch.setattr(module, "TRAITS", {**TRAITS, row.name: row})
    rule = Rule(name="device", signal="device_free_bytes").model_copy(update={"remedies": (row.name,)})
    full = reading(rest=H100 - 2 * GIB - 100, other=2 * GIB)
    _, decision = decide([rule], report(full), Facts(), LifeMemory(), 1.0)
    assert decision.action is not None
    assert (decision.action.remedy, decision.action.ranks[0, 0][0]) == (row.name, 2 * GIB)
    after = replace(full, components=replace(full.components, other_tensors_bytes=GIB))
    assert credit(row.name, [full], [after]).components == Components(other_tensors_bytes=GIB)
