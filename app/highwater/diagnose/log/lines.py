"""The known messages among the lines of the engine's log.

A message counts only at the beginning of a log record or an exception, and of the API server's lines only in those
without a client's text: it logs prompts and errors with clients' words, and anybody can send `CUDA out of memory`. Only
lines with a known message are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from highwater.diagnose.log.messages import KNOWN, KnownMessage, LogMessage
from highwater.diagnose.log.reader import Reader
from highwater.diagnose.log.record import LogLine

# How an exit by a signal is written: by Python and vLLM as -9, by shells and container runtimes as 137 or in words.
_EXIT = re.compile(
    r"exit (?:code|status):? ?(?P<code>-?\d+)\b|proc\(s\): \{[^}]*?: (?P<failed>-\d+)|\bsignal (?P<signal>\d+)\b"
    r"|(?P<killed>\bKilled\b)"
)
# Of a traceback's lines; those of a group of exceptions have a bar.
_INDENTS: Final = " \t|+"
_SHELLS_OFFSET, _SIGNALS, _SIGKILL = 128, 65, 9

# What a process writes of another one's exception: vLLM 0.12 to 0.33, v1/executor/multiproc_executor.py (0.32.0:443);
# Ray's name of it, python/ray/exceptions.py.
_QUOTES: Final = re.compile(
    r"(?:[\w.]{0,80}(?:Error|Exception): )?Worker failed with error:? ['\"]?"
    r"|[\w.]{0,40}RayTaskError\((?=[A-Z]\w{0,60}\): )"
)


def quoted(line: LogLine) -> str | None:
    found = None if line.is_api_servers else _QUOTES.match(line.message)
    if found is None:
        return None
    rest = line.message[found.end() :]
    return rest.replace("): ", ": ", 1) if found[0].endswith("(") else rest


def in_order(messages: Mapping[str, LogMessage]) -> tuple[LogMessage, ...]:
    """Return messages by their names, causes before consequences."""
    return tuple(messages[known.name] for known in KNOWN if known.name in messages)


class RecognizedLine(NamedTuple):
    line: LogLine
    known: KnownMessage | None


# A line of the log as it stands there, and the lines in it: JSON may hold several.
LogText: TypeAlias = tuple[str, list[RecognizedLine]]


def recognized(texts: Iterable[str], reader: Reader) -> Iterator[LogText]:
    for text, lines in reader.read(texts):
        yield text, [RecognizedLine(line, None if line.is_clients else known_message(line)) for line in lines]


def merged(before: tuple[LogMessage, ...], after: tuple[LogMessage, ...]) -> tuple[LogMessage, ...]:
    return in_order({message.name: message for message in (*after, *before)})


def ended_by_signal(messages: Iterable[LogMessage]) -> int | None:
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
    """Return the known message that a line has: what it quotes says more than that it does."""
    inner = quoted(line)
    return _known(inner, line) or _known(line.message, line) if inner is not None else _known(line.message, line)


def _known(message: str, line: LogLine) -> KnownMessage | None:
    message, is_api_servers = message.lstrip(_INDENTS), line.is_api_servers
    for known in KNOWN:
        if (known.by_api_server or not is_api_servers) and known.pattern.match(message):
            return known
    return None
