"""New connections do not queue behind each other for a turn of the loop each."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from gated_proxy.transports import ACCEPTED_PER_TURN, serve_on
from tests.patience import patience

CLIENTS = 5 * ACCEPTED_PER_TURN


class Turns:
    """Counts turns of the loop, and connections made in each."""

    def __init__(self) -> None:
        self.turn = 0
        self.made: list[int] = []

    def protocol(self) -> asyncio.Protocol:
        turns = self

        class Made(asyncio.Protocol):
            def connection_made(self, _: asyncio.BaseTransport) -> None:
                turns.made.append(turns.turn)

        return Made()

    def spin(self) -> None:
        self.turn += 1
        if len(self.made) < CLIENTS and self.turn < 100 * CLIENTS:
            asyncio.get_running_loop().call_soon(self.spin)


async def most_in_a_turn(*, several: bool) -> int:
    turns = Turns()
    listening = socket.create_server(("127.0.0.1", 0), backlog=2 * CLIENTS)
    if several:
        servers = await serve_on([listening], turns.protocol, tls=None, backlog=2 * CLIENTS)
    else:
        servers = [await asyncio.get_running_loop().create_server(turns.protocol, sock=listening)]
    clients = [socket.create_connection(listening.getsockname()) for _ in range(CLIENTS)]
    turns.spin()
    async with patience():
        while len(turns.made) < CLIENTS:  # noqa: ASYNC110 - each turn of the loop is counted
            await asyncio.sleep(0)
    for client in clients:
        client.close()
    for server in servers:
        server.close()
        await server.wait_closed()
    return max(turns.made.count(turn) for turn in turns.made)


def test_several_clients_are_accepted_in_one_turn():
    """Those that wait when a turn begins; by itself libuv takes one."""
    assert uvloop.run(most_in_a_turn(several=False)) == 1
    assert uvloop.run(most_in_a_turn(several=True)) >= ACCEPTED_PER_TURN - 1
