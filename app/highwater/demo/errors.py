"""The failures of the demonstration's engine: one exception with the reason and the end of the failed program's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from highwater.errors import HighwaterError

if TYPE_CHECKING:
    from pathlib import Path

TAIL_LINES = 20


class DemoError(HighwaterError):
    """The demonstration's engine could not be installed, started or called.

    `str()` gives the reason, and the log's path and last lines if there is a log.
    """

    @classmethod
    def with_log(cls, reason: str, log_path: Path, *, lines: int = TAIL_LINES) -> Self:
        tail = last_lines(log_path, lines) or "(the log is empty)"
        return cls(f"{reason}\nThe log is {log_path}; its last lines are:\n{tail}")


def last_lines(path: Path, count: int) -> str:
    """Return the last `count` lines of a text file, or an empty string if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])
