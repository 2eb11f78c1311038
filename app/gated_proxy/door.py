"""The door: admits the images and videos of requests by what they will cost the engine, and has the others wait.

A request's cost is known from the headers of its images, before the engine decodes them (`door_scanner`). What is in
flight at once is bounded: bytes once decoded, encoder tokens, items. The engine acts on a request once its last byte
has come; so a body goes on as it comes, and stops before the piece with which an image becomes known that has no room.

::

    SCANNED ──an image that fits──► INSIDE ──another that does not──► WAITING ──room──► INSIDE
       │                              │                                  └─ the deadline: 503
       │                              ├──slow, while others wait──► LENT ──its last piece──► WAITING
       └──one that can never fit: 413─┴──the first byte of its response, or its end: it gives back its room

A body that comes so slowly that others have waited for it half of `wait_seconds` in all lends its room: it goes on, and
before its last piece it takes its room back, or waits for that as any other.

Waiting requests go on in the order in which they came, those first that have a part inside already. One client's
requests take at most half of the room, and of the places to wait, while others want some; a client is a key. Where
nobody inside can make progress, the first of those waiting may, whatever encoder tokens and items it takes: without
this two halves of bodies would wait for each other. Decoded bytes are the limit of each request, too: one that takes
more than there is room for just now holds up nobody behind it.

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
from typing import Literal, Protocol

from gated_proxy.door_cost import FIGURES, NOTHING, DoorLimits, cost_of
from gated_proxy.door_items import Cost, Media, RequestItems, State
from gated_proxy.door_scanner import Scanner, may_have_media
from gated_proxy.failures import RETRY_AFTER_SECONDS, Failure
from gated_proxy.gate import Timer
from gated_proxy.heads import KEY_HEADERS, RequestHead

Mode = Literal["off", "observe", "on"]
REASONS = TOO_LARGE, TIMEOUT, FULL = "door_too_large", "door_timeout", "door_full"

REQUESTS_KEPT = 256
ITEMS_KEPT = 8
# A client that has sent no image for so long takes no part in the sharing.
_SHARES_SECONDS = 60.0
_MAX_SHARES = 1024
# The first that a request has is its key: another line must not make two of one client.
_KEY_LINES = tuple(re.compile(rb"\r\n%b:[ \t]*(?:bearer )?([^\r]*)" % name, re.IGNORECASE) for name in KEY_HEADERS)
_HASH_DIGITS = 12
# In so many parts of half of `wait_seconds` others have waited for a body that is not whole: it lends its room.
_SLOW_TICKS = 4
_OK = 200

log = logging.getLogger("highwater.door")


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


class DoorCounts:
    """Plain numbers, counted on the event loop's thread: a scrape only reads."""

    def __init__(self) -> None:
        self.requests = 0  # with images or videos
        self.waited = 0  # times that one had to; in mode `observe`: would have had to
        self.waited_seconds = 0.0
        self.refused: Counter[str] = Counter()  # by reason; in mode `observe`: those that would have been
        self.items: Counter[str] = Counter()  # by form
        self.faults = 0  # bodies that were passed on unread, because the scanner failed


class Share:
    """What the requests of one API key have inside, and when one of them came last."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.inside = NOTHING
        self.seen_at = -math.inf


class Visit:
    """One request at the door.

    Attributes:
        inside: Its items that have room.
        wants: Its items that are known and have none yet.
        pieces: Of its body, that wait: ``waiting_bytes`` in all; the first has been looked at.
        last: The piece that makes it whole, if it waits to take back its room.
        body_has_ended: With the pieces that wait.
    """

    def __init__(self, door: Door, caller: Caller, head: RequestHead, path_class: str) -> None:
        self._door = door
        self._scanner: Scanner | None = Scanner()
        self.caller, self.head, self.path_class = caller, head, path_class
        self.inside = self.wants = self.cost = NOTHING
        self.item_tokens = 0  # of its largest item
        self.pieces: list[bytes] = []
        self.waiting_bytes = 0
        self.last: bytes | None = None
        self.body_has_ended = False
        self.is_whole = False  # all of its body has come
        self.has_lent = False  # its room, until then
        self.slow_ticks = 0  # in which others waited, while it had room and was not whole
        self.state: State = "inside"
        self.share: Share | None = None
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

    @property
    def keeps_some(self) -> bool:
        """True if some of its body has not gone on."""
        return self.last is not None or len(self.pieces) > 0

    def keep(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.waiting_bytes += len(piece)

    def take_pieces(self) -> list[bytes]:
        pieces, self.pieces, self.waiting_bytes = self.pieces, [], 0
        return pieces

    def take(self, piece: bytes) -> bool:
        """Look at a piece of the body, and return whether it may go on; if not, the caller is called when it may.

        Raises DoorRefusal: it cannot go in.
        """
        if self._scanner is None:
            return True
        try:
            found = self._scanner.feed(piece)
        except Exception:
            # Broad: a fault of ours in reading an image must not cost the request.
            log.exception("the images of a request could not be read: it is passed on")
            self._door.counts.faults += 1
            self._scanner = None
            return True
        return not found or self._door.ask(self, found)

    def finish(self) -> bool:
        """Return whether the last piece of the body may go on; as ``take``, and may be asked again."""
        if not self.is_whole:
            self.is_whole = True
            if self.has_lent:
                self._door.take_back(self)
        return not self.waits

    def add(self, media: Media, cost: Cost) -> None:
        self.wants += cost
        self.cost += cost
        self.item_tokens = max(self.item_tokens, cost.encoder_tokens)
        self.largest.append(media)
        if len(self.largest) > ITEMS_KEPT:
            self.largest.sort(key=lambda each: each.pixels, reverse=True)
            del self.largest[ITEMS_KEPT:]

    def leave(self) -> None:
        """Give back its room for good; the rest of its body is not looked at."""
        self._scanner = None
        self._door.leave(self)

    def end(self, status: int) -> None:
        # One that ends inside without a response of its own has not been answered: its images may be why.
        state: State = "passed" if self.state == "inside" and status == _OK else self.state
        self.leave()
        self.state = state
        self._door.end(self, status)

    def record(self, ended_at: float | None = None, status: int | None = None) -> RequestItems:
        return RequestItems(
            request_id=self.head.request_id().decode(),
            client=None if self.share is None else self.share.client,
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
        self.encoded_tokens = self.most_tokens = 0  # since `take_tokens`
        self._clock, self._wall = clock, wall
        self._later = later or (lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call))
        self._running: dict[Visit, None] = {}  # with items
        self._last: deque[RequestItems] = deque(maxlen=REQUESTS_KEPT)
        self._waiting: dict[Visit, None] = {}  # in the order in which they began to
        self._moving = 0  # visits that move
        self._shares: OrderedDict[str, Share] = OrderedDict()  # by key, the one that sent an item last at the end
        self._held_until = -math.inf
        self._held_for = ""
        self._ticks: Timer | None = None  # while some wait

    # --- for those who watch and decide ---

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_held(self) -> bool:
        return self._clock() < self._held_until

    @property
    def counted(self) -> tuple[object, ...]:
        """Values that change whenever anything does that is counted."""
        counts = self.counts
        sums = counts.requests, counts.waited, counts.refused.total(), counts.items.total(), counts.faults
        return self.mode, self.limits, self.inside, self.waiting, *sums

    def take_tokens(self) -> tuple[int, int]:
        """Return the tokens of the largest item that was answered since the last call, and the most in flight."""
        taken = self.encoded_tokens, self.most_tokens
        self.encoded_tokens, self.most_tokens = 0, self.inside.encoder_tokens
        return taken

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
        if self.mode == "off" or (is_whole and not may_have_media(piece)):
            return None
        return Visit(self, caller, head, path_class)

    def ask(self, visit: Visit, found: list[Media]) -> bool:
        """Admit a visit's further items: True, or False where it waits for that. Raises DoorRefusal."""
        if visit not in self._running:
            self._begin(visit)
        for media in found:
            self.counts.items[media.form] += 1
            visit.add(media, cost_of(media, self.limits))
        limit, takes = self.limits.request_bytes, (visit.inside + visit.wants).decoded_bytes
        if limit is not None and takes > limit:
            words = f"the images and videos of this request take {takes} bytes once decoded"
            self._refuse(
                visit, Failure(413, TOO_LARGE, f"{words}; at most {limit} can be in flight (door.decoded_bytes)")
            )
            self._admit(visit)  # observed only
            return True
        return visit.has_lent or self._enter(visit)

    def take_back(self, visit: Visit) -> None:
        """Admit a visit that has lent its room, or have it wait for that. Raises DoorRefusal."""
        visit.has_lent = False
        self._enter(visit)

    def leave(self, visit: Visit) -> None:
        if visit not in self._running:
            return
        if visit.waits:
            self._end_wait(visit)
        self._moving -= visit.moves
        self.inside -= visit.inside
        if visit.share is not None:
            visit.share.inside -= visit.inside
        visit.inside = visit.wants = NOTHING
        visit.has_lent = False
        visit.state = "refused" if visit.state == "refused" else "passed"
        self._admit_waiting()

    def end(self, visit: Visit, status: int) -> None:
        if visit in self._running:
            del self._running[visit]
            if status == _OK:
                self.encoded_tokens = max(self.encoded_tokens, visit.item_tokens)
            self._last.append(visit.record(self._wall(), status))

    def _begin(self, visit: Visit) -> None:
        self.counts.requests += 1
        self._running[visit] = None
        visit.started_at = self._wall()
        key = next((found for line in _KEY_LINES if (found := line.search(visit.head.raw))), None)
        if key is not None:
            client = hashlib.sha256(key[1].strip()).hexdigest()[:_HASH_DIGITS]
            visit.share = self._shares.setdefault(client, Share(client))
            visit.share.seen_at = self._clock()
            self._shares.move_to_end(client)
            if len(self._shares) > _MAX_SHARES:
                oldest = next((name for name, share in self._shares.items() if not share.inside.items), client)
                del self._shares[oldest]

    # --- room ---

    def _enter(self, visit: Visit) -> bool:
        if not self._has_room(visit):
            self.counts.waited += 1
            if self.mode == "on":
                self._wait(visit)
                return False
        self._admit(visit)
        return True

    def _admit(self, visit: Visit) -> None:
        self._moving += not visit.moves
        self.inside += visit.wants
        self.most_tokens = max(self.most_tokens, self.inside.encoder_tokens)
        visit.inside += visit.wants
        if visit.share is not None:
            visit.share.inside += visit.wants
        visit.wants = NOTHING
        visit.state = "inside"

    def _short_of(self, visit: Visit) -> tuple[str, str, int, int] | None:
        """Return the first figure that would be exceeded: its setting, its unit, what is taken, the limit."""
        after = self.inside + visit.wants
        for name, unit in FIGURES:
            limit = getattr(self.limits, name)
            if limit is not None and getattr(after, name) > limit:
                return name, unit, getattr(self.inside, name), limit
        return None

    def _has_room(self, visit: Visit) -> bool:
        self._waiting[visit] = None
        is_next = self._next() is visit
        del self._waiting[visit]
        return is_next

    def _next(self) -> Visit | None:
        """Return the first of those waiting that may go on, those with a part inside before the others.

        Passed over are those that no other's end would help: who want more than there is, or have their key's half.
        """
        for visit in () if self.is_held else sorted(self._waiting, key=lambda each: not each.inside.items):
            if self._is_over_room(visit):
                continue
            if self._moving == visit.moves:  # no other's end will make room
                return visit
            if self._short_of(visit) is not None:
                return None
            if not self._is_over_share(visit):
                return visit
        return None

    def _is_over_room(self, visit: Visit) -> bool:
        """Return whether it is too large for the room that there is just now, even if nobody else were inside."""
        limits, takes = self.limits, visit.inside + visit.wants
        if limits.device_tokens is not None and takes.encoder_tokens > limits.device_tokens:
            return True
        return limits.decoded_bytes is not None and takes.decoded_bytes > limits.decoded_bytes

    def _is_over_share(self, visit: Visit) -> bool:
        """Return whether its key's requests would take more than half, and others have sent images lately."""
        share = visit.share
        if share is None or share.inside.items == visit.inside.items:
            return False
        others = (each for each in reversed(self._shares.values()) if each is not share)
        newest = next(others, None)
        if newest is None or self._clock() - newest.seen_at > _SHARES_SECONDS:
            return False
        after = share.inside + visit.wants
        limits = ((getattr(after, name), getattr(self.limits, name)) for name, _ in FIGURES)
        return any(limit is not None and 2 * takes > limit for takes, limit in limits)

    def _lend(self, visit: Visit) -> None:
        """Give its room to others until its body is whole: the engine decodes nothing before."""
        self._moving -= visit.moves
        self.inside -= visit.inside
        if visit.share is not None:
            visit.share.inside -= visit.inside
        visit.wants += visit.inside
        visit.inside = NOTHING
        visit.has_lent, visit.state = True, "waiting"

    # --- waiting ---

    def _tick(self) -> None:
        """Count the time in which others wait for a body that comes slowly; from a limit on it lends its room."""
        self._ticks = None
        if not self._waiting:
            return
        for visit in self._running:
            if visit.moves and not visit.is_whole:
                visit.slow_ticks += 1
                if visit.slow_ticks >= _SLOW_TICKS:
                    self._lend(visit)
        self._admit_waiting()
        self._start_ticks()

    def _start_ticks(self) -> None:
        if self._waiting and self._ticks is None:
            self._ticks = self._later(self.limits.wait_seconds / (2 * _SLOW_TICKS), self._tick)

    def _wait(self, visit: Visit) -> None:
        left = self.limits.wait_seconds - visit.waited_seconds
        if left <= 0:
            self._refuse(visit, self._waited_too_long(visit))
        if self.waiting >= self.limits.max_waiting:
            message = f"{self.waiting} requests wait already for room for their images (door.max_waiting)"
            failure = Failure(503, FULL, message, RETRY_AFTER_SECONDS)
            gives_way = self._one_too_many(visit)
            if gives_way is None:
                self._refuse(visit, failure)
            else:
                self._turn_away(gives_way, failure)
        self._moving -= visit.moves
        visit.waits_since = self._clock()
        visit.state = "waiting"
        self._waiting[visit] = None
        visit.deadline = self._later(left, lambda: self._give_up(visit))
        self._later(0.0, self._admit_waiting)  # it may be the last that moved
        self._start_ticks()

    def _one_too_many(self, visit: Visit) -> Visit | None:
        """Return the last that began to wait of another's key that has more than half of the places."""
        places = Counter(each.share for each in self._waiting if each.share is not None)
        for share, taken in places.most_common(1):
            if share is not visit.share and 2 * taken > self.limits.max_waiting:
                return next(each for each in reversed(self._waiting) if each.share is share)
        return None

    def _end_wait(self, visit: Visit) -> None:
        if visit.waits_since is not None:
            waited = self._clock() - visit.waits_since
            visit.waited_seconds += waited
            self.counts.waited_seconds += waited
        if visit.deadline is not None:
            visit.deadline.cancel()
        visit.waits_since = visit.deadline = None
        self._moving += visit.moves
        del self._waiting[visit]

    def _give_up(self, visit: Visit) -> None:
        self._turn_away(visit, self._waited_too_long(visit))

    def _turn_away(self, visit: Visit, failure: Failure) -> None:
        self._end_wait(visit)
        try:
            self._refuse(visit, failure)
        except DoorRefusal:
            visit.caller.door_refuses(failure)

    def _waited_too_long(self, visit: Visit) -> Failure:
        short, device = self._short_of(visit), self.limits.device_tokens
        if self.is_held:
            why = self._held_for
        elif device is not None and (takes := (visit.inside + visit.wants).encoder_tokens) > device:
            why = f"they take {takes} encoder tokens, and the device has memory for {device} just now"
            why += " (door.encoder_tokens)"
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
        while self._waiting:
            visit = self._next() if self.mode == "on" else next(iter(self._waiting))
            if visit is None:
                return
            self._end_wait(visit)
            self._admit(visit)
            self._later(0.0, visit.caller.door_opens)
