"""The failures of the demonstration's engine, as one exception with the reason and the end of its log.

It refuses to guess at causes: it shows what the failed program itself said, and where the rest of it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from highwater.errors import HighwaterError

if TYPE_CHECKING:
    from pathlib import Path

TAIL_LINES = 20


class DemoError(HighwaterError):
    """The demonstration's engine could not be installed, started or asked.

    `str()` gives the reason, then the log's path and its last lines where there is a log.
    """

    @classmethod
    def with_log(cls, reason: str, log_path: Path, *, lines: int = TAIL_LINES) -> Self:
        """Build the error for a program that wrote to `log_path` and failed because of `reason`."""
        tail = last_lines(log_path, lines) or "(the log is empty)"
        return cls(f"{reason}\nThe log is {log_path}; its last lines are:\n{tail}")


def last_lines(path: Path, count: int) -> str:
    """Return the last `count` lines of a text file, or an empty string when there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])
