"""Where the threads are while something takes long.

The dump is `faulthandler.dump_traceback`, which allocates nothing and holds Python's lock, so that no frame that it
reads moves. `sys._current_frames` allocates: on CPython 3.11 before 3.11.12 that can stop the whole process for good
(python/cpython issue 106883).
"""

from __future__ import annotations

import faulthandler
import os

LONG_SECONDS = 1.0
"""What has lasted for so long is worth a look at where it is."""
_LONGEST_SECONDS = 30.0
_MAX_DUMP_BYTES = 256 * 1024
_MAX_CHARACTERS = 12_000


class Stacks:
    """Takes dumps of what lasts: after one second, two, four and so on, then every half a minute."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._since: float | None = None
        self._due = 0.0
        self._text: str | None = None

    def look(self, since: float | None, thread: int, now: float) -> str | None:
        """Return the last dump of what lasts, None where nothing has lasted for long.

        Args:
            since: When that began which has lasted for longest, None where nothing is under way.
            thread: Which comes first in the dump.
            now: Monotonic seconds.

        Raises:
            OSError: No dump can be taken here.
        """
        if since != self._since:
            self._since, self._text, self._due = since, None, (since or 0.0) + LONG_SECONDS
        if since is not None and now >= self._due:
            self._due = now + min(max(now - since, LONG_SECONDS), _LONGEST_SECONDS)
            self._text = ordered(self._dump(), thread)
        return self._text

    def close(self) -> None:
        """Let go of what dumps are taken with."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _dump(self) -> str:
        if self._descriptor < 0:
            # In memory: the dump is written with Python's lock held, for which no disk may be waited.
            self._descriptor = os.memfd_create("highwater-stacks", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file=self._descriptor, all_threads=True)
        return os.pread(self._descriptor, _MAX_DUMP_BYTES, 0).decode("ascii", "replace")


def ordered(dump: str, thread: int) -> str:
    """Return a dump with one thread's part first, cut to what a heartbeat holds.

    Args:
        dump: As `faulthandler` writes it: a part for each thread, an empty line between two.
        thread: As `threading.get_ident` numbers it.
    """
    mark = f"0x{thread:016x}"
    parts = dump.split("\n\n")
    parts.sort(key=lambda part: mark not in part.partition("\n")[0])
    return "\n\n".join(parts)[:_MAX_CHARACTERS]
