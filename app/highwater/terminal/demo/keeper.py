"""The engine's keeper: a small process that starts the engine and outlives it, so that none of its processes is left.

Run as `python keeper.py GRACE_SECONDS COMMAND...` in a session of its own, with a pipe as standard input. It ends the
engine when the pipe closes, also because the starter was killed, or when the engine's first process ends: SIGTERM to
that process, a grace period, another for the rest, and SIGKILL to all that is left in the session. (PR_SET_PDEATHSIG
would reach direct children only, and it fires when the starting *thread* ends.)

Standard library only, and nothing of Highwater: it starts in milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SWEEP_SECONDS = 0.02
_STATE, _SESSION = 0, 3  # fields of /proc/<pid>/stat, counted from behind the command's name; proc(5)


def session_pids(session_id: int) -> list[int]:
    """Return the live processes of a session, in order of their ids; zombies are not live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended since it was listed
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[_SESSION]) == session_id and fields[_STATE] not in {"Z", "X"}:
                found.append(int(entry.name))
    return sorted(found)


def end_session(session_id: int, *, but: int | None = None, grace_seconds: float = 0.0) -> None:
    """Return when no process of a session is left, except the one with the id `but`; SIGKILL those that stay.

    Python's resource trackers get the grace once more: they end when all others have, and remove from /dev/shm what
    killed processes left there.
    """
    began = time.monotonic()
    while pids := [pid for pid in session_pids(session_id) if pid != but]:
        waited = time.monotonic() - began
        if waited >= 2 * grace_seconds:
            _kill(pids)
        elif waited >= grace_seconds:
            _kill([pid for pid in pids if not _is_resource_tracker(pid)])
        time.sleep(_SWEEP_SECONDS)  # a killed process takes a moment to go, and may have forked before


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(grace_seconds: float, command: list[str]) -> int:
    """Run `command` until it ends or standard input closes; return its status (128 + n for signal n)."""
    # An ordinary kill of the keeper ends the engine too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(engine.pid), select.POLLIN)
        poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        poll.poll()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if engine.poll() is None:
            engine.terminate()
            try:
                engine.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                engine.kill()
        status = engine.wait()
        end_session(os.getsid(0), but=os.getpid(), grace_seconds=grace_seconds)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
