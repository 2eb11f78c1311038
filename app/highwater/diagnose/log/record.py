"""One line of the engine's log: who wrote it, what it says, and when.

vLLM's record has an unmistakable form: perhaps its processes in parentheses, a level, a time, a file and a line. It is
found behind any prefix. What stands behind it may be a client's words, so that the first one in a line counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from json import JSONDecoder
from typing import Any, Final

from highwater.model.units import span_text

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
_LEVEL_NAMES: Final = re.compile(r"DEBUG|INFO|WARNING|ERROR|CRITICAL")
# The digits of a number too long for a process are not read: Python refuses to, or takes long.
_PID_DIGITS: Final = 9
_DECODER: Final = JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= _PID_DIGITS else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLine:
    """The texts of an object."""

    texts: tuple[str, ...]
    exception: tuple[str, ...] = ()  # the lines of a traceback beside them
    process: str | None = None
    pid: int | None = None
    level: str | None = None
    # The logger's name, where a logger wrote it: its text is a message, and no line of another process.
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
        value = found.get(key)
        if isinstance(value, list) and all(isinstance(byte, int) and 0 <= byte <= 255 for byte in value):  # noqa: PLR2004 - bytes
            value = bytes(value).decode("utf-8", "replace")  # journald writes lines with colours as a list of bytes
        if isinstance(value, str):
            return _with_texts(found, value.split("\n"))
        if isinstance(value, dict) and depth and (inner := _line_of(value, depth - 1)) is not None:
            return inner
    return _with_texts(found, ()) if any(_lines(found)) else None


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
        level=level if _LEVEL_NAMES.fullmatch(level) else None,
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


MAX_LINE_LENGTH: Final = 400
"""Of a line that is shown."""
MAX_MESSAGE_LENGTH: Final = 4000
"""Of one that is read: PyTorch's figures stand behind the beginning of its message."""
_READ: Final = 2 * MAX_MESSAGE_LENGTH
MAX_HEAD_LENGTH: Final = 300

# vLLM up to 0.12 colours the process's name in files, too; others do where they are configured to. rsyslog writes an
# escape character as #033.
_COLOURS: Final = re.compile(r"(?:\x1b|#033|\^\[)\[[0-9;]{0,30}m|\ufeff")
_TIME: Final = r"(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
PARTS: Final = r"(?P<parts>(?:\([A-Za-z][^()]{0,100}\)\s){0,4})"
_LEVEL: Final = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_FILE: Final = r"\[?(?P<file>[\w/.-]{1,200}\.py):\d{1,7}\]"
# The chart's own logging has Python's name of the process in brackets, `MainProcess` for the API server: there the file
# shows it.
_NAMED: Final = r"(?:\[(?:MainProcess|(?P<named>[A-Za-z][^\[\]]{0,60}?))\spid=(?P<number>\d{1,9})\]\s{1,4})?"
# vllm/logging_utils/formatter.py and logger.py, 0.8 to 0.33; up to 0.7 the file lacks its first bracket. Ray names its
# worker in front of it.
RECORD: Final = re.compile(rf"{PARTS}{_LEVEL}\s{{1,4}}{_TIME}\s{{1,4}}{_NAMED}{_FILE} ?")
# The same with parts that are missing, at the beginning only: uvicorn's lines have a level, a raw traceback has a
# process or nothing. torch's C++ libraries begin with `[rank0]:[E329 02:25:07.780240321 ProcessGroupNCCL.cpp:683]`.
_LOOSE: Final = re.compile(
    rf"{PARTS}(?:{_LEVEL}:?\s{{1,12}})?(?:{_TIME}\s{{1,4}})?{_NAMED}(?:{_FILE} ?)?(?:\[rank\d{{1,5}}\]: ?)?"
    r"(?:\[[A-Z]\d{3,4} [\d:.]{8,20} \w{1,40}\.\w{1,4}:\d{1,6}\] )?"
)
# Between the head of a traceback and its exception, also in a group of them; rich puts its texts further in.
_WITHIN: Final = re.compile(r"\s*$|[ \t][ \t|+]{1,11}\S")
_PART: Final = re.compile(r"\(([A-Za-z][^()]{0,100})\)")
_PID: Final = re.compile(r"\bpid=(\d{1,9})\b")
_REPEATED: Final = re.compile(r"\[repeated (\d{1,6})x across cluster\](?:\s\(Ray dedup.{0,300})?\s*$")

# The API server's process, and its modules that log what a client sent (vllm/entrypoints, vllm/v1/engine). Ray Serve's
# replicas are API servers that relay their engine's lines.
API_SERVER: Final = "APIServer"
_API_SERVER: Final = re.compile(r"A(?:PI|pi)Server")
_SERVER: Final = re.compile(r"A(?:PI|pi)Server|ServeReplica|ProxyActor|HTTPProxy")
_IN_HEAD: Final = re.compile(r"\([A-Za-z][^()]{0,60}\bpid=\d")
_API_SERVER_FILES: Final = re.compile(
    r"(?:.*/)?(?:serving\w*|api_server|api_router|async_llm\w*|logger|request_logger|launcher|protocol|chat_utils"
    r"|\w*processor|preprocess|renderer|server_utils|llm_engine|core_client|startup)\.py"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    text: str  # the line as it is shown, without colours and what a collector put before it
    message: str  # the part behind the logger's prefix
    process: str | None = None  # as the log names it, such as `Worker_TP0 pid=1037`
    pid: int | None = None
    level: str | None = None
    file: str | None = None  # the module that wrote it
    # It has a form of vLLM's or uvicorn's; other lines say by their beginning alone what they are.
    is_form: bool = False
    head: str = ""  # what stands before the message in a record: vLLM writes it before each of the record's lines
    opening: str | None = None  # the message of the record's first line, where this is another one of it
    is_clients: bool = False  # it may be a client's: another line of a record, and in no traceback
    count: int = 1  # of lines that Ray says it left out, too

    @property
    def is_api_servers(self) -> bool:
        """True if the API server wrote it; uvicorn's own lines have a level and no file."""
        if self.file is not None and _API_SERVER_FILES.fullmatch(self.file):
            return True
        if self.process is not None:
            return _SERVER.match(self.process) is not None
        return self.file is None and self.level is not None

    @property
    def is_loose(self) -> bool:
        """True if no form tells what it is; above INFO uvicorn's lines have no client's words."""
        is_servers = self.is_api_servers and (self.process is not None or self.level in {"DEBUG", "INFO"})
        return self.file is None and not is_servers and _WITHIN.match(self.message) is None


def is_api_servers_head(head: str) -> bool:
    """Return whether the API server's name stands before a record: its own lines may go on with anything."""
    return any(map(_API_SERVER.match, _PART.findall(head)))


def uncoloured(text: str) -> str:
    return _COLOURS.sub("", text[:_READ]).rstrip("\r\n")


def record_of(text: str, found: re.Match[str] | None, end: str) -> LogLine:
    """Return a line whose record was found behind a head; ``None``: what stands at its beginning is read.

    ``end`` is the uncut line's.
    """
    read = found or _LOOSE.match(text)
    if read is None:  # it fits any text
        return LogLine(text=text, message=text)
    start = read.start()
    named = f"({read['named']} pid={read['number']})" if read["named"] else ""
    process, pid = writer(text[:start] + read["parts"] + named)
    repeated = _REPEATED.search(end)
    return LogLine(
        text=text[start:],
        message=text[read.end() : read.end() + MAX_MESSAGE_LENGTH],
        process=process,
        pid=pid,
        level=read["level"],
        file=read["file"],
        is_form=any((read["file"], read["level"], pid)),
        head=text[start : read.end()] if read["file"] else "",
        count=1 + (int(repeated[1]) if repeated else 0),
    )


def writer(before: str) -> tuple[str | None, int | None]:
    """Return the process that wrote what stands behind this: the last that it names, but the API server of any.

    The API server relays no other process's lines, and its own may go on with anything.
    """
    parts = _PART.findall(before)
    process = next(filter(_API_SERVER.match, parts), parts[-1] if parts else None)
    pid = _PID.search(process or "")
    return process, int(pid[1]) if pid else None


# --- what stands before a record ---

# A quote that is open, an exception, uvicorn's own line: what follows there are a client's words.
_NO_HEAD: Final = re.compile(
    r"(?:\w+Error|\w*Exception|\w+Warning)\b\s{0,4}[:(]|\b(?:INFO|WARNING|ERROR|CRITICAL|DEBUG|TRACE):\s{2}"
)
_PAIRS: Final = ("()", "[]", "{}", '""', "''", "``")
_CLOCK: Final = re.compile(r"\d\d:\d\d:\d\d\S*")
_DAY: Final = re.compile(r"\b\d{1,4}\s+$")
_WITHOUT_CLOCK, _AFTER_CLOCK = 1, 3
"""The words that a head may have: a name; a zone, a host and a service."""
_STREAM: Final = re.compile(r"std(?:out|err) [FP]\s*$")
_PROGRESS: Final = re.compile(r"\d%.*(?:it/s|s/it|B/s)[^\]]{0,40}\]\s*$")
_BRACKETS: Final = re.compile(r"\[[^\[\]]*\]")
_WORD: Final = re.compile(r"(?:^|(?<=[\s>:|\]]))(?!std(?:out|err)\b)[^\W\d_]+(?=[:|-]{0,2}(?:\s|$))")
_ALIKE: Final = (
    (re.compile(r"\d+"), r"\\d+"),
    (re.compile(r"std(?:out|err)"), "std(?:out|err)"),
    (re.compile(r"(?i)\b(?:debug|info|warn(?:ing)?|error|critical)\b"), r"\\w+"),
)


def may_be_head(head: str) -> bool:
    if len(head) > MAX_HEAD_LENGTH or _NO_HEAD.search(head):
        return False
    return all(
        head.count(pair[0]) == head.count(pair[1]) if pair[0] != pair[1] else head.count(pair[0]) % 2 == 0
        for pair in _PAIRS
    )


def is_clear_head(head: str) -> bool:
    """Return whether it can be nothing but a collector's: a time, a mark at its end, or a name.

    Words that nothing separates from what follows could be a sentence.
    """
    if _PROGRESS.search(head):
        return True
    head = _STREAM.sub("", head)
    clocks = list(_CLOCK.finditer(head))
    before, after = (head[: clocks[-1].start()], head[clocks[-1].end() :]) if clocks else ("", head)
    rest, words = _BRACKETS.sub("[]", after).split(), _words(after)
    most = _AFTER_CLOCK if clocks else _WITHOUT_CLOCK
    if _words(before) > 1 + (_DAY.search(before) is not None) or words > most or len(rest) > most + 2:
        return False
    return len(rest) <= 1 or not rest[-1][-1].isalnum() or words < len(rest) == 2  # noqa: PLR2004 - a pod and its container


def _words(text: str) -> int:
    return len(_WORD.findall(_BRACKETS.sub("[]", text)))


def shape(head: str) -> str:
    """Return what is alike in the heads of one collector: its tokens by their first and last characters."""
    return " ".join("".join("w" if end.isalnum() else end for end in (token[0], token[-1])) for token in head.split())


def head_pattern(head: str) -> re.Pattern[str]:
    """Return what fits the same head with other numbers, or its first tokens alone, up to a process's name.

    A user's VLLM_LOGGING_PREFIX stands before records only.
    """
    collectors = _IN_HEAD.split(head)[0]
    pattern, end = "", "" if collectors == head.rstrip() else r"(?:\s|$)"
    for token in reversed(collectors.split()):
        alike = re.escape(token)
        for this, instead in _ALIKE:
            alike = this.sub(instead, alike)
        pattern, end = f"{alike}{end}" + (f"(?:\\s*{pattern})?" if pattern else ""), r"(?:\s|$)"
    return re.compile(pattern)


# --- where and when it stands in the log ---

NEAR_SECONDS: Final = 60.0
NEAR_LINES: Final = 200
"""Before the log's end; the lines where it has no times. A traceback has fewer."""
# A collector's time at the beginning of a line, else vLLM's in its record: a client's words stand in neither. The year
# is not said: that of a leap year stands for any.
_STAMP: Final = re.compile(r"(?:\d{4}-|\b)(\d\d-\d\d[ T]\d\d:\d\d:\d\d)\b")
_OPENS: Final = re.compile(r'\{\s?"[@\w]{1,20}": ?"')
_ANY_YEAR, _YEAR = 2000, timedelta(days=366)


@dataclass(frozen=True, slots=True)
class Moment:
    """A line's place in a log: its number, and its time, or else the last one until then (``is_timed`` is false)."""

    number: int = 0
    time: datetime | None = None
    is_timed: bool = True

    def next(self, text: str, lines: Iterable[LogLine] = ()) -> Moment:
        opens = _OPENS.match(text)
        found = _STAMP.match(text, opens.end() if opens is not None else 0)
        for line in lines if found is None else ():
            if line.file is not None and found is None:
                found = _STAMP.search(line.text, 0, max(len(line.text) - len(line.message), 0))
        time = None
        with suppress(ValueError):  # no such day or hour
            time = None if found is None else datetime.fromisoformat(f"{_ANY_YEAR}-{found[1]}Z")
        return Moment(self.number + 1, time or self.time, time is not None)

    def settled(self, later: Moment) -> Moment:
        """Return it dated by the next line with a time, if it has none itself. An idle engine writes no lines."""
        return self if self.is_timed or not later.is_timed else Moment(self.number, later.time)

    def is_near(self, end: Moment) -> bool:
        """Return whether it is at most a minute before the end; where the log has no times, lines count."""
        gap = self._gap(end)
        return end.number - self.number < NEAR_LINES if gap is None else gap <= timedelta(seconds=NEAR_SECONDS)

    def is_old(self, end: Moment, within: float = NEAR_SECONDS) -> bool:
        gap = self._gap(end)
        return gap is not None and gap.total_seconds() > within

    def before(self, end: Moment) -> str:
        gap = self._gap(end)
        return f"{end.number - self.number:,} lines" if gap is None else span_text(gap.total_seconds())

    def _gap(self, end: Moment) -> timedelta | None:
        if self.time is None or end.time is None:
            return None
        gap = (end.time - self.time) % _YEAR
        return gap if gap < _YEAR / 2 else None
