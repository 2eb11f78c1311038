"""The limit of open files of this process, which bounds the number of its connections."""

from __future__ import annotations

import resource

# Kept from the data plane: for the control plane's connections, files and logs, and for the sidecar's paths once the
# connections for the engine are used up.
RESERVED = 96
# One core carries no more of them, and each costs memory.
MAX_CONNECTIONS = 16_384
_PER_CONNECTION = 2  # a client's, and the engine's for its request


def raise_limit() -> int:
    """Raise the soft limit to the hard one, and return the limit in force then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS names a hard limit that it does not grant
            return soft
    return hard


def room_for_connections() -> int:
    """Return how many clients may be connected under the limit in force."""
    return _room(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def room_at_most() -> int:
    """Return how many clients may be connected once the limit is raised."""
    return _room(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def default_connections() -> int:
    """Return how many clients may be connected where no setting limits them."""
    return min(room_for_connections(), MAX_CONNECTIONS)


def _room(limit: int) -> int:
    if limit == resource.RLIM_INFINITY:
        return 2**31
    return max((limit - RESERVED) // _PER_CONNECTION, 1)
