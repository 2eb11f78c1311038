"""The file of idle floors survives faults of files, and refuses lines that the sidecar cannot have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from highwater.growth.book import MAX_LINES, FloorBook, FloorFile
from highwater.growth.series import Place, SeriesKey
from highwater.model.engine import WorkCounts

HEAD = b'{"schema": 2, "boot": "b"}\n'
WORK = WorkCounts(requests=1, images=1, new_images=1, tokens=1)
KEY = SeriesKey("o", "m", "host", "bytes", "x")


def line(at: float, value: str = "1.0", wall: str = "1.0") -> bytes:
    return (
        f'{{"place":"host","at":{at},"wall":{wall},"work":[1.0,1.0,1.0,1.0,1.0],"lives":["x"],'
        f'"values":[["o","m","bytes",0,{value}]]}}\n'
    ).encode()


def loaded(path: Path) -> tuple[FloorFile, dict[Place, FloorBook]]:
    file = FloorFile(path, boot="b")
    books: dict[Place, FloorBook] = {"device": FloorBook(), "host": FloorBook()}
    file.load(books, 1e9)
    return file, books


def keep(file: FloorFile, books: dict[Place, FloorBook], at: float) -> None:
    books["host"].add(at, 1.0, WORK, {KEY: 1.0})
    file.keep("host", books)


def moments(path: Path) -> list[float]:
    return [row.at for row in loaded(path)[1]["host"].rows]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "1e308"])
def test_a_number_that_no_measurement_has_is_refused(tmp_path: Path, number: str) -> None:
    """Infinity could never be written back: each floor after it would fail."""
    path = tmp_path / "growth"
    path.write_bytes(HEAD + line(1) + line(2, value=number) + line(3, wall=number))
    assert moments(path) == [1.0]


def test_nothing_is_appended_to_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "growth"
    path.write_bytes(HEAD + line(1) + line(2)[:40])
    file, books = loaded(path)
    keep(file, books, 5.0)
    keep(file, books, 6.0)
    assert moments(path) == [1.0, 5.0, 6.0]


@pytest.mark.parametrize("is_pipe", [False, True])
def test_a_file_that_was_removed_is_written_again(tmp_path: Path, is_pipe: bool) -> None:
    path = tmp_path / "growth"
    path.write_bytes(HEAD + line(1))
    file, books = loaded(path)
    path.unlink()
    if is_pipe:
        os.mkfifo(path)
    keep(file, books, 5.0)
    assert "cannot be written" in (file.problem or "")
    keep(file, books, 6.0)
    assert file.problem is None
    assert moments(path) == [1.0, 5.0, 6.0]


def test_a_start_reads_a_bounded_number_of_lines(tmp_path: Path) -> None:
    """8 MiB of the shortest ones would hold it up for a minute; the newest are read, and the next floor shortens it."""
    path = tmp_path / "growth"
    path.write_bytes(HEAD + b"".join(line(at) for at in range(MAX_LINES + 500)))
    file, books = loaded(path)
    assert books["host"].rows[0].at >= 500
    assert books["host"].rows[-1].at == MAX_LINES + 499
    keep(file, books, 1e6)
    assert len(path.read_bytes().splitlines()) <= 1 + len(books["host"].rows)
