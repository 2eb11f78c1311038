"""``highwater top``: the memory live, or once as plain text or JSON."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self

import click
from rich.console import Console, RenderableType
from rich.live import Live

from highwater.process.errors import HUNG_UP, INTERRUPTED, TERMINATED
from highwater.terminal.asking import ASK_SECONDS, sidecar_at
from highwater.terminal.cli import examples, json_option, url_option
from highwater.terminal.client import SidecarClient, report_of
from highwater.terminal.top.drawing import Drawing, Look
from highwater.terminal.top.feed import Feed, View, first_view, follow_memory

LOOK_SECONDS = 0.2
REDRAW_SECONDS = 1.0
_ESCAPE = b"\x1b"


@click.command(
    epilog=examples(
        "highwater top                          ? shows the keys, q or Ctrl-C leaves",
        "highwater top --once | less",
        "highwater top --once --json | jq '.ranks[].used_ratio'",
        "highwater top --json >> memory.jsonl   a report a line, until Ctrl-C",
        "HIGHWATER_URL=http://gpu-7:8001 highwater top",
    )
)
@url_option
@click.option("--once", is_flag=True, help="print it once, and end; so it does where the output is no terminal")
@json_option
def top(url: str, *, once: bool, as_json: bool) -> None:
    """Show where the memory is, live: the verdict, ranks, components, growth, requests, policy, events.

    One bar for each rank, with a line at high water; below them the components of the worst off, and their change.
    While the sidecar does not respond, the age of the figures is shown; they continue once it responds again.
    """
    try:
        if as_json:
            with sidecar_at(url) as sidecar:
                report = sidecar.get("/memory")
                report_of(report)  # raises if it is no sidecar's
            if once:
                click.echo(json.dumps(report))
                return
            connect = partial(SidecarClient, url, timeout_seconds=ASK_SECONDS)
            for name, data in follow_memory(connect, threading.Event().wait):
                if name == "report":
                    click.echo(json.dumps(data))
                    sys.stdout.flush()
                elif name == "lost":
                    click.echo(f"highwater: {data}; trying again", err=True)
        else:
            with sidecar_at(url) as sidecar:
                view = first_view(sidecar)
            console = Console(highlight=False, markup=False, emoji=False)
            if once or not sys.stdout.isatty() or console.is_dumb_terminal:
                console.print(Drawing(view, time.monotonic()))
            else:
                _live(view, url, console)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as exc:
        if exc.errno != errno.EIO:
            raise
        sys.exit(HUNG_UP)  # the terminal was closed, so no message can be read


def _live(view: View, url: str, console: Console) -> None:
    feed = Feed(view, partial(SidecarClient, url, timeout_seconds=ASK_SECONDS))
    feed.start()
    with Screen(console, lambda look, height: Drawing(feed.view, time.monotonic(), look, height)) as screen:
        drawn, drawn_at = None, 0.0
        while not screen.asked_to_quit(LOOK_SECONDS):
            now = feed.view, screen.look, console.size
            if now != drawn or time.monotonic() - drawn_at >= REDRAW_SECONDS:
                screen.draw()
                drawn, drawn_at = now, time.monotonic()
    feed.stop()


class Screen:
    """Rich's alternate screen, and a keyboard that needs no return key.

    A context manager. Within it an ordinary kill unwinds, and so restores the terminal; Ctrl-Z restores it until the
    shell continues this process.
    """

    def __init__(self, console: Console, drawn: Callable[[Look, int], RenderableType]) -> None:
        self.look = Look()
        self._console, self._drawn = console, drawn
        self._live = Live(drawn(self.look, console.height), console=console, screen=True, auto_refresh=False)
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
        self._live.update(self._drawn(self.look, self._console.height), refresh=True)

    def asked_to_quit(self, seconds: float) -> bool:
        if self._keyboard is None:
            time.sleep(seconds)
            return False
        ready, _, _ = select.select([self._keyboard], [], [], seconds)
        if not ready:
            return False
        keys = os.read(self._keyboard, 64)
        for key in keys.decode("ascii", "ignore").lower():
            self.look = self.look.after(key)
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
