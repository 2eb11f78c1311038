"""Commands to try while the demonstration stays up, which work when they are pasted."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from highwater.demo.process import free_port

USUAL_PORT = 8001
"""The sidecar's own default, which the pages write."""


def usual_port() -> int:
    """Return the port that the pages write, or a free one where something listens there."""
    try:
        return free_port(USUAL_PORT)
    except OSError:
        return free_port()


def own_command(program: str) -> str:
    """Return how to type the `highwater` that runs, quoted for a shell; `program` is `sys.argv[0]`.

    It need not be on the shell's path: `make` installs it into a virtual environment that nobody has activated.
    """
    path = Path(program).absolute()
    if path.name != "highwater":  # run as a module
        path = Path(sys.executable).with_name("highwater")
    return shlex.quote(str(path)) if path.is_file() else f"{shlex.quote(sys.executable)} -m highwater"


def commands_to_try(highwater: str, sidecar_url: str, port: int) -> list[str]:
    token = f'"Authorization: Bearer $({highwater} token --port {port})"'
    return [
        f"{highwater} top --url {sidecar_url}",
        f"curl '{sidecar_url}/memory?format=text'",
        f"curl -H {token} '{sidecar_url}/memory/encoder-cache?limit=3'",
        f"curl {sidecar_url}/metrics",
        f"{highwater} reclaim --url {sidecar_url}",
        f"curl -X POST -H {token} {sidecar_url}/memory/reclaim",
        f"curl -N -H 'Accept: text/event-stream' {sidecar_url}/memory/events",
    ]
