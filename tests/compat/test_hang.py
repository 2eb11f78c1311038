"""A hang that vLLM's own health check does not see, provoked on purpose: told by the sidecar, kept as an incident."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.traffic import send_images
from tests.engine.conftest import sidecar_beside, wait_for

from .clients import POOL, Clients
from .conftest import HANGING_VERSIONS
from .test_naive_calls import CALL_SECONDS, OK, health

TOLD_SECONDS = 20.0


async def test_an_engine_that_hangs_of_a_forced_reset_is_unresponsive(
    version: str, engine_factory: Callable[..., DemoEngine], tmp_path: Path
) -> None:
    if version not in HANGING_VERSIONS:
        pytest.skip(f"vLLM {version} does not hang of it")
    settings = {"HIGHWATER_POLICY__MODE": "observe", "HIGHWATER_RECORDER_DIR": str(tmp_path / "recorders")}
    with engine_factory() as engine:
        settings["HIGHWATER_ENGINE_LOG"] = str(engine.log_path)
        with sidecar_beside(engine, tmp_path, **settings) as sidecar:
            assert (await send_images(engine.url, engine.served_model, images=POOL)).errors == ()
            clients = await Clients(engine).start()
            await asyncio.to_thread(reset_until_one_fails, sidecar)
            await asyncio.to_thread(wait_for, sidecar, is_unresponsive, TOLD_SECONDS)
            assert await health(engine) == OK
            incident = await asyncio.to_thread(newest_incident, sidecar)
            assert (incident["kind"], incident["ended_at"]) == ("hung", None)
            assert [(rank["status"], len(rank["series"]) > 10) for rank in incident["ranks"]] == [("alive", True)]
            if version == "0.12.0":  # the other hangs without a word
                assert "mm_cache_drift" in [message["name"] for message in incident["messages"]]
            clients.send_no_more()
            await asyncio.to_thread(engine.stop)  # it lets those go that wait for it
            await clients.result()


def reset_until_one_fails(sidecar: DemoSidecar) -> None:
    deadline = time.monotonic() + CALL_SECONDS
    while time.monotonic() < deadline:
        try:
            sidecar.call("POST", "/reset_mm_cache?force=true")
        except DemoError:
            return


def is_unresponsive(report: dict[str, Any]) -> bool:
    return bool(report["engine"]["state"] in {"stuck", "not_answering"})


def newest_incident(sidecar: DemoSidecar) -> dict[str, Any]:
    deadline = time.monotonic() + TOLD_SECONDS
    while not (listed := sidecar.call("GET", "/memory/incidents")["incidents"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    incident: dict[str, Any] = sidecar.call("GET", f"/memory/incidents/{listed[0]['id']}")
    return incident
