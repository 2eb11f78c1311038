"""The wiring connects each watch with the parts that ask it."""

from __future__ import annotations

import pytest

from highwater.host.reading import HostReading
from highwater.process.clocks import SYSTEM
from highwater.server.parts import Parts
from highwater.server.settings import load
from tests.unit.host.test_oom_kills import rank as killed_where_rank
from tests.unit.host.test_oom_kills import seen


def parts_of(**settings: str) -> Parts:
    return Parts(load(settings, environ={}), SYSTEM)


def test_a_poll_hears_of_the_engines_processes_from_the_watch_of_host_memory():
    """Without that nobody would notice an engine that is stopped while it has nothing to do."""
    parts = parts_of()
    watch, processes = parts.host, parts.processes
    assert (processes.one, processes.stopped) == (watch.engine_process, watch.stopped_engine)
    assert processes.silent_core == watch.silent_core
    assert processes.lives() is None
    for listener in watch.listeners:
        listener(HostReading(taken_at=5.0))
    assert processes.lives() == (5.0, ())


@pytest.mark.parametrize(
    ("setting", "is_blind"), [("policy.mode", True), ("recorder_dir", False), ("engine_log", False)]
)
def test_the_hint_names_what_would_show_starts_that_end_where_nothing_does(tmp_path, setting, is_blind):
    value = "act" if setting == "policy.mode" else str(tmp_path / "vllm")
    assert ("recorder_dir" in parts_of(**{setting: value}).processes.unseen_starts) is is_blind


def test_a_path_that_cannot_be_read_is_warned_of_at_the_start(tmp_path, caplog):
    missing = tmp_path / "none"
    parts = parts_of(recorder_dir=str(missing), engine_log=str(missing))
    assert (parts.recorders is None, parts.incidents.has_log) == (False, True)
    assert [one.getMessage().partition(";")[0] for one in caplog.records] == [
        f"recorder_dir: {missing} cannot be listed: no such file or directory",
        f"engine_log: {missing} cannot be read: no such file or directory",
    ]


@pytest.mark.parametrize("source", ["samples", "container"])
async def test_a_kill_for_memory_is_an_event_and_a_finding_whoever_counted_it(source):
    parts = parts_of()
    for kills in (0, 1):
        if source == "samples":
            parts.oom_kills.notice([killed_where_rank(0, kills)])
        else:
            parts.oom_kills.look(seen(kills))
    (event,) = parts.history.events()
    assert event.summary.startswith("the kernel has killed 1 process of the engine's container for memory (counted ")
    assert [one.name for one in (await parts.host.report()).findings] == ["container_oom_kills"]
