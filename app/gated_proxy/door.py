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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

from gated_proxy.door_items import FIGURES, NOTHING, Cost, DoorLimits, Media, RequestItems, cost_of
from gated_proxy.door_scanner import may_have_media
from gated_proxy.door_visit import Visit
from gated_proxy.failures import RETRY_AFTER_SECONDS, Failure, Refused
from gated_proxy.gate import Later, on_the_loop
from gated_proxy.heads import KEY_HEADERS, RequestHead

Mode = Literal["off", "observe", "on"]
REASONS = TOO_LARGE, TIMEOUT, FULL = "door_too_large", "door_timeout", "door_full"

REQUESTS_KEPT = 256
# A client that has sent no image for so long takes no part in the sharing.
_SHARES_SECONDS = 60.0
# The first that a request has is its key: another line must not make two of one client.
_KEY_LINES = tuple(re.compile(rb"\r\n%b:[ \t]*(?:bearer )?([^\r]*)" % name, re.IGNORECASE) for name in KEY_HEADERS)
_HASH_DIGITS = 12
# In so many parts of half of `wait_seconds` others have waited for a body that is not whole: it lends its room.
_SLOW_TICKS = 4
_OK = 200

log = logging.getLogger("highwater.door")


class DoorCounts:
    """Plain numbers, counted on the event loop's thread: a scrape only reads."""

    def __init__(self) -> None:
        self.requests = 0  # with images or videos
        self.waited = 0  # times that one had to; in mode `observe`: would have had to
        self.waited_seconds = 0.0
        self.refused: Counter[str] = Counter()  # by reason; in mode `observe`: those that would have been
        self.items: Counter[str] = Counter()  # by form
        self.faults = 0  # bodies that were passed on unread, because the scanner failed


class Door:
    """Admits requests by their items, and counts what is inside.

    ``clock`` is monotonic seconds, ``wall`` Unix seconds; ``later`` calls back after so many seconds.
    """

    def __init__(
        self,
        *,
        mode: Mode = "off",
        limits: DoorLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        later: Later = on_the_loop,
    ) -> None:
        self.mode: Mode = mode
        self.limits = limits or DoorLimits()
        self.counts = DoorCounts()
        self.inside = NOTHING
        self.encoded_tokens = self.most_tokens = 0  # since `take_tokens`
        self._clock, self._wall, self._later = clock, wall, later
        self._running: dict[Visit, None] = {}  # with items
        self._last: deque[RequestItems] = deque(maxlen=REQUESTS_KEPT)
        # Each with its deadline, in the order in which they began to.
        self._waiting: dict[Visit, asyncio.TimerHandle] = {}
        self._seen: dict[str, float] = {}  # the two clients that sent an item last, and when: one of them is another
        self._held_until = -math.inf
        self._held_for = ""
        self._ticks: asyncio.TimerHandle | None = None  # while some wait

    # --- for those who watch and decide ---

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def held_for(self) -> str | None:
        """Why nobody is let in just now."""
        return self._held_for if self._clock() < self._held_until else None

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
        self.mode, self.limits = mode, limits
        self._admit_waiting()

    def hold(self, seconds: float, why: str) -> None:
        """Let nobody in for a while, and for no longer: what holds traffic must be asked for again and again."""
        self._held_until, self._held_for = self._clock() + seconds, why
        self._later(seconds, self._admit_waiting)

    # --- for requests ---

    def visit(
        self,
        head: RequestHead,
        path_class: str,
        piece: bytes,
        *,
        opens: Callable[[], None],
        refuses: Callable[[Failure], None],
    ) -> Visit | None:
        """Return the visit of a request whose body begins so; None where the door is off, or that is a whole text.

        What had to wait goes on with ``opens``, or never with ``refuses``.
        """
        is_whole = len(piece) == head.declared_bytes
        if self.mode == "off" or (is_whole and not may_have_media(piece)):
            return None
        return Visit(head, path_class, opens, refuses)

    def take(self, visit: Visit, piece: bytes) -> bool:
        """Look at a piece of its body, and return whether it may go on; if not, the caller is called when it may.

        Raises Refused: it cannot go in.
        """
        if visit.scanner is None:
            return True
        try:
            found = visit.scanner.feed(piece)
        except Exception:
            # Broad: a fault of ours in reading an image must not cost the request.
            log.exception("the images of a request could not be read: it is passed on")
            self.counts.faults += 1
            visit.scanner = None
            return True
        return not found or self.ask(visit, found)

    def ask(self, visit: Visit, found: list[Media]) -> bool:
        """Admit a visit's further items: True, or False where it waits for that. Raises Refused."""
        if visit not in self._running:
            self._begin(visit)
        limit = self.limits.request_bytes
        most = math.inf if limit is None else limit
        for media, number in Counter(found).items():
            self.counts.items[media.form] += number
            visit.add(media, cost_of(media, self.limits), number)
            if self.mode == "on" and visit.cost.decoded_bytes > most:
                break  # the rest changes nothing, and may be thousands
        if visit.cost.decoded_bytes > most:
            words = f"the images and videos of this request take {visit.cost.decoded_bytes} bytes once decoded"
            message = f"{words}; at most {limit} can be in flight (door.decoded_bytes)"
            self._refuse(visit, Failure(413, TOO_LARGE, message))
            self._admit(visit)  # observed only
            return True
        return visit.has_lent or self._enter(visit)

    def finish(self, visit: Visit) -> bool:
        """Return whether the last piece of the body may go on; as ``take``, and may be asked again."""
        visit.is_whole = True
        if visit.has_lent:
            self._enter(visit)
        return not visit.waits

    def leave(self, visit: Visit) -> None:
        """Give back its room for good; the rest of its body is not looked at."""
        if visit.state != "refused":
            visit.state = "passed"
        self._give_back(visit)

    def end(self, visit: Visit, status: int) -> None:
        # One that ends inside without a response of its own has not been answered: its images may be why.
        if visit.state == "inside" and status == _OK:
            visit.state = "passed"
        self._give_back(visit)
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
            visit.client = client
            self._seen.pop(client, None)
            self._seen = dict([*self._seen.items(), (client, self._clock())][-2:])

    # --- room ---

    def _enter(self, visit: Visit) -> bool:
        if self._next(visit) is not visit:
            self.counts.waited += 1
            if self.mode == "on":
                self._wait(visit)
                return False
        self._admit(visit)
        return True

    def _admit(self, visit: Visit) -> None:
        self.inside += visit.wants
        self.most_tokens = max(self.most_tokens, self.inside.encoder_tokens)
        visit.inside = visit.cost
        visit.state = "inside"

    def _take_out(self, visit: Visit) -> None:
        self.inside -= visit.inside
        visit.inside = NOTHING

    def _give_back(self, visit: Visit) -> None:
        visit.scanner = None
        if visit in self._running:
            self._end_wait(visit)
            self._take_out(visit)
            self._admit_waiting()

    def _short_of(self, visit: Visit) -> tuple[str, str, int, int] | None:
        """Return the first figure that would be exceeded: its setting, its unit, what is taken, the limit."""
        after = self.inside + visit.wants
        for name, unit in FIGURES:
            limit = getattr(self.limits, name)
            if limit is not None and getattr(after, name) > limit:
                return name, unit, getattr(self.inside, name), limit
        return None

    def _next(self, *asking: Visit) -> Visit | None:
        """Return the first of those waiting, and then asking, that may go on, those with a part inside before others.

        Passed over are those that no other's end would help: who want more than there is, or have their key's half.
        """
        if self.held_for is not None:
            return None
        inside_by_client = cache(self._inside_by_client)  # many of one key may wait; most need no sum at all
        for visit in sorted((*self._waiting, *asking), key=lambda each: not each.inside.items):
            if self._is_over_room(visit):
                continue
            is_short = self._short_of(visit) is not None
            if not (is_short or self._is_over_share(visit, inside_by_client)):
                return visit
            if not any(each.moves for each in self._running if each is not visit):  # no other's end will make room
                return visit
            if is_short:
                return None
        return None

    def _is_over_room(self, visit: Visit) -> bool:
        """Return whether it is too large for the room that there is just now, even if nobody else were inside."""
        cost, limits = visit.cost, self.limits
        figures = (cost.encoder_tokens, limits.device_tokens), (cost.decoded_bytes, limits.decoded_bytes)
        return any(limit is not None and takes > limit for takes, limit in figures)

    def _inside_by_client(self) -> dict[str | None, Cost]:
        found: dict[str | None, Cost] = {}
        for each in self._running:
            if each.inside.items:
                found[each.client] = found.get(each.client, NOTHING) + each.inside
        return found

    def _is_over_share(self, visit: Visit, inside_by_client: Callable[[], dict[str | None, Cost]]) -> bool:
        """Return whether its key's requests would take more than half, and others have sent images lately."""
        others_at = max((at for client, at in self._seen.items() if client != visit.client), default=-math.inf)
        if visit.client is None or self._clock() - others_at > _SHARES_SECONDS:
            return False
        inside = inside_by_client().get(visit.client, NOTHING)
        taken = inside - visit.inside
        after = inside + visit.wants
        limits = ((getattr(after, name), getattr(self.limits, name)) for name, _ in FIGURES)
        return taken.items > 0 and any(limit is not None and 2 * takes > limit for takes, limit in limits)

    # --- waiting ---

    def _tick(self) -> None:
        """Count the time in which others wait for a body that comes slowly; from a limit on it lends its room.

        The engine decodes nothing before a body is whole.
        """
        self._ticks = None
        if not self._waiting:
            return
        for visit in self._running:
            if visit.moves and not visit.is_whole:
                visit.slow_ticks += 1
                if visit.slow_ticks >= _SLOW_TICKS:
                    self._take_out(visit)
                    visit.state = "waiting"
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
            # The last that began to wait gives way, of another's key that has more than half of the places.
            places = Counter(each.client for each in self._waiting if each.client is not None)
            greedy, taken = next(iter(places.most_common(1)), (None, 0))
            if greedy == visit.client or 2 * taken <= self.limits.max_waiting:
                self._refuse(visit, failure)
            self._turn_away(next(each for each in reversed(self._waiting) if each.client == greedy), failure)
        visit.waits_since = self._clock()
        visit.state = "waiting"
        self._waiting[visit] = self._later(left, lambda: self._turn_away(visit, self._waited_too_long(visit)))
        self._later(0.0, self._admit_waiting)  # it may be the last that moved
        self._start_ticks()

    def _end_wait(self, visit: Visit) -> None:
        if visit.waits_since is not None:
            waited = self._clock() - visit.waits_since
            visit.waited_seconds += waited
            self.counts.waited_seconds += waited
            visit.waits_since = None
            self._waiting.pop(visit).cancel()

    def _turn_away(self, visit: Visit, failure: Failure) -> None:
        self._end_wait(visit)
        self.counts.refused[failure.reason] += 1
        visit.state = "refused"
        visit.refuses(failure)

    def _waited_too_long(self, visit: Visit) -> Failure:
        short, device = self._short_of(visit), self.limits.device_tokens
        if (held_for := self.held_for) is not None:
            why = held_for
        elif device is not None and (takes := visit.cost.encoder_tokens) > device:
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
        """Count a refusal, and raise Refused unless the door only observes."""
        self.counts.refused[failure.reason] += 1
        if self.mode == "on":
            visit.state = "refused"
            raise Refused(failure)

    def _admit_waiting(self) -> None:
        while self._waiting:
            visit = self._next() if self.mode == "on" else next(iter(self._waiting))
            if visit is None:
                return
            self._end_wait(visit)
            self._admit(visit)
            self._later(0.0, visit.opens)
