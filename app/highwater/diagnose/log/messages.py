"""Log messages that engines are known to write: how each begins, what it means, what to change (messages.toml)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from highwater.diagnose.finding import Advice, advices

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


def _known(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[KnownMessage]:
    prefixes = rows["prefixes"]
    for name, row in rows.items():
        if name != "prefixes":
            pattern = re.sub(r"<(\w+)>", lambda found: prefixes[found[1]], row["pattern"])
            compiled = re.compile(pattern, re.IGNORECASE)
            yield KnownMessage(name=name, **{**row, "pattern": compiled, "advice": advices(row["advice"])})


# Causes before consequences; a line belongs to the first that fits it.
KNOWN: Final = tuple(_known(tomllib.loads(Path(__file__).with_name("messages.toml").read_text("utf-8"))))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMessage:
    """A known message in the engine's log: its row in messages.toml, how many lines have it, and some of them."""

    name: str
    title: str
    meaning: str
    count: int
    lines: tuple[str, ...]
    advice: tuple[Advice, ...] = ()
