"""Follows a sidecar, also across its restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from highwater.client.answers import event_of, events_of, report_of
from highwater.client.sidecar import SidecarClient
from highwater.commands.top.view import HISTORY_SECONDS, View, past_of
from highwater.errors import SidecarError, SidecarUnreachable

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 2.0
# One reading of so many seconds is fetched: a line has no more cells.
STEP_SECONDS = 3.0


def follow(connect: Callable[[], SidecarClient], pause: Callable[[float], bool]) -> Iterator[tuple[str, Any]]:
    """Yield ``history``, ``report`` and ``event`` as the sidecar sends them, ``lost`` with a reason; without an end.

    Args:
        connect: Makes a client.
        pause: Waits so many seconds before the next attempt; true ends it.
    """
    seconds = FIRST_PAUSE_SECONDS
    while True:
        try:
            with connect() as sidecar:
                yield "history", history_of(sidecar)
                for name, data in sidecar.events():
                    seconds = FIRST_PAUSE_SECONDS
                    yield name, data
            problem = "the sidecar has ended the stream"
        except SidecarError as exc:
            problem = str(exc)
        yield "lost", problem
        if pause(seconds):
            return
        seconds = min(seconds * 2, MAX_PAUSE_SECONDS)


def history_of(sidecar: SidecarClient) -> dict[str, Any]:
    """Return the sidecar's history of the last quarter of an hour, or raise ``SidecarError``."""
    # By its own clock, which may differ from ours.
    now = _object(sidecar.get("/memory/history", {"since": "9999999999"})).get("now")
    since = now - HISTORY_SECONDS if isinstance(now, int | float) else 0.0
    return _object(sidecar.get("/memory/history", {"since": str(since), "step": str(STEP_SECONDS)}))


def _object(answer: object) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise SidecarUnreachable("what answers /memory/history there is no Highwater sidecar of this version")
    return answer


def first_view(sidecar: SidecarClient) -> View:
    """Return the sidecar's report and history, or raise ``SidecarError``."""
    report = report_of(sidecar.get("/memory"))
    history = history_of(sidecar)
    view = View(sidecar.url, report, time.monotonic())
    return view.with_history(past_of(history.get("readings")), events_of(history.get("events")))


class Feed:
    """Keeps a view up to date in a thread of its own.

    Attributes:
        view: The newest view.
    """

    def __init__(self, view: View, connect: Callable[[], SidecarClient]) -> None:
        self.view = view
        self._connect = connect
        self._stopped = threading.Event()
        self._updated = threading.Event()
        # A daemon: `top` ends without waiting for the sidecar.
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        """Follow the sidecar from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following, without waiting."""
        self._stopped.set()

    def take_update(self) -> bool:
        """Return whether the view has changed since the last call."""
        had = self._updated.is_set()
        self._updated.clear()
        return had

    def _run(self) -> None:
        for name, data in follow(self._connect, self._stopped.wait):
            if self._stopped.is_set():
                return
            self.view = updated(self.view, name, data, time.monotonic())
            self._updated.set()


def updated(view: View, name: str, data: Any, now: float) -> View:  # noqa: ANN401 - JSON
    """Return the view after one more message from the sidecar."""
    if name == "lost":
        return view.without_sidecar(str(data), now)
    if name == "history":
        return view.with_history(past_of(data.get("readings")), events_of(data.get("events")))
    if name == "report":
        try:
            return view.with_report(report_of(data), now)
        except SidecarError as exc:
            return view.without_sidecar(str(exc), now)
    event = event_of(data) if name == "event" else None
    return view if event is None else view.with_event(event)
