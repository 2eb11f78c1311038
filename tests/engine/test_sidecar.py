"""The sidecar beside real engines: what an operator is promised, seen from outside."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from helm.source.dashboards import ENGINE_FAMILIES, ENGINE_HISTOGRAMS, names_in
from highwater.model.components import COMPONENT_NAMES
from highwater.model.units import MIB
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, EngineOptions
from highwater.terminal.demo.process import DemoError, free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.story import tell
from highwater.terminal.demo.traffic import send_images
from tests.engines import worker_pids
from tests.patience import LIMIT_SECONDS, wait_until

from .conftest import wait_for

IMAGES = 40


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def get(sidecar: DemoSidecar, path: str, **kwargs: Any) -> httpx.Response:
    headers = sidecar.authorization()
    return httpx.get(sidecar.url + path, trust_env=False, timeout=LIMIT_SECONDS, headers=headers, **kwargs)


def post(sidecar: DemoSidecar, path: str, **kwargs: Any) -> httpx.Response:
    return httpx.post(sidecar.url + path, trust_env=False, timeout=60, headers=sidecar.authorization(), **kwargs)


# --- one worker, images ---


def test_components_sum_to_what_the_kernel_says_of_the_worker(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    report = wait_for(sidecar, lambda report: not report["stale"] and report["ranks"])
    (rank,) = report["ranks"]
    assert sum(rank["components"][name] or 0 for name in COMPONENT_NAMES) == rank["used_bytes"]
    assert rank["pid"] in worker_pids(engine)
    assert rank["used_bytes"] == pytest.approx(rss_bytes(rank["pid"]), rel=0.1)
    assert rank["components"]["weights_bytes"] > 10 * MIB
    assert rank["components"]["kv_cache_bytes"] == 256 * MIB
    assert (report["ranks_reported"], report["ranks_expected"]) == (1, 1)
    assert report["engine"]["version"] == engine.environment.version
    assert report["engine"]["model"] == engine.served_model


async def test_the_story_is_told_and_its_numbers_agree(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    sidecar.call("POST", "/memory/reclaim")  # what tests before this one left
    sidecar.call("PUT", "/policy", {"mode": "act"})
    said: list[str] = []
    try:
        await asyncio.to_thread(tell, engine, sidecar, images=IMAGES, say=said.append)
    finally:
        sidecar.call("PUT", "/policy", {"mode": "observe"})
    text = "\n".join(said)
    titles, row = re.search(r"^since 'ready'\n(.*encoder.*)\n(?:.*\n)*?( *0 .*)$", text, re.MULTILINE).groups()
    assert float(row.split()[titles.split().index("encoder")]) > 0.1
    assert f"the encoder cache held {IMAGES} entries before it and {IMAGES} after" in text
    assert "$ highwater reclaim\n" in text
    events = sidecar.call("GET", "/memory/events?limit=200")["events"]
    freed = [
        (event["rule"], event["result"]["freed_components"]["encoder_cache_bytes"])
        for event in events
        if (event["result"] or {}).get("remedy") == "reset_encoder_cache" and event["result"]["outcome"] == "done"
    ]
    assert min(size for rule, size in freed[:2] if rule == "demo") > 32 * MIB
    assert min(size for rule, size in freed[:2] if rule is None) > 100 * MIB
    assert said[-1].endswith(f"{next(event['summary'] for event in events if event['rule'] == 'demo')}")


def test_a_drop_in_reset_answers_as_vllm_does_and_tells_more(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    direct = httpx.post(f"{engine.url}/reset_prefix_cache", trust_env=False, timeout=30)
    ours = post(sidecar, "/reset_prefix_cache?reset_external=false")
    assert ours.status_code == direct.status_code
    assert direct.json().items() <= ours.json().items()
    assert ours.json()["freed_bytes"]["components"]["kv_cache_bytes"] == 0
    assert "preallocated" in ours.json()["does_not_free"]


async def test_the_cache_is_listed_entry_by_entry(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    sidecar.call("POST", "/reset_encoder_cache")
    sizes = [(512, 512), (256, 256)]
    for seed, (width, height) in enumerate(sizes, start=9000):
        await send_images(sidecar.url, engine.served_model, images=[seed], width=width, height=height)
    (rank,) = get(sidecar, "/memory/encoder-cache?limit=2").json()["ranks"]
    large, small = rank["entries"]
    assert large["bytes"] == 4 * small["bytes"] == 512 * 512 // 1024 * 8192 * 4
    assert (large["residency"], large["dtype"]) == ("device", "float32")
    assert small["referenced"] is False
    assert rank["entries_total"] >= 2


async def test_a_client_that_leaves_takes_its_request_along(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    body = {
        "model": engine.served_model,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{sidecar.url}/v1/chat/completions", json=body) as response,
    ):
        chunks = response.aiter_bytes()  # kept: httpx closes the response with its iterator
        assert (await anext(chunks)).startswith(b"data: ")
        await asyncio.to_thread(wait_for, sidecar, lambda report: report["engine"]["requests_running"] == 1)
    await asyncio.to_thread(wait_for, sidecar, lambda report: report["engine"]["requests_running"] == 0, 10.0)


def test_no_way_leads_to_the_workers(sidecar: DemoSidecar) -> None:
    for path in ("/collective_rpc", "/v1/../collective_rpc", "/v1/%2e%2e/collective_rpc", "//collective_rpc"):
        url = httpx.URL(sidecar.url, raw_path=path.encode())
        answer = httpx.post(
            url, json={"method": "highwater_rpc", "args": ["budget"]}, trust_env=False, timeout=LIMIT_SECONDS
        )
        assert answer.status_code in {400, 403, 404}, path
        assert "results" not in answer.text


def test_server_info_and_sleep_state_pass_through(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    """The development paths that only read are vLLM's own, query string and all; the configuration is for operators."""
    assert httpx.get(f"{sidecar.url}/server_info", trust_env=False, timeout=LIMIT_SECONDS).status_code == 401
    info = get(sidecar, "/server_info?config_format=json").json()
    assert info["vllm_config"]["parallel_config"]["worker_extension_cls"] == "highwater_worker.MemoryExtension"
    assert get(sidecar, "/is_sleeping").json() == {"is_sleeping": False}


def test_an_engine_that_sleeps_takes_a_release_and_nothing_else(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    """vLLM's CPU backend unmaps nothing, and says that it sleeps all the same."""

    def reclaimed(name: str) -> dict[str, Any]:
        (result,) = sidecar.call("POST", "/memory/reclaim", {"remedies": [name]})["results"]
        return result

    assert httpx.post(f"{engine.url}/sleep?level=1", timeout=LIMIT_SECONDS).is_success
    try:
        wait_for(sidecar, lambda report: report["engine"]["state"] == "sleeping")
        assert reclaimed("release")["outcome"] == "done"
        with pytest.raises(DemoError, match="the engine is asleep"):
            reclaimed("trim_encoder_cache")
    finally:
        assert httpx.post(f"{engine.url}/wake_up", timeout=LIMIT_SECONDS).is_success
    wait_for(sidecar, lambda report: report["engine"]["state"] == "ready")


def test_a_real_prometheus_scrapes_it(sidecar: DemoSidecar, tmp_path: Path, prometheus: Callable[..., Any]) -> None:
    exposition = get(sidecar, "/metrics?engine=0").text
    lint = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition, text=True, capture_output=True, check=False
    )
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")
    query = prometheus(f"127.0.0.1:{sidecar.port}", "/metrics", {})
    (used,) = query("highwater_device_memory_used_bytes")
    assert used["metric"]["device"] == "cpu"
    assert float(used["value"][1]) > 500 * MIB
    (balance,) = query("sum(highwater_memory_component_bytes) - sum(highwater_device_memory_used_bytes)")
    assert float(balance["value"][1]) == 0
    assert query("vllm:num_requests_running")


def test_the_engines_families_are_there_by_their_names(sidecar: DemoSidecar) -> None:
    pages = [""]

    def has_the_engines() -> bool:
        pages.append(httpx.get(f"{sidecar.url}/metrics", trust_env=False, timeout=LIMIT_SECONDS).text)
        return "\nvllm:" in pages[-1]

    wait_until(has_the_engines)  # all are left out of a page for which the engine is slow to tell them
    text = pages[-1]
    assert [name for name in ENGINE_FAMILIES if f"\n{name}{{" not in text] == []
    assert [name for name in ENGINE_HISTOGRAMS if f"\n{name}_bucket{{" not in text] == []
    assert names_in(" + ".join(ENGINE_FAMILIES)) == list(ENGINE_FAMILIES)


def test_live_events_arrive(sidecar: DemoSidecar) -> None:
    live = {"headers": {"Accept": "text/event-stream"}, "trust_env": False, "timeout": LIMIT_SECONDS}
    with httpx.stream("GET", f"{sidecar.url}/memory/events", **live) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: report"
        assert json.loads(next(lines).removeprefix("data: "))["engine"]["state"] == "ready"
        threading.Thread(target=sidecar.call, args=("POST", "/memory/marks", {"name": "seen live"})).start()
        assert any("seen live" in line for line in lines if line.startswith("data: "))


def test_an_idle_engines_workers_are_left_alone(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    """vLLM's workers spin for a second after each call: on an idle engine they are asked once in five seconds."""
    (pid,) = worker_pids(engine)
    wait_for(sidecar, lambda report: report["engine"]["requests_running"] == 0)
    ages: set[int] = set()
    began, used = time.monotonic(), cpu_seconds(pid)

    def have_been_of_every_age() -> bool:
        ages.add(round(sidecar.call("GET", "/memory")["age_seconds"]))
        return {1, 2, 3, 4} <= ages and time.monotonic() - began > 8.0

    wait_until(have_been_of_every_age, pause_seconds=0.25)
    seconds = time.monotonic() - began
    assert cpu_seconds(pid) - used < 0.6 * seconds


# --- commands of the terminal ---


def ran(*arguments: str, url: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "highwater", *arguments, "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert status == done.returncode, (arguments, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_check_finds_nothing_wrong(sidecar: DemoSidecar) -> None:
    findings = json.loads(ran("check", "--json", url=sidecar.url))["findings"]
    levels = {finding["name"]: finding["level"] for finding in findings}
    # The tests' engine is started by a module of theirs: such a command line does not say whether it opens a gRPC port.
    assert {name for name, level in levels.items() if level in ("fail", "skip")} <= {"gRPC"}
    assert levels["extension"] == levels["ranks"] == levels["thresholds"] == levels["exposure"] == "ok"
    assert levels["policy"] == "note"


@pytest.mark.parametrize("command", [["top"], ["status"], ["reclaim"]], ids=" ".join)
def test_vllm_itself_is_no_sidecar(engine: DemoEngine, command: list[str]) -> None:
    assert "no Highwater sidecar (vLLM itself" in ran(*command, url=engine.url, status=3)


# --- an engine's lives ---

# How often the engine is killed and started again; each life is half a minute.
LIVES = int(os.environ.get("TEST_ENGINE_LIVES", "1"))
STARTER = """
import sys
from pathlib import Path
from highwater.terminal.demo.engine import DemoEngine, EngineOptions
from highwater.terminal.demo.engine import EngineEnvironment

environment, folder, port = EngineEnvironment("", Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
engine = DemoEngine(environment, EngineOptions(multimodal=False, port=port), folder=folder)
engine.start()
print(*engine.pids(), flush=True)
sys.stdin.read()
"""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@contextmanager
def killed_starter(engine: DemoEngine) -> Iterator[None]:
    """The same engine as another process's, which is killed at the end: nobody calls stop()."""
    command = [sys.executable, "-c", STARTER, str(engine.environment.root), str(engine.folder), str(engine.port)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as starter:
        assert starter.stdout is not None
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(alive(pids)) >= 3  # API server, EngineCore, worker
        try:
            yield
        finally:
            starter.kill()
    deadline = time.monotonic() + 300
    while left := alive(pids):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def held_rings(sidecar: DemoSidecar) -> list[str]:
    opened = [os.readlink(fd) for pid in sidecar.pids() for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return [path for path in opened if ".ring" in path]


@pytest.mark.soak
@pytest.mark.timeout(1800 + 900 * LIVES)  # starts an engine more than once
def test_a_sidecar_outlives_its_engines_and_knows_the_next(
    engine_environment: EngineEnvironment, tmp_path: Path
) -> None:
    options = EngineOptions(multimodal=False, port=free_port())
    engine = DemoEngine(engine_environment, options, folder=tmp_path / "engine")
    recorders = tmp_path / "recorders"
    with ExitStack() as stack:
        stack.callback(engine.stop)
        settings = {"HIGHWATER_RECORDER_DIR": str(recorders)}
        sidecar = stack.enter_context(DemoSidecar(engine.url, folder=tmp_path, settings=settings))
        assert wait_for(sidecar, lambda report: report["engine"]["hint"])["engine"]["state"] == "starting"
        assert get(sidecar, "/readyz").status_code == 503
        with killed_starter(engine):
            last = wait_for(sidecar, is_whole)
            assert last["encoder_cache"] is None  # it reads no images
        for _ in range(LIVES):
            down = wait_for(sidecar, lambda report: report["engine"]["state"] == "gone")
            assert down["stale"] is True
            assert post(sidecar, "/memory/reclaim").status_code == 503
            assert post(sidecar, "/v1/completions", json={}).status_code == 502
            assert get(sidecar, "/livez").status_code == 200
            engine.start()
            report = wait_for(sidecar, is_whole)
            assert report["ranks_missing"] == []
            assert report["ranks"][0]["pid"] not in {last["ranks"][0]["pid"], None}
            assert report["growth"]["baseline_taken_at"] > last["growth"]["baseline_taken_at"]
            # Those of the dead stay for ten minutes, as an incident may want them; nothing else holds them.
            (held,) = held_rings(sidecar)
            assert held.endswith(f"-{report['ranks'][0]['pid']}.ring")
            last, pids = report, engine.pids()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            engine.stop()
            assert alive(pids) == []
        summaries = [event["summary"] for event in sidecar.call("GET", "/memory/events?limit=1000")["events"]]
    moves = [re.match(r"engine \w+ -> (\w+)", text) for text in reversed(summaries)]
    # A fresh engine that takes its time over the first call is busy or slow for that long.
    states = [
        state for state, _ in groupby(move[1] for move in moves if move and move[1] not in {"busy", "slow", "starting"})
    ]
    assert states[: 2 * LIVES + 1] == ["ready", *["gone", "ready"] * LIVES]
    assert any(text.startswith("release failed: the engine is gone") for text in summaries)


def is_whole(report: dict[str, Any]) -> bool:
    return bool(report["ranks"] and not report["stale"])
