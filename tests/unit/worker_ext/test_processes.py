"""Each of vLLM's processes writes its own host memory; nothing that goes wrong there reaches vLLM."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import struct
import time
import zlib
from types import SimpleNamespace

import pytest

from highwater_worker import plugin, processes
from highwater_worker.kernel import cgroup
from highwater_worker.processes import ProcessWriter, Role, role_of, start_process_file
from highwater_worker.wire import MAX_PROCESS_BYTES, PROCESS_FILE_BYTES, make_process_file
from tests.fakes.raising import raising

HEAD = struct.Struct("<8sII")


@pytest.fixture(autouse=True)
def _forgets():
    cgroup.group_files.cache_clear()
    yield
    if processes._Current.writer is not None:
        processes._Current.writer.end()
    processes._Current.writer = None


def parsed(path):
    content = path.read_bytes()
    magic, sequence, length = HEAD.unpack_from(content)
    body = content[HEAD.size + 4 : HEAD.size + 4 + length]
    (checksum,) = struct.unpack_from("<I", content, HEAD.size)
    assert (magic, len(content)) == (b"HWPROC01", PROCESS_FILE_BYTES)
    assert zlib.crc32(body, zlib.crc32(content[: HEAD.size])) == checksum
    return sequence, json.loads(body)


def written(folder, **options):
    """A writer that has written once, and what it wrote."""
    one = ProcessWriter(folder, **options)
    assert one.write()
    (path,) = folder.glob("*.process")
    return one, path, parsed(path)[1]


def run_twice(one):
    """Have its thread's body write twice, in this thread."""
    is_over = iter([False, False, True])
    one._stopped = SimpleNamespace(wait=lambda _: next(is_over), set=lambda: None)
    one.run()


def test_a_process_says_who_it_is_and_what_it_has(tmp_path):
    one, path, said = written(tmp_path / "ring")
    assert path.name == f"highwater-{os.getpid()}-{said['started']}.process"
    assert (said["pid"], said["parent_pid"]) == (os.getpid(), os.getppid())
    assert said["anonymous_bytes"] > 1 << 20
    assert said["peak_bytes"] >= said["anonymous_bytes"]
    assert said["threads"] >= 1
    assert said["descriptors"] >= 3
    assert said["descriptors_limit"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert {"total_bytes", "available_bytes"} < set(said["machine"])
    one.write()
    assert parsed(path)[0] == 2
    one.leave()


def test_a_worker_says_its_rank_and_the_settings_that_decide_about_host_memory(tmp_path):
    media = SimpleNamespace(mm_processor_cache_gb=4, mm_processor_cache_type="shm")
    parallel = SimpleNamespace(
        _api_process_count=2, data_parallel_size=1, tensor_parallel_size=2, distributed_executor_backend="mp"
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        parallel_config=parallel,
        device_config=SimpleNamespace(device_type="cpu"),
    )
    one = ProcessWriter(tmp_path / "ring")
    one.set_worker(SimpleNamespace(rank=1, local_rank=1, parallel_config=parallel, vllm_config=config))
    said = one.record(5.0)
    assert (said["role"], said["index"], said["rank"], said["tp_rank"]) == ("worker", 1, 1, 1)
    assert said["engine"]["mm_processor_cache_gb"] == 4.0
    assert (said["engine"]["api_servers"], said["engine"]["executor"]) == (2, "mp")


def test_what_cannot_be_read_is_left_out(tmp_path):
    """No /proc, no groups, no shared memory: the process is named all the same."""
    said = ProcessWriter(tmp_path, root=tmp_path / "empty", shm=str(tmp_path / "none")).record(1.0)
    assert (said["pid"], said["descriptors"], said["cgroup"], said["shm"]) == (os.getpid(), None, None, None)
    assert "anonymous_bytes" not in said


def test_the_first_process_looks_at_shared_memory_in_a_thread_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS", 0.05)
    one = ProcessWriter(tmp_path / "ring", shm=str(tmp_path))
    assert one.record(1.0)["shm"] is None
    one.start_thread()
    deadline = time.monotonic() + 60.0
    while (shm := one.record(2.0)["shm"]) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    one.end()
    assert {"device", "size", "owners", "unlinked", "left_over", "not_known", "mono"} <= shm.keys()


@pytest.mark.parametrize("parent", [None, object()], ids=["first", "started by another"])
def test_only_the_first_process_looks_at_shared_memory(tmp_path, monkeypatch, parent):
    """A look reads what every process has mapped: one for all of an engine's."""
    started = []
    monkeypatch.setattr(processes.multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(processes, "Thread", lambda **named: SimpleNamespace(start=lambda: started.append(named)))
    run_twice(ProcessWriter(tmp_path))
    assert [named["name"] for named in started] == (["highwater-shm"] if parent is None else [])


@pytest.mark.parametrize(("cpu_seconds", "pause"), [(0.001, 10.0), (0.1, 50.0)])
def test_looks_at_shared_memory_take_a_five_hundredth_of_a_core_at_most(tmp_path, monkeypatch, cpu_seconds, pause):
    one, pauses = ProcessWriter(tmp_path, shm=str(tmp_path)), []
    monkeypatch.setattr(processes, "time", SimpleNamespace(thread_time=lambda: cpu_seconds))
    one._stopped = SimpleNamespace(wait=lambda seconds: pauses.append(seconds) or True)
    one._watch_shm()
    assert pauses == [pause]


def test_without_a_second_thread_nothing_is_known_of_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(processes.Thread, "start", raising(RuntimeError("can't start new thread")))
    one = ProcessWriter(tmp_path)
    run_twice(one)
    assert (one.record(1.0)["shm"], one._failures, one._file._written) == (None, 0, 2)


def test_text_that_is_too_long_costs_the_rest_and_not_the_process(tmp_path, monkeypatch):
    row = {"pid": 1, "name": "x" * 900}
    monkeypatch.setattr(processes, "list_processes", lambda *_: {"total": 8, "largest": [row] * 8})
    _, _, said = written(tmp_path / "ring")
    assert ("others" in said, "shm" in said) == (False, True), "the least important first"
    assert said["anonymous_bytes"] > 0
    with pytest.raises(ValueError, match="do not fit"):
        make_process_file(tmp_path / "a.process", b"x" * (MAX_PROCESS_BYTES + 1))


def test_a_folder_that_cannot_be_written_to_is_tried_again(tmp_path):
    """Nothing is raised into vLLM's process, and nothing is said twice a second."""
    (tmp_path / "ring").write_text("a file")
    one = ProcessWriter(tmp_path / "ring")
    assert one.write()
    (tmp_path / "ring").unlink()
    assert one.write()
    assert one.record(1.0)["failures"] == 1


def test_a_writer_whose_file_is_gone_ends(tmp_path):
    """Swept, or the folder was emptied: nobody would find what it writes."""
    one, path, _ = written(tmp_path / "ring")
    path.unlink()
    assert one.write() is False


def test_files_of_odd_names_count_for_no_process(tmp_path):
    """Anybody may put them there."""
    for name in ("highwater-7-1.process", "highwater-²-1.process", "highwater-8-1.process.tmp", "highwater-9.process"):
        (tmp_path / name).write_bytes(b"")
    assert processes._writers(tmp_path) == {7}


def wait_for_file(folder, wanted):
    deadline = time.monotonic() + 30.0
    while len(list(folder.glob("*.process"))) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(folder.glob("*.process"))


def _child(folder, done):
    found = wait_for_file(folder, 2)
    said = [parsed(path)[1] for path in found if f"-{os.getpid()}-" in path.name]
    done.put([(one["role"], "shm" in one) for one in said])


def test_a_forked_child_has_a_file_of_its_own(tmp_path, monkeypatch):
    """vLLM's plugins are not loaded again in it; its parent's file goes on."""
    monkeypatch.setattr(processes, "SECONDS", 0.05)
    start_process_file(tmp_path / "ring")
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    child = context.Process(target=_child, args=(tmp_path / "ring", done), name="EngineCore_DP3")
    child.start()
    assert done.get(timeout=60) == [("engine_core", False)]
    child.join()
    assert any(f"-{os.getpid()}-" in path.name for path in wait_for_file(tmp_path / "ring", 1))


def test_a_child_forked_within_a_write_goes_on(tmp_path):
    """The thread that writes is not in it, and would never give the lock back; the parent's file stays."""
    one, path, _ = written(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=one.leave)
    with one._file._lock:
        child.start()
        child.join(30.0)
        is_over, _ = child.exitcode is not None, child.kill()
    child.join()
    assert (is_over, child.exitcode, path.exists()) == (True, 0, True)


def test_a_process_that_ends_in_order_leaves_no_file(tmp_path, monkeypatch):
    """Its figures would be of a process that is gone."""
    monkeypatch.setattr(processes, "SECONDS", 0.05)
    start_process_file(tmp_path / "ring")
    wait_for_file(tmp_path / "ring", 1)
    processes._Current.writer.end()
    processes._Current.writer._thread.join(60.0)
    assert list((tmp_path / "ring").glob("*.process")) == []


@pytest.mark.parametrize(("kills", "stays"), [([1, 1], False), ([1, 2], True), ([None, None], False)])
def test_one_in_whose_container_the_kernel_killed_a_process_leaves_its_last_look(tmp_path, monkeypatch, kills, stays):
    monkeypatch.setattr(processes, "SECONDS", 0.0)
    counts = iter(kills)
    monkeypatch.setattr(processes, "read_oom_kills", lambda _: next(counts))
    monkeypatch.setattr(processes, "read_container", lambda _: {"events": {"oom_kill": 2}})
    one, path, _ = written(tmp_path)
    one._stopped.set()
    one.run()
    assert path.exists() is stays
    assert not stays or parsed(path)[1]["cgroup"]["events"] == {"oom_kill": 2}


@pytest.mark.parametrize("directory", ["relative", "/a\0b"])
def test_a_folder_that_cannot_be_one_is_said_once_and_changes_nothing(monkeypatch, caplog, directory):
    """The plugin's own rule: no exception reaches vLLM."""
    monkeypatch.setattr(plugin, "os", SimpleNamespace(environ={"HIGHWATER_RECORDER_DIR": directory}))
    plugin.register()
    assert "must be an absolute path" in caplog.text
    assert processes._Current.writer is None


def test_without_the_variable_there_is_no_thread(monkeypatch):
    monkeypatch.delenv("HIGHWATER_RECORDER_DIR", raising=False)
    plugin.register()
    assert processes._Current.writer is None


# --- roles ---


@pytest.mark.parametrize(
    ("name", "children", "arguments", "role"),
    [
        ("ApiServer_0", (), (), Role("api_server", 0)),
        ("ApiServer_12", (), (), Role("api_server", 12)),
        ("APIServer_DPRank_1", (), (), Role("api_server", 1)),
        ("EngineCore", (), (), Role("engine_core")),
        ("EngineCore_DP3", (), (), Role("engine_core", 3)),
        ("VllmWorker-7", (), (), Role("worker", 7)),
        ("VLLM_DP_Coordinator", (), (), Role("coordinator")),
        ("ForkPoolWorker-1", (), (), Role("other")),
        ("MainProcess", ("ApiServer_0", "ApiServer_1", "EngineCore_DP0"), ("vllm", "serve"), Role("launcher")),
        ("MainProcess", ("APIServer_DPRank_0",), ("vllm", "serve"), Role("launcher")),
        ("MainProcess", ("EngineCore",), ("/x/app.py",), Role("api_server")),
        ("MainProcess", (), ("/usr/bin/vllm", "serve", "model"), Role("api_server")),
        ("MainProcess", (), ("/x/vllm/entrypoints/openai/api_server.py",), Role("api_server")),
        ("MainProcess", (), ("/x/train.py",), Role("other")),
        ("MainProcess", (), (), Role("other")),
    ],
)
def test_the_role_follows_from_the_name(name, children, arguments, role):
    assert role_of(name, children, arguments) == role
