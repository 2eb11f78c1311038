"""A worker's files are what docs/recorder-file.md says, or not there at all, and do not fill the machine's memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from highwater_worker.wire import (
    KEPT_STARTS,
    MAX_BODY_BYTES,
    MAX_HEARTBEAT_BYTES,
    ROW,
    Layout,
    encoded,
    make_ring,
    remove_old_rings,
    remove_silent,
)
from tests.fakes.raising import raising
from tests.unit.worker_ext.ring_bytes import heartbeat, parse, table

FIVE, THREE = Layout.of(5, 0), Layout.of(3, 0)
IDENTITY = encoded({"instance": "00112233445566ff", "host": "näher"})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "highwater-00112233445566ff-7.ring"


def test_a_new_file_has_its_header_and_empty_slots(path):
    before = os.umask(0o077)
    try:
        ring = make_ring(path, IDENTITY, FIVE)
    finally:
        os.umask(before)
    assert parse(path) == ({"instance": "00112233445566ff", "host": "näher"}, {})
    assert (ring.layout.nbytes, stat.S_IMODE(path.stat().st_mode)) == (path.stat().st_size, 0o644)
    assert ring.layout.nbytes == 4096 + 2 * 16384 + 2 * 32768 + 5 * 2048
    assert path.stat().st_blocks * 512 >= ring.layout.nbytes, "the disk has set it aside"
    assert os.listdir(path.parent) == [path.name]
    ring.close()


def test_a_record_stands_in_its_slot_to_the_letter(path):
    """Sequence from 1, length, checksum, body."""
    ring = make_ring(path, IDENTITY, FIVE)
    ring.write(b'{"kind":"stopped"}')
    slot = path.read_bytes()[ring.layout.ring_at :][:2048]
    assert slot[:12] == bytes([1, 0, 0, 0, 0, 0, 0, 0, 18, 0, 0, 0])
    assert slot[16:34] == b'{"kind":"stopped"}'
    assert not any(slot[34:])
    assert parse(path)[1] == {1: {"kind": "stopped"}}
    ring.close()


def test_the_oldest_is_written_over(path):
    ring = make_ring(path, IDENTITY, THREE)
    for n in range(1, 9):
        ring.write(encoded({"n": n, "padding": "x" * (500 - 50 * n)}))
    assert {sequence: record["n"] for sequence, record in parse(path)[1].items()} == {6: 6, 7: 7, 8: 8}
    ring.close()


def test_a_body_that_does_not_fit_is_refused(path):
    """It would be written into the next slot."""
    ring = make_ring(path, IDENTITY, THREE)
    ring.write(b"x" * MAX_BODY_BYTES)
    with pytest.raises(ValueError, match="does not fit"):
        ring.write(b"x" * (MAX_BODY_BYTES + 1))
    ring.close()


def test_heartbeats_are_written_in_turn(path):
    ring = make_ring(path, IDENTITY, THREE)
    for n in range(1, 4):
        ring.write_heartbeat(encoded({"n": n}))
        assert heartbeat(path) == {"n": n}
    content = path.read_bytes()
    assert (content[4096], content[4096 + 16384]) == (3, 2)
    with pytest.raises(ValueError, match="does not fit"):
        ring.write_heartbeat(b"x" * (MAX_HEARTBEAT_BYTES + 1))
    ring.close()


def test_entry_tables_are_written_in_turn(path):
    ring = make_ring(path, IDENTITY, Layout.of(3, 4096))
    row = ROW.pack(b"a" * 64, 12, 1.5, 1)
    for n in range(1, 4):
        ring.write_table(encoded({"total": n}), row * n)
        assert table(path) == ({"total": n}, [("a" * 64, 12, 1.5, 1)] * n)
    content = path.read_bytes()
    assert (content[4096 + 32768], content[4096 + 2 * 32768 + 4096 * 88]) == (3, 2)
    ring.write_table(b"{}", row * 4096)
    with pytest.raises(ValueError, match="does not fit"):
        ring.write_table(b"{}", row * 4500)
    ring.close()


def test_nothing_is_written_after_the_end(path):
    """The number of a closed descriptor may be another file's by then."""
    ring = make_ring(path, IDENTITY, THREE)
    ring.close()
    for write in (lambda: ring.write(b"{}"), lambda: ring.write_heartbeat(b"{}"), lambda: ring.write_table(b"{}", b"")):
        with pytest.raises(OSError, match="Bad file descriptor"):
            write()


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "No space left on device"), (errno.EDQUOT, "Disk quota exceeded")]
)
def test_a_full_disk_is_an_error_at_the_start(path, monkeypatch, code, words):
    monkeypatch.setattr(os, "posix_fallocate", raising(OSError(code, os.strerror(code))))
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=rf"{path.name} of {FIVE.nbytes} bytes cannot be made: {words}"):
        make_ring(path, IDENTITY, FIVE)
    assert (os.listdir(path.parent), os.listdir("/proc/self/fd")) == ([], open_before)


def test_a_directory_that_cannot_be_written_is_named(path, monkeypatch):
    path.write_text("not a folder")
    with pytest.raises(OSError, match=r"cannot be made: (Not a directory|File exists)"):
        make_ring(path / "highwater.ring", IDENTITY, FIVE)
    monkeypatch.setattr(os, "open", raising(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(OSError, match="cannot be made: Permission denied"):
        make_ring(path, IDENTITY, FIVE)


@pytest.mark.parametrize("planted", ["link", "file"])
def test_nothing_is_written_through_what_lies_under_the_hidden_name(path, planted):
    victim, hidden = path.with_name("victim"), path.with_name(f".{path.name}.tmp")
    victim.write_text("precious")
    if planted == "link":
        hidden.symlink_to(victim)
    else:
        hidden.write_text("left behind")
    make_ring(path, IDENTITY, FIVE).close()
    assert victim.read_text() == "precious"
    assert sorted(os.listdir(path.parent)) == [path.name, "victim"]
    assert not path.is_symlink()


def test_a_link_under_its_own_name_is_replaced(path):
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.symlink_to(victim)
    make_ring(path, IDENTITY, FIVE).close()
    assert (victim.read_text(), path.is_symlink()) == ("precious", False)


def test_a_file_that_was_taken_away_is_not_there(path):
    ring = make_ring(path, IDENTITY, FIVE)
    assert ring.is_there()
    other = make_ring(path, IDENTITY, FIVE)
    assert (ring.is_there(), other.is_there()) == (False, True)
    ring.close(removes=True)
    assert other.is_there()
    other.close(removes=True)
    assert os.listdir(path.parent) == []


def test_the_file_is_closed_in_programs_that_are_started(path):
    """Whoever inherited it could keep the space of a removed file."""
    ring = make_ring(path, IDENTITY, FIVE)
    assert not os.get_inheritable(ring._descriptor)
    ring.close()
    ring.close()


# --- files of those that are gone ---

NOW = 1_763_660_000.0
UNDER_WAY = "f" * 16


def written(folder: Path, start: int, *, pid: int = 7, age: float, suffix: str = "") -> Path:
    """The file of one rank of a start, last written so long ago."""
    path = folder / f"{'.' if suffix else ''}highwater-{start:016x}-{pid}.ring{suffix}"
    path.write_bytes(b"HIGHWATR")
    os.utime(path, (NOW - age, NOW - age))
    return path


def left(folder: Path, instance: str = UNDER_WAY, *, has_room: bool = True) -> set[Path]:
    remove_old_rings(folder, instance, has_room=has_room, clock=lambda: NOW)
    return set(folder.iterdir())


def test_the_last_starts_stay_and_those_before_them_go(tmp_path):
    starts = [[written(tmp_path, n, pid=pid, age=10_000 - 100 * n) for pid in (1, 2)] for n in range(KEPT_STARTS + 3)]
    written(tmp_path, 99, age=20_000, suffix=".tmp")
    assert left(tmp_path) == {path for start in starts[3:] for path in start}


def test_what_is_written_stays_however_many_there_are(tmp_path):
    """Of several engines in one folder, and of an engine with many ranks."""
    alive = {written(tmp_path, n, age=1.0) for n in range(KEPT_STARTS + 3)}
    assert left(tmp_path) == alive


def test_without_room_for_another_start_none_that_is_silent_stays(tmp_path):
    own = written(tmp_path, 1, age=100.0)
    alive = written(tmp_path, 2, age=2.0)
    written(tmp_path, 3, age=10.0)
    assert left(tmp_path, f"{1:016x}", has_room=False) == {own, alive}


def test_a_start_is_as_young_as_its_youngest_rank(tmp_path):
    """One rank may be hanging while the others go on."""
    files = {written(tmp_path, 0, pid=1, age=50_000), written(tmp_path, 0, pid=2, age=1.0)}
    files |= {written(tmp_path, n, age=10_000) for n in range(1, KEPT_STARTS + 1)}
    assert left(tmp_path) == files


@pytest.mark.parametrize("name", ["highwater-snapshot-one-0-0-7.pickle", "highwater-xyz-7.ring", "notes.txt"])
def test_what_is_no_recorders_file_stays(tmp_path, name):
    """The folder may hold memory snapshots, or what somebody put there."""
    (tmp_path / name).write_text("")
    os.utime(tmp_path / name, (0, 0))
    for n in range(KEPT_STARTS + 3):
        written(tmp_path, n, age=10_000)
    assert tmp_path / name in left(tmp_path)


def test_neither_a_link_nor_a_folder_of_such_a_name_is_touched(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    folder = tmp_path / "rings"
    folder.mkdir()
    (folder / f"highwater-{1:016x}-7.ring").symlink_to(theirs)
    (folder / f"highwater-{2:016x}-7.ring").mkdir()
    for n in range(3, KEPT_STARTS + 6):
        written(folder, n, age=10_000)
    assert len(left(folder)) == KEPT_STARTS + 2
    assert theirs.is_dir()


def test_a_folder_that_is_missing_costs_nothing(tmp_path):
    remove_old_rings(tmp_path / "missing", UNDER_WAY)
    assert list(tmp_path.iterdir()) == []


def test_files_of_silent_processes_are_removed_at_a_start(tmp_path):
    for name, at in (("highwater-1-1.process", 10.0), ("highwater-2-2.process", 900.0), ("other.process", 10.0)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (at, at))
    remove_silent(tmp_path, ".process", 400.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["highwater-2-2.process", "other.process"]
