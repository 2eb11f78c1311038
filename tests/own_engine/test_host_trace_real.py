"""A leak in a real engine's API server, made by a plugin of somebody else's, is named by its file and line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from highwater.demo.engine import SHIM_FOLDER
from highwater.files.worker_package import copy_worker_package
from tests.patience import LIMIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from highwater.demo.engine import DemoEngine

pytestmark = pytest.mark.long("recorder")

# 20 pieces of 10 kB ten times a second, in the API server alone: 2 MB a second.
LEAK = """
import multiprocessing, threading, time

KEPT = []


def leak():
    while True:
        time.sleep(0.1)
        for _ in range(20):
            KEPT.append(bytearray(10_000))


def register():
    if multiprocessing.current_process().name == "MainProcess" and not KEPT:
        KEPT.append(b"")
        threading.Thread(target=leak, daemon=True).start()
"""
LINE = 1 + LEAK.splitlines().index("            KEPT.append(bytearray(10_000))")
ENTRY_POINT = "[vllm.general_plugins]\nleaking = leaking_plugin:register\n"
METADATA = "Metadata-Version: 2.1\nName: leaking-plugin\nVersion: 1\n"


class Traced(NamedTuple):
    engine: DemoEngine
    rings: Path

    def trace(self, process: str, *more: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "highwater", "host", "trace", process, "--folder", str(self.rings), "--json"]
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def leaking(engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder: Path = tmp_path_factory.mktemp("leaking")
    (folder / "leaking_plugin.py").write_text(LEAK)
    (folder / "leaking_plugin-1.dist-info").mkdir()
    (folder / "leaking_plugin-1.dist-info" / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "leaking_plugin-1.dist-info" / "METADATA").write_text(METADATA)
    path = (SHIM_FOLDER, copy_worker_package(folder / "package").folder, folder)
    environ = {"PYTHONPATH": ":".join(map(str, path)), "HIGHWATER_RECORDER_DIR": str(folder / "rings")}
    with engine_factory(extension=False, dev_mode=False, extra_env=tuple(environ.items())) as engine:
        yield Traced(engine, folder / "rings")


def test_a_leak_in_the_api_server_is_named(leaking):
    """By file, line and rate, within a fifth; the engine answers meanwhile and afterwards."""
    result = leaking.trace("api-server", "--minutes", "0.6")
    (first, *_) = result["lines"]
    assert first["file"].endswith("leaking_plugin.py")
    assert first["line"] == LINE
    rate = first["bytes"] / result["since_seconds"]
    assert 0.5 * 2_000_000 < rate < 1.2 * 2_000_000  # the thread may get less of a busy machine than it asks for
    assert result["after"]["anonymous_bytes"] > result["before"]["anonymous_bytes"]
    assert result["after"]["malloc"]["used_bytes"] > 0
    assert httpx.get(f"{leaking.engine.url}/health", timeout=LIMIT_SECONDS).status_code == 200


def test_other_processes_can_be_traced_and_are_not_blamed(leaking):
    """EngineCore and the worker leak nothing of that file, and work as before."""
    for process in ("engine-core", "worker"):
        result = leaking.trace(process, "--minutes", "0.1")
        assert not [line for line in result["lines"] if "leaking_plugin" in line["file"]]
    question = {"model": leaking.engine.served_model, "prompt": "Hello", "max_tokens": 4}
    assert httpx.post(f"{leaking.engine.url}/v1/completions", json=question, timeout=120).status_code == 200
