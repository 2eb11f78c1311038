"""An engine's data plane on a real port, that misbehaves on demand.

A raw asyncio server: a test says per path what happens on the wire, byte for byte if it likes, and what arrived can be
read back exactly as it came: header names and repetitions, framing, and the moment when the peer went away.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass
class Call:
    """One request as it arrived, and the means to answer it badly."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    keep_alive: bool = True

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    async def pieces(self):
        """Yield the request body as framed: one piece per chunk, or as it arrives when counted."""
        if self.header("transfer-encoding"):
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        remaining = int((self.header("content-length") or ["0"])[0])
        while remaining and (piece := await self.reader.read(min(remaining, 65536))):
            remaining -= len(piece)
            yield piece

    async def read(self) -> bytes:
        self.body = b"".join([piece async for piece in self.pieces()])
        return self.body

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, *headers: tuple[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} Reason", *(f"{name}: {value}" for name, value in headers), "", ""]
        await self.write("\r\n".join(lines).encode("latin-1"))

    async def answer(self, body: bytes = b"{}", status: int = 200, *headers: tuple[str, str]) -> None:
        await self.head(status, ("content-length", str(len(body))), *headers)
        await self.write(body)

    async def begin(self, *headers: tuple[str, str]) -> None:
        await self.head(200, ("transfer-encoding", "chunked"), *headers)

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def wait_until_gone(self) -> None:
        """Return when the peer has closed; it must have nothing more to say."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.gone.set()

    def die(self) -> None:
        self.keep_alive = False
        self.writer.transport.abort()

    def close(self) -> None:
        self.keep_alive = False
        self.writer.close()


Handler = Callable[[Call], Awaitable[None]]
IDLE_TURNS = 25


async def _echo(call: Call) -> None:
    await call.answer(await call.read(), 200, ("content-type", "application/octet-stream"))


class Upstream:
    """The server: ``async with Upstream() as upstream``; paths without a handler echo the body."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.connections = 0
        self.idle_seconds: float | None = None  # a connection without a request for so long is closed
        self.handlers: dict[str, Handler] = defaultdict(lambda: _echo)
        self.errors: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def on(self, path: str) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            self.handlers[path] = handler
            return handler

        return register

    async def __aenter__(self) -> "Upstream":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        for error in self.errors:
            raise error

    async def listen_on(self, path: str) -> asyncio.Server:
        return await asyncio.start_unix_server(self._serve, path)

    async def listen_with_tls(self, context: ssl.SSLContext) -> asyncio.Server:
        """Answer on a port of its own over TLS too."""
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)

    async def stop(self) -> None:
        """Close the port and every connection, as a killed engine does."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while call := await self._next_call(reader, writer):
                await self.handlers[call.target.partition("?")[0]](call)
                if not call.keep_alive:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the peer left in the middle: what many tests are about
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - raised again in the test, when the fake closes
            self.errors.append(error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        """Read a request's head; a loop that stood still has not been idle, and loses nothing that came meanwhile."""
        if self.idle_seconds is None:
            return await reader.readuntil(b"\r\n\r\n")
        reading = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
        try:
            for _ in range(IDLE_TURNS):
                await asyncio.wait({reading}, timeout=self.idle_seconds / IDLE_TURNS)
                if reading.done():
                    return reading.result()
        finally:
            reading.cancel()
        raise TimeoutError

    async def _next_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call | None:
        try:
            head = await self._head(reader)
        except (asyncio.IncompleteReadError, TimeoutError):
            return None
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = [tuple(line.split(": ", 1)) for line in lines[1:] if line]
        call = Call(method, target, headers, reader, writer)
        self.calls.append(call)
        return call
