"""Tensor parallel: both ranks are seen, measured, and stay in step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.engines import send_texts, worker_pids

from .conftest import PATIENT, STORM_SECONDS, ask_all, sidecar_beside, wait_for
from .storm import storming

PATIENCE = 600.0


@pytest.fixture(scope="module")
def two_ranks(two_workers: DemoEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    with sidecar_beside(two_workers, tmp_path_factory.mktemp("tp2"), **PATIENT) as sidecar:
        yield two_workers, sidecar


def test_both_ranks_are_seen(two_ranks: tuple[DemoEngine, DemoSidecar]) -> None:
    engine, sidecar = two_ranks
    report = wait_for(sidecar, lambda report: report["ranks_reported"] == 2)
    assert report["ranks_expected"] == 2
    assert {rank["pid"] for rank in report["ranks"]} == set(worker_pids(engine))
    assert [rank["tp_rank"] for rank in report["ranks"]] == [0, 1]
    assert report["encoder_cache"]["entries"] == 0
    assert sidecar.call("GET", "/memory/encoder-cache")["ranks"][1]["present"] is True


async def test_release_reaches_both_ranks_under_traffic(two_ranks: tuple[DemoEngine, DemoSidecar]) -> None:
    engine, sidecar = two_ranks
    # The first batch of a fresh engine takes longer than a worker call may.
    assert (await send_texts(sidecar.url, engine.served_model, texts=["warm", "up"])).failed == 0
    await asyncio.to_thread(wait_for, sidecar, lambda report: report["engine"]["state"] == "ready")
    traffic = asyncio.create_task(
        send_texts(sidecar.url, engine.served_model, texts=[f"text {n}" for n in range(24)], max_tokens=16)
    )
    for _ in range(5):
        answer = await asyncio.to_thread(sidecar.call, "POST", "/memory/reclaim", {"remedies": ["release"]})
        (result,) = answer["results"]
        assert (result["outcome"], len(result["freed_bytes"]["ranks"])) == ("done", 2)
    assert (await traffic).failed == 0


async def test_both_ranks_stay_in_step_under_relief_and_traffic(two_ranks: tuple[DemoEngine, DemoSidecar]) -> None:
    engine, sidecar = two_ranks
    answers: list[list[dict[str, Any]]] = []
    async with storming(sidecar.url, engine.served_model, fresh_from=60_000) as storm:
        began, spilled = time.monotonic(), 0
        # What a minute proves is proven on one rank; a slow machine may need longer for its first images.
        while time.monotonic() - began < STORM_SECONDS / 2 or (not spilled and time.monotonic() - began < PATIENCE):
            answers.append(await asyncio.to_thread(ask_all, engine, "trim"))
            spilled += answers[-1][0]["spilled_entries"]
            answers.append(await asyncio.to_thread(ask_all, engine, "memory"))
            if not len(answers) % 10:
                await asyncio.to_thread(sidecar.call, "POST", "/reset_encoder_cache?mode=safe")
            await asyncio.sleep(0.2)
    assert storm.failures == []
    assert storm.answered > STORM_SECONDS / 8
    assert {(one["op"], one["ok"], one["rank"]) for pair in answers for one in pair} == {
        (op, True, rank) for op in ("trim", "memory") for rank in (0, 1)
    }
    assert spilled > 0
    assert all(first["spilled_entries"] == second["spilled_entries"] for first, second in answers[::2])
    assert [(one["op"], one["rank"]) for one in ask_all(engine, "budget")] == [("budget", 0), ("budget", 1)]


def test_both_ranks_stay_in_step_after_every_kind_of_error(engine_after_errors: DemoEngine) -> None:
    """A method that raised would leave rank 1 one reply behind forever: the next good call is answered in step."""
    answers = ask_all(engine_after_errors, "budget")
    assert [(one["op"], one["ok"], one["rank"], one["tp_rank"]) for one in answers] == [
        ("budget", True, 0, 0),
        ("budget", True, 1, 1),
    ]
    assert {one["weights_bytes"] > 0 for one in ask_all(engine_after_errors, "memory")} == {True}


@pytest.fixture
def engine_after_errors(two_ranks: tuple[DemoEngine, DemoSidecar]) -> DemoEngine:
    engine, _ = two_ranks
    for op, payload in (("nonsense", "{}"), ("memory", "["), ("encoder_cache", '{"limit": -1}')):
        answers = ask_all(engine, op, payload)
        assert [(one["op"], one["rank"], one["ok"]) for one in answers] == [(op, 0, False), (op, 1, False)]
    # Too few and too many arguments: refused in the answer, not raised.
    for arguments in ([], ["budget", "{}", "more"]):
        body = {"method": "highwater_rpc", "args": arguments}
        httpx.post(f"{engine.url}/collective_rpc", json=body, timeout=60, trust_env=False).raise_for_status()
    return engine
