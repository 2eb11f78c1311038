"""A sidecar's stream of events followed without end: also across its restarts, with growing pauses between attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from highwater.errors import SidecarError, SidecarUnreachable

if TYPE_CHECKING:
    from highwater.client.sidecar import SidecarClient

FIRST_PAUSE_SECONDS: Final = 0.5
_OWN_NAMES: Final = frozenset({"past", "lost"})


class StreamEnded(SidecarUnreachable):
    """The sidecar ended a stream that had opened; it may be restarting."""


def follow(
    connect: Callable[[], SidecarClient],
    past: Callable[[SidecarClient], Any],
    pause: Callable[[float], bool | None],
    *,
    max_pause_seconds: float,
) -> Iterator[tuple[str, Any]]:
    """Yield ``past`` with what came before, then each message of the stream, as `SidecarClient.events` does.

    Where the stream ends, or cannot be opened, it yields ``lost`` with the ``SidecarError``, and tries again: after
    half a second, and after twice as long each time until a stream opens. (tenacity's attempts end with a success, and
    a stream that opened can still end.) ``past`` is called once the stream is open, so that no message is missed
    between both; where ``pause`` returns true it ends.
    """
    seconds = FIRST_PAUSE_SECONDS
    while True:
        try:
            with connect() as sidecar:
                is_open = False
                for name, data in sidecar.events():
                    if not is_open:
                        is_open = True
                        yield "past", past(sidecar)
                    seconds = FIRST_PAUSE_SECONDS
                    if name not in _OWN_NAMES:
                        yield name, data
            problem: SidecarError = StreamEnded("the sidecar has ended the stream")
        except SidecarError as exc:
            problem = exc
        yield "lost", problem
        if pause(seconds):
            return
        seconds = min(seconds * 2, max_pause_seconds)
