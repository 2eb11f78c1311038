"""The failures of the demonstration's programs, and their signs of life, both with the end of the program's log."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from highwater.errors import HighwaterError
from highwater.text.printable import plain
from highwater.units import span_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TAIL_LINES = 20
SIGN_SECONDS = 8.0
_SIGN_LENGTH = 120


class DemoError(HighwaterError):
    """The demonstration's engine could not be installed, started or called.

    `str()` gives the reason, and the log's path and last lines if there is a log.
    """

    @classmethod
    def with_log(cls, reason: str, log_path: Path, *, lines: int = TAIL_LINES) -> Self:
        tail = last_lines(log_path, lines) or "(the log is empty)"
        return cls(f"{reason}\nThe log is {log_path}; its last lines are:\n{tail}")


class NotInTime(DemoError):
    """A server did not answer in time, and was ended."""


@contextmanager
def signs_of_life(what: str, log_path: Path, announce: Callable[[str], None]) -> Iterator[None]:
    """Announce, every few seconds until it is left, that `what` goes on, and the last line of its log."""
    is_over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not is_over.wait(SIGN_SECONDS):
            last = plain(last_lines(log_path, 1), _SIGN_LENGTH)
            announce(f"  {what} for {span_text(time.monotonic() - began)}: {last or 'nothing in its log yet'}")

    teller = threading.Thread(target=tell, name="signs of life", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


def last_lines(path: Path, count: int) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])
