"""A server that hooks, probes and Helm ask, in a thread of the test's process."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextmanager
def answering(answer: Callable[[str], tuple[int, str]], at: Path | None = None) -> Iterator[str]:
    """The URL of a server that answers a GET with this status and body, by its path; `at`: on a socket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")  # Helm reads no other
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def address_string(self) -> str:
            return ""

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler) if at is None else UnixServer(str(at), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}" if at is None else f"unix:{at}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
