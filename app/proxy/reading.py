"""Whether a transport is read: several may ask it to wait, and nobody may take more than a turn."""

from __future__ import annotations

import asyncio

# What uvloop reads at once, and repeats up to 32 times before it looks at any other connection, as long as a read
# fills the buffer. One upload would keep every stream waiting.
FULL_READ_BYTES = 256 * 1024


class Reading:
    """Reads of one transport.

    Args:
        transport: read from the start.
    """

    __slots__ = ("_holders", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._holders: set[str] = set()

    def hold(self, why: str) -> None:
        """Read no more until it is let go for the same reason."""
        if not self._holders and not self._transport.is_closing():
            self._transport.pause_reading()
        self._holders.add(why)

    def let_go(self, why: str) -> None:
        """Read on, if nobody else holds it."""
        if why in self._holders:
            self._holders.discard(why)
            if not self._holders and not self._transport.is_closing():
                self._transport.resume_reading()

    def let_go_all(self) -> None:
        """Read on, whoever holds it."""
        for why in list(self._holders):
            self.let_go(why)

    def give_way(self) -> None:
        """After a read that filled the buffer, the others have their turn."""
        self.hold("turn")
        asyncio.get_running_loop().call_soon(self.let_go, "turn")
