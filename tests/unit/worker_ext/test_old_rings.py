"""An engine that crashes again and again leaves its last starts, and does not fill the machine's memory with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from highwater_worker.files import KEPT_STARTS, remove_old_rings

NOW = 1_763_660_000.0
UNDER_WAY = "f" * 16


def write(folder: Path, start: int, *, pid: int = 7, age: float, suffix: str = "") -> Path:
    """The file of one rank of a start, last written so long ago."""
    path = folder / f"{'.' if suffix else ''}highwater-{start:016x}-{pid}.ring{suffix}"
    path.write_bytes(b"HIGHWATR")
    os.utime(path, (NOW - age, NOW - age))
    return path


def left(folder: Path, instance: str = UNDER_WAY, *, has_room: bool = True) -> set[Path]:
    remove_old_rings(folder, instance, has_room=has_room, clock=lambda: NOW)
    return set(folder.iterdir())


def test_the_last_starts_stay_and_those_before_them_go(tmp_path):
    """With the files of all their ranks, and what a start that was killed left half made."""
    starts = [[write(tmp_path, n, pid=pid, age=10_000 - 100 * n) for pid in (1, 2)] for n in range(KEPT_STARTS + 3)]
    write(tmp_path, 99, age=20_000, suffix=".tmp")
    assert left(tmp_path) == {path for start in starts[3:] for path in start}


def test_what_is_written_stays_however_many_there_are(tmp_path):
    """Of several engines in one folder, and of an engine with many ranks."""
    alive = {write(tmp_path, n, age=1.0) for n in range(KEPT_STARTS + 3)}
    assert left(tmp_path) == alive


def test_without_room_for_another_start_none_that_is_silent_stays(tmp_path):
    """What happens now is worth more; what is being written, and the start under way, are left alone."""
    own = write(tmp_path, 1, age=100.0)
    alive = write(tmp_path, 2, age=2.0)
    write(tmp_path, 3, age=10.0)
    assert left(tmp_path, f"{1:016x}", has_room=False) == {own, alive}


def test_a_start_is_as_young_as_its_youngest_rank(tmp_path):
    """One rank may be hanging while the others go on."""
    files = {write(tmp_path, 0, pid=1, age=50_000), write(tmp_path, 0, pid=2, age=1.0)}
    files |= {write(tmp_path, n, age=10_000) for n in range(1, KEPT_STARTS + 1)}
    assert left(tmp_path) == files


@pytest.mark.parametrize("name", ["highwater-snapshot-one-0-0-7.pickle", "highwater-xyz-7.ring", "notes.txt"])
def test_what_is_no_recorders_file_stays(tmp_path, name):
    """The folder may hold memory snapshots, or what somebody put there."""
    (tmp_path / name).write_text("")
    os.utime(tmp_path / name, (0, 0))
    for n in range(KEPT_STARTS + 3):
        write(tmp_path, n, age=10_000)
    assert tmp_path / name in left(tmp_path)


def test_neither_a_link_nor_a_folder_of_such_a_name_is_touched(tmp_path):
    """Nobody can have files of others removed by it."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    folder = tmp_path / "rings"
    folder.mkdir()
    (folder / f"highwater-{1:016x}-7.ring").symlink_to(theirs)
    (folder / f"highwater-{2:016x}-7.ring").mkdir()
    for n in range(3, KEPT_STARTS + 6):
        write(folder, n, age=10_000)
    assert len(left(folder)) == KEPT_STARTS + 2
    assert theirs.is_dir()


def test_a_folder_that_is_missing_costs_nothing(tmp_path):
    """The first writer makes it."""
    remove_old_rings(tmp_path / "missing", UNDER_WAY)
    assert list(tmp_path.iterdir()) == []
