"""Incidents on the disk: whole or not at all, so many and so large, through no link, and by other versions too."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.diagnose.incidents import store
from highwater.diagnose.incidents.store import (
    MAX_IN_MEMORY,
    MAX_POINTS,
    IncidentStore,
    UnreadableIncident,
    fitted,
    is_incident_id,
    to_bytes,
)
from highwater.model.policy import PolicyStatus
from highwater.model.report import Event
from tests.fakes.incident import AT, ID, MIB, entry, incident, numbered, rank, reading, series
from tests.fakes.raising import raising

no_room = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- one ---


@pytest.mark.parametrize("with_folder", [True, False])
def test_what_was_written_is_read(tmp_path, with_folder):
    kept = IncidentStore(tmp_path if with_folder else None)
    given = incident(
        ranks=(rank(series=series(reading(), [1, 2, 3]), entries=(entry(),), stack=("a.py:1 f",), doing="a step"),),
        events=(Event(id=1, at=AT, kind="state", summary="engine ready -> down"),),
        policy=PolicyStatus(level="calm", mode="act", summary="enough is free"),
        ended_at=AT + 60,
        count=3,
    )
    kept.write(given)
    assert kept.read(ID) == given
    assert kept.headlines() == [given.headline]
    assert kept.has(ID)
    assert kept.problem is None
    if with_folder:
        assert IncidentStore(tmp_path).read(ID) == given
        assert IncidentStore(tmp_path).headlines() == [given.headline]


def test_a_file_is_one_json_object_for_its_owner_alone(tmp_path):
    IncidentStore(tmp_path).write(incident())
    assert names(tmp_path) == [f"{ID}.json"]
    path = tmp_path / f"{ID}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = json.loads(path.read_bytes())
    assert (whole["schema"], whole["id"], whole["ranks"][0]["reading"]["total_bytes"]) == (1, ID, 62_420 * MIB)
    first = json.loads(path.read_bytes().splitlines()[0].removesuffix(b",") + b"}")
    assert (first["id"], first["summary"]) == (ID, "it died")


def test_a_second_writing_takes_the_place_of_the_first(tmp_path):
    kept = IncidentStore(tmp_path)
    kept.write(incident())
    kept.write(incident(count=2, ended_at=AT + 5))
    assert names(tmp_path) == [f"{ID}.json"]
    assert [(headline.count, headline.ended_at) for headline in kept.headlines()] == [(2, AT + 5)]


def test_what_is_not_there_is_none(tmp_path):
    assert (IncidentStore(tmp_path).read(ID), IncidentStore(None).read(ID)) == (None, None)
    assert (IncidentStore(tmp_path).headlines(), IncidentStore(None).headlines()) == ([], [])


NO_IDS = [
    *(
        "",
        ".",
        "..",
        "../x",
        f"../{ID}",
        f"{ID}/..",
        f"{ID}\n",
        f"{ID}.json",
        f"{ID}\x00",
        ID + "x" * 99,
        "/etc/passwd",
    ),
    *("20261121T143233Z-", "20261121T143233Z-Died", "20261121T143233Z--died"),
    "\u0662\u0660\u0662\u06661121T143233Z-died",  # digits, and none of ours
]


@pytest.mark.parametrize("text", NO_IDS)
def test_only_an_id_becomes_a_path(tmp_path, text):
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / f"{ID}.json").write_bytes(to_bytes(incident()))
    assert not is_incident_id(text)
    assert IncidentStore(inner).read(text) is None


@pytest.mark.parametrize("text", [ID, "20261121T143233Z-out-of-memory", "20261121T143233Z-out-of-memory-12"])
def test_ids_are_ids(text):
    assert is_incident_id(text)


# --- so many, so large ---


def test_the_oldest_make_room(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "20261121T000000Z-Other.json").write_text("mine")
    kept = IncidentStore(tmp_path, keep=3)
    for number in range(6):
        kept.write(incident(numbered(number)))
    assert [headline.id for headline in kept.headlines()] == [numbered(number) for number in (5, 4, 3)]
    assert len(names(tmp_path)) == 5


def test_in_memory_the_newest_are_kept():
    kept = IncidentStore(None)
    for number in range(MAX_IN_MEMORY + 5):
        kept.write(incident(numbered(number)))
    listed = [headline.id for headline in kept.headlines()]
    assert listed == [numbered(number) for number in reversed(range(5, MAX_IN_MEMORY + 5))]
    assert kept.read(numbered(0)) is None


def test_a_large_one_is_thinned_until_it_fits(tmp_path):
    used = [40_000 * MIB] * 1200
    used[300] = 61_000 * MIB
    many = tuple(rank(reading(number), series=series(reading(number), used)) for number in range(8))
    kept = IncidentStore(tmp_path, max_bytes=512 * 1024)
    kept.write(incident(ranks=many))
    assert (tmp_path / f"{ID}.json").stat().st_size <= 512 * 1024
    read = kept.read(ID)
    assert len(read.ranks) == 8
    for known in read.ranks:
        assert 2 <= len(known.series) < MAX_POINTS
        assert max(point.used_bytes for point in known.series) == 61_000 * MIB
        assert known.series[-1].at == many[0].series[-1].at


def test_a_monstrous_one_fits_too():
    """256 ranks with everything; what was left out is said."""
    many = tuple(
        rank(
            reading(number),
            series=series(reading(number), [1] * 400),
            entries=(entry("x" * 500),) * 20,
            doing="y" * 500,
        )
        for number in range(256)
    )
    happened = (Event(id=1, at=AT, kind="state", summary="z" * 500),) * 200
    given = incident(
        ranks=many,
        events=happened,
        decisions=happened,
        policy=PolicyStatus(level="calm", mode="act", summary="r" * 1_000_000),
    )
    kept, content = fitted(given, 256 * 1024)
    assert len(content) <= 256 * 1024
    assert any("the series and the entries of the encoder caches are left out" in note for note in kept.notes)
    assert kept.summary == given.summary


def test_a_small_one_is_left_as_it_is():
    given = incident(ranks=(rank(series=series(reading(), [1] * 100)),))
    assert fitted(given, 8 * MIB) == (given, to_bytes(given))


# --- disks that do not do ---


def test_a_full_disk_keeps_it_in_memory_and_says_so(tmp_path, monkeypatch):
    kept = IncidentStore(tmp_path)
    monkeypatch.setattr(store.os, "fsync", no_room)
    kept.write(incident())
    assert names(tmp_path) == []
    assert "no space left" in kept.problem
    assert "kept in memory (1 of 16)" in kept.problem
    assert kept.read(ID) == incident()
    assert [headline.id for headline in kept.headlines()] == [ID]
    assert kept.has(ID)
    monkeypatch.undo()
    kept.write(incident(numbered(1)))
    assert names(tmp_path) == sorted([f"{ID}.json", f"{numbered(1)}.json"])
    assert kept.problem is None
    assert len(kept.headlines()) == 2


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    kept = IncidentStore(tmp_path)
    kept.write(incident())
    monkeypatch.setattr(store.os, "replace", no_room)
    kept.write(incident(count=2))
    assert IncidentStore(tmp_path).read(ID).count == 1
    assert kept.read(ID).count == 2
    assert [headline.count for headline in kept.headlines()] == [2]


def test_a_full_disk_fills_no_memory(tmp_path, monkeypatch):
    kept = IncidentStore(tmp_path)
    monkeypatch.setattr(store.os, "fsync", no_room)
    for number in range(100):
        kept.write(incident(numbered(number)))
    assert len(kept.headlines()) == MAX_IN_MEMORY
    assert kept.headlines()[0].id == numbered(99)


def test_a_missing_folder_is_told_and_never_made(tmp_path):
    kept = IncidentStore(tmp_path / "none")
    assert kept.problem is None
    kept.prepare()
    assert "is missing or not writable" in kept.problem
    kept.write(incident())
    assert "no such file" in kept.problem
    assert kept.read(ID) == incident()
    assert names(tmp_path) == []


def test_what_a_crash_left_half_written_goes_at_the_start(tmp_path):
    ours, other = tmp_path / f".{ID}.json.x7.draft", tmp_path / ".notes.draft"
    ours.write_text("{")
    other.write_text("mine")
    kept = IncidentStore(tmp_path)
    kept.headlines()
    assert ours.exists()
    kept.prepare()
    assert names(tmp_path) == [".notes.draft"]


# --- links, and other things that are none of ours ---


def test_no_link_is_followed(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    outside = tmp_path / "outside.json"
    outside.write_bytes(to_bytes(incident(summary="secret")))
    (inner / f"{ID}.json").symlink_to(outside)
    kept = IncidentStore(inner)
    (headline,) = kept.headlines()
    assert "cannot be read" in headline.problem
    assert "secret" not in str(headline)
    with pytest.raises(UnreadableIncident, match="cannot be read"):
        kept.read(ID)
    kept.write(incident(count=2))
    assert json.loads(outside.read_bytes())["summary"] == "secret"
    assert kept.read(ID).count == 2


def test_the_folder_may_be_named_by_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "named").symlink_to("real")
    kept = IncidentStore(tmp_path / "named")
    kept.write(incident())
    assert kept.folder == tmp_path / "real"
    assert names(tmp_path / "real") == [f"{ID}.json"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_named_and_left_alone(tmp_path, make):
    """A pipe does not hang the list, and a folder is never removed."""
    make(tmp_path / f"{ID}.json")
    kept = IncidentStore(tmp_path, keep=1)
    assert "cannot be read" in kept.headlines()[0].problem
    with pytest.raises(UnreadableIncident):
        kept.read(ID)
    if make is os.mkdir:
        kept.write(incident("20271121T143233Z-died"))
        assert (tmp_path / f"{ID}.json").is_dir()


# --- corrupt, and of another version ---

WHOLE = to_bytes(incident())
OTHER = json.loads(WHOLE)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not an incident"),
        (b"\x00" * 4096, "is not an incident"),
        (b"[]", "is not an incident"),
        (WHOLE[:40], "has no headline that this version reads"),
        (WHOLE.replace(b'"schema":1', b'"schema":2', 1), "is of schema 2, and this version reads 1"),
        (json.dumps(OTHER | {"schema": 7}, indent=2).encode(), "is of schema 7, and this version reads 1"),
        (WHOLE.replace(b'"count":1', b'"count":"x"', 1), "has no headline that this version reads"),
        (WHOLE.replace(ID.encode(), numbered(1).encode(), 1), f"says that it is {numbered(1)}"),
        (WHOLE.replace(b'"ended_at":null', b'"ended_at":1e999', 1), "has an invalid time"),
        (b"{" * 100_000 + b'"schema":1}', "is not an incident"),
        (b'{"schema":1,"id":' + b"[" * 100_000 + b"}", "has no headline"),
    ],
)
def test_what_cannot_be_read_is_listed_and_named(tmp_path, content, problem):
    (tmp_path / f"{ID}.json").write_bytes(content)
    kept = IncidentStore(tmp_path)
    kept.write(incident(numbered(3)))
    by_id = {headline.id: headline for headline in kept.headlines()}
    assert problem in by_id[ID].problem
    assert by_id[numbered(3)].problem is None
    assert kept.has(ID)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not an incident"),
        (WHOLE[: len(WHOLE) // 2], "is not valid JSON"),
        (
            WHOLE.replace(b'"schema":1', b'"schema":2', 1).replace(b'"kind":"died"', b'"kind":"melted"', 1),
            "is of schema 2",
        ),
        (WHOLE.replace(b'"kind":"died"', b'"kind":"melted"', 1), "has another form: kind"),
        (WHOLE.replace(b'"ended_at":null', b'"ended_at":1e999', 1), "has an invalid time"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, content, problem):
    (tmp_path / f"{ID}.json").write_bytes(content)
    with pytest.raises(UnreadableIncident, match=problem):
        IncidentStore(tmp_path).read(ID)


def test_a_file_of_a_later_release_with_more_in_it_is_read(tmp_path):
    events = b'"events":[{"id":1,"at":1.0,"kind":"state","summary":"s","later":1}]'
    more = WHOLE.replace(b'"events":[]', events, 1).replace(b'"schema":1', b'"schema":1,"later":{"x":1}', 1)
    (tmp_path / f"{ID}.json").write_bytes(more)
    kept = IncidentStore(tmp_path)
    assert kept.headlines() == [incident().headline]
    assert kept.read(ID).events[0].summary == "s"


def test_a_file_of_any_size_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 100)
    (tmp_path / f"{ID}.json").write_bytes(WHOLE)
    kept = IncidentStore(tmp_path)
    assert "more than 100 bytes" in kept.headlines()[0].problem
    with pytest.raises(UnreadableIncident, match="more than 100 bytes"):
        kept.read(ID)


def test_no_text_of_ours_is_beyond_utf_8():
    assert json.loads(to_bytes(replace(incident(), summary="日本 \u2028")))["summary"] == "日本 \u2028"
