"""The wiring connects each watch with the parts that ask it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from highwater.host.reading import HostReading
from highwater.process.internal_errors import InternalErrors
from highwater.settings.sources import load
from highwater.wiring.core import Clocks
from highwater.wiring.watches import wire_host


def test_a_poll_hears_of_the_engines_processes_from_the_watch_of_host_memory():
    """Without that nobody would notice an engine that is stopped while it has nothing to do."""
    poller = SimpleNamespace(engine_process=None, stopped_engine=None)
    watch = wire_host(load({}, environ={}), poller, Clocks(), InternalErrors())
    assert (poller.engine_process, poller.stopped_engine) == (watch.engine_process, watch.stopped_engine)
    assert poller.engine_lives() is None
    for listener in watch.listeners:
        listener(HostReading(taken_at=5.0))
    assert poller.engine_lives() == (5.0, ())


@pytest.mark.parametrize(
    ("setting", "is_blind"), [("policy.mode", True), ("recorder_dir", False), ("engine_log", False)]
)
def test_the_hint_names_what_would_show_starts_that_end_where_nothing_does(tmp_path, setting, is_blind):
    poller = SimpleNamespace(unseen_starts="")
    value = "act" if setting == "policy.mode" else str(tmp_path / "vllm")
    wire_host(load({setting: value}, environ={}), poller, Clocks(), InternalErrors())
    assert ("recorder_dir" in poller.unseen_starts) is is_blind
