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


class CountingTransport(httpx.AsyncBaseTransport):
    """httpx's own transport, over real sockets; it counts the requests that have no answer yet."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=8, max_keepalive_connections=4)
        self._inner = httpx.AsyncHTTPTransport(limits=limits)
        self.in_flight = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.in_flight += 1
        try:
            response = await self._inner.handle_async_request(request)
            body = await response.aread()
        finally:
            self.in_flight -= 1
        await response.aclose()
        return httpx.Response(response.status_code, headers=response.headers, content=body)

    async def aclose(self) -> None:
        await self._inner.aclose()
