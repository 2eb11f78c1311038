"""Moves of many bytes are asked for in rounds: each stops the engine for a bounded time only."""

from __future__ import annotations

import json

import pytest

from highwater.act.remedies import NO_OPTIONS, RunOptions, TrimEncoderCache, call_workers_in_rounds
from highwater.model.remedies import Target
from highwater.model.units import MIB
from highwater.process.errors import EngineError
from tests.fakes.engine import IMAGE_BYTES, IMAGES, FakeEngine


@pytest.fixture
def fake() -> FakeEngine:
    engine = FakeEngine()
    engine.serve_images()
    for worker in engine.workers:
        worker.entries_a_call = 4
    return engine


@pytest.fixture(autouse=True)
def rests(monkeypatch) -> list[float]:
    """How long was rested between two calls; nothing waits for that."""
    rested: list[float] = []

    async def rest(seconds: float) -> None:
        rested.append(seconds)

    monkeypatch.setitem(call_workers_in_rounds.__kwdefaults__, "pause", rest)
    return rested


def payloads(fake: FakeEngine) -> list[dict[str, object]]:
    return [json.loads(json.loads(call.body)["args"][1]) for call in fake.calls]


async def test_a_trim_goes_on_until_its_target_is_reached(engine, fake, rests):
    run = await TrimEncoderCache().run(engine, RunOptions(target=Target(free_bytes=10 * IMAGE_BYTES)))
    assert (run.ok, run.reason, fake.ops()) == (True, None, ["trim"] * 3)
    assert [answer["spilled_entries"] for answer in run.detail] == [10, 10]
    assert [answer["asked_bytes"] for answer in run.detail] == [10 * IMAGE_BYTES] * 2
    assert run.detail[0]["elapsed_ms"] == 36.0
    assert rests == [0.012, 0.012]


@pytest.mark.parametrize(
    ("images", "target", "reason"),
    [
        (
            0,
            Target(free_bytes=1 << 30),
            "rank 0 could move nothing of the 1.00 GiB asked for: its device holds no encoder",
        ),
        (0, Target(), "rank 0 could move nothing: its device holds no encoder outputs"),
        (IMAGES, Target(free_bytes=2 * IMAGES * IMAGE_BYTES), ": its device holds no more encoder outputs"),
        (IMAGES, Target(keep_bytes=IMAGES * IMAGE_BYTES), None),
    ],
)
async def test_a_trim_that_fell_short_says_so(engine, fake, images, target, reason):
    """A caller who asked for a size must not take "done" for it; a cache within its limit has nothing to say."""
    for worker in fake.workers:
        worker.entries = dict(list(worker.entries.items())[:images])
    run = await TrimEncoderCache().run(engine, RunOptions(target=target))
    assert run.ok
    assert (run.reason is None) if reason is None else (reason in run.reason)


def answering(fake: FakeEngine, *answers: dict[str, object]) -> None:
    """Let the workers answer so, each complete unless it says otherwise."""
    told = [{"ok": True, "op": "trim", "complete": True} | answer for answer in answers]
    fake.garble = lambda _: {"results": [json.dumps(answer) for answer in told]}


def moved(size: float, *, asked: float | None = 100, held: float = 50, **more: object) -> dict[str, object]:
    """A worker's answer to a trim, in MiB."""
    sizes = {"asked_bytes": None if asked is None else int(asked * MIB), "spilled_bytes": int(size * MIB)}
    return {"rank": 0, "dp_rank": 0, "encoder_cache": {"device_bytes": int(held * MIB)}} | sizes | more


ALL_OF_IT = moved(100)
ONLY_HALF = "could move only 0.049 GiB of the 0.098 GiB asked for"


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([ALL_OF_IT, moved(50, rank=1)], f"rank 1 {ONLY_HALF}"),
        ([moved(70), moved(50, rank=1), moved(60, rank=2)], f"rank 1 {ONLY_HALF}"),
        ([moved(70), moved(50, rank=0, dp_rank=1)], f"rank 1.0 {ONLY_HALF}"),
        ([ALL_OF_IT, moved(0, rank=1)], "rank 1 could move nothing of the 0.098 GiB asked for"),
        ([moved(5, asked=None), moved(0, asked=None, rank=1)], "rank 1 could move nothing"),
        ([moved(99.99), ALL_OF_IT], None),
        ([moved(99), ALL_OF_IT], "rank 0 could move only 0.097 GiB of the 0.098 GiB asked for"),
        ([moved(50, held=0)], f"rank 0 {ONLY_HALF}: its device holds no more encoder outputs"),
        ([moved(50, kept={"needed_entries": 3})], f"rank 0 {ONLY_HALF}: 3 entries are needed by requests"),
        (
            [moved(50, held=0, kept={"over_budget_entries": 4, "unspillable_entries": 5, "needed_entries": 0})],
            f"rank 0 {ONLY_HALF}: 4 entries do not fit into the host's budget, 5 entries cannot be copied",
        ),
    ],
)
async def test_the_rank_that_fell_short_most_is_named_with_its_reason(engine, fake, answers, reason):
    answering(fake, *answers)
    run = await TrimEncoderCache().run(engine, RunOptions(target=Target(free_bytes=100 * MIB)))
    assert (run.ok, run.reason) == (True, reason)


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        ({"spilled_bytes"}, None),
        ({"encoder_cache"}, f"rank 0 {ONLY_HALF}"),
        ({"rank", "dp_rank"}, f"rank ? {ONLY_HALF}"),
        ({"asked_bytes"}, None),
    ],
)
@pytest.mark.parametrize("odd", [{}, None])
async def test_an_answer_that_lacks_a_figure_does_not_hide_what_was_moved(engine, fake, dropped, reason, odd):
    whole = moved(50)
    answer = {key: value for key, value in whole.items() if key not in dropped}
    answering(fake, answer if odd is None else answer | dict.fromkeys(dropped, odd if "rank" not in dropped else None))
    run = await TrimEncoderCache().run(engine, RunOptions(target=Target(free_bytes=100 * MIB)))
    assert (run.ok, run.reason, len(run.detail)) == (True, reason, 1)


@pytest.mark.parametrize("dropped", ["encoder_cache", "remaining_bytes"])
async def test_an_answer_that_does_not_say_what_is_left_ends_the_rounds(engine, fake, dropped):
    """The first request again would move more than was asked for; what was moved is returned."""
    whole = moved(50, complete=False, remaining_bytes=50 * MIB, remaining_entries=1)
    answering(fake, {key: value for key, value in whole.items() if key != dropped})
    run = await TrimEncoderCache().run(engine, RunOptions(target=Target(free_bytes=100 * MIB)))
    assert (run.ok, run.reason, fake.ops()) == (
        False,
        "after a part of it: a worker does not say how much is left",
        ["trim"],
    )
    assert run.detail[0]["rank"] == 0


@pytest.mark.parametrize("other", [{}, {"complete": False, "remaining_bytes": 40 * MIB}], ids=["done", "less left"])
async def test_ranks_that_end_in_different_ways_are_asked_again_together(engine, fake, other):
    calls = iter([moved(50, complete=False, remaining_bytes=20 * MIB), moved(100)])
    others = iter([ALL_OF_IT | other, ALL_OF_IT])
    fake.garble = lambda _: {
        "results": [json.dumps({"ok": True, "op": "trim"} | one) for one in (next(calls), next(others))]
    }
    run = await TrimEncoderCache().run(engine, RunOptions(target=Target(free_bytes=100 * MIB)))
    assert run.ok
    assert payloads(fake)[1] == {"keep_bytes": 30 * MIB}


async def test_ranks_that_came_further_end_where_the_others_do(engine, fake):
    """They hold the same outputs, and one that let go more would bring it back for nothing."""
    fake.workers[1].entries_a_call = 7
    await TrimEncoderCache(host_budget_bytes=9).run(engine, RunOptions(target=Target(free_bytes=10 * IMAGE_BYTES)))
    assert [len(worker.spilled) for worker in fake.workers] == [10, 10]
    keep = {"keep_bytes": (IMAGES - 10) * IMAGE_BYTES, "host_budget_bytes": 9}
    assert payloads(fake) == [{"free_bytes": 10 * IMAGE_BYTES, "host_budget_bytes": 9}, keep, keep]


async def test_without_a_target_everything_goes(engine, fake):
    run = await TrimEncoderCache().run(engine, NO_OPTIONS)
    assert [answer["spilled_entries"] for answer in run.detail] == [IMAGES] * 2
    assert payloads(fake) == [{}] * 8


async def test_what_takes_too_long_is_left_and_said(engine, fake):
    now = iter(range(0, 1000, 10))
    run = await call_workers_in_rounds(engine, "trim", {}, clock=lambda: next(now))
    assert (run.ok, [answer["spilled_entries"] for answer in run.detail]) == (True, [12, 12])
    assert run.reason == "stopped after 30 s: up to 19 entries (2.26 GiB) a rank are left; ask again"


async def test_a_refusal_after_a_part_of_it_is_the_end_of_it(engine, fake):
    fake.garble = refusing_from(2, fake)
    run = await TrimEncoderCache().run(engine, NO_OPTIONS)
    assert (run.ok, run.refused, [answer["spilled_entries"] for answer in run.detail]) == (True, False, [4, 4])
    assert run.reason == "after a part of it: 2 of 2 ranks: the host's budget is used up"


async def test_a_failure_after_a_part_of_it_is_a_failure(engine, fake):
    def gone(answers):
        fake.failing["/collective_rpc"] = 500
        return {"results": [json.dumps(answer) for answer in answers]}

    fake.garble = gone
    run = await TrimEncoderCache().run(engine, NO_OPTIONS)
    assert (run.ok, [answer["spilled_entries"] for answer in run.detail]) == (False, [4, 4])
    assert (run.reason or "").startswith("after a part of it: ")


async def test_an_engine_that_gives_no_answer_at_all_raises(engine, fake):
    fake.failing["/collective_rpc"] = 500
    with pytest.raises(EngineError):
        await TrimEncoderCache().run(engine, NO_OPTIONS)


async def test_workers_that_know_no_rounds_are_asked_once(engine, fake):
    def older(answers):
        return {"results": [json.dumps({k: v for k, v in one.items() if k != "complete"}) for one in answers]}

    fake.garble = older
    assert (await TrimEncoderCache().run(engine, NO_OPTIONS)).ok
    assert fake.ops() == ["trim"]


def refusing_from(call: int, fake: FakeEngine):
    no = {"ok": False, "error": {"code": "refused", "message": "the host's budget is used up"}}

    def garble(answers):
        refuse = len(fake.ops()) >= call
        return {"results": [json.dumps(one | no if refuse else one) for one in answers]}

    return garble
