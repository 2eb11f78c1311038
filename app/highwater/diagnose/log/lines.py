"""The engine's log: its end, its lines without their prefixes, and the known messages in them.

A message counts only at the beginning of a log record or an exception, and of the API server's lines only in those
without a client's text: it logs prompts and errors with clients' words, and anybody can send `CUDA out of memory`. Only
lines with a known message are kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from highwater.diagnose.log.messages import KNOWN, KnownMessage, LogMessage
from highwater.errors import os_reason
from highwater.files.regular import NotARegularFileError, open_regular
from highwater.text.printable import plain

TAIL_BYTES = 256 * 1024
MAX_LINE_LENGTH = 400
# Of one message: the first ones, which are nearest to the cause, and the last one.
FIRST_LINES = 2
# What stands before a message: a container runtime's time and stream, and vLLM's logger: process, level, time, file
# (vllm/logging_utils/formatter.py; without the brackets up to 0.7). The chart's own logging has Python's name of the
# process in brackets, `MainProcess` for the API server: there the file shows it. torch's C++ libraries begin with
# `[rank0]:`.
_PREFIX = re.compile(
    r"""
    (?:\{"log":")?
    (?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)\s(?:stdout|stderr)\s[FP]\s)?
    (?:\((?P<process>[A-Za-z][^()]{0,60})\)\s+)?
    (?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+)?
    (?:\d\d-\d\d\s\d\d:\d\d:\d\d\s+)?
    (?:\[(?!MainProcess)(?P<named>[A-Za-z][^\[\]]{0,60}?)\spid=\d+\]\s+|\[MainProcess\spid=\d+\]\s+)?
    (?:\[?(?P<file>[\w/.-]+\.py):\d+\]\s*)?
    (?:\[rank\d+\]:\s*)?
    \s*
    """,
    re.VERBOSE,
)
_PIECE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)\s(?P<stream>stdout|stderr)\s(?P<tag>[FP])\s")
# A quote within the text is escaped, so that the first bare one ends it.
_JSON_PIECE = re.compile(r'\{"log":"(?:[^"\\]|\\(?!n")[^\n])*(?P<end>\\n)?","stream":"(?P<stream>stdout|stderr)"')
# vLLM up to 0.12 colours the process's name in files, too; others do where they are configured to.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# The API server's modules that log what a client sent (vllm/entrypoints, vllm/v1/engine), and its process's name.
_API_SERVER = ("APIServer", "ApiServer")
_API_SERVER_FILES = re.compile(
    r"(?:.*/)?(?:serving\w*|api_server|api_router|async_llm\w*|logger|launcher|protocol|chat_utils|\w*processor"
    r"|preprocess|renderer|server_utils|llm_engine|core_client)\.py"
)
# How an exit by a signal is written: by Python and vLLM as -9, by shells and container runtimes as 137 or in words.
_EXIT = re.compile(
    r"exit (?:code|status):? ?(?P<code>-?\d+)\b|proc\(s\): \{[^}]*?: (?P<failed>-\d+)|\bsignal (?P<signal>\d+)\b"
    r"|(?P<killed>\bKilled\b)"
)
_SHELLS_OFFSET, _SIGNALS, _SIGKILL = 128, 65, 9


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the log without colours; ``message`` is the part behind the logger's prefix, cut."""

    text: str
    message: str
    process: str | None = None
    level: str | None = None
    file: str | None = None

    @property
    def is_api_servers(self) -> bool:
        """True if the API server wrote it; uvicorn's own lines have a level and no file."""
        if self.process is not None:
            return self.process.startswith(_API_SERVER)
        return bool(_API_SERVER_FILES.fullmatch(self.file)) if self.file is not None else self.level is not None


def parse(text: str) -> LogLine:
    """Take a line's prefix off."""
    text = _COLOURS.sub("", text[: 4 * MAX_LINE_LENGTH])
    prefix = _PREFIX.match(text)
    if prefix is None:
        return LogLine(text, text[:MAX_LINE_LENGTH])
    message = text[prefix.end() : prefix.end() + MAX_LINE_LENGTH]
    return LogLine(text, message, prefix["process"] or prefix["named"], prefix["level"], prefix["file"])


class LogMatches:
    """The known messages among lines that come one after another."""

    def __init__(self) -> None:
        self._seen: dict[str, LogMessage] = {}

    def add(self, known: KnownMessage | None, line: LogLine) -> None:
        """Count a line with a known message; ``None``: a line without one."""
        if known is None:
            return
        text = plain(line.text, MAX_LINE_LENGTH)
        new = LogMessage(
            name=known.name, title=known.title, meaning=known.meaning, count=0, lines=(), advice=known.advice
        )
        seen = self._seen.get(known.name, new)
        self._seen[known.name] = replace(seen, count=seen.count + 1, lines=(*seen.lines[:FIRST_LINES], text))

    def messages(self) -> tuple[LogMessage, ...]:
        """Return what was found, causes before consequences."""
        return _in_order(self._seen)


def _in_order(messages: Mapping[str, LogMessage]) -> tuple[LogMessage, ...]:
    return tuple(messages[known.name] for known in KNOWN if known.name in messages)


class LogPosition(NamedTuple):
    """A place in a log: the file as the file system identifies it, and the offset into it."""

    device: int
    inode: int
    offset: int


def position_of_end(path: Path) -> LogPosition | None:
    """Return where the log ends now; ``None`` where it does not exist."""
    try:
        return end_of(path)
    except OSError:
        return None


def end_of(log: Path | BinaryIO) -> LogPosition:
    """Return where a log ends now, by its path or as an open file."""
    status = log.stat() if isinstance(log, Path) else os.fstat(log.fileno())
    return LogPosition(status.st_dev, status.st_ino, status.st_size)


def read_from(file: BinaryIO, offset: int, most: int, until: LogPosition | None = None) -> tuple[bytes, bool]:
    """Return what an open log holds from an offset on; of more than ``most`` bytes the end, and True.

    The end begins with a whole line. What stands behind ``until`` is left out.
    """
    end = (end_of(file) if until is None else until).offset
    start = max(offset, end - most)
    file.seek(start)
    content = file.read(most if until is None else max(end - start, 0))
    is_cut = start > offset
    return content.partition(b"\n")[2] if is_cut else content, is_cut


def read_tail(
    path: Path, since: LogPosition | None = None, until: LogPosition | None = None
) -> tuple[list[str], str | None]:
    """Return the last lines of a log, and the problem in one sentence if there is one.

    Links are followed, since that is how container runtimes name their logs. What stands before ``since`` is left out,
    where the log is still the same file. Of a log that is another file than at ``until``, or was cut off since, every
    line came later: there are none.
    """
    try:
        with open_log(path) as file:
            end = end_of(file)
            is_same = since is not None and end[:2] == since[:2] and since.offset <= end.offset
            start = since.offset if since is not None and is_same else 0
            if until is not None and (end[:2] != until[:2] or end.offset < until.offset):
                return [], None
            content, is_cut = read_from(file, start, TAIL_BYTES, until)
    except NotARegularFileError:
        return [], f"engine_log: {path} is not a file"
    except OSError as exc:
        return [], f"engine_log: {path} cannot be read: {os_reason(exc)}"
    return WholeLines(is_cut=is_cut).of(content), None


class WholeLines:
    """Leaves out the continuations of lines that a container runtime cut into pieces: containerd and Docker at 16 KiB.

    A continuation may begin with anything that a client sent.

    Args:
        is_cut: The log's beginning is not known: the first line of each stream may be such a piece.
    """

    def __init__(self, *, is_cut: bool = False) -> None:
        self._goes_on = dict.fromkeys(("stdout", "stderr"), is_cut)

    def of(self, content: bytes) -> list[str]:
        """Return the lines of the next bytes, without pieces that continue another."""
        lines = content.decode("utf-8", "replace").split("\n") if content else []
        return [line for line in lines if not self._is_piece(line)]

    def _is_piece(self, line: str) -> bool:
        if (piece := _PIECE.match(line)) is not None:
            stream, is_partial = piece["stream"], piece["tag"] == "P"
        elif (piece := _JSON_PIECE.match(line)) is not None:
            stream, is_partial = piece["stream"], not piece["end"]
        else:
            return False
        was, self._goes_on[stream] = self._goes_on[stream], is_partial
        return was


def open_log(path: Path) -> BinaryIO:
    """Open a log for reading.

    Raises:
        OSError: It cannot be opened; ``NotARegularFileError``: it is no file.
    """
    return os.fdopen(open_regular(path, follows_link=True), "rb")


class RecognizedLine(NamedTuple):
    """A line as it stands in the log, without its prefix, and the known message that it has."""

    text: str
    line: LogLine
    known: KnownMessage | None


def recognized(lines: Iterable[str]) -> list[RecognizedLine]:
    """Return the lines of a log with the known message of each, in one pass."""
    return [RecognizedLine(text, line := parse(text), known_message(line)) for text in lines]


def messages_in(lines: Iterable[RecognizedLine]) -> tuple[LogMessage, ...]:
    """Return the known messages among the lines, causes before consequences."""
    matches = LogMatches()
    for _, line, known in lines:
        matches.add(known, line)
    return matches.messages()


def match(lines: Iterable[str]) -> tuple[LogMessage, ...]:
    """Return the same of lines that are read for nothing else."""
    return messages_in(recognized(lines))


def merged(before: tuple[LogMessage, ...], after: tuple[LogMessage, ...]) -> tuple[LogMessage, ...]:
    """Return the messages known before, and those that came since; causes before consequences."""
    return _in_order({message.name: message for message in (*after, *before)})


def ended_by_signal(messages: Iterable[LogMessage]) -> int | None:
    """Return the signal that ended a process, where a line says that; ``None`` where none does."""
    for message in messages:
        for line in message.lines:
            found = _EXIT.search(line)
            if found is None:
                continue
            if found["killed"]:
                return _SIGKILL
            number = int(found["code"] or found["failed"] or found["signal"])
            number = -number if number < 0 else number - (0 if found["signal"] else _SHELLS_OFFSET)
            if 0 < number < _SIGNALS:
                return number
    return None


def known_message(line: LogLine) -> KnownMessage | None:
    """Return the known message that a line has."""
    is_api_servers = line.is_api_servers
    for known in KNOWN:
        if (known.by_api_server or not is_api_servers) and known.pattern.match(line.message):
            return known
    return None
