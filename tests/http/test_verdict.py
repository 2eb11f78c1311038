"""The verdict as a whole sidecar gives it: the same in ``/memory``, live and in ``/metrics``, as things happen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from highwater.act.rules import PolicySettings
from tests.fakes.engine import CACHED, MIB, FakeEngine
from tests.http.test_control_plane import Running, sidecar_before

GIB = 1024 * MIB


def leave_free(fake: FakeEngine, free: int, *, cached: int) -> None:
    for worker in fake.workers:
        worker.cached = cached
        worker.other_tensors += worker.total - worker.used - free


async def verdict_of(running: Running) -> dict[str, Any]:
    """It is the same on ``/metrics``."""
    judged: dict[str, Any] = (await running.client.get("/memory")).json()["verdict"]
    page = (await running.client.get("/metrics?engine=0")).text
    assert f'highwater_verdict{{state="{judged["state"]}"}} 1.0' in page
    assert f"highwater_verdict_exit_status {judged['exit_status']}.0" in page
    return judged


@pytest.fixture
async def running():
    fake = FakeEngine()
    async with sidecar_before(fake, policy=PolicySettings()) as sidecar:
        yield sidecar


async def test_an_engine_with_room_is_fine_and_says_what_it_would_do(running):
    judged = await verdict_of(running)
    assert (judged["state"], judged["exit_status"], judged["reason"]) == ("fine", 0, "none")
    assert judged["sentence"].startswith("Each of 2 ranks has at least ")
    assert "Highwater gives back" in judged["next"]
    assert judged["do"]["bytes"] == 2 * CACHED


async def test_what_the_verdict_offers_works(running):
    deed = (await verdict_of(running))["do"]
    dry = await running.client.post(f"/{deed['path']}", json=deed["body"] | {"dry_run": True})
    assert [one["can_give_bytes"] for one in dry.json()["results"]] == [deed["bytes"]]
    done = await running.client.post(f"/{deed['path']}", json=deed["body"])
    assert [one["credited_bytes"]["total"] for one in done.json()["results"]] == [deed["bytes"]]


async def test_a_relief_twice_is_kept_up_and_each_says_why(running):
    for _ in range(2):
        leave_free(running.fake, 200 * MIB, cached=6 * GIB)
        await running.poll()
        await running.app.services.governor.consider()
    judged = await verdict_of(running)
    events = [one for one in (await running.client.get("/memory/events")).json()["events"] if one["kind"] == "reset"]
    assert (judged["state"], judged["exit_status"]) == ("keeps_up", 0)
    assert "6.00 GiB a rank each time" in judged["sentence"]
    assert [event["why"].startswith("short by ") for event in events] == [True, True]


async def test_a_dead_engine_is_dead_until_another_one_is_ready(running):
    running.fake.down = True
    for _ in range(2):
        await running.poll()
    judged = await verdict_of(running)
    assert (judged["state"], judged["exit_status"]) == ("dead", 2)
    assert judged["sentence"].startswith("The engine has been dead for ")
    running.fake.down = False
    await running.poll()
    assert (await verdict_of(running))["state"] == "fine"


async def test_live_updates_have_it_too(running):
    async with running.client.stream("GET", "/memory/events", headers={"accept": "text/event-stream"}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                assert json.loads(line.removeprefix("data: "))["verdict"]["state"] == "fine"
                break
