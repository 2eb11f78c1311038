"""How requests ended, as the metrics and the access log tell it, beside what happened on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from datetime import datetime

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

from gated_proxy.gate import Gate
from gated_proxy.logs import AccessLog
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.fakes.engine import FakeEngine
from tests.patience import until

from .test_control_plane import sidecar_before

KEYS = [
    *("time", "peer", "method", "path", "path_class", "status", "result", "reason", "request_id", "request_bytes"),
    *("response_bytes", "duration_seconds", "time_to_first_byte_seconds", "held_seconds", "engine_connection_reused"),
]


class Logged:
    """A proxy with an access log; its lines are there when it has ended."""

    def __init__(self, start_proxy, path):
        self._start, self._path = start_proxy, path

    @contextlib.asynccontextmanager
    async def proxy(self, url=None, **options):
        async with self._start(url, access_log=AccessLog(str(self._path)), **options) as front:
            yield front

    @property
    def lines(self):
        return lines_of(self._path)

    @property
    def line(self):
        (line,) = self.lines
        return line


@pytest.fixture
def logged(start_proxy, tmp_path):
    return Logged(start_proxy, tmp_path / "access.log")


async def exchange(front, request: bytes, *, until_bytes: bytes = b"") -> tuple[bytes, str]:
    """Send it, and return all bytes up to the answer's end or the given ones, and the client's own address."""
    wire = await front.connect()
    await wire.send(request)
    answer = await wire.reader.readuntil(until_bytes) if until_bytes else await wire.reader.read()
    host, port = wire.writer.get_extra_info("sockname")
    await wire.leave()
    return answer, f"{host}:{port}"


def lines_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def request(method: str, target: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: sidecar", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_a_stream_that_came_to_its_end_is_complete(logged, upstream):

    @upstream.on("/v1/chat/completions")
    async def stream(call):
        await call.read()
        await call.begin(("content-type", "text/event-stream"))
        await call.chunk(b"data: 1\n\n")
        await asyncio.sleep(0.02)
        await call.chunk(b"data: 2\n\n")
        await call.end()

    sent = request("POST", "/v1/chat/completions?api_key=s3cret", b'{"stream": true}', "x-request-id: r1")
    async with logged.proxy() as front:
        received, address = await exchange(front, sent, until_bytes=b"\r\n0\r\n\r\n")
        (ended,) = front.observed.ended
    line = logged.line
    assert list(line) == KEYS
    assert datetime.fromisoformat(line["time"]).utcoffset().total_seconds() == 0
    assert (line["peer"], line["method"], line["path"]) == (address, "POST", "/v1/chat/completions")
    assert (line["path_class"], line["status"], line["result"], line["reason"]) == (
        *("chat_completions", 200, "complete", None),
    )
    assert (line["request_id"], line["held_seconds"], line["engine_connection_reused"]) == ("r1", 0.0, False)
    assert (line["request_bytes"], line["response_bytes"]) == (len(sent), len(received))
    assert (
        0 < line["time_to_first_byte_seconds"] < line["time_to_first_byte_seconds"] + 0.02 <= line["duration_seconds"]
    )
    assert ended[:4] == ("chat_completions", "POST", 200, "complete")
    assert (ended.request_bytes, ended.response_bytes) == (len(sent), len(received))
    assert (round(ended.seconds, 6), front.observed.refused) == (line["duration_seconds"], [])


async def test_a_chunked_upload_is_counted_without_its_framing(logged):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: sidecar\r\ntransfer-encoding: chunked\r\n\r\n"
    async with logged.proxy() as front:
        await front.get("/v1/models")
        await exchange(front, head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", until_bytes=b"de")
        connections = front.proxy.connections()
    _, line = logged.lines
    assert (line["request_bytes"], line["engine_connection_reused"]) == (len(head) + 5, True)
    assert (connections.requests_on_new, connections.requests_on_reused, connections.retries) == (1, 1, 0)


async def test_a_client_that_leaves_within_a_stream_has_left(logged, upstream):

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.read()
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await call.wait_until_gone()

    async with logged.proxy() as front:
        received, _ = await exchange(front, request("POST", "/v1/completions"), until_bytes=b"data: 1\n\n\r\n")
        await until(lambda: front.observed.ended)
        (ended,) = front.observed.ended
    assert ended[:4] == ("completions", "POST", 200, "client_left")
    line = logged.line
    assert (line["status"], line["result"], line["reason"]) == (200, "client_left", "client_left")
    assert (line["response_bytes"], ended.response_bytes) == (len(received), len(received))
    assert (front.observed.errors, front.observed.refused) == ([], [])


async def test_a_client_that_leaves_before_the_answer_has_seen_nothing(logged, upstream):
    @upstream.on("/v1/completions")
    async def think(call):
        await call.read()
        await call.wait_until_gone()

    async with logged.proxy() as front:
        wire = await front.connect()
        await wire.send(request("POST", "/v1/completions"))
        await until(lambda: upstream.calls)
        await wire.leave()
        await until(lambda: front.observed.ended)
    line = logged.line
    assert (line["status"], line["result"], line["response_bytes"]) == (499, "client_left", 0)
    assert line["time_to_first_byte_seconds"] is None


async def test_a_stream_whose_engine_dies_is_truncated(logged, upstream, caplog):
    """A 200 that is none: the result and the reason say so, and one line of the log, without a traceback."""

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.read()
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        call.die()

    async with logged.proxy() as front:
        received, _ = await exchange(front, request("POST", "/v1/completions"))
        (ended,) = front.observed.ended
    assert received.endswith(b"data: 1\n\n\r\n")
    assert ended[:4] == ("completions", "POST", 200, "truncated")
    line = logged.line
    assert (line["status"], line["result"], line["reason"]) == (200, "truncated", "truncated")
    assert line["response_bytes"] == len(received)
    assert front.observed.errors == ["truncated"]
    (told,) = [record for record in caplog.records if record.name.startswith("highwater.")]
    assert told.exc_info is None


async def test_a_stream_that_is_cut_at_the_end_of_the_sidecar_is_truncated(logged, upstream):

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.read()
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await call.wait_until_gone()

    async with logged.proxy() as front:
        wire = await front.connect()
        await wire.send(request("POST", "/v1/completions"))
        await wire.reader.readuntil(b"data: 1\n\n")
        await front.proxy.aclose()
        await front.proxy.start()
    assert (logged.line["result"], logged.line["reason"]) == ("truncated", "shutting_down")
    assert (front.observed.errors, front.observed.refused) == ([], [])


async def test_a_client_whose_body_is_nonsense_is_no_failure_of_the_engine(logged, upstream):

    @upstream.on("/v1/completions")
    async def stream(call):
        await call.begin()
        await call.chunk(b"data: 1\n\n")
        await call.wait_until_gone()

    head = b"POST /v1/completions HTTP/1.1\r\nhost: sidecar\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    async with logged.proxy() as front:
        wire = await front.connect()
        await wire.send(head)
        await wire.reader.readuntil(b"data: 1\n\n")
        await wire.send(b"not a size\r\n")
        await wire.reader.read()
    assert (logged.line["status"], logged.line["result"], logged.line["reason"]) == (200, "refused", "bad_request")
    assert (front.observed.errors, front.observed.refused) == ([], ["bad_request"])


async def test_a_body_to_an_own_path_that_cannot_be_read_is_refused(tmp_path):
    log = tmp_path / "access.log"
    head = b"POST /memory/marks HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nnot a size\r\n"
    async with sidecar_before(FakeEngine(), access_log=str(log)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(head)
        await reader.read()
        writer.close()
        page = running.app.services.exporter.page().decode()
    assert 'highwater_proxy_refused_total{reason="bad_request"} 1.0' in page
    (line,) = lines_of(log)
    assert (line["path_class"], line["status"], line["result"]) == ("sidecar", 400, "refused")


async def test_an_engine_that_is_down_is_answered_for(logged, unused_tcp_port, caplog):
    sent = request("POST", "/v1/completions", b"", "connection: close", "x-request-id: r1")
    async with logged.proxy(f"http://127.0.0.1:{unused_tcp_port}") as front:
        received, _ = await exchange(front, sent)
        (ended,) = front.observed.ended
    assert ended[:4] == ("completions", "POST", 502, "refused")
    # A client's first retry is not to be its last.
    assert (received.lower().count(b"\r\nretry-after: 5\r\n"), received.lower().count(b"\r\ndate: ")) == (1, 1)
    line = logged.line
    assert (line["status"], line["result"], line["reason"]) == (502, "refused", "connect")
    assert (line["response_bytes"], line["engine_connection_reused"]) == (len(received), None)
    assert (front.observed.errors, front.observed.refused) == (["connect"], [])
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "POST /v1/completions: the engine does not accept connections, request_id=r1" in told


async def test_a_request_that_waits_at_the_gate_says_how_long(logged):
    async with logged.proxy(gate=Gate(hold_seconds=60)) as front:
        with front.gate.closed(60):
            wire = await front.connect()
            await wire.request("POST", "/v1/completions", body=b"1")
            await until(lambda: front.gate.held == 1)
            await asyncio.sleep(0.01)
        await wire.answer()
        with front.gate.closed(60):
            front.gate._hold_seconds = 0.2
            await front.post("/v1/completions", b"2")
            front.gate._hold_seconds = 60
            wire = await front.connect()
            await wire.request("POST", "/v1/completions", body=b"3")
            await until(lambda: front.gate.held == 1)
            await asyncio.sleep(0.01)
            await wire.leave()
            await until(lambda: len(front.observed.ended) == 3)
    passed, shed, left = logged.lines
    assert (passed["result"], shed["result"], shed["reason"]) == ("complete", "refused", "held_too_long")
    assert 0.01 <= passed["held_seconds"] <= passed["duration_seconds"]
    assert 0.19 <= shed["held_seconds"] <= shed["duration_seconds"]
    assert 0.01 <= left["held_seconds"] <= left["duration_seconds"]
    assert (left["status"], left["result"], left["engine_connection_reused"]) == (499, "client_left", None)
    assert front.observed.refused == ["held_too_long"]


async def test_a_websocket_is_one_request_with_all_its_bytes(logged):

    async def echo(connection):
        async for message in connection:
            await connection.send(message)

    async with serve(echo, "127.0.0.1", 0, compression=None) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with logged.proxy(url) as front:
            address = front.url.replace("http", "ws") + "/v1/realtime?token=s3cret"
            async with connect(address, compression=None) as socket:
                await socket.send(bytes(1000))
                await socket.recv()
                assert front.proxy.connections().tunnels == 1
            await until(lambda: front.observed.ended)
            assert front.proxy.connections().tunnels == 0
            (ended,) = front.observed.ended
    line = logged.line
    assert (line["path"], line["path_class"], line["status"]) == ("/v1/realtime", "realtime", 101)
    assert (line["result"], line["reason"]) == ("complete", None)
    assert ended[:4] == ("realtime", "GET", 101, "complete")
    assert 1000 < line["response_bytes"] < 1600
    assert 1000 < line["request_bytes"] < 1600
    assert 0 < line["time_to_first_byte_seconds"] < line["duration_seconds"]


async def test_connections_are_counted_while_they_are_open(front, upstream):
    proceed = asyncio.Event()

    @upstream.on("/v1/completions")
    async def think(call):
        await call.read()
        await proceed.wait()
        await call.answer(b"{}")

    wire = await front.connect()
    await wire.request("POST", "/v1/completions", body=b"{}")
    await until(lambda: upstream.calls)
    busy = front.proxy.connections()
    assert (busy.clients, busy.engine_active, busy.engine_idle) == (1, 1, 0)
    proceed.set()
    await wire.answer()
    kept = front.proxy.connections()
    assert (kept.clients, kept.engine_active, kept.engine_idle) == (1, 0, 1)
    await wire.leave()
    await upstream.stop()
    await until(lambda: front.proxy.connections().engine_idle == 0)
    assert front.proxy.connections().engine_active == 0
    await until(lambda: front.proxy.connections().clients == 0)


async def test_a_request_that_is_sent_once_more_is_counted(front, upstream):

    @upstream.on("/v1/models")
    async def twice(call):
        if len(upstream.calls) == 2:
            call.die()
        else:
            await call.answer(b"ok")

    await front.get("/v1/models")
    await front.get("/v1/models")
    counted = front.proxy.connections()
    assert (counted.retries, counted.requests_on_new, counted.requests_on_reused) == (1, 2, 1)
    assert len(front.observed.ended) == 2


NOT_ADMITTED = {
    "a path that is not on the list": (request("GET", "/nowhere?q=s3cret"), 404, "not_admitted", "/nowhere"),
    "a control path": (request("POST", "/sleep", b"s3cret"), 403, "forbidden", "/sleep"),
    "a path in two ways": (request("GET", "/v1//models"), 400, "bad_request", "/v1//models"),
    "no HTTP": (b"\x16\x03\x01", 400, "bad_request", None),
    "two lengths": (request("POST", "/v1/x", b"", "content-length: 1"), 400, "bad_request", None),
    "a long head": (b"GET /v1/x HTTP/1.1\r\nx: " + bytes(70_000).replace(b"\0", b"x"), 431, "head_too_large", None),
    "a long body": (
        *(b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n", 413, "body_too_large", "/v1/x"),
    ),
}


@pytest.mark.parametrize("what", NOT_ADMITTED)
async def test_what_is_not_passed_on_leaves_a_trace(tmp_path, caplog, what):
    sent, status, reason, path = NOT_ADMITTED[what]
    log = tmp_path / "access.log"
    async with sidecar_before(FakeEngine(), access_log=str(log)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        peer = "{}:{}".format(*writer.get_extra_info("sockname"))
        writer.write(sent)
        received = await reader.readuntil(b"}}")
        writer.close()
        page = running.app.services.exporter.page().decode()
    assert f'highwater_proxy_refused_total{{reason="{reason}"}} 1.0' in page
    (line,) = lines_of(log)
    assert (line["status"], line["result"], line["reason"]) == (status, "refused", reason)
    assert (line["path"], line["peer"], line["path_class"]) == (path, peer, None)
    assert line["response_bytes"] == len(received)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "highwater.proxy"]
    assert told.endswith(f"peer={peer}")
    assert path is None or f" {path}: " in told
    assert "s3cret" not in told + log.read_text()


async def test_attacks_do_not_fill_the_log(tmp_path, caplog):
    async with sidecar_before(FakeEngine()) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for _ in range(50):
            writer.write(request("POST", "/collective_rpc", b"{}"))
            await reader.readuntil(b"}}")
        writer.close()
        page = running.app.services.exporter.page().decode()
    assert 'highwater_proxy_refused_total{reason="forbidden"} 50.0' in page
    told = [
        record for record in caplog.records if record.name == "highwater.proxy" and record.levelno == logging.WARNING
    ]
    assert len(told) == 5


async def test_no_secret_is_in_any_line(logged, upstream, caplog):

    @upstream.on("/v1/completions")
    async def hang_up(call):
        await call.read()
        call.die()

    sent = request("POST", "/v1/completions?key=s3cret", b"s3cret", "authorization: Bearer s3cret", "cookie: s3cret")
    async with logged.proxy() as front:
        await exchange(front, sent, until_bytes=b"}}")
    assert (logged.line["status"], logged.line["path"]) == (502, "/v1/completions")
    assert "s3cret" not in json.dumps(logged.line)
    assert "POST /v1/completions: the engine closed the connection" in caplog.text
    assert "s3cret" not in caplog.text


async def test_no_path_fills_the_log(front, caplog):
    await front.get("x" * 60_000)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "highwater.proxy"]
    assert len(told) < 1000


async def test_the_sidecars_own_paths_have_a_line_too(tmp_path):
    log = tmp_path / "access.log"
    async with sidecar_before(FakeEngine(), access_log=str(log)) as running:
        sent = request("GET", "/livez?x=s3cret", b"", "authorization: Bearer s3cret", "connection: close")
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(sent)
        received = await reader.read()
        writer.close()
    (line,) = lines_of(log)
    assert (line["path"], line["path_class"], line["status"]) == ("/livez", "sidecar", 200)
    assert (line["result"], line["reason"], line["engine_connection_reused"]) == ("complete", None, None)
    assert (line["request_bytes"], line["response_bytes"]) == (len(sent), len(received))
    assert 0 < line["time_to_first_byte_seconds"] <= line["duration_seconds"]
    assert "s3cret" not in log.read_text()


async def test_a_client_that_leaves_an_event_stream_has_left(tmp_path):
    log = tmp_path / "access.log"
    async with sidecar_before(FakeEngine(), access_log=str(log)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(request("GET", "/memory/events", b"", "accept: text/event-stream"))
        received = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await until(log.read_text)
    (line,) = lines_of(log)
    assert (line["path"], line["status"], line["result"]) == ("/memory/events", 200, "client_left")
    assert line["response_bytes"] >= len(received)


@pytest.mark.slow("`highwater serve` as a process")
async def test_a_running_sidecar_opens_its_file_again_at_a_signal(tmp_path, unused_tcp_port):
    log, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    settings = {"HIGHWATER_ACCESS_LOG": str(log)}
    with DemoSidecar(f"http://127.0.0.1:{unused_tcp_port}", folder=tmp_path, settings=settings) as sidecar:
        await until(log.read_text)  # it was asked for /livez until it was there
        log.rename(moved)
        for pid in sidecar.pids():
            os.kill(pid, signal.SIGHUP)
        await until(log.exists)
        assert log.read_text() == ""
        await asyncio.to_thread(sidecar.call, "GET", "/policy")
    assert {line["path"] for line in lines_of(moved)} == {"/livez"}
    assert [line["path"] for line in lines_of(log)] == ["/policy"]
