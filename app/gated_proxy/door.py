"""The door: admits the images and videos of requests by what they will cost the engine, and has the others wait.

A request's cost is known from the headers of its images, before the engine decodes them (`door_scanner`). What is in
flight at once is bounded: bytes once decoded, encoder tokens, items. The engine acts on a request once its last byte
has come; so a body goes on as it comes, and stops before the piece with which an image becomes known that has no room.

::

    SCANNED ──an image that fits──► INSIDE ──another that does not──► WAITING ──room──► INSIDE
       │                              │                                  └─ the deadline: 503
       └──one that can never fit: 413─┴──the first byte of its response, or its end: it gives back its room

Waiting requests go on in the order in which they came, those first that have a part inside already. One client's
requests take at most half of the room while others want some, and a client is a key. Where nobody inside can make
progress, the first of those waiting may, whatever encoder tokens and items it takes: without this two halves of bodies
would wait for each other. Decoded bytes are the limit of each request, too.

What cannot be read goes in, and is counted: the door never fails a request for a fault of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from gated_proxy.door_media import BYTES_PER_PIXEL, Media
from gated_proxy.door_scanner import Scanner, may_have_media
from gated_proxy.failures import RETRY_AFTER_SECONDS, Failure
from gated_proxy.gate import Timer
from gated_proxy.heads import Header, RequestHead

Mode = Literal["off", "observe", "on"]
State = Literal["waiting", "inside", "passed", "refused"]
REASONS = TOO_LARGE, TIMEOUT, FULL = "door_too_large", "door_timeout", "door_full"

MIB = 1024 * 1024
MAX_WAITING_BYTES = 128 * MIB
"""The pieces of bodies that wait; what follows a piece stays with its client."""
REQUESTS_KEPT = 256
ITEMS_KEPT = 8
# A client that has sent no image for so long takes no part in the sharing.
_SHARES_SECONDS = 60.0
_MAX_CLIENTS = 1024
_KEY_LINE = re.compile(rb"\r\n(?:authorization|x-api-key|api-key):[ \t]*(?:bearer )?([^\r]*)", re.IGNORECASE)
_HASH_DIGITS = 12

log = logging.getLogger("highwater.door")


@dataclass(frozen=True, slots=True)
class TokenRule:
    """The tokens that an encoder makes of pixels: one for each square of so many, within bounds.

    Above ``max_pixels`` the engine scales an image down, below ``min_pixels`` up. None: not known.
    """

    side_pixels: int = 28  # patch size times merge size
    min_pixels: int = 0
    max_pixels: int | None = None

    def tokens(self, width: int, height: int) -> int:
        """Return a bound: scaling keeps an image's shape, which costs it a part of a row and of a column."""
        area = self.side_pixels**2
        tokens = math.ceil(width / self.side_pixels) * math.ceil(height / self.side_pixels)
        if self.max_pixels is not None:
            tokens = min(tokens, self.max_pixels // area)
        return max(tokens, self.min_pixels // area, 1)


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """The most that may be in flight at once, and the longest that a request may wait. None: no limit."""

    decoded_bytes: int | None = None
    encoder_tokens: int | None = None
    items: int | None = None
    item_tokens: int | None = None  # of the engine's largest item
    unknown_bytes: int = 64 * MIB  # decoded, of an item whose size is not known
    wait_seconds: float = 10.0
    max_waiting: int = 1024  # requests
    token_rule: TokenRule = TokenRule()


@dataclass(frozen=True, slots=True)
class Cost:
    decoded_bytes: int = 0
    encoder_tokens: int = 0
    items: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.decoded_bytes + other.decoded_bytes,
            self.encoder_tokens + other.encoder_tokens,
            self.items + other.items,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + Cost(-other.decoded_bytes, -other.encoder_tokens, -other.items)


NOTHING = Cost()
_FIGURES = (
    ("decoded_bytes", "bytes once decoded"),
    ("encoder_tokens", "encoder tokens"),
    ("items", "images and videos"),
)


def cost_of(media: Media, limits: DoorLimits) -> Cost:
    """Return what an item takes; one of unknown size counts as the engine's largest, and always fits."""
    rule = limits.token_rule
    if not media.pixels:
        side = math.isqrt(limits.unknown_bytes // BYTES_PER_PIXEL)
        decoded_bytes = min(limits.unknown_bytes, limits.decoded_bytes or limits.unknown_bytes)
        return Cost(decoded_bytes, limits.item_tokens or rule.tokens(side, side), 1)
    tokens = rule.tokens(media.width, media.height) * media.frames
    if limits.item_tokens is not None:
        tokens = min(tokens, limits.item_tokens)
    return Cost(media.decoded_bytes, tokens, 1)


class DoorRefusal(Exception):
    """A request that does not go in; ``failure`` is the error for the client."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Caller(Protocol):
    """The sender of a request at the door."""

    def door_opens(self) -> None:
        """Go on with the body: what waited has room now."""

    def door_refuses(self, failure: Failure) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestItems:
    """One request's images and videos, without content: who sent what, and what became of it.

    ``client`` is a hash of the API key, None without one; ``largest`` are the first few by pixels. ``inside`` lasts to
    the first byte of the response, or to its end where that says nothing about the encoder: then it has ``passed``.
    Times are Unix seconds; ``ended_at`` and ``status`` are None while the request runs.
    """

    request_id: str
    client: str | None
    path_class: str
    state: State
    cost: Cost
    largest: tuple[Media, ...]
    started_at: float
    waited_seconds: float
    ended_at: float | None
    status: int | None


class DoorCounts:
    """Plain numbers, counted on the event loop's thread: a scrape only reads."""

    def __init__(self) -> None:
        self.requests = 0  # with images or videos
        self.waited = 0  # times that one had to; in mode `observe`: would have had to
        self.waited_seconds = 0.0
        self.refused: Counter[str] = Counter()  # by reason; in mode `observe`: those that would have been
        self.items: Counter[str] = Counter()  # by form
        self.faults = 0  # bodies that were passed on unread, because the scanner failed


class Visit:
    """One request at the door.

    Attributes:
        inside: Its items that have room.
        wants: Its items that are known and have none yet.
        pieces: Of its body, that wait; the first has been looked at.
        trailers: Of a body that waits to its end.
    """

    def __init__(self, door: Door, caller: Caller, head: RequestHead, path_class: str) -> None:
        self._door = door
        self._scanner: Scanner | None = Scanner(has_bare_urls=path_class == "other_v2")
        self.caller, self.head, self.path_class = caller, head, path_class
        self.inside = self.wants = self.cost = NOTHING
        self.piece_bytes = 0  # of the first piece that waits
        self.pieces: list[bytes] = []
        self.trailers: tuple[Header, ...] | None = None
        self.state: State = "inside"
        self.client: str | None = None
        self.largest: list[Media] = []
        self.started_at = self.waited_seconds = 0.0
        self.waits_since: float | None = None
        self.deadline: Timer | None = None

    @property
    def waits(self) -> bool:
        return self.waits_since is not None

    @property
    def moves(self) -> bool:
        """True if it has items inside, and its body goes on."""
        return self.inside.items > 0 and not self.waits

    def take(self, piece: bytes) -> bool:
        """Look at a piece of the body, and return whether it may go on; if not, the caller is called when it may.

        Raises DoorRefusal: it cannot go in.
        """
        if self._scanner is None:
            return True
        try:
            found = self._scanner.feed(piece)
        except Exception:
            # Broad: a fault of ours in reading an image must cost its bound, not the request.
            log.exception("the images of a request could not be read: it is passed on")
            self._door.counts.faults += 1
            self._scanner = None
            return True
        if not (found or self.wants.items):
            return True
        self.piece_bytes = len(piece)
        return self._door.ask(self, found)

    def add(self, media: Media, cost: Cost) -> None:
        self.wants += cost
        self.cost += cost
        self.largest.append(media)
        if len(self.largest) > ITEMS_KEPT:
            self.largest.sort(key=lambda each: each.pixels, reverse=True)
            del self.largest[ITEMS_KEPT:]

    def stall(self) -> None:
        """Lend its room to others while no more of its body comes: the engine does nothing with a part of a request."""
        self._door.lend(self)

    def leave(self) -> None:
        """Give back its room for good; the rest of its body is not looked at."""
        self._scanner = None
        self._door.leave(self)

    def end(self, status: int) -> None:
        state = self.state  # one that ends inside has not been answered: its images may be why
        self.leave()
        self.state = state
        self._door.end(self, status)

    def record(self, ended_at: float | None = None, status: int | None = None) -> RequestItems:
        return RequestItems(
            request_id=self.head.request_id().decode(),
            client=self.client,
            path_class=self.path_class,
            state=self.state,
            cost=self.cost,
            largest=tuple(sorted(self.largest, key=lambda each: each.pixels, reverse=True)),
            started_at=self.started_at,
            waited_seconds=self.waited_seconds,
            ended_at=ended_at,
            status=status,
        )


class Door:
    """Admits requests by their items, and counts what is inside.

    ``clock`` is monotonic seconds, ``wall`` Unix seconds; ``later`` calls back after so many seconds, the event loop's
    where ``None``.
    """

    def __init__(
        self,
        *,
        mode: Mode = "off",
        limits: DoorLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self.mode: Mode = mode
        self.limits = limits or DoorLimits()
        self.counts = DoorCounts()
        self.inside = NOTHING
        self._clock, self._wall = clock, wall
        self._later = later or (lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call))
        self._running: dict[Visit, None] = {}  # with items
        self._last: deque[RequestItems] = deque(maxlen=REQUESTS_KEPT)
        # In the order in which they began to wait: those with items inside, and those without.
        self._growing: OrderedDict[Visit, None] = OrderedDict()
        self._waiting: OrderedDict[Visit, None] = OrderedDict()
        self._waiting_bytes = 0
        self._moving = 0  # visits that move
        self._clients: OrderedDict[str, float] = OrderedDict()  # when each sent an item last
        self._taken: dict[str, Cost] = {}  # by client
        self._held_until = -math.inf
        self._held_for = ""

    # --- for those who watch and decide ---

    @property
    def waiting(self) -> int:
        return len(self._growing) + len(self._waiting)

    @property
    def is_held(self) -> bool:
        return self._clock() < self._held_until

    @property
    def counted(self) -> tuple[object, ...]:
        """Values that change whenever anything does that is counted."""
        counts = self.counts
        sums = counts.requests, counts.waited, counts.refused.total(), counts.items.total(), counts.faults
        return self.mode, self.limits, self.inside, self.waiting, *sums

    def requests(self) -> Iterator[RequestItems]:
        """Yield the running requests with items, the newest first, then the last that ended."""
        yield from (visit.record() for visit in reversed(self._running))
        yield from reversed(self._last)

    def change(self, *, mode: Mode, limits: DoorLimits) -> None:
        if (mode, limits) != (self.mode, self.limits):
            self.mode, self.limits = mode, limits
            self._admit_waiting()

    def hold(self, seconds: float, why: str) -> None:
        """Let nobody in for a while, and for no longer: what holds traffic must be asked for again and again."""
        self._held_until, self._held_for = self._clock() + seconds, why
        self._later(seconds, self._admit_waiting)

    def open(self) -> None:
        """End a hold."""
        self._held_until = -math.inf
        self._admit_waiting()

    # --- for requests ---

    def visit(self, caller: Caller, head: RequestHead, path_class: str, piece: bytes) -> Visit | None:
        """Return the visit of a request whose body begins so; None where the door is off, or that is a whole text."""
        is_whole = len(piece) == head.declared_bytes
        if self.mode == "off" or (is_whole and not may_have_media(piece, path_class)):
            return None
        return Visit(self, caller, head, path_class)

    def ask(self, visit: Visit, found: list[Media]) -> bool:
        """Admit a visit's further items: True, or False where it waits for that. Raises DoorRefusal."""
        if visit not in self._running:
            self._begin(visit)
        for media in found:
            self.counts.items[media.form] += 1
            visit.add(media, cost_of(media, self.limits))
        too_large = self._too_large(visit)
        if too_large is not None:
            self._refuse(visit, too_large)
        elif not (self._is_next(visit) and self._fits(visit)):
            self.counts.waited += 1
            if self.mode == "on":
                self._wait(visit)
                return False
        self._admit(visit)
        return True

    def lend(self, visit: Visit) -> None:
        if visit.moves:
            visit.wants += visit.inside
            self._take_out(visit)

    def leave(self, visit: Visit) -> None:
        if visit in self._running:
            if visit.waits:
                self._end_wait(visit)
            self._take_out(visit)
            visit.wants = NOTHING
            visit.state = "refused" if visit.state == "refused" else "passed"

    def end(self, visit: Visit, status: int) -> None:
        if visit in self._running:
            del self._running[visit]
            self._last.append(visit.record(self._wall(), status))

    def _begin(self, visit: Visit) -> None:
        self.counts.requests += 1
        self._running[visit] = None
        visit.started_at = self._wall()
        key = _KEY_LINE.search(visit.head.raw)
        if key is not None:
            client = hashlib.sha256(key[1].strip()).hexdigest()[:_HASH_DIGITS]
            visit.client = client
            self._clients[client] = self._clock()
            self._clients.move_to_end(client)
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)

    # --- room ---

    def _admit(self, visit: Visit) -> None:
        self._moving += not visit.moves
        self.inside += visit.wants
        visit.inside += visit.wants
        if visit.client is not None:
            self._taken[visit.client] = self._taken.get(visit.client, NOTHING) + visit.wants
        visit.wants = NOTHING
        visit.state = "inside"

    def _take_out(self, visit: Visit) -> None:
        if not visit.inside.items:
            return
        self._moving -= visit.moves
        self.inside -= visit.inside
        if visit.client is not None:
            left = self._taken[visit.client] - visit.inside
            if left.items:
                self._taken[visit.client] = left
            else:
                del self._taken[visit.client]
        visit.inside = NOTHING
        self._admit_waiting()

    def _too_large(self, visit: Visit) -> Failure | None:
        limit, takes = self.limits.decoded_bytes, (visit.inside + visit.wants).decoded_bytes
        if limit is None or takes <= limit:
            return None
        words = (
            f"the images and videos of this request take {takes} bytes once decoded; at most {limit} can be in flight"
        )
        return Failure(413, TOO_LARGE, f"{words} (door.decoded_bytes)")

    def _short_of(self, visit: Visit) -> tuple[str, str, int, int] | None:
        """Return the first figure that would be exceeded: its setting, its unit, what is taken, the limit."""
        after = self.inside + visit.wants
        for name, unit in _FIGURES:
            limit = getattr(self.limits, name)
            if limit is not None and getattr(after, name) > limit:
                return name, unit, getattr(self.inside, name), limit
        return None

    def _fits(self, visit: Visit) -> bool:
        if self.is_held:
            return False
        if self._moving == visit.moves:  # no other's end will make room
            return True
        return self._short_of(visit) is None and not self._is_over_share(visit)

    def _is_over_share(self, visit: Visit) -> bool:
        """Return whether its client's requests would take more than half, and others have sent images lately."""
        client = visit.client
        taken = NOTHING if client is None else self._taken.get(client, NOTHING)
        if client is None or taken.items == visit.inside.items or not self._has_others(client):
            return False
        after = taken + visit.wants
        limits = ((getattr(after, name), getattr(self.limits, name)) for name, _ in _FIGURES)
        return any(limit is not None and 2 * takes > limit for takes, limit in limits)

    def _has_others(self, client: str) -> bool:
        now = self._clock()
        while self._clients and now - next(iter(self._clients.values())) > _SHARES_SECONDS:
            self._clients.popitem(last=False)
        return len(self._clients) > (client in self._clients)

    # --- waiting ---

    def _is_next(self, visit: Visit) -> bool:
        return not self._growing and (visit.inside.items > 0 or not self._waiting)

    def _wait(self, visit: Visit) -> None:
        left = self.limits.wait_seconds - visit.waited_seconds
        if left <= 0:
            self._refuse(visit, self._waited_too_long(visit))
        is_full = self._waiting_bytes + visit.piece_bytes > MAX_WAITING_BYTES
        if self.waiting >= self.limits.max_waiting or (is_full and self.waiting):
            message = f"{self.waiting} requests wait already for room for their images (door.max_waiting)"
            self._refuse(visit, Failure(503, FULL, message, RETRY_AFTER_SECONDS))
        self._moving -= visit.moves
        visit.waits_since = self._clock()
        visit.state = "waiting"
        (self._growing if visit.inside.items else self._waiting)[visit] = None
        self._waiting_bytes += visit.piece_bytes
        visit.deadline = self._later(left, lambda: self._give_up(visit))
        self._later(0.0, self._admit_waiting)  # it may be the last that moved, or wait only behind clients with half

    def _end_wait(self, visit: Visit) -> None:
        if visit.waits_since is not None:
            waited = self._clock() - visit.waits_since
            visit.waited_seconds += waited
            self.counts.waited_seconds += waited
        if visit.deadline is not None:
            visit.deadline.cancel()
        visit.waits_since = visit.deadline = None
        self._moving += visit.moves
        self._waiting_bytes -= visit.piece_bytes
        self._growing.pop(visit, None)
        self._waiting.pop(visit, None)

    def _give_up(self, visit: Visit) -> None:
        failure = self._waited_too_long(visit)
        self._end_wait(visit)
        try:
            self._refuse(visit, failure)
        except DoorRefusal:
            visit.caller.door_refuses(failure)

    def _waited_too_long(self, visit: Visit) -> Failure:
        short = self._short_of(visit)
        if self.is_held:
            why = self._held_for
        elif short is not None:
            name, unit, taken, limit = short
            why = f"{taken} of {limit} {unit} are taken (door.{name}), and it needs {getattr(visit.wants, name)}"
        else:
            why = "others wait before it, or its API key has half of the room"
        message = f"no room for this request's images within {self.limits.wait_seconds:g} s (door.wait_seconds): {why}"
        return Failure(503, TIMEOUT, message, RETRY_AFTER_SECONDS)

    def _refuse(self, visit: Visit, failure: Failure) -> None:
        """Count a refusal, and raise DoorRefusal unless the door only observes."""
        self.counts.refused[failure.reason] += 1
        if self.mode == "on":
            visit.state = "refused"
            raise DoorRefusal(failure)

    def _admit_waiting(self) -> None:
        for queue in (self._growing, self._waiting):
            for visit in list(queue):
                if self.mode == "on" and not self._fits(visit):
                    if not self.is_held and self._short_of(visit) is None:
                        continue  # its client has half of the room, and those behind it may be others
                    return
                self._end_wait(visit)
                self._admit(visit)
                self._later(0.0, visit.caller.door_opens)
