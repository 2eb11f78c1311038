"""Options of the C library's allocator that suit pieces of large bodies.

Pieces of a large body are 256 KB each. By default glibc maps and unmaps memory of that size at each call, and the
kernel clears every page again: more CPU than everything else that an upload costs. Retained, the same few pages are
used again.
"""

from __future__ import annotations

import ctypes

# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_HEAP_BLOCK_BYTES = 4 * 1024 * 1024
_RETAINED_AT_HEAP_END_BYTES = 16 * 1024 * 1024


def retain_freed_memory() -> bool:
    """Retain freed pieces of bodies for the next ones; return whether that could be done (only with glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, macOS
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, _RETAINED_AT_HEAP_END_BYTES)
    )
