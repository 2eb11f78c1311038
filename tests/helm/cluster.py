"""A cluster's API as far as Helm's `lookup` asks it: discovery, and Secrets. There is no other that runs here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RESOURCES = {
    "kind": "APIResourceList",
    "groupVersion": "v1",
    "resources": [{"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": ["get", "list"]}],
}


def answer(path: str, secrets: dict[str, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Status and body of a GET; `secrets` by `namespace/name`."""
    path = path.partition("?")[0]
    if path == "/version":
        return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
    if path == "/api/v1":
        return 200, RESOURCES
    parts = path.split("/")
    if parts[:4] == ["", "api", "v1", "namespaces"] and len(parts) == 7 and parts[5] == "secrets":
        found = secrets.get(f"{parts[4]}/{parts[6]}")
        if found is not None:
            return 200, found
    return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


@contextmanager
def cluster(secrets: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The URL of one that has these Secrets."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, secrets)
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
