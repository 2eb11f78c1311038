"""Lines that clients can cause: few per kind and period, and the rest counted."""

import logging

import pytest

from highwater.process.limited_log import LimitedLog, printable


def test_a_kind_gets_its_share_and_the_next_period_says_what_was_left_out(caplog):
    now = [0.0]
    limited = LimitedLog(logging.getLogger("limited"), lines=2, period_seconds=60, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            limited.warning("refused", "refused %d", number)
        assert caplog.messages == ["refused 0", "refused 1"]
        now[0] = 61.0
        limited.warning("refused", "refused %d", 5)
    assert caplog.messages[2:] == ["3 more lines of kind refused were left out in the last period", "refused 5"]


def test_one_kind_does_not_use_up_anothers_share(caplog):
    limited = LimitedLog(logging.getLogger("limited"), lines=1, clock=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        limited.warning("refused", "refused")
        limited.warning("refused", "refused")
        limited.warning("denied", "denied")
    assert caplog.messages == ["refused", "denied"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"/v1/models", "/v1/models"),
        (b"/\x1b[2J\r\n\xff\\", "/\\x1b[2J\\r\\n\\xff\\\\"),
        ("/\u202egnp.exe", "/\\u202egnp.exe"),
        (b"x" * 201, "x" * 200 + "..."),
        (b"x" * 200, "x" * 200),
    ],
)
def test_what_a_client_chose_is_one_printable_line(text, shown):
    assert printable(text) == shown
