"""The demonstration's tables: the start phase by phase, and what grew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from highwater.accounting.components import COMPONENT_NAMES
from highwater.demo import story
from highwater.demo.engine import EngineOptions
from highwater.demo.environment import EngineEnvironment
from highwater.demo.story import growth_table, start_table
from highwater.units import MIB


def rank(*, used: int, cached: int, entries: int = 0, start: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A rank of the report, in MiB; what else there is of it is unknown."""
    components = dict.fromkeys(COMPONENT_NAMES) | {"encoder_cache_bytes": cached * MIB}
    return {
        "rank": 0,
        "device": {"type": "cpu", "name": "some"},
        "used_bytes": used * MIB,
        "components": components,
        "encoder_cache": {"entries": entries},
        "start": start or [],
    }


def phase(name: str, used: int | None, seconds: float = 1.0) -> dict[str, Any]:
    return {"name": name, "seconds": seconds, "used_bytes": None if used is None else used * MIB}


def rows(text: str) -> dict[str, list[str]]:
    """The words of each line behind its first."""
    return {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}


def test_each_phase_says_what_it_added():
    """The first has nothing before it; where a figure is missing nothing is guessed."""
    start = [phase("before", 400, 0.0), phase("init", 450, 2.25), phase("weights", None), phase("warm_up", 900)]
    shown = rows(start_table([rank(used=900, cached=0, start=start)]))
    assert shown["before"] == ["0.0", "400.0", "-"]
    assert shown["init"] == ["2.2", "450.0", "+50.0"]
    assert shown["weights"] == ["1.0", "-", "-"]
    assert shown["warm_up"] == ["1.0", "900.0", "-"]


class Server:
    """An engine or a sidecar that says when it starts."""

    url = "http://127.0.0.1:8017"

    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name

    def __enter__(self) -> Server:
        self.said.append(f"{self.name} started")
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_addresses_are_said_before_the_engine_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start takes half a minute, in which the dashboard can be looked at."""
    said: list[str] = []
    monkeypatch.setattr(story, "DemoEngine", lambda *_, **__: Server(said, "engine"))
    monkeypatch.setattr(story, "DemoSidecar", lambda *_, **__: Server(said, "sidecar"))
    monkeypatch.setattr(story, "_wait_ready", lambda _: [])
    environment = EngineEnvironment("0.32.0", Path("/nowhere"))
    with story.stage(environment, EngineOptions(), 8017, say=said.append):
        pass
    assert [said[0], said[2]] == ["sidecar started", "engine started"]
    assert "http://127.0.0.1:8017/dashboard" in said[1]


def test_what_grew_is_shown_component_by_component():
    """With how many entries the encoder cache has."""
    text = growth_table([rank(used=900, cached=0)], [rank(used=1000, cached=96, entries=12)])
    shown = rows(text)
    assert shown["used"] == ["900.0", "1,000.0", "+100.0"]
    assert "+96.0" in text
    assert text.endswith("encoder cache: 12 entries")


@pytest.mark.parametrize(("dp_rank", "title"), [(0, "rank 0 (cpu, some)"), (1, "rank 1.0 (cpu, some)")])
def test_a_rank_of_the_second_engine_is_named_with_it(dp_rank, title):
    """Each engine numbers its ranks from 0."""
    told = rank(used=900, cached=0, start=[phase("init", 450)]) | {"dp_rank": dp_rank}
    assert title in start_table([told])


def test_the_watched_engine_has_the_worker_package_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plugin, which writes the recorders' files: no development mode, no extension."""
    given: list[EngineOptions] = []

    def engine(_: object, options: EngineOptions, **__: object) -> Server:
        given.append(options)
        return Server([], "engine")

    monkeypatch.setattr(story, "DemoEngine", engine)
    monkeypatch.setattr(story, "DemoSidecar", lambda *_, **__: Server([], "sidecar"))
    monkeypatch.setattr(story, "_wait_ready", lambda *_: [])
    monkeypatch.setattr(story, "_send", lambda *_: None)
    monkeypatch.setattr(story, "_SETTLE_SECONDS", 0)
    story.watch(EngineEnvironment("0.32.0", Path("/nowhere")), EngineOptions(), images=1, say=lambda _: None)
    (options,) = given
    assert (options.plugin, options.dev_mode, options.extension) == (True, False, False)
