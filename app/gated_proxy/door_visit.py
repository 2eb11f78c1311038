"""One request's visit at the door: the images and videos that it brings, and what of them has room."""

from __future__ import annotations

from collections.abc import Callable

from gated_proxy.door_items import NOTHING, Cost, Media, RequestItems, State
from gated_proxy.door_scanner import Scanner
from gated_proxy.failures import Failure
from gated_proxy.heads import RequestHead

ITEMS_KEPT = 8


class Visit:
    """One request at the door, which keeps these figures.

    Attributes:
        scanner: Looks at its body; None where the rest is not looked at.
        client: A hash of its API key.
        cost: What its known items take.
        inside: What of that has room.
    """

    def __init__(
        self, head: RequestHead, path_class: str, opens: Callable[[], None], refuses: Callable[[Failure], None]
    ) -> None:
        self.scanner: Scanner | None = Scanner()
        self.head, self.path_class = head, path_class
        self.opens, self.refuses = opens, refuses
        self.client: str | None = None
        self.cost = self.inside = NOTHING
        self.item_tokens = 0  # of its largest item
        self.is_whole = False  # all of its body has come
        self.slow_ticks = 0  # in which others waited, while it had room and was not whole
        self.state: State = "inside"
        self._largest: list[Media] = []
        self.started_at = self.waited_seconds = 0.0
        self.waits_since: float | None = None

    @property
    def waits(self) -> bool:
        return self.waits_since is not None

    @property
    def moves(self) -> bool:
        """True if it has items inside, and its body goes on."""
        return self.inside.items > 0 and not self.waits

    @property
    def wants(self) -> Cost:
        """The cost of its known items that are not admitted yet."""
        return self.cost - self.inside

    @property
    def has_lent(self) -> bool:
        """True if it gave its room to others, until its body is whole."""
        return self.state == "waiting" and not self.waits

    def add(self, media: Media, cost: Cost, number: int) -> None:
        self.cost += cost * number
        self.item_tokens = max(self.item_tokens, cost.encoder_tokens)
        self._largest += [media] * min(number, ITEMS_KEPT)
        if len(self._largest) > 8 * ITEMS_KEPT:
            self._largest = self._by_pixels()

    def _by_pixels(self) -> list[Media]:
        return sorted(self._largest, key=lambda each: each.pixels, reverse=True)[:ITEMS_KEPT]

    def record(self, ended_at: float | None = None, status: int | None = None) -> RequestItems:
        return RequestItems(
            request_id=self.head.request_id().decode(),
            client=self.client,
            path_class=self.path_class,
            state=self.state,
            cost=self.cost,
            largest=tuple(self._by_pixels()),
            started_at=self.started_at,
            waited_seconds=self.waited_seconds,
            ended_at=ended_at,
            status=status,
        )
