"""A trace names the lines that grow, is bounded in time and size, and leaves alone whom it should."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from highwater_worker.identity import boot_id, pid_started
from highwater_worker.processes import host_trace
from highwater_worker.processes.host_trace import MAX_RESULT_BYTES, MAX_TRACER_BYTES, HostTrace

NOW = 1_800_000_000.0
ID = "0123456789abcdef"
Frame = namedtuple("Frame", "filename lineno")


class Tracer:
    """tracemalloc, with what it would say given by hand; every call is kept."""

    def __init__(self):
        self.calls: list[str] = []
        self.held: dict[tuple[tuple[str, int], ...], tuple[int, int]] = {}
        self.memory = 1_000
        self.on = False
        self.error: Exception | None = None

    def is_tracing(self):
        return self.on

    def start(self, frames):
        self.on = True
        self.calls.append(f"start {frames}")

    def clear_traces(self):
        self.calls.append("clear")

    def stop(self):
        self.on = False
        self.calls.append("stop")

    def get_tracemalloc_memory(self):
        return self.memory

    def take_snapshot(self):
        self.calls.append("snapshot")
        if self.error is not None:
            raise self.error
        rows = [
            SimpleNamespace(traceback=tuple(Frame(*one) for one in reversed(frames)), size=size, count=count)
            for frames, (size, count) in self.held.items()
        ]
        return SimpleNamespace(statistics=lambda _: rows)


class Scene:
    def __init__(self, folder: Path, tracer=None):
        self.folder = folder
        self.tracer = Tracer() if tracer is None else tracer
        self.now = 100.0
        self.trace = HostTrace(
            folder,
            clock=lambda: self.now,
            wall_clock=lambda: NOW + self.now,
            tracer=self.tracer,
            pause=self._pause,
        )
        self.stem = f"highwater-{os.getpid()}-{pid_started()}"

    def _pause(self, _seconds):
        if isinstance(self.tracer, Tracer):
            self.tracer.calls.append("pause")

    @property
    def request_path(self):
        return self.folder / f"{self.stem}.trace-request"

    def ask(self, *, mode=0o600, age=0.0, **changes):
        mine = {"schema": 1, "boot_id": boot_id(), "pid": os.getpid(), "started": pid_started()}
        request = mine | {"id": ID, "action": "start", "minutes": 4, "frames": 3} | changes
        self.request_path.write_text(json.dumps(request))
        self.request_path.chmod(mode)
        os.utime(self.request_path, (NOW + self.now - age,) * 2)
        self.trace.tick()

    def after(self, seconds):
        self.now += seconds
        self.trace.tick()

    def result(self):
        return json.loads((self.folder / f"{self.stem}.trace.json").read_text())


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_without_a_request_nothing_is_done(scene, monkeypatch):
    """One look at one name, and tracemalloc is not even imported."""
    looked = []
    monkeypatch.setattr(os, "lstat", lambda path: (looked.append(path), (_ for _ in ()).throw(FileNotFoundError))[0])
    monkeypatch.setattr(host_trace, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    scene.trace.tick()
    assert looked == [str(scene.request_path)]
    assert scene.tracer.calls == []


def test_a_trace_compares_two_readings_and_ends_in_order(scene):
    """The first after a quarter of the time; what grew since is named, with its callers; then it is stopped safely."""
    leak, cache = (("/vllm/leak.py", 12), ("/vllm/api.py", 3)), (("/vllm/cache.py", 5),)
    scene.ask()
    assert scene.result()["state"] == "running"
    assert not scene.request_path.exists()
    scene.tracer.held = {leak: (1_000, 10), cache: (5_000, 1)}
    scene.after(60)
    scene.tracer.held = {leak: (91_000, 910), cache: (5_000, 1)}
    scene.after(179)
    assert scene.result()["state"] == "running"
    scene.after(1)
    result = scene.result()
    assert (result["state"], result["why"], result["since_seconds"]) == ("ended", "its time is over", 180.0)
    assert result["lines"] == [
        {"file": "/vllm/leak.py", "line": 12, "bytes": 90_000, "count": 900, "callers": ["/vllm/api.py:3"]}
    ]
    assert result["grown_bytes"] == 90_000
    assert scene.tracer.calls == ["start 3", "snapshot", "snapshot", "clear", "pause", "stop"]
    assert not scene.trace.is_running


def test_the_real_tracemalloc_names_this_line(tmp_path):
    """A list that grows, by file and line; and it is off afterwards."""
    scene = Scene(tmp_path, tracemalloc)
    scene.ask()
    scene.after(60)
    kept = [bytearray(10_000) for _ in range(100)]
    scene.after(180)
    (first, *_) = scene.result()["lines"]
    assert __file__.endswith(first["file"].removeprefix("..."))
    assert first["count"] >= len(kept)
    assert 1_000_000 <= first["bytes"] < 1_200_000
    assert not tracemalloc.is_tracing()


def test_it_ends_early_on_request(scene):
    """What grew until then is named."""
    scene.ask()
    scene.tracer.held = {(("/vllm/leak.py", 12),): (500, 5)}
    scene.now += 30
    scene.ask(action="stop")
    result = scene.result()
    assert (result["why"], result["since_seconds"], len(result["lines"])) == ("it was asked to stop", 30.0, 1)
    assert not scene.tracer.on


def test_it_ends_when_it_takes_too_much_itself(scene):
    """Its own memory is what fills the pod otherwise."""
    scene.ask()
    scene.tracer.memory = MAX_TRACER_BYTES
    scene.after(1)
    assert scene.trace.is_running
    scene.tracer.memory += 1
    scene.after(1)
    assert scene.result()["why"] == "tracemalloc itself had more than 128 MiB"
    assert not scene.tracer.on


def test_a_process_that_traces_itself_is_left_alone(scene):
    """Neither started over nor stopped."""
    scene.tracer.on = True
    scene.ask()
    assert (scene.result()["state"], scene.tracer.calls) == ("refused", [])
    assert "uses tracemalloc itself" in scene.result()["why"]


def test_a_process_that_turns_it_off_is_not_read(scene):
    """It is its own."""
    scene.ask()
    scene.tracer.on = False
    scene.after(1)
    assert (scene.result()["why"], scene.tracer.calls) == ("this process turned tracemalloc off", ["start 3"])


def test_one_trace_at_a_time(scene):
    """A second request neither ends nor prolongs the first."""
    scene.ask()
    scene.ask(id="f" * 16, minutes=60)
    assert (scene.result()["id"], scene.tracer.calls) == (ID, ["start 3"])
    scene.after(240)
    assert scene.result()["state"] == "ended"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"boot_id": "another"}, "its boot_id is not"),
        ({"pid": 1}, "its pid is not"),
        ({"started": 1}, "its started is not"),
        ({"schema": 2}, "of another version"),
        ({"id": "../../etc"}, "no id of 16"),
        ({"action": "run"}, "no action start or stop"),
        ({"minutes": 61}, "at most 60"),
        ({"minutes": 0}, "at most 60"),
        ({"minutes": float("nan")}, "at most 60"),
        ({"frames": 9}, "must be 1 to 8"),
        ({"frames": True}, "must be 1 to 8"),
        ({"mode": 0o622}, "others may write"),
        ({"age": 61.0}, "older than 60 s"),
        ({"padding": "x" * 1024}, "it must have 1 to 1024"),
    ],
)
def test_what_is_not_meant_for_it_is_refused(scene, changes, why):
    """By name, once: the request is gone afterwards."""
    scene.ask(**changes)
    assert (scene.result()["state"], scene.tracer.calls, scene.request_path.exists()) == ("refused", [], False)
    assert why in scene.result()["why"]


def test_another_users_request_is_refused(scene, monkeypatch):
    """Any user who may write into the folder could ask otherwise."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 7)
    monkeypatch.setattr(os, "fstat", _as_user(4_711))
    scene.ask()
    assert f"the request is of user 4711; it must be of user {user + 7}" in scene.result()["why"]


def _as_user(number):
    real = os.fstat

    def fstat(descriptor):
        found = list(real(descriptor))
        found[4] = number
        return os.stat_result(found)

    return fstat


@pytest.mark.parametrize("make", ["link", "pipe", "hard link"])
def test_what_is_no_file_of_its_own_is_refused(scene, tmp_path, make):
    """Nothing that it names is opened."""
    other = tmp_path / "other"
    other.write_text("{}")
    if make == "pipe":
        os.mkfifo(scene.request_path)
    elif make == "link":
        scene.request_path.symlink_to(other)
    else:
        os.link(other, scene.request_path)
    scene.trace.tick()
    assert scene.result()["state"] == "refused"
    assert (scene.tracer.calls, scene.request_path.exists(), other.read_text()) == ([], False, "{}")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 1000])
def test_garbage_is_refused(scene, text):
    """It is neither asked again nor fatal."""
    scene.request_path.write_bytes(text)
    os.utime(scene.request_path, (NOW + scene.now,) * 2)
    scene.trace.tick()
    assert (scene.result()["state"], scene.request_path.exists()) == ("refused", False)


def test_a_reading_that_fails_ends_the_trace(scene):
    """And tracemalloc is off: a trace without an end would cost as long as the process runs."""
    scene.ask()
    scene.tracer.error = MemoryError("no room")
    scene.after(240)
    assert (scene.result()["state"], scene.result()["why"]) == ("failed", "MemoryError: no room")
    assert not scene.tracer.on
    scene.after(1)


def test_the_result_is_bounded(scene):
    """Names of any length and in any number fit into four kibibytes."""
    scene.ask()
    scene.tracer.held = {
        (("/" + "é" * 5_000, number), ("/" + "x" * 5_000, 1)): (1_000 + number, 1) for number in range(500)
    }
    scene.after(240)
    path = scene.folder / f"{scene.stem}.trace.json"
    assert path.stat().st_size <= MAX_RESULT_BYTES
    lines = scene.result()["lines"]
    assert lines[0]["bytes"] == 1_499
    assert scene.result()["grown_bytes"] == sum(1_000 + number for number in range(500))


def test_our_own_lines_are_not_named(scene):
    """The reading itself allocates, in tracemalloc too; what our wrappers of the engine's calls is its own."""
    own = str(Path(host_trace.__file__).with_name("writer.py"))
    scene.ask()
    scene.tracer.held = {
        ((own, 12),): (10**9, 1),
        (("/lib/tracemalloc.py", 67), (host_trace.__file__, 184)): (10**9, 1),
        (("/vllm/leak.py", 3), (own, 5)): (10, 1),
    }
    scene.after(240)
    assert [line["file"] for line in scene.result()["lines"]] == ["/vllm/leak.py"]


def test_a_forked_child_does_not_trace_on(scene):
    """It has the parent's hooks and nobody who would end them."""
    scene.ask()
    scene.trace.leave()
    assert (scene.tracer.calls, scene.trace.is_running) == (["start 3", "stop"], False)
    assert scene.result()["state"] == "running"  # the file is the parent's


def test_the_end_of_the_process_is_written_down(scene):
    """Without a reading, which would hold it up; where only its file was removed, nothing is traced without end."""
    scene.ask()
    scene.trace.close()
    assert scene.result()["why"] == "the process, or what it writes of itself, ended"
    assert scene.tracer.calls == ["start 3", "clear", "pause", "stop"]


def test_old_results_go(scene):
    """A day later; a young one and other files stay."""
    names = ("highwater-1-2.trace.json", "highwater-1-3.trace.json", "notes.trace.json")
    for name, age in zip(names, (90_000, 80_000, 90_000), strict=True):
        (scene.folder / name).write_text("")
        os.utime(scene.folder / name, (NOW + scene.now - age,) * 2)
    scene.ask()
    assert {path.name for path in scene.folder.iterdir()} == {*names[1:], f"{scene.stem}.trace.json"}


@pytest.mark.parametrize("bad", ["folder", "forged", "second"])
def test_no_other_request_keeps_a_trace_from_ending(scene, bad):
    """One that cannot be removed, or comes anew each second, from whoever may write into the folder."""
    scene.ask()
    if bad == "folder":
        scene.request_path.mkdir()
    for _ in range(5):
        scene.now += 60
        if bad == "forged":
            scene.ask(mode=0o666)
        elif bad == "second":
            scene.ask()
        else:
            scene.trace.tick()
        if scene.tracer.calls.count("snapshot") == 2:
            break
    assert scene.tracer.calls.count("stop") == 1
    assert scene.tracer.calls.count("snapshot") == 2
