"""The terminal's whole screen and its keyboard, both restored also after an error or a signal."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

from highwater.exit_codes import TERMINATED

_ESCAPE = b"\x1b"


class Screen:
    """Rich's alternate screen, and a keyboard that needs no return key.

    A context manager. Within it an ordinary kill unwinds, and so restores the terminal; Ctrl-Z restores it until the
    shell continues this process.
    """

    def __init__(self, console: Console, drawn: Callable[[], RenderableType]) -> None:
        self._drawn = drawn
        self._live = Live(drawn(), console=console, screen=True, auto_refresh=False)
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._modes: list[Any] = [] if self._keyboard is None else termios.tcgetattr(self._keyboard)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
        signal.signal(signal.SIGTSTP, self._suspend)
        try:
            self._take()
        except BaseException:  # also an interrupt: without a screen nobody else restores the terminal
            self._give_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._give_back()

    def draw(self) -> None:
        self._live.update(self._drawn(), refresh=True)

    def asked_to_quit(self, seconds: float) -> bool:
        if self._keyboard is None:
            time.sleep(seconds)
            return False
        ready, _, _ = select.select([self._keyboard], [], [], seconds)
        if not ready:
            return False
        keys = os.read(self._keyboard, 64)
        # Ready and empty: the terminal was closed. An escape on its own is the key.
        return not keys or keys == _ESCAPE or b"q" in keys.lower()

    def _take(self) -> None:
        if self._keyboard is not None:
            tty.setcbreak(self._keyboard)
        self._live.start(refresh=True)

    def _give_back(self) -> None:
        self._live.stop()
        if self._keyboard is not None:
            with suppress(termios.error):  # it was closed
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._modes)

    def _suspend(self, *_: object) -> None:
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()
