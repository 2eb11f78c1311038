"""Watching engines of older versions: the worker package on the path, a folder for the recorders, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.traffic import send_images
from tests.engine.conftest import sidecar_beside, wait_for
from tests.engines import watching, worker_pids
from tests.patience import LIMIT_SECONDS
from tests.unit.worker_ext.ring_bytes import parse, table

PHASES = ["before", "init", "weights", "profile", "kv_cache", "warm_up"]


async def test_an_engine_with_the_plugin_and_nothing_else_is_seen(
    version: str, engine_factory: Callable[..., DemoEngine], tmp_path: Path
) -> None:
    rings = tmp_path / "rings"
    with engine_factory(**watching(rings)) as engine:
        (path,) = rings.glob("*.ring")
        identity, head = parse(path)[0], table(path)[0]
        phases = {phase["name"]: phase for phase in head["start"]}
        assert list(phases) == PHASES, version
        assert [phase["error"] for phase in phases.values()] == [None] * len(PHASES)
        assert identity["started_at"] < phases["weights"]["at"]
        assert [identity["pid"]] == worker_pids(engine)
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=LIMIT_SECONDS) as client:
            assert (await client.post("/collective_rpc", json={})).status_code == 404
        with sidecar_beside(engine, tmp_path, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar:
            assert (await send_images(engine.url, engine.served_model, images=[1, 2, 3])).errors == ()
            report = wait_for(sidecar, lambda report: (report["ranks"][0]["encoder_cache"] or {}).get("entries") == 3)
            (rank,) = report["ranks"]
            assert (report["ranks_expected"], rank["source"], len(rank["start"])) == (1, "recorder", len(PHASES))
            assert min(rank["components"][name] for name in ("weights_bytes", "kv_cache_bytes")) > 0
            (entries,) = sidecar.call("GET", "/memory/encoder-cache")["ranks"]
            assert [entry["bytes"] > 0 for entry in entries["entries"]] == [True] * 3
