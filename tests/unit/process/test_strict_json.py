"""JSON is taken as the standard has it, and nothing else raises anything but a ValueError."""

from __future__ import annotations

import pytest

from highwater.process.untrusted import parse_json


def test_json_is_parsed():
    assert parse_json(' {"a": [1, 2.5, null]} ') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": -Infinity}', "[" * 100_000])
def test_what_is_not_json_is_refused(text: str):
    with pytest.raises(ValueError, match=r"JSON|nested|Expecting"):
        parse_json(text)
