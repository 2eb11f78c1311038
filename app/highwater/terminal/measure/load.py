"""The load: any command, run as a child with its input and output unchanged, and ended by the signals to this process.

At a terminal it stays in the terminal's foreground, so that it can read the keyboard, and the terminal's Ctrl-C reaches
it directly. Elsewhere it gets a process group of its own, and the signals to this process are passed on to that group.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from highwater.process.errors import NOT_EXECUTABLE, NOT_FOUND, by_signal
from highwater.process.untrusted import plain

LOOK_SECONDS = 0.25
# Waited after the signal to stop and again after SIGTERM; then it is killed.
GRACE_SECONDS = 15.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LoadNotStarted(Exception):
    """The command cannot be run; ``exit_code`` is a shell's: 126 not executable, 127 not found."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class Interrupts:
    """Counts the signals to stop, and raises ``KeyboardInterrupt`` for those that are not to wait.

    The first one, while ``is_patient``, ends the load in order; a second one ends all but the report. While that is
    written every signal is only counted (``ignores_signals``). A context manager for the main thread.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: signal.Signals | None = None
        self.is_patient = False
        self.ignores_signals = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # A signal that is ignored stays ignored, as under `nohup`.
        handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._count) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        self.last = signal.Signals(number)
        if not (self.ignores_signals or (self.is_patient and self.count == 1)):
            raise KeyboardInterrupt


def find(command: Sequence[str]) -> str:
    """Return a command's program. Raises LoadNotStarted where it does not exist, or cannot be executed."""
    name = command[0]
    found = shutil.which(name)
    if found is not None:
        return found
    if os.sep in name and os.path.exists(name):
        what = "a folder" if os.path.isdir(name) else "not executable"
        raise LoadNotStarted(f"{name!r} is {what}; name a program, or make it one with chmod +x", NOT_EXECUTABLE)
    raise LoadNotStarted(f"{name!r} is not found; check the spelling, PATH, and that it is installed here", NOT_FOUND)


class Load:
    """One run of the command."""

    def __init__(self, command: Sequence[str], interrupts: Interrupts) -> None:
        self._command, self._interrupts = list(command), interrupts
        self._process: subprocess.Popen[bytes] | None = None
        self._has_own_group = True
        with suppress(OSError), Path("/dev/tty").open("rb") as terminal:
            self._has_own_group = os.tcgetpgrp(terminal.fileno()) != os.getpgrp()
        self.started = 0.0
        self.seconds = 0.0

    @property
    def code(self) -> int:
        return 0 if self._process is None else self._process.returncode or 0

    def run(self, look: Callable[[], None]) -> None:
        """Run it to its end, and call ``look`` a few times a second meanwhile.

        Raises LoadNotStarted where it could not be run, KeyboardInterrupt, and kills it, at the second signal to stop.
        """
        asked_at: float | None = None
        harder = [(GRACE_SECONDS, signal.SIGTERM), (2 * GRACE_SECONDS, signal.SIGKILL)]
        self.started = time.monotonic()
        try:
            group = 0 if self._has_own_group else None
            process = subprocess.Popen(self._command, process_group=group)  # noqa: S603 - the operator's command
        except OSError as exc:
            raise LoadNotStarted(f"{self._command[0]!r} cannot be run: {exc.strerror}", NOT_EXECUTABLE) from exc
        self._process = process
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
                    return
                look()
                now = time.monotonic()
                if asked_at is None and self._interrupts.count:
                    asked_at = now
                    number = self._interrupts.last or signal.SIGINT
                    # The terminal has sent its Ctrl-C already; many programs stop at once on a second one.
                    if number is not signal.SIGINT or self._has_own_group:
                        self._signal(number)
                while asked_at is not None and harder and now - asked_at > harder[0][0]:
                    self._signal(harder.pop(0)[1])
        except BaseException:
            self._signal(signal.SIGKILL)
            process.wait()
            raise
        finally:
            self.seconds = time.monotonic() - self.started

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if self._has_own_group:
                # Its children too, also after its own end.
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def shell_code(code: int) -> tuple[int, str | None]:
    if code >= 0:
        return code, None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return by_signal(-code), name


# --- the command as a report may show it ---

# A report is meant to be shared. How a program names its secrets is not known: the usual names are looked for.

MASK = "***"
_NAMES: Final = r"(?:api[-_]?key|token|password|passwd|secret|credential|authorization|access[-_]?key)"
_NAME = re.compile(rf"^-{{0,2}}[\w.-]*{_NAMES}[\w.-]*$", re.IGNORECASE)
# `--max-tokens 5` names no secret: such tokens are a model's.
_HARMLESS = re.compile(r"token(s|iz|_id|-id|_len|-len)", re.IGNORECASE)
_OPTION = re.compile(rf"(-{{1,2}}[\w.-]*{_NAMES}[\w.-]*=)", re.IGNORECASE)
_WITHIN = re.compile(rf"""([\w.-]*{_NAMES}[\w.-]*['"]?\s*[=:]\s*['"]?)(?!bearer\b|basic\b)[^\s'",;&]+""", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)\s+\S+", re.IGNORECASE)
_KEY = re.compile(r"\b(sk|hf|ghp|glpat)[-_][A-Za-z0-9_-]{8,}")
_USER = re.compile(r"(\w+://)[^/@\s]+@")


def masked(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command's arguments; those that follow or are assigned to a secret's name are masked."""
    shown: list[str] = []
    hides_next = False
    for argument in command:
        if hides_next and not argument.startswith("--"):
            shown.append(MASK)
            hides_next = False
            continue
        hides_next = argument.startswith("-") and bool(_NAME.match(argument)) and not _HARMLESS.search(argument)
        if hides_next:
            shown.append(argument)
            continue
        hidden = _USER.sub(rf"\1{MASK}@", _KEY.sub(MASK, _BEARER.sub(rf"\1 {MASK}", argument)))
        whole = _OPTION.match(hidden)
        if whole is not None and not _HARMLESS.search(whole[1]):
            shown.append(f"{whole[1]}{MASK}")
            continue
        # A script, a header, JSON: only the value right after the name is masked.
        within = _WITHIN.sub(lambda at: at[0] if _HARMLESS.search(at[1]) else f"{at[1]}{MASK}", hidden)
        shown.append(within)
    return tuple(shown)


def shown_command(command: Sequence[str], most: int = 2000) -> str:
    return plain(shlex.join(command), most)
