"""The recorder in a live engine: what it samples, how fresh an idle worker is, and where a hang is."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.traffic import send_images
from tests.engines import send_texts
from tests.patience import until
from tests.unit.worker_ext.ring_bytes import heartbeat, records, table

from .conftest import Victim, sidecar_beside, wait_for

HANG_SECONDS = 25
IDLE_SECONDS = 12.0


@pytest.fixture
def engine(ruined: Victim) -> DemoEngine:
    """One worker whose next step can be made to hang."""
    return ruined.engine


@pytest.fixture
def sidecar(engine: DemoEngine, tmp_path: Path) -> Iterator[DemoSidecar]:
    """It asks the worker seldom, so that what is fresh is the recorder's."""
    settings = {
        "HIGHWATER_POLICY__MODE": "observe",
        "HIGHWATER_ENGINE_HAS_EXTENSION": "true",
        "HIGHWATER_RECORDER_DIR": str(engine.folder / "recorders"),
        "HIGHWATER_IDLE_POLL_SECONDS": "60",
    }
    with sidecar_beside(engine, tmp_path, **settings) as sidecar:
        wait_for(sidecar, lambda report: any(rank["source"] == "recorder" for rank in report["ranks"]))
        yield sidecar


def ring(engine: DemoEngine) -> Path:
    (path,) = (engine.folder / "recorders").glob("*.ring")
    return path


def call(engine: DemoEngine, method: str, *arguments: object) -> None:
    body = {"method": method, "args": list(arguments)}
    httpx.post(f"{engine.url}/collective_rpc", json=body, timeout=60, trust_env=False).raise_for_status()


class IsSettled:
    """Return whether no record has come since the last look, and the last record shows an idle worker."""

    def __init__(self, engine: DemoEngine) -> None:
        self._engine = engine
        self._seen = 0.0

    def __call__(self) -> bool:
        last = records(ring(self._engine))[-1]
        seen, self._seen = self._seen, last["mono"]
        moving = last["moving"]
        return seen == self._seen and moving["steps_begun"] == moving["steps_ended"]


async def test_the_end_of_a_burst_is_recorded_and_an_idle_worker_is_fresh(
    engine: DemoEngine, sidecar: DemoSidecar
) -> None:
    await asyncio.to_thread(httpx.post, f"{engine.url}/reset_encoder_cache", timeout=60)
    began = time.monotonic()
    texts = [f"text {n}" for n in range(8)]
    assert (await send_texts(engine.url, engine.served_model, texts=texts, max_tokens=120)).failed == 0
    assert (await send_images(engine.url, engine.served_model, images=range(90_000, 90_003))).failed == 0
    ended = time.monotonic()
    await until(IsSettled(engine), pause_seconds=1.0)
    under_load = [record for record in records(ring(engine)) if began < record["mono"] < ended]
    gaps = [after["mono"] - before["mono"] for before, after in pairwise(under_load)]
    assert statistics.median(gaps) < 0.5  # an idle worker writes no sample, and one heartbeat a second
    last, told = records(ring(engine))[-1], table(ring(engine))
    assert told is not None
    assert (last["memory"]["encoder_cache"]["entries"], told[0]["total"], len(told[1])) == (3, 3, 3)
    assert last["moving"]["steps_begun"] == last["moving"]["steps_ended"]
    ages: list[float] = []
    over = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < over:
        report = await asyncio.to_thread(sidecar.call, "GET", "/memory")
        ages.append(report["age_seconds"])
        assert (report["stale"], report["progress"]["verdict"]) == (False, "idle")
        await asyncio.sleep(0.5)
    assert statistics.median(ages) < 3.0
    assert records(ring(engine))[-1]["mono"] == last["mono"], "nothing was sampled: nothing has happened"


async def test_a_step_that_holds_pythons_lock_is_told_by_its_silence(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    await asyncio.to_thread(call, engine, "hang_in_next_step", HANG_SECONDS)
    sending = asyncio.create_task(send_texts(engine.url, engine.served_model, texts=["a text"], max_tokens=4))

    def is_silent(report: dict[str, Any]) -> bool:
        return "has written nothing" in " ".join((report["progress"] or {"ranks": []})["ranks"])

    await asyncio.to_thread(wait_for, sidecar, is_silent, HANG_SECONDS)
    assert not sending.done()
    assert (await sending).failed == 0
    await asyncio.to_thread(wait_for, sidecar, lambda report: report["progress"]["verdict"] == "idle")
    last = heartbeat(ring(engine))
    assert last is not None
    assert last["moving"]["step_seconds"] is None
