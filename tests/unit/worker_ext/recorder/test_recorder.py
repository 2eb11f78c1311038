"""The recorder as the sidecar starts and stops it, as it samples and beats, and as it ends by itself."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

import highwater_worker
from highwater_worker.devices import HostMemory
from highwater_worker.errors import Notes
from highwater_worker.kernel.proc import file_system_of, is_in_memory
from highwater_worker.operations import OPERATIONS, Operation
from highwater_worker.recorder import end_recorder, running_recorder
from highwater_worker.recorder.recorder import Recorder
from highwater_worker.wire import EXTENSION_VERSION, Layout, Options, make_ring
from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import FakeModel, FakeTensor, ask, fake_runner, fake_worker, in_a_thread, refusal
from tests.unit.worker_ext.ring_bytes import heartbeat, parse, records, table

INSTANCE = "00112233445566ff"
OTHER = "ffeeddccbbaa9988"
NAME = f"highwater-{INSTANCE}-{os.getpid()}.ring"
STOP = json.dumps({"instance": INSTANCE})


@pytest.fixture
def worker(torch_device):
    """One whose recorder is stopped afterwards, whatever happens."""
    torch_device("npu")
    worker = fake_worker(execute_model=lambda plan: plan)
    yield worker
    assert end_recorder(worker)


@pytest.fixture
def start(worker, tmp_path, monkeypatch):
    """`start(**arguments)` asks for a recorder, and returns the whole answer."""

    # Then the test's own thread writes, and what it has done can be read at once.
    monkeypatch.setattr("highwater_worker.recorder.is_in_memory", lambda _: True)

    def start(**arguments: object) -> dict[str, object]:
        given = {"directory": str(tmp_path), "instance": INSTANCE} | arguments
        return json.loads(worker.highwater_rpc("recorder_start", json.dumps(given)))

    return start


def plan(tokens: int = 1) -> SimpleNamespace:
    return SimpleNamespace(total_num_scheduled_tokens=tokens)


def is_ended(path: Path) -> bool:
    """Whether the file has its writer's last word."""
    last = heartbeat(path)
    return last is not None and last["kind"] == "stopped"


# --- the operations ---


def test_a_start_says_what_was_begun(start, tmp_path):
    """The defaults: two minutes, ten samples a second and an eleventh for what cannot wait."""
    answer = start()
    assert (answer["path"], answer["instance"]) == (str(tmp_path / NAME), INSTANCE)
    assert (answer["slots"], answer["bytes"]) == (1320, Layout.of(1320, 4096).nbytes)
    assert (answer["already"], answer["other"]) == (False, False)
    assert answer["pid"] == os.getpid()
    assert answer["notes"] == []
    assert os.listdir(tmp_path) == [NAME]


def test_the_files_head_says_who_writes_it(worker, start, tmp_path):
    start(rate=2.5)
    identity, _ = parse(tmp_path / NAME)
    assert identity.pop("started_at") > 1.6e9
    assert identity.pop("boot_id") == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert identity.pop("pid_namespace") == Path("/proc/self/ns/pid").stat().st_ino
    assert identity.pop("pid_started") == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert identity == {
        "instance": INSTANCE,
        "rank": 3,
        "local_rank": 1,
        "dp_rank": 2,
        "tp_rank": 1,
        "pp_rank": 1,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "device": {"type": "npu", "index": 1, "physical_index": 1, "name": "Fake 9000", "uuid": "npu-0001"},
        "model": None,
        "rpc": True,
        "ranks_expected": 12,
        "rate": 2.5,
        "seconds": 120.0,
        "extension": EXTENSION_VERSION,
        "data_parallel": 3,
        "pipeline_parallel": 2,
        "tensor_parallel": 2,
        "self_started": False,
    }


@pytest.mark.parametrize("other", [{"rate": 10, "seconds": 120.0}, {"rate": 20}, {"seconds": 60}, {"instance": OTHER}])
def test_another_start_leaves_the_one_that_runs(worker, start, tmp_path, other):
    """Whoever asks, and whatever for, is told where it writes: it may be another sidecar's."""
    start()
    before, method = running_recorder(worker), worker.execute_model
    answer = start(**other)
    assert (answer["already"], answer["other"]) == (True, "instance" in other)
    assert (answer["path"], answer["instance"]) == (str(tmp_path / NAME), INSTANCE)
    assert (running_recorder(worker), worker.execute_model) == (before, method)
    assert os.listdir(tmp_path) == [NAME]


def test_a_stop_is_for_the_recorder_that_it_names(worker, start, tmp_path):
    start()
    answer = ask(worker, "recorder_stop", json.dumps({"instance": OTHER}))
    assert (answer["stopped"], answer["path"]) == (False, str(tmp_path / NAME))
    assert INSTANCE in answer["notes"][0]["reason"]
    assert running_recorder(worker) is not None


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "autofs", "lustre"])
def test_a_folder_on_another_machine_is_refused(worker, tmp_path, monkeypatch, kind):
    """The engine would wait for a server that is gone; nothing there is touched."""
    monkeypatch.setattr("highwater_worker.recorder.file_system_of", lambda _: kind)
    folder = tmp_path / "not" / "made"
    message = refusal(worker, "recorder_start", json.dumps({"directory": str(folder), "instance": INSTANCE}))
    assert f"lies on {kind}" in message
    assert os.listdir(tmp_path) == []


def test_a_start_after_the_file_was_taken_away_makes_it_anew(start, tmp_path):
    """A removed file could be written without end, and never found."""
    start()
    (tmp_path / NAME).unlink()
    assert start()["already"] is False
    assert (tmp_path / NAME).exists()


def test_a_start_that_fails_leaves_the_old_one_and_no_trace(worker, start, tmp_path, monkeypatch):
    start()
    recorder = running_recorder(worker)

    monkeypatch.setattr(os, "posix_fallocate", raising(OSError(errno.ENOSPC, "No space left on device")))
    (tmp_path / NAME).unlink()
    answer = start(rate=100, seconds=3600)
    assert answer["error"]["code"] == "failed"
    size = Layout.of(363_600, 4096).nbytes
    assert answer["error"]["message"].endswith(f"of {size} bytes cannot be made: No space left on device")
    assert (running_recorder(worker), recorder.is_running(), os.listdir(tmp_path)) == (recorder, True, [])


def test_a_thread_that_cannot_start_leaves_no_trace(worker, start, tmp_path, monkeypatch):
    method = worker.execute_model

    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    assert start()["error"]["message"] == "RuntimeError: can't start new thread"
    assert (os.listdir(tmp_path), worker.execute_model) == ([], method)


def test_a_worker_without_steps_is_recorded_with_a_note(start, worker):
    del worker.execute_model
    assert "moving.steps_begun" in [note["name"] for note in start()["notes"]]


def test_a_text_model_needs_no_room_for_entries(torch_device, start, worker):
    worker.model_runner.encoder_cache = None
    assert start()["bytes"] == Layout.of(1320, 0).nbytes


def test_a_stop_leaves_the_file(worker, start, tmp_path):
    method = worker.execute_model
    start()
    answer = ask(worker, "recorder_stop", STOP)
    assert (answer["stopped"], answer["path"], answer["notes"]) == (True, str(tmp_path / NAME), [])
    assert records(tmp_path / NAME)[0]["kind"] == "sample"
    assert is_ended(tmp_path / NAME)
    assert worker.execute_model is method
    assert running_recorder(worker) is None


def test_a_stop_of_nothing_says_so(worker):
    answer = ask(worker, "recorder_stop", STOP)
    assert (answer["stopped"], answer["path"]) == (False, None)
    assert answer["notes"] == [{"name": "stopped", "reason": "no recorder runs"}]


def test_the_engines_own_hook_ends_the_recorder(worker, start, tmp_path):
    """vLLM 0.33 calls it before the worker shuts down; calling it again does nothing."""
    start()
    worker.destroy_worker_extension()
    assert is_ended(tmp_path / NAME)
    assert running_recorder(worker) is None
    worker.destroy_worker_extension()


def test_the_engines_own_hook_never_raises(worker, monkeypatch):
    monkeypatch.setattr("highwater_worker.extension.end_recorder", raising(RuntimeError("no")))
    worker.destroy_worker_extension()


def test_a_thread_that_is_held_is_not_waited_for(worker, tmp_path, monkeypatch):
    """The engine stands still meanwhile: a second at most."""
    monkeypatch.setattr("highwater_worker.wire._STOP_SECONDS", 0.0)
    let_go = threading.Event()
    options = Options(tmp_path, INSTANCE, 10.0, 10.0)
    ring = make_ring(options.path(1), b"{}", Layout.of(5, 0))
    recorder = Recorder(worker, ring, options, wait=lambda _: let_go.wait(30))
    recorder.start(Notes())
    assert recorder.stop() is False
    let_go.set()
    recorder._thread.join(30)
    assert is_ended(options.path(1))


def test_an_operation_is_shown_while_it_runs(worker, start, monkeypatch):
    start()
    seen = []

    def look(asked: object, _: object) -> dict[str, object]:
        seen.append(running_recorder(asked).current)
        return {}

    monkeypatch.setitem(OPERATIONS, "memory", Operation(look))
    ask(worker, "memory")
    assert [call.op for call in seen] == ["memory"]
    assert running_recorder(worker).current is None


def test_an_operation_ends_with_a_sample(worker, start, tmp_path):
    start()
    worker.model_runner.encoder_cache["a"] = FakeTensor(10)
    ask(worker, "budget")
    last = records(tmp_path / NAME)[-1]
    assert (last["memory"]["encoder_cache"]["entries"], last["moving"]["rpc"]) == (1, None)
    assert table(tmp_path / NAME)[0]["total"] == 1


# --- the worker's end ---


def test_a_worker_that_is_given_up_goes_at_once_and_its_recorder_after_it(torch_device, tmp_path):
    """Started as the sidecar does it; an engine in this process may want its device memory back."""
    torch_device("npu")
    worker = fake_worker(execute_model=lambda plan: plan, model_runner=fake_runner(get_model=FakeModel))
    worker.model_runner.encoder_cache["a"] = tensor = FakeTensor(10)
    entry = weakref.ref(tensor)
    del tensor
    ask(worker, "recorder_start", json.dumps({"directory": str(tmp_path), "instance": INSTANCE}))
    worker.execute_model(plan(0))
    gone, thread = weakref.ref(worker), running_recorder(worker)._thread
    del worker
    gc.collect()
    assert (gone(), entry()) == (None, None)
    thread.join(30)
    assert not thread.is_alive()
    assert is_ended(tmp_path / NAME)


def test_our_thread_never_holds_the_worker(torch_device, tmp_path):
    """Whoever drops it last takes its tensors apart, and that must be the engine."""
    torch_device("npu")
    time = Time(waits=3)
    worker = fake_worker()
    recorder, _ = recorder_on(time, worker, tmp_path)
    held = []
    recorder._worker = lambda: held.append(1)
    recorder.run()
    assert held == []


# --- samples, on a clock that the test moves ---


class Time:
    """A clock that waiting moves, and that ends the thread's body after so many waits."""

    def __init__(self, waits: int = 1) -> None:
        self.now = 1000.0
        self.left = waits
        self.waited: list[float] = []
        self.between = lambda: None

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waited.append(round(seconds, 6))
        self.now += seconds
        self.left -= 1
        self.between()
        return self.left == 0


def recorder_on(
    time: Time, worker: object, folder: Path, rate: float = 10.0, *, in_memory: bool = True
) -> tuple[Recorder, Path]:
    """A recorder whose thread is the test; it counts the worker's steps."""
    options = Options(folder, INSTANCE, rate, 10.0)
    ring = make_ring(options.path(os.getpid()), b"{}", Layout.of(100, 4096))
    recorder = Recorder(
        worker, ring, options, clock=time, wall_clock=lambda: 5e8 + time.now, wait=time.wait, in_memory=in_memory
    )
    recorder.steps.attach(worker, Notes())
    return recorder, folder / NAME


def monos(path: Path) -> list[float]:
    return [record["mono"] for record in records(path)]


@pytest.fixture
def free_samples(monkeypatch):
    """They cost nothing, however busy this machine is."""
    monkeypatch.setattr("highwater_worker.recorder.recorder.time.perf_counter", lambda: 0.0)


@pytest.mark.usefixtures("free_samples")
def test_samples_are_taken_after_steps_at_ticks_of_the_wall_clock(worker, tmp_path):
    time = Time()
    _, path = recorder_on(time, worker, tmp_path)
    for moment in (1000.05, 1000.09, 1000.11, 1000.19, 1000.45, 1000.46, 1000.51):
        time.now = moment
        worker.execute_model(plan())
    assert monos(path) == [1000.05, 1000.11, 1000.45, 1000.51]
    assert all(record["at"] - record["mono"] == pytest.approx(5e8) for record in records(path))


def test_the_first_steps_without_tokens_are_always_followed_by_a_sample(worker, tmp_path):
    time = Time()
    _, path = recorder_on(time, worker, tmp_path)
    worker.execute_model(plan())
    worker.model_runner.encoder_cache |= {str(n): FakeTensor(10) for n in range(2000)}
    time.now += 0.001
    worker.execute_model(plan(0))
    time.now += 0.001
    worker.execute_model(plan(0))
    assert monos(path) == [1000.0, 1000.001, 1000.002]
    assert records(path)[-1]["memory"]["encoder_cache"]["entries"] == 2000
    assert len(table(path)[1]) == 2000


def test_samples_take_a_hundredth_of_the_engines_thread_at_most(worker, tmp_path, monkeypatch):
    time, spent = Time(), [0.0]
    recorder, path = recorder_on(time, worker, tmp_path)
    memory = recorder._reader.read
    monkeypatch.setattr("highwater_worker.recorder.recorder.time.perf_counter", lambda: spent[0])

    def slow(*arguments: object, **named: object) -> object:
        spent[0] += 0.005
        return memory(*arguments, **named)

    recorder._reader.read = slow
    for n in range(600):
        time.now = 1000.0 + n / 100
        worker.execute_model(plan())
    assert len(monos(path)) == pytest.approx(12, abs=1)
    assert [record["cost_ms"] for record in records(path)][:3] == [None, 5.0, 5.0]


def test_nothing_is_sampled_off_the_main_thread(worker, tmp_path):
    """A step that runs elsewhere is counted, and no more: torch is asked by nobody but its own thread."""
    time = Time()
    recorder, path = recorder_on(time, worker, tmp_path)
    notes = Notes()

    def elsewhere() -> None:
        worker.execute_model(plan(0))
        with recorder.operation("memory"):
            pass
        recorder.start(notes)
        recorder.stop()

    in_a_thread(elsewhere)
    assert records(path) == []
    assert "samples" in [note["name"] for note in notes.as_list()]


def test_a_forked_child_does_not_write_into_its_parents_file(worker, tmp_path, monkeypatch):
    time = Time()
    _, path = recorder_on(time, worker, tmp_path)
    monkeypatch.setattr("highwater_worker.recorder.recorder.os.getpid", lambda: 1)
    assert worker.execute_model(plan(0)) is not None
    assert records(path) == []


@pytest.mark.usefixtures("free_samples")
@pytest.mark.parametrize("broken", ["sampler", "ring"])
def test_a_step_never_fails_for_a_sample(worker, tmp_path, broken):
    """What fails costs only itself, and a full disk is tried again a second later."""
    time, tries = Time(), []
    recorder, path = recorder_on(time, worker, tmp_path)

    def fail(*_: object, **__: object) -> None:
        tries.append(time.now)
        raise OSError(errno.EIO, "Input/output error")

    if broken == "sampler":
        recorder._reader.read = fail
    else:
        recorder.ring.write = fail
    for n in range(21):
        time.now = 1000.05 + n / 10
        assert worker.execute_model("plan") == "plan"
    assert len(tries) == (21 if broken == "sampler" else 3)
    if broken == "sampler":
        assert ({record["memory"] == {} for record in records(path)}, len(records(path))) == ({True}, 21)


def test_who_ends_the_process_is_not_held_up(worker, tmp_path):
    recorder, _ = recorder_on(Time(), worker, tmp_path)

    recorder._reader.read = raising(SystemExit(3))
    with pytest.raises(SystemExit):
        worker.execute_model(plan())


@pytest.mark.parametrize("kind", ["sample", "heartbeat"])
def test_a_record_has_the_documents_names(worker, tmp_path, kind):
    shown = json.loads((Path(highwater_worker.__file__).parents[2] / "docs/recorder-file.json").read_text())[kind]
    recorder, path = recorder_on(Time(), worker, tmp_path)
    worker.execute_model(plan())
    recorder._beat()

    def names(value: object) -> object:
        return {key: names(inner) for key, inner in value.items()} if isinstance(value, dict) else None

    assert names(records(path)[0] if kind == "sample" else heartbeat(path)) == names(shown)


def test_the_first_table_tells_the_budget(worker, tmp_path):
    time = Time()
    recorder, path = recorder_on(time, worker, tmp_path)
    recorder.start(Notes())
    recorder.stop()
    head, rows = table(path)
    assert head["budget"] == {"gpu_memory_utilization": 0.9, "requested_bytes": 4_500, "init_free_bytes": 4_800}
    assert (head["total"], rows) == (0, [])


@pytest.mark.usefixtures("free_samples")
def test_why_the_device_cannot_be_read_is_told_at_once(worker, torch_device, tmp_path, monkeypatch):
    """A table is otherwise written where entries have changed, and notes are taken every ten seconds."""
    module, time = torch_device("npu"), Time()
    _, path = recorder_on(time, worker, tmp_path)
    worker.execute_model(plan())
    assert table(path)[0]["notes"] == []
    monkeypatch.setattr(module, "mem_get_info", raising(RuntimeError("error code is 507010")))
    time.now += 1.0
    worker.execute_model(plan())
    assert ["lost" in note["reason"] for note in table(path)[0]["notes"]] == [True]


@pytest.mark.usefixtures("free_samples")
def test_on_a_disk_our_thread_writes(worker, tmp_path):
    """To change a file there may wait for its journal, for seconds: the engine's thread does not."""
    time = Time(waits=1)
    recorder, path = recorder_on(time, worker, tmp_path, in_memory=False)
    worker.model_runner.encoder_cache["a"] = FakeTensor(10)
    for n in range(3):
        time.now = 1000.0 + n
        worker.execute_model(plan())
    assert (records(path), table(path)) == ([], None)
    recorder.run()
    assert monos(path) == [1000.0, 1001.0, 1002.0]
    assert table(path)[0]["total"] == 1


# --- heartbeats ---


def test_heartbeats_come_ten_a_second_while_something_happens_and_one_while_nothing_does(worker, tmp_path):
    time = Time(waits=60)
    recorder, path = recorder_on(time, worker, tmp_path)
    time.between = lambda: worker.execute_model(plan()) if 1000.95 < time.now < 1001.95 else None
    recorder.run()
    assert time.waited[:20] == [0.1] * 20, "it was just started"
    assert time.waited[-3:] == [1.0] * 3
    assert 35 <= time.waited.count(0.1) <= 45
    assert heartbeat(path)["kind"] == "stopped"


@pytest.mark.parametrize(
    ("is_child", "parent", "last"),
    [(True, os.getppid(), "stopped"), (True, 1, "heartbeat"), (False, 1, "stopped")],
    ids=["told by its parent", "its parent was killed", "nobody's child, its shell is gone"],
)
def test_a_worker_whose_parent_was_killed_does_not_end_in_order(  # noqa: PLR0917 - pytest passes them by name
    worker, tmp_path, monkeypatch, is_child, parent, last
):
    monkeypatch.setattr("highwater_worker.recorder.recorder.parent_process", lambda: object() if is_child else None)
    recorder, path = recorder_on(Time(waits=3), worker, tmp_path)
    monkeypatch.setattr("os.getppid", lambda: parent)
    recorder.run()
    assert heartbeat(path)["kind"] == last


def test_a_worker_whose_last_step_failed_does_not_end_in_order(worker, tmp_path):
    """The engine dies of that, and may end its workers in order."""
    worker.execute_model = raising(RuntimeError("device lost"))
    recorder, path = recorder_on(Time(), worker, tmp_path)
    with pytest.raises(RuntimeError):
        worker.execute_model(plan())
    recorder.run()
    assert heartbeat(path)["kind"] == "heartbeat"


def test_a_heartbeat_tells_what_is_under_way(worker, tmp_path):
    time, seen = Time(), []
    recorder, path = recorder_on(time, worker, tmp_path)

    def beat() -> None:
        time.now += 0.25
        recorder._beat()
        seen.append(heartbeat(path))

    class Output:
        def get_output(self) -> None:
            beat()

    def step(plan: object) -> object:
        with recorder.operation("budget"):
            beat()
        return Output()

    recorder.steps.detach(worker)
    worker.execute_model = step
    recorder.steps.attach(worker, Notes())
    output = worker.execute_model(plan())
    output.get_output()
    assert seen[0]["moving"] == {
        "steps_begun": 1,
        "steps_ended": 0,
        "step_seconds": 0.25,
        "last_step_mono": 1000.0,
        "output_seconds": None,
        "rpc": "budget",
        "rpc_seconds": 0.25,
        "call": None,
        "call_seconds": None,
        "last_step_empty": None,
        "tokens_mono": 1000.0,
    }
    assert (seen[1]["moving"]["step_seconds"], seen[1]["moving"]["output_seconds"]) == (None, 0.25)
    assert (seen[0]["calls"], seen[1]["calls"], records(path)[-1]["calls"]) == (2, 2, 2)


@pytest.mark.parametrize("what", ["step", "output", "operation"])
def test_what_lasts_for_a_second_shows_where_it_is(worker, tmp_path, what):
    time = Time()
    recorder, path = recorder_on(time, worker, tmp_path)
    dumps: list[str | None] = []

    def last_long() -> None:
        for seconds in (0.9, 0.2):
            time.now += seconds
            recorder._beat()
            dumps.append(heartbeat(path)["dump"])

    class Output:
        def get_output(self) -> None:
            last_long()

    recorder.steps.detach(worker)
    worker.execute_model = lambda _: last_long() if what == "step" else Output()
    recorder.steps.attach(worker, Notes())
    output = worker.execute_model(plan())
    if what == "output":
        in_a_thread(output.get_output)
    elif what == "operation":
        with recorder.operation("release"):
            last_long()
    first, *lines = dumps[1].splitlines()
    assert dumps[0] is None
    assert first.startswith("Current thread 0x")
    assert lines[0].endswith("in _dump")
    assert any(line.endswith("in last_long") for line in lines)
    recorder._beat()
    assert heartbeat(path)["dump"] is None, "it is over"


def test_our_thread_touches_neither_torch_nor_the_collector(torch_device, tmp_path, monkeypatch):
    module = torch_device("npu")

    worker, time = fake_worker(execute_model=lambda plan: plan), Time(waits=30)
    recorder, path = recorder_on(time, worker, tmp_path)
    for owner, name in ((gc, "disable"), (gc, "enable"), (gc, "collect"), (sys, "_current_frames")):
        monkeypatch.setattr(owner, name, raising(AssertionError("not from our thread")))
    with recorder.operation("release"):
        module.calls.clear()
        in_a_thread(recorder.run)
        assert heartbeat(path)["moving"]["rpc"] == "release"
        assert module.calls == []
    assert time.left == 0


def test_the_machine_is_read_once_a_second(worker, tmp_path, monkeypatch):
    reads = []
    host = HostMemory(rss_bytes=7, node_available_bytes=5, cgroup_oom_kills=3)
    monkeypatch.setattr("highwater_worker.recorder.recorder.read_host", lambda _: reads.append(1) or host)
    time = Time(waits=25)
    recorder, path = recorder_on(time, worker, tmp_path)
    time.between = lambda: worker.execute_model(plan())
    recorder.run()
    beat = heartbeat(path)
    assert (len(reads), beat["rss_bytes"], beat["free_bytes"], beat["cgroup_oom_kills"]) == (3, 7, 5, 3)


def test_a_file_that_is_removed_or_cut_ends_nobody(worker, tmp_path):
    for harm in (lambda path: path.unlink(missing_ok=True), lambda path: os.truncate(path, 0)):
        time = Time(5)
        recorder, path = recorder_on(time, worker, tmp_path)
        time.between = lambda harm=harm, path=path: (harm(path), worker.execute_model(plan(0)))
        recorder.run()
        assert time.left == 0


# --- processes ---

PROGRAM = """
import json, multiprocessing, os, sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[2])
from highwater_worker import MemoryExtension
from highwater_worker.recorder import running_recorder

class Worker(MemoryExtension):
    device = SimpleNamespace(type="cpu", index=None)
    def execute_model(self, plan):
        return plan

def ask(op, **arguments):
    answer = json.loads(worker.highwater_rpc(op, json.dumps(arguments)))
    assert answer["ok"], answer
    return answer

def start():
    return ask("recorder_start", directory=sys.argv[1], instance="00112233445566ff", seconds=10)

worker = Worker()
"""


def run_program(folder: Path, code: str, returncode: int = 0) -> list[Path]:
    """Run a program of its own to its end, and return the files that it left."""
    root = Path(highwater_worker.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM + code, str(folder), str(root)],
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (returncode, "")
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    "code",
    [
        "start()",
        "process = multiprocessing.get_context('fork').Process(target=start); process.start(); process.join()",
    ],
    ids=["a program", "a forked child"],
)
def test_a_process_that_ends_in_order_says_so(tmp_path, code):
    (path,) = run_program(tmp_path, code)
    assert is_ended(path)


@pytest.fixture
def folder_in_memory():
    """Where the engine's own thread writes."""
    memory = Path("/dev/shm")
    if not is_in_memory(file_system_of(memory)):
        pytest.skip("/dev/shm is not in memory here")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_a_process_that_is_killed_leaves_its_records(folder_in_memory):
    tmp_path = folder_in_memory
    code = "\nif os.fork() == 0:\n    start(); ask('memory'); os.kill(os.getpid(), 9)\nos.wait()"
    (path,) = run_program(tmp_path, code)
    assert not is_ended(path)
    assert records(path)[-1]["memory"]["host_memory"]["rss_bytes"] > 0


def test_a_forked_child_does_not_take_the_recorder_for_its_own(tmp_path):
    """The thread stayed with the parent: the child starts one of its own, and steps count once."""
    code = """
start()
import warnings; warnings.simplefilter("ignore")
if os.fork() == 0:
    assert running_recorder(worker) is None
    assert start()["already"] is False
    worker.execute_model("plan")
    assert running_recorder(worker).steps.progress().begun == 1
    assert ask("recorder_stop", instance="00112233445566ff")["stopped"] is True
    sys.exit(0)
assert os.wait()[1] == 0
assert running_recorder(worker) is not None
"""
    first, second = run_program(tmp_path, code)
    assert first.name != second.name
    for path in (first, second):
        assert is_ended(path)
