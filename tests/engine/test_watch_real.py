"""Watching a real engine that has the worker package beside it and nothing else: no development mode, no flag."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from highwater.demo.traffic import send_images

from .conftest import sidecar_beside, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from highwater.demo.engine import Engine
    from highwater.demo.sidecar import DemoSidecar

PHASES = ["init", "weights", "profile", "kv_cache", "warm_up"]


@pytest.fixture(scope="module")
def watched(
    engine_factory: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, DemoSidecar]]:
    """An engine whose workers record themselves, and a sidecar that reads their folder."""
    folder: Path = tmp_path_factory.mktemp("watched")
    environ = (("HIGHWATER_RECORDER_DIR", str(folder / "rings")),)
    engine = engine_factory(dev_mode=False, extension=False, plugin=True, extra_env=environ)
    with sidecar_beside(engine, folder, HIGHWATER_RECORDER_DIR=str(folder / "rings")) as sidecar:
        yield engine, sidecar
    engine.stop()


def test_every_rank_is_seen_and_no_worker_is_called(watched):
    """Its memory, its components, and each phase of its start."""
    engine, sidecar = watched
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


def test_the_encoder_cache_comes_from_the_file(watched):
    """Entries too, which other sidecars would ask the workers for."""
    engine, sidecar = watched
    asyncio.run(send_images(sidecar.url, engine.served_model, images=range(80_000, 80_003)))
    report = wait_for(sidecar, lambda report: (report["ranks"][0]["encoder_cache"] or {}).get("entries") == 3)
    assert report["ranks"][0]["components"]["encoder_cache_bytes"] > 0
    (rank,) = sidecar.call("GET", "/memory/encoder-cache")["ranks"]
    assert (rank["entries_total"], len(rank["entries"])) == (3, 3)
    assert all(entry["bytes"] > 0 for entry in rank["entries"])


def test_nothing_is_asked_for_where_all_is_set_up_for_watching(watched):
    """What cannot be given back is refused with the way to it."""
    _, sidecar = watched
    assert sidecar.call("GET", "/memory")["engine"]["hint"] is None
    refused = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"], "dry_run": True})
    assert "VLLM_SERVER_DEV_MODE=1" in refused["results"][0]["reason"]
