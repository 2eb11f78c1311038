"""The port that an engine's URL leads to."""

from __future__ import annotations

from urllib.parse import SplitResult

_DEFAULT_PORTS = {"http": 80, "https": 443}


def port_of(url: SplitResult) -> int:
    """Return the port that a URL names, or its scheme's; 0 for a socket's path."""
    return url.port or _DEFAULT_PORTS.get(url.scheme, 0)
