"""Relief under traffic, as `tests/engine` proves it on the current version, on older ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment
from tests.engine.conftest import STORM_SECONDS, ask_all, engine_with_weights
from tests.engine.storm import ask_one_by_one, nth, storming
from tests.engine.test_relief_storm import (
    quiet_sidecar,
    test_a_safe_reset,
    test_the_policy_at_an_absurdly_low_threshold,
    test_trim_five_times_a_second,
    ways,
)

__all__ = [
    "quiet_sidecar",
    "test_a_safe_reset",
    "test_the_policy_at_an_absurdly_low_threshold",
    "test_trim_five_times_a_second",
]


@pytest.fixture(scope="module")
def telling_engine(
    engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DemoEngine]:
    """One of each version, for this file."""
    with engine_with_weights(engine_environment, tmp_path_factory.mktemp("telling")) as engine:
        yield engine


async def test_an_undisturbed_engine(telling_engine: DemoEngine, record: Callable[..., None]) -> None:
    async with storming(telling_engine.url, telling_engine.served_model, fresh_from=1_000) as storm:
        await asyncio.sleep(STORM_SECONDS)
    assert storm.failures == []
    assert (storm.contradictions == []) == ways(telling_engine).agrees_with_itself
    figures = {"requests": storm.answered, "failed": 0, "answers that differ": len(storm.contradictions)}
    outcome = "same answers" if not storm.contradictions else "answers differ"
    record(telling_engine.environment.version, "none", "undisturbed", outcome, figures)


async def test_trims_between_requests_change_no_answer(telling_engine: DemoEngine, record: Callable[..., None]) -> None:
    asks = [nth(0, turn, fresh_from=2_000) for turn in range(60)]
    url, model = telling_engine.url, telling_engine.served_model
    await ask_one_by_one(url, model, asks)  # what was computed before is computed otherwise: its prefix is cached
    before = await ask_one_by_one(url, model, asks)
    spilled = 0

    async def trim() -> None:
        nonlocal spilled
        spilled += sum(answer["spilled_entries"] for answer in await asyncio.to_thread(ask_all, telling_engine, "trim"))

    after = await ask_one_by_one(url, model, asks, between=trim)
    assert (before.failures, after.failures) == ([], [])
    assert spilled > len(asks) / 2
    assert before.differing(after) == []
    figures = {"requests": len(asks), "entries spilled": spilled, "answers that differ": 0}
    record(telling_engine.environment.version, "trim_encoder_cache", "before each request", "nothing failed", figures)
