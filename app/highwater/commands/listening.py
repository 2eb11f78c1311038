"""The sockets that the sidecar listens on, bound before anything else begins; or the reason why they cannot be."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from highwater.commands.healthcheck import PATHS, ask
from highwater.errors import os_reason
from highwater.flaws import masked

BACKLOG: Final = 2048
_PROBE_SECONDS: Final = 0.3


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on each address of ``host`` that this machine has; clients wait there until somebody accepts them.

    Raises OSError where one of them is taken, or there is none.
    """
    sockets = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
        except OSError as exc:
            # Without IPv6, localhost has a second address all the same.
            if exc.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                raise OSError(exc.errno, os.strerror(exc.errno or 0)) from exc
    if not sockets:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return sockets


def listening_problem(exc: OSError, setting: str, host: str, port: int) -> str:
    """Return why ``host`` and ``port``, of ``setting``, cannot be listened on, the change, and what listens there."""
    if isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL:
        return (
            f"host: {masked(host)!r} is no address of this machine ({os_reason(exc)}); set host to one, to 127.0.0.1 "
            "for this machine alone, or to 0.0.0.0 for all of its addresses"
        )
    problem = f"{setting}: cannot listen on {host} port {port}: {os_reason(exc)}"
    if exc.errno == errno.EADDRINUSE:
        return f"{problem}{_listener(host, port)}; stop it, or set {setting} to a port that is free"
    if exc.errno == errno.EACCES:
        return f"{problem}; set {setting} to 1024 or above, or grant the capability NET_BIND_SERVICE"
    return f"{problem}; set {setting} to a port that is free, and host to an address of this machine"


def _listener(host: str, port: int) -> str:
    """Return what serves on a port, as far as its health paths show."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared with, not bound to
    base = f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"
    if ask(base, PATHS["live"], _PROBE_SECONDS) is None:
        return " (what has it answers /livez, as a sidecar does)"
    if ask(base, "/health", _PROBE_SECONDS) is None:
        return " (what has it answers /health, as vLLM does)"
    return ""
