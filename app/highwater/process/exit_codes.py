"""The exit codes of every command: a name for each meaning, and the table of docs/terminal.md.

`highwater measure` ends with its command's own code where that failed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

OK: Final = 0
FAILED: Final = 1  # click's, too, for an error that ends a command with one line
INVALID: Final = 2  # click's, too, for a command line that cannot be understood
NO_SIDECAR: Final = 3
CANNOT_BE_ASKED: Final = 4

# What a judgement ends with, beside OK.
ATTENTION: Final = 1
CRITICAL: Final = 2
DOES_NOT_FIT: Final = 1

# In a response of the sidecar: what a command that shows it ends with.
EXIT_STATUS_HEADER: Final = "Highwater-Exit-Status"

# As shells report what they cannot start.
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127


def by_signal(number: int) -> int:
    """Return the code by which shells and container runtimes report the end by a signal."""
    return 128 + number


HUNG_UP: Final = by_signal(signal.SIGHUP)
INTERRUPTED: Final = by_signal(signal.SIGINT)
TERMINATED: Final = by_signal(signal.SIGTERM)

MEANINGS: Final[Sequence[tuple[Sequence[int], str]]] = (
    ((OK,), "done, or all is well"),
    (
        (FAILED,),
        "refused or failed; `status`, `check`, `host`, `growth`: something to look at; `plan`: it does not fit, or may "
        "not; `serve`: the start failed",
    ),
    (
        (INVALID,),
        "`status`, `check`: memory is very short, or the engine is dead or hangs; `check`: the set-up is wrong; "
        "`plan`: the input is refused; `serve`: invalid settings, or a port that is taken; or an invalid command line",
    ),
    ((NO_SIDECAR,), "no sidecar answers at the URL; stderr says what does, and what to do"),
    ((CANNOT_BE_ASKED,), "`plan`: this vLLM cannot be asked"),
    ((NOT_EXECUTABLE, NOT_FOUND), "`measure`: the command is not executable, or not found"),
    ((HUNG_UP, INTERRUPTED, TERMINATED), "`top`: its terminal was closed; interrupted; terminated"),
)
