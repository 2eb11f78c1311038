"""Which moment is chosen, version by version: the table of docs/engine.md as tests."""

from __future__ import annotations

import pytest

from app.capabilities import Capabilities
from app.safety import choose_moment


def engine(version: str | None, **other) -> Capabilities:
    known = {"pause": "mode", "data_parallel": 1, "api_processes": 1}
    return Capabilities(**{"version": version, **known, **other})


@pytest.mark.parametrize("version", [None, "0.11.0", "0.32.0", "0.40.0"])
def test_what_needs_nothing_gets_nothing(version):
    """Neither held nor paused."""
    assert choose_moment("nothing", engine(version), may_pause=True) == "any"


@pytest.mark.parametrize("version", ["0.12.0", "0.15.1", "0.16.0", "0.17.0", "0.23.0", "0.32.0"])
def test_an_idle_engine_is_had_by_pausing_it(version):
    """Where new requests wait in it and running ones finish."""
    assert choose_moment("idle engine", engine(version), may_pause=True) == "pause"


@pytest.mark.parametrize(
    ("version", "known", "why"),
    [
        ("0.11.2", {"pause": None}, "it cannot pause"),
        ("0.33.0", {}, "it answers new requests with 503 meanwhile"),
        ("0.34.1", {}, "nobody has read it yet"),
        (None, {}, "an unknown version"),
        ("0.32.0", {"pause": None}, "no development mode: no route"),
        ("0.32.0", {"data_parallel": 2}, "resuming too early raises in all engines"),
        ("0.32.0", {"data_parallel": None}, "not known to be one engine"),
        ("0.16.0", {"api_processes": 4}, "only the process that was asked would pause"),
        ("0.12.0", {"api_processes": None}, "not known to be one process"),
    ],
)
def test_elsewhere_requests_are_held_before_it(version, known, why):
    """A pause that harms somebody is none."""
    assert choose_moment("idle engine", engine(version, **known), may_pause=True) == "gate", why


def test_several_api_processes_are_no_matter_where_the_engine_itself_pauses():
    """From 0.17 on."""
    assert choose_moment("idle engine", engine("0.17.0", api_processes=4), may_pause=True) == "pause"


def test_a_pause_that_nobody_would_undo_is_not_made():
    """Without a state file a restart would not know of it."""
    assert choose_moment("idle engine", engine("0.32.0"), may_pause=False) == "gate"


@pytest.mark.parametrize("version", [None, "0.11.0", "0.12.0", "0.32.0"])
def test_an_idle_path_is_had_at_the_gate_only(version):
    """A request that waits in a paused engine has looked its images up already."""
    assert choose_moment("idle path", engine(version), may_pause=True) == "gate"
