"""The two sides of a connection: writes of one turn of the loop go out together, and reads can be held.

And calls to the kernel: about the far end, and to accept several connections in a turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterable

# What uvloop reads at once, and repeats up to 32 times before it serves another connection, as long as a read fills the
# buffer. One upload would keep every stream waiting.
FULL_READ_BYTES = 256 * 1024
_MUCH_BYTES = 32 * 1024
# Requests that wait, or pieces of one that wait for the engine or at the door; above it the client is not read. Not
# before: only reading notices that it leaves.
MAX_WAITING_BYTES = 64 * 1024
_NO_LINGER = struct.pack("ii", 1, 0)
# The far end has closed its side, or the connection is closed; reported for a socket that is not read, too.
_HANGS_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
# A peer that vanished is found out within 60 s and nine probes, 15 s apart. macOS has other names.
_PROBES = tuple(
    (getattr(socket, name), seconds)
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15))
    if hasattr(socket, name)
)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the kernel probe a silent peer; without it the connection of a vanished one would never close."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # it is closed already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in _PROBES:
                sock.setsockopt(socket.IPPROTO_TCP, option, seconds)


def has_hung_up(transport: asyncio.BaseTransport) -> bool:
    """Return whether the far end has closed, even where unread bytes come before its end."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), _HANGS_UP)
    return bool(poll.poll(0))


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Return the far end's address and port, also after it has left; ``unix`` where it has none."""
    address = transport.get_extra_info("peername")
    if address is None:
        return "unknown"
    if not isinstance(address, tuple):
        return "unix"
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class WriteBatch:
    """Collects the writes of one turn of the loop, and sends them at its end.

    Then a head and its body are one packet, and the far ends are woken once for all the streams that an engine's step
    has moved.
    """

    def __init__(self) -> None:
        self._sides: list[WriteSide] = []

    def add(self, side: WriteSide) -> None:
        if not self._sides:
            asyncio.get_running_loop().call_soon(self._flush)
        self._sides.append(side)

    def _flush(self) -> None:
        sides, self._sides = self._sides, []
        for side in sides:
            side.flush()


class WriteSide:
    """The only writer to a transport; the batch sends its writes at the end of the loop's turn."""

    __slots__ = ("_batch", "_pending", "_transport", "_unsent", "_write")

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch) -> None:
        self._transport = transport
        self._write = transport.write
        self._batch = batch
        self._pending: list[bytes] = []
        self._unsent: list[bytes] | None = None  # once it is kept: writes that came too late for the transport

    def keep_unsent(self) -> None:
        """Keep what cannot be sent from now on, until the first bytes are sent."""
        self._unsent = []

    def take_unsent(self) -> list[bytes] | None:
        """Return all that was written since ``keep_unsent``, if no byte of it has been sent; else None."""
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            unsent += self._pending
            self._pending.clear()
        return unsent

    def write(self, data: bytes) -> None:
        """Send data at the end of the turn; at once if it is much, for then a slow far end must be noticed."""
        if len(data) >= _MUCH_BYTES:
            self.flush()
            self._pending.append(data)
            self.flush()
            return
        if not self._pending:
            self._batch.add(self)
        self._pending.append(data)

    def flush(self) -> None:
        pending = self._pending
        if pending:
            if self._transport.is_closing():
                if self._unsent is not None:
                    self._unsent += pending
                pending.clear()
                return
            data = pending[0] if len(pending) == 1 else b"".join(pending)
            pending.clear()
            self._unsent = None
            self._write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def finish(self) -> None:
        """Close this side alone once all is sent, where the transport can do that; reading goes on."""
        self.flush()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def reset(self) -> None:
        """Close in a way that nobody takes for a clean end: the far end's next read fails."""
        self.flush()
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def abort(self) -> None:
        self._pending.clear()
        self._transport.abort()


class ReadSide:
    """Reads of one transport: held for several reasons at once, and after a long read until the loop's next turn."""

    __slots__ = ("_holders", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._holders: set[str] = set()

    def hold(self, why: str) -> None:
        if not self._holders and not self._transport.is_closing():
            self._transport.pause_reading()
        self._holders.add(why)

    @property
    def is_held(self) -> bool:
        """True while reading is stopped, when the far end can leave unnoticed."""
        return bool(self._holders)

    def let_go(self, why: str) -> None:
        if why in self._holders:
            self._holders.discard(why)
            if not self._holders and not self._transport.is_closing():
                self._transport.resume_reading()

    def let_go_all(self) -> None:
        for why in list(self._holders):
            self.let_go(why)

    def give_way(self) -> None:
        """Let the other connections have their turn after a read that filled the buffer."""
        self.hold("turn")
        asyncio.get_running_loop().call_soon(self.let_go, "turn")


class WaitingPieces:
    """Pieces of a body that wait, in their order; too many of them hold the client's read side."""

    __slots__ = ("_bytes", "_pieces", "_read_side", "_why")

    def __init__(self, read_side: ReadSide, why: str) -> None:
        self._read_side = read_side
        self._why = why
        self._pieces: list[bytes] = []
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)
        if self._bytes > MAX_WAITING_BYTES:
            self._read_side.hold(self._why)

    def put_back(self, pieces: list[bytes]) -> None:
        self._pieces[:0] = pieces
        self._bytes += sum(len(piece) for piece in pieces)

    def take(self) -> list[bytes]:
        taken, self._pieces, self._bytes = self._pieces, [], 0
        self._read_side.let_go(self._why)
        return taken

    def send(self, write_side: WriteSide) -> None:
        for piece in self.take():
            write_side.write(piece)


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


# Each costs a system call that finds nothing whenever a single client connects.
ACCEPTED_PER_TURN = 8
# A connection is counted once its TLS handshake is over; until then it takes a descriptor, and for no longer.
HANDSHAKE_SECONDS = 5.0


async def serve_on(
    listening: Iterable[socket.socket],
    make_protocol: Callable[[], asyncio.Protocol],
    *,
    tls: ssl.SSLContext | None,
    backlog: int,
) -> list[asyncio.Server]:
    """Serve on sockets that listen already, on each several times; return the servers, which are to be closed.

    libuv, below uvloop, accepts one connection for each listening descriptor and turn of the loop. While many streams
    keep the loop busy a turn takes milliseconds, and a new client, a probe too, would wait a second behind a few
    hundred others. Each duplicate of the descriptor accepts one more in the same turn.
    """
    loop = asyncio.get_running_loop()
    sockets = [
        sock
        for each in listening
        for sock in (each, *(socket.fromfd(each.fileno(), each.family, each.type) for _ in range(1, ACCEPTED_PER_TURN)))
    ]
    return [
        await loop.create_server(
            make_protocol,
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
            backlog=backlog,
        )
        for sock in sockets
    ]
