"""The model engine's HTTP face: asked in this process on virtual time, served on a port in real time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import httpx
from aiohttp import web


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, whole."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"


def json_answer(value: object, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), status)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, whole."""

    method: str
    path: str
    body: bytes


Handler: TypeAlias = Callable[[Asked], "Answer | Awaitable[Answer]"]


class Face:
    """The server of the engine while its process runs."""

    def __init__(self, handler: Handler, port: int | None = None) -> None:
        self.port = port  # None: only in this process
        self._handler = handler
        self._is_there = False
        self._under_way: set[asyncio.Future[Answer]] = set()
        self._runner: web.AppRunner | None = None

    async def appear(self) -> None:
        """Take requests from now on."""
        self._is_there = True
        if self.port is not None:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._serve)
            runner = self._runner = web.AppRunner(app, shutdown_timeout=0.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()

    def vanish(self) -> None:
        """End as a killed process does: no answer to anybody, and connections refused from now on."""
        self._is_there = False
        for future in list(self._under_way):
            future.cancel()
        if self._runner is not None:
            self._closing = asyncio.ensure_future(self._runner.cleanup())
            self._runner = None

    async def ask(self, asked: Asked) -> Answer:
        """The answer to one request."""
        if not self._is_there:
            raise ConnectionRefusedError("connection refused")
        answer = self._handler(asked)
        if isinstance(answer, Answer):
            return answer
        future = asyncio.ensure_future(answer)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        try:
            await asyncio.wait({future})
        finally:
            future.cancel()  # the caller has left
        if future.cancelled():
            raise ConnectionResetError("the engine closed the connection")
        return future.result()

    async def _serve(self, request: web.Request) -> web.Response:
        answer = await self.ask(Asked(request.method, request.path, await request.read()))
        return web.Response(body=answer.body, status=answer.status, headers={"Content-Type": answer.content_type})


class InProcess(httpx.AsyncBaseTransport):
    """Stands in for the network where time is virtual; its failures are httpx's."""

    def __init__(self, face: Face) -> None:
        self._face = face

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Ask, and return the answer, whole."""
        asked = Asked(request.method, request.url.path, await request.aread())
        try:
            seconds = request.extensions.get("timeout", {}).get("read")
            async with asyncio.timeout(seconds):  # noqa: TID251 - a virtual one
                answer = await self._face.ask(asked)
        except TimeoutError as exc:
            raise httpx.ReadTimeout("", request=request) from exc
        except ConnectionRefusedError as exc:
            raise httpx.ConnectError(str(exc), request=request) from exc
        except ConnectionResetError as exc:
            raise httpx.ReadError(str(exc), request=request) from exc
        return httpx.Response(answer.status, headers={"Content-Type": answer.content_type}, content=answer.body)
