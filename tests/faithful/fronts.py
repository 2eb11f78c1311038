"""What may stand before the engine: the sidecar, nginx, vllm-router, or nothing. Each is a process of its own.

They live as long as the test session does and share one fake engine's port, behind which every test puts an engine of
its own. A control that cannot be had is missing with a reason, and its tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import getpass
import os
import platform
import shutil
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from highwater.terminal.demo.engine import cache_dir
from highwater.terminal.demo.process import DemoError, KeptProcess, environ_with, free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.build_support import compiled_app, environ_for
from tests.http.conftest import Answer, Wire
from tests.patience import LIMIT_SECONDS, patience

EVERYONE = ("sidecar", "direct", "nginx", "vllm-router")
PROXIES = ("sidecar", "nginx", "vllm-router")
ROUTER_VERSION = "0.1.17"
COMPILED = "TEST_COMPILED"
"""Set, the sidecar under test is the compiled one; tests/http holds the other to the same rules."""
START_SECONDS = 300.0


def fronted_by(*kinds: str) -> pytest.MarkDecorator:
    """The fronts that a test is about, where not all."""
    return pytest.mark.parametrize("through", kinds, indirect=True)


def reset(transport: asyncio.WriteTransport) -> None:
    """End a connection as a killed machine does: the peer gets a reset, not an end."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Missing(Exception):
    """This control cannot be had on this machine; the reason."""


@dataclass(frozen=True)
class Profile:
    """One set of settings, said to each proxy in its own words."""

    name: str
    sidecar: Mapping[str, str] = field(default_factory=dict)
    """By environment variable."""
    nginx: tuple[str, ...] = ()
    """Directives of its server."""
    engine_port: int | None = None
    """Another engine than the tests' own."""


PATIENT = Profile("patient", nginx=("client_max_body_size 256m;", "proxy_read_timeout 60s;"))


@dataclass
class Whole(Answer):
    """A whole response as it stood on the wire, what came before it, and how it ended."""

    interim: list[int] = field(default_factory=list)
    """Statuses of the 1xx answers before it."""
    trailers: list[tuple[str, str]] = field(default_factory=list)

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def framing(self) -> str:
        """`chunked`, `counted`, or ended by `close`."""
        if self.header("transfer-encoding"):
            return "chunked"
        return "counted" if self.header("content-length") else "close"


class Client(Wire):
    """A connection that waits for nothing forever, and reads a response to its end however it is framed."""

    async def whole(self, *, method: str = "GET", seconds: float | None = None) -> Whole:
        """Read a whole response, with what came before it."""
        async with patience(seconds):
            interim = []
            while (head := await self.head()).status in range(100, 200) and head.status != 101:
                interim.append(head.status)
            answer = Whole(head.status, head.headers, b"", complete=False, interim=interim)
            try:
                await self._body(answer, method)
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                return answer
            answer.complete = True
            return answer

    async def _body(self, answer: Whole, method: str) -> None:
        if method == "HEAD" or answer.status in (204, 304):
            return
        if answer.framing == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                answer.body += (await self.reader.readexactly(size + 2))[:-2]
            while (line := await self.reader.readuntil(b"\r\n")) != b"\r\n":
                name, _, value = line[:-2].decode("latin-1").partition(":")
                answer.trailers.append((name, value.strip()))
        elif answer.framing == "counted":
            (length,) = answer.header("content-length")
            while len(answer.body) < int(length):
                piece = await self.reader.read(int(length) - len(answer.body))
                if not piece:
                    raise asyncio.IncompleteReadError(answer.body, int(length))
                answer.body += piece
        else:
            while piece := await self.reader.read(65536):
                answer.body += piece

    async def rest(self, seconds: float | None = None) -> bytes:
        """Read to the end of the connection; a reset is an end like any other."""
        data = b""
        async with patience(seconds):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    data += piece
        return data

    async def half_close(self) -> None:
        """Say that nothing more will come, and go on reading."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Vanish without a goodbye."""
        reset(self.writer.transport)

    async def leave(self) -> None:
        """Close; what was not sent by then never will be."""
        self.writer.transport.abort() if self.writer.is_closing() else self.writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1):  # noqa: TID251 - it is aborted then; what its peer left, it never takes
                await self.writer.wait_closed()
        self.writer.transport.abort()


@dataclass
class Front:
    """What clients connect to."""

    kind: str
    port: int
    pids: list[int] = field(default_factory=list)
    """Of the processes that stand between client and engine."""
    clients: list[Client] = field(default_factory=list)

    @property
    def websocket_url(self) -> str:
        """Its realtime endpoint."""
        return f"ws://127.0.0.1:{self.port}/v1/realtime"

    async def connect(self, **options: int) -> Client:
        """Open a connection, closed with the test if not before."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, **{"limit": 2**24, **options}))
        self.clients.append(client)
        return client

    async def ask(self, method: str, target: str, *headers: tuple[str, str], body: bytes = b"") -> Whole:
        """One request on a connection of its own."""
        client = await self.connect()
        await client.request(method, target, *headers, body=body)
        answer = await client.whole(method=method)
        await client.leave()
        return answer

    async def say(self, data: bytes, seconds: float | None = None) -> bytes:
        """Send bytes on a connection of their own, no more than these, and return all that comes back until it ends."""
        client = await self.connect()
        with contextlib.suppress(ConnectionError):
            await client.send(data)
        try:
            return await client.rest(seconds)
        finally:
            await client.leave()

    async def settle(self) -> None:
        """Return when whatever was sent before has been read: the front has since served another connection."""
        for _ in range(2):
            await self.ask("GET", "/v1/settle")

    async def leave(self) -> None:
        """Close every connection."""
        for client in self.clients:
            client.writer.transport.abort()
        await asyncio.gather(*(client.leave() for client in self.clients))
        self.clients.clear()

    def rss_bytes(self) -> int:
        """Resident memory of its processes."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids)
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Processor time of its processes, user and system."""
        stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.pids)
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    def open_files(self) -> int:
        """Open file descriptors of its processes."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)

    async def files_at_rest(self, most: int | None = None) -> int:
        """Open files once they are no more than `most`, or have been the same for a while; a minute at most."""
        counts = [self.open_files()]
        while (
            len(counts) < 1200
            and counts[-1] > (most or 0)
            and (most is not None or len(set(counts[-8:])) > 1 or len(counts) < 8)
        ):
            await asyncio.sleep(0.05)  # they are another process's: nothing tells when one is closed
            counts.append(self.open_files())
        return counts[-1]


class Fronts:
    """Starts each front on first use, before the engine's port, and ends all of them with the session."""

    def __init__(self, folder: Path, engine: socket.socket) -> None:
        self._folder = folder
        self._engine = engine
        self._stack = contextlib.ExitStack()
        self._running: dict[tuple[str, str], Front | Missing | DemoError] = {}

    def get(self, kind: str, profile: Profile = PATIENT) -> Front:
        """Return a front as started before.

        Raises:
            Missing: No front of this kind is installed here.
            DemoError: It did not start.
        """
        key = (kind, profile.name)
        if key not in self._running:
            try:
                self._running[key] = self._start(kind, profile)
            except (Missing, DemoError) as failure:  # not to be tried again forevery test
                self._running[key] = failure
        front = self._running[key]
        if isinstance(front, Exception):
            raise front
        return front

    def close(self) -> None:
        """End every process."""
        self._stack.close()

    def _start(self, kind: str, profile: Profile) -> Front:
        port = profile.engine_port or self._engine.getsockname()[1]
        if kind == "direct":
            return Front(kind, port)
        folder = self._folder / f"{kind}-{profile.name}"
        folder.mkdir()
        with _welcoming(self._engine):
            start = {"sidecar": self._sidecar, "nginx": self._nginx, "vllm-router": self._router}[kind]
            return start(f"127.0.0.1:{port}", folder, profile)

    def _sidecar(self, engine: str, folder: Path, profile: Profile) -> Front:
        settings = {
            "HIGHWATER_POLL_SECONDS": "3600",
            "HIGHWATER_SHUTDOWN_SECONDS": "1",
            "HIGHWATER_TRUST_LOOPBACK": "true",  # these tests are of framing, not of who may
            "HIGHWATER_DOOR__MODE": "on",  # it looks at every body, and changes none
            **profile.sidecar,
        }
        if os.environ.get(COMPILED):
            settings |= environ_for(compiled_app())
        sidecar = self._stack.enter_context(DemoSidecar(f"http://{engine}", folder=folder, settings=settings))
        return Front("sidecar", sidecar.port, sidecar.pids())

    def _nginx(self, engine: str, folder: Path, profile: Profile) -> Front:
        if (nginx := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")) is None:
            raise Missing("nginx is not installed (Debian: nginx-light)")
        port = free_port()
        config = folder / "nginx.conf"
        config.write_text(_NGINX % (getpass.getuser(), engine, port, "\n    ".join(profile.nginx)))
        process = self._run("nginx", [nginx, "-e", "stderr", "-p", str(folder), "-c", str(config)], folder, port)
        return Front("nginx", port, process.pids())

    def _router(self, engine: str, folder: Path, profile: Profile) -> Front:
        if profile != PATIENT:
            raise Missing("vllm-router has no words for these settings")
        port = free_port()
        command = [str(_router_environment() / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", f"http://{engine}", "--policy", "round_robin", "--log-level", "error"]
        command += ["--disable-retries", "--disable-circuit-breaker", "--health-check-interval-secs", "86400"]
        command += ["--prometheus-port", str(free_port())]
        return Front("vllm-router", port, self._run("vllm-router", command, folder, port).pids())

    def _run(self, what: str, command: list[str], folder: Path, port: int) -> KeptProcess:
        log = folder / "log"
        process = KeptProcess(what, log)
        self._stack.callback(process.stop)
        process.start(command, env=environ_with({}, without_prefix="PYTHON"), cwd=folder)
        deadline = time.monotonic() + START_SECONDS
        while not _accepts(port):
            if not process.is_running() or time.monotonic() > deadline:
                raise DemoError.with_log(f"{what} did not start", log)
            time.sleep(0.05)
        return process


_NGINX = """
daemon off;
user %s;
worker_processes 1;
pid nginx.pid;
events { worker_connections 8192; }
http {
  access_log off;
  client_body_temp_path client_body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  map $http_upgrade $hop_upgrade { default ""; ~*^websocket$ websocket; }
  map $hop_upgrade $hop_connection { default ""; websocket upgrade; }
  upstream engine { server %s; keepalive 1024; keepalive_timeout 4s; }
  server {
    listen 127.0.0.1:%d backlog=4096;
    keepalive_requests 1000000;
    large_client_header_buffers 8 16k;
    underscores_in_headers on;
    proxy_http_version 1.1;
    proxy_buffering off;
    proxy_buffer_size 64k;
    proxy_buffers 8 64k;
    proxy_busy_buffers_size 128k;
    proxy_request_buffering off;
    proxy_set_header Upgrade $hop_upgrade;
    proxy_set_header Connection $hop_connection;
    %s
    location / { proxy_pass http://engine; }
  }
}
"""


def _router_environment() -> Path:
    """Return vllm-router's own virtual environment, made on first use and kept beside the engines'."""
    root = cache_dir() / f"vllm-router-{ROUTER_VERSION}-{platform.python_version()}"
    marker, log_path = root / "complete", root.parent / f"{root.name}.log"
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f"{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it with the file
        if not marker.is_file():
            shutil.rmtree(root, ignore_errors=True)
            pip = [str(root / "bin" / "python"), "-m", "pip", "--no-input", "--disable-pip-version-check"]
            with log_path.open("w") as log:
                for command in (
                    [sys.executable, "-m", "venv", str(root)],
                    [*pip, "install", f"vllm-router=={ROUTER_VERSION}"],
                ):
                    if subprocess.run(command, stdout=log, stderr=log, check=False).returncode != 0:
                        raise Missing(f"vllm-router {ROUTER_VERSION} could not be installed (log {log_path})")
            marker.touch()
    return root


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS):
        return True
    return False


class _Welcome(socketserver.StreamRequestHandler):
    """Answers as an engine does that lives and can nothing else."""

    def handle(self) -> None:
        lives = b"/health" in self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        status = b"200 OK" if lives else b"404 Not Found"
        self.wfile.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)


@contextlib.contextmanager
def _welcoming(listener: socket.socket) -> Iterator[None]:
    """An engine at the port while no test has one there: some will not start before a dead one."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Welcome, bind_and_activate=False)
    server.socket.close()
    server.socket = listener.dup()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
        time.sleep(0.2)  # the sidecar's first poll is under way when it says that it lives
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
