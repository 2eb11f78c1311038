"""Whatever a sidecar may tell within its own types, it is drawn, judged and checked, and fits."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from highwater.diagnose.case import Case, Setup, of_report
from highwater.diagnose.rules.setup import checked, exit_code
from highwater.diagnose.verdict import Deed, JudgedReport
from highwater.http.text.report import ranks_text, status_text
from highwater.model.components import COMPONENT_NAMES
from highwater.model.engine import EngineStatus
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event, Report
from highwater.terminal.client import event_of, report_of
from highwater.terminal.top.drawing import Drawing
from highwater.terminal.top.feed import View
from tests.unit.terminal.reports import as_json
from tests.unit.terminal.top.screens import drawn

# Sizes beyond what any machine has, below nothing too; JSON knows no infinity.
NUMBERS = {int: st.integers(-5, 2**60), float: st.floats(-1e15, 1e15)}
CAN = st.dictionaries(
    st.sampled_from(["dev_mode", "collective_rpc", "extension", "data_parallel"]),
    st.one_of(st.none(), st.booleans(), st.integers(1, 9)),
)


def anything_of(kind: type) -> st.SearchStrategy:
    """Any value of a type of ours."""
    hints = typing.get_type_hints(kind)
    special = {
        EngineStatus: {"capabilities": CAN},
        Deed: {"body": st.none()},
        RemedyResult: {"detail": st.just(())},
        # An event of no year that a terminal can show is left out (tests/unit/terminal/test_client.py).
        Event: {"at": st.floats(0, 2e11)},
    }.get(kind, {})
    # The checks judge a report of the sidecar's own, which knows its parts and the years of a calendar.
    own = {name: st.sampled_from(COMPONENT_NAMES) for name in hints if name == "component"}
    own |= {name: st.floats(0, 2e11) for name in hints if name == "now" or name.endswith(("_at", "since"))}
    return st.builds(kind, **{name: (own | special).get(name, of_hint(hint)) for name, hint in hints.items()})


def of_hint(hint: typing.Any) -> st.SearchStrategy:
    """Any value of an annotation."""
    if hint in NUMBERS:
        return NUMBERS[hint]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(of_hint(arguments[0]), max_size=2).map(tuple)
    if arguments and type(None) in arguments:
        return st.one_of(st.none(), *(of_hint(argument) for argument in arguments if argument is not type(None)))
    if isinstance(hint, type) and hint.__module__.startswith(("highwater.model.", "highwater.diagnose.")):
        return anything_of(hint)
    return st.from_type(hint)


@pytest.mark.slow("reports and screens, drawn by chance")
@pytest.mark.untraced
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    first=anything_of(JudgedReport),
    second=anything_of(JudgedReport),
    event=anything_of(Event),
    height=st.integers(1, 60),
)
def test_any_report_is_drawn_judged_and_checked(first, second, event, height):
    told = [report_of(as_json(replace(report, schema=1))) for report in (first, second)]
    event = event_of(as_json(event))
    assert event is not None
    view = View("http://s", told[0], 1.0).with_report(told[0], 1.0).with_report(told[1], 2.0).with_history({}, [event])
    for colours, width, most in ((False, 60, height), (True, 120, None)):
        assert all(line.isprintable() for line in drawn(Drawing(view, 3.0, height=most), width, most, colours=colours))
    assert status_text(told[0], [event], url="http://s", now=4.0, width=80)
    assert ranks_text(told[0])
    assert exit_code(checked(facts(told[1], event)), 0) in (0, 1, 2)


def facts(report: Report, event: Event) -> Case:
    return of_report("set-up", report, setup=Setup(now=1.0, report=report, events=[event]))
