"""The sidecar's image without Docker: its Dockerfile's steps, run word for word in stages of our own.

Every instruction is carried out or kept: a RUN in a shell, a COPY by what .dockerignore leaves of the tree, the rest
for whoever starts it. An instruction that nobody here knows is an error.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

from tests.docker.stage import Stage

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass
class Image:
    """What the last stage is, and how it says that it is to be started."""

    stage: Stage
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    stop_signal: str = ""


def instructions(path: Path) -> list[tuple[str, str]]:
    """Every instruction of a Dockerfile with its text, continued lines joined, in order."""
    parser = DockerfileParser(fileobj=io.BytesIO(path.read_bytes()))
    return [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]


def build(path: Path, folder: Path, *, only_read: bool = False) -> Image:
    """Carry a Dockerfile's steps out.

    Args:
        path: The Dockerfile.
        folder: Gets a folder for each stage, and the log of all steps.
        only_read: The stages are there already; nothing is run.

    Raises:
        subprocess.CalledProcessError: A step failed; the log tells why.
    """
    builder = _Builder(folder, only_read=only_read)
    for name, value in instructions(path):
        getattr(builder, f"do_{name.lower()}")(value)
    return builder.image


class _Builder:
    image: Image
    folder = "/"

    def __init__(self, root: Path, *, only_read: bool) -> None:
        self._root = root
        self._only_read = only_read
        self._arguments: dict[str, str] = {}
        self._stages: dict[str, Stage] = {}

    def do_arg(self, value: str) -> None:
        name, equals, default = value.partition("=")
        if equals or name not in self._arguments:
            self._arguments[name] = default

    def do_from(self, value: str) -> None:
        words = self._said(value).split()
        name = words[-1] if "AS" in words else "final"
        self._stages[name] = stage = Stage(self._root / name)
        self.image, self.folder = Image(stage), "/"
        if not self._only_read:
            stage.lay_base()

    def do_env(self, value: str) -> None:
        for name, text in re.findall(r"(\w+)=(\S+)", value):
            self.image.environ[name] = self._said(text)

    def do_workdir(self, value: str) -> None:
        self.folder = value
        self.image.stage.path(value).mkdir(parents=True, exist_ok=True)

    def do_copy(self, value: str) -> None:
        if self._only_read:
            return
        *sources, target = value.split()
        place = self.image.stage.path(target if target.startswith("/") else f"{self.folder}/{target}")
        if sources[0].startswith("--from="):
            other = self._stages[sources.pop(0).removeprefix("--from=")]
            # With owners, as Docker keeps them between stages.
            subprocess.run(["cp", "-a", "-T", *(other.path(source) for source in sources), place], check=True)
            return
        for source in sources:
            there = place / Path(source).name if target.endswith("/") else place
            there.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, there, ignore=_ignored, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, there)

    def do_run(self, value: str) -> None:
        if self._only_read:
            return
        # Pip's own settings are the machine's. What it wants may be in its cache: the hash is checked all the same.
        environ = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        environ |= self.image.environ | {"PIP_CACHE_DIR": "/var/cache/pip", "PIP_NO_CACHE_DIR": "0", "HOME": "/tmp"}
        cache = Path(os.environ.get("PIP_CACHE_DIR") or Path.home() / ".cache/pip")
        cache.mkdir(parents=True, exist_ok=True)
        command = ["sh", "-ec", value]
        with (self._root / "build.log").open("a") as log:
            log.write(f"RUN {value}\n")
            log.flush()
            subprocess.run(
                self.image.stage.command(command, folder=self.folder, volumes={"/var/cache/pip": cache}),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )

    def do_label(self, value: str) -> None:
        self.image.labels |= {name: self._said(text) for name, text in re.findall(r'([\w.]+)="([^"]*)"', value)}

    def do_user(self, value: str) -> None:
        self.image.user = value

    def do_volume(self, value: str) -> None:
        self.image.volumes += value.split()

    def do_expose(self, value: str) -> None:
        self.image.ports += [int(port) for port in value.split()]

    def do_stopsignal(self, value: str) -> None:
        self.image.stop_signal = value

    def do_entrypoint(self, value: str) -> None:
        self.image.entrypoint = json.loads(value)

    def do_cmd(self, value: str) -> None:
        self.image.command = json.loads(value)

    def do_healthcheck(self, value: str) -> None:
        self.image.healthcheck = json.loads(value.partition(" CMD ")[2])

    def _said(self, value: str) -> str:
        known = self._arguments | getattr(self, "image", Image(Stage(self._root))).environ
        return _VARIABLE.sub(lambda found: known.get(found[1] or found[2], found[0]), value)


def _ignored(folder: str, names: list[str]) -> set[str]:
    """What .dockerignore leaves out beneath the folders that it lets in."""
    del folder
    patterns = [line.removeprefix("**/") for line in ignore_lines() if line.startswith("**/")]
    return {name for name in names if any(Path(name).match(pattern) for pattern in patterns)}


def ignore_lines() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
