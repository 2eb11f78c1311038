"""A server as a child process: started in a session of its own under a keeper, awaited, ended with all that it started.

It refuses to leave a process behind, also when its starter is killed (see `keeper.py`).
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from highwater.model.units import span_text
from highwater.process.errors import HighwaterError
from highwater.process.untrusted import plain
from highwater.terminal.demo import keeper
from highwater.terminal.healthcheck import ask

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


GRACE_SECONDS = 10.0
_STOP_SECONDS = 2 * GRACE_SECONDS + 5.0
_PROBE_SECONDS = 0.1
_SELDOM_TAKEN = range(20_000, 32_000)
"""Below the ports that Linux gives to whoever wants any."""
_TRIES = 20


class KeptProcess:
    """One server process and all that it starts, called `what` in messages; another start appends to the log."""

    def __init__(self, what: str, log_path: Path) -> None:
        self._what = what
        self._log_path = log_path
        self._keeper: subprocess.Popen[bytes] | None = None

    def is_running(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    def pids(self) -> list[int]:
        if self._keeper is None:
            return []
        return [pid for pid in keeper.session_pids(self._keeper.pid) if pid != self._keeper.pid]

    def start(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        with self._log_path.open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(GRACE_SECONDS), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )

    def wait_until_answers(self, port: int, path: str, timeout_seconds: float) -> None:
        """Return when `GET path` is a 200. Raises NotInTime, with its processes ended, or DemoError."""
        try:
            self._wait(port, path, timeout_seconds)
        except BaseException:  # also Ctrl-C: the caller has no server to stop yet
            self.stop()
            raise

    def _wait(self, port: int, path: str, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not answers(port, path):
            status = self._keeper.poll() if self._keeper is not None else 0
            if status is not None:
                raise DemoError.with_log(f"{self._what} ended with status {status} while it started", self._log_path)
            if time.monotonic() > deadline:
                raise NotInTime.with_log(f"{self._what} was not ready within {timeout_seconds:g} s", self._log_path)
            time.sleep(_PROBE_SECONDS)

    def stop(self) -> None:
        """End every process of it and return when none is left; a second call does nothing."""
        if self._keeper is None:
            return
        process, self._keeper = self._keeper, None
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        keeper.end_session(process.pid)


class KeptServer(ABC):
    """A server on a port of 127.0.0.1 (None: a free one); a context manager that starts and stops it."""

    def __init__(self, what: str, log_path: Path, port: int | None) -> None:
        self.log_path = log_path
        self.port = port or free_port()
        self._process = KeptProcess(what, log_path)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pids(self) -> list[int]:
        return self._process.pids()

    @abstractmethod
    def start(self) -> Self:
        """Return when it serves. Raises DemoError, with its processes ended, where that is not in time."""

    def is_running(self) -> bool:
        return self._process.is_running()

    def stop(self) -> None:
        self._process.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port(wanted: int = 0) -> int:
    """Return a free port of 127.0.0.1: `wanted`, or any (0). Raises OSError where something listens there."""
    # The system's own choice is soon given to another: it is of those that connections and other servers get.
    for port in () if wanted else random.sample(_SELDOM_TAKEN, _TRIES):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", wanted)) as server:
        chosen: int = server.getsockname()[1]
        return chosen


def answers(port: int, path: str) -> bool:
    return ask(f"http://127.0.0.1:{port}", path, 2.0) is None


def environ_with(extra: Mapping[str, str], *, without_prefix: str | None = None) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if without_prefix is None or not k.startswith(without_prefix)}
    return own | dict(extra)
