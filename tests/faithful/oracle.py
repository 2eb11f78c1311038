"""An engine that reads HTTP/1.1 to the letter, and holds whoever stands before it to one meaning per byte.

What two readers could take in two ways is a violation: it is written down, and the connection ends. What is plain is
answered with what was asked, so that a client can tell which request its answer is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import socket
from dataclasses import dataclass
from urllib.parse import unquote

from gated_proxy.allowlist import CONTROL_PATHS, CONTROL_PREFIX, NEVER, AllowList, read_path
from tests.faithful.engine import BACKLOG, POLLER, let_those_in_who_knocked

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") (/[!-~\x80-\xff]*) HTTP/1\.1")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t -~]*)?")
_DENIED = {path.lower() for path in CONTROL_PATHS}
MOST_BYTES = 2**20


class Ambiguous(Exception):
    """Two readers could take this in two ways."""


@dataclass
class Seen:
    """One request, as only one reader could read it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    connection: int
    body: bytes = b""
    whole: bool = False

    @property
    def path(self) -> str:
        """As it stands in the target."""
        return self.target.partition("?")[0]

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class _Tape:
    """A reader that remembers what it has read, for a violation to be understood."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.bytes = b""

    async def line(self) -> bytes:
        return self._kept(await self._reader.readuntil(b"\n"))

    async def exactly(self, length: int) -> bytes:
        return self._kept(await self._reader.readexactly(length))

    async def some(self, most: int) -> bytes:
        return self._kept(await self._reader.read(most))

    def _kept(self, data: bytes) -> bytes:
        self.bytes = (self.bytes + data)[-1000:]
        return data


class Oracle:
    """The engine: `async with Oracle(listener) as oracle`, and then what it saw and what it could not bear."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self.requests: list[Seen] = []
        self.violations: list[str] = []

    async def __aenter__(self) -> Oracle:
        self._server = await asyncio.start_server(self._serve, sock=self._listener.dup(), backlog=BACKLOG)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await let_those_in_who_knocked()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        await asyncio.sleep(0)

    def forget(self) -> None:
        """Begin anew."""
        self.requests.clear()
        self.violations.clear()

    def targets(self) -> list[str]:
        """Of all requests, in order, those that a test settles with left out."""
        return [seen.target for seen in self.requests if seen.target != "/v1/settle"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        tape = _Tape(reader)
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while await self._exchange(tape, writer, number):
                pass
        except Ambiguous as ambiguous:
            self.violations.append(f"{ambiguous}, in {tape.bytes!r}")
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()

    async def _exchange(self, tape: _Tape, writer: asyncio.StreamWriter, number: int) -> bool:
        seen = await self._head(tape, number)
        polled = any(value.startswith(POLLER) for value in seen.header("user-agent"))
        if not polled:
            self.requests.append(seen)
        if seen.header("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await self._body(tape, seen)
        seen.whole = True
        answer = f"{seen.method} {seen.target} {len(seen.body)}".encode("latin-1")
        status = b"404 Not Found" if polled else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(answer)))
        if seen.method != "HEAD":
            writer.write(answer)
        await writer.drain()
        return "close" not in ",".join(seen.header("connection")).lower()

    async def _line(self, tape: _Tape) -> bytes:
        try:
            line = await tape.line()
        except asyncio.LimitOverrunError as error:
            raise Ambiguous("a line without an end") from error
        if not line.endswith(b"\r\n") or b"\r" in line[:-2] or b"\0" in line:
            raise Ambiguous(f"a line with odd ends: {line[:200]!r}")
        return line[:-2]

    async def _fields(self, tape: _Tape) -> list[tuple[str, str]]:
        fields = []
        while line := await self._line(tape):
            if not (field := _FIELD.fullmatch(line)):
                raise Ambiguous(f"no header field: {line[:200]!r}")
            fields.append((field[1].decode().lower(), field[2].decode("latin-1")))
        return fields

    async def _head(self, tape: _Tape, number: int) -> Seen:
        line = await self._line(tape)
        if not (request := _REQUEST_LINE.fullmatch(line)) or b"#" in line:
            raise Ambiguous(f"no request line: {line[:200]!r}")
        seen = Seen(request[1].decode(), request[2].decode("latin-1"), await self._fields(tape), number)
        self._check(seen)
        return seen

    def _check(self, seen: Seen) -> None:
        lengths, codings = seen.header("content-length"), seen.header("transfer-encoding")
        flaws = {
            "more than one length": len(lengths) > 1,
            "a length that is no number": any(not re.fullmatch("[0-9]{1,18}", length, re.ASCII) for length in lengths),
            "a length and a coding": bool(lengths and codings),
            "codings other than chunked": codings not in ([], ["chunked"])
            and [c.lower() for c in codings] != ["chunked"],
            "not one host": len(seen.header("host")) != 1,
            "an upgrade": bool(seen.header("upgrade")),
        }
        for flaw, found in flaws.items():
            if found:
                raise Ambiguous(f"{seen.method} {seen.target}: {flaw}: {seen.headers}")

    async def _body(self, tape: _Tape, seen: Seen) -> None:
        for length in seen.header("content-length"):
            await self._take(tape, seen, int(length))
        while seen.header("transfer-encoding"):
            line = await self._line(tape)
            if not (size := _CHUNK_SIZE.fullmatch(line)):
                raise Ambiguous(f"no chunk size: {line[:200]!r}")
            if not (length := int(size[1], 16)):
                break
            await self._take(tape, seen, length)
            if await tape.exactly(2) != b"\r\n":
                raise Ambiguous(f"a chunk that does not end where it said: {seen.body[-200:]!r}")
        for name, value in await self._fields(tape) if seen.header("transfer-encoding") else ():
            if name in ("content-length", "transfer-encoding", "host"):
                raise Ambiguous(f"a trailer that frames: {name}: {value}")

    async def _take(self, tape: _Tape, seen: Seen, remaining: int) -> None:
        while remaining:
            piece = await tape.some(min(remaining, 65536))
            if not piece:
                raise asyncio.IncompleteReadError(seen.body, remaining)
            seen.body = (seen.body + piece)[:MOST_BYTES]
            remaining -= len(piece)


def leads_to_control(target: str) -> bool:
    """Tell whether some reader, decoding as often and tidying up as much as it likes, ends at a denied path."""
    path = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*:/+[^/]*", "", target)
    for _ in range(4):
        for reading in (path, path.partition("?")[0], path.partition("?")[0].partition("#")[0]):
            if _is_denied(reading):
                return True
        path = unquote(path, "latin-1")
    return False


def _is_denied(path: str) -> bool:
    plain = re.sub(r";[^/]*", "", path.replace("\\", "/")).translate(dict.fromkeys(range(33)))
    for resolved in (posixpath.normpath("/" + plain.lstrip("/")).lower(), re.sub("/+", "/", plain).rstrip("/").lower()):
        if resolved in _DENIED or NEVER in resolved.partition("?")[0].split("/") or resolved.startswith(CONTROL_PREFIX):
            return True
    return False


def admitted(seen: Seen) -> bool:
    """Tell whether the allow list lets this request through as the engine got it."""
    return AllowList().decide(seen.method, read_path(seen.path.encode("latin-1"))).admitted


def statuses(data: bytes) -> list[int]:
    """Of the answers that a client got on one connection; counted bodies only."""
    found = []
    with contextlib.suppress(ValueError, IndexError):
        while data:
            head, _, data = data.partition(b"\r\n\r\n")
            found.append(int(head.split(b" ", 2)[1]))
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            if re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
                data = data.partition(b"\r\n0\r\n\r\n")[2] if not data.startswith(b"0\r\n\r\n") else data[5:]
            elif found[-1] >= 200 and length:
                data = data[int(length[1]) :]
            elif found[-1] >= 200 and found[-1] not in (204, 304):
                break
    return found
