"""Real ports for the HTTP tests: a server under uvicorn, an upstream that misbehaves, a client that sees raw bytes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote

import pytest
import uvicorn

from gated_proxy.client import protocol
from gated_proxy.door import Door
from gated_proxy.failures import Failure
from gated_proxy.gate import Gate
from gated_proxy.heads import Mode
from gated_proxy.logs import AccessLog
from gated_proxy.proxy import Proxy, ProxyLimits
from gated_proxy.routes import Destination, path_class
from tests.fakes.upstream import Upstream
from tests.patience import LIMIT_SECONDS

PATIENT = {"connect_seconds": LIMIT_SECONDS, "keepalive_seconds": 10 * LIMIT_SECONDS}
"""Limits of a proxy that no test runs into whose loop stands still; one that is about a limit has its own."""


@contextlib.asynccontextmanager
async def serving(app, *, protocol=None, listener=None, port: int = 0, **options) -> AsyncIterator[int]:
    """Run an ASGI app under uvicorn as the sidecar does, behind a protocol if it brings one, and yield its port."""
    listener = listener or socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        http=protocol or getattr(app, "protocol", "httptools"),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=round(10 * LIMIT_SECONDS),
        **options,
    )
    server = uvicorn.Server(config)
    server.config.load()
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.001)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


@dataclass
class Answer:
    """A response as it stood on the wire."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    complete: bool

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class Wire:
    """A client's connection, one request at a time, nothing interpreted that a test did not ask for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(self, method: str, target: str, *headers: tuple[str, str], body: bytes = b"") -> None:
        fields = [("host", "sidecar"), *headers]
        if body:
            fields.append(("content-length", str(len(body))))
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields), "", ""]
        await self.send("\r\n".join(lines).encode("latin-1") + body)

    async def head(self) -> Answer:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = [tuple(line.split(": ", 1)) for line in lines[1:] if line]
        return Answer(int(lines[0].split(" ")[1]), headers, b"", complete=False)

    async def chunk(self) -> bytes | None:
        """Read one chunk; b"" is the final one, None a stream that was cut."""
        try:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def answer(self, *, without_body: bool = False) -> Answer:
        """Read a whole response by its framing, and say whether it came to its end."""
        answer = await self.head()
        if without_body:
            answer.complete = True
        elif answer.header("transfer-encoding"):
            while piece := await self.chunk():
                answer.body += piece
            answer.complete = piece == b""
        else:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                answer.body = await self.reader.readexactly(int((answer.header("content-length") or ["0"])[0]))
                answer.complete = True
        return answer

    async def leave(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def status_of(port: int, method: str, target: str, *headers: tuple[str, str], body: bytes = b"") -> int:
    """The status of a request that is sent exactly as written."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
    try:
        await wire.request(method, target, *headers, body=body)
        return (await wire.head()).status
    finally:
        await wire.leave()


class Ended(NamedTuple):
    """What the observer is told of a request that ended."""

    path_class: str
    method: str
    code: int
    result: str
    seconds: float
    first_byte_seconds: float | None
    request_bytes: int
    response_bytes: int


@dataclass
class Observed:
    """An observer that remembers."""

    started: int = 0
    ended: list[Ended] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def departures(self) -> int:
        return [ended.result for ended in self.ended].count("client_left")

    def request_started(self):
        self.started += 1

    def request_ended(self, path_class, method, code, result, **figures):
        self.ended.append(Ended(path_class, method, code, result, **figures))

    def upstream_error(self, reason):
        self.errors.append(reason)

    def request_refused(self, reason):
        self.refused.append(reason)


@dataclass
class Front:
    """A running proxy: its port, what it observed, and connections to it."""

    port: int
    observed: Observed
    proxy: Proxy
    wires: list[Wire] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gate(self) -> Gate:
        return self.proxy.gate

    @property
    def door(self) -> Door:
        return self.proxy.door

    async def connect(self) -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port, limit=2**24))
        self.wires.append(wire)
        return wire

    async def get(self, target: str, *headers: tuple[str, str]) -> Answer:
        wire = await self.connect()
        await wire.request("GET", target, *headers)
        return await wire.answer()

    async def post(self, target: str, body: bytes, *headers: tuple[str, str]) -> Answer:
        wire = await self.connect()
        await wire.request("POST", target, *headers, body=body)
        return await wire.answer()


@pytest.fixture
async def upstream():
    async with Upstream() as running:
        yield running


@dataclass
class AllProxied:
    """What has no paths of its own: every request goes to the engine."""

    proxy: Proxy

    def protocol(self, *args, **options):
        return protocol(self.proxy, self.judge)(*args, **options)

    @staticmethod
    def judge(_method, raw_path, _websocket):
        if not raw_path.startswith(b"/"):
            return Destination("nowhere", refusal=Failure(400, "bad_request", "not a path"))
        return Destination("engine", path_class(unquote(raw_path.decode())))

    async def __call__(self, scope, _receive, _send):
        raise AssertionError(f"there is nothing of our own at {scope}")


@contextlib.asynccontextmanager
async def running_proxy(
    url: str,
    *,
    app: Callable[[Proxy], AllProxied] = AllProxied,
    gate: Gate | None = None,
    door: Door | None = None,
    access_log: AccessLog | None = None,
    forwarded: Mode = "pass",
    root_path: str | None = None,
    **limits,
) -> AsyncIterator[Front]:
    observed = Observed()
    proxy = Proxy(
        url,
        observer=observed,
        limits=ProxyLimits(**{**PATIENT, **limits}),
        gate=gate,
        door=door,
        access_log=access_log,
        forwarded=forwarded,
        root_path=root_path,
    )
    await proxy.start()
    async with serving(app(proxy)) as port:
        front = Front(port, observed, proxy)
        try:
            yield front
        finally:
            for wire in front.wires:
                await wire.leave()
    await proxy.aclose()


@pytest.fixture
def start_proxy(upstream):
    """Return what runs a proxy before the fake engine or another, with limits of a test's own."""

    def start(url: str | None = None, **limits):
        return running_proxy(url or upstream.url, **limits)

    return start


@pytest.fixture
async def front(start_proxy):
    async with start_proxy() as running:
        yield running
