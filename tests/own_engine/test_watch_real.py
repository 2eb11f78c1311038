"""Watching a real engine that has the worker package beside it and nothing else: no development mode, no flag."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from highwater.demo.engine import SHIM_FOLDER
from highwater.demo.traffic import send_images
from highwater.files.worker_package import copy_worker_package
from tests.engine.conftest import sidecar_beside, wait_for
from tests.engines import watching
from tests.unit.worker_ext.ring_bytes import parse, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from highwater.demo.engine import DemoEngine
    from highwater.demo.sidecar import DemoSidecar

PHASES = ["before", "init", "weights", "profile", "kv_cache", "warm_up"]


class Watched(NamedTuple):
    """An engine whose workers record themselves, and a sidecar that reads their folder."""

    engine: DemoEngine
    sidecar: DemoSidecar
    rings: Path


@pytest.fixture(scope="module")
def watched(engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder: Path = tmp_path_factory.mktemp("watched")
    rings = folder / "rings"
    with (
        engine_factory(**watching(rings)) as engine,
        sidecar_beside(engine, folder, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar,
    ):
        yield Watched(engine, sidecar, rings)


def test_every_rank_is_seen_and_no_worker_is_called(watched):
    engine, sidecar, _ = watched
    report = wait_for(sidecar, lambda report: report["ranks_reported"] == 1)
    (rank,) = report["ranks"]
    assert (report["ranks_expected"], report["stale"], rank["source"]) == (1, False, "recorder")
    assert rank["components"]["weights_bytes"] > 0
    assert rank["components"]["kv_cache_bytes"] > 0
    assert [phase["name"] for phase in rank["start"]] == PHASES
    assert all(phase["error"] is None and phase["used_bytes"] > 0 for phase in rank["start"])
    assert report["engine"]["capabilities"]["dev_mode"] is False
    assert "collective_rpc" not in engine.log_path.read_text()
    assert "Highwater's recorder writes to" in engine.log_path.read_text()


def test_the_file_is_there_before_the_model_is_loaded(watched):
    """So that a start that fails has one too; the process had less then."""
    (path,) = watched.rings.glob("*.ring")
    identity, _ = parse(path)
    head, _ = table(path)
    phases = {phase["name"]: phase for phase in head["start"]}
    assert identity["started_at"] < phases["weights"]["at"]
    assert identity["rpc"] is True
    assert 0 < phases["before"]["used_bytes"] < phases["weights"]["used_bytes"]


def test_the_encoder_cache_comes_from_the_file(watched):
    """Entries too, which other sidecars would ask the workers for. The requests go to the engine itself."""
    engine, sidecar, _ = watched
    asyncio.run(send_images(engine.url, engine.served_model, images=range(80_000, 80_003)))
    report = wait_for(sidecar, lambda report: (report["ranks"][0]["encoder_cache"] or {}).get("entries") == 3)
    assert report["ranks"][0]["components"]["encoder_cache_bytes"] > 0
    (rank,) = sidecar.call("GET", "/memory/encoder-cache")["ranks"]
    assert (rank["entries_total"], len(rank["entries"])) == (3, 3)
    assert all(entry["bytes"] > 0 for entry in rank["entries"])


def test_nothing_is_asked_for_where_all_is_set_up_for_watching(watched):
    sidecar = watched.sidecar
    assert sidecar.call("GET", "/memory")["engine"]["hint"] is None
    refused = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"], "dry_run": True})
    assert "VLLM_SERVER_DEV_MODE=1" in refused["results"][0]["reason"]


IS_WRAPPED = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.worker.worker_base import WorkerBase
print(hasattr(WorkerBase.__init__, "_highwater_plugin"))
"""


@pytest.mark.parametrize(
    ("plugins", "is_wrapped"),
    [(None, True), ("highwater", True), ("other,highwater", True), ("other", False), ("", False)],
)
def test_vllm_itself_finds_the_plugin_in_a_copied_folder(engine_environment, tmp_path, plugins, is_wrapped):
    """By its own loader, with nothing installed; unless VLLM_PLUGINS names others only."""
    folder = copy_worker_package(tmp_path / "copy").folder
    environ = os.environ | {"PYTHONPATH": f"{SHIM_FOLDER}{os.pathsep}{folder}", "VLLM_NO_USAGE_STATS": "1"}
    environ |= {} if plugins is None else {"VLLM_PLUGINS": plugins}
    command = [engine_environment.python, "-c", IS_WRAPPED]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(is_wrapped)
