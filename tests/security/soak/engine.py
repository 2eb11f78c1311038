"""A vLLM server's API on a real port, streaming without computing: `python -m tests.security.soak.engine PORT`.

Its server is vLLM's own (uvicorn), its streams step together as an engine's do, and its control face is the simulated
engine's. A request's first token comes at the end of the second step that it sees, between 25 and 50 ms after it
arrived. Answers are a function of the request, so that a client can check each byte.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from bench import simulated_engine

STEP_SECONDS = 0.025
_LAST_EVENT = b"data: [DONE]\n\n"


def answer(request: str, tokens: int) -> bytes:
    """The whole body of one streamed answer."""
    return b"".join(_event(request, index) for index in range(tokens)) + _LAST_EVENT


def _event(request: str, index: int) -> bytes:
    """One token, as many bytes as with vLLM."""
    return (
        f'data: {{"id":"chatcmpl-{request}","object":"chat.completion.chunk","created":1760000000,"model":"soak",'
        f'"choices":[{{"index":0,"delta":{{"content":"token {index}"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
    ).encode()


class Engine:
    """The ASGI application."""

    def __init__(self) -> None:
        self._control = simulated_engine.create_app()
        self._running = 0
        self._step = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._paths: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._upload,
            "/v1/big": lambda _: _zeros(200_000),
            "/v1/huge": lambda _: _zeros(4_000_000),
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, one WebSocket, or the lifespan."""
        if scope["type"] == "websocket":
            await _listen(WebSocket(scope, receive, send))
        elif scope["type"] == "http" and (respond := self._paths.get(scope["path"])) is not None:
            response = await respond(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self._control(scope, receive, send)

    async def _chat(self, request: Request) -> Response:
        asked = json.loads(await request.body())
        return StreamingResponse(self._stream(asked["id"], asked["max_tokens"]), media_type="text/event-stream")

    async def _stream(self, request: str, tokens: int) -> AsyncIterator[bytes]:
        if self._steps is None:
            self._steps = asyncio.create_task(self._take_steps())
        self._running += 1
        try:
            await self._step.wait()
            for index in range(tokens):
                await self._step.wait()
                yield _event(request, index)
            yield _LAST_EVENT
        finally:
            self._running -= 1

    async def _take_steps(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            step, self._step = self._step, asyncio.Event()
            step.set()

    @staticmethod
    async def _upload(request: Request) -> Response:
        size = 0
        async for piece in request.stream():
            size += len(piece)
        return JSONResponse({"bytes": size})

    async def _metrics(self, _: Request) -> Response:
        """The counts that a safe reset asks for."""
        values = {"vllm:num_requests_running": self._running, "vllm:num_requests_waiting": 0}
        labels = 'engine="0",model_name="soak"'
        lines = [
            line for name, value in values.items() for line in (f"# TYPE {name} gauge", f"{name}{{{labels}}} {value}")
        ]
        return PlainTextResponse("\n".join(lines) + "\n")


async def _zeros(size: int) -> Response:
    return Response(bytes(size))


async def _listen(socket: WebSocket) -> None:
    await socket.accept()
    try:
        while True:
            await socket.receive_bytes()
    except (WebSocketDisconnect, KeyError):  # it left, or it sent text
        return


if __name__ == "__main__":
    # Five seconds are vLLM's default too (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). Without pings an idle WebSocket is the
    # sidecar's to end.
    uvicorn.run(
        Engine(),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
        timeout_keep_alive=5,
        ws_ping_interval=None,
    )
