"""One request's visit at the door: the images and videos that it brings, and what of them has room."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from gated_proxy.door_items import NOTHING, Cost, Media, RequestItems, State
from gated_proxy.door_scanner import Scanner
from gated_proxy.failures import Failure
from gated_proxy.heads import RequestHead

ITEMS_KEPT = 8


class Share:
    """One API key's images in flight, and when its last request came."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.inside = NOTHING
        self.seen_at = -math.inf


class Visit:
    """One request at the door, which keeps these figures.

    Attributes:
        scanner: Looks at its body; None where the rest is not looked at.
        inside: Its items that have room.
        wants: Its items that are known and have none yet.
    """

    def __init__(
        self, head: RequestHead, path_class: str, opens: Callable[[], None], refuses: Callable[[Failure], None]
    ) -> None:
        self.scanner: Scanner | None = Scanner()
        self.head, self.path_class = head, path_class
        self.opens, self.refuses = opens, refuses
        self.inside = self.wants = self.cost = NOTHING
        self.item_tokens = 0  # of its largest item
        self.is_whole = False  # all of its body has come
        self.has_lent = False  # its room, until then
        self.slow_ticks = 0  # in which others waited, while it had room and was not whole
        self.state: State = "inside"
        self.share: Share | None = None
        self._largest: list[Media] = []
        self.started_at = self.waited_seconds = 0.0
        self.waits_since: float | None = None
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        return self.waits_since is not None

    @property
    def moves(self) -> bool:
        """True if it has items inside, and its body goes on."""
        return self.inside.items > 0 and not self.waits

    @property
    def takes(self) -> Cost:
        """All that its items take, once they have room."""
        return self.inside + self.wants

    def add(self, media: Media, cost: Cost) -> None:
        self.wants += cost
        self.cost += cost
        self.item_tokens = max(self.item_tokens, cost.encoder_tokens)
        self._largest.append(media)
        if len(self._largest) > ITEMS_KEPT:
            self._largest = self._by_pixels()

    def _by_pixels(self) -> list[Media]:
        return sorted(self._largest, key=lambda each: each.pixels, reverse=True)[:ITEMS_KEPT]

    def record(self, ended_at: float | None = None, status: int | None = None) -> RequestItems:
        return RequestItems(
            request_id=self.head.request_id().decode(),
            client=None if self.share is None else self.share.client,
            path_class=self.path_class,
            state=self.state,
            cost=self.cost,
            largest=tuple(self._by_pixels()),
            started_at=self.started_at,
            waited_seconds=self.waited_seconds,
            ended_at=ended_at,
            status=status,
        )
