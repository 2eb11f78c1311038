"""The end of the engine's log, compared with the known messages.

A message counts only where a logger or an exception begins it, and of the API server's lines only those that no client
has a part in: it logs prompts and errors with clients' words in them, and anybody can send `CUDA out of memory`. Only
lines with a known message go on from here.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from app.incidents.incident import LogMessage
from app.incidents.messages import KNOWN, KnownMessage
from app.incidents.plain import plain

TAIL_BYTES = 256 * 1024
LINE_MOST = 400
# Of one message: the first ones, which are nearest to the cause, and the last one.
FIRST_LINES = 2
# What stands before a message: a container runtime's time and stream, and vLLM's logger: process, level, time, file
# (vllm/logging_utils/formatter.py; without the brackets up to 0.7). torch's C++ libraries begin with `[rank0]:`.
_PREFIX = re.compile(
    r"""
    (?:\{"log":")?
    (?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)\s(?:stdout|stderr)\s[FP]\s)?
    (?:\((?P<process>[A-Za-z][^()]{0,60})\)\s+)?
    (?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+)?
    (?:\d\d-\d\d\s\d\d:\d\d:\d\d\s+)?
    (?:\[?(?P<file>[\w/.-]+\.py):\d+\]\s*)?
    (?:\[rank\d+\]:\s*)?
    \s*
    """,
    re.VERBOSE,
)
# The API server's modules that log what a client sent (vllm/entrypoints, vllm/v1/engine), and its process's name.
_API_SERVER = "APIServer"
_API_SERVER_FILES = re.compile(
    r"(?:.*/)?(?:serving\w*|api_server|api_router|async_llm\w*|logger|launcher|protocol|chat_utils|\w*processor"
    r"|preprocess|renderer|server_utils|llm_engine|core_client)\.py"
)


@dataclass(slots=True)
class _Seen:
    count: int = 0
    first: list[str] = field(default_factory=list)
    last: str | None = None


def read_tail(path: Path) -> tuple[list[str], str | None]:
    """The last lines of a log; links are followed, since that is how container runtimes name their logs.

    Returns:
        The lines, and what is wrong in one sentence: ``None`` where nothing is.
    """
    try:
        # A named pipe would wait for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return [], f"engine_log: {path} is not a file"
            start = max(status.st_size - TAIL_BYTES, 0)
            file.seek(start)
            content = file.read(TAIL_BYTES)
    except OSError as exc:
        return [], f"engine_log: {path} cannot be read: {(exc.strerror or str(exc)).lower()}"
    lines = content.decode("utf-8", "replace").split("\n")
    # The first is the end of a line whose beginning was left out.
    return (lines[1:] if start and len(lines) > 1 else lines), None


def match(lines: Iterable[str]) -> tuple[LogMessage, ...]:
    """The known messages among the lines, causes before consequences."""
    seen: dict[str, _Seen] = {}
    for line in lines:
        known = _known(line)
        if known is not None:
            _note(seen.setdefault(known.name, _Seen()), plain(line, LINE_MOST))
    return tuple(_message(known, seen[known.name]) for known in KNOWN if known.name in seen)


def merged(before: tuple[LogMessage, ...], after: tuple[LogMessage, ...]) -> tuple[LogMessage, ...]:
    """What was known before, and the messages that came since; causes before consequences."""
    both = {message.name: message for message in (*after, *before)}
    return tuple(both[known.name] for known in KNOWN if known.name in both)


def _known(line: str) -> KnownMessage | None:
    """Return the message that a line is."""
    prefix = _PREFIX.match(line)
    start = prefix.end() if prefix else 0
    message = line[start : start + LINE_MOST]
    is_api_servers = prefix is not None and _is_api_servers(prefix)
    for known in KNOWN:
        if (known.by_api_server or not is_api_servers) and known.begins(message):
            return known
    return None


def _is_api_servers(prefix: re.Match[str]) -> bool:
    """Say whether a line is the API server's; uvicorn's own lines have a level and no file."""
    process, file = prefix["process"], prefix["file"]
    if process is not None:
        return process.startswith(_API_SERVER)
    return bool(_API_SERVER_FILES.fullmatch(file)) if file is not None else prefix["level"] is not None


def _note(seen: _Seen, line: str) -> None:
    seen.count += 1
    if len(seen.first) < FIRST_LINES:
        seen.first.append(line)
    else:
        seen.last = line


def _message(known: KnownMessage, seen: _Seen) -> LogMessage:
    return LogMessage(
        name=known.name,
        title=known.title,
        meaning=known.meaning,
        count=seen.count,
        lines=tuple(seen.first if seen.last is None else [*seen.first, seen.last]),
        advice=known.advice,
    )
