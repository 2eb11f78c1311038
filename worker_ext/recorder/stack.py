"""Where a thread is: the innermost lines of its stack."""

from __future__ import annotations

import os
import sys

from worker_ext.errors import printable

_MOST_LINES = 8
_MOST_CHARACTERS = 100


def stack_of(thread: int) -> list[str] | None:
    """Return up to eight lines `file.py:line function`, innermost first; None where there is no such thread.

    Args:
        thread: Its number, as `threading.get_ident` gives it.
    """
    # Nothing keeps the mapping: it holds this very frame too, which would hold the mapping for ever.
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_LINES:
        code = frame.f_code
        line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        lines.append(printable(line, _MOST_CHARACTERS))
        frame = frame.f_back
    return lines
