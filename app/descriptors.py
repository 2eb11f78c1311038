"""How many files this process may have open, which bounds how many connections it can have."""

from __future__ import annotations

import resource

# For all but the data plane: the control plane's connections, files, logs, the sidecar's own paths when connections
# for the engine are used up.
RESERVED = 96
# One core carries no more of them, and each costs memory.
MAX_CONNECTIONS = 16_384
_PER_CONNECTION = 2  # a client's, and the engine's for its request


def raise_limit() -> int:
    """Raise the soft limit to the hard one, and return what then holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS names a hard limit that it does not grant
            return soft
    return hard


def room_for_connections() -> int:
    """How many clients may be connected under the limit that holds."""
    return _room(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def room_at_most() -> int:
    """How many clients may be connected once the limit is raised."""
    return _room(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def default_connections() -> int:
    """How many clients may be connected where no setting says it."""
    return min(room_for_connections(), MAX_CONNECTIONS)


def _room(limit: int) -> int:
    if limit == resource.RLIM_INFINITY:
        return 2**31
    return max((limit - RESERVED) // _PER_CONNECTION, 1)
