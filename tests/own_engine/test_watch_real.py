"""A real engine that has the worker package beside it and nothing else: watched, explained and scraped.

No development mode, no flag.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

import httpx
import pytest

from highwater.process.worker_package import SHIM_FOLDER, copy_worker_package
from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.traffic import send_images
from tests.engine.conftest import wait_for
from tests.engine.explained import assert_pool_is_the_engines, assert_sums_are_exact
from tests.engines import send_texts
from tests.own_engine.conftest import Watched
from tests.patience import LIMIT_SECONDS, wait_until
from tests.scrapers import LLM_D, PROMETHEUS_ACCEPTS, llm_d, production_stack
from tests.unit.worker_ext.ring_bytes import parse, table

PATIENCE_SECONDS = 300.0
ATTEMPTS = 20
PROMPT_SECONDS = 3.0
PHASES = ["before", "init", "weights", "profile", "kv_cache", "warm_up"]


@pytest.fixture(scope="module")
def watched(watched_alone: Watched) -> Watched:
    return watched_alone


def test_every_rank_is_seen_and_no_worker_is_called(watched):
    engine, sidecar, *_ = watched
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
    engine, sidecar, *_ = watched
    (rank,) = sidecar.call("GET", "/memory/encoder-cache")["ranks"]
    entries = rank["entries_total"] + 3
    asyncio.run(send_images(engine.url, engine.served_model, images=range(80_000, 80_003)))
    report = wait_for(sidecar, lambda report: (report["ranks"][0]["encoder_cache"] or {}).get("entries") == entries)
    assert report["ranks"][0]["components"]["encoder_cache_bytes"] > 0
    (rank,) = sidecar.call("GET", "/memory/encoder-cache")["ranks"]
    assert rank["entries_total"] == len(rank["entries"]) == entries
    assert all(entry["bytes"] > 0 for entry in rank["entries"])


def test_nothing_is_asked_for_where_all_is_set_up_for_watching(watched):
    sidecar = watched.sidecar
    assert sidecar.call("GET", "/memory")["engine"]["hint"] is None
    refused = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"], "dry_run": True})
    assert "VLLM_SERVER_DEV_MODE=1" in refused["results"][0]["reason"]


# --- its budget explained: every number is the engine's own log line or metric, and the sums are exact ---


@pytest.fixture(scope="module")
def explained(watched) -> tuple[DemoEngine, DemoSidecar, dict[str, Any]]:
    return watched.engine, watched.sidecar, watched.sidecar.call("GET", "/memory/budget")


def test_the_pool_is_the_engines_own(explained, engine_environment):
    engine, _, answer = explained
    assert_pool_is_the_engines(engine, answer, engine_environment.version)


def test_the_parts_sum_exactly(explained):
    assert_sums_are_exact(explained[2])


def test_what_is_not_known_is_null(explained):
    """A CPU engine with a given KV cache profiles nothing: no figure of that is 0."""
    (rank,) = explained[2]["explanation"]["ranks"]
    assert (rank["requested_bytes"], rank["fully_counted_bytes"], rank["left_bytes"]) == (None, None, None)
    assert (rank["observed"], rank["uncounted"]) == ([], [])
    assert rank["environment"]["TASK_QUEUE_ENABLE"] == "2"


def test_the_encoders_budget_is_the_schedulers(explained):
    _, sidecar, answer = explained
    report = sidecar.call("GET", "/memory")
    encoder = answer["explanation"]["encoder"]
    assert encoder["cache_size"] == report["ranks"][0]["encoder_cache"]["capacity_embeds"]
    assert 0 < encoder["item_tokens"] <= encoder["cache_size"]
    assert encoder["cache_bytes"] > 0


def test_no_worker_is_called_for_it(explained):
    engine, sidecar, _ = explained
    for _ in range(5):
        sidecar.call("GET", "/memory/budget")
    assert '"POST /collective_rpc' not in engine.log_path.read_text()


# --- what scraped vLLM scrapes the sidecar beside it: the last tests of this engine, as the last one ends it ---


def page_of(url: str) -> httpx.Response:
    headers = {"Accept": PROMETHEUS_ACCEPTS}
    response = httpx.get(f"{url}/metrics", headers=headers, trust_env=False, timeout=LIMIT_SECONDS)
    assert response.headers["content-type"].startswith("text/plain; version=")
    return response


def both_of(sidecar: DemoSidecar) -> str:
    """The sidecar's page with vLLM's families, which it leaves out where the engine is slow to tell them."""
    pages: list[str] = []

    def is_whole() -> bool:
        pages.append(page_of(sidecar.url).text)
        return "vllm:" in pages[-1]

    wait_until(is_whole)
    return pages[-1]


def declared(text: str) -> list[str]:
    """The families, `_created` as families of their own, as often as they are declared."""
    return [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]


def test_every_family_of_vllm_is_there_and_none_twice(watched: Watched) -> None:
    engine, sidecar, *_ = watched
    asyncio.run(send_texts(engine.url, engine.served_model, texts=["one", "two"]))
    direct, beside = page_of(engine.url).text, both_of(sidecar)
    assert [name for name in declared(beside) if not name.startswith("highwater_")] == declared(direct)
    assert len(set(declared(beside))) == len(declared(beside))
    assert "vllm:request_success_created" in declared(beside)
    assert set(LLM_D) <= set(declared(beside))
    if promtool := shutil.which("promtool"):
        told = subprocess.run([promtool, "check", "metrics"], input=beside.encode(), capture_output=True, check=False)
        assert b"error while linting" not in told.stderr


def test_routers_see_the_load_while_there_is_some(watched: Watched) -> None:
    """Requests that go past the sidecar too: it is vLLM that counts them."""
    engine, sidecar, *_ = watched
    texts = [f"Count from {number} on." for number in range(4)]
    seen: list[tuple[float, float]] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    # A slow machine may scrape past one load, and vLLM's families are left out where it is slow to tell them.
    while not any(running > 0 for running, _ in seen) and time.monotonic() < deadline:
        load = threading.Thread(
            target=lambda: asyncio.run(send_texts(engine.url, engine.served_model, texts=texts, max_tokens=400))
        )
        load.start()
        while load.is_alive():
            text = page_of(sidecar.url).text
            seen.append((production_stack(text)[0], llm_d(text).get("vllm:num_requests_running", -1.0)))
        load.join()
    assert max(running for running, _ in seen) > 0
    assert all(one == other for one, other in seen if other >= 0)
    assert any(other >= 0 for _, other in seen)


def test_no_figure_is_frozen(watched: Watched) -> None:
    engine, sidecar, *_ = watched
    both_of(sidecar)
    stopped = engine.pids()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        times: list[float] = []
        # A quarter of a second, on a machine that has time; one that waits for the engine waits for 5 s, each time.
        while len(times) < ATTEMPTS and (not times or min(times) > PROMPT_SECONDS):
            began = time.monotonic()
            text = page_of(sidecar.url).text
            times.append(time.monotonic() - began)
        assert min(times) < PROMPT_SECONDS
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert (production_stack(text), llm_d(text)) == ((0, 0), {})
    assert "highwater_engine_up" in declared(text)
    both_of(sidecar)
    engine.stop()
    text = page_of(sidecar.url).text
    assert "vllm:" not in text
    assert "highwater_engine_up" in declared(text)


# --- the plugin alone ---

IS_WRAPPED = """
import os
from vllm.plugins import load_general_plugins
from vllm.v1.worker.worker_base import WorkerBase
for plugins in ("highwater", "other,highwater", "other", None):
    if os.fork() == 0:  # to import vLLM takes longer than all else
        os.environ |= {"VLLM_PLUGINS": plugins} if plugins else {}
        load_general_plugins()
        print("found", plugins, hasattr(WorkerBase.__init__, "_highwater_plugin"), flush=True)
        os._exit(0)
    os.wait()
"""


def test_vllm_itself_finds_the_plugin_in_a_copied_folder(engine_environment, tmp_path):
    folder = copy_worker_package(tmp_path / "copy").folder
    environ = os.environ | {"PYTHONPATH": f"{SHIM_FOLDER}{os.pathsep}{folder}", "VLLM_NO_USAGE_STATS": "1"}
    command = [engine_environment.python, "-c", IS_WRAPPED]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("found ")]
    assert found == [["highwater", "True"], ["other,highwater", "True"], ["other", "False"], ["None", "True"]]
