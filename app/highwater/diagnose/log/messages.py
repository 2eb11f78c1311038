"""The log messages that engines are known to write (messages.toml), and which of the log's lines have one.

A message counts only at the beginning of a log record or an exception, and of the API server's lines only in those
without a client's text: it logs prompts and errors with clients' words, and anybody can send `CUDA out of memory`. Only
lines with a known message are kept.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from highwater.diagnose.finding import Advice, advices
from highwater.diagnose.log.reader import Reader
from highwater.diagnose.log.record import LogLine

WhichMemory: TypeAlias = Literal["device", "host", "shm", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMessage:
    """A row of messages.toml, whose head says what each field means."""

    name: str
    pattern: re.Pattern[str]
    title: str
    meaning: str
    advice: tuple[Advice, ...]
    source: str
    by_api_server: bool = False
    part: Literal["cause", "end", "wait", "event"] = "cause"
    at_start: bool = False
    of_memory: WhichMemory | None = None


# Words that may be of a shortage, and such words of none: options, what libraries write of their work or at any end.
_MAY_BE_MEMORY: Final = re.compile(r"(?i)memor|alloc|resource|no space|out of|\boom")
_IS_NO_SHORTAGE: Final = re.compile(
    r"(?i)(?:illegal|invalid) memory access|memory access fault|\bout of (?:range|bounds)|\bresource_tracker\b.*"
    r"|\bleak resources\b|gpu.memory.utilization|\w*ALLOC_CONF|\bNCCL INFO .*|^(?:Extension modules:|frame #\d+:).*"
)


def may_be_of_memory(text: str) -> bool:
    """Return whether words that nobody knows may say that memory was short."""
    return _MAY_BE_MEMORY.search(_IS_NO_SHORTAGE.sub("", text)) is not None


def _compiled(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[KnownMessage]:
    prefixes = rows["prefixes"]
    for name, row in rows.items():
        if name != "prefixes":
            pattern = re.sub(r"<(\w+)>", lambda found: prefixes[found[1]], row["pattern"])
            compiled = re.compile(pattern, re.IGNORECASE)
            yield KnownMessage(name=name, **{**row, "pattern": compiled, "advice": advices(row["advice"])})


# Causes before consequences; a line belongs to the first that fits it.
KNOWN: Final = tuple(_compiled(tomllib.loads(Path(__file__).with_name("messages.toml").read_text("utf-8"))))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMessage:
    """A known message in the engine's log: its row in messages.toml, how many lines have it, and some of them."""

    name: str
    title: str
    meaning: str
    count: int
    lines: tuple[str, ...]
    advice: tuple[Advice, ...] = ()


# --- lines ---

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
    is_api_servers = line.is_api_servers
    for message in (quoted(line), line.message):
        if message is None:
            continue
        said = message.lstrip(_INDENTS)
        for known in KNOWN:
            if (known.by_api_server or not is_api_servers) and known.pattern.match(said):
                return known
    return None
