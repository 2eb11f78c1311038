"""The C library's allocator, told to keep what it has.

Pieces of a large body are 256 KB each. By default glibc maps and unmaps memory of that size each time it is asked, and
the kernel clears every page anew: more CPU than all else that an upload costs. Kept, the same few pages are used again.
"""

from __future__ import annotations

import ctypes

# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST_IN_THE_HEAP = 4 * 1024 * 1024
_KEPT_AT_ITS_END = 16 * 1024 * 1024


def keep_pages() -> bool:
    """Keep freed pieces of bodies for the next ones; tell whether that could be done (only with glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, macOS
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MOST_IN_THE_HEAP) and mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_ITS_END))
