"""The resident part of an allocation: on a CPU worker, reserved pages that were never written cost nothing yet.

There the parts must fit into the process's resident size, so the KV cache counts with its resident pages. It refuses to
measure often: `mincore` costs about 3 ms per GiB, and every call of ours stops the engine.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from highwater_worker.memory.storages import Storage

_SHORTEST_SECONDS = 2.0
_SHARE = 1000
"""A measurement is used for so many times its duration: it costs at most a thousandth of the engine's time."""
_CHUNK_PAGES = 1 << 18
_LOWEST_BIT = bytes(value & 1 for value in range(256))


class Residency:
    """Measures resident bytes, and remembers them.

    Args:
        measure: Returns the resident bytes of an address range, None where that is unknown.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        measure: Callable[[int, int], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure or resident_bytes
        self._clock = clock
        self._whole: set[tuple[int, int]] = set()
        self._partial: dict[tuple[int, int], tuple[int | None, float]] = {}

    def total(self, storages: Iterable[Storage]) -> int | None:
        """Return the resident bytes of all storages, None where that is unknown."""
        parts = [self._resident(storage.pointer, storage.nbytes) for storage in storages]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def _resident(self, pointer: int, nbytes: int) -> int | None:
        key = (pointer, nbytes)
        # A storage once found whole stays so: vLLM gives no page of a KV cache back. On a machine that swaps, the
        # process's resident size can fall below it.
        if key in self._whole:
            return nbytes
        value, until = self._partial.get(key, (None, float("-inf")))
        if self._clock() < until:
            return value
        started = self._clock()
        value = self._measure(pointer, nbytes)
        cost = self._clock() - started
        if value == nbytes:
            self._whole.add(key)
            self._partial.pop(key, None)
        else:
            self._partial[key] = (value, self._clock() + max(_SHORTEST_SECONDS, _SHARE * cost))
        return value


def resident_bytes(pointer: int, nbytes: int) -> int | None:
    """Return how many bytes from `pointer` on are in memory, to the page; None where the C library has no `mincore`."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    page = mmap.PAGESIZE
    start = pointer // page * page
    pages = -(-(pointer + nbytes - start) // page)
    resident = 0
    for first in range(0, pages, _CHUNK_PAGES):
        vector = bytearray(min(_CHUNK_PAGES, pages - first))
        buffer = (ctypes.c_char * len(vector)).from_buffer(vector)
        if mincore(start + first * page, len(vector) * page, buffer) != 0:
            return None
        # Only the lowest bit of each byte is defined (mincore(2)).
        resident += vector.translate(_LOWEST_BIT).count(1)
    return min(nbytes, resident * page)
