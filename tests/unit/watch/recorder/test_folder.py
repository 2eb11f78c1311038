"""The folder of recorder files: who is who, who still writes, and what of former lives may go."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.model.components import MemoryPoint, account
from highwater.model.engine import EngineStatus
from highwater.model.rank import Note
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.watch.history import _Sample
from highwater.watch.recorder import folder as module
from highwater.watch.recorder.contents import RingUnusable, largest_first
from highwater.watch.recorder.folder import MAX_FILES, RecorderFolder
from tests.fakes.raising import raising
from tests.fakes.recorders import FakeProc
from tests.fakes.ring import BOOT_ID, INSTANCE, MONO, WALL, FakeWriter, dump, memory, moving

OTHER = "f" * 16


class Machine:
    """Two clocks and a /proc that only tests move."""

    def __init__(self, folder: Path) -> None:
        self.proc = FakeProc(folder / "proc")
        self.seconds = 0.0
        self.step = 0.0

    def clock(self) -> float:
        return WALL + self.seconds + self.step

    def monotonic(self) -> float:
        return MONO + self.seconds


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "recorder"
    path.mkdir()
    return path


@pytest.fixture
def writers(folder):
    """A maker of writers, all closed in the end."""
    with ExitStack() as stack:

        def make(**identity) -> FakeWriter:
            writer = FakeWriter(folder, **identity)
            stack.callback(writer.close)
            return writer

        yield make


@pytest.fixture
def recorder(folder, machine):
    one = RecorderFolder(folder, INSTANCE, clocks=Clocks(machine.monotonic, machine.clock), proc=machine.proc.path)
    yield one
    one.close()


def only(recorder: RecorderFolder):
    (record,) = recorder.read()
    return record


# --- what a rank says ---


def test_the_newest_sample_is_what_the_worker_would_answer(recorder, writers):
    writer = writers(rank=1, tp_rank=1)
    writer.sample(-0.1, memory=memory(used_bytes=1))
    writer.sample(0.0, memory=memory(releasable_bytes=5, trimmable_bytes=7))
    writer.table()
    record = only(recorder)
    newest = record.newest
    assert (newest.rank, newest.tp_rank, newest.host, newest.pid, newest.taken_at) == (1, 1, "node-a", 4242, WALL)
    assert (newest.device.name, newest.budget.gpu_memory_utilization) == ("Ascend910B3", 0.9)
    assert (newest.used_bytes, newest.encoder_cache.entries, newest.torch.ooms) == (61_464_379_392, 31, 0)
    reading = account(newest)
    assert (reading.components.weights_bytes, reading.releasable_bytes, reading.trimmable_bytes) == (
        31_459_200_000,
        5,
        7,
    )
    assert (record.status, record.age_seconds, record.title) == ("alive", 0.0, "rank 1 (pid 4242 on node-a)")


def test_the_newest_of_several_samples_counts(recorder, writers, machine):
    writer = writers()
    for tenth in range(3):
        writer.sample(tenth / 10, memory=memory(used_bytes=tenth))
    assert only(recorder).newest.used_bytes == 2
    machine.seconds = 0.3
    assert only(recorder).newest.used_bytes == 2
    _, samples = recorder.last_samples(writer.path)
    assert [(sample.at, sample.used_bytes) for sample in samples] == [(WALL, 0), (WALL + 0.1, 1), (WALL + 0.2, 2)]
    assert samples[-1] == MemoryPoint.of(account(only(recorder).newest, "recorder"))


def test_steps_calls_and_stacks_are_told_as_of_the_last_word(recorder, writers):
    long = moving(
        steps_begun=13, step_seconds=1.5, last_step_mono=MONO - 1.5, output_seconds=0.9, rpc="trim", rpc_seconds=0.5
    )
    writer = writers()
    writer.sample(-2.0)
    writer.heartbeat(moving=long, dump=dump("a.py:1 run", "b.py:22 <lambda>") + "\n" + dump("c.py:3 wait", thread=5))
    told = only(recorder).progress
    assert (told.steps_begun, told.step_seconds, told.last_step_age_seconds) == (13, 1.5, 1.5)
    assert (told.output_seconds, told.rpc, told.rpc_seconds) == (0.9, "trim", 0.5)
    assert told.stack == ("a.py:1 run", "b.py:22 <lambda>")


def test_a_step_that_began_while_the_sample_was_taken_is_of_now(recorder, writers):
    writers().sample(moving=moving(last_step_mono=MONO + 0.001))
    assert only(recorder).progress.last_step_age_seconds == 0.0


def test_a_sample_that_is_newer_than_the_heartbeat_tells(recorder, writers):
    writer = writers()
    writer.heartbeat(0.0, moving=moving(step_seconds=0.1))
    writer.sample(0.05)
    assert only(recorder).progress.step_seconds is None


def test_the_phases_of_a_workers_start_come_with_its_reading(recorder, writers):
    writer = writers()
    phase = {"name": "init", "at": 5.0, "seconds": 1.5, "used_bytes": 7, "free_bytes": None, "error": None}
    writer.sample()
    writer.table(start=[phase, phase | {"name": "weights", "error": "RuntimeError: \x1b[31mno"}, phase | {"at": -1.0}])
    start = account(only(recorder).newest, "recorder").start
    assert [(one.name, one.seconds, one.used_bytes) for one in start] == [("init", 1.5, 7), ("weights", 1.5, 7)]
    assert start[1].error == "RuntimeError: [31mno"


def test_what_could_not_be_read_comes_with_its_reading(recorder, writers):
    writer = writers()
    writer.sample()
    writer.table(notes=[{"name": "releasable_bytes", "reason": "torch \x1b[31mkeeps no segments"}])
    assert only(recorder).newest.notes == (Note(name="releasable_bytes", reason="torch [31mkeeps no segments"),)


@pytest.mark.parametrize(
    ("phases", "reason"), [(["init"], "the model is not loaded yet"), (["init", "weights"], "odd")]
)
def test_while_a_model_loads_nothing_is_wrong_with_its_weights(recorder, writers, phases, reason):
    """The worker's own note then has an AttributeError of vLLM's runner; once they are loaded its note stays."""
    writer = writers()
    writer.sample()
    start = [{"name": name, "at": 5.0, "seconds": 1.5, "used_bytes": 7} for name in phases]
    writer.table(start=start, notes=[{"name": "weights_bytes", "reason": "odd"}])
    assert only(recorder).newest.notes == (Note(name="weights_bytes", reason=reason),)


def test_all_entries_are_told_until_the_next_table(recorder, writers):
    writer = writers()
    writer.table(0.0, [("a", 100, -5.0, False), ("b", 300, -4.0, True), ("c", 300, -3.0, False)], total=3)
    writer.sample(0.1)
    only(recorder)
    writer.heartbeat(1.0)
    record = only(recorder)
    assert record.entries_total == 3
    assert tuple(tuple(row.values()) for row in sorted(record.entry_rows(), key=largest_first)) == (
        ("b", 300, "host", 5.0),
        ("c", 300, "device", 4.0),
        ("a", 100, "device", 6.0),
    )


# --- how old it is ---


def test_an_idle_workers_sample_is_as_fresh_as_its_heartbeat(recorder, writers, machine):
    writer = writers()
    writer.sample(0.0, memory=memory(host_memory={"rss_bytes": 5_000, "pinned_bytes": 4_096}))
    for second in range(1, 100, 9):
        machine.seconds = second
        writer.heartbeat(second, rss_bytes=5_000 + second)
        record = only(recorder)
        assert (record.newest.taken_at, record.status) == (WALL + second, "alive")
        host = record.newest.host_memory
        assert (host.rss_bytes, host.pinned_bytes) == (5_000 + second, 4_096)
        assert record.newest.encoder_cache.oldest_age_seconds == pytest.approx(63.2 + second)
        (note,) = record.newest.notes
        assert (note.name, f"as of {WALL:.1f}" in note.reason) == ("used_bytes", True)


def test_an_idle_processs_memory_is_that_of_its_heartbeat(recorder, writers, machine):
    """On the CPU it is the device's: a C library may have given some back. What is free there is so of the machine."""
    writer = writers(device={"type": "cpu"})
    writer.sample(0.0, memory=memory(used_bytes=9_000, free_bytes=90_000))

    def read(second: int, **changes: int) -> tuple[int, int, int, float, float]:
        machine.seconds = second
        writer.heartbeat(second, **changes)
        record = only(recorder)
        now = record.newest
        available = now.host_memory.node_available_bytes
        return now.used_bytes, now.free_bytes, available, now.taken_at - WALL, record.reading_age_seconds

    told = {"rss_bytes": 5_000, "free_bytes": 40_000, "node_available_bytes": 41_000}
    assert read(2, **told) == (5_000, 40_000, 41_000, 2, 0)
    assert read(3, **told, calls=25) == (9_000, 90_000, 41_000, 0, 3), "and else the sample's, as of then"
    assert read(4, rss_bytes=5_000)[1:] == (90_000, 449_755_813_888, 0, 4), "as an older worker package writes it"


def test_a_worker_that_outlives_another_tells_of_the_kernels_kill(recorder, writers, machine):
    """It begins no step after that, and so takes no sample: the heartbeat has the count."""
    writer = writers()
    writer.sample(0.0, memory=memory(host_memory={"rss_bytes": 5_000, "cgroup_oom_kills": 1}))
    machine.seconds = 2
    writer.heartbeat(2, cgroup_oom_kills=2)
    assert only(recorder).newest.host_memory.cgroup_oom_kills == 2
    machine.seconds = 3
    writer.heartbeat(3)
    assert only(recorder).newest.host_memory.cgroup_oom_kills == 1


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("another call has begun", {"calls": 25}),
        ("a step is under way", {"moving": moving(step_seconds=0.5)}),
        ("an output is waited for", {"moving": moving(output_seconds=0.5)}),
        ("an operation runs", {"moving": moving(rpc="trim", rpc_seconds=0.1)}),
        ("the writer does not tell", {"calls": None}),
        ("the writer does not see steps", {"moving": moving(steps_begun=None)}),
    ],
)
def test_a_worker_that_is_not_idle_makes_its_sample_no_younger(recorder, writers, machine, what, change):
    writer = writers()
    writer.sample(0.0)
    machine.seconds = 1
    writer.heartbeat(1.0, **change)
    newest = only(recorder).newest
    assert (newest.taken_at, newest.notes) == (WALL, ()), what


def test_an_idle_worker_that_is_frozen_grows_old(recorder, writers, machine):
    writer = writers()
    writer.sample(0.0)
    writer.heartbeat(1.0)
    machine.seconds = 30
    record = only(recorder)
    assert (record.newest.taken_at, record.status, record.age_seconds) == (WALL + 1, "silent", 29)


def test_a_cpu_workers_memory_is_its_own(recorder, writers):
    writer = writers(device={"type": "cpu", "index": None, "name": "Xeon"})
    writer.sample(0.0)
    writer.heartbeat(1.0, free_bytes=3_987_734_528)
    newest = only(recorder).newest
    assert (newest.taken_at, newest.notes) == (WALL + 1, ())


def test_ranks_come_in_their_order(recorder, writers):
    for pid, dp_rank, rank in ((1, 1, 1), (2, 0, 1), (3, 1, 0), (4, 0, 0)):
        writers(pid=pid, dp_rank=dp_rank, rank=rank).sample()
    writers(instance=OTHER, pid=5).sample()
    assert [record.identity.pid for record in recorder.read()] == [4, 2, 3, 1]
    assert [record.title.partition(" (")[0] for record in recorder.read()] == [
        "rank 0",
        "rank 1",
        "rank 1.0",
        "rank 1.1",
    ]


def test_before_its_first_record_a_rank_is_there_and_says_nothing(recorder, writers, machine):
    writers(started_at=WALL)
    record = only(recorder)
    assert (record.newest, record.progress, record.status, record.age_seconds) == (None, None, "alive", 0.0)
    machine.seconds = 4
    assert only(recorder).status == "silent"


def test_a_sample_that_no_worker_would_answer_leaves_the_last_good_one(recorder, writers):
    writer = writers()
    writer.sample()
    only(recorder)
    for bad, word in (
        (memory(total_bytes="many"), "corrupt sample: total_bytes: "),
        (memory(free_bytes=-5), "corrupt sample: a number that nothing has"),
        (memory(used_bytes=10**40), "corrupt sample: a number that nothing has"),
        ([], None),
    ):
        writer.sample(0.1, memory=bad)
        record = only(recorder)
        if word is not None:
            assert record.newest.taken_at == WALL
            assert recorder.problems[0].startswith(f"{writer.path.name}: {word}")
    assert recorder.problems == ()  # nothing at all is known of it: also an answer
    assert record.newest.used_bytes is None


def test_infinite_numbers_are_none(recorder, writers):
    writer = writers()
    text = '{"kind": "sample", "at": 1.0, "mono": 1.0, "memory": {"encoder_cache": {"entries": 1, "device_bytes": 1, '
    writer.append((text + '"oldest_age_seconds": 1e999}}, "moving": {"step_seconds": 1e999}}').encode())
    record = only(recorder)
    assert (record.newest, record.progress.step_seconds) == (None, None)
    writer.append(b'{"kind": "sample", "at": 1e999, "mono": 1.0}')
    writer.append(b'{"kind": "sample", "at": 1.0, "mono": true}')
    assert only(recorder).newest is None


def test_text_is_made_fit_for_terminals(recorder, writers):
    writer = writers()
    lines = ['  File "\x1b.py", line 5 in \ud800' + "x" * 500, "odd", *['  File "a.py", line 1 in more'] * 20]
    writer.heartbeat(moving=moving(step_seconds=2.0, rpc="\x1b[2J"), dump="\n".join(lines))
    record = only(recorder)
    assert record.progress.rpc == "?[2J"
    assert record.progress.stack[:2] == ("?.py:5 ?" + "x" * 192, "a.py:1 more")
    assert len(record.progress.stack) == 8


# --- whether it writes ---


def test_a_rank_is_silent_after_three_heartbeats_of_an_idle_one(recorder, writers, machine):
    writer = writers(rate=1.0)
    writer.sample(-100)
    writer.heartbeat()
    assert only(recorder).status == "alive"
    machine.seconds = 3.0
    assert only(recorder).status == "alive"
    machine.seconds = 3.01
    assert (only(recorder).status, only(recorder).age_seconds) == ("silent", pytest.approx(3.01))


@pytest.mark.parametrize(
    ("state", "status"),
    [("S", "silent"), ("R", "silent"), ("D", "silent"), ("T", "stopped"), ("t", "stopped"), ("Z", "dead")],
)
def test_the_kernel_tells_why_a_rank_is_silent(recorder, writers, machine, state, status):
    """Only once it is silent: a debugger may hold a process for a moment."""
    machine.proc.begin(4242, state)
    writers().sample()
    assert only(recorder).status == "alive"
    machine.seconds = 4
    assert only(recorder).status == status


def test_a_process_that_is_gone_is_dead(recorder, writers, machine):
    machine.proc.begin(4242)
    writers().sample()
    only(recorder)
    machine.seconds = 4
    machine.proc.end(4242)
    assert only(recorder).status == "dead"
    machine.proc.begin(4242, started=999)
    assert only(recorder).status == "dead"


def test_a_process_that_is_gone_is_dead_at_once(recorder, writers, machine):
    machine.proc.begin(4242)
    writer = writers()
    writer.sample()
    only(recorder)
    writer.sample()
    machine.proc.end(4242)
    assert (only(recorder).status, only(recorder).status) == ("alive", "dead")


def test_a_process_that_had_gone_before_its_file_was_read_is_dead_where_its_pid_namespace_is_this_one(
    recorder, writers, machine
):
    """A sidecar that begins beside it knows that at once; without that namespace it may only be hidden."""
    (machine.proc.path / "self/ns").mkdir(parents=True)
    (machine.proc.path / "self/ns/pid").write_text("")
    recorder._machine = module.Machine(Clocks(machine.monotonic, machine.clock), machine.proc.path.parent)
    shared = (machine.proc.path / "self/ns/pid").stat().st_ino
    writers(pid_namespace=shared).sample()
    assert only(recorder).status == "dead"
    (recorder.folder / f"highwater-{INSTANCE}-4242.ring").unlink()
    machine.seconds = 2.0
    writers(pid_namespace=shared + 1).sample()
    assert only(recorder).status == "alive"


@pytest.mark.parametrize(
    ("identity", "started"), [({}, None), ({}, 999), ({"pid_started": None}, 123456), ({"boot_id": "b"}, 123456)]
)
def test_a_process_that_was_never_seen_here_is_only_silent(recorder, writers, machine, identity, started):
    if started is not None:
        machine.proc.begin(4242, started=started)
    writers(**identity).sample()
    only(recorder)
    machine.seconds = 4
    if started is not None:
        machine.proc.end(4242)
    assert only(recorder).status == "silent"


def test_a_rank_that_ended_in_order_is_ended(recorder, writers, machine):
    machine.proc.begin(4242)
    writer = writers()
    writer.sample()
    writer.stopped(0.1)
    assert only(recorder).status == "ended"
    machine.seconds = 100
    machine.proc.end(4242)
    assert only(recorder).status == "ended"


@pytest.mark.parametrize("boot_id", [BOOT_ID, "another-machine", None])
@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_stepped_wall_clock_neither_kills_nor_revives(recorder, writers, machine, boot_id, step):
    writer = writers(boot_id=boot_id)
    writer.sample()
    only(recorder)
    machine.seconds = 1
    writer.sample(1)
    assert only(recorder).status == "alive"
    machine.step = step
    machine.seconds = 1.5
    assert only(recorder).status == "alive"
    machine.seconds = 5
    assert only(recorder).status == "silent"
    machine.step = 0
    assert only(recorder).status == "silent"
    writer.sample(5)
    assert only(recorder).status == "alive"


@pytest.mark.parametrize("skew", [-500.0, 500.0])
def test_another_machines_wall_clock_may_be_wrong(recorder, writers, machine, skew):
    """Its records come, and then come no more: that is what tells."""
    writer = writers(boot_id="another-machine")
    for second in range(3):
        machine.seconds = second
        writer.sample(second, at=WALL + second + skew, mono=7.0 + second)
        record = only(recorder)
    assert record.status == "alive"
    machine.seconds = 6
    assert only(recorder).status == "silent"


@pytest.mark.parametrize("skew", [-90.0, 90.0])
def test_times_of_another_machine_are_told_by_our_clock(recorder, writers, machine, skew):
    writer = writers(boot_id="another-machine")
    for second in (0, 0.5):
        machine.seconds = second
        writer.table(start=[{"name": "init", "at": WALL + skew, "seconds": 1.0}])
        writer.sample(second, at=WALL + second + skew, mono=7.0 + second)
        record = only(recorder)
    _, samples = recorder.last_samples(writer.path)
    (phase,) = record.newest.start
    told = (record.newest.taken_at, samples[-1].at, phase.at + 0.5, record.started.phases[0].at + 0.5)
    assert told == pytest.approx((WALL + 0.5,) * 4, abs=0.51)  # no closer than two looks
    machine.seconds = 1
    assert only(recorder).newest.taken_at == record.newest.taken_at


# --- files ---


def test_a_new_file_is_found_within_a_second(recorder, writers, machine):
    assert recorder.read() == ()
    writers().sample()
    machine.seconds = 0.9
    assert recorder.read() == ()
    machine.seconds = 1.0
    assert len(recorder.read()) == 1


def test_a_file_that_is_gone_or_replaced_is_let_go(recorder, writers, machine, folder):
    first = writers()
    first.sample(memory=memory(used_bytes=1))
    assert only(recorder).newest.used_bytes == 1
    first.path.unlink()
    writers().sample(1, memory=memory(used_bytes=2))
    machine.seconds = 1
    assert only(recorder).newest.used_bytes == 2
    first.path.unlink()
    machine.seconds = 2
    assert recorder.read() == ()


def test_a_bad_file_costs_only_itself(recorder, writers, machine, folder):
    writers(pid=1).sample()
    bad = folder / f"highwater-{INSTANCE}-2.ring"
    bad.write_bytes(b"nonsense")
    (folder / f"highwater-{INSTANCE}-3.ring").mkdir()
    (folder / "unrelated").write_bytes(b"")
    assert len(recorder.read()) == 1
    assert sorted(recorder.problems) == [
        f"{bad.name}: foreign: it does not begin as a ring does",
        f"highwater-{INSTANCE}-3.ring: not a regular file",
    ]
    bad.unlink()
    writers(pid=2, rank=1).sample()
    machine.seconds = 1
    assert [record.identity.pid for record in recorder.read()] == [1, 2]


def test_a_bad_file_is_not_opened_again_while_it_stays_as_it_is(recorder, machine, folder, monkeypatch):
    (folder / f"highwater-{INSTANCE}-2.ring").write_bytes(b"nonsense")
    recorder.read()
    monkeypatch.setattr(module, "Ring", None)
    machine.seconds = 1
    recorder.read()
    assert len(recorder.problems) == 1


def test_a_file_that_is_cut_while_it_is_read_stays_in_view(recorder, writers, machine):
    writer = writers()
    writer.sample()
    only(recorder)
    os.truncate(writer.path, 5000)
    assert only(recorder).newest is not None
    assert recorder.problems == (f"{writer.path.name}: truncated: it was cut while it was read",)
    machine.seconds = 4
    assert only(recorder).status == "silent"


def test_a_file_that_cannot_be_read_any_more_is_named(recorder, writers, machine, monkeypatch):
    writer = writers()
    writer.sample()
    only(recorder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", raising(OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
        assert recorder.read() == ()
    assert recorder.problems == (f"{writer.path.name}: unreadable: stale file handle",)
    machine.seconds = 1
    assert len(recorder.read()) == 1
    assert recorder.problems == ()


def test_a_folder_that_is_not_there_is_named(recorder, folder, machine, writers):
    folder.rmdir()
    assert recorder.read() == ()
    assert recorder.problems == (f"recorder_dir: {folder} cannot be listed: no such file or directory",)
    folder.mkdir()
    writers().sample()
    machine.seconds = 1
    assert (len(recorder.read()), recorder.problems) == (1, ())


def test_of_too_many_files_those_of_this_life_count(recorder, writers, folder):
    for number in range(MAX_FILES + 5):
        (folder / f"highwater-{'0' * 16}-{number}.ring").touch()
    writers().sample()
    assert len(recorder.read()) == 1
    assert "holds more than the 256 rings among 4096 files that are read" in recorder.problems[0]
    assert len(recorder.others()) == MAX_FILES - 1


def test_of_too_many_files_the_newest_are_looked_at(recorder, writers, folder, machine):
    for number in range(MAX_FILES + 5):
        left = folder / f"highwater-{'0' * 16}-{number}.ring"
        left.touch()
        os.utime(left, (1, 1))
    recorder.follow(None)
    writers(instance="f" * 16).sample()
    assert {other.instance for other in recorder.others() if other.is_alive} == {"f" * 16}


def test_of_two_that_claim_one_rank_the_younger_living_one_counts(recorder, writers, machine):
    old = writers(pid=10, started_at=WALL - 500)
    young = writers(pid=11, started_at=WALL - 5)
    old.sample()
    young.sample()
    assert only(recorder).identity.pid == 11
    assert recorder.problems == ("rank 0 (pid 10 on node-a) is also written by pid 11, which counts",)
    machine.seconds = 4
    old.sample(3)
    assert only(recorder).identity.pid == 10


def test_workers_that_do_not_know_their_rank_are_not_taken_for_one(recorder, writers):
    for pid, identity in enumerate(
        ({"rank": None}, {"rank": None}, {}, {"host": "node-b"}, {"dp_rank": 1}, {"pp_rank": 1}, {"tp_rank": 1}), 1
    ):
        writers(pid=pid, **identity).sample()
    assert (len(recorder.read()), recorder.problems) == (7, ())


def test_another_life_is_followed_from_anew(recorder, writers):
    writers().sample()
    writers(instance=OTHER, pid=7).sample()
    before = len(os.listdir("/proc/self/fd"))
    assert only(recorder).identity.pid == 4242
    recorder.follow(OTHER)
    assert (only(recorder).identity.pid, recorder.instance) == (7, OTHER)
    recorder.follow(None)
    assert recorder.read() == ()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_thread_that_reads_and_a_loop_that_turns_away_do_not_meet(recorder, writers):
    """A poll may be cancelled while its thread still reads: what it reads is of one life."""
    for pid in range(1, 5):
        writers(pid=pid, rank=pid, instance=INSTANCE if pid % 2 else OTHER).sample()
    seen: list[set[str]] = []
    reader = threading.Thread(
        target=lambda: seen.extend({r.identity.instance for r in recorder.read()} for _ in range(10))
    )
    reader.start()
    while reader.is_alive():
        recorder.follow(OTHER)
        recorder.follow(INSTANCE)
        assert recorder.problems == ()
    reader.join()
    assert len(seen) == 10
    assert all(instances in ({INSTANCE}, {OTHER}) for instances in seen)


# --- other lives ---


def test_other_lives_can_be_listed(recorder, writers, machine, folder):
    writers().sample()
    writers(instance=OTHER, pid=7).sample(-100)
    ended = writers(instance=OTHER, pid=8)
    ended.stopped(-50)
    (folder / f"highwater-{OTHER}-9.ring").write_bytes(b"HIGHWATR\1\0".ljust(100, b"\0"))
    found = recorder.others()
    assert [(other.path.name, other.instance) for other in found] == [
        (f"highwater-{OTHER}-{pid}.ring", OTHER) for pid in (7, 8, 9)
    ]
    records = [other.record for other in found[:2]]
    assert [(record.age_seconds, record.status) for record in records] == [(100, "silent"), (50, "ended")]
    assert records[0].title == "rank 0 (pid 7 on node-a)"
    assert (found[2].record, found[2].problem) == (None, "version 1 unknown")


def test_of_another_life_the_last_record_is_sought_in_the_whole_file(recorder, writers):
    writer = writers(instance=OTHER, slots=128)
    for second in range(100):
        writer.sample(second - 100)
    for sequence in range(1, 41):
        writer.damage(sequence)
    assert [other.record.age_seconds for other in recorder.others()] == [1]


def test_the_last_samples_of_a_life_can_be_had(recorder, writers):
    writer = writers(instance=OTHER)
    for second in range(3):
        writer.sample(second, memory=memory(used_bytes=second))
    writer.append({"kind": "of a later version", "at": WALL, "mono": MONO})
    writer.sample(4, at=None)
    writer.stopped(5)
    identity, samples = recorder.last_samples(writer.path)
    assert identity.title == "rank 0 (pid 4242 on node-a)"
    assert [(sample.at, sample.used_bytes) for sample in samples] == [(WALL, 0), (WALL + 1, 1), (WALL + 2, 2)]
    _, samples = recorder.last_samples(writer.path, since=WALL + 1)
    assert [sample.used_bytes for sample in samples] == [1, 2]
    with pytest.raises(RingUnusable):
        recorder.last_samples(writer.path.with_name("none"))


def test_the_samples_of_all_the_time_that_settings_allow_can_be_had(recorder, writers):
    writer = writers(slots=4200)
    for sequence in range(4200):
        writer.sample(sequence / 10)
    _, samples = recorder.last_samples(writer.path)
    assert (len(samples), samples[0].at) == (4200, WALL)


def test_an_invalid_sample_is_none_of_the_last(recorder, writers):
    writer = writers()
    writer.sample(0)
    writer.sample(1, memory=memory(used_bytes="many"))
    writer.sample(2, memory=memory(used_bytes=-1))
    _, samples = recorder.last_samples(writer.path)
    assert [sample.at for sample in samples] == [WALL]


def test_only_silent_rings_of_other_lives_are_removed(recorder, writers, machine, folder):
    machine.seconds = 1000
    names = {}
    for pid, instance, second in (
        (1, INSTANCE, 0),
        (3, OTHER, 1000),
        (4, OTHER, 500),
        (5, OTHER, 0),
    ):
        writer = writers(instance=instance, pid=pid)
        writer.sample(second)
        os.utime(writer.path, (WALL + second, WALL + second))
        names[pid] = writer.path.name
    future = folder / f"highwater-{OTHER}-6.ring"
    future.write_bytes(b"HIGHWATR\1\0".ljust(5000, b"\0"))
    os.utime(future, (WALL, WALL))
    result = recorder.remove_stale(600)
    assert result.removed == (names[5],)
    assert result.problems == (f"{future.name} was left alone: version 1 unknown",)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*(names[pid] for pid in (1, 3, 4)), future.name])


def test_a_ring_that_was_written_lately_by_any_clock_stays(recorder, writers, machine):
    """Another machine's wall clock may be hours behind; and a clock that says zero seconds does not mean now."""
    writer = writers(instance=OTHER, boot_id="another-machine")
    for record, change in ((-3000, -1), (-300, -3000)):
        writer.sample(record)
        os.utime(writer.path, (WALL + change, WALL + change))
        assert recorder.remove_stale(600).removed == ()
    writer.sample(-3000)
    os.utime(writer.path, (WALL - 3000, WALL - 3000))
    assert recorder.remove_stale(600).removed == (writer.path.name,)
    fresh = writers(instance=OTHER, pid=8)
    fresh.sample()
    os.utime(fresh.path, (WALL - 100, WALL - 100))
    assert fresh.path.name not in recorder.remove_stale(0).removed


def test_what_was_never_finished_is_removed(recorder, machine, folder):
    old, new, kept = (folder / f".highwater-{i}-{pid}.ring.tmp" for i, pid in ((OTHER, 1), (OTHER, 2), (INSTANCE, 3)))
    for path, second in ((old, -100), (new, 0), (kept, -100)):
        path.touch()
        os.utime(path, (WALL + second, WALL + second))
    link = folder / f".highwater-{OTHER}-4.ring.tmp"
    link.symlink_to(old)
    others = [folder / name for name in (".other.tmp", f"highwater-{OTHER}-5.ring.tmp", f".highwater-{OTHER}-6.ring")]
    for path in others:
        path.touch()
        os.utime(path, (WALL - 100, WALL - 100))
    result = recorder.remove_stale(60)
    assert (result.removed, result.problems) == ((old.name,), (f"{link.name} was left alone: not a regular file",))
    assert all(path.exists() for path in (new, kept, *others))


@pytest.mark.parametrize(
    ("content", "is_removed"),
    [
        (b"HIGHWATR", True),
        (b"HIGHWATR\3\0".ljust(5000, b"\xff"), True),
        (b"", False),
        (b"HIGHWATE".ljust(5000, b"\0"), False),
        (b"precious".ljust(5000, b"\0"), False),
    ],
)
def test_a_damaged_ring_is_removed_only_where_it_begins_as_ours(recorder, folder, content, is_removed):
    path = folder / f"highwater-{OTHER}-5.ring"
    path.write_bytes(content)
    os.utime(path, (WALL - 100, WALL - 100))
    result = recorder.remove_stale(60)
    assert path.exists() != is_removed
    assert len(result.problems) == (not is_removed)


def test_directories_links_and_pipes_are_never_removed(recorder, folder):
    (folder / f"highwater-{OTHER}-1.ring").mkdir()
    (folder / f"highwater-{OTHER}-2.ring").symlink_to("/etc/passwd")
    os.mkfifo(folder / f"highwater-{OTHER}-3.ring")
    result = recorder.remove_stale(0)
    assert (result.removed, len(result.problems), len(list(folder.iterdir()))) == ((), 3, 3)


def test_what_cannot_be_removed_is_said(recorder, writers, machine, monkeypatch):
    for pid in (1, 2):
        writer = writers(instance=OTHER, pid=pid)
        writer.sample(-100)
        os.utime(writer.path, (WALL - 100, WALL - 100))
    unlink = Path.unlink

    def refused(path):
        if path.name.endswith("-1.ring"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path)

    monkeypatch.setattr(Path, "unlink", refused)
    result = recorder.remove_stale(60)
    assert result.removed == (f"highwater-{OTHER}-2.ring",)
    assert result.problems == (f"highwater-{OTHER}-1.ring could not be removed: permission denied",)


def test_what_is_removed_is_what_was_judged(recorder, writers, monkeypatch):
    writer = writers(instance=OTHER)

    def judged(recorder, path, instance):
        writer.sample()
        return 1e9

    monkeypatch.setattr(RecorderFolder, "_silent_seconds", judged)
    assert recorder.remove_stale(60).removed == ()
    assert writer.path.exists()


def test_reading_changes_nothing(recorder, writers, folder):
    writers().sample()
    writers(instance=OTHER, pid=5).sample()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode) for path in folder.iterdir()}
    recorder.read()
    recorder.others()
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode) for path in folder.iterdir()
    }
    assert all(stat.S_ISREG(mode) for _, _, mode in before.values())


# --- anything at all ---

numbers = st.integers() | st.floats() | st.sampled_from([2**63, -1, 10**400])
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def bodies(names, values=anything):
    return st.dictionaries(st.sampled_from(names), values, max_size=len(names))


memories = bodies([*memory(), "notes", "rank"], bodies([*memory()["torch"], *memory()["encoder_cache"]]) | anything)
samples = st.fixed_dictionaries(
    {"kind": st.just("sample"), "at": st.just(WALL), "mono": st.just(MONO)},
    optional={"memory": memories | anything, "moving": bodies([*moving()]) | anything},
)
beats = st.fixed_dictionaries(
    {"kind": st.just("heartbeat"), "at": st.just(WALL), "mono": st.just(MONO)},
    optional={"moving": bodies([*moving()]) | anything}
    | dict.fromkeys(("calls", "rss_bytes", "free_bytes", "dump"), anything),
)


@pytest.fixture(scope="module")
def machine_of_fuzz(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@given(
    written=st.lists(samples | beats | bodies(["kind", "at", "mono"]), min_size=1, max_size=4),
    beat=beats | bodies(["at"]),
)
def test_a_body_may_say_anything(machine_of_fuzz, tmp_path_factory, written, beat):
    machine, folder = machine_of_fuzz, tmp_path_factory.mktemp("fuzz")
    writer = FakeWriter(folder, slots=4)
    for body in written:
        content = json.dumps(body).encode()
        writer.append(content if len(content) < 2000 else b"{}")
    content = json.dumps(beat).encode()
    writer.append_heartbeat(content if len(content) < 16_000 else b"{}")
    writer.close()
    recorder = RecorderFolder(folder, INSTANCE, clocks=Clocks(machine.monotonic, machine.clock), proc=machine.proc.path)
    record = only(recorder)
    if record.newest is not None:
        reading = account(record.newest)
        _Sample.of(Report(taken_at=1.0, engine=EngineStatus(url="", state="ready"), ranks=(reading,)), 1.0, None, None)
    recorder.last_samples(writer.path)
    json.dumps(record.progress and record.progress.stack, allow_nan=False)
    recorder.close()
