"""The sidecar and nginx, each as processes of its own before one upstream, each as fast as it can be set."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from highwater.terminal.demo.process import DemoError, KeptProcess, environ_with, free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.build_support import compiled_app, environ_for, obstacle

SIDECAR, NGINX, DIRECT = "sidecar", "nginx", "direct"
UNCOMPILED = "sidecar, not compiled"
READY_SECONDS = 120.0

# One worker, no log, nothing buffered, connections kept on both sides.
NGINX_CONFIGURATION = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000000;
  client_max_body_size 0;
  client_body_buffer_size 128k;
  upstream engine {{
    server 127.0.0.1:{upstream};
    keepalive 1024;
    keepalive_requests 1000000000;
    keepalive_timeout 1h;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
      proxy_read_timeout 10m;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    """One that runs.

    Attributes:
        name: As in the tables.
        port: Of 127.0.0.1.
        pids: All its live processes; none where nothing is between.
    """

    name: str
    port: int
    pids: Callable[[], list[int]]


Start: TypeAlias = Callable[[int, Path], AbstractContextManager[Proxy]]
"""Starts a proxy, given the upstream's port and a folder for logs."""


@contextmanager
def compiled(upstream: int, folder: Path) -> Iterator[Proxy]:
    """`highwater serve` with default settings: metrics, gate, limits and request ids are on."""
    with DemoSidecar(
        f"http://127.0.0.1:{upstream}", folder=folder, settings=environ_for(compiled_app(print))
    ) as running:
        yield Proxy(SIDECAR, running.port, running.pids)


@contextmanager
def uncompiled(upstream: int, folder: Path) -> Iterator[Proxy]:
    """The same, as `pip install ./worker_ext .` has it."""
    with DemoSidecar(f"http://127.0.0.1:{upstream}", folder=folder) as running:
        yield Proxy(UNCOMPILED, running.port, running.pids)


def sidecars(notes: list[str]) -> Mapping[str, Start]:
    """Both, the first of them the one that is judged; where nothing can be compiled, one, and a note of it."""
    missing = obstacle()
    if missing is None:
        return {SIDECAR: compiled, UNCOMPILED: uncompiled}
    notes.append(f"The sidecar ran uncompiled: {missing}")
    return {SIDECAR: uncompiled}


@contextmanager
def nginx(upstream: int, folder: Path) -> Iterator[Proxy]:
    """Debian's, or whichever is there."""
    # Where Debian puts it, which is not on everybody's path.
    binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if binary is None:
        raise DemoError("nginx is not installed (Debian's package is nginx-light)")
    port = free_port()
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX_CONFIGURATION.format(folder=folder, upstream=upstream, port=port), encoding="utf-8")
    with _kept(NGINX, [binary, "-p", str(folder), "-c", str(configuration)], folder, port, "/health") as process:
        yield Proxy(NGINX, port, process.pids)


@contextmanager
def running(name: str, start: Start, upstream: int, folder: Path) -> Iterator[Proxy]:
    """One of them, with a folder of its own in `folder`.

    Raises:
        DemoError: It cannot be had, or does not start.
    """
    with start(upstream, Path(tempfile.mkdtemp(dir=folder, prefix=f"{name}-"))) as proxy:
        yield proxy


@contextmanager
def all_running(
    peers: Mapping[str, Start], upstream: int, folder: Path, notes: list[str]
) -> Iterator[dict[str, Proxy]]:
    """Those that can be had, by name; a note is taken of the others.

    Raises:
        DemoError: The sidecar itself does not start.
    """
    with ExitStack() as stack:
        found = {}
        for name, start in peers.items():
            try:
                found[name] = stack.enter_context(running(name, start, upstream, folder))
            except DemoError as exc:
                if name == SIDECAR:
                    raise
                notes.append(f"{name} could not be had: {str(exc).splitlines()[0]}")
                print(f"  {name} could not be had: {exc}", flush=True)
        yield found


@contextmanager
def upstream_of(binary: Path, folder: Path) -> Iterator[int]:
    """The fake upstream; yields its port."""
    port = free_port()
    with _kept("upstream", [str(binary), str(port)], folder, port, "/health"):
        yield port


@contextmanager
def _kept(name: str, command: list[str], folder: Path, port: int, path: str) -> Iterator[KeptProcess]:
    process = KeptProcess(name, folder / f"{name}.log")
    process.start(command, env=environ_with({}), cwd=folder)
    try:
        process.wait_until_answers(port, path, READY_SECONDS)
        yield process
    finally:
        process.stop()
