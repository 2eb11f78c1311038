"""One reading: processes by role, the engine's container apart from others, and what could not be read."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from highwater.host import watch as reader_module
from highwater.host.reading import ShmMemory, name_of
from highwater.host.report import HostReport, report_of
from highwater.host.watch import HostReader, HostWatch
from highwater.http.text.host import host_text
from highwater.model.components import account
from highwater.model.rank import Device, WorkerMemory
from highwater.model.units import MIB
from highwater.process.clocks import Clocks
from tests.unit.host.recorded import BOOT, group, machine, record, write


def worker(pid, started):
    taken = WorkerMemory(rank=0, dp_rank=0, host="pod", pid=pid, pid_started=started, taken_at=0.0, device=Device())
    return account(taken)


@pytest.fixture
def host(tmp_path):
    """`host(**options)` reads; `.folder` takes process files, and `.root` is the machine."""
    root, folder = machine(tmp_path / "root"), tmp_path / "ring"
    (tmp_path / "shm").mkdir()

    def made(**options):
        return HostReader(
            folder, clocks=Clocks(lambda: 501.0, lambda: 1000.0), root=root, shm=tmp_path / "shm", **options
        )

    def read(**options):
        return made(**options).read()

    read.reader = made
    read.folder, read.root, read.shm = folder, root, tmp_path / "shm"
    return read


def test_processes_come_in_the_order_of_their_roles_with_names_of_their_own(host):
    write(host.folder, record(pid=1, role="worker", rank=10, dp_rank=0))
    write(host.folder, record(pid=2, role="worker", rank=9, dp_rank=0))
    write(host.folder, record(pid=3, role="api_server", index=1))
    write(host.folder, record(pid=4, role="engine_core", index=0))
    write(host.folder, record(pid=5, role="other", command="python3"))
    write(host.folder, record(pid=6, role="other", command="python3"))
    names = [one.name for one in host().processes]
    assert names[:4] == ["API server 1", "EngineCore 0", "worker rank 9", "worker rank 10"]
    assert names[4:] == ["other python3 (pid 5)", "other python3 (pid 6)"]


@pytest.mark.parametrize(
    ("dp_rank", "rank", "name"),
    [
        (None, None, "worker"),
        (None, 0, "worker rank 0"),
        (0, 1, "worker rank 1"),
        (1, 0, "worker rank 1.0"),
        (2, 1, "worker rank 2.1"),
    ],
)
def test_a_worker_is_named_as_its_rank_is_elsewhere(dp_rank, rank, name):
    """With the engine's number from the second on: each engine numbers its ranks from 0."""
    assert name_of("worker", rank=rank, dp_rank=dp_rank) == name


def test_a_process_has_the_limit_of_open_files_that_its_file_says(host):
    write(host.folder, record(pid=1, descriptors=60, descriptors_limit=1024))
    write(host.folder, record(pid=2, descriptors=60))
    assert [(one.descriptors, one.descriptors_limit) for one in host().processes] == [(60, 1024), (60, None)]


def test_an_unknown_role_is_other(host):
    """A newer worker package may have more of them."""
    write(host.folder, record(role="wizard"))
    (one,) = host().processes
    assert (one.role, one.name, one.started) == ("other", "other vllm", 99)


def test_the_engines_container_is_the_one_with_its_processes(host):
    group(host.root, "sidecar")
    machine(host.root, proc__self__cgroup="0::/sidecar\n")
    for pid in (1, 2):
        write(host.folder, record(pid=pid))
    elsewhere = record()["cgroup"] | {"inode": 78, "used": 2**50}
    write(host.folder, record(pid=3, cgroup=elsewhere))
    reading = host()
    assert reading.container.key == f"{BOOT[:8]}-77"
    assert reading.container.kept_bytes == 3_955_228_672
    assert [one.sees for one in reading.other_containers] == ["engine", "sidecar"]


def test_the_newest_reading_of_a_container_counts(host):
    old = record()["cgroup"] | {"mono": 491.0, "used": 1}
    write(host.folder, record(pid=1, cgroup=old))
    write(host.folder, record(pid=2))
    assert host().container.used_bytes == record()["cgroup"]["used"]


def test_processes_without_files_are_listed_by_the_first_one(host):
    rows = [
        {"pid": 50, "started": 5, "name": "resource tracker", "tracker": True, "anonymous_bytes": 9 * MIB},
        {"pid": 2, "name": "python3", "anonymous_bytes": 1},
        {"pid": 51, "name": "ninja", "anonymous_bytes": MIB},
    ]
    write(host.folder, record(pid=1, others={"total": 3, "largest": rows, "mono": 499.0}))
    write(host.folder, record(pid=2, role="engine_core"))
    shown = {one.name: (one.source, one.age_seconds) for one in host().processes}
    assert shown["resource tracker"] == ("listed", 2.0)
    assert sorted(shown) == ["API server", "EngineCore", "other ninja", "resource tracker"]


SHM = {
    "device": 1,
    "size": 64 * MIB,
    "used": MIB,
    "free": 63 * MIB,
    "mono": 500.0,
    "owners": {"nccl": [1, MIB, 9 * MIB]},
}


def test_shared_memory_is_what_the_engine_sees(host):
    write(host.folder, record(pid=1))
    write(host.folder, record(pid=2, shm=SHM | {"device": host.shm.stat().st_dev}))
    shm = host().shm
    assert (shm.sees, shm.size_bytes, shm.promised_bytes, shm.age_seconds) == ("engine", 64 * MIB, 9 * MIB, 1.0)


def test_only_files_in_use_count_for_what_may_still_be_taken(host):
    row = [1, MIB, 9 * MIB]
    write(host.folder, record(shm=SHM | {"unlinked": {"nccl": row}, "left_over": {"nccl": row, "other": row}}))
    shm = host().shm
    assert sorted((one.owner, one.state, one.is_in_use) for one in shm.owners) == [
        ("nccl", "in_use", True),
        ("nccl", "left_over", False),
        ("nccl", "unlinked", True),
        ("other", "left_over", False),
    ]
    assert (shm.promised_bytes, shm.left_over_bytes) == (18 * MIB, 2 * MIB)


def test_a_volume_of_two_containers_is_not_said_to_have_left_overs(host):
    """What no process of one has open may be the other's, which has process numbers of its own."""
    left = SHM | {"left_over": {"rpc_rings": [2, MIB, 0]}}
    write(host.folder, record(pid=1, shm=left))
    assert [one.state for one in host().shm.owners] == ["in_use", "left_over"]
    write(host.folder, record(pid=2, pid_namespace=2, shm=SHM | {"mono": 490.0, "device": 2}))
    assert [one.state for one in host().shm.owners] == ["in_use", "left_over"]
    write(host.folder, record(pid=2, pid_namespace=2, shm=SHM | {"mono": 490.0}))
    assert [one.state for one in host().shm.owners] == ["in_use", "not_known"]


def process(root, pid, parent, title, anonymous, *, started=7, limit="1024", state="S"):
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (x) {state} {parent}{' 0' * 17} {started} 0\n")
    (folder / "status").write_text(
        f"Name:\tx\nVmHWM:\t{anonymous + 1} kB\nRssAnon:\t{anonymous} kB\nRssFile:\t1 kB\n"
        "RssShmem:\t0 kB\nThreads:\t3\n"
    )
    (folder / "cmdline").write_bytes(title.encode().replace(b" ", b"\0"))
    (folder / "cgroup").write_text("0::/pod\n")
    (folder / "fd").symlink_to("/proc/self/fd")  # its size is the kernel's count
    (folder / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max open files            {limit:<20} 524288               files     \n"
    )


def test_without_the_worker_package_a_shared_pid_namespace_shows_the_engine(host):
    """From one known worker upwards to vLLM's first process, and all below it; nothing else of the machine."""
    group(host.root, "pod", limit=str(8000 * MIB))
    process(host.root, 1, 0, "/sbin/init", 1)
    process(host.root, 2, 1, "bash", 1)
    process(host.root, 10, 2, "python vllm serve model", 700)
    process(host.root, 11, 10, "VLLM::EngineCore", 500, limit="unlimited")
    process(host.root, 12, 11, "VLLM::Worker_TP0", 900)
    process(host.root, 13, 10, "python -c from multiprocessing.resource_tracker import main", 9)
    process(host.root, 14, 1, "nginx", 1)
    reading = host(workers=lambda: [worker(12, 7)])
    assert [(one.name, one.source) for one in reading.processes] == [
        ("API server", "proc"),
        ("EngineCore", "proc"),
        ("worker rank 0", "proc"),
        ("resource tracker", "proc"),
    ]
    assert all(1 < one.descriptors < 1024 for one in reading.processes)
    assert [one.descriptors_limit for one in reading.processes[:2]] == [1024, None]
    assert (reading.container.limit_bytes, reading.container.sees) == (8000 * MIB, "sidecar")
    assert (reading.shm.sees, reading.shm.owners) == ("sidecar", ())
    assert reading.problems == ()


def test_without_the_worker_package_the_sidecar_looks_who_has_a_file_open(host):
    process(host.root, 12, 1, "VLLM::Worker_TP0", 900)
    for name in ("psm_1", "psm_2"):
        (host.shm / name).write_bytes(b"")
        os.truncate(host.shm / name, MIB)
        os.utime(host.shm / name)
    status = (host.shm / "psm_1").stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    maps = f"{1 << 44:x}-{(1 << 44) + MIB:x} rw-s 00000000 {device} {status.st_ino} {host.shm}/psm_1\n"
    (host.root / "proc/12/maps").write_text(maps)
    shm = host(workers=lambda: [worker(12, 7)]).shm
    assert (shm.sees, shm.promised_bytes) == ("sidecar", 2 * MIB)  # a new file may not be mapped yet


@pytest.mark.parametrize("wrapper", ["bash /opt/start-vllm.sh", "supervisord -c /etc/vllm.conf"])
def test_what_started_two_engines_does_not_make_them_one(host, wrapper):
    """Its command line may have vLLM's name in it; the API server that it started is the engine's first process."""
    process(host.root, 2, 1, wrapper, 1)
    for first in (10, 20):
        process(host.root, first, 2, "python vllm serve model", 700)
        process(host.root, first + 1, first, "VLLM::EngineCore", 500)
        process(host.root, first + 2, first + 1, "VLLM::Worker_TP0", 900)
    reading = host(workers=lambda: [worker(12, 7)])
    assert [one.pid for one in reading.processes] == [10, 11, 12]


def test_a_program_that_is_its_own_api_server_is_the_engines_first_process(host):
    process(host.root, 10, 1, "python serve_vllm.py", 700)
    process(host.root, 11, 10, "VLLM::EngineCore", 500)
    process(host.root, 12, 11, "VLLM::Worker_TP0", 900)
    assert {one.pid for one in host(workers=lambda: [worker(12, 7)]).processes} == {10, 11, 12}


OTHERS = "60 50 0:77 / {} rw,nosuid - tmpfs shm rw\n"


@pytest.mark.parametrize(
    ("engines", "is_shown"),
    [(OTHERS.format("/dev/shm"), False), (OTHERS.format("/dev"), True), ("", False), (None, False)],
    ids=["its own", "the same", "empty", "hidden"],
)
def test_the_sidecars_own_shared_memory_is_not_the_engines(host, engines, is_shown):
    process(host.root, 12, 1, "VLLM::Worker_TP0", 900)
    own = OTHERS.format("/dev") + OTHERS.format("/dev/mqueue").replace("0:77", "0:78")
    machine(host.root, proc__self__mountinfo=own.replace("0:77", "0:77" if is_shown else "0:76"))
    if engines is not None:
        (host.root / "proc/12/mountinfo").write_text(engines)
    assert (host(workers=lambda: [worker(12, 7)]).shm is not None) is is_shown


def test_processes_of_two_engines_in_one_folder_are_not_said_to_be_one_engines(host):
    for first in (10, 20):
        write(host.folder, record(pid=first, parent_pid=1))
        write(host.folder, record(pid=first + 1, role="engine_core", parent_pid=first))
        assert [("2 engines" in problem) for problem in host().problems] == [True] * (first == 20)


@pytest.mark.parametrize("lost", ["Z", None])
def test_a_worker_that_a_search_does_not_find_starts_no_further_one(host, monkeypatch, lost):
    process(host.root, 12, 1, "VLLM::Worker_TP0", 900)
    process(host.root, 13, 1, "VLLM::Worker_TP1", 900, state=lost or "S")
    (host.root / "proc/13/status").write_text("Name:\tx\nState:\tZ (zombie)\nThreads:\t1\n")
    searches, look = [], reader_module.own_shm
    monkeypatch.setattr(reader_module, "own_shm", lambda *where: searches.append(where) or look(*where))
    reader = host.reader(workers=lambda: [worker(12, 7), worker(13, 7)])
    assert [len(reader.read().processes) for _ in range(5)] == [1] * 5
    assert len(searches) == 1


@pytest.mark.parametrize(("cpu_seconds", "looks"), [(0.001, [500, 510, 520, 530]), (0.05, [500, 530])])
def test_its_looks_at_shared_memory_take_a_five_hundredth_of_a_core_at_most(host, monkeypatch, cpu_seconds, looks):
    process(host.root, 12, 1, "VLLM::Worker_TP0", 900)
    now, cpu, seen = 490.0, 0.0, []

    def look(folder, proc):
        nonlocal cpu
        cpu += cpu_seconds
        seen.append(now)
        return ShmMemory()

    monkeypatch.setattr(reader_module, "own_shm", look)
    monkeypatch.setattr(reader_module, "time", SimpleNamespace(thread_time=lambda: cpu))
    reader = HostReader(
        None, clocks=Clocks(lambda: now, lambda: 1000.0), root=host.root, workers=lambda: [worker(12, 7)]
    )
    for _ in range(4):
        now += 10.0
        assert reader.read().shm.age_seconds == now - seen[-1]
    assert seen == looks


def test_a_group_that_sidecar_and_engine_share_is_read_now(host):
    """On a machine without containers: its counter is that of the engine's end, whoever wrote before."""
    group(host.root, "", limit=str(8000 * MIB))
    (host.root / "proc/self/cgroup").write_text("0::/\n")
    inode = (host.root / "sys/fs/cgroup").stat().st_ino
    write(host.folder, record(cgroup=record()["cgroup"] | {"inode": inode}))
    reading = host()
    assert (reading.container.sees, reading.container.events["oom_kill"]) == ("sidecar", 1)
    assert (reading.container.host, reading.container.age_seconds, reading.other_containers) == ("pod", 0.0, ())


def test_the_group_of_an_engine_that_has_ended_is_read_after_its_end(host):
    """On a machine without containers it is another than the sidecar's, and outlives the engine."""
    group(host.root, "vllm")
    (host.root / "proc/self/cgroup").write_text("0::/highwater\n")
    known = record()["cgroup"] | {"path": "/vllm", "inode": (host.root / "sys/fs/cgroup/vllm").stat().st_ino}
    write(host.folder, record(mono=470.0, cgroup=known))
    reading = host()
    assert (reading.container.key, reading.container.sees) == (reading.ended[0].container, "sidecar")
    assert (reading.container.events["oom_kill"], reading.container.age_seconds) == (1, 0.0)
    for other in ({"inode": 5}, {"path": "/../vllm"}, {"path": "/" + "x" * 5000}, {"path": 7}):
        write(host.folder, record(mono=470.0, cgroup=known | other))
        assert host().container is None, other


def test_two_lives_of_process_1_lie_there_and_one_has_ended(host):
    kept = record()["cgroup"] | {"events": {"oom_kill": 1}, "inode": 76, "mono": 470.0}
    write(host.folder, record(pid=1, started=98, mono=474.0, parent_pid=0, cgroup=kept))
    write(host.folder, record(pid=1, started=99))
    (one,), (ended,) = (reading := host()).processes, reading.ended
    assert (one.started, ended.started, ended.role, ended.name) == (99, 98, "api_server", "API server")
    assert (ended.is_known, ended.age_seconds, ended.peak_bytes) == (False, 27.0, 900 * MIB)
    last = ended.last_container
    assert (last.events["oom_kill"], last.version, last.age_seconds) == (1, 2, 31.0)
    assert last.key == ended.container != reading.container.key


def test_a_stopped_process_is_silent_and_has_not_ended(host):
    (host.root / "proc/self/ns").mkdir(parents=True)
    (host.root / "proc/self/ns/pid").write_text("")
    shared = (host.root / "proc/self/ns/pid").stat().st_ino
    process(host.root, 10, 1, "VLLM::EngineCore", 500, started=99, state="T")
    process(host.root, 12, 1, "VLLM::Worker", 500, started=99, state="Z")
    for pid in (10, 11, 12):
        write(host.folder, record(pid=pid, mono=400.0, pid_namespace=shared))
    assert [(one.pid, one.is_known) for one in host().ended] == [(11, True), (12, True)]


async def test_a_stopped_engine_core_is_found_though_it_writes_no_file_any_more(host):
    process(host.root, 10, 1, "python vllm serve model", 700)
    process(host.root, 11, 10, "VLLM::EngineCore", 500, state="T")
    process(host.root, 12, 11, "VLLM::Worker_TP0", 900, state="T")
    process(host.root, 13, 10, "python -c from multiprocessing.resource_tracker import main", 9, state="T")
    watch = HostWatch(host.reader(workers=lambda: [worker(12, 7)]))
    assert watch.stopped_processes() == ()
    await watch.read()
    assert [(one.name, one.pid) for one in watch.stopped_processes()] == [("EngineCore", 11)]
    stat = host.root / "proc/11/stat"
    stat.write_text(stat.read_text().replace(") T ", ") S "))
    assert watch.stopped_processes() == ()


async def test_a_process_that_is_stopped_for_five_seconds_is_said_with_what_to_do(host):
    """Not before, as a debugger may let go, nor of a zombie; and anew from zero after it went on."""
    process(host.root, 10, 1, "python vllm serve model", 700, state="Z")
    process(host.root, 11, 10, "VLLM::EngineCore", 500, state="T")
    process(host.root, 12, 11, "VLLM::Worker_TP0", 900)
    stat, seconds = host.root / "proc/11/stat", 0.0
    watch = HostWatch(host.reader(workers=lambda: [worker(12, 7)]), clocks=Clocks(lambda: seconds))
    await watch.read()
    assert watch.stopped_engine() is None
    seconds = 4.9
    assert watch.stopped_engine() is None
    seconds = 6.0
    assert watch.stopped_engine() == (
        "EngineCore (pid 11) has been stopped by a signal or a debugger for 6 s; requests wait until it goes on: run "
        "kill -CONT 11, or detach the debugger"
    )
    stopped = stat.read_text()
    stat.write_text(stopped.replace(") T ", ") S "))
    assert watch.stopped_engine() is None
    stat.write_text(stopped)
    seconds = 12.0
    assert watch.stopped_engine() is None


async def test_one_stopped_api_server_of_several_does_not_hold_the_engine(host):
    """The others serve; a chart that restarts an engine which is stuck would end their streams."""
    process(host.root, 9, 1, "python vllm serve model --api-server-count 2", 100)
    process(host.root, 10, 9, "VLLM::APIServer_0", 700, state="T")
    process(host.root, 13, 9, "VLLM::APIServer_1", 700)
    process(host.root, 11, 9, "VLLM::EngineCore", 500)
    process(host.root, 12, 11, "VLLM::Worker_TP0", 900)
    seconds = 0.0
    watch = HostWatch(host.reader(workers=lambda: [worker(12, 7)]), clocks=Clocks(lambda: seconds))
    await watch.read()
    assert watch.stopped_engine() is None
    seconds = 6.0
    assert [one.pid for one in watch.stopped_processes()] == [10]
    assert watch.stopped_engine() is None
    stat = host.root / "proc/13/stat"
    stat.write_text(stat.read_text().replace(") S ", ") T "))
    assert watch.stopped_engine() is None
    seconds = 12.0
    said = watch.stopped_engine()
    assert said is not None
    assert "run kill -CONT 10 13, or" in said


def test_a_worker_of_another_start_is_not_looked_for(host):
    """Its number may be anybody's by now."""
    process(host.root, 12, 1, "VLLM::Worker", 900, started=8)
    assert host(workers=lambda: [worker(12, 7)]).processes == ()


def test_where_nothing_is_seen_it_says_what_to_do(host):
    assert "HIGHWATER_RECORDER_DIR" in host().problems[0]
    alone = HostReader(None, root=host.root, shm=host.shm).read()
    assert "share the PID namespace" in alone.problems[0]
    assert alone.machine.available_bytes == 32_768_000 * 1024


def test_where_processes_were_seen_before_the_set_up_is_not_blamed(host):
    """The engine has ended, or only the dead have left files: the folder was right."""
    reader = host.reader()
    file = write(host.folder, record(pid=1))
    assert reader.read().problems == ()
    file.unlink()
    (problem,) = reader.read().problems
    assert "any more" in problem
    write(host.folder, record(mono=400.0))
    assert host().problems == (problem,)


@pytest.mark.parametrize("command", ["²", "1.²", "٣", "1"])
def test_a_process_may_be_called_anything(host, command):
    process(host.root, 12, 1, "VLLM::Worker", 900)
    process(host.root, 13, 12, f"{command} 40", 1)
    names = [one.name for one in host(workers=lambda: [worker(12, 7)]).processes]
    assert names == ["worker rank 0", f"other {command}"]


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.booleans())
ANYTHING = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=9)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=9), inner, max_size=4)),
    max_leaves=9,
)
CGROUP = st.fixed_dictionaries(
    {}, optional=dict.fromkeys([*record()["cgroup"], "pressure", "sock", "kernel"], ANYTHING)
)
SHARED = st.fixed_dictionaries({}, optional=dict.fromkeys([*SHM, "unlinked", "left_over", "not_known"], ANYTHING))
LISTED = st.fixed_dictionaries({}, optional={"mono": ANYTHING, "largest": st.lists(ANYTHING, max_size=2)})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={"cgroup": CGROUP | ANYTHING, "shm": SHARED | ANYTHING, "others": LISTED | ANYTHING}
        | dict.fromkeys(
            ("role", "index", "rank", "dp_rank", "command", "mono", "started", "engine", "source"), ANYTHING
        ),
    )
)
def test_whatever_a_file_says_a_report_can_be_made_and_written(host, content):
    """Numbers that every reader of JSON takes, and text that a terminal may show; or a problem with the file's name."""
    write(host.folder, record() | content, "highwater-4242-99.process")
    reading = host()
    text = TypeAdapter(HostReport).dump_json(report_of(reading)).decode()
    assert all(abs(int(number)) < 2**64 for number in re.findall(r"(?<=[:\[,])-?[0-9]+(?=[,}\]])", text))
    assert all(line.isprintable() for line in host_text(report_of(reading)).split("\n"))
