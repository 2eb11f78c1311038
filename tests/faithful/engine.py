"""The engine behind every front: the fake of `tests/fakes/upstream.py`, at a port that outlives it."""

from __future__ import annotations

import asyncio
import socket
import time
from weakref import WeakSet

from tests.fakes.upstream import Call, Upstream
from tests.patience import patiently

BACKLOG = 4096
POLLER = "python-httpx"


class Engine(Upstream):
    """What clients' requests did to the engine. The sidecar's own questions are answered with 404 and not kept."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__()
        self._listener = listener
        self._writers: WeakSet[asyncio.StreamWriter] = WeakSet()

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_server(self._serve, sock=self._listener.dup(), backlog=BACKLOG, limit=2**20)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self) -> None:
        """Close the port, and every connection, those too that are just being accepted."""
        self._server.close()
        await let_those_in_who_knocked()
        await super().stop()
        for writer in self._writers:  # a close would wait for a peer that reads no more
            # One that was closed and has written all is gone, and asyncio trips over its abort.
            if not writer.is_closing() or writer.transport.get_write_buffer_size():
                writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        await super()._serve(reader, writer)

    async def _next_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call | None:
        while call := await super()._next_call(reader, writer):
            if not "".join(call.header("user-agent")).startswith(POLLER):
                break
            self.calls.pop()
            await call.read()
            await call.answer(b"{}", 404)
        return call

    def seen(self, path: str) -> list[Call]:
        """The requests for one path; a front may have others on its way."""
        return [call for call in self.calls if call.target.partition("?")[0] == path]

    def connections_used(self) -> int:
        """How many connections the requests came on."""
        return len({id(call.writer) for call in self.calls})


async def let_those_in_who_knocked() -> None:
    """Let asyncio finish with the connections it has accepted: one without its task is nobody's to close."""
    for _ in range(16):  # turns of the loop from the kernel's queue to the task, and some
        await asyncio.sleep(0)


async def gone_after(call: Call, began: float) -> float:
    """Wait until the engine has seen its peer leave, and return how long after `began` that was."""
    await patiently(call.gone.wait())
    return time.monotonic() - began
