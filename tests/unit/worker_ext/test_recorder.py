"""The flight recorder as the sidecar starts and stops it, and as it ends by itself."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import worker_ext
from tests.unit.worker_ext.fakes import FakeTensor, ask, fake_runner, fake_worker
from tests.unit.worker_ext.ring_bytes import parse, records
from worker_ext.errors import BadPayloadError
from worker_ext.notes import Notes
from worker_ext.operations import OPERATIONS
from worker_ext.payload import parse_payload
from worker_ext.recorder.recorder import Options, Recorder
from worker_ext.recorder.ring import make_ring
from worker_ext.state import running_recorder, state_of

INSTANCE = "00112233445566ff"
NAME = f"highwater-{INSTANCE}-{os.getpid()}.ring"


@pytest.fixture
def worker(torch_device):
    """One whose recorder is stopped afterwards, whatever happens."""
    torch_device("npu")
    worker = fake_worker(execute_model=lambda plan: plan)
    yield worker
    ask(worker, "recorder_stop")


@pytest.fixture
def start(worker, tmp_path):
    """`start(**arguments)` asks for a recorder, and returns the whole answer."""

    def start(**arguments: object) -> dict[str, object]:
        given = {"directory": str(tmp_path), "instance": INSTANCE} | arguments
        return json.loads(worker.highwater_rpc("recorder_start", json.dumps(given)))

    return start


def kinds(path: Path) -> list[str]:
    return [record["kind"] for record in records(path)]


# --- the operations ---


def test_a_start_says_what_was_begun(start, tmp_path):
    """The defaults: two minutes, ten samples a second and an eleventh record for the entries."""
    answer = start()
    assert answer["path"] == str(tmp_path / NAME)
    assert (answer["slots"], answer["bytes"], answer["already"]) == (1320, 4096 + 1320 * 2048, False)
    assert (answer["pid"], answer["notes"]) == (os.getpid(), [])
    assert os.listdir(tmp_path) == [NAME]


def test_the_files_head_says_who_writes_it(worker, start, tmp_path):
    """What never changes stands there once."""
    start(rate=2.5)
    identity, _ = parse(tmp_path / NAME)
    assert identity.pop("started_at") > 1.6e9
    assert identity.pop("boot_id") == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
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
        "budget": {"gpu_memory_utilization": 0.9, "requested_bytes": 4_500, "init_free_bytes": 4_800},
        "rate": 2.5,
        "seconds": 120.0,
        "extension": ask(worker, "hello")["extension_version"],
    }


def test_the_same_start_again_changes_nothing(worker, start):
    """The sidecar may ask as often as it likes."""
    start()
    recorder, method = running_recorder(worker), worker.execute_model
    answer = start(rate=10, seconds=120.0)
    assert (answer["already"], running_recorder(worker), worker.execute_model) == (True, recorder, method)


@pytest.mark.parametrize("other", [{"rate": 20}, {"seconds": 60}, {"instance": "ffeeddccbbaa9988"}])
def test_another_start_ends_the_old_one(worker, start, tmp_path, other):
    """Steps are not counted twice, and the old file says that it was ended."""
    start()
    old, keep = running_recorder(worker), os.open(tmp_path / NAME, os.O_RDONLY)
    answer = start(**other)
    assert (answer["already"], old.is_running(), running_recorder(worker) is old) == (False, False, False)
    worker.execute_model("plan")
    assert running_recorder(worker).steps.progress().begun == 1
    assert kinds(Path(f"/proc/self/fd/{keep}"))[-1] == "stopped"
    os.close(keep)
    assert [thread.name for thread in threading.enumerate()].count("highwater-recorder") == 1


def test_a_start_after_the_file_was_taken_away_makes_it_anew(start, tmp_path):
    """A removed file could be written for ever, and never found."""
    start()
    (tmp_path / NAME).unlink()
    assert start()["already"] is False
    assert (tmp_path / NAME).exists()


def test_a_start_that_fails_leaves_the_old_one_and_no_trace(worker, start, tmp_path, monkeypatch):
    """The reason is in the answer."""
    start()
    recorder = running_recorder(worker)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    answer = start(rate=100, seconds=3600)
    assert answer["error"]["code"] == "failed"
    assert answer["error"]["message"].endswith("of 744656896 bytes cannot be made: No space left on device")
    assert (running_recorder(worker), recorder.is_running(), os.listdir(tmp_path)) == (recorder, True, [NAME])


def test_a_thread_that_cannot_start_leaves_no_trace(worker, start, tmp_path, monkeypatch):
    """Neither a file nor a method of ours."""
    method = worker.execute_model

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert start()["error"]["message"] == "RuntimeError: can't start new thread"
    assert (os.listdir(tmp_path), worker.execute_model) == ([], method)


def test_a_worker_without_steps_is_recorded_with_a_note(start, worker):
    """Its memory is worth it."""
    del worker.execute_model
    assert [note["name"] for note in start()["notes"]] == ["moving.steps_begun"]


def test_a_stop_leaves_the_file(worker, start, tmp_path):
    """With its last word; and the worker as it was."""
    method = worker.execute_model
    start()
    answer = ask(worker, "recorder_stop")
    assert (answer["stopped"], answer["path"], answer["notes"]) == (True, str(tmp_path / NAME), [])
    assert kinds(tmp_path / NAME)[0] == "sample"
    assert kinds(tmp_path / NAME)[-1] == "stopped"
    assert worker.execute_model is method
    assert running_recorder(worker) is None


def test_a_stop_of_nothing_says_so(worker):
    """No error: it is as asked."""
    answer = ask(worker, "recorder_stop")
    assert (answer["stopped"], answer["path"]) == (False, None)
    assert answer["notes"] == [{"name": "stopped", "reason": "no recorder runs"}]


def test_a_thread_that_is_held_is_not_waited_for(worker, tmp_path, monkeypatch):
    """The engine stands still meanwhile: a second at most."""
    monkeypatch.setattr("worker_ext.recorder.recorder._STOP_SECONDS", 0.0)
    let_go = threading.Event()
    options = Options(tmp_path, INSTANCE, 10.0, 10.0)
    recorder = Recorder(
        worker,
        state_of(worker),
        make_ring(options.path(1), b"{}", 5),
        options,
        wait=lambda _: let_go.wait(30),
    )
    recorder.start(Notes())
    assert recorder.stop() is False
    let_go.set()
    recorder._thread.join(30)
    assert kinds(options.path(1))[-1] == "stopped"


def test_an_operation_is_shown_while_it_runs(worker, start, monkeypatch):
    """By name, and since when."""
    start()
    seen = []

    def look(asked: object, _: object) -> dict[str, object]:
        seen.append(running_recorder(asked).calls.current)
        return {}

    monkeypatch.setitem(OPERATIONS, "memory", SimpleNamespace(name="memory", fields={}, run=look))
    ask(worker, "memory")
    assert [call.op for call in seen] == ["memory"]
    assert running_recorder(worker).calls.current is None


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "payload key 'directory' is missing; it must be an absolute path"),
        (
            {"directory": "/a"},
            "payload key 'instance' is missing; it must be 16 hexadecimal digits, in small letters",
        ),
        ({"directory": "a"}, "payload key 'directory' is 'a'; it must be an absolute path"),
        ({"directory": "/a\0"}, r"payload key 'directory' is '/a\x00'; it must be an absolute path"),
        ({"directory": None}, "payload key 'directory' is None; it must be an absolute path"),
        (
            {"instance": "../../../etc/cron"},
            "payload key 'instance' is '../../../etc/cron'; it must be 16 hexadecimal digits, in small letters",
        ),
        ({"rate": 0.5}, "payload key 'rate' is 0.5; it must be a number from 1 to 100"),
        ({"rate": True}, "payload key 'rate' is True; it must be a number from 1 to 100"),
        ({"rate": float("nan")}, "payload key 'rate' is nan; it must be a number from 1 to 100"),
        ({"seconds": 3601}, "payload key 'seconds' is 3601; it must be a number from 10 to 3600"),
    ],
)
def test_wrong_arguments_are_named(payload, message):
    """Key, value, and what would be right."""
    with pytest.raises(BadPayloadError) as caught:
        parse_payload(json.dumps(payload), OPERATIONS["recorder_start"].fields)
    assert str(caught.value) == message


# --- the thread's body, run by the test on a clock of its own ---


class Time:
    """A clock that waiting moves, and that ends the recorder after so many waits."""

    def __init__(self, waits: int) -> None:
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


def recorder_on(time: Time, worker: object, folder: Path, rate: float = 10.0, slots: int = 100) -> Recorder:
    options = Options(folder, INSTANCE, rate, 10.0)
    ring = make_ring(options.path(os.getpid()), b"{}", slots)
    return Recorder(
        worker, state_of(worker), ring, options, clock=time, wall_clock=lambda: 5e8 + time.now, wait=time.wait
    )


def test_samples_come_at_their_rate_and_entries_once_a_second(worker, tmp_path):
    """Every record with both clocks."""
    worker.model_runner.encoder_cache["a"] = FakeTensor(10)
    time = Time(25)
    recorder_on(time, worker, tmp_path).run()
    found = records(tmp_path / NAME)
    assert [record["kind"] for record in found].count("sample") == 25
    assert [record["mono"] for record in found if record["kind"] == "entries"] == [1000.0, 1001.0, 1002.0]
    assert [record["mono"] for record in found if record["kind"] == "sample"][:3] == [1000.0, 1000.1, 1000.2]
    assert all(record["at"] - record["mono"] == pytest.approx(5e8) for record in found)
    assert found[-1] == {"kind": "stopped", "at": 500001002.5, "mono": 1002.5}


def test_a_sample_has_the_documents_names(worker, tmp_path):
    """In the same nesting as docs/recorder.md shows them."""
    text = (Path(worker_ext.__file__).parents[1] / "docs/recorder.md").read_text()
    shown, _ = json.JSONDecoder().raw_decode(text[text.index('{"kind": "sample"') :])
    recorder_on(Time(1), worker, tmp_path).run()
    sample = records(tmp_path / NAME)[0]

    def names(value: object) -> object:
        return {key: names(inner) for key, inner in value.items()} if isinstance(value, dict) else None

    assert names(sample) == names(shown)


def test_delays_do_not_add_up_and_what_is_past_is_left_out(worker, tmp_path):
    """From deadline to deadline."""
    time, delays = Time(4), iter([0.0, 0.03, 0.25, 0.0])
    recorder = recorder_on(time, worker, tmp_path)
    write = recorder.ring.write

    def slow(body: bytes) -> None:
        if b'"sample"' in body:
            time.now += next(delays)
        write(body)

    recorder.ring.write = slow
    recorder.run()
    assert time.waited == [0.1, 0.07, 0.05, 0.1]


def test_a_failed_write_is_tried_again_a_second_later(worker, tmp_path):
    """Nothing is raised, no number is lost."""
    time, tries = Time(30), []
    recorder = recorder_on(time, worker, tmp_path)
    write = recorder.ring.write

    def sometimes(body: bytes) -> None:
        tries.append(round(time.now, 3))
        if 1000.15 < time.now < 1002.0:
            raise OSError(errno.EIO, "Input/output error")
        write(body)

    recorder.ring.write = sometimes
    recorder.run()
    # Where the write of a sample fails, that of the entries would too.
    assert [moment for moment in tries if 1000.15 < moment < 1002.3] == [1000.2, 1001.2, 1002.2, 1002.2]
    assert list(parse(tmp_path / NAME)[1]) == list(range(1, len(records(tmp_path / NAME)) + 1))


def test_a_file_that_is_removed_does_not_end_the_thread(worker, tmp_path):
    """Nor one that is cut short."""
    time = Time(5)
    time.between = lambda: (tmp_path / NAME).unlink(missing_ok=True)
    recorder_on(time, worker, tmp_path).run()
    assert time.left == 0
    again = Time(5)
    again.between = lambda: os.truncate(tmp_path / NAME, 0)
    recorder_on(again, worker, tmp_path).run()
    assert again.left == 0


@pytest.mark.parametrize("broken", ["memory", "moving", "entries"])
def test_what_fails_costs_only_itself(worker, tmp_path, monkeypatch, broken):
    """The record has what is known, and the next one comes."""

    def fail(*_: object) -> None:
        raise RuntimeError("impossible")

    monkeypatch.setattr(f"worker_ext.recorder.sampler.Sampler.{broken}", fail)
    recorder_on(Time(3), worker, tmp_path).run()
    samples = [record for record in records(tmp_path / NAME) if record["kind"] == "sample"]
    assert len(samples) == 3
    assert ("used_bytes" in samples[0]["memory"]) == (broken != "memory")
    assert ("rpc" in samples[0]["moving"]) == (broken != "moving")


def test_a_sample_that_is_too_long_loses_its_stack(worker, tmp_path, monkeypatch):
    """The rest of it stands."""
    worker.model_runner.encoder_cache["a"] = FakeTensor(10)
    monkeypatch.setattr("worker_ext.recorder.sampler.stack_of", lambda _: [f"{n}" * 300 for n in range(8)])
    time = Time(3)
    recorder = recorder_on(time, worker, tmp_path)
    with recorder.calls.running("release"):
        recorder.calls.current = recorder.calls.current._replace(since=0.0)
        recorder.run()
    stacks = [record["moving"]["stack"] for record in records(tmp_path / NAME) if record["kind"] == "sample"]
    assert 0 < len(stacks[0]) < 8
    assert stacks[0][0] == "0" * 300


def test_the_recorder_ends_with_its_worker(torch_device, tmp_path):
    """It does not keep a model in memory that somebody gave up."""
    torch_device("npu")
    workers = [fake_worker(model_runner=fake_runner())]
    time = Time(99)
    recorder = recorder_on(time, workers[0], tmp_path)

    def give_up() -> None:
        workers.clear()
        gc.collect()

    time.between = give_up
    recorder.run()
    assert (time.left, kinds(tmp_path / NAME)[-1]) == (98, "stopped")


def test_the_thread_sets_its_device_before_it_asks_anything(torch_device, tmp_path):
    """Else it would make a context on device 0; and it only asks for figures."""
    module = torch_device("npu")
    worker = fake_worker()
    thread = threading.Thread(target=recorder_on(Time(2), worker, tmp_path).run)
    thread.start()
    thread.join()
    assert module.calls == [("set_device", 1), *[("mem_get_info", 1), ("memory_stats", 1)] * 2]


# --- processes ---

PROGRAM = """
import json, multiprocessing, os, sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[2])
from worker_ext import MemoryExtension
from worker_ext.state import running_recorder

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


def run_program(folder: Path, code: str) -> list[Path]:
    """Run a program of its own to its end, and return the files that it left."""
    root = Path(worker_ext.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM + code, str(folder), str(root)],
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
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
    """Engines fork their workers, or spawn them; a fork runs no `atexit`."""
    (path,) = run_program(tmp_path, code)
    assert kinds(path)[-1] == "stopped"


def test_a_process_that_is_killed_leaves_its_records(tmp_path):
    """That is what they are for."""
    code = "\nif os.fork() == 0:\n    start(); ask('memory'); os.kill(os.getpid(), 9)\nos.wait()"
    (path,) = run_program(tmp_path, code)
    assert "stopped" not in kinds(path)


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
    assert ask("recorder_stop")["stopped"] is True
    os._exit(0)
assert os.wait()[1] == 0
assert running_recorder(worker) is not None
"""
    first, second = run_program(tmp_path, code)
    assert first.name != second.name
    for path in (first, second):
        assert kinds(path).count("stopped") == 1
