"""Frames both ways between a client's WebSocket and the engine's, until one side closes; the close code travels too.

Pings are each connection's own affair: uvicorn answers the client's, aiohttp the engine's. Nothing is queued: each
direction takes its next frame when the last one has been written.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from enum import Enum
from typing import Any

import aiohttp

Message = MutableMapping[str, Any]

_NORMAL, _GOING_AWAY, _BAD_GATEWAY = 1000, 1001, 1014
# RFC 6455 7.4.1: codes that report what happened and must never be sent, and what comes nearest among those that may.
_SENDABLE = {0: _NORMAL, 1005: _NORMAL, 1006: _GOING_AWAY, 1015: _GOING_AWAY}


class _By(Enum):
    """Who ended the conversation."""

    CLIENT = "client"
    ENGINE = "engine"


async def relay(
    upstream: aiohttp.ClientWebSocketResponse,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
    accept: Message,
) -> None:
    """Accept the client and relay until one side closes; the other is closed with the same code.

    An engine that is lost without a close frame closes the client with 1014, bad gateway.
    """
    upward = asyncio.create_task(_to_engine(upstream, receive))
    try:
        # The server raises an OSError for a client that is gone; then there is nobody to tell.
        with suppress(OSError):
            await send(accept)
            if await _to_client(upstream, send) is _By.CLIENT:
                await upward  # is closing the engine's side; to cancel it would lose the client's close code
    finally:
        upward.cancel()
        await asyncio.wait([upward])
        await upstream.close()


async def _to_engine(upstream: aiohttp.ClientWebSocketResponse, receive: Callable[[], Awaitable[Message]]) -> None:
    # A write to an engine that is gone fails here, and _to_client() sees the same end and reports it.
    with suppress(aiohttp.ClientError, OSError):
        while (message := await receive())["type"] == "websocket.receive":
            if message.get("text") is not None:
                await upstream.send_str(message["text"])
            else:
                await upstream.send_bytes(message["bytes"])
        code = message.get("code") or _NORMAL
        await upstream.close(code=_SENDABLE.get(code, code), message=(message.get("reason") or "").encode())


async def _to_client(upstream: aiohttp.ClientWebSocketResponse, send: Callable[[Message], Awaitable[None]]) -> _By:
    while True:
        frame = await upstream.receive()
        if frame.type is aiohttp.WSMsgType.TEXT:
            await send({"type": "websocket.send", "text": frame.data})
        elif frame.type is aiohttp.WSMsgType.BINARY:
            await send({"type": "websocket.send", "bytes": frame.data})
        elif frame.type is aiohttp.WSMsgType.CLOSING:
            return _By.CLIENT
        else:
            code, reason = _close_of(frame)
            await send({"type": "websocket.close", "code": code, "reason": reason})
            return _By.ENGINE


def _close_of(frame: aiohttp.WSMessage) -> tuple[int, str]:
    if frame.type is aiohttp.WSMsgType.CLOSE:
        return _SENDABLE.get(frame.data, frame.data), frame.extra or ""
    # Lost without a close frame, or a frame that broke the protocol: then with its own code, such as 1009.
    return getattr(frame.data, "code", _BAD_GATEWAY), ""
