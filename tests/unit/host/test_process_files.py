"""Process files are foreign bytes: one that is no good costs only itself, and all of them cost little."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from highwater.host.process_files import MAX_FILES, MAX_SILENT, ProcessFiles
from highwater.process.clocks import Clocks, Machine
from tests.unit.host.recorded import framed, machine, record, write


@pytest.fixture
def files(tmp_path):
    """`files(now)` reads the folder at a time of the monotonic clock, and returns processes and problems."""
    root = machine(tmp_path / "root")
    found = ProcessFiles(tmp_path / "ring", Machine(Clocks(lambda: now[0], lambda: 1000.0), root))
    now = [501.0]

    def read(at=501.0):
        now[0] = at
        return [one.pid for one in found.read()], found.problems

    read.folder, read.files = tmp_path / "ring", found
    return read


def test_a_process_that_writes_is_read(files):
    write(files.folder, record())
    (one,) = files.files.read()
    assert (one.role, one.anonymous_bytes, one.age_seconds) == ("api_server", 700 << 20, 1.0)
    assert one.last_container.anonymous_bytes == 3_221_225_472


def test_one_that_has_fallen_silent_is_not_shown_as_running(files):
    write(files.folder, record())
    assert files(514.0) == ([4242], ())
    assert files(516.0) == ([], ())


@pytest.mark.parametrize(("ahead", "running"), [(5.0, [4242]), (3600.0, [])])
def test_a_file_of_another_boot_from_a_time_to_come_is_not_of_one_that_runs(files, ahead, running):
    """Another machine's clock may be a little ahead; a clock that was set back tells no age."""
    write(files.folder, record(boot_id="another", at=1000.0 + ahead))
    assert files() == (running, ())
    assert files.files.silent == ()


def test_one_whose_number_has_gone_to_another_process_is_not_shown(files, tmp_path):
    (tmp_path / "root/proc/self/ns").mkdir(parents=True)
    (tmp_path / "root/proc/self/ns/pid").write_text("")
    inode = (tmp_path / "root/proc/self/ns/pid").stat().st_ino
    stat = tmp_path / "root/proc/4242/stat"
    stat.parent.mkdir()
    stat.write_text(f"4242 (a ) b) S 1{' 0' * 17} 99 0\n")
    write(files.folder, record(pid_namespace=inode))
    again = ProcessFiles(files.folder, Machine(Clocks(lambda: 501.0), tmp_path / "root"))
    assert [one.pid for one in again.read()] == [4242]
    stat.write_text(f"4242 (a) S 1{' 0' * 17} 100 0\n")
    assert again.read() == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no process file"),
        (b"HIGHWATR" + bytes(4088), "no process file"),
        (framed(b"{}")[:-100] + bytes(100), "schema"),
        (framed(b"[1]"), "JSON object"),
        (framed(b"{" * 2000), "no JSON"),
        (framed(b'{"schema":1,"at":NaN}'), "no JSON"),
        (framed(json.dumps(record(anonymous_bytes=-1)).encode()), "greater than or equal to 0"),
        (framed(json.dumps(record(anonymous_bytes=2**70)).encode()), "less than or equal to"),
        (framed(json.dumps(record(at=1e400)).encode().replace(b"Infinity", b"1e999")), "finite"),
        (framed(json.dumps(record(host="a\x1b[2Jb")).encode()), "host"),
        (framed(json.dumps(record(host="\ud800")).encode()), "host"),
        (framed(json.dumps(record(pid=5)).encode()), "another process"),
        (framed(b'{"schema":1}' + b"\xff\xfe"), "no JSON"),
    ],
)
def test_an_invalid_file_is_named_and_costs_only_itself(files, content, reason):
    write(files.folder, record(pid=7))
    write(files.folder, content, "highwater-4242-99.process")
    pids, (problem,) = files()
    assert pids == [7]
    assert problem.startswith("highwater-4242-99.process: ")
    assert reason in problem


def test_a_file_with_a_wrong_checksum_is_not_used(files):
    content = bytearray(framed(json.dumps(record()).encode()))
    content[40] ^= 1
    write(files.folder, bytes(content), "highwater-4242-99.process")
    assert files()[0] == []
    assert "checksum" in files()[1][0]


def test_links_and_pipes_are_not_opened(files, tmp_path):
    """A link may lead anywhere, a pipe may wait without end."""
    write(tmp_path / "elsewhere", record())
    files.folder.mkdir()
    (files.folder / "highwater-4242-99.process").symlink_to(tmp_path / "elsewhere/highwater-4242-99.process")
    os.mkfifo(files.folder / "highwater-2-2.process")
    pids, problems = files()
    assert pids == []
    assert all("not a regular file" in problem for problem in problems)
    assert len(problems) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="files are given to another user")
def test_a_file_of_another_user_is_not_read(files):
    path = write(files.folder, record())
    os.chown(path, 12345, 12345)
    pids, (problem,) = files()
    assert pids == []
    assert "user 12345" in problem
    (files.folder / "highwater-0123456789abcdef-1.ring").write_bytes(b"")
    os.chown(files.folder / "highwater-0123456789abcdef-1.ring", 12345, 12345)
    os.utime(path)
    assert files()[0] == [4242]


def test_a_crowd_of_forged_files_costs_little_cpu(files):
    """So many are read and no more; once read, those that do not change cost a look at the folder each."""
    for pid in range(1, MAX_FILES + 45):
        write(files.folder, record(pid=pid))
    files()
    started = time.process_time()
    pids, problems = files()
    assert (len(pids), len(problems)) == (MAX_FILES, 1)
    assert time.process_time() - started < 0.25  # measured: 0.01


@pytest.mark.skipif(os.geteuid() != 0, reason="files are given to another user")
def test_many_files_of_other_users_hide_no_process(files):
    """Those of vLLM's user are read first, wherever the folder lists them."""
    for pid in range(1, MAX_FILES + 45):
        write(files.folder, record(pid=pid))
    *others, one, last = [Path(entry.path) for entry in os.scandir(files.folder)]
    for path in others:
        os.chown(path, 12345, 12345)
    assert files()[0] == sorted(int(path.name.split("-")[1]) for path in (one, last))


def test_a_folder_of_too_many_files_is_reported(files, monkeypatch):
    monkeypatch.setattr("highwater.host.process_files.MAX_ENTRIES", 3)
    for pid in range(1, 6):
        write(files.folder, record(pid=pid))
    pids, problems = files()
    assert len(pids) == 3
    assert "more than 3 files" in problems[0]


def test_files_of_processes_that_have_ended_are_swept(files):
    old, new = write(files.folder, record(pid=1)), write(files.folder, record(pid=2))
    other = write(files.folder, b"", "something.process")
    os.utime(old, (100.0, 100.0))
    os.utime(other, (100.0, 100.0))
    os.utime(new, (900.0, 900.0))
    assert files.files.sweep() == 1
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)


def test_a_folder_that_is_not_there_is_no_problem(files):
    """The engine may not have been started yet."""
    assert files() == ([], ())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(content=st.binary(max_size=200) | st.dictionaries(st.sampled_from(sorted(record())), st.integers() | st.text()))
def test_no_content_raises(files, content):
    body = content if isinstance(content, bytes) else json.dumps(record() | content).encode()
    path = write(files.folder, framed(body), "highwater-4242-99.process")
    pids, problems = files()
    assert len(pids) + len(problems) <= 1  # shown, or named, or of a process that has ended
    path.unlink()


def test_files_of_the_dead_are_kept_with_the_freshest_first(files):
    write(files.folder, record(pid=1, mono=400.0))
    write(files.folder, record(pid=2, mono=450.0))
    write(files.folder, record(pid=3))
    write(files.folder, record(pid=4, mono=-100.0 + 1.0, at=1.0))
    assert files(501.0)[0] == [3]
    assert [(one.pid, one.age_seconds) for one in files.files.silent] == [(2, 51.0), (1, 101.0)]


def test_too_many_files_of_the_dead_hide_no_process_that_runs(files):
    for pid in range(1, MAX_FILES + 45):
        os.utime(write(files.folder, record(pid=pid, mono=400.0)), (100.0, 100.0))
    write(files.folder, record(pid=MAX_FILES + 99))
    assert files(501.0)[0] == [MAX_FILES + 99]
    assert len(files.files.silent) == MAX_SILENT
