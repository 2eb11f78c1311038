"""The sidecar as a child process, the calls that the demonstration makes to it, and commands to try, as pasted."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from highwater.process.admin_token import find_token
from highwater.process.errors import SidecarError
from highwater.terminal.client import SidecarClient
from highwater.terminal.demo.process import DemoError, KeptServer, environ_with, free_port

START_SECONDS = 600.0
CALL_SECONDS = 60.0
USUAL_PORT = 8001
"""The sidecar's own default, which the pages write."""


class DemoSidecar(KeptServer):
    def __init__(
        self, engine_url: str, *, folder: Path, port: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__("the sidecar", folder / "sidecar.log", port)
        self.settings = dict(settings or {})
        self._engine_url = engine_url
        self.control_port = int(self.settings.get("HIGHWATER_CONTROL_PORT", self.port))

    @property
    def control_url(self) -> str:
        """The base URL of its control plane: the same, unless it has a port of its own."""
        return f"http://127.0.0.1:{self.control_port}"

    def start(self) -> Self:
        """Return when it runs, with or without an engine. Raises DemoError where that is not in time."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "highwater", "serve", "--engine-url", self._engine_url]
        self._process.start([*command, "--port", str(self.port)], env=self._environ(), cwd=Path.cwd())
        self._process.wait_until_answers(self.control_port, "/livez", START_SECONDS)
        return self

    def _environ(self) -> dict[str, str]:
        # Settings of the caller's own sidecar must not leak into this one.
        return environ_with(self.settings, without_prefix="HIGHWATER_")

    @property
    def _token(self) -> str | None:
        return find_token(self.control_url, self._environ()).value

    def authorization(self) -> dict[str, str]:
        return {} if self._token is None else {"Authorization": f"Bearer {self._token}"}

    def call(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON of one call. Raises DemoError where it did not respond, or responded with an error."""
        try:
            with SidecarClient(self.control_url, token=self._token, timeout_seconds=CALL_SECONDS) as client:
                return client.call(method, path, body=body)
        except SidecarError as exc:
            raise DemoError.with_log(f"{method} {path}: {exc}", self.log_path) from exc

    def command(self, *words: str) -> str:
        own = [sys.executable, "-m", "highwater", *words, "--url", self.control_url]
        shown = subprocess.run(own, env=self._environ(), capture_output=True, text=True, check=False)
        return f"\n$ highwater {shlex.join(words)}\n{shown.stdout.rstrip() or shown.stderr.rstrip()}"


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
