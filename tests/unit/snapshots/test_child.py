"""A foreign file is read by a process of its own, which is limited, imports nothing from here, and ends with us."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from highwater.snapshots import SnapshotError, child
from tests.unit.snapshots.made import MIB, block, fragmented, segment, snapshot


@pytest.fixture
def written(tmp_path):
    def write(value, name="some.pickle"):
        path = tmp_path / name
        path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
        return path

    return write


def refused(path, **options):
    with pytest.raises(SnapshotError) as raised:
        child.ask([path], **options)
    return str(raised.value)


def test_a_snapshot_is_explained(written):
    """With a picture's data on request."""
    answer = child.ask([written(fragmented())], want=180 * MIB, picture=True)
    (device,) = answer["explanation"]["devices"]
    assert (device["segments"], device["wanted"]["fits"], len(answer["picture"]["bars"])) == (58, False, 58)


def test_two_are_compared(written):
    """Both in one process."""
    before, after = written(snapshot([]), "a"), written(snapshot([segment([block(MIB)])]), "b")
    (device,) = child.ask([before, after])["difference"]["devices"]
    assert device["by_size"] == [{"block_bytes": MIB, "bytes": MIB, "blocks": 1}]


def test_what_a_pickle_says_is_not_done(written, tmp_path):
    """The command that it holds is not run, and its function is named."""

    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/harm",)

    assert "STACK_GLOBAL (posix.system)" in refused(written({"segments": [Runs()]}))
    assert not (tmp_path / "harm").exists()


def test_nothing_is_imported_from_the_folder_of_the_call(written, tmp_path, monkeypatch):
    """Files that are called as modules of ours or Python's, in the folder where somebody unpacked a foreign archive."""
    (tmp_path / "highwater").mkdir()
    for name in ("highwater/__init__.py", "pickle.py", "json.py", "resource.py"):
        (tmp_path / name).write_text("raise SystemExit('a foreign module was imported')")
    monkeypatch.chdir(tmp_path)
    assert child.ask([written(fragmented())])["ok"]


def test_garbage_of_100_mib_is_refused(tmp_path):
    """As bytes that are no pickle, and as one text."""
    for name, head in (("zeros", b""), ("text", b"\x80\x04X\xff\xff\x3f\x06")):
        path = tmp_path / name
        with path.open("wb") as file:
            file.write(head)
            file.truncate(100 * MIB)
        assert refused(path)


def test_what_is_no_file_is_refused(tmp_path):
    """A link, a folder, a pipe, and nothing."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ".", "missing"):
        assert refused(tmp_path / name)


def test_a_pickle_that_is_no_snapshot_is_named(written):
    """By the key that is wrong."""
    assert refused(written({"weights": [1]})) == "the snapshot has no 'segments'; a snapshot of PyTorch's has one"
    assert "segments[0].total_size is not a whole number of 64 bits" in refused(
        written(snapshot([segment([block(1 << 70)])]))
    )


def test_it_is_not_waited_for_without_end(written, monkeypatch):
    """A process that hangs is ended, and the error says so."""
    monkeypatch.setattr(sys, "executable", _hanging(written))
    assert "not read within 0 s" in refused(written(snapshot([])), seconds=0.2)


def _hanging(written):
    script = written(b"#!/bin/sh\nexec sleep 60\n", "hangs")
    script.chmod(0o755)
    return str(script)


def test_a_process_that_dies_is_an_error(written, monkeypatch):
    """By its own message, or by the signal that ended it."""
    script = written(b"#!/bin/sh\necho no room >&2\nexit 3\n", "dies")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert refused(written(snapshot([]))) == "the process that read it ended with no room"
    script.write_bytes(b"#!/bin/sh\nkill -KILL $$\n")
    assert "signal 9: it took too much time or memory" in refused(written(snapshot([])))


def test_it_ends_with_its_parent(tmp_path):
    """A parent that is killed leaves no process behind that reads on."""
    code = (
        "import os, sys, time\n"
        "from highwater.snapshots.reading import limit_this_process\n"
        "parent = os.getpid()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    limit_this_process(parent)\n"
        "    print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 30
        while _runs(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _runs(pid)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_its_memory_is_limited():
    """A pickle that needs more is an error, and does not end the machine."""
    code = (
        "import os\n"
        "from highwater.snapshots import reading\n"
        "reading.limit_this_process(os.getppid())\n"
        "try:\n"
        "    bytearray(reading.ADDRESS_SPACE)\n"
        "except MemoryError:\n"
        "    print('limited')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "limited\n", done.stderr


@pytest.mark.parametrize("where", ["state", "segment_type", "filename"])
def test_lists_in_the_place_of_a_text_are_not_formatted(written, where):
    """Thirty lists, each of the one before twice, would be gigabytes as text."""
    bomb = ["x"]
    for _ in range(24):
        bomb = [bomb, bomb, bomb, bomb]
    stack = [{"filename": bomb if where == "filename" else "a.py", "line": 1, "name": "n"}]
    held = block(MIB, stack=stack) | ({"state": bomb} if where == "state" else {})
    kind = {"segment_type": bomb} if where == "segment_type" else {}
    raw = {"segments": [{"total_size": MIB, "blocks": [held], **kind}]}
    assert child.ask([written(raw)], seconds=30)["ok"]


def test_numbers_that_json_cannot_say_are_left_out(written):
    """Else the JSON of the answer is none, and a number of a thousand digits stands in the text."""
    raw = snapshot([segment([block(MIB)])], [{"action": "oom", "size": MIB, "stream": 2**2000, "device_free": 2**2000}])
    raw["allocator_settings"] = {"a": float("nan"), "b": 2**2000, "c": 1.5}
    answer = json.dumps(child.ask([written(raw)]))
    assert "NaN" not in answer
    assert str(2**2000) not in answer
