"""The table of known differences names tests that are there. That its entries fail, strict expected failures show."""

from pathlib import Path

import pytest

from tests.faithful.conftest import names_of
from tests.faithful.unfaithful import UNFAITHFUL

SOURCE = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))


@pytest.mark.parametrize(("control", "test"), UNFAITHFUL, ids=lambda part: part)
def test_each_entry_is_a_test_that_this_control_takes(request, control, test):
    function = test.partition("[")[0]
    assert f"def {function}(" in SOURCE
    running = {name for item in request.session.items for name in names_of(item)}
    if any(name[1] == function for name in running):
        assert (control, test) in running or (control, function) not in running
