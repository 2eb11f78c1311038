"""`snapshot` hands PyTorch's own snapshot to its viewer, tells its size before, and leaves no half file."""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
from types import SimpleNamespace

import pytest

from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import ask, fake_worker, in_a_thread, refusal

NAME = "20261121T161500123Z"
FILE = f"highwater-snapshot-{NAME}-2-3-{os.getpid()}.pickle"
FRAMES = [{"name": "forward", "filename": "/vllm/model.py", "line": 12}]


def taken(segments: int = 2, blocks: int = 3, entries: int = 4) -> dict[str, object]:
    """What is read of torch's own (torch/cuda/memory.py, `_snapshot`), its words shared as its C++ shares them."""
    block = {"size": 4096, "state": "active_allocated", "frames": FRAMES}
    segment = {"device": 1, "total_size": 2 << 20, "frames": FRAMES}
    entry = {"action": "alloc", "addr": 1 << 46, "frames": FRAMES}
    return {
        "segments": [segment | {"blocks": [dict(block) for _ in range(blocks)]} for _ in range(segments)],
        "device_traces": [[], [dict(entry) for _ in range(entries)]],
        "allocator_settings": {"expandable_segments": True},
    }


@pytest.fixture
def module(torch_device):
    module = torch_device("npu")
    module.snapshot = taken()
    return module


@pytest.fixture
def take(tmp_path):
    """`take(worker)` asks for a snapshot into the test's folder, and returns the whole answer."""

    def take(worker: object, **arguments: object) -> dict[str, object]:
        given = {"directory": str(tmp_path), "name": NAME} | arguments
        return json.loads(worker.highwater_rpc("snapshot", json.dumps(given)))

    return take


@pytest.fixture
def disk_with(monkeypatch):
    """`disk_with(free)` makes every disk have so many bytes free."""
    return lambda free: monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("short", "code"), [(1, "no_space"), (0, None)])
def test_it_leaves_the_disk_as_much_room_again(take, tmp_path, disk_with, short, code):
    """Twice its size must be free: nothing is written otherwise."""
    worker = fake_worker()
    size = take(worker, dry_run=True)["bytes"]
    disk_with(2 * size - short)
    answer = take(worker)
    assert answer.get("error", {}).get("code") == code
    assert os.listdir(tmp_path) == ([] if short else [FILE])


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_the_file_is_torchs_own_snapshot(kind, torch_device, take, tmp_path):
    module = torch_device(kind)
    module.snapshot = taken()
    answer = take(fake_worker(kind))
    assert (answer["ok"], answer["path"], os.listdir(tmp_path)) == (True, str(tmp_path / FILE), [FILE])
    assert pickle.loads((tmp_path / FILE).read_bytes()) == taken()  # noqa: S301 - our own, just written
    assert answer["bytes"] == (tmp_path / FILE).stat().st_size
    assert (answer["segments"], answer["blocks"], answer["trace_entries"]) == (2, 6, 4)
    assert answer["elapsed_ms"] > 0
    assert ("_snapshot", 1) in module.calls


def test_a_dry_run_writes_nothing_and_tells_the_same_size(module, take, tmp_path):
    """What is free too, so that the sidecar can add up the ranks."""
    worker = fake_worker()
    dry = take(worker, dry_run=True)
    assert (dry["path"], os.listdir(tmp_path)) == (None, [])
    assert dry["free_bytes"] > 0
    real = take(worker)
    assert all(real[key] == dry[key] for key in ("bytes", "segments", "blocks", "trace_entries"))


def test_a_dry_run_needs_no_directory(module):
    answer = ask(fake_worker(), "snapshot", '{"dry_run": true}')
    assert (answer["bytes"] > 0, answer["free_bytes"], answer["notes"]) == (True, None, [])


def test_a_dry_run_makes_no_directory(module, tmp_path):
    answer = ask(fake_worker(), "snapshot", json.dumps({"dry_run": True, "directory": str(tmp_path / "later")}))
    assert [note["name"] for note in answer["notes"]] == ["free_bytes"]
    assert os.listdir(tmp_path) == []


def test_the_directory_is_made(module, take, tmp_path):
    assert take(fake_worker(), directory=str(tmp_path / "a" / "b"))["ok"]
    assert os.listdir(tmp_path / "a" / "b") == [FILE]


@pytest.mark.parametrize(
    ("folder", "expected"), [(0o700, 0o600), (0o755, 0o600), (0o1777, 0o640), (0o770, 0o640), (0o2770, 0o640)]
)
def test_only_its_owner_and_whose_group_shares_the_folder_may_read_it(module, take, tmp_path, folder, expected):
    """Whatever the engine's umask: the sidecar asks for the token before it hands one out."""
    tmp_path.chmod(folder)
    before = os.umask(0)
    try:
        take(fake_worker())
    finally:
        os.umask(before)
    status = (tmp_path / FILE).stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (expected, tmp_path.stat().st_gid)


def test_a_group_that_the_engine_is_not_in_gets_nothing(module, take, tmp_path, monkeypatch):
    """The folder's group may not be given to the file then, and the file's own is nobody's business."""

    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "fchown", raising(PermissionError(errno.EPERM, "Operation not permitted")))
    assert take(fake_worker())["ok"]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_of_a_long_history_the_newest_is_written(module, take, tmp_path, monkeypatch):
    """All of it could be gigabytes, while the engine stands still."""
    monkeypatch.setattr("highwater_worker.operations.memory._MAX_TRACE_ENTRIES", 3)
    module.snapshot = taken(entries=5)
    for number, entry in enumerate(module.snapshot["device_traces"][1]):
        entry["addr"] = number
    answer = take(fake_worker())
    written = pickle.loads((tmp_path / FILE).read_bytes())  # noqa: S301 - our own, just written
    assert [entry["addr"] for entry in written["device_traces"][1]] == [2, 3, 4]
    assert (answer["trace_entries"], len(module.snapshot["device_traces"][1])) == (3, 5)
    assert answer["notes"] == [{"name": "trace_entries", "reason": "the newest 3 of each device, of 5 in all"}]


def test_an_unknown_rank_is_not_guessed(module, take, tmp_path):
    """Two workers that claim one rank would overwrite each other."""
    take(fake_worker(rank=None))
    assert os.listdir(tmp_path) == [FILE.replace("-2-3-", "-2-x-")]


def test_a_write_that_fails_leaves_nothing(module, take, tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.rename", raising(OSError(errno.ENOSPC, "No space left on device")))
    answer = take(fake_worker())
    assert answer["error"] == {"code": "failed", "message": "OSError: [Errno 28] No space left on device"}
    assert os.listdir(tmp_path) == []


def test_other_devices_have_none(torch_device, take, tmp_path):
    torch_device("cpu")
    message = "PyTorch's memory snapshot is not taken on cpu; it is on npu and cuda devices"
    for dry_run in (True, False):
        answer = take(fake_worker("cpu", None), dry_run=dry_run)
        assert answer["error"] == {"code": "unavailable", "message": message}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("older", [SimpleNamespace(), None])
def test_an_older_torch_has_none(module, take, older):
    module.memory = older
    assert take(fake_worker())["error"] == {
        "code": "unavailable",
        "message": "torch.npu.memory has no _snapshot in this version of PyTorch (2.9.0+fake)",
    }


@pytest.mark.parametrize("odd", [None, [], {"segments": None}, {}])
def test_what_is_no_snapshot_is_no_answer(module, take, odd):
    """Another torch may return anything."""
    module.snapshot = odd
    assert take(fake_worker())["error"] == {
        "code": "failed",
        "message": "UnreadableError: torch.npu.memory._snapshot returned no segments",
    }


def test_what_torch_raises_is_an_answer(module, take, monkeypatch):
    """A pluggable allocator may have no snapshot."""
    module.memory = SimpleNamespace(_snapshot=raising(RuntimeError("not supported by this allocator")))
    assert take(fake_worker())["error"]["message"] == "RuntimeError: not supported by this allocator"


def test_it_is_refused_off_the_main_thread(module):
    reason = in_a_thread(lambda: refusal(fake_worker(), "snapshot", '{"dry_run": true}'))
    assert reason == "this is not the worker's main thread, on which its steps run: one may be running now"
    assert module.calls == []
