"""Every line of the log is one JSON object where that was asked for, whoever wrote it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from highwater.terminal.serve import JsonLines

LINES = """
import logging, warnings
from highwater.terminal.serve import configure_log
configure_log("info", {form!r})
logging.getLogger("highwater").info("one\\ntwo %s", "\\u2028\\x1b[31m")
logging.getLogger("uvicorn.error").info("Started")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logging.getLogger("httpx").info("no news")
logging.getLogger("highwater").debug("too low")
warnings.warn("careful", stacklevel=1)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("highwater").exception("it failed")
"""


def written(form: str) -> list[str]:
    code = LINES.format(form=form)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.split("\n")


def test_json_is_one_object_a_line():
    """uvicorn's, Python's warnings and tracebacks included; not what is below the level, nor uvicorn's own start."""
    lines = [json.loads(line) for line in written("json") if line]
    assert [line["logger"] for line in lines] == ["highwater", "uvicorn", "py.warnings", "highwater"]
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "error"]
    assert lines[0]["message"] == "one\ntwo \u2028\x1b[31m"
    assert lines[3]["exception"].endswith("ZeroDivisionError: division by zero")


def test_text_is_for_people():
    assert any(line.endswith(" WARNING uvicorn: Invalid HTTP request received.") for line in written("text"))


def test_no_line_break_or_escape_stands_in_a_line_of_json():
    record = logging.LogRecord("a", logging.INFO, "", 0, "x\n\u2028\x1b[2J%s", ("é",), None)
    line = JsonLines().format(record)
    assert line.isascii()
    assert line.isprintable()


@pytest.mark.parametrize("moment", [0.0, 1_700_000_000.1234])
def test_the_time_is_utc_to_the_millisecond(moment):
    record = logging.LogRecord("a", logging.INFO, "", 0, "x", (), None)
    record.created = moment
    assert len(json.loads(JsonLines().format(record))["time"]) == len("2026-01-01T00:00:00.000Z")
