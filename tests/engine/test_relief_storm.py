"""Relief under live traffic: sixteen clients beside each remedy, on one real engine.

Not one request may fail, every answer must be the one that an undisturbed engine gives, and the engine must be alive
and in step at the end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar

from .conftest import PATIENT, STORM_SECONDS, ask_all, sidecar_beside
from .storm import Storm, ask_again, storming

ASKED_AGAIN = 60
OFTEN = 4
ENGINE_NOT_AVAILABLE = 503
ANY_BYTE = {"high_water": 1, "low_water": 0, "cooldown_seconds": 0, "min_gain_bytes": 0}
# So low that every rule wants to act at every look.
ABSURD_RULES = [
    # Not by growth, which nobody knows of an engine that has worked before the sidecar came.
    {"name": "device", "signal": "encoder_cache_bytes", "remedies": ["release", "trim_encoder_cache"], **ANY_BYTE},
    # Without the trim before it, which always helps here: else the reset would have its turn by chance only.
    {"name": "cache", "signal": "encoder_cache_bytes", "remedies": ["reset_encoder_cache"], **ANY_BYTE},
    {"name": "images", "signal": "encoder_cache_bytes", "remedies": ["reset_mm_cache"], **ANY_BYTE},
    {"name": "blocks", "signal": "encoder_cache_bytes", "remedies": ["reset_prefix_cache"], **ANY_BYTE},
]
pytestmark = pytest.mark.timeout(STORM_SECONDS + 1800, func_only=True)


@pytest.fixture
def quiet_sidecar(telling_engine: DemoEngine, tmp_path: Path) -> Iterator[DemoSidecar]:
    with sidecar_beside(telling_engine, tmp_path, HIGHWATER_POLICY__MODE="observe", **PATIENT) as sidecar:
        yield sidecar


async def over_and_over(act: Callable[[], Awaitable[Any]], every_seconds: float) -> list[Any]:
    """What came of acting again and again while a storm lasts; on a busy machine longer, until it was often enough."""
    came: list[Any] = []
    deadline = time.monotonic() + STORM_SECONDS
    while time.monotonic() < deadline or len(came) < OFTEN:
        began = time.monotonic()
        came.append(await act())
        await asyncio.sleep(max(every_seconds - (time.monotonic() - began), 0))
    return came


@dataclass(frozen=True)
class Ways:
    """How safe mode does it on one version: what keeps requests away, or None where it refuses."""

    encoder: str | None = "nothing"
    mm: str | None = "gate"
    prefix: str | None = "gate"
    by_itself: frozenset[str] = frozenset({"release", "trim_encoder_cache", "reset_encoder_cache", "reset_mm_cache"})
    """What the policy runs without an operator's word."""
    agrees_with_itself: bool = True
    """Whether an undisturbed engine gives the same answer to the same request, whatever else is in its batch."""


WAYS = {
    "0.12.0": Ways(
        encoder=None, mm=None, by_itself=frozenset({"release", "trim_encoder_cache"}), agrees_with_itself=False
    ),
    "0.23.0": Ways(mm=None, by_itself=frozenset({"release", "trim_encoder_cache", "reset_encoder_cache"})),
    "0.27.0": Ways(by_itself=frozenset({"release", "trim_encoder_cache", "reset_encoder_cache"})),
    "0.32.0": Ways(),
}


def ways(engine: DemoEngine) -> Ways:
    return WAYS[engine.environment.version]


async def prove(engine: DemoEngine, sidecar: DemoSidecar, storm: Storm) -> dict[str, float | str]:
    """Nobody was harmed: none failed, all got what an undisturbed engine answers, and the workers are in step."""
    assert storm.failures == []
    assert storm.answered > STORM_SECONDS / 2
    if ways(engine).agrees_with_itself:
        assert storm.contradictions == []
    assert len(set(storm.answers.values())) > len(storm.answers) / 4, "answers that do not depend on what was asked"
    again = await ask_again(sidecar.url, engine.served_model, list(storm.answers)[-ASKED_AGAIN:])
    assert again.failures == []
    differing = storm.differing(again)
    if ways(engine).agrees_with_itself:
        assert differing == []
    assert engine.is_running()
    assert {(one["op"], one["ok"]) for one in ask_all(engine, "memory")} == {("memory", True)}
    assert sidecar.call("GET", "/memory")["engine"]["state"] == "ready"
    return {
        "seconds": round(storm.seconds, 1),
        "requests": storm.answered,
        "failed": len(storm.failures),
        "answers compared": len(again.answers),
        "answers that differ": len(differing),
    }


async def remedy(sidecar: DemoSidecar, path: str) -> dict[str, Any]:
    """One reset through the sidecar, also one that was refused."""
    headers = sidecar.authorization()
    async with httpx.AsyncClient(base_url=sidecar.url, headers=headers, timeout=300, trust_env=False) as client:
        answer = await client.post(path)
        return {"status": answer.status_code} | answer.json()


async def test_trim_five_times_a_second(
    telling_engine: DemoEngine, quiet_sidecar: DemoSidecar, record: Callable[..., None]
) -> None:
    async with storming(quiet_sidecar.url, telling_engine.served_model, fresh_from=10_000) as storm:
        trims = await over_and_over(lambda: asyncio.to_thread(ask_all, telling_engine, "trim"), 0.2)
    answers = [one for (one,) in trims]
    assert all(answer["ok"] for answer in answers), next(answer for answer in answers if not answer["ok"])
    spilled = sum(answer["spilled_entries"] for answer in answers)
    assert spilled > len(answers) / 4
    figures = await prove(telling_engine, quiet_sidecar, storm)
    cache = quiet_sidecar.call("GET", "/memory")["encoder_cache"]
    assert cache["spills"] >= spilled
    assert cache["restores"] > 0
    assert cache["restore_seconds"] > 0
    figures |= {"trims": len(trims), "entries spilled": spilled, "entries restored": cache["restores"]}
    record(telling_engine.environment.version, "trim_encoder_cache", "every 0.2 s", "nothing failed", figures)


class Reset(NamedTuple):
    """A reset to be proven, how often it is made, and where its new images begin."""

    name: str
    way: str
    every_seconds: float
    fresh_from: int


RESETS = (
    # Scheduler and workers forget together, in order with the steps: nothing is held for it.
    Reset("reset_encoder_cache", "encoder", 0.2, 20_000),
    # New requests wait at the gate until the others are done; one on its way would drift.
    Reset("reset_mm_cache", "mm", 1.0, 30_000),
    # The same; the engine's own answer or its counts say that the reset worked.
    Reset("reset_prefix_cache", "prefix", 1.0, 40_000),
)


@pytest.mark.parametrize("reset", RESETS, ids=lambda reset: reset.name)
async def test_a_safe_reset(
    telling_engine: DemoEngine, quiet_sidecar: DemoSidecar, record: Callable[..., None], reset: Reset
) -> None:
    by, version = getattr(ways(telling_engine), reset.way), telling_engine.environment.version
    async with storming(quiet_sidecar.url, telling_engine.served_model, fresh_from=reset.fresh_from) as storm:
        path = f"/{reset.name}?mode=safe"
        answers = await over_and_over(lambda: remedy(quiet_sidecar, path), reset.every_seconds)
    figures = await prove(telling_engine, quiet_sidecar, storm)
    if by is None:
        assert {(answer["status"], answer["error"]["code"]) for answer in answers} == {(409, "refused")}
        record(version, reset.name, "mode=safe", "refused", figures | {"reason": answers[0]["error"]["message"]})
        return
    # An engine that answers too late to be judged is not reset: a machine that is busy enough does that to it.
    done = [answer for answer in answers if answer["status"] != ENGINE_NOT_AVAILABLE]
    assert {answer["error"]["code"] for answer in answers if answer not in done} <= {"engine_not_available"}
    assert len(done) >= OFTEN / 2
    assert {(answer["status"], answer["outcome"], answer["quiesced_by"]) for answer in done} == {(200, "done", by)}
    assert {answer["reason"] for answer in done} == {None}
    assert {answer.get("success", True) for answer in done} == {True}
    if by != "nothing":
        held = sorted(answer["held_seconds"] for answer in done)
        assert held[0] > 0
        assert held[-1] < 10
        figures |= {"held, median s": held[len(held) // 2], "held, most s": held[-1]}
    figures |= {"resets": len(done), "quiesced by": by}
    record(version, reset.name, "mode=safe", "nothing failed", figures)


def remedies_done(sidecar: DemoSidecar) -> list[str]:
    events = sidecar.call("GET", "/memory/events?limit=1000")["events"]
    return [event["result"]["remedy"] for event in events if (event["result"] or {}).get("outcome") == "done"]


async def test_the_policy_at_an_absurdly_low_threshold(
    telling_engine: DemoEngine, tmp_path: Path, record: Callable[..., None]
) -> None:
    settings = {
        "HIGHWATER_POLL_SECONDS": "0.2",
        "HIGHWATER_POLICY__RULES": json.dumps(ABSURD_RULES),
        "HIGHWATER_GATE__DRAIN_SECONDS": "30",  # also where sixteen requests take long
        "HIGHWATER_GATE__HOLD_SECONDS": "60",
        **PATIENT,
    }
    with sidecar_beside(telling_engine, tmp_path, **settings) as sidecar:
        async with storming(sidecar.url, telling_engine.served_model, fresh_from=50_000) as storm:
            await asyncio.sleep(STORM_SECONDS)
            seen: set[str] = set()  # the oldest events are forgotten
            deadline = time.monotonic() + 1200  # until each of them has had its turn
            while not ways(telling_engine).by_itself <= seen:
                assert time.monotonic() < deadline, sidecar.call("GET", "/policy")["status"]
                seen |= set(await asyncio.to_thread(remedies_done, sidecar))
                await asyncio.sleep(1)
        sidecar.call("PUT", "/policy", {"mode": "observe"})
        figures = await prove(telling_engine, sidecar, storm)
        done = remedies_done(sidecar)
        events = sidecar.call("GET", "/memory/events?limit=1000")["events"]
    failed = [event["summary"] for event in events if (event["result"] or {}).get("outcome") == "failed"]
    assert failed == []
    assert len(done) >= STORM_SECONDS / 10
    assert (seen | set(done)) - {"reset_prefix_cache"} == ways(telling_engine).by_itself
    figures |= {"remedies run": len(done), "of them": ", ".join(sorted(set(done)))}
    record(telling_engine.environment.version, "policy", "thresholds of almost 0", "nothing failed", figures)
