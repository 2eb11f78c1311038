"""The resources of this process: open files, which bound its connections, and the C library's memory.

Pieces of a large body are 256 KB each. By default glibc maps and unmaps memory of that size at each call, and the
kernel clears every page again: more CPU than everything else that an upload costs. Retained, the same few pages are
used again.
"""

from __future__ import annotations

import ctypes
import resource

# Reserved for the control plane's connections, files and logs, and for the sidecar's paths once the connections for the
# engine are used up.
RESERVED = 96
# One core carries no more of them, and each costs memory.
MAX_CONNECTIONS = 16_384
_PER_CONNECTION = 2  # a client's, and the engine's for its request
# To a port that serves the control plane alone: live streams, scrapes, probes, operators. At most an eighth of the
# files.
MAX_CONTROL_CONNECTIONS = 256
_CONTROL_SHARE = 8
# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_HEAP_BLOCK_BYTES = 4 * 1024 * 1024
_RETAINED_AT_HEAP_END_BYTES = 16 * 1024 * 1024


def raise_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS names a hard limit that it does not grant
            return soft
    return hard


def room_at_most(*, has_control_port: bool = False) -> int:
    """Return how many clients may be connected to the data plane, beside a control port's, once the limit is raised."""
    return _room(resource.getrlimit(resource.RLIMIT_NOFILE)[1], has_control_port)


def default_connections(*, has_control_port: bool = False) -> int:
    return min(_room(resource.getrlimit(resource.RLIMIT_NOFILE)[0], has_control_port), MAX_CONNECTIONS)


def control_connections() -> int:
    return _for_control(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _for_control(limit: int) -> int:
    if limit == resource.RLIM_INFINITY:
        return MAX_CONTROL_CONNECTIONS
    return min(max(limit // _CONTROL_SHARE, 1), MAX_CONTROL_CONNECTIONS)


def _room(limit: int, has_control_port: bool) -> int:
    if limit == resource.RLIM_INFINITY:
        return 2**31
    reserved = RESERVED + (_for_control(limit) if has_control_port else 0)
    return max((limit - reserved) // _PER_CONNECTION, 1)


def retain_freed_memory() -> bool:
    """Retain freed pieces of bodies for the next ones; return whether that could be done (only with glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, macOS
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, _RETAINED_AT_HEAP_END_BYTES)
    )
