"""docs/install/bare-metal.md, followed literally: two environments, the sidecar before an engine and beside one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from highwater.terminal.demo.process import free_port
from tests.install.page import ROOT, blocks

PAGE = "install/bare-metal.md"
SITE_PACKAGES = Path(httpx.__file__).parents[1]
# Of each wait: what is waited for takes seconds of a core, and on a machine that is busy many times that.
PATIENCE_SECONDS = 600.0
WORKER_ALONE = ["vllm-highwater-worker"]


class Home:
    """A reader's home folder, with vLLM's environment in it: a Python that has nothing.

    Attributes:
        saw: What vLLM's Python found on its path at the last start.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.in_memory = folder / "shm"
        self.ports = {"18000": str(free_port()), "8000": str(free_port()), "8001": str(free_port())}
        programs = folder / "bin"
        programs.mkdir(parents=True)
        vllm_python = folder / "vllm-venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "vllm-venv"], check=True)
        # The tests' engine runs in our environment, and looks at the path as vLLM's Python sees it.
        (programs / "vllm").write_text(
            f"#!/bin/sh\nexport FAKE_VLLM_PYTHON={vllm_python}\n"
            f'cd {ROOT} && exec {sys.executable} -m tests.install.fake_vllm "$@"\n'
        )
        (programs / "vllm").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HIGHWATER_", "PYTHON"))}
        self.environ = kept | {
            "HOME": str(folder),
            "PATH": f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FAKE_VLLM_SAW": str(folder / "saw.json"),
            # Nothing is fetched: the wheels are built, and what they ask for is there.
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_COMPILE": "1",
            # Where the page has vLLM's own default, and the sidecar's.
            "HIGHWATER_ENGINE_URL": f"http://127.0.0.1:{self.ports['8000']}",
        }

    @property
    def saw(self) -> dict[str, object]:
        return json.loads((self.folder / "saw.json").read_text())

    def here(self, text: str) -> str:
        """The page's text with this machine's ports and folder in memory."""
        for printed, own in self.ports.items():
            text = text.replace(f":{printed}", f":{own}").replace(f"port {printed}", f"port {own}")
        return text.replace("/dev/shm/highwater", str(self.in_memory))

    def run(self, text: str) -> str:
        """Run lines; the first that fails fails the test."""
        done = subprocess.run(
            ["bash", "-euc", self.here(text)],
            cwd=ROOT,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        return done.stdout

    @contextmanager
    def running(self, text: str, printed_port: str, path: str) -> Iterator[str]:
        """What a line starts, from when it answers until the block ends; its URL."""
        url = f"http://127.0.0.1:{self.ports[printed_port]}"
        log = self.folder / f"{printed_port}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-euc", f"exec env {self.here(text)}"],
                env=self.environ,
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait(f"{url}{path}", process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            finally:
                process.kill()


def ask(url: str) -> httpx.Response:
    """GET it, whatever proxy the environment names."""
    return httpx.get(url, timeout=60.0, trust_env=False)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            if ask(url).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"{url} does not answer: {log.read_text()}")


def line(section: str, having: str, *, without: str = "\0") -> str:
    (found,) = [block.text for block in blocks(PAGE, section) if having in block.text and without not in block.text]
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home in which the page's section "Install" was followed."""
    made = Home(tmp_path_factory.mktemp("home"))
    create, *others = line("Install", "python3 -m venv").splitlines(keepends=True)
    made.run(create)
    (packages,) = (made.folder / "highwater" / "venv").glob("lib/python3*/site-packages")
    # In place of what pip would fetch. Ours is not there: this environment has it by another file.
    (packages / "fetched.pth").write_text(f"{SITE_PACKAGES}\n")
    made.run("".join(others))
    return made


def test_each_python_has_what_is_its_own(home: Home) -> None:
    """The sidecar's the wheels, vLLM's the copied package and no other."""
    packages = home.folder / "highwater" / "venv"
    installed = {path.name.partition("-")[0] for path in packages.glob("lib/python3*/site-packages/*.dist-info")}
    assert {"vllm_highwater", "vllm_highwater_worker"} <= installed
    seen = (home.folder / "highwater" / "worker").glob("[!.]*")
    assert {path.name.partition("-")[0] for path in seen} == {"highwater_worker", "vllm_highwater_worker"}


def test_the_sidecar_takes_the_port_and_acts(home: Home) -> None:
    with home.running(line("Start", "VLLM_SERVER_DEV_MODE=1"), "18000", "/health"):
        assert home.saw == {
            "plugins": ["highwater"],
            "loaded": [True],
            "distributions": WORKER_ALONE,
            "host": "127.0.0.1",
        }
        with home.running(line("Start", "--engine-url"), "8000", "/readyz"):
            check, memory = line("Verify", "check").splitlines()
            # Ends with 1 where there is something to look at: the tests' engine is no whole vLLM.
            found = json.loads(home.run(f"{check.replace('check', 'check --json')} || test $? -eq 1"))
            assert not [finding for finding in found["findings"] if finding["level"] == "fail"]
            assert "used ratio" in home.run(memory)
    assert (home.folder / "highwater" / "state").is_dir()


def test_an_engine_is_watched_without_the_sidecar_in_its_way(home: Home) -> None:
    start = line("Start", "vllm serve", without="VLLM_SERVER_DEV_MODE")
    with home.running(start, "8000", "/health") as engine:
        with home.running(line("Start", "--port 8001"), "8001", "/livez") as sidecar:
            end = time.monotonic() + PATIENCE_SECONDS
            while not ask(f"{sidecar}/memory").json()["ranks"] and time.monotonic() < end:
                time.sleep(0.2)
            assert ask(f"{sidecar}/memory").json()["ranks"]
        assert ask(f"{engine}/health").is_success


def test_an_upgrade_replaces_and_a_removal_leaves_nothing(home: Home) -> None:
    (again,) = [text for text in line("Upgrade", "pip install").splitlines() if "extension" in text]
    assert "vllm-highwater-worker" in home.run(again)
    home.run(line("Remove", "rm -r"))
    assert not (home.folder / "highwater").exists()
    assert not home.in_memory.exists()
