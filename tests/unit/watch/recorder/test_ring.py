"""One worker's recorder file, as a reader meets it: new, lapped, torn, damaged, cut, and not a ring at all."""

from __future__ import annotations

import json
import os
import struct
import zlib
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.watch.recorder.contents import MAX_NOTE, MAX_NOTES, MAX_PHASES, RingUnusable, is_within_bounds
from highwater.watch.recorder.ring import MAX_FILE_BYTES, Ring, has_magic
from tests.fakes.raising import raising
from tests.fakes.ring import (
    BUDGET,
    HEARTBEAT_BYTES,
    INSTANCE,
    MONO,
    RING_AT,
    SLOT_BYTES,
    TABLE_BYTES,
    FakeWriter,
    file_bytes,
    header,
    slot,
)
from tests.fakes.started import story, wire

AREAS = f"heartbeats of {HEARTBEAT_BYTES}, tables of {TABLE_BYTES}"
IDENTITY = {"instance": INSTANCE, "pid": 4242, "device": {}, "started_at": 1.0, "rate": 10.0, "seconds": 120.0}


@pytest.fixture
def writer(tmp_path):
    with closing(FakeWriter(tmp_path)) as one:
        yield one


@pytest.fixture
def ring(writer):
    with closing(Ring(writer.path)) as one:
        yield one


@contextmanager
def counted_preads():
    """The sizes that were asked for."""
    sizes: list[int] = []
    pread = os.pread

    def counted(descriptor, size, offset):
        sizes.append(size)
        return pread(descriptor, size, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counted)
        yield sizes


@pytest.fixture
def preads():
    with counted_preads() as sizes:
        yield sizes


def numbers(bodies):
    return [body["n"] for body in bodies]


def new_numbers(ring):
    """What is new, oldest first."""
    return numbers(ring.read())[::-1]


def write(writer, first, last):
    for number in range(first, last + 1):
        writer.append({"n": number})


def file_with(folder: Path, content: bytes, *, size: int | None = None) -> Path:
    path = folder / f"highwater-{INSTANCE}-4242.ring"
    path.write_bytes(content)
    if size is not None:
        os.truncate(path, size)
    return path


def reason(path: Path) -> str:
    with pytest.raises(RingUnusable) as caught:
        Ring(path)
    return caught.value.reason


# --- what is new ---


def test_each_record_is_read_once_and_in_order(writer, ring):
    assert new_numbers(ring) == []
    last = 0
    for count in (1, 11, 11, 0, 30, 11, 11, 31, 1):
        write(writer, last + 1, last + count)
        assert new_numbers(ring) == list(range(last + 1, last + count + 1))
        last += count


def test_one_read_of_the_file_is_enough_for_who_keeps_up(writer, ring, preads):
    write(writer, 1, 11)
    new_numbers(ring)
    preads.clear()
    write(writer, 12, 22)
    new_numbers(ring)
    assert len(preads) == 1
    write(writer, 23, 44)
    new_numbers(ring)
    preads.clear()
    write(writer, 45, 70)
    assert new_numbers(ring) == list(range(45, 71))
    assert len(preads) == 2


@pytest.mark.parametrize("written", [1, 31, 32, 33, 63, 64, 65, 90, 128, 129, 1000])
def test_who_comes_late_gets_the_newest(writer, written):
    write(writer, 1, written)
    with closing(Ring(writer.path)) as ring:
        got = new_numbers(ring)
        assert got == list(range(max(written - 31, 1), written + 1))
        assert new_numbers(ring) == []


@pytest.mark.parametrize("more", [32, 33, 40, 63, 64, 65, 100, 128, 1000])
def test_who_was_away_for_long_gets_the_newest(writer, ring, more):
    write(writer, 1, 20)
    new_numbers(ring)
    write(writer, 21, 20 + more)
    got = new_numbers(ring)
    assert got == sorted(set(got))
    assert got[-32:] == list(range(20 + more - min(more, 32) + 1, 20 + more + 1))
    write(writer, 21 + more, 25 + more)
    assert new_numbers(ring) == list(range(21 + more, 26 + more))


def test_a_large_ring_is_not_read_whole(tmp_path, preads):
    with closing(FakeWriter(tmp_path, slots=2000)) as writer:
        write(writer, 1, 3333)
        with closing(Ring(writer.path)) as ring:
            preads.clear()
            assert new_numbers(ring) == list(range(3302, 3334))
    assert sum(preads) < 250_000


def test_all_that_there_is_can_be_had_at_once(writer, ring):
    write(writer, 1, 100)
    assert numbers(ring.newest()) == list(range(100, 36, -1))
    assert new_numbers(ring)[-1] == 100


# --- what stands beside the records ---


def test_each_heartbeat_is_read_once(writer, ring):
    assert ring.heartbeat() is None
    for number in range(1, 6):
        writer.append_heartbeat({"n": number})
        if number != 3:
            assert ring.heartbeat() == {"n": number}
            assert ring.heartbeat() is None


def test_a_long_heartbeat_is_read_whole(writer, ring):
    writer.append_heartbeat({"n": 1, "dump": "x" * 12_000})
    assert ring.heartbeat() == {"n": 1, "dump": "x" * 12_000}


def damage_at(writer: FakeWriter, at: int) -> None:
    with open(writer.path, "r+b") as file:
        file.seek(at + 12)
        file.write(b"\xff" * 8)


def test_while_one_heartbeat_is_being_written_the_other_is_there(writer, ring):
    writer.append_heartbeat({"n": 1})
    writer.append_heartbeat({"n": 2})
    damage_at(writer, writer.heartbeat_at())
    assert ring.heartbeat() == {"n": 1}
    assert ring.heartbeat() is None
    writer.append_heartbeat({"n": 3})
    assert ring.heartbeat() == {"n": 3}


def test_a_table_is_read_when_it_is_new(writer, ring, preads):
    writer.table(1.0, [("a", 100, 0.5, False), ("b" * 99, 50, 0.75, True)], total=5000)
    table = ring.table()
    assert (table.total, table.mono, table.budget.requested_bytes) == (5000, MONO + 1, BUDGET["requested_bytes"])
    assert [tuple(entry.values()) for entry in table.entries(MONO + 1)] == [
        ("a", 100, "device", 0.5),
        ("b" * 64, 50, "host", 0.25),
    ]
    preads.clear()
    assert ring.table() is None
    assert sum(preads) == 32


def test_what_a_table_tells_in_words_is_short(writer, ring):
    phases = [{"name": "n" * 2000, "at": 1.0, "seconds": 1.0, "error": "e" * 2000}]
    writer.table(1.0, [], start=phases, notes=[{"name": "n" * 2000, "reason": "r" * 2000}])
    table = ring.table()
    (phase,), (note,) = table.start, table.notes
    assert {len(text) for text in (phase.name, phase.error, note.name, note.reason)} == {MAX_NOTE}


@pytest.mark.parametrize(("name", "most"), [("start", MAX_PHASES), ("notes", MAX_NOTES)])
def test_a_table_with_more_than_any_worker_writes_is_passed_by(writer, ring, name, most):
    """Each of them would be in every report."""
    one = {"start": {"name": "init", "at": 1.0, "seconds": 1.0}, "notes": {"name": "x", "reason": "y"}}[name]
    writer.table(1.0, [], **{name: [one] * most})
    assert ring.table() is not None
    writer.table(2.0, [], **{name: [one] * (most + 1)})
    assert ring.table() is None


def test_the_engines_budget_is_read_of_a_table(writer, ring):
    writer.table(1.0, engine_budget=wire(story(), version="0.12.0"))
    budget = ring.table().engine_budget
    assert (budget.vllm_version, budget.kv_cache.blocks, budget.limits.max_num_seqs) == ("0.12.0", 5_040, 8)


@pytest.mark.parametrize(
    "odd",
    [
        {"memory": {"total_bytes": -1}},
        {"kv_cache": {"blocks": "many"}},
        {"dtype": "\x1b[2J"},
        {"kv_cache": {"layers": {"groups": [{"kind": "\ud800"}]}}},
    ],
)
def test_a_budget_that_makes_no_sense_costs_only_itself(writer, ring, odd):
    writer.table(1.0, rows=[("a", 1, 0.0, False)], engine_budget=odd)
    table = ring.table()
    assert (table.engine_budget, table.total) == (None, 1)
    assert [note.name for note in table.notes] == ["engine_budget"]


def test_a_torn_table_is_never_seen(writer, ring):
    writer.table(1.0, [("a", 1, 0.0, False)])
    writer.table(2.0, [("a", 1, 0.0, False), ("b", 1, 0.0, False)])
    damage_at(writer, writer.table_at())
    table = ring.table()
    assert len(list(table.entries(MONO))) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("<I", 2**32 - 1) + b"{}",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 25) + b'{"mono": -1, "total": 100}'[:25],
        struct.pack("<I", 23) + b'{"mono": 1, "total": 1}' + b"x" * 87,
    ],
)
def test_a_table_that_is_none_is_passed_by(writer, ring, body):
    """Its checksum is right: the writer meant it."""
    writer.append_table(body)
    assert ring.table() is None


def test_rows_that_no_writer_would_write_are_left_out(writer, ring):
    rows = [
        (b"\x1b[2J", 1, 1.0, 0),
        (b"a", 2**64 - 1, 1.0, 0),
        (b"b", 1, float("nan"), 0),
        (b"c", 1, -1.0, 0),
        (b"d", 1, float("inf"), 0),
    ]
    text = b'{"mono": 1, "total": 5, "budget": {"requested_bytes": 9223372036854775808}}'
    writer.append_table(struct.pack("<I", len(text)) + text + b"".join(struct.pack("<64sQdB7x", *row) for row in rows))
    table = ring.table()
    assert [entry["mm_hash"] for entry in table.entries(MONO)] == ["?[2J"]
    assert table.budget.requested_bytes is None


@given(body=st.binary(max_size=400), which=st.sampled_from(["heartbeat", "table"]))
def test_what_stands_beside_may_be_anything(folder, body, which):
    with closing(FakeWriter(folder, pid=77)) as writer:
        writer.append_heartbeat(body) if which == "heartbeat" else writer.append_table(body)
        with closing(Ring(writer.path)) as ring:
            ring.heartbeat()
            table = ring.table()
            assert table is None or len(list(table.entries(MONO))) < 5
    writer.path.unlink()


# --- what is not whole ---


def test_a_record_that_is_being_written_is_read_next_time(writer, ring):
    for last in (3, 33, 60, 80):
        write(writer, writer.sequence + 1, last)
        new_numbers(ring)
        writer.append_torn({"n": last + 1, "more": "x" * 500})
        assert new_numbers(ring) == []
        write(writer, last + 1, last + 2)
        assert new_numbers(ring) == [last + 1, last + 2]


def test_damaged_records_are_passed_by(writer, ring):
    write(writer, 1, 5)
    new_numbers(ring)
    write(writer, 6, 12)
    writer.damage(7)
    writer.damage(8)
    assert new_numbers(ring) == [6, 9, 10, 11, 12]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b"{", b'{"n": NaN}', b'{"n": 1}\xff', b"[" * 2000, b'{"n": ' + b"9" * 2000]
)
def test_a_record_that_is_no_json_object_is_passed_by(writer, ring, body):
    """Its checksum is right: the writer meant it."""
    write(writer, 1, 1)
    writer.append(body)
    write(writer, 3, 3)
    assert new_numbers(ring) == [1, 3]


@pytest.mark.parametrize("damaged", range(33, 100, 3))
def test_one_damaged_record_does_not_even_delay_the_newest(tmp_path, damaged):
    with closing(FakeWriter(tmp_path, slots=128)) as writer:
        write(writer, 1, 100)
        writer.damage(damaged)
        with closing(Ring(writer.path)) as ring:
            assert new_numbers(ring)[-1] == 100


def test_a_record_in_a_place_that_is_not_its_own_is_none(writer, ring):
    write(writer, 1, 3)
    with open(writer.path, "r+b") as file:
        file.seek(writer.offset(4))
        file.write(slot(6, {"n": 6}))
        body = json.dumps({"n": "x" * SLOT_BYTES}).encode()
        start = struct.pack("<QI", 5, len(body))
        file.seek(writer.offset(5))
        file.write(start + struct.pack("<I", zlib.crc32(start + body)) + body)
    assert new_numbers(ring) == [1, 2, 3]
    assert numbers(ring.newest()) == [3, 2, 1]


@pytest.mark.parametrize("damaged", [range(1, 2), range(1, 4), range(30, 34), range(1, 33), range(1, 70)])
def test_damage_does_not_hide_the_newest(tmp_path, damaged):
    with closing(FakeWriter(tmp_path, slots=128)) as writer:
        write(writer, 1, 100)
        for sequence in damaged:
            writer.damage(sequence)
        with closing(Ring(writer.path)) as ring:
            got = [number for _ in range(5) for number in new_numbers(ring)]
    assert got[-1] == 100


def test_a_hole_of_zeros_does_not_hide_what_follows(writer, ring):
    write(writer, 1, 10)
    new_numbers(ring)
    os.truncate(writer.path, 0)
    assert (new_numbers(ring), ring.problem) == ([], "truncated: it was cut while it was read")
    write(writer, 11, 12)
    assert new_numbers(ring) == [11, 12]
    write(writer, 13, 64)
    new_numbers(ring)
    write(writer, 65, 66)
    assert (new_numbers(ring), ring.problem) == ([65, 66], None)


# --- what is no ring ---


def test_a_file_that_is_no_ring_is_named(tmp_path):
    good = header(json.dumps(IDENTITY).encode(), slots=4)
    size = file_bytes(4)
    whole = good.ljust(size, b"\0")
    Ring(file_with(tmp_path, whole)).close()
    for content, word in (
        (b"", "truncated: 0 bytes"),
        (whole[:5], "truncated: 5 bytes"),
        (whole[:35], "truncated: 35 bytes"),
        (whole[:200], "truncated: 200 bytes, less than its header"),
        (whole[:-1], f"truncated: {size - 1} bytes of {size}"),
        (b"\0" * size, "foreign: it does not begin as a ring does"),
        (b"HIGHWATE" + whole[8:], "foreign: it does not begin as a ring does"),
        (header(b"{}", slots=4, version=2).ljust(size, b"\0"), "version 2 unknown"),
        (header(b"{}", slots=4, version=4)[:28], "version 4 unknown"),
        (header(b"{}", slots=0).ljust(size, b"\0"), f"corrupt header: 0 slots of 2048 bytes after 4096, {AREAS}"),
        (whole[:50] + b"?" + whole[51:], "corrupt identity: its checksum does not fit"),
        *(
            (
                whole[:12] + struct.pack("<I", slot_bytes) + whole[16:],
                f"corrupt header: 4 slots of {slot_bytes} bytes after 4096, {AREAS}",
            )
            for slot_bytes in (0, 15, 255, 65537, 2**32 - 1)
        ),
        *(
            (
                whole[:at] + struct.pack("<I", area_bytes) + whole[at + 4 :],
                f"corrupt header: 4 slots of 2048 bytes after 4096, {AREAS.replace(name, f'{word} of {area_bytes}')}",
            )
            for at, word, name in (
                (20, "heartbeats", f"heartbeats of {HEARTBEAT_BYTES}"),
                (24, "tables", f"tables of {TABLE_BYTES}"),
            )
            for area_bytes in (0, 255, 2**32 - 1)
        ),
        (whole[:10] + b"\x23\0" + whole[12:], f"corrupt identity: {len(json.dumps(IDENTITY))} bytes in a header of 35"),
        (whole[:28] + b"\xff\xff" + whole[30:], "corrupt identity: 65535 bytes in a header of 4096"),
    ):
        assert reason(file_with(tmp_path, content)) == word
    assert reason(file_with(tmp_path, whole, size=MAX_FILE_BYTES + 1)) == f"too large: {MAX_FILE_BYTES + 1} bytes"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"instance": "another"}, "instance: "),
        ({"instance": "f" * 16}, "it is not that of the file's name"),
        ({"pid": 4243}, "it is not that of the file's name"),
        ({"pid": 0}, "pid: "),
        ({"rank": -1}, "rank: "),
        ({"rank": "first"}, "rank: "),
        ({"host": "node\n"}, "host: "),
        ({"host": "n" * 300}, "host: "),
        ({"device": None}, "device: "),
        ({"device": {"index": -1}}, "a number that nothing has"),
        ({"device": {"name": "A\x1b[2J"}}, "device: characters that no name has"),
        ({"rate": 0}, "rate: "),
        ({"rate": 1e999}, "it is no JSON object"),
        ({"started_at": None}, "started_at: "),
    ],
)
def test_an_identity_that_nobody_has_is_corrupt(tmp_path, change, word):
    content = header(json.dumps(IDENTITY | change).encode(), slots=4).ljust(file_bytes(4), b"\0")
    assert reason(file_with(tmp_path, content)).startswith(f"corrupt identity: {word}")


@pytest.mark.parametrize("identity", [b"", b"[]", b"{", b"\xff{}", b"[" * 4000])
def test_an_identity_that_is_no_json_object_is_corrupt(tmp_path, identity):
    path = file_with(tmp_path, header(identity, slots=4).ljust(file_bytes(4), b"\0"))
    assert reason(path) == "corrupt identity: it is no JSON object"


def test_a_newer_writer_may_say_more_of_itself(tmp_path):
    with closing(FakeWriter(tmp_path, model="Qwen3-VL")) as writer, closing(Ring(writer.path)) as ring:
        assert ring.identity.title == "rank 0 (pid 4242 on node-a)"


def test_what_is_no_regular_file_is_not_opened(tmp_path, writer):
    """A link leads elsewhere, a named pipe would wait forever, opening a device may do something."""
    path = tmp_path / f"highwater-{INSTANCE}-1.ring"
    for make in (lambda: path.symlink_to(writer.path), lambda: os.mkfifo(path), path.mkdir):
        make()
        assert reason(path) == "not a regular file"
        path.rmdir() if path.is_dir() else path.unlink()
    path.symlink_to("/dev/zero")
    assert reason(path) == "not a regular file"


def test_what_takes_a_files_place_at_the_last_moment_is_not_read(tmp_path, writer, monkeypatch):
    regular, before = writer.path.lstat(), len(os.listdir("/proc/self/fd"))
    path = tmp_path / f"highwater-{INSTANCE}-1.ring"
    monkeypatch.setattr(Path, "lstat", lambda _: regular)
    for make in (lambda: path.symlink_to(writer.path), lambda: os.mkfifo(path)):
        make()
        assert reason(path) == "not a regular file"
        path.unlink()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_may_not_be_read_is_named(tmp_path, writer, monkeypatch):
    assert reason(tmp_path / "none") == "unreadable: no such file or directory"
    monkeypatch.setattr(os, "open", raising(PermissionError(13, os.strerror(13))))
    assert reason(writer.path) == "unreadable: permission denied"


def test_a_disk_that_gives_nothing_more_is_named(ring, monkeypatch):
    monkeypatch.setattr(os, "pread", raising(OSError(5, os.strerror(5))))
    for read in (ring.read, ring.newest, ring.heartbeat, ring.table):
        with pytest.raises(RingUnusable, match="unreadable: input/output error"):
            read()


def test_no_file_stays_open_that_is_not_used(tmp_path, writer):
    before = len(os.listdir("/proc/self/fd"))
    writer.damage(1)
    bad = file_with(tmp_path, b"HIGHWATR")
    for _ in range(5):
        assert reason(bad)
        assert has_magic(bad)
    assert len(os.listdir("/proc/self/fd")) == before


# --- anything at all ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A ring that has come around."""
    with closing(FakeWriter(tmp_path_factory.mktemp("image"), slots=8)) as writer:
        for second in range(11):
            writer.sample(second)
        writer.table(10, [("a" * 64, 100, 5.0, False)])
        writer.table(11, [("a" * 64, 100, 5.0, False), ("b", 50, 6.0, True)])
        writer.heartbeat(11)
        earlier(writer.path).parent.mkdir()
        earlier(writer.path).write_bytes(writer.path.read_bytes())
        writer.stopped(12)
        return writer.path


def earlier(whole: Path) -> Path:
    """The same ring before the last word was written over an older one."""
    return whole.parent / "earlier" / whole.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def read_all(path: Path) -> list[dict]:
    """Whatever a reader does with a file; all that it may raise is that it does not use it."""
    try:
        ring = Ring(path)
    except RingUnusable:
        return []
    with closing(ring):
        beside = [found for found in (ring.heartbeat(), ring.heartbeat()) if found is not None]
        tables = [tuple(table.entries(MONO)) for table in (ring.table(), ring.table()) if table is not None]
        assert all(len(entries) <= 2 for entries in tables)
        return [*ring.read(), *ring.read(), *ring.newest(), *beside]


@given(changes=st.lists(st.tuples(st.integers(0, 1_000_000), st.binary(min_size=1, max_size=16)), max_size=8))
def test_changed_bytes_harm_nobody(whole, folder, changes):
    content = bytearray(whole.read_bytes())
    size = len(content)
    for place, new in changes:
        content[place % size : place % size + len(new)] = new
    written = [*read_all(whole), *read_all(earlier(whole))]
    assert all(body in written for body in read_all(file_with(folder, bytes(content[:size]))))


@given(size=st.integers(0, 30_000) | st.integers(file_bytes(8) - 5_000, file_bytes(8) + 5_000))
def test_a_file_of_any_length_harms_nobody(whole, folder, size):
    content = whole.read_bytes()
    assert bool(read_all(file_with(folder, content, size=size))) == (size >= len(content))


@given(content=st.binary(max_size=5000), with_magic=st.booleans())
def test_random_bytes_harm_nobody(folder, content, with_magic):
    assert read_all(file_with(folder, (b"HIGHWATR\2\0" if with_magic else b"") + content)) == []


sizes = st.tuples(
    st.sampled_from([0, 1, 2, 2, 2, 3, 65535]),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1) | st.integers(200, 5000),
    st.integers(0, 2**32 - 1) | st.integers(0, 20),
    *[st.integers(0, 2**32 - 1) | st.integers(200, 5000)] * 3,
)


@given(claimed=sizes, length=st.none() | st.integers(0, 2**32 - 1), tail=st.binary(max_size=6000))
def test_a_header_may_claim_anything(folder, claimed, length, tail):
    identity = json.dumps(IDENTITY).encode()
    start = b"HIGHWATR" + struct.pack("<HHIIIIII", *claimed, len(identity) if length is None else length)
    content = start + struct.pack("<I", zlib.crc32(start + identity)) + identity + tail
    assert read_all(file_with(folder, content.ljust(40_000, b"\0"))) == []


@given(records=st.lists(st.tuples(st.integers(0, 2**64 - 1) | st.integers(0, 40), st.binary(max_size=60)), max_size=8))
def test_records_may_claim_any_number(whole, folder, records):
    """With a checksum that fits, in any slot: a read stays one of a few system calls."""
    content = bytearray(whole.read_bytes())
    for place, (sequence, body) in enumerate(records):
        start = struct.pack("<QI", sequence, len(body))
        record = start + struct.pack("<I", zlib.crc32(start + body)) + body
        at = RING_AT + place * SLOT_BYTES
        content[at : at + len(record)] = record
    path = file_with(folder, bytes(content))
    with counted_preads() as sizes, closing(Ring(path)) as ring:
        for _ in range(3):
            list(ring.read())
    assert len(sizes) <= 3 * (3 + 4 * 3 + 3)  # where it should be, halving 8 slots past gaps of 4, the newest


def test_numbers_that_nothing_has_are_seen_at_any_depth(ring):
    """Infinite ones come from JSON too: 1e999."""
    assert is_within_bounds(ring.identity)
    for bad in (-1, 2**63, float("inf"), float("nan")):
        assert not is_within_bounds(bad)
