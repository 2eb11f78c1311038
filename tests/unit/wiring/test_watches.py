"""The wiring connects each watch with the parts that ask it."""

from __future__ import annotations

from types import SimpleNamespace

from highwater.process.internal_errors import InternalErrors
from highwater.settings.sources import load
from highwater.wiring.core import Clocks
from highwater.wiring.watches import wire_host


def test_a_poll_hears_of_the_engines_processes_from_the_watch_of_host_memory():
    """Without that nobody would notice an engine that is stopped while it has nothing to do."""
    poller = SimpleNamespace(engine_process=None, stopped_engine=None)
    watch = wire_host(load({}, environ={}), poller, Clocks(), InternalErrors())
    assert (poller.engine_process, poller.stopped_engine) == (watch.engine_process, watch.stopped_engine)
