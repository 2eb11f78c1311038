"""Clients that keep the sidecar waiting on its own paths, before anybody has asked them for a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gated_proxy.proxy import Proxy
from tests.fakes.engine import FakeEngine
from tests.http.conftest import Wire
from tests.http.test_control_plane import sidecar_before
from tests.patience import patience, until

TOKEN = "correct-horse-battery"
# Who has no token is answered before a body would be waited for.
OPERATOR = f"host: localhost\r\nauthorization: Bearer {TOKEN}\r\n".encode()
SNAPSHOT = "highwater-snapshot-20200101T000000000Z-0-0-1.pickle"


@pytest.fixture
async def sidecar():
    async with sidecar_before(FakeEngine(), admin_token=TOKEN) as running:
        proxy_of(running).client_ticks = 2
        proxy_of(running).idle_ticks = 2
        yield running


def proxy_of(sidecar) -> Proxy:
    return sidecar.app.protocol.args[0]


@contextlib.asynccontextmanager
async def connected(sidecar, **options):
    wire = Wire(*await asyncio.open_connection("127.0.0.1", sidecar.port, **options))
    try:
        yield wire
    finally:
        await wire.leave()


def narrow(port: int) -> socket.socket:
    """A client whose kernel takes little for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


def open_files() -> set[str]:
    """The names of the files that this process has open."""
    return {Path(os.path.realpath(link)).name for link in Path("/proc/self/fd").iterdir()}


async def pass_ticks(sidecar, count: int) -> None:
    """Let time pass forevery connection, and what comes of it happen."""
    for _ in range(count):
        for client in list(proxy_of(sidecar).clients):
            client.tick()
        await asyncio.sleep(0)


BODIES = {
    "counted": b"content-length: 10\r\n\r\n{",
    "chunked": b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    "nothing-yet": b"content-length: 10\r\n\r\n",
}


@pytest.mark.parametrize("body", BODIES)
async def test_a_body_that_does_not_come_is_not_waited_for(sidecar, body):
    async with connected(sidecar) as wire:
        await wire.send(b"POST /memory/reclaim HTTP/1.1\r\n" + OPERATOR + BODIES[body])
        await until(lambda: any(client._current for client in proxy_of(sidecar).clients))
        await pass_ticks(sidecar, 4)
        async with patience():
            answer = await wire.answer()
            assert (answer.status, answer.header("connection")) == (408, ["close"])
            assert await wire.reader.read() == b""


async def test_a_body_that_drips_is_not_waited_for_either(sidecar):
    async with connected(sidecar) as wire:
        await wire.send(b"PUT /policy HTTP/1.1\r\n" + OPERATOR + b"content-length: 1000\r\n\r\n")
        await until(lambda: any(client._current for client in proxy_of(sidecar).clients))
        for _ in range(4):
            with contextlib.suppress(ConnectionError):
                await wire.send(b" ")
            await pass_ticks(sidecar, 1)
        async with patience():
            assert (await wire.answer()).status == 408


async def test_a_slow_body_that_comes_is_served(sidecar):
    async with connected(sidecar) as wire:
        await wire.send(
            b"POST /memory/marks HTTP/1.1\r\n"
            + OPERATOR
            + b"content-type: application/json\r\ncontent-length: 12\r\n\r\n"
        )
        await pass_ticks(sidecar, 2)
        await wire.send(b'{"name":"m"}')
        async with patience():
            assert (await wire.answer()).status == 201


async def test_a_body_of_who_may_not_is_not_waited_for(sidecar):
    async with connected(sidecar) as wire:
        await wire.send(b"POST /memory/marks HTTP/1.1\r\nhost: localhost\r\ncontent-length: 12\r\n\r\n")
        async with patience():
            assert (await wire.answer()).status == 401
            await pass_ticks(sidecar, 4)
            assert await wire.reader.read() == b""


async def test_a_live_stream_may_be_silent(sidecar):
    async with connected(sidecar) as wire:
        await wire.request("GET", "/memory/events", ("accept", "text/event-stream"))
        assert (await wire.head()).status == 200
        await pass_ticks(sidecar, 10)
        assert not wire.reader.at_eof()


async def test_an_answer_that_nobody_takes_is_not_kept(sidecar):
    """However large it is: what is held for one who does not read would be the sidecar's memory."""
    sidecar.app.services.history.record("policy", "x" * 32_000_000)
    with narrow(sidecar.port) as reader:
        reader.sendall(b"GET /memory/history HTTP/1.1\r\nhost: localhost\r\n\r\n")
        clients = proxy_of(sidecar).clients
        await until(lambda: any(client.transport.get_write_buffer_size() for client in clients))
        await pass_ticks(sidecar, 5)
        await until(lambda: not clients)


async def test_a_stream_that_nobody_takes_is_not_kept(tmp_path):
    (tmp_path / SNAPSHOT).write_bytes(bytes(32_000_000))
    async with sidecar_before(FakeEngine(), recorder_dir=tmp_path) as sidecar:
        proxy_of(sidecar).idle_ticks = 2
        with narrow(sidecar.port) as reader:
            reader.sendall(f"GET /memory/snapshots/{SNAPSHOT} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            clients = proxy_of(sidecar).clients
            await until(lambda: any(client.transport.get_write_buffer_size() for client in clients))
            await pass_ticks(sidecar, 5)
            await until(lambda: not clients)
        await until(lambda: SNAPSHOT not in open_files())


async def test_a_large_answer_holds_up_no_stream():
    """Anybody may read the history, and megabytes of it are made beside the loop that proxies: it turns meanwhile."""
    async with sidecar_before(FakeEngine(), poll_seconds=1.0) as sidecar:
        report = sidecar.app.services.poller.current()
        ranks = tuple(replace(report.ranks[0], rank=number) for number in range(8))
        for second in range(2000):
            sidecar.app.services.history.add(replace(report, ranks=ranks, taken_at=float(second)))
        shares = list[float]()
        # A busy machine may stop anybody once; it does not always do so in the middle of this.
        while len(shares) < 5 and not any(share < 1 / 2 for share in shares):
            shares.append(await longest_stop(f"{sidecar.client.base_url}/memory/history"))
    assert min(shares) < 1 / 2


async def longest_stop(url: str) -> float:
    """For which part of the time that a large answer took the loop did nothing else at a stretch."""
    gaps, begun = [0.0], time.perf_counter()
    asked = asyncio.create_task(asyncio.to_thread(httpx.get, url))
    while not asked.done():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        gaps.append(time.perf_counter() - before)
    answer, took = asked.result(), time.perf_counter() - begun
    assert len(answer.json()["readings"]) > 900
    return max(gaps) / took
