"""A line of the log that is a JSON object: what a logger or a collector wrapped, and who wrote it. Pure.

vLLM 0.32 writes it with python-json-logger (vllm/logging_utils/formatter.py, uvicorn_logging.py); collectors put the
engine's own line, which may be such an object, into one of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecoder
from typing import Any, Final

_DEPTH: Final = 6
_MAX_LINES: Final = 1000
# Where loggers and collectors put the text; its parts, where such a key holds an object.
_TEXTS: Final = (
    *("message", "msg", "log", "textPayload", "jsonPayload", "event", "line", "body", "Body", "MESSAGE", "@message"),
    *("short_message", "LogEntry", "LogMessage", "stringValue", "_raw", "result", "_source", "fields", "text"),
)
_EXCEPTIONS: Final = ("exc_info", "exception", "exc_text", "stack_trace", "traceback", "stack", "error.stack_trace")
_LOGGERS: Final = ("name", "logger", "logger_name", "log.logger")
_PROCESSES: Final = ("vllm_process_name", "processName", "process_name", "process.name")
_PIDS: Final = ("process", "pid", "process_id", "process.pid")
_LEVELS: Final = ("levelname", "level", "severity", "log.level")
_NAME: Final = re.compile(r"[A-Za-z_][\w .:-]{0,80}")
_LEVEL: Final = re.compile(r"DEBUG|INFO|WARNING|ERROR|CRITICAL")
# The digits of a number too long for a process are not read: Python refuses to, or takes long.
_PID_DIGITS: Final = 9
_DECODER: Final = JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= _PID_DIGITS else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLine:
    """The texts of an object.

    Attributes:
        exception: The lines of a traceback beside them.
        logger: The logger's name, where a logger wrote it: its text is a message, and no line of another process.
    """

    texts: tuple[str, ...]
    exception: tuple[str, ...] = ()
    process: str | None = None
    pid: int | None = None
    level: str | None = None
    logger: str | None = None

    @property
    def is_loggers(self) -> bool:
        """True if a logger wrote it; a collector knows neither a logger nor a process by its name."""
        return self.process is not None or (self.logger is not None and self.level is not None)

    @property
    def file(self) -> str | None:
        """The module by the name of its logger; uvicorn's own lines have none."""
        if self.logger is None or "." not in self.logger or self.logger.startswith("uvicorn"):
            return None
        return f"{self.logger.rpartition('.')[2]}.py"


def json_line(text: str) -> JsonLine | None:
    try:
        found, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return _line_of(found, _DEPTH) if isinstance(found, dict) else None


def _line_of(found: Mapping[str, Any], depth: int) -> JsonLine | None:
    for key in _TEXTS:
        value = _text(found.get(key))
        if isinstance(value, str):
            return _with_texts(found, value.split("\n"))
        if isinstance(value, dict) and depth and (inner := _line_of(value, depth - 1)) is not None:
            return inner
    return _with_texts(found, ()) if any(_lines(found)) else None


def _text(value: object) -> object:
    """Return journald's list of bytes as text: it writes lines with colours so."""
    if isinstance(value, list) and all(isinstance(byte, int) and 0 <= byte <= 255 for byte in value):  # noqa: PLR2004 - bytes
        return bytes(value).decode("utf-8", "replace")
    return value


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the first and last lines of one text: an exception's own stand at the end."""
    return (*lines[:_MAX_LINES], *lines[_MAX_LINES:][-_MAX_LINES:])


def _with_texts(found: Mapping[str, Any], texts: Sequence[str]) -> JsonLine:
    process = _first(found, _PROCESSES)
    level = (_first(found, _LEVELS) or "").upper().replace("WARN", "WARNING").replace("WARNINGING", "WARNING")
    return JsonLine(
        texts=_bounded(texts),
        exception=_bounded(list(_lines(found))),
        # Python's own name of a process that nobody has named, such as the API server's.
        process=None if process == "MainProcess" else process,
        pid=next((pid for key in _PIDS if type(pid := _part(found, key)) is int), None),
        level=level if _LEVEL.fullmatch(level) else None,
        logger=_first(found, _LOGGERS),
    )


def _part(found: Mapping[str, Any], key: str) -> object:
    """Return a value by its key; of ``process.pid`` also that of an object within, as Elastic's schema has it."""
    outer, _, inner = key.partition(".")
    within = found.get(outer) if inner else None
    return within.get(inner) if isinstance(within, dict) else found.get(key)


def _first(found: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    values = (_part(found, key) for key in keys)
    return next((value for value in values if isinstance(value, str) and _NAME.fullmatch(value)), None)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    for key in _EXCEPTIONS:
        value = _part(found, key)
        if isinstance(value, str):
            yield from value.split("\n")
        elif isinstance(value, list):
            yield from (line for line in value if isinstance(line, str))
