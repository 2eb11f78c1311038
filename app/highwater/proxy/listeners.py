"""Accepts several connections in a turn of the loop.

libuv, below uvloop, accepts one connection for each listening descriptor and turn. While many streams keep the loop
busy a turn takes milliseconds, and a new client, a probe too, waits a second behind a few hundred others. Each
duplicate of the descriptor accepts one more in the same turn.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

# Each costs a system call that finds nothing whenever a single client connects.
ACCEPTED_PER_TURN = 8
# A connection is counted once its TLS handshake is over; until then it takes a descriptor, and for no longer.
HANDSHAKE_SECONDS = 5.0


async def accept_several(
    servers: Sequence[Any],  # uvloop's has a list of sockets where asyncio's has a tuple, and compiled code would mind
    make_protocol: Callable[[], Any],
    *,
    tls: ssl.SSLContext | None,
    backlog: int,
) -> list[Any]:
    """Listen several times on the sockets of servers that listen already; return further servers, to be closed too."""
    loop = asyncio.get_running_loop()
    handshake_seconds = None if tls is None else HANDSHAKE_SECONDS
    return [
        await loop.create_server(
            make_protocol,
            sock=socket.fromfd(sock.fileno(), sock.family, sock.type),
            ssl=tls,
            ssl_handshake_timeout=handshake_seconds,
            backlog=backlog,
        )
        for server in servers
        for sock in server.sockets
        for _ in range(ACCEPTED_PER_TURN - 1)
    ]
