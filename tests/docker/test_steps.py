"""The sidecar's image without Docker: its own steps, and the start as the user that it names, read-only.

What is not proven here is the base: its Python is that of the tests, and of its size only an estimate is known.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from highwater.terminal.demo.process import free_port
from tests.docker.image import Image
from tests.patience import LIMIT_SECONDS

pytestmark = [pytest.mark.compiled, pytest.mark.timeout(1800)]

MIB = 1024 * 1024
# Unpacked, as `docker images` shows python:3.12-slim-bookworm. An estimate: no registry of images is asked here.
BASE_MIB = 125
MOST_MIB = 200
START_SECONDS = 300.0


@dataclass
class Container:
    """A process in the image, as an orchestrator would run it: read-only, without privileges, with one volume."""

    image: Image
    process: subprocess.Popen[bytes]
    port: int
    volume: Path
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.image.stage.command(command, user=self.image.user, volumes={self.image.volumes[0]: self.volume}),
            env=self.image.environ | {"HIGHWATER_PORT": str(self.port)} | environ,
            capture_output=True,
            text=True,
            check=False,
        )

    def status(self) -> dict[str, str]:
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.fixture(scope="module")
def container(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    folder = tmp_path_factory.mktemp("container")
    volume, log, port = folder / "volume", folder / "log", free_port()
    volume.mkdir(mode=0o700)
    uid, _, gid = image.user.partition(":")
    os.chown(volume, int(uid), int(gid))
    (inside,) = image.volumes
    environ = image.environ | {
        "HIGHWATER_HOST": "127.0.0.1",
        "HIGHWATER_PORT": str(port),
        "HIGHWATER_ENGINE_URL": "http://127.0.0.1:1",
        "HIGHWATER_STATE_FILE": f"{inside}/state.json",
        "HIGHWATER_INCIDENTS__FOLDER": inside,
    }
    command = image.stage.command([*image.entrypoint, *image.command], user=image.user, volumes={inside: volume})
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    started = Container(image, process, port, volume, log)
    try:
        _wait_until_alive(started)
        yield started
    finally:
        process.kill()
        process.wait()


def _wait_until_alive(container: Container) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and container.process.poll() is None:
        try:
            if httpx.get(f"{container.url}/livez", trust_env=False, timeout=LIMIT_SECONDS).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    pytest.fail(f"it did not start:\n{container.log.read_text(encoding='utf-8')}")


def test_it_lives_without_an_engine(container: Container) -> None:
    answers = [
        httpx.get(f"{container.url}/{path}", trust_env=False, timeout=LIMIT_SECONDS).status_code
        for path in ("livez", "readyz")
    ]
    assert answers == [200, 503]


def test_the_data_plane_is_the_compiled_one(container: Container) -> None:
    assert "data plane: compiled" in container.log.read_text(encoding="utf-8")
    maps = Path(f"/proc/{container.process.pid}/maps").read_text(encoding="utf-8")
    assert "__mypyc.cpython" in maps


def test_it_runs_as_nobody_and_can_do_nothing(container: Container) -> None:
    status = container.status()
    assert status["Uid"].split() == status["Gid"].split() == ["65532"] * 4
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {0}
    assert status["NoNewPrivs"] == "1"


@pytest.mark.parametrize("folder", ["/", "/opt/venv", "/usr/local/lib", "/tmp", "/var/lib", "/etc"])
def test_nothing_can_be_written_but_the_volume(container: Container, folder: str) -> None:
    assert container.run("touch", f"{folder}/written").returncode != 0
    assert container.run("touch", f"{container.image.volumes[0]}/written").returncode == 0
    (container.volume / "written").unlink()


def test_what_it_keeps_is_in_its_volume(container: Container) -> None:
    token = container.run("highwater", "token").stdout.strip()
    headers = {"Authorization": f"Bearer {token}"}
    change = httpx.put(
        f"{container.url}/policy", json={"mode": "observe"}, headers=headers, trust_env=False, timeout=LIMIT_SECONDS
    )
    assert (change.status_code, change.json()["kept"]) == (200, True)
    assert {path.suffix for path in container.volume.iterdir()} == {".json", ".token"}
    log = container.log.read_text(encoding="utf-8")
    assert "ead-only file system" not in log
    assert "Traceback" not in log


def test_the_health_check_is_the_sidecars_own(container: Container) -> None:
    """0 while it lives, engine or not; 1 where nobody answers, or what is asked for is not so."""
    check = container.image.healthcheck
    assert container.run(*check).returncode == 0
    gone = container.run(*check, HIGHWATER_PORT=str(free_port()))
    assert (gone.returncode, "no sidecar answers" in gone.stderr) == (1, True)
    assert container.run(*check, "ready").returncode == 1


def test_it_brings_the_worker_extension(container: Container) -> None:
    told = container.run("python3", "-c", "import highwater_worker; print(highwater_worker.__file__)")
    assert (told.returncode, told.stdout[:10], told.stdout.strip()[-28:]) == (
        0,
        "/opt/venv/",
        "highwater_worker/__init__.py",
    )


def test_it_is_small(image: Image) -> None:
    venv = sum(path.lstat().st_size for path in image.stage.path("/opt/venv").rglob("*") if path.is_file()) / MIB
    byte_code = sum(path.stat().st_size for path in image.stage.path("/usr/local/lib").rglob("*.pyc")) / MIB
    assert byte_code > 1
    assert venv + byte_code + BASE_MIB < MOST_MIB, f"/opt/venv {venv:.1f}, byte code {byte_code:.1f} MiB"


def test_no_tool_of_the_build_is_in_it(image: Image) -> None:
    venv = image.stage.path("/opt/venv")
    assert not [path for path in venv.rglob("*") if path.name in {"pip", "setuptools", "mypy", "hatchling"}]
    assert not list(venv.rglob("highwater/**/*.c"))
    assert not image.stage.path("/src/app").exists()


def test_it_ends_in_order(container: Container) -> None:
    """By the signal that the image names, which uvicorn passes on to itself in the end; the last test of this one."""
    assert container.image.stop_signal == "SIGTERM"
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(START_SECONDS) in {0, -signal.SIGTERM}
    assert "Application shutdown complete" in container.log.read_text(encoding="utf-8")
