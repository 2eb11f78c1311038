"""Run by the engine's startup and liveness probes: exits with 0 while the engine is to be left alone.

Arguments: the URL of the sidecar's control plane, and the engine's (http://host:port, or unix:/path).
The sidecar knows more, and is asked first. One that does not answer, because it is being restarted or was killed, says
nothing about the engine: then the engine's own /health decides. So it does where the sidecar says that the engine is
starting: while it loads, it does not answer yet, and one that died a while ago looks no different. It runs in the
engine's image: standard library only.
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
        """Open it; the base class does the rest."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self.host)


def ask(url: str, path: str) -> "tuple[int | None, bytes]":
    """Status and body of a GET there; None and nothing where nobody answers in time."""
    kind, _, rest = url.partition(":")
    parts = urlsplit(url)
    if kind == "unix":
        connection = Socket("localhost", timeout=SECONDS)
        connection.host = rest
    elif kind == "https":
        # It is our own pod: the certificate is for the name that clients use.
        plain = ssl._create_unverified_context()  # noqa: S323
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


told, said = ask(sys.argv[1], "/health/deep")
if told not in (OK, UNAVAILABLE) or b'"engine":"starting"' in said.replace(b" ", b""):
    told, _ = ask(sys.argv[2], "/health")
sys.exit(0 if told == OK else f"unhealthy: status {told}")
