"""A process is found by what operators call it, asked by a file that it accepts, and its answer is foreign text."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import threading
import time

import pytest
from click.testing import CliRunner

from highwater.commands import host_trace
from highwater.commands.host_trace import trace
from highwater.host.trace import CannotTrace, ask, find_process, read_result, trace_text
from highwater_worker.files import encoded
from highwater_worker.identity import boot_id, pid_started
from highwater_worker.processes.host_trace import HostTrace
from highwater_worker.processes.writer import make_process_file

MY_NAME = f"highwater-{os.getpid()}-{pid_started()}"


def record_of(folder, pid, started, role, **more):
    """Write a process file as vLLM's process of that number would."""
    body = {
        "schema": 1,
        "at": time.time(),
        "mono": time.monotonic(),
        "pid": pid,
        "started": started,
        "boot_id": boot_id(),
        "pid_namespace": 0,
        "role": role,
        **more,
    }
    make_process_file(folder / f"highwater-{pid}-{started}.process", encoded(body)).close(removes=False)


@pytest.fixture
def folder(tmp_path):
    record_of(tmp_path, os.getpid(), pid_started(), "api_server")
    record_of(tmp_path, 42, 7, "engine_core", index=0)
    for rank in (0, 1):
        record_of(tmp_path, 50 + rank, 7, "worker", rank=rank, dp_rank=0)
    return tmp_path


@pytest.mark.parametrize(
    ("word", "pid"),
    [
        ("api-server", None),  # this process
        ("API server", None),
        ("api_server", None),
        ("engine-core", 42),
        ("EngineCore 0", 42),
        ("worker-1", 51),
        ("worker rank 0", 50),
        ("50", 50),
    ],
)
def test_a_process_is_found_by_its_names(folder, word, pid):
    """As `highwater host` calls it, as its file does, or by its number."""
    assert find_process(folder, word)[0].pid == (pid or os.getpid())


def test_what_means_none_or_several_says_which_words_mean_one(folder, tmp_path):
    """As they are typed, beside the name that `highwater host` shows."""
    both = r"worker-0 \(worker rank 0, pid 50\), worker-1 \(worker rank 1, pid 51\)"
    with pytest.raises(CannotTrace, match=rf"'worker' means several processes; name one: {both}$"):
        find_process(folder, "worker")
    with pytest.raises(
        CannotTrace, match=rf"'worker-7' is no .*; name one: .*engine-core \(EngineCore 0, pid 42\), {both}"
    ):
        find_process(folder, "worker-7")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CannotTrace, match="there are none; vLLM writes process files where HIGHWATER_RECORDER_DIR"):
        find_process(tmp_path / "empty", "api-server")


def test_every_word_that_is_offered_means_its_process(folder):
    """Also where ranks of several data-parallel engines have one number, and where a process has no other word."""
    for dp_rank, pid in enumerate((60, 61), start=1):
        record_of(folder, pid, 7, "worker", rank=0, dp_rank=dp_rank)
        record_of(folder, pid + 10, 7, "other", command="python3")
    with pytest.raises(CannotTrace) as caught:
        find_process(folder, "router")
    offered = re.findall(r"([\w.-]+) \([^()]*, pid (\d+)\)", str(caught.value))
    assert {pid: find_process(folder, word)[0].pid for word, pid in offered} == {pid: int(pid) for _, pid in offered}
    words = {int(pid): word for word, pid in offered}
    assert (words[50], words[60], words[61], words[70]) == ("worker-rank-0", "worker-rank-1.0", "worker-rank-2.0", "70")


def test_the_worker_package_accepts_the_request(folder):
    """Both ends of the file: mode, identity and keys fit; the trace runs and ends, and its result is read."""
    record, name = find_process(folder, "api-server")
    traced = HostTrace(folder)
    asked = ask(folder, record, action="start", minutes=1, frames=2)
    (request,) = folder.glob("*.trace-request")
    assert stat.S_IMODE(request.stat().st_mode) == 0o644
    traced.tick()
    running = read_result(folder, record)
    assert running is not None
    assert (running.state, running.id, trace_text(running, name).endswith("running; 1 m in all")) == (
        "running",
        asked,
        True,
    )
    kept = [bytearray(20_000) for _ in range(100)]
    ask(folder, record, action="stop", minutes=1, frames=2)
    traced.tick()
    ended = read_result(folder, record)
    assert ended is not None
    text = trace_text(ended, name)
    assert text.startswith(f"API server (pid {os.getpid()}): ended, it was asked to stop\nPython holds ")
    (first,) = (line for line in ended.lines[:1] if line.bytes > len(kept) * 20_000)
    assert __file__.endswith(first.file.removeprefix("..."))
    assert f" pieces: {first.file}:{first.line}" in text
    assert "malloc: in use " in text


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 9_000, b'{"state": "ended"}', b'{"state": "odd", "pid": 1, "started": 1}', b"\xff"]
)
def test_a_result_that_cannot_be_read_is_none(folder, text):
    """It is anybody's file."""
    record, _ = find_process(folder, "api-server")
    (folder / f"{MY_NAME}.trace.json").write_bytes(text)
    assert read_result(folder, record) is None


def test_another_process_result_is_none(folder):
    """By its number and start."""
    record, _ = find_process(folder, "api-server")
    other = {"state": "ended", "pid": 1, "started": 2}
    (folder / f"{MY_NAME}.trace.json").write_text(json.dumps(other))
    assert read_result(folder, record) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a file is given to another user")
def test_a_result_of_another_user_is_none(folder):
    """As long as the process's own file is there to compare with."""
    record, _ = find_process(folder, "api-server")
    path = folder / f"{MY_NAME}.trace.json"
    path.write_text(json.dumps({"state": "ended", "pid": record.pid, "started": record.started}))
    assert read_result(folder, record) is not None
    os.chown(path, 12345, 12345)
    assert read_result(folder, record) is None


def test_a_result_cannot_write_on_the_terminal(folder):
    """A file may be called anything."""
    record, name = find_process(folder, "api-server")
    line = {"file": "/a\x1b[2Jb.py", "line": 1, "bytes": 10, "count": 1}
    found = {"state": "ended", "pid": record.pid, "started": record.started, "after": {}, "lines": [line]}
    (folder / f"{MY_NAME}.trace.json").write_text(json.dumps(found))
    result = read_result(folder, record)
    assert result is not None
    assert "\x1b" not in trace_text(result, name)


@pytest.fixture
def traced(folder, monkeypatch):
    """The process's own thread, which looks for requests; the command looks as often."""
    monkeypatch.setattr(host_trace, "_LOOK_SECONDS", 0.01)
    ended, one = threading.Event(), HostTrace(folder)

    def run():
        while not ended.wait(0.01):  # by the clock: how often it looks
            one.tick()

    thread = threading.Thread(target=run)
    thread.start()
    yield folder
    ended.set()
    thread.join()


def test_the_command_waits_for_the_result(traced):
    """It names lines, and ends with 0."""
    done = CliRunner().invoke(trace, ["api-server", "--minutes", "0.005", "--folder", str(traced)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"API server (pid {os.getpid()}): ended, its time is over\n")
    again = CliRunner().invoke(trace, ["api-server", "--minutes", "0.005", "--folder", str(traced), "--json"])
    assert json.loads(again.output)["state"] == "ended"


def test_a_stop_without_a_trace_is_an_error(traced):
    """And no request is written."""
    done = CliRunner().invoke(trace, ["api-server", "--stop", "--folder", str(traced)])
    assert (done.exit_code, done.output) == (
        1,
        f"Error: no trace of API server (pid {os.getpid()}) is under way\n",
    )


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Another process, under the name of a worker."""
    monkeypatch.setattr(host_trace, "_LOOK_SECONDS", 0.01)
    with subprocess.Popen(["sleep", "600"]) as process:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        record_of(tmp_path, process.pid, pid_started(pid=process.pid), "worker", rank=0, pid_namespace=namespace)
        yield process, tmp_path
        process.kill()


def ended_meanwhile(stand_in, as_it_ends):
    """Trace the stand-in, which ends once it has taken the request, and return what the command says."""
    process, folder = stand_in
    name = f"highwater-{process.pid}-{pid_started(pid=process.pid)}"

    def end():
        while not list(folder.glob("*.trace-request")):
            time.sleep(0.01)
        (request,) = folder.glob("*.trace-request")
        own = {"id": json.loads(request.read_text())["id"], "pid": process.pid, "started": int(name.split("-")[2])}
        request.unlink()
        for state in as_it_ends:
            (folder / f".{name}.tmp").write_text(json.dumps({**own, **state}))
            (folder / f".{name}.tmp").rename(folder / f"{name}.trace.json")
        process.kill()

    thread = threading.Thread(target=end)
    thread.start()
    done = CliRunner().invoke(trace, ["worker", "--minutes", "10", "--folder", str(folder)])
    thread.join()
    return process.pid, done


def test_a_process_that_is_killed_meanwhile_is_an_error(stand_in):
    """At once, not when the trace's time is over."""
    pid, done = ended_meanwhile(stand_in, [{"state": "running", "seconds": 600.0}])
    assert (done.exit_code, done.output) == (
        1,
        f"Error: worker rank 0 (pid {pid}) has no result of its trace: the process ended, or its file was removed\n",
    )


def test_a_process_that_ends_in_order_meanwhile_is_an_error(stand_in):
    """The last thing that it wrote is given as the reason."""
    why = "the process, or what it writes of itself, ended"
    pid, done = ended_meanwhile(stand_in, [{"state": "ended", "why": why}])
    said = f"Error: worker rank 0 (pid {pid}) ended its trace without a last reading: {why}\n"
    assert (done.exit_code, done.output) == (1, said)


def test_a_process_that_ends_after_its_result_is_none(stand_in):
    """The trace was over."""
    _, done = ended_meanwhile(stand_in, [{"state": "ended", "why": "its time is over", "after": {}}])
    assert (done.exit_code, "its time is over" in done.output) == (0, True)


def test_a_process_that_does_not_answer_is_named(folder, monkeypatch):
    """An older worker package writes process files, and looks for no request."""
    monkeypatch.setattr(host_trace, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(host_trace, "_GRACE_SECONDS", 0.05)
    done = CliRunner().invoke(trace, ["api-server", "--minutes", "0.001", "--folder", str(folder)])
    assert (done.exit_code, "has not answered" in done.output) == (1, True)
    assert not list(folder.glob("*.trace-request"))
