"""The clients connected to one port, and the limits on them.

Each port has its own: clients that use up the data port's connections take none from the probes on the control port.
"""

from __future__ import annotations

from collections.abc import Iterator

from highwater.process.limited_log import LimitedLog
from highwater.proxy.failures import Failure
from highwater.proxy.roles import Client


class Clients:
    """The clients connected to one port: at most ``limit``, and the error for those above it. None: no limit."""

    def __init__(self, limit: int | None, too_many: Failure, log: LimitedLog) -> None:
        self.limit = limit
        self.too_many = too_many
        self._log = log
        self._connected: set[Client] = set()

    def __len__(self) -> int:
        return len(self._connected)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._connected)

    @property
    def surplus(self) -> int:
        return 0 if self.limit is None else len(self._connected) - self.limit

    def add(self, client: Client) -> None:
        self._connected.add(client)

    def discard(self, client: Client) -> None:
        self._connected.discard(client)

    def shed_unread(self, max_bytes: int) -> None:
        """Cut the clients with the most unread bytes, where all of them together leave more than ``max_bytes``.

        The sidecar's own responses are made whole, one a connection; but connections are many, and some responses have
        megabytes.
        """
        unread = [(size, id(client), client) for client in self._connected if (size := client.unread_bytes)]
        total = sum(size for size, _, _ in unread)
        for size, _, client in sorted(unread, reverse=True):
            if total <= max_bytes:
                return
            total -= size
            self._log.warning(
                "unread",
                "%s has not read %d bytes of its responses, and all clients together left too many unread: cut",
                client.peer,
                size,
            )
            client.drop()


class UnreadWatch:
    """Judges, tick by tick, a client that does not take a complete response: it holds memory meanwhile.

    It has ``wait_ticks``, and one more for each ``held_bytes_per_tick``; in ``wait_ticks`` it must take something.
    """

    def __init__(self, wait_ticks: float, held_bytes_per_tick: float) -> None:
        self._wait_ticks = wait_ticks
        self._held_bytes_per_tick = held_bytes_per_tick
        self._unsent = 0  # bytes at the last tick
        self._ticks = 0.0  # for which they have waited
        self._patience = 0.0  # ticks for which they may wait
        self._untaken_ticks = 0  # in which the client took none of them

    def restart(self) -> None:
        self._ticks = 0.0

    def is_over(self, unsent: int) -> bool:
        """Count one tick with so many bytes unsent, and return whether the time has passed."""
        if not unsent:
            self._unsent = self._untaken_ticks = 0
            self._ticks = 0.0
            return False
        if not self._ticks:
            self._patience = self._wait_ticks + unsent / self._held_bytes_per_tick
        self._ticks += 1
        self._untaken_ticks = self._untaken_ticks + 1 if unsent == self._unsent else 0
        self._unsent = unsent
        return self._untaken_ticks > self._wait_ticks or self._ticks > self._patience
