"""Pieces of a request that cannot be sent to the engine yet."""

from __future__ import annotations

from highwater.proxy.transports import ReadSide, WriteSide

# Above it the client is not read.
_MAX_WAITING_BYTES = 64 * 1024


class WaitingPieces:
    """Pieces in the order in which they go to the engine; too many of them stop the client's read side."""

    __slots__ = ("_bytes", "_pieces", "_read_side")

    def __init__(self, read_side: ReadSide) -> None:
        self._read_side = read_side
        self._pieces: list[bytes] = []
        self._bytes = 0

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)
        if self._bytes > _MAX_WAITING_BYTES:
            self._read_side.hold("waiting")

    def put_back(self, pieces: list[bytes]) -> None:
        self._pieces[:0] = pieces
        self._bytes += sum(len(piece) for piece in pieces)

    def send(self, write_side: WriteSide) -> None:
        if self._pieces:
            for piece in self._pieces:
                write_side.write(piece)
            self.drop()

    def drop(self) -> None:
        if self._bytes:
            self._pieces.clear()
            self._bytes = 0
            self._read_side.let_go("waiting")
