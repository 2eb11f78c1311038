"""A small HTTP/1.1 server: requests in order on each connection, answers of a known length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import httptools
import httpx

_PHRASES = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, whole."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"

    def encoded(self) -> bytes:
        """As it goes over the wire."""
        phrase = _PHRASES.get(self.status, "Status")
        head = f"HTTP/1.1 {self.status} {phrase}\r\nContent-Type: {self.content_type}\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


def json_answer(value: object, status: int = 200) -> Answer:
    """An answer of JSON."""
    return Answer(json.dumps(value).encode(), status)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, whole."""

    method: str
    path: str
    query: str
    body: bytes


Handler: TypeAlias = Callable[[Asked], "Answer | Awaitable[Answer]"]


class Server:
    """Listens on one port of the loopback interface, whenever it is told to.

    Attributes:
        held: Requests that are being answered, and whose answer waits for something other than the wire.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.port = 0
        self.held = 0
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, port: int = 0) -> None:
        """Begin; at the same port as before, if it listened before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", port or self.port, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def vanish(self) -> None:
        """End as a killed process does: no answer to anybody, and connections refused from now on."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.abort()

    @property
    def is_listening(self) -> bool:
        """Whether connections are accepted."""
        return self._server is not None


class _Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", []  # type: tuple[bytes, list[bytes]]

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._server.connections.discard(self)
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, _, query = self._url.decode("latin-1").partition("?")
        asked = Asked(self._parser.get_method().decode(), path, query, b"".join(self._body))
        self._url, self._body = b"", []
        answer = self._server.handler(asked)
        if isinstance(answer, Answer):
            self._write(answer)
        else:
            self._task = asyncio.ensure_future(self._answer_later(answer))

    async def _answer_later(self, awaited: Awaitable[Answer]) -> None:
        self._server.held += 1
        try:
            answer = await awaited
        finally:
            self._server.held -= 1
        self._write(answer)

    def _write(self, answer: Answer) -> None:
        if self._transport is not None:
            self._transport.write(answer.encoded())


class LoopbackTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 over real sockets, one request at a time on each, for an engine on the loopback interface.

    It stands in for httpx's own because a day has a hundred thousand requests; its failures are httpx's. Rows in real
    time have httpx's own.

    Attributes:
        in_flight: Requests that have no answer yet.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._free: list[_Channel] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it, and return the answer, whole.

        Raises:
            httpx.TransportError: No connection, a broken one, or no answer in time.
        """
        patience = request.extensions.get("timeout", {}).get("read")
        self.in_flight += 1
        try:
            async with asyncio.timeout(patience):
                channel = await self._channel(request)
                status, headers, body = await channel.ask(_head(request) + request.content)
        except TimeoutError as exc:
            raise httpx.ReadTimeout("", request=request) from exc
        finally:
            self.in_flight -= 1
        self._free.append(channel)
        return httpx.Response(status, headers=headers, content=body)

    async def _channel(self, request: httpx.Request) -> _Channel:
        while self._free:
            channel = self._free.pop()
            if channel.is_open:
                return channel
        loop, url = asyncio.get_running_loop(), request.url
        try:
            _, channel = await loop.create_connection(_Channel, url.host, url.port)
        except OSError as exc:
            raise httpx.ConnectError(str(exc), request=request) from exc
        return channel

    async def aclose(self) -> None:
        """Close what is open."""
        for channel in self._free:
            channel.close()


def _head(request: httpx.Request) -> bytes:
    lines = [f"{request.method} ".encode() + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n"


class _Channel(asyncio.Protocol):
    """One connection to the engine."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, list[tuple[bytes, bytes]], bytes]] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    async def ask(self, request: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        self._answer = asyncio.get_running_loop().create_future()
        self._headers, self._body = [], []
        self._parser = httptools.HttpResponseParser(self)
        assert self._transport is not None
        self._transport.write(request)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(httpx.ReadError(str(exc or "the engine closed the connection")))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), self._headers, b"".join(self._body)))
