"""The log says what a sidecar is when it starts, and what it waits for."""

from __future__ import annotations

import logging

import pytest

from highwater import __version__
from highwater.process.clocks import Clocks
from highwater.server.settings import load
from highwater.server.sidecar import WAITING_SECONDS, WaitingLog, start_line
from tests.unit.terminal.reports import report

TOKEN = "correct-horse-battery"
RULE = '[{"name": "full", "signal": "device_used_ratio", "high_water": 0.95, "low_water": 0.92}]'


def line(**flags: str) -> str:
    return start_line(load({key.replace("__", "."): value for key, value in flags.items()}, environ={}))


def test_the_defaults_are_said_in_one_line():
    assert line() == (
        f"highwater {__version__}: engine http://127.0.0.1:8000, data plane: pure Python, policy act: device "
        "(device_free_bytes, waters from the engine's own plan), control calls need the admin token "
        "(highwater token prints it), recorders disabled (recorder_dir), incidents in memory only"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"policy__mode": "observe"}, "policy observe: device"),
        ({"policy__rules": "[]"}, "policy act: no rules"),
        ({"policy__rules": RULE}, "full (device_used_ratio, acts at 95.0 %, stops at 92.0 %)"),
        ({"admin_token": TOKEN}, "need the admin token (admin_token)"),
        ({"admin_token_file": "/etc/t"}, "need the admin token in /etc/t"),
        ({"trust_loopback": "true"}, "but from this machine (trust_loopback)"),
        ({"recorder_dir": "/dev/shm/hw"}, "recorders in /dev/shm/hw"),
        ({"proxy__enabled": "false"}, "no requests are passed on to the engine: proxy.enabled is false"),
    ],
)
def test_each_setting_that_decides_is_in_it(flags, words):
    assert words in line(**flags)
    assert TOKEN not in line(**flags)


def test_what_is_waited_for_is_said_at_once_and_then_once_a_minute(caplog):
    caplog.set_level(logging.INFO)
    now = 100.0
    waiting = WaitingLog(Clocks(lambda: now))
    away = report(state="starting", hint="connection refused")
    for _ in range(2 * int(WAITING_SECONDS)):
        waiting.notice(away)
        now += 1.0
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "waiting for the engine at http://127.0.0.1:8000 (starting): connection refused",
        "waiting for 60 s for the engine at http://127.0.0.1:8000 (starting): connection refused",
    ]
    waiting.notice(report())
    assert len(caplog.records) == 2


def test_an_engine_that_goes_again_is_waited_for_after_its_own_line(caplog):
    caplog.set_level(logging.INFO)
    now = 0.0
    waiting = WaitingLog(Clocks(lambda: now))
    waiting.notice(report())
    gone = report(state="gone", hint="connection refused")
    for now in (1.0, WAITING_SECONDS, WAITING_SECONDS + 1.0):  # noqa: B007 - read by the clock
        waiting.notice(gone)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for 60 s for the engine at http://127.0.0.1:8000 (gone): connection refused"
    ]
