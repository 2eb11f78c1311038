"""Run by the engine's startup and liveness probes: exits with 0 unless the engine must be restarted.

Arguments: the URL of the sidecar's control plane, and the engine's (http://host:port, or unix:/path).
The sidecar knows more, and is asked first. If it does not answer, because it is being restarted or was killed, the
engine's own /health decides; also if it reports that the engine is starting: a sidecar that was started beside a dead
engine knows no better. It runs in the engine's image: standard library only.
"""

import http.client
import socket
import ssl
import sys
from urllib.parse import urlsplit

SECONDS = 3.0
OK, UNAVAILABLE = 200, 503
BODY_BYTES = 4096


class Socket(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self.host)


def ask(url: str, path: str) -> "tuple[int | None, bytes]":
    """Return status and body of a GET; None and nothing without a response in time."""
    kind, _, rest = url.partition(":")
    parts = urlsplit(url)
    if kind == "unix":
        connection = Socket("localhost", timeout=SECONDS)
        connection.host = rest
    elif kind == "https":
        # It is our own pod: the certificate is for the name that clients use.
        plain = ssl._create_unverified_context()  # noqa: S323 - see above
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=SECONDS, context=plain)
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        connection.request("GET", path, headers={"Host": "localhost"})
        response = connection.getresponse()
        return response.status, response.read(BODY_BYTES)
    except (OSError, http.client.HTTPException) as exc:
        print(f"{url}{path}: {exc!r}", file=sys.stderr)
        return None, b""
    finally:
        connection.close()


status, body = ask(sys.argv[1], "/health/deep")
if status not in (OK, UNAVAILABLE) or b'"engine":"starting"' in body.replace(b" ", b""):
    status, _ = ask(sys.argv[2], "/health")
sys.exit(0 if status == OK else f"unhealthy: status {status}")
