"""Hostile clients of every kind at once.

`python -m tests.security.soak.attackers PORT SCALE SEED [NAME ...]` runs until its standard input ends, and then prints
as JSON what each kind of attack did. Every kind is bounded in connections,
rate and bytes. Each attack is one life of one connection; when that ends, another one begins.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_SMALL_BUFFER = 4096
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST
_HOST = b"Host: localhost\r\n"
_WRONG_TOKEN = b"Authorization: Bearer not-the-token\r\n"
# Longer than the sidecar waits for a head.
LIFE_SECONDS = (20.0, 100.0)


class Peer:
    """One connection of an attacker: only what is asked of it is read."""

    def __init__(self, connection: socket.socket, count: Counter[str], rng: random.Random) -> None:
        self._socket = connection
        self._count = count
        self._loop = asyncio.get_running_loop()
        self.rng = rng

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await self._loop.sock_sendall(self._socket, data)
        self._count["bytes_sent"] += len(data)

    async def push(self, data: bytes, times: int) -> None:
        """Send it so often, or until the sidecar takes no more for a second."""
        with suppress(TimeoutError):
            for _ in range(times):
                async with asyncio.timeout(1.0):  # noqa: TID251 - an attacker's own patience
                    await self.send(data)

    async def read(self, size: int = 65536) -> bytes:
        """Read what is there, and count the answers in it.

        Raises:
            ConnectionResetError: The sidecar closed.
        """
        data = await self._loop.sock_recv(self._socket, size)
        if not data:
            raise ConnectionResetError
        self._count.update(found.decode() for found in _STATUS.findall(data))
        return data

    async def read_for(self, seconds: float) -> None:
        """Read everything that comes for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # noqa: TID251 - as above
                while True:
                    await self.read()

    async def drip(self, data: bytes, seconds: float) -> None:
        """Send it a byte at a time."""
        for value in data:
            await self.send(bytes([value]))
            await self.read_for(seconds)

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def shut_write(self) -> None:
        """Send FIN, and go on reading."""
        self._socket.shutdown(socket.SHUT_WR)

    def life(self) -> float:
        """Return how long this connection is held, seconds."""
        return self.rng.uniform(*LIFE_SECONDS)


def _get(path: bytes, *headers: bytes) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + _HOST + b"".join(headers) + b"\r\n"


def _post(path: bytes, *headers: bytes) -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + _HOST + b"".join(headers) + b"\r\n"


def _chat(tokens: int) -> bytes:
    body = json.dumps({"id": "attacker", "max_tokens": tokens, "stream": True}).encode()
    return _post(b"/v1/chat/completions", b"Content-Length: %d\r\n" % len(body)) + body


def _upgrade() -> bytes:
    key = b"Sec-WebSocket-Key: " + base64.b64encode(bytes(16)) + b"\r\n"
    return _get(b"/v1/realtime", b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n", key)


async def slow_readers(peer: Peer) -> None:
    """Ask for a long stream or four megabytes and read a few bytes a second."""
    await peer.send(peer.rng.choice((_chat(2000), _get(b"/v1/huge"), _get(b"/memory/openapi.json"))))
    for _ in range(int(peer.life())):
        await peer.read(16)
        await asyncio.sleep(1.0)


async def non_readers(peer: Peer) -> None:
    """Ask for a long stream or four megabytes and read nothing."""
    await peer.send(peer.rng.choice((_chat(2000), _get(b"/v1/huge"))))
    await asyncio.sleep(peer.life())


def pipeliners(path: bytes) -> Callable[[Peer], Awaitable[None]]:
    """Send thousands of requests at once and read no answer."""

    async def run(peer: Peer) -> None:
        await peer.push(_get(path) * 50, 100)
        await asyncio.sleep(peer.life())

    return run


async def event_readers(peer: Peer) -> None:
    """Open the sidecar's event stream and read nothing."""
    await peer.send(_get(b"/memory/events", b"Accept: text/event-stream\r\n"))
    await asyncio.sleep(peer.life())


async def head_drips(peer: Peer) -> None:
    """Send a head a byte at a time, or blank lines forever."""
    if peer.rng.random() < 0.5:
        await peer.drip(b"\r\n" * 200, 0.5)
    else:
        await peer.drip(_get(b"/version", b"X-Padding: " + b"x" * 400 + b"\r\n"), 0.5)


async def body_drips(peer: Peer) -> None:
    """Send a body a byte at a time: counted or in chunks, to the engine or to the sidecar."""
    path = peer.rng.choice((b"/v1/completions", b"/policy", b"/nope"))
    if peer.rng.random() < 0.5:
        await peer.send(_post(path, b"Content-Length: 1000\r\n"))
        await peer.drip(b"x" * 1000, 0.5)
    else:
        await peer.send(_post(path, b"Transfer-Encoding: chunked\r\n"))
        await peer.drip(b"1\r\nx\r\n" * 200, 0.5)


async def half_uploads(peer: Peer) -> None:
    """Send half of a body and wait."""
    size, sent = peer.rng.choice(((10, 1), (1_000_000, 100_000), (20_000_000, 0)))
    path = peer.rng.choice((b"/v1/completions", b"/v1/chat/completions"))
    await peer.send(_post(path, b"Content-Length: %d\r\n" % size) + b"x" * sent)
    await peer.read_for(peer.life())


async def tiny_chunks(peer: Peer) -> None:
    """Send bursts of chunks of one byte."""
    await peer.send(_post(b"/v1/completions", b"Transfer-Encoding: chunked\r\n"))
    for _ in range(int(peer.life())):
        await peer.send(b"1\r\na\r\n" * 16_384)
        await peer.read_for(1.0)


async def refused_floods(peer: Peer) -> None:
    """Send bursts of requests that the allow list refuses, and read the answers."""
    for _ in range(int(peer.life())):
        await peer.send(_get(b"/nope") * 2_000)
        await peer.read_for(1.0)


async def leavers(peer: Peer) -> None:
    """Leave in the middle: of a head, a body, a wait, a stream; in order or with RST."""
    rng = peer.rng
    request = rng.choice((_chat(100), _get(b"/v1/big"), _get(b"/memory"), _upgrade()))
    upload = _post(b"/v1/completions", b"Content-Length: 200000\r\n") + b"x" * rng.randrange(200_000)
    cut = rng.choice((request[: rng.randrange(1, len(request))], request, request, upload))
    await peer.send(cut)
    if rng.random() < 0.2:
        peer.shut_write()
    if rng.random() < 0.7:
        await peer.read_for(rng.uniform(0.0, 0.5))
    if rng.random() < 0.5:
        peer.reset()


async def idle_websockets(peer: Peer) -> None:
    """Open a WebSocket and say nothing."""
    await peer.send(_upgrade())
    await peer.read_for(10 * peer.life())


async def half_open_tunnels(peer: Peer) -> None:
    """Ask for a WebSocket and stop in the middle of a frame, or close one direction."""
    await peer.send(_upgrade())
    await peer.read()
    await peer.send(b"\x82\xfe\xff")
    if peer.rng.random() < 0.5:
        peer.shut_write()
    await asyncio.sleep(peer.life())


async def wrong_tokens(peer: Peer) -> None:
    """Guess the admin token."""
    body = b"[" + b"{}," * 3_000 + b"{}]"
    while True:
        path = peer.rng.choice((b"/memory/reclaim", b"/memory/marks", b"/reset_mm_cache", b"/collective_rpc"))
        json_body = (_WRONG_TOKEN, b"Content-Type: application/json\r\n", b"Content-Length: %d\r\n" % len(body))
        await peer.send(_post(path, *json_body) + body)
        await peer.read_for(0.5)


async def odd_requests(peer: Peer) -> None:
    """Send what few clients send: HTTP/1.0, Expect without a body, two lengths, bare line feeds, TLS, nonsense."""
    expects = b"Expect: 100-continue\r\nContent-Length: 28\r\n"
    await peer.send(
        peer.rng.choice(
            (
                b"GET /version HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2,
                b"GET /livez HTTP/1.0\r\n\r\n",
                _get(b"/livez", expects),
                _get(b"/nope", expects),
                _post(b"/v1/completions", expects),
                _post(b"/v1/completions", b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n") + b"0\r\n\r\n",
                _post(b"/v1/completions", b"Transfer-Encoding: chunked\r\n") + b"zz\r\n",
                b"GET /version HTTP/1.1\nHost: a\n\n",
                b"CONNECT /memory HTTP/1.1\r\n" + _HOST + b"\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
                _get(b"/v1/" + b"a" * 100_000),
            )
        )
    )
    await peer.read_for(2.0)


async def idle_connections(peer: Peer) -> None:
    """Connect, ask for one thing or nothing, and stay."""
    if peer.rng.random() < 0.5:
        await peer.send(_get(b"/version"))
    await peer.read_for(2 * peer.life())


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind.

    Attributes:
        name: As on the page.
        run: One life of one connection.
        connections: At once, at scale 1.
        pause_seconds: Between two lives, at most.
        reads_little: Its socket takes as little as the kernel allows.
    """

    name: str
    run: Callable[[Peer], Awaitable[None]]
    connections: int
    pause_seconds: float = 1.0
    reads_little: bool = False


ATTACKS = (
    Attack("slow readers", slow_readers, 20, reads_little=True),
    Attack("non readers", non_readers, 20, reads_little=True),
    Attack("pipeliners, proxied path", pipeliners(b"/v1/big"), 4, reads_little=True),
    Attack("pipeliners, sidecar path", pipeliners(b"/memory/openapi.json"), 4, reads_little=True),
    Attack("pipeliners, refused path", pipeliners(b"/nope"), 4, reads_little=True),
    Attack("event readers", event_readers, 8, reads_little=True),
    Attack("head drips", head_drips, 20),
    Attack("body drips", body_drips, 20),
    Attack("half uploads", half_uploads, 20),
    Attack("tiny chunks", tiny_chunks, 2),
    Attack("refused floods", refused_floods, 2),
    Attack("leavers", leavers, 20, pause_seconds=0.4),
    Attack("idle websockets", idle_websockets, 20),
    Attack("half open tunnels", half_open_tunnels, 10),
    Attack("wrong tokens", wrong_tokens, 2),
    Attack("odd requests", odd_requests, 4),
    Attack("idle connections", idle_connections, 40),
)


async def _keep_on(attack: Attack, port: int, count: Counter[str], rng: random.Random) -> None:
    """Live one life of the attack after the other."""
    while True:
        await asyncio.sleep(rng.uniform(0.0, attack.pause_seconds))
        with socket.socket() as connection:
            connection.setblocking(False)
            if attack.reads_little:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
            try:
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
            except OSError:
                count["refused"] += 1
                await asyncio.sleep(1.0)
                continue
            count["connections"] += 1
            try:
                await attack.run(Peer(connection, count, rng))
            except OSError:  # the sidecar ended it, as it may
                count["ended_by_sidecar"] += 1


async def _attack(port: int, scale: float, seed: int, only: Sequence[str]) -> dict[str, Counter[str]]:
    counts = {attack.name: Counter[str]() for attack in ATTACKS if not only or attack.name in only}
    rng = random.Random(seed)  # noqa: S311 - which attack comes when, no secrets
    tasks = [
        asyncio.create_task(_keep_on(attack, port, counts[attack.name], random.Random(rng.random())))  # noqa: S311 - no secret
        for attack in ATTACKS
        if attack.name in counts
        for _ in range(max(1, round(attack.connections * scale)))
    ]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    # A task of an attack that ends is a mistake in this file.
    done, _ = await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return counts


if __name__ == "__main__":
    os.nice(10)  # what attackers compute is not the machine's that they attack
    _port, _scale, _seed, *_only = sys.argv[1:]
    print(json.dumps(asyncio.run(_attack(int(_port), float(_scale), int(_seed), _only))))
