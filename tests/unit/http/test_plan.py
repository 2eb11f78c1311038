"""`POST /memory/plan` without its HTTP: what a body comes to, and how it is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from highwater.engine.client import Engine
from highwater.explain.live_engine import LiveEngine
from highwater.http.memory import PlanRequest, plan_answer
from highwater.http.services import StartReports, Turns
from highwater.model.rank import EncoderCache
from highwater.model.report import Report
from highwater.process.errors import CannotPlan, NotAvailable, TooManyWaiting
from highwater.watch.sources import EngineBudgets
from kvplan import PlanError
from tests.fakes import started
from tests.fakes.ranks import reading
from tests.fakes.ranks import report as report_of
from tests.unit.explain.test_live import engine_of

NOTHING_CACHED = report_of()


@dataclass
class Starts:
    """A running engine, or the reason why it cannot be planned for."""

    engine: LiveEngine | str

    def live_engine(self, _: Report) -> LiveEngine:
        if isinstance(self.engine, str):
            raise PlanError(self.engine)
        return self.engine


def answer(body: dict[str, Any], starts: Starts | None = None, *, report: Report = NOTHING_CACHED) -> dict[str, Any]:
    """Return the answer to a body."""
    known = starts or Starts(engine_of(started.story(), "0.12.0", 2))
    return plan_answer(PlanRequest.model_validate(body), known, report)


def test_an_empty_body_is_the_engine_as_it_runs() -> None:
    plan = answer({})
    assert (plan["kv_cache"]["blocks"], plan["kv_cache"]["tokens"], plan["changed"]) == (5_040, 645_120, {})


def test_a_plan_of_an_engine_that_does_not_run_says_so() -> None:
    gone = replace(NOTHING_CACHED, engine=replace(NOTHING_CACHED.engine, state="gone"))
    assert answer({}, report=gone)["notes"] == ["The engine does not run (gone): this is of its last start."]
    assert answer({})["notes"] == []


def test_other_flags_are_planned() -> None:
    plan = answer({"max_model_len": 700_000, "kv_cache_dtype": "fp8"})
    assert plan["kv_cache"]["fits"]
    assert plan["command_line"] == "vllm serve MODEL --max-model-len 700000 --kv-cache-dtype fp8"


def test_a_wish_is_answered_with_its_flags_and_their_plan() -> None:
    plan = answer({"wish": "16 x 40k"})
    assert plan["wish"]["chosen"]["flags"] == plan["changed"] | {"max_model_len": 40_960}
    assert plan["kv_cache"]["max_concurrency"] >= 16
    assert plan["wish"]["fits"] is False
    assert "--gpu-memory-utilization" not in plan["command_line"]


def test_a_wish_with_images_limits_them_in_the_command_line() -> None:
    plan = answer({"wish": "2 x 1k + 2 images of 2040 tokens"})
    assert plan["changed"]["limit_mm_per_prompt"] == {"image": 2}
    assert plan["command_line"].endswith("--limit-mm-per-prompt '{\"image\": 2}'")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_model_lenght": 5}, "max_model_lenght: there is no such key; known: max_model_len"),
        ({"block_size": 64}, "block_size: 64 is not how the engine runs"),
        ({"wish": "much"}, "wish: 'much' is not understood"),
        ({"wish": "8 x 32k", "max_model_len": 5}, "max_model_len: a wish is answered with the flags that it needs"),
        ({"wish": "8 x 32k", "images_per_prompt": 5}, "images_per_prompt: a wish is answered"),
        ({f"flag_{number}": 1 for number in range(40)}, "40 flags are too many; at most 30"),
    ],
)
def test_what_cannot_be_planned_is_an_error_of_the_request(body: dict[str, Any], message: str) -> None:
    with pytest.raises(CannotPlan) as raised:
        answer(body)
    assert str(raised.value).startswith(message)
    assert raised.value.status == 422


def test_the_keys_that_are_named_are_all_that_there_are() -> None:
    with pytest.raises(CannotPlan) as raised:
        answer({"max_model_lenght": 5})
    assert set(str(raised.value).split("known: ")[1].split(", ")) == set(PlanRequest.model_fields)


def test_without_an_engine_the_input_is_not_what_is_refused() -> None:
    absent = replace(NOTHING_CACHED, ranks=(), engine=replace(NOTHING_CACHED.engine, state="gone", hint="not there"))
    with pytest.raises(NotAvailable, match="no worker of a running engine is read, so none can be planned: not there"):
        plan_answer(PlanRequest(), StartReports(EngineBudgets(Engine("http://engine"), None)), absent)


def test_an_engine_whose_start_is_not_known_is_reported() -> None:
    with pytest.raises(CannotPlan, match="no worker has reported its start yet"):
        answer({}, Starts("no worker has reported its start yet"))


def test_an_engine_of_which_a_worker_is_missing_is_not_planned() -> None:
    """The one that is missing may have the least memory."""
    with pytest.raises(CannotPlan, match="only 1 of the engine's 2 workers have reported"):
        answer({}, Starts(engine_of(started.story(), "0.12.0", 1)))


def test_an_image_without_a_size_is_the_average_of_the_encoder_cache() -> None:
    cached = replace(reading(), encoder_cache=EncoderCache(entries=3, device_bytes=1, embeds=100))
    plan = answer({"wish": "2 x 1k + 2 images"}, report=report_of(cached, reading(1)))
    assert plan["wish"]["image"]["embeddings"] == 34


async def test_a_few_wait_for_a_plan_and_the_next_is_refused_at_once() -> None:
    """Nobody is kept waiting behind a queue that any caller may fill; those who wait have their turn, one by one."""
    turns, ends, planned = Turns(2), asyncio.Event(), []

    async def plan(number: int) -> None:
        async with turns.next():
            planned.append(number)
            await ends.wait()

    async with asyncio.TaskGroup() as callers:
        for number in range(3):
            callers.create_task(plan(number))
        await asyncio.sleep(0)
        with pytest.raises(TooManyWaiting, match="2 wait for theirs; at most 2 may wait") as raised:
            await plan(3)
        assert (raised.value.status, planned) == (503, [0])
        ends.set()
    assert planned == [0, 1, 2]
    await plan(4)
    assert planned[-1] == 4


async def test_a_caller_that_gives_up_leaves_its_place() -> None:
    turns = Turns(0)

    async def plan() -> None:
        async with turns.next():
            await asyncio.Event().wait()

    for _ in range(2):
        caller = asyncio.create_task(plan())
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    async with turns.next():
        pass
