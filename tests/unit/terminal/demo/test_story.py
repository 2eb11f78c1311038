"""The demonstration's course: what it shows, and how its failures are told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from highwater.terminal.demo import story
from highwater.terminal.demo.engine import EngineEnvironment, EngineOptions
from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.traffic import TrafficResult


class Server:
    """An engine or a sidecar that says when it starts; `calls` are the sidecar's answers by path."""

    url, port, log_path = "http://127.0.0.1:8017", 8017, Path("/nowhere/log")

    def __init__(self, said: list[str], name: str, calls: dict[str, Any] | None = None) -> None:
        self.said, self.name, self.calls = said, name, calls or {}

    def start(self) -> Server:
        self.said.append(f"{self.name} started")
        return self

    __enter__ = start

    def stop(self, *_: object) -> None:
        self.said.append(f"{self.name} stopped")

    __exit__ = stop

    def is_running(self) -> bool:
        return f"{self.name} stopped" not in self.said

    def call(self, _method: str, path: str) -> Any:
        return self.calls[path]

    def command(self, *words: str) -> str:
        return f"$ highwater {' '.join(words)}"


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is said by a demonstration whose engine and sidecar are stand-ins, in a folder of its own."""
    said: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(story, "DemoEngine", lambda *_, **__: Server(said, "engine"))
    monkeypatch.setattr(story, "DemoSidecar", lambda *_, **__: Server(said, "sidecar", INCIDENTS))
    monkeypatch.setattr(story, "_wait_ready", lambda *_: [])
    monkeypatch.setattr(story, "answers", lambda *_: False)
    return said


DIED = {"id": "20261128T103421Z-died", "summary": "The engine died: by a signal", "last_at": 0.0}
INCIDENTS = {"/memory/incidents": {"incidents": [DIED]}}
ENVIRONMENT = EngineEnvironment("0.32.0", Path("/nowhere"))


def test_the_addresses_are_said_before_the_engine_has_started(staged: list[str], tmp_path: Path) -> None:
    with story.stage(ENVIRONMENT, EngineOptions(), 8017, say=staged.append):
        assert list(tmp_path.iterdir())
    assert [staged[0], *staged[2:]] == ["sidecar started", "engine started", "engine stopped", "sidecar stopped"]
    assert "http://127.0.0.1:8017/dashboard" in staged[1]
    assert not list(tmp_path.iterdir())


def failed(staged: list[str], error: DemoError) -> list[str]:
    with pytest.raises(DemoError) as caught, story.stage(ENVIRONMENT, EngineOptions(), 1, say=staged.append):
        raise error
    return str(caught.value).splitlines()


def test_an_engine_that_dies_in_the_story_is_told_as_its_incident_first_and_last(staged, tmp_path):
    first, second, kept, last = failed(
        staged, DemoError("2 of 3 requests failed\nThe log is /x; its last lines are: y")
    )
    assert (first, second, last) == (DIED["summary"], "2 of 3 requests failed", DIED["summary"])
    (folder,) = tmp_path.iterdir()
    assert kept.endswith(f"incidents --folder {folder / 'incidents'} {DIED['id']}")


def test_where_an_engine_died_the_sidecar_stays_for_who_wants_to_read(staged, tmp_path, monkeypatch):
    def wait() -> None:
        assert "sidecar stopped" not in staged
        staged.append("waited")
        raise KeyboardInterrupt

    monkeypatch.setattr("signal.pause", wait)
    stays = story.stage(ENVIRONMENT, EngineOptions(), 1, say=staged.append, stays=True)
    with pytest.raises(DemoError, match="The engine died"), stays:
        raise DemoError("2 of 3 requests failed")
    said = next(line for line in staged if "still up" in line)
    assert said.splitlines()[0] == DIED["summary"]
    assert f"/memory/incidents/{DIED['id']}?format=html" in said
    assert staged[-3:] == ["waited", "engine stopped", "sidecar stopped"]


def test_nothing_is_left_by_ctrl_c(staged, tmp_path):
    with pytest.raises(KeyboardInterrupt), story.stage(ENVIRONMENT, EngineOptions(), 1, say=staged.append):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_requests_that_fail_in_the_traffic_are_the_reason_not_the_policys_silence(monkeypatch):
    calls = {"/memory/history?step=86400": {"now": 1.0}, "/memory/events?limit=200": {"events": []}}
    sidecar: Any = Server([], "sidecar", calls)

    async def send_images(*_: object, images: Iterable[int], **__: object) -> TrafficResult:
        return TrafficResult(len(list(images)), 2, ("HTTP 500: dead", "HTTP 500: dead"), 1.0)

    monkeypatch.setattr(story, "send_images", send_images)
    engine: Any = SimpleNamespace(served_model="m", log_path=Path("/nowhere/log"))
    with pytest.raises(DemoError, match=r"2 of 240 requests failed: HTTP 500: dead\n"):
        story._traffic_until_reset(engine, sidecar, 0)


@pytest.mark.usefixtures("staged")
def test_the_watched_engine_has_the_worker_package_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[EngineOptions] = []

    def engine(_: object, options: EngineOptions, **__: object) -> Server:
        given.append(options)
        return Server([], "engine")

    monkeypatch.setattr(story, "DemoEngine", engine)
    monkeypatch.setattr(story, "_send", lambda *_: None)
    monkeypatch.setattr(story, "_SETTLE_SECONDS", 0)
    said: list[str] = []
    story.watch(ENVIRONMENT, EngineOptions(), images=1, say=said.append)
    (options,) = given
    assert [line for line in said if line.startswith("$")] == ["$ highwater status", "$ highwater status --since ready"]
    assert (options.plugin, options.dev_mode, options.extension) == (True, False, False)


def test_the_first_half_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextmanager
    def stage(*_: object, **__: object) -> Iterator[tuple[None, None]]:
        yield None, None

    monkeypatch.setattr(story, "ensure_environment", lambda **_: ENVIRONMENT)
    monkeypatch.setattr(story, "watch", lambda *_, **__: seen.append("watch"))
    monkeypatch.setattr(story, "tell", lambda *_, **__: seen.append("tell"))
    monkeypatch.setattr(story, "stage", stage)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for given in (["--skip", "watch"], []):
        result = CliRunner().invoke(story.demo, [*given, "--no-stay", "--port", "8017"], catch_exceptions=False)
        assert max(map(len, result.output.splitlines())) <= 80
    assert seen == ["tell", "watch", "tell"]
