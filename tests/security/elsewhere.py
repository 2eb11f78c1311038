"""A sidecar on all addresses, and callers from two of them: a program for a network namespace of its own.

``unshare --net python -m tests.security.elsewhere FOLDER`` prints what each was answered, as JSON. Nothing leaves the
namespace: its only interface is loopback, to which an address is added that is none of loopback's.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from pathlib import Path

import httpx

from highwater.terminal.demo.sidecar import DemoSidecar

ELSEWHERE = "198.51.100.7"  # RFC 5737: for documentation, and nobody's
TOKEN = "correct-horse-battery"
_SET_FLAGS, _SET_ADDRESS = 0x8914, 0x8916
_UP_AND_RUNNING = 0x1 | 0x40
PATHS = [
    ("POST", "/memory/marks"),
    ("POST", "/memory/reclaim"),
    ("POST", "/memory/snapshot"),
    ("POST", "/memory/snapshot/stacks"),
    ("POST", "/memory/encoder-cache/restore"),
    ("POST", "/reset_mm_cache"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/reset_encoder_cache"),
    ("PUT", "/policy"),
    ("GET", "/memory/snapshots"),
    ("GET", "/server_info"),
    ("GET", "/memory"),
]


def add_address() -> None:
    """Bring loopback up, with one address more."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh", b"lo", _UP_AND_RUNNING))
        address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(ELSEWHERE))
        fcntl.ioctl(control, _SET_ADDRESS, address)


def answers(port: int, *, host: str, token: str | None = None) -> dict[str, int]:
    """The status of every path, asked from the address that is asked."""
    # As local as a caller can make itself look.
    headers = {"Host": "localhost:8001", "Origin": "http://localhost:8001"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    transport = httpx.HTTPTransport(local_address=host)
    with httpx.Client(transport=transport, base_url=f"http://{host}:{port}", headers=headers) as client:
        return {f"{method} {path}": client.request(method, path, json={}).status_code for method, path in PATHS}


def main(folder: Path) -> None:
    """Ask, and print."""
    add_address()
    told: dict[str, dict[str, int]] = {}
    started = {"trusting": {"HIGHWATER_TRUST_LOOPBACK": "true"}, "guarded": {}}
    for name, settings in started.items():
        # `localhost` in a namespace without names: the engine is nobody.
        given = {"HIGHWATER_HOST": "0.0.0.0", "HIGHWATER_ADMIN_TOKEN": TOKEN, **settings}
        with DemoSidecar("http://127.0.0.1:1", folder=folder / name, settings=given) as sidecar:
            told[f"{name} elsewhere"] = answers(sidecar.port, host=ELSEWHERE)
            told[f"{name} loopback"] = answers(sidecar.port, host="127.0.0.1")
            told[f"{name} mesh"] = answers(sidecar.port, host="127.0.0.6")
            told[f"{name} elsewhere with token"] = answers(sidecar.port, host=ELSEWHERE, token=TOKEN)
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    os.environ.pop("HIGHWATER_ADMIN_TOKEN", None)
    main(Path(sys.argv[1]))
