"""The engine's log, compared with the known messages: the end of it, and what is added while nothing answers.

A message counts only where a logger or an exception begins it, and of the API server's lines only those that no client
has a part in: it logs prompts and errors with clients' words in them, and anybody can send `CUDA out of memory`. Only
lines with a known message go on from here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from highwater.errors import os_reason
from highwater.files.regular import NotARegularFileError, open_regular
from highwater.incidents.incident import LogMessage
from highwater.incidents.messages import KNOWN, KnownMessage
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
    """A line of the log without its logger's prefix.

    Attributes:
        text: The whole line, without colours.
        message: What stands behind the prefix, as far as anything is compared with it.
        process: The process's name in the prefix.
        level: The logger's level.
        file: The module's file that logged it.
    """

    text: str
    message: str
    process: str | None
    level: str | None
    file: str | None

    @property
    def is_api_servers(self) -> bool:
        """Return whether the API server wrote it; uvicorn's own lines have a level and no file."""
        if self.process is not None:
            return self.process.startswith(_API_SERVER)
        return bool(_API_SERVER_FILES.fullmatch(self.file)) if self.file is not None else self.level is not None


def parse(text: str) -> LogLine:
    """Take a line's prefix off."""
    text = _COLOURS.sub("", text[: 4 * MAX_LINE_LENGTH])
    prefix = _PREFIX.match(text)
    if prefix is None:
        return LogLine(text, text[:MAX_LINE_LENGTH], None, None, None)
    message = text[prefix.end() : prefix.end() + MAX_LINE_LENGTH]
    return LogLine(text, message, prefix["process"] or prefix["named"], prefix["level"], prefix["file"])


@dataclass(slots=True)
class _Occurrences:
    count: int = 0
    first: list[str] = field(default_factory=list)
    last: str | None = None


class LogMatches:
    """The known messages among lines that come one after another."""

    def __init__(self) -> None:
        self._seen: dict[str, _Occurrences] = {}

    def add(self, line: LogLine) -> KnownMessage | None:
        """Note a line, and return the message that it is."""
        known = known_message(line)
        if known is not None:
            _note(self._seen.setdefault(known.name, _Occurrences()), plain(line.text, MAX_LINE_LENGTH))
        return known

    def messages(self) -> tuple[LogMessage, ...]:
        """Return what was found, causes before consequences."""
        return tuple(_message(known, self._seen[known.name]) for known in KNOWN if known.name in self._seen)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in a log: the file as the file system knows it, and how far into it."""

    device: int
    inode: int
    offset: int


def position_of_end(path: Path) -> LogPosition | None:
    """Return where the log ends now; ``None`` where it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return LogPosition(status.st_dev, status.st_ino, status.st_size)


def read_tail(path: Path, since: LogPosition | None = None) -> tuple[list[str], str | None]:
    """The last lines of a log; links are followed, since that is how container runtimes name their logs.

    Args:
        path: The log.
        since: Leave out what stands before this place, where the log is still the same file.

    Returns:
        The lines, and what is wrong in one sentence: ``None`` where nothing is.
    """
    try:
        with open_log(path) as file:
            status = os.fstat(file.fileno())
            start = max(status.st_size - TAIL_BYTES, 0)
            is_cut = start > 0
            is_same = since is not None and (status.st_dev, status.st_ino) == (since.device, since.inode)
            if since is not None and is_same and start <= since.offset <= status.st_size:
                start, is_cut = since.offset, False
            file.seek(start)
            content = file.read(TAIL_BYTES)
    except NotALogError as exc:
        return [], str(exc)
    except OSError as exc:
        return [], f"engine_log: {path} cannot be read: {os_reason(exc)}"
    lines = content.decode("utf-8", "replace").split("\n")
    # The first is the end of a line whose beginning was left out.
    return WholeLines(is_cut=is_cut).of(lines[1:] if is_cut else lines), None


class WholeLines:
    """Leaves out what continues a line that a container runtime cut into pieces, as containerd and Docker do at 16 KiB.

    What stands at a piece's beginning may be anything that a client sent.

    Args:
        is_cut: The log's beginning is not known: the first line of each stream may be such a piece.
    """

    def __init__(self, *, is_cut: bool = False) -> None:
        self._goes_on = dict.fromkeys(("stdout", "stderr"), is_cut)

    def of(self, lines: Iterable[str]) -> list[str]:
        """The next lines, without pieces that continue another."""
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


class NotALogError(Exception):
    """The path names something else than a file."""


def open_log(path: Path) -> BinaryIO:
    """Open a log for reading.

    Raises:
        NotALogError: It is no file.
        OSError: It cannot be opened.
    """
    try:
        return os.fdopen(open_regular(path, follows_link=True), "rb")
    except NotARegularFileError as exc:
        raise NotALogError(f"engine_log: {path} is not a file") from exc


def match(lines: Iterable[str]) -> tuple[LogMessage, ...]:
    """The known messages among the lines, causes before consequences."""
    matches = LogMatches()
    for line in lines:
        matches.add(parse(line))
    return matches.messages()


def merged(before: tuple[LogMessage, ...], after: tuple[LogMessage, ...]) -> tuple[LogMessage, ...]:
    """Return what was known before, and the messages that came since; causes before consequences."""
    both = {message.name: message for message in (*after, *before)}
    return tuple(both[known.name] for known in KNOWN if known.name in both)


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
    """Return the message that a line is."""
    is_api_servers = line.is_api_servers
    for known in KNOWN:
        if (known.by_api_server or not is_api_servers) and known.pattern.match(line.message):
            return known
    return None


def _note(seen: _Occurrences, line: str) -> None:
    seen.count += 1
    if len(seen.first) < FIRST_LINES:
        seen.first.append(line)
    else:
        seen.last = line


def _message(known: KnownMessage, seen: _Occurrences) -> LogMessage:
    return LogMessage(
        name=known.name,
        title=known.title,
        meaning=known.meaning,
        count=seen.count,
        lines=tuple(seen.first if seen.last is None else [*seen.first, seen.last]),
        advice=known.advice,
    )
