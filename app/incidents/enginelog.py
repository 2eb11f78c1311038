"""The end of the engine's log, held to the known messages. Reads, and never interprets: a line is text.

Only lines that hold a known message go on from here, and none that tells of a request: a prompt may stand in those, and
whatever a client chose to write into it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from app.incidents.advice import KNOWN, KnownMessage
from app.incidents.incident import LogMessage
from app.incidents.plain import plain

TAIL_BYTES = 256 * 1024
LINE_MOST = 400
# Of one message: the first ones, which are nearest to the cause, and the last one.
FIRST_LINES = 2
# How much of a long line is shown before what was known in it.
LEAD = 120
# How vLLM begins a line about a request, with --enable-log-requests (vllm/entrypoints/logger.py).
_OF_A_REQUEST = ("received request ", " details: prompt")


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
        lowered = line.lower()
        if any(words in lowered for words in _OF_A_REQUEST):
            continue
        known = _known(lowered)
        if known is not None:
            _note(seen.setdefault(known.name, _Seen()), _cut(line, lowered, known))
    return tuple(_message(known, seen[known.name]) for known in KNOWN if known.name in seen)


def merged(before: tuple[LogMessage, ...], after: tuple[LogMessage, ...]) -> tuple[LogMessage, ...]:
    """What was known before, and the messages that came since; causes before consequences."""
    both = {message.name: message for message in (*after, *before)}
    return tuple(both[known.name] for known in KNOWN if known.name in both)


def _known(lowered: str) -> KnownMessage | None:
    for known in KNOWN:
        if any(all(mark in lowered for mark in group) for group in known.marks):
            return known
    return None


def _cut(line: str, lowered: str, known: KnownMessage) -> str:
    places = [lowered.find(mark) for group in known.marks for mark in group]
    start = max(min(place for place in places if place >= 0) - LEAD, 0)
    return ("…" if start else "") + plain(line[start:], LINE_MOST)


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
