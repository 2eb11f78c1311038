"""files/alive.py, as the engine's liveness probe runs it: who is asked, and who decides."""

from __future__ import annotations

import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helm.chart import HELM, ci_values, container, pod

ALIVE = (HELM / "files" / "alive.py").read_text(encoding="utf-8")
# As it is, but patient: a busy machine is not what decides here.
PATIENT = ALIVE.replace("SECONDS = 3.0", "SECONDS = 60.0")
assert PATIENT != ALIVE
NOBODY = "http://127.0.0.1:1"


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """HTTP on a Unix socket."""

    daemon_threads = True


@contextmanager
def answering(path: str, status: int, at: Path | None = None, body: bytes = b"") -> Iterator[str]:
    """The URL of a server that knows one path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == path else 404)
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return ""

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler) if at is None else UnixServer(str(at), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}" if at is None else f"unix:{at}"
    server.shutdown()
    thread.join()
    server.server_close()


def probe(sidecar: str, engine: str) -> int:
    """With a proxy in the environment that nobody is at: the probe does not use it."""
    command = [sys.executable, "-I", "-S", "-c", PATIENT, sidecar, engine]
    environ = {"http_proxy": NOBODY}
    return subprocess.run(command, env=environ, capture_output=True, timeout=300, check=False).returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_sidecar_that_answers_decides(status, code):
    """Whatever the engine's own health says: it is 200 while the engine hangs."""
    with answering("/health/deep", status) as sidecar, answering("/health", 500 if status == 200 else 200) as engine:
        assert probe(sidecar, engine) == code


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_where_the_sidecar_is_gone_the_engine_decides(status, code):
    with answering("/health", status) as engine:
        assert probe(NOBODY, engine) == code


def test_a_sidecar_that_knows_no_such_path_decides_nothing():
    with answering("/", 200) as other, answering("/health", 200) as engine:
        assert probe(other, engine) == 0


def test_an_engine_that_loads_has_not_started():
    body = b'{"healthy": true, "engine": "starting", "reason": "nothing answers"}'
    with answering("/health/deep", 200, body=body) as sidecar:
        assert probe(sidecar, NOBODY) == 1


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_of_an_engine_that_starts_again_its_own_health_decides(status, code):
    body = b'{"healthy": true, "engine": "starting", "reason": "nothing answers"}'
    with answering("/health/deep", 200, body=body) as sidecar, answering("/health", status) as engine:
        assert probe(sidecar, engine) == code
        assert probe(sidecar, NOBODY) == 1


def test_where_nobody_answers_the_probe_fails():
    assert probe(NOBODY, NOBODY) == 1


def test_an_engine_on_a_socket_is_asked_there(tmp_path):
    with answering("/health", 200, tmp_path / "s") as engine:
        assert probe(NOBODY, engine) == 0
    assert probe(NOBODY, f"unix:{tmp_path / 'none'}") == 1


@pytest.mark.parametrize("kind", ["startupProbe", "livenessProbe"])
def test_the_chart_runs_this_very_file(kind):
    command = container(pod(ci_values("default-values.yaml")), "vllm")[kind]["exec"]["command"]
    assert command[:4] == ["python3", "-I", "-S", "-c"]
    assert command[4].strip() == ALIVE.strip()
