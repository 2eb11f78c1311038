"""Little that could cost everybody much: heads made to be slow, large answers unread, endless errors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

from gated_proxy.heads import RequestHead, parse_head
from highwater.http.problems import MAX_PROBLEMS
from tests.http.conftest import Wire
from tests.http.test_control_plane import both_on_ports
from tests.patience import until


def proxy_of(sidecar):
    return sidecar.app.protocol.args[0]


def seconds_to_read(lines: int) -> float:
    tokens = b",".join(b"t%d" % number for number in range(5 * lines))
    head = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: %b\r\n%b\r\n" % (tokens, b"connection: x\r\n" * lines)
    began = time.process_time()
    assert isinstance(parse_head(head), RequestHead)
    return time.process_time() - began


def test_many_connection_lines_cost_their_length_and_no_more():
    few, many = (min(seconds_to_read(lines) for _ in range(3)) for lines in (300, 3000))
    assert many < 40 * few


async def test_answers_that_nobody_reads_have_one_bound_for_all():
    async with both_on_ports() as sidecar:
        sidecar.app.services.history.record("policy", "x" * 12_000_000)
        proxy = proxy_of(sidecar)
        proxy.limits = replace(proxy.limits, max_unread_bytes=20_000_000)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(6):
                wire = Wire(*await asyncio.open_connection("127.0.0.1", sidecar.port, limit=1024))
                stack.push_async_callback(wire.leave)
                await wire.send(b"GET /memory/history HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await until(lambda: sum(client.unread_bytes for client in proxy.clients) > 30_000_000)
            proxy._tick()
            await until(lambda: sum(client.unread_bytes for client in proxy.clients) <= 20_000_000)
            assert (await sidecar.client.get("/livez")).status_code == 200


async def test_a_step_too_small_to_divide_by_is_no_error():
    """And an unexpected error would be logged a few times a minute, not for each request."""
    async with both_on_ports() as sidecar:
        await sidecar.app.services.poller.poll()
        answer = await sidecar.client.get("/memory/history", params={"since": time.time() - 10, "step": "1e-320"})
        assert answer.status_code == 200


async def test_a_query_of_nonsense_has_a_short_answer():
    async with both_on_ports() as sidecar:
        query = "&".join(f"k{number}=1" for number in range(2000))
        answer = await sidecar.client.get(f"/memory/history?{query}")
        assert answer.status_code == 422
        assert answer.json()["error"]["message"].endswith(f"and {2000 - MAX_PROBLEMS} more")


async def test_a_live_stream_takes_no_place_that_is_kept_for_probes():
    """It would hold it for as long as it likes."""
    async with both_on_ports() as sidecar:
        proxy = proxy_of(sidecar)
        proxy.clients.limit = 1
        first = Wire(*await asyncio.open_connection("127.0.0.1", sidecar.port))
        await until(lambda: len(proxy.clients) == 1)
        surplus = Wire(*await asyncio.open_connection("127.0.0.1", sidecar.port))
        await surplus.request("GET", "/memory/events", ("accept", "text/event-stream"))
        assert (await surplus.answer()).status == 503
        await surplus.leave()
        await first.leave()


async def test_a_connection_that_is_given_up_while_it_is_made_is_not_counted(monkeypatch):
    """The gauge of connections in use would only climb."""
    async with both_on_ports() as sidecar:
        pool = proxy_of(sidecar).pool
        before = pool.open

        async def made_and_cancelled(make, *_, **__):
            make().connection_made(asyncio.Transport())
            raise asyncio.CancelledError

        monkeypatch.setattr(pool, "_loop", type("Loop", (), {"create_connection": staticmethod(made_and_cancelled)}))
        with contextlib.suppress(asyncio.CancelledError):
            await pool.connect()
        assert pool.open == before
