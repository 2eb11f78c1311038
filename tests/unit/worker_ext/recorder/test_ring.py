"""The recorder's file is what docs/recorder-file.md says, or it is not there at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from highwater_worker.files import encoded
from highwater_worker.recorder.ring import MAX_BODY_BYTES, MAX_HEARTBEAT_BYTES, ROW, Layout, make_ring
from tests.unit.worker_ext.ring_bytes import TABLES_AT, heartbeat, parse, ring_at, table, watchdog

FIVE, THREE = Layout(5, 0), Layout(3, 0)
IDENTITY = encoded({"instance": "00112233445566ff", "host": "näher"})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "highwater-00112233445566ff-7.ring"


def test_a_new_file_has_its_header_and_empty_slots(path):
    """In its whole size, readable by all whatever the umask, under its own name only."""
    before = os.umask(0o077)
    try:
        ring = make_ring(path, IDENTITY, FIVE)
    finally:
        os.umask(before)
    assert parse(path) == ({"instance": "00112233445566ff", "host": "näher"}, {})
    assert (ring.layout.nbytes, stat.S_IMODE(path.stat().st_mode)) == (path.stat().st_size, 0o644)
    assert ring.layout.nbytes == 4096 + 2 * 16384 + 2 * 32768 + 5 * 2048 + 65536
    assert path.stat().st_blocks * 512 >= ring.layout.nbytes, "the disk has set it aside"
    assert os.listdir(path.parent) == [path.name]
    ring.close()


def test_a_record_stands_in_its_slot_to_the_letter(path):
    """Sequence from 1, length, checksum, body."""
    ring = make_ring(path, IDENTITY, FIVE)
    ring.write(b'{"kind":"stopped"}')
    slot = path.read_bytes()[ring_at(path.read_bytes()) :][:2048]
    assert slot[:12] == bytes([1, 0, 0, 0, 0, 0, 0, 0, 18, 0, 0, 0])
    assert slot[16:34] == b'{"kind":"stopped"}'
    assert not any(slot[34:])
    assert parse(path)[1] == {1: {"kind": "stopped"}}
    ring.close()


def test_the_oldest_is_written_over(path):
    """Shorter ones over longer ones too."""
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
    """The one before the last stays whole while the last is written."""
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
    """Head and rows under one checksum."""
    ring = make_ring(path, IDENTITY, Layout(3, 4096))
    row = ROW.pack(b"a" * 64, 12, 1.5, 1)
    for n in range(1, 4):
        ring.write_table(encoded({"total": n}), row * n)
        assert table(path) == ({"total": n}, [("a" * 64, 12, 1.5, 1)] * n)
    content = path.read_bytes()
    assert (content[TABLES_AT], content[TABLES_AT + 32768 + 4096 * 88]) == (3, 2)
    ring.write_table(b"{}", row * 4096)
    with pytest.raises(ValueError, match="does not fit"):
        ring.write_table(b"{}", row * 4500)
    ring.close()


def test_what_is_written_plainly_lands_in_the_stack_area(path):
    """Wherever else records are written meanwhile; what was there before is gone."""
    ring = make_ring(path, IDENTITY, THREE)
    descriptor = ring.clear_stack(12.0, 3.0)
    ring.write(b'{"n":1}')
    os.write(descriptor, b"Timeout!\n")
    ring.write_heartbeat(b"{}")
    os.write(descriptor, b"x" * 70_000)
    assert watchdog(path) == (12.0, 3.0, "Timeout!\n" + "x" * 70_000)
    ring.clear_stack(13.0, 3.0)
    assert watchdog(path) == (13.0, 3.0, "")
    assert parse(path)[1] == {1: {"n": 1}}
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
    """In words, and nothing is left."""

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=rf"{path.name} of {FIVE.nbytes} bytes cannot be made: {words}"):
        make_ring(path, IDENTITY, FIVE)
    assert (os.listdir(path.parent), os.listdir("/proc/self/fd")) == ([], open_before)


def test_a_directory_that_cannot_be_written_is_named(path, monkeypatch):
    """As is one that is a file; to root, no mode forbids anything."""

    def forbidden(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    path.write_text("not a folder")
    with pytest.raises(OSError, match=r"cannot be made: (Not a directory|File exists)"):
        make_ring(path / "highwater.ring", IDENTITY, FIVE)
    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(OSError, match="cannot be made: Permission denied"):
        make_ring(path, IDENTITY, FIVE)


def test_a_missing_directory_is_made(tmp_path):
    """With those above it."""
    path = tmp_path / "a" / "b" / "highwater.ring"
    make_ring(path, IDENTITY, FIVE).close()
    assert path.is_file()


@pytest.mark.parametrize("planted", ["link", "file"])
def test_nothing_is_written_through_what_lies_under_the_hidden_name(path, planted):
    """A link goes, what it points to stays; a file of a process that died goes too."""
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
    """Not followed."""
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.symlink_to(victim)
    make_ring(path, IDENTITY, FIVE).close()
    assert (victim.read_text(), path.is_symlink()) == ("precious", False)


def test_a_file_that_was_taken_away_is_not_there(path):
    """Also where another has its name."""
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
