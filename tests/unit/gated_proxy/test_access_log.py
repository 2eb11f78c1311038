"""The access log's writer: files that are moved away, disks that are full, readers that have stopped."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading

import pytest

from gated_proxy.heads import parse_head
from gated_proxy.logs import AccessLog, RequestRecord
from tests.patience import wait_until

HEAD = parse_head(b"POST /v1/completions?key=secret HTTP/1.1\r\nHost: s\r\nX-Request-Id: r1\r\n\r\n")
RECORD = RequestRecord(HEAD)
RECORD.request_bytes, RECORD.response_bytes, RECORD.was_reused = 10, 20, True
ENDED = RECORD.line("10.0.0.1:40000", "completions", 200, 0.1234567891)


def until(condition):
    """Wait for the writing thread."""
    wait_until(condition, pause_seconds=0.001)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbered(number):
    return {**ENDED, "request_id": str(number)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "access.log"


@pytest.fixture
def access_log(path):
    opened = AccessLog(str(path))
    yield opened
    opened.close()


def test_a_line_is_one_json_object(access_log, path):
    access_log.write(ENDED)
    access_log.close()
    (line,) = lines(path)
    assert line == {**ENDED, "duration_seconds": 0.123457}
    assert line.pop("time").endswith("Z")
    assert line == {
        "peer": "10.0.0.1:40000",
        "method": "POST",
        "path": "/v1/completions",
        "path_class": "completions",
        "status": 200,
        "result": "complete",
        "reason": None,
        "request_id": "r1",
        "request_bytes": len(HEAD.raw) + 10,
        "response_bytes": 20,
        "duration_seconds": 0.123457,
        "time_to_first_byte_seconds": None,
        "held_seconds": 0.0,
        "engine_connection_reused": True,
    }


def test_lines_come_in_order_behind_what_is_there(path):
    for start in (0, 100):
        access_log = AccessLog(str(path))
        for number in range(start, start + 100):
            access_log.write(numbered(number))
        access_log.close()
    assert [line["request_id"] for line in lines(path)] == [str(number) for number in range(200)]


def test_a_file_is_not_for_every_user(access_log, path):
    access_log.write(ENDED)
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0


def test_a_file_that_was_moved_away_is_made_anew(access_log, path):
    moved = path.with_suffix(".1")
    access_log.write(numbered(1))
    until(path.read_text)
    path.rename(moved)
    access_log.write(numbered(2))
    access_log.close()
    assert [line["request_id"] for file in (moved, path) for line in lines(file)] == ["1", "2"]


def test_reopen_makes_it_anew_at_once(access_log, path):
    """Also where no request ends: what was moved away can be compressed."""
    path.rename(path.with_suffix(".1"))
    access_log.reopen()
    until(path.exists)
    access_log.close()
    assert access_log.dropped == 0


def test_a_folder_that_is_gone_costs_lines_and_is_told(tmp_path, caplog):
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "access.log"
    access_log = AccessLog(str(path))
    path.unlink()
    folder.rmdir()
    access_log.reopen()  # costs no line
    access_log.write(numbered(1))
    until(lambda: "lines dropped: 1" in caplog.text)
    folder.mkdir()
    access_log.write(numbered(2))
    access_log.close()
    assert [line["request_id"] for line in lines(path)] == ["2"]
    told = [record.getMessage() for record in caplog.records]
    assert all("No such file" in line for line in told)
    assert [line[-1] for line in told] == ["0", "1"]


class Blocked:
    """A pipe's end that nobody reads: writes wait."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.text = ""

    def write(self, text):
        self.goes_on.wait()
        self.text += text

    def flush(self):
        pass


def test_a_reader_that_stopped_holds_up_nobody(monkeypatch, caplog):
    blocked = Blocked()
    monkeypatch.setattr("sys.stdout", blocked)
    access_log = AccessLog("-", queue_lines=10)
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            access_log.write(numbered(number))
    assert 989 <= access_log.dropped <= 990
    assert len(caplog.records) == 5
    assert "the queue is full" in caplog.text
    blocked.goes_on.set()
    access_log.close()
    kept = [json.loads(line)["request_id"] for line in blocked.text.splitlines()]
    assert len(kept) == 1000 - access_log.dropped
    assert kept[:10] == [str(number) for number in range(10)]


def test_the_end_does_not_wait_for_a_reader_that_stopped(monkeypatch):
    blocked = Blocked()
    monkeypatch.setattr("sys.stdout", blocked)
    monkeypatch.setattr("gated_proxy.logs.CLOSE_SECONDS", 0.05)
    access_log = AccessLog("-", queue_lines=1)
    access_log.write(ENDED)
    access_log.write(ENDED)
    access_log.close()
    assert blocked.text == ""
    blocked.goes_on.set()  # the threads may end


def test_a_file_that_cannot_be_opened_is_an_error_at_the_start(tmp_path):
    with pytest.raises(OSError, match=os.strerror(21)):
        AccessLog(str(tmp_path))
