"""``GET /memory/host`` and ``highwater host``: of files alone, open to all, and never a call of a worker."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from highwater.host.reading import HostReading
from highwater.terminal.cli import main
from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import sidecar_before
from tests.patience import until
from tests.unit.host.recorded import record, write

HERE = Path("/proc/sys/kernel/random/boot_id")


def process(pid: int, **changes: object) -> dict[str, object]:
    """What a process of this machine writes now."""
    return record(pid=pid, boot_id=HERE.read_text().strip(), mono=time.monotonic(), at=time.time(), **changes)


@pytest.fixture
def ring(tmp_path):
    folder = tmp_path / "ring"
    write(folder, process(10, role="api_server"))
    write(folder, process(11, role="engine_core", anonymous_bytes=2**31))
    write(folder, process(12, role="worker", rank=0, dp_rank=0))
    return folder


async def test_processes_and_parts_are_served_without_a_token_and_without_a_call(ring):
    async with sidecar_before(FakeEngine(), recorder_dir=ring) as running:
        before = len(running.fake.ops())
        answer = (await running.client.get("/memory/host")).json()
        assert len(running.fake.ops()) == before
    assert [one["name"] for one in answer["reading"]["processes"]] == ["API server", "EngineCore", "worker rank 0"]
    parts = answer["parts"]
    total = sum(row["bytes"] for row in parts["rows"]) + parts["not_attributed_bytes"] - parts["counted_twice_bytes"]
    assert total == parts["used_bytes"] == answer["reading"]["container"]["used_bytes"]


async def test_an_engine_that_does_not_answer_yet_and_whose_process_runs_seems_to_be_loading(ring):
    fake = FakeEngine()
    fake.down = True
    async with sidecar_before(fake, recorder_dir=ring, poll_seconds=0.1) as running:

        async def hint() -> str:
            return (await running.client.get("/memory")).json()["engine"]["hint"] or ""

        async def is_loading() -> bool:
            return "seems to be loading" in await hint()

        await until(is_loading, pause_seconds=0.02)
        told = await hint()
    assert told.startswith(
        "the engine seems to be loading: a process of it runs (API server, pid 10). Nothing answers yet at "
    )


async def test_a_start_that_was_killed_is_said_alike_everywhere(tmp_path):
    fake = FakeEngine()
    fake.down = True
    async with sidecar_before(fake, recorder_dir=tmp_path) as running:
        await running.app.services.host.read()
        killed = process(10, cgroup=record()["cgroup"] | {"events": {"oom_kill": 1}})
        write(tmp_path, killed | {"mono": time.monotonic() - 20.0})
        arguments = ["status", "--url", f"http://127.0.0.1:{running.port}"]

        async def incidents() -> list[dict[str, object]]:
            await running.app.services.host.read()
            await running.poll()
            listed: list[dict[str, object]] = (await running.client.get("/memory/incidents")).json()["incidents"]
            return listed

        await until(incidents, pause_seconds=0.1)
        (listed,) = await incidents()
        report = (await running.client.get("/memory")).json()
        events = (await running.client.get("/memory/events")).json()["events"]
        page = (await running.client.get("/metrics?engine=0")).text
        shown = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    said = "it was killed by the kernel for memory while it started: API server 900 MiB at its peak"
    assert (listed["kind"], listed["count"]) == ("start_failed", 1)
    assert said in str(listed["summary"])
    assert said in report["start_failure"]["summary"]
    assert report["engine"]["hint"].startswith("the engine's last start was killed by the kernel for memory ")
    assert (report["engine"]["restarts"], shown.exit_code) == (1, 1)
    assert [event["kind"] for event in events if said in event["summary"]] == ["incident", "state"]
    assert "it was killed by the kernel for memory while it started" in " ".join(shown.output.split())
    assert "highwater_engine_restarts_total 1.0" in page
    assert 'highwater_incidents_total{kind="start_failed"} 1.0' in page


async def test_as_text_and_at_the_command_line(ring):
    async with sidecar_before(FakeEngine(), recorder_dir=ring) as running:
        text = (await running.client.get("/memory/host", headers={"accept": "text/plain"})).text
        odd = await running.client.get("/memory/host?colour=red")
        arguments = ["host", "--url", f"http://127.0.0.1:{running.port}"]
        shown = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        as_json = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--json"])
    assert "EngineCore" in text
    assert "sum, as the kernel counts it" in text
    assert odd.status_code == 422
    assert "worker rank 0" in shown.output
    assert json.loads(as_json.stdout)["schema"] == 1


async def test_the_metrics_have_it_after_the_first_reading(ring):
    async with sidecar_before(FakeEngine(), recorder_dir=ring) as running:
        await running.client.get("/memory/host")
        page = (await running.client.get("/metrics?engine=0")).text
    assert (
        'highwater_host_process_bytes{kind="anonymous",process="EngineCore",role="engine_core"} 2.147483648e+09' in page
    )


async def test_without_a_folder_it_says_what_is_missing():
    async with sidecar_before(FakeEngine()) as running:
        answer = (await running.client.get("/memory/host")).json()
    assert answer["reading"]["processes"] == []
    assert "HIGHWATER_RECORDER_DIR" in answer["reading"]["problems"][0]


async def test_a_crowd_of_forged_files_does_not_hold_up_the_event_loop(tmp_path):
    for pid in range(1, 257):
        write(tmp_path, process(pid, role="other"))
    async with sidecar_before(FakeEngine(), recorder_dir=tmp_path) as running:
        reading: HostReading = (await running.app.services.host.read()).reading
        assert len(reading.processes) == 256
        answer: httpx.Response = await running.client.get("/memory/host")
    assert answer.status_code == 200
