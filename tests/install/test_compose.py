"""docs/install/compose.md: its file laid over a stranger's, by Docker Compose itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.install.guides import save
from tests.install.page import commands

PAGE = "install/compose.md"
COMPOSE = Path(sys.executable).parent / "docker-compose"
THEIRS = """
services:
  vllm:
    image: vllm/vllm-openai:v0.32.0
    command: [--model, Qwen/Qwen3-VL-8B-Instruct, --max-num-seqs, "64"]
    ports: ["8000:8000"]
    environment: [HF_TOKEN=secret, HF_HUB_OFFLINE=1]
    volumes: ["./cache:/root/.cache/huggingface"]
    ipc: host
    restart: always
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}
    healthcheck: {test: [CMD, curl, --fail, "http://localhost:8000/health"]}
  webui:
    image: ghcr.io/open-webui/open-webui:main
    environment: {OPENAI_API_BASE_URL: "http://vllm:8000/v1"}
    depends_on: [vllm]
    ports: ["3000:8080"]
"""


class Folder:
    """A stranger's folder, with the page's file beside theirs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        (path / "compose.yaml").write_text(THEIRS)
        save("compose", path)
        programs = path / "bin"
        programs.mkdir()
        (programs / "docker").write_text(f'#!/bin/sh\nshift\nexec {COMPOSE} "$@"\n')
        (programs / "docker").chmod(0o755)

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{self._path / 'bin'}{os.pathsep}/usr/bin:/bin", "HOME": str(self._path)}
        return subprocess.run(
            ["bash", "-euc", text], cwd=self._path, env=environ, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def services(folder: Folder) -> dict[str, Any]:
    """Both files, as Docker Compose understands them, with the variables of the page's first line."""
    (install,) = commands(PAGE, "Install")
    told = folder.run("\n".join(install.splitlines()[:2]) + "\ndocker compose config")
    assert told.returncode == 0, told.stderr
    return yaml.safe_load(told.stdout)["services"]


def test_clients_find_the_sidecar_where_the_engine_was(services: dict[str, Any]) -> None:
    pod, sidecar = services["pod"], services["highwater"]
    assert [(port["published"], port["target"], port.get("host_ip")) for port in pod["ports"]] == [
        ("8000", 8000, None),
        ("8002", 8002, "127.0.0.1"),
    ]
    assert pod["networks"]["default"]["aliases"] == ["vllm"]
    assert sidecar["environment"]["HIGHWATER_PORT"] == "8000"
    assert sidecar["network_mode"] == services["vllm"]["network_mode"] == "service:pod"


def test_the_engine_is_reached_through_the_sidecar_alone(services: dict[str, Any]) -> None:
    engine = services["vllm"]
    assert not engine.get("ports")
    assert not engine.get("networks")
    assert engine["command"][-4:] == ["--host", "127.0.0.1", "--port", "18000"]
    assert services["highwater"]["environment"]["HIGHWATER_ENGINE_URL"] == "http://127.0.0.1:18000"


def test_what_was_theirs_stays(services: dict[str, Any]) -> None:
    engine, before = services["vllm"], yaml.safe_load(THEIRS)["services"]["vllm"]
    assert engine["image"] == before["image"]
    assert engine["command"][:-4] == before["command"]
    assert engine["environment"]["HF_TOKEN"] == "secret"
    assert {mount["target"] for mount in engine["volumes"]} == {
        "/root/.cache/huggingface",
        "/opt/highwater",
        "/run/highwater",
    }
    assert engine["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert (engine["ipc"], engine["restart"]) == ("host", "always")
    assert engine["healthcheck"]["test"] == before["healthcheck"]["test"]
    assert set(services) == {"vllm", "webui", "pod", "highwater", "highwater-worker"}


def test_workers_and_sidecar_share_their_folder(services: dict[str, Any]) -> None:
    engine, sidecar = services["vllm"], services["highwater"]
    assert engine["environment"]["HIGHWATER_RECORDER_DIR"] == sidecar["environment"]["HIGHWATER_RECORDER_DIR"]
    assert "highwater-recorder" in {mount["source"] for mount in engine["volumes"]}
    assert "highwater-recorder" in {mount["source"] for mount in sidecar["volumes"]}
    assert engine["depends_on"]["highwater-worker"]["required"] is False
    assert "highwater" not in engine["depends_on"]


def test_the_sidecar_is_restricted(services: dict[str, Any]) -> None:
    sidecar = services["highwater"]
    assert sidecar["read_only"] is True
    assert sidecar["cap_drop"] == ["ALL"]
    assert sidecar["security_opt"] == ["no-new-privileges:true"]


def test_the_pages_commands_name_services_that_are_there(services: dict[str, Any]) -> None:
    text = "\n".join(commands(PAGE))
    named = re.findall(r"compose exec (\S+)|compose up --detach (?:--\S+ )+([a-z- ]+)$", text, re.MULTILINE)
    words = {word for pair in named for found in pair for word in found.split()}
    assert {"highwater", "highwater-worker", "vllm"} <= words
    assert words <= set(services)


def test_removing_it_leaves_their_file(folder: Folder) -> None:
    (remove,) = commands(PAGE, "Remove")
    told = folder.run(remove.splitlines()[0] + "\ndocker compose config")
    left = yaml.safe_load(told.stdout)["services"]
    assert set(left) == {"vllm", "webui"}
    assert [port["target"] for port in left["vllm"]["ports"]] == [8000]
