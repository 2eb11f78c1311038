"""A sidecar followed over several connections: what comes, in which order, and how long is waited between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from highwater.process.errors import SidecarUnreachable
from highwater.terminal.client import FIRST_PAUSE_SECONDS, follow

MAX_PAUSE_SECONDS = 5.0


class Connection:
    """A client whose stream has these messages and then ends, or breaks with an error."""

    def __init__(self, *messages: tuple[str, Any], error: SidecarUnreachable | None = None) -> None:
        self._messages, self._error = messages, error
        self.is_closed = False

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def events(self) -> Iterator[tuple[str, Any]]:
        yield from self._messages
        if self._error is not None:
            raise self._error


class Followed:
    """Everything that following these connections yields, until they are used up; and the pauses between."""

    def __init__(self, *connections: Connection) -> None:
        self.pauses: list[float] = []
        left = iter(connections)
        messages = follow(lambda: next(left), self._past, self._pause, max_pause_seconds=MAX_PAUSE_SECONDS)  # type: ignore[arg-type,return-value]
        self._ends = len(connections)
        self.messages = [(name, str(data)) for name, data in messages]

    def _past(self, _: object) -> str:
        return "before"

    def _pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return len(self.pauses) == self._ends


def broken() -> Connection:
    return Connection(error=SidecarUnreachable("refused"))


def test_what_came_before_is_fetched_once_the_stream_is_open():
    """At every connection, or what happened between the two would be missed."""
    followed = Followed(Connection(("report", 1), ("event", 2)), Connection(("report", 3)))
    ended = ("lost", "the sidecar has ended the stream")
    assert followed.messages == [
        *[("past", "before"), ("report", "1"), ("event", "2"), ended],
        *[("past", "before"), ("report", "3"), ended],
    ]


def test_without_a_sidecar_the_pauses_double_up_to_the_longest():
    """Nobody calls a sidecar that is away twice a second for hours."""
    followed = Followed(*(broken() for _ in range(6)))
    assert followed.messages == [("lost", "refused")] * 6
    assert followed.pauses == [0.5, 1.0, 2.0, 4.0, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]


def test_a_stream_that_opened_lets_the_pauses_begin_anew():
    followed = Followed(broken(), broken(), Connection(("report", 1)), broken())
    assert followed.pauses == [0.5, 1.0, FIRST_PAUSE_SECONDS, 1.0]


def test_a_connection_that_ended_is_closed():
    connections = Connection(("report", 1)), broken()
    Followed(*connections)
    assert all(connection.is_closed for connection in connections)
