"""``highwater top``: the memory live, or once as plain text or JSON."""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from functools import partial

import click
from rich.console import Console

from highwater.client.answers import report_of
from highwater.client.sidecar import SidecarClient
from highwater.commands.asking import ASK_SECONDS, sidecar_at
from highwater.commands.options import examples, json_option, url_option
from highwater.commands.top.drawing import Drawing
from highwater.commands.top.feed import Feed, View, first_view, follow_memory
from highwater.commands.top.screen import Screen
from highwater.exit_codes import HUNG_UP, INTERRUPTED

LOOK_SECONDS = 0.2
REDRAW_SECONDS = 1.0


@click.command(
    epilog=examples(
        "highwater top                          q or Ctrl-C leaves",
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
    """Show where the memory is, live: ranks, components, growth, requests, policy, events.

    One bar for each rank, with a line at high water; below them the components of the fullest rank, and their change.
    While the sidecar does not respond, the age of the figures is shown; they continue once it responds again.
    """
    try:
        if as_json:
            _print_json(url, once=once)
        else:
            _show(url, once=once)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as exc:
        if exc.errno != errno.EIO:
            raise
        sys.exit(HUNG_UP)  # the terminal was closed, so no message can be read


def _print_json(url: str, *, once: bool) -> None:
    with sidecar_at(url) as sidecar:
        report = sidecar.get("/memory")
        report_of(report)  # raises if it is no sidecar's
    if once:
        click.echo(json.dumps(report))
        return
    for name, data in follow_memory(partial(SidecarClient, url, timeout_seconds=ASK_SECONDS), threading.Event().wait):
        if name == "report":
            click.echo(json.dumps(data))
            sys.stdout.flush()
        elif name == "lost":
            click.echo(f"highwater: {data}; trying again", err=True)


def _show(url: str, *, once: bool) -> None:
    with sidecar_at(url) as sidecar:
        view = first_view(sidecar)
    console = Console(highlight=False, markup=False, emoji=False)
    if once or not sys.stdout.isatty() or console.is_dumb_terminal:
        console.print(Drawing(view, time.monotonic()))
    else:
        _live(view, url, console)


def _live(view: View, url: str, console: Console) -> None:
    feed = Feed(view, partial(SidecarClient, url, timeout_seconds=ASK_SECONDS))
    feed.start()
    with Screen(console, lambda: Drawing(feed.view, time.monotonic())) as screen:
        drawn, drawn_at = None, 0.0
        while not screen.asked_to_quit(LOOK_SECONDS):
            now = feed.view, console.size
            if now != drawn or time.monotonic() - drawn_at >= REDRAW_SECONDS:
                screen.draw()
                drawn, drawn_at = now, time.monotonic()
    feed.stop()
