"""What glibc's allocator says of this process: its own count of what it has from the system, in use and free."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
# mallinfo(3): bytes from brk and arenas, in mappings of their own, in use, free, and free at the heap's end.
_NAMES = {
    "arena": "arena_bytes",
    "hblkhd": "mapped_bytes",
    "uordblks": "used_bytes",
    "fordblks": "free_bytes",
    "keepcost": "top_bytes",
}


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def read_malloc(library: Any = None) -> dict[str, int] | None:  # noqa: ANN401 - ctypes' library
    """Return glibc's figures; None where it is another C library, or older than 2.33.

    Args:
        library: The C library; a test brings its own.
    """
    with suppress(Exception):  # musl has none; an allocator put in glibc's place may have less
        function = (library or ctypes.CDLL(None)).mallinfo2
        function.restype, function.argtypes = _Mallinfo2, []
        found = function()
        return {name: int(getattr(found, field)) for field, name in _NAMES.items()}
    return None
