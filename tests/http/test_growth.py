"""``GET /memory/growth`` and ``highwater growth``: verdicts, open to all, and never a call of a worker."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from highwater.growth.series import SeriesKey
from highwater.growth.watch import GrowthWatch
from highwater.model.engine import WorkCounts
from highwater.model.units import GIB, MIB
from highwater.terminal.cli import main
from tests.fakes.engine import FakeEngine
from tests.http.test_control_plane import sidecar_before
from tests.patience import until

KEY = SeriesKey("API server", "anonymous_bytes", "host", "bytes", "node/1/1")
STILL = SeriesKey("API server", "threads", "host", "count", "node/1/1")


@pytest.fixture
def leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every watch begins with half an hour of floors of a leak of 3 MiB per request."""
    begin = GrowthWatch.__init__

    def begun(watch: GrowthWatch, *args: object, **settings: object) -> None:
        begin(watch, *args, **settings)  # type: ignore[arg-type]
        done = 0
        for number in range(40):
            done += (3, 9, 1, 7)[number % 4]
            work = WorkCounts(requests=done, images=0, new_images=0, tokens=90 * number)
            values = {KEY: GIB + 3.0 * MIB * done, STILL: 12.0}
            watch._books["host"].add(number * 45.0, 1.7e9 + number * 45.0, work, values)
        watch._open |= {(KEY.name, "idle_floors"): None, (STILL.name, "idle_floors"): None}

    monkeypatch.setattr(GrowthWatch, "__init__", begun)


async def test_before_the_first_floor_there_is_no_verdict():
    async with sidecar_before(FakeEngine()) as running:
        answer = (await running.client.get("/memory/growth")).json()
        text = (await running.client.get("/memory/growth?format=text")).text
        report = (await running.client.get("/memory")).json()
    assert (answer["series"], answer["floors"], report["growth"]["series"]) == ([], [], [])
    assert "no verdict yet" in text


@pytest.mark.parametrize(("conf", "is_on", "level"), [(None, False, "warn"), ("expandable_segments:True", True, "ok")])
async def test_what_the_engine_was_started_with_is_known_and_checked(conf, is_on, level):
    fake = FakeEngine()
    fake.serve_images()
    environment = {} if conf is None else {"PYTORCH_NPU_ALLOC_CONF": conf}
    fake.budget = {"vllm_version": "0.32.0", "environment": environment, "limits": {"sleep_mode": False}}
    async with sidecar_before(fake) as running:
        (rank, _) = (await running.client.get("/memory")).json()["ranks"]
        url = f"http://127.0.0.1:{running.port}"
        checked = await asyncio.to_thread(CliRunner().invoke, main, ["check", "--url", url, "--json"])
    assert (rank["launch"]["expandable_segments"], rank["launch"]["sleep_mode"]) == (is_on, False)
    (start,) = [one for one in json.loads(checked.output)["findings"] if one["name"] == "start"]
    assert start["level"] == level


async def test_a_leak_is_on_every_face(leaking):
    async with sidecar_before(FakeEngine()) as running:
        url = f"http://127.0.0.1:{running.port}"

        async def is_told() -> bool:
            return len((await running.client.get("/memory/growth")).json()["series"]) == 2

        await until(is_told, pause_seconds=0.02)
        answer = (await running.client.get("/memory/growth")).json()
        one = (await running.client.get(f"/memory/growth?series={KEY.name}")).json()
        titled = (await running.client.get("/memory/growth", params={"series": "API server: anonymous"})).json()
        unknown = await running.client.get("/memory/growth?series=nothing")
        odd = await running.client.get("/memory/growth?colour=red")
        report = (await running.client.get("/memory?format=text")).text
        metrics = (await running.client.get("/metrics?engine=0")).text
        before = len(running.fake.ops())
        shown = await asyncio.to_thread(CliRunner().invoke, main, ["growth", "--url", url])
        as_json = await asyncio.to_thread(CliRunner().invoke, main, ["growth", "--url", url, "--json"])
        status = await asyncio.to_thread(CliRunner().invoke, main, ["status", "--url", url])
        assert len(running.fake.ops()) - before < 20
    leak, flat = answer["series"]
    assert (leak["series"], leak["verdict"], leak["rate"]["driver"]) == (KEY.name, "leak", "request")
    assert leak["rate"]["per_driver"] == pytest.approx(3 * MIB)
    assert (flat["series"], flat["verdict"]) == (STILL.name, "flat")
    assert (len(one["series"]), len(one["floors"]), one["floors"][-1]["requests"]) == (1, 40, 200.0)
    assert titled == one
    assert (unknown.status_code, odd.status_code) == (422, 422)
    line = "API server: anonymous leaks 3.0 MiB per request (3.0 MiB to 3.0 MiB)"
    assert line in report
    assert line in status.output
    assert 'highwater_growth_leak_bytes{driver="request"' in metrics
    assert "leaks 3.0 MiB per request" in shown.output
    assert (shown.exit_code, as_json.exit_code, status.exit_code) == (1, 1, 0)  # nobody knows when it is full
    assert json.loads(as_json.output)["series"][0]["verdict"] == "leak"
