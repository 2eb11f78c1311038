"""A real engine that is starved, and then dead behind an API server that lives on: what the sidecar says of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from highwater.process.worker_package import SHIM_FOLDER, copy_worker_package
from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.engine.conftest import sidecar_beside, wait_for
from tests.engines import send_texts, watching

CONNECTOR = {
    "kv_connector": "HoldingConnector",
    "kv_role": "kv_producer",
    "kv_connector_module_path": "holding_connector",
}
HOLDER = "the KV connector HoldingConnector (kv_producer) may hold those of requests that have ended"


class Starved(NamedTuple):
    engine: DemoEngine
    sidecar: DemoSidecar
    let_go: Path

    def answer(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.sidecar.url}{path}", timeout=60, trust_env=False)

    def reset(self) -> dict[str, Any]:
        url, body = f"{self.sidecar.url}/memory/reclaim", {"remedies": ["reset_prefix_cache"]}
        answer = httpx.post(url, json=body, headers=self.sidecar.authorization(), timeout=60, trust_env=False)
        (result,) = answer.json()["results"]
        return result

    def states(self, seconds: float) -> set[str]:
        """What it says in that time, looked at five times a second."""
        seen, deadline = set(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen.add(self.sidecar.call("GET", "/memory")["engine"]["state"])
            time.sleep(0.2)
        return seen


@pytest.fixture(scope="module")
def starved(engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starved]:
    folder: Path = tmp_path_factory.mktemp("starved")
    let_go, rings = folder / "let-go", folder / "rings"
    on_path = Path(__file__).parents[1] / "engine" / "on_engine_path"
    path = (SHIM_FOLDER, copy_worker_package(folder / "plugin").folder, on_path)
    environ = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HIGHWATER_TEST_LET_GO": str(let_go),
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",
    }
    arguments = ("--kv-transfer-config", json.dumps(CONNECTOR), "--kv-cache-memory-bytes", str(8 * 1024**2))
    options = watching(rings, **environ) | {"dev_mode": True, "extra_args": arguments}
    with (
        engine_factory(**options) as engine,
        sidecar_beside(engine, folder, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar,
    ):
        yield Starved(engine, sidecar, let_go)


async def fill(engine: DemoEngine, url: str) -> None:
    """Send requests until one gets no answer, as all blocks are held by those before it."""
    for number in range(100):
        await send_texts(url, engine.served_model, texts=[f"{number} " + "x " * 300], max_tokens=4)


def test_an_engine_whose_blocks_are_held_is_stuck_while_a_request_waits(starved: Starved) -> None:
    """With vLLM's reason and the connector; out of service, an incident, and no probe restarts it."""
    assert starved.sidecar.call("GET", "/memory")["engine"]["capabilities"]["kv_connector"]

    async def starve() -> dict[str, Any]:
        filling = asyncio.create_task(fill(starved.engine, starved.sidecar.url))
        report = await asyncio.to_thread(wait_for, starved.sidecar, lambda now: now["engine"]["state"] == "stuck")
        filling.cancel()
        return report

    report = asyncio.run(starve())
    hint = report["engine"]["hint"]
    assert "no request is scheduled: 0 running and 1 waiting request (vLLM's reasons: capacity 1) for 1" in hint
    assert HOLDER in hint
    assert report["progress"]["is_starved"] is True


def test_a_reset_at_rest_is_refused_and_holds_nobody(starved: Starved) -> None:
    wait_for(starved.sidecar, lambda report: report["engine"]["state"] == "ready")
    incidents = starved.sidecar.call("GET", "/memory/incidents")["incidents"]
    assert [incident["kind"] for incident in incidents] == ["hung"]
    result = starved.reset()
    assert (result["outcome"], result["held_seconds"], result["quiesced_by"]) == ("refused", None, None)
    assert "though no request runs" in result["reason"]
    assert HOLDER in result["reason"]


def test_it_goes_on_by_itself_once_the_blocks_come_free(starved: Starved) -> None:
    waiting = asyncio.run(starve_and_let_go(starved))
    assert waiting == (503, 200)
    wait_for(starved.sidecar, lambda report: report["engine"]["kv_cache_usage_ratio"] == 0)
    assert starved.reset()["outcome"] == "done"


async def starve_and_let_go(starved: Starved) -> tuple[int, int]:
    """The answers of /readyz and /health/deep while it starved."""
    text = ["y " * 300]
    sending = asyncio.create_task(
        send_texts(starved.sidecar.url, starved.engine.served_model, texts=text, max_tokens=4)
    )
    await asyncio.to_thread(wait_for, starved.sidecar, lambda report: report["engine"]["state"] == "stuck", 120.0)
    ready, deep = [(await asyncio.to_thread(starved.answer, path)).status_code for path in ("/readyz", "/health/deep")]
    starved.let_go.touch()
    assert (await sending).failed == 0
    await asyncio.to_thread(wait_for, starved.sidecar, lambda report: report["engine"]["state"] == "ready", 60.0)
    return ready, deep


def test_a_dead_engine_behind_its_api_server_is_gone_for_as_long_as_it_is_dead(starved: Starved) -> None:
    """Its /health says 503, and all else as before; then the API server is killed, and nothing is loading either."""
    titles = {" ".join(psutil.Process(pid).cmdline()).strip(): pid for pid in starved.engine.pids()}
    core = next(pid for title, pid in titles.items() if title.startswith("VLLM::EngineCore"))
    os.kill(core, signal.SIGKILL)
    wait_for(starved.sidecar, lambda report: report["engine"]["state"] == "gone", 30.0)
    assert starved.states(5.0) == {"gone"}
    health = httpx.get(f"{starved.engine.url}/health", timeout=60, trust_env=False).status_code
    assert (health, starved.answer("/health/deep").status_code) == (503, 503)
    for pid in starved.engine.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert starved.states(75.0) == {"gone"}
    report = starved.sidecar.call("GET", "/memory")
    assert report["engine"]["hint"].startswith("dead for 1 min")
    assert "and no restart of it is seen" in report["engine"]["hint"]
    assert starved.answer("/health/deep").json()["healthy"] is False


def test_a_sidecar_that_begins_beside_the_dead_engine_says_since_when(starved: Starved, tmp_path: Path) -> None:
    rings = next(iter(starved.let_go.parent.glob("rings/*.ring"))).parent
    before = starved.sidecar.call("GET", "/memory")["engine"]
    with DemoSidecar(starved.engine.url, folder=tmp_path, settings={"HIGHWATER_RECORDER_DIR": str(rings)}) as late:
        engine = wait_for(late, lambda report: report["engine"]["state"] != "starting", 30.0)["engine"]
        health = httpx.get(f"{late.url}/health/deep", timeout=60, trust_env=False).json()
        incidents = late.call("GET", "/memory/incidents")["incidents"]
        command = [sys.executable, "-m", "highwater", "status", "--url", late.url]
        status = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (status.returncode, "dead for " in status.stdout, "missing" in status.stdout) == (2, True, False)
    assert (engine["state"], health["healthy"], incidents) == ("gone", False, [])
    assert abs(engine["since"] - before["since"]) < 15.0
    assert engine["hint"].startswith("dead for ")
