"""``highwater events``: what happened, as lines for people or programs, once or as it happens."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import click

from highwater.http.text.control import event_text
from highwater.process.errors import INTERRUPTED
from highwater.terminal.asking import ASK_SECONDS, ending_well, sidecar_at
from highwater.terminal.cli import examples, url_option
from highwater.terminal.client import SidecarClient, StreamEnded, event_of, follow, not_a_sidecar
from highwater.watch.history import EVENTS_KEPT

MAX_PAUSE_SECONDS: Final = 5.0


def listed(answer: Any, last: int) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Return the newest ``last`` events, oldest first. Raises SidecarUnreachable where it is no list of events."""
    events = answer.get("events") if isinstance(answer, dict) else None
    if not isinstance(events, list):
        raise not_a_sidecar("/memory/events")
    return [event for event in events[:last] if isinstance(event, dict)][::-1]


def follow_events(
    connect: Callable[[], SidecarClient], pause: Callable[[float], None], last: int, lost: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield the newest ``last`` events, and then each as it happens, without end.

    Without a sidecar it tells ``lost`` and tries again, and yields the events of the time between. No event is yielded
    twice. Raises SidecarError where no sidecar responds the first time.
    """
    seen: deque[tuple[object, object]] = deque(maxlen=2 * EVENTS_KEPT)
    is_first = True

    def past(sidecar: SidecarClient) -> list[dict[str, Any]]:
        return listed(sidecar.get("/memory/events", {"limit": str(EVENTS_KEPT)}), EVENTS_KEPT)

    for name, data in follow(connect, past, pause, max_pause_seconds=MAX_PAUSE_SECONDS):
        if name == "lost":
            if is_first and not isinstance(data, StreamEnded):
                raise data
            lost(str(data))
        elif name in ("past", "event"):
            events = data if name == "past" else [data] if isinstance(data, dict) else []
            new = [event for event in events if (event.get("at"), event.get("id")) not in seen]
            seen.extend((event.get("at"), event.get("id")) for event in new)
            yield from new[len(new) - min(last, len(new)) :] if is_first else new
            is_first = False


@click.command(
    epilog=examples(
        "highwater events                        the newest 20, oldest first",
        "highwater events --last 100 --json | jq -r 'select(.kind == \"reset\").summary'",
        "highwater events --follow               as they happen, until Ctrl-C",
    )
)
@url_option
@click.option(
    "--last",
    default=20,
    show_default=True,
    type=click.IntRange(0, EVENTS_KEPT),
    help="how many of the newest events are shown first",
)
@click.option("--follow", "-f", "follows", is_flag=True, help="then print each as it happens")
@click.option("--json", "as_json", is_flag=True, help="as JSON, an event a line")
def events(url: str, *, last: int, follows: bool, as_json: bool) -> None:
    """Show what happened: states of the engine, remedies, changes of the policy, marks, incidents.

    Exits with 0, with 3 if no sidecar answers, and with 130 when Ctrl-C ends --follow. A sidecar that goes away while
    it is followed is looked for again, and events that were missed are fetched.
    """
    if not follows:
        with sidecar_at(url) as sidecar:
            _show(listed(sidecar.get("/memory/events", {"limit": str(max(last, 1))}), last), as_json)
        return

    def lost(why: str) -> None:
        click.echo(f"highwater: {why}; trying again", err=True)

    try:
        with ending_well():
            _show(
                follow_events(lambda: SidecarClient(url, timeout_seconds=ASK_SECONDS), time.sleep, last, lost), as_json
            )
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _show(events: Iterable[dict[str, Any]], as_json: bool) -> None:
    for data in events:
        if as_json:
            click.echo(json.dumps(data))
        elif (event := event_of(data)) is not None:
            click.echo(event_text(event))
        sys.stdout.flush()
