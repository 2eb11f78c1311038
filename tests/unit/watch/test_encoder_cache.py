"""The entries of the encoder caches: read once a second at most, and written as JSON in pieces."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from highwater.process.clocks import Clocks
from highwater.process.errors import EngineError, EngineGarbled
from highwater.watch.sources import KEPT_SECONDS, EncoderCacheEntries, RankEntries
from tests.fakes.engine import IMAGES, FakeClock, changed


async def test_entries_are_asked_for_once_a_second_at_most(engine, fake):
    fake.serve_images()
    clock = FakeClock()
    entries = EncoderCacheEntries(engine, clocks=Clocks(clock))
    first = await entries.of_workers()
    assert [len(rank.rows) for rank in first.ranks] == [IMAGES, IMAGES]
    assert await entries.of_workers() is first
    clock.advance(KEPT_SECONDS)
    assert entries.age_seconds(first) == KEPT_SECONDS
    assert await entries.of_workers() is not first
    assert fake.ops() == ["encoder_cache", "encoder_cache"]


async def test_thousands_of_entries_are_all_there(engine, fake):
    fake.serve_images(3000, size=10)
    reading = await EncoderCacheEntries(engine, clocks=Clocks(FakeClock())).of_workers()
    assert [len({row["mm_hash"] for row in rank.rows}) for rank in reading.ranks] == [3000, 3000]


@pytest.mark.parametrize(
    "changes", [{"ok": False, "error": {"code": "failed", "message": "x"}}, {"entries": None}, {"entries": 5}]
)
async def test_a_listing_that_failed_is_garbled_and_not_kept(engine, fake, changes):
    entries = EncoderCacheEntries(engine, clocks=Clocks(FakeClock()))
    fake.garble = changed(**changes)
    with pytest.raises(EngineGarbled, match="rank 1 could not list"):
        await entries.of_workers()
    fake.garble = None
    assert await entries.of_workers()


async def test_entries_of_recorders_and_workers_are_as_old_as_the_oldest(engine, fake):
    clock = FakeClock()
    entries = EncoderCacheEntries(engine, clocks=Clocks(clock))
    answered = await entries.of_workers()
    identity = SimpleNamespace(rank=0, dp_rank=0, host="a", pid=answered.ranks[0].head["pid"])
    record = SimpleNamespace(identity=identity, newest=None, entries_total=0, entry_rows=list, reading_age_seconds=2.0)
    ages = []
    for record.reading_age_seconds in (2.0, 90.0):
        clock.advance(5.0)
        mixed = await entries.as_known([record])
        assert [rank.is_recorded for rank in mixed.ranks] == [True, False]
        ages.append(entries.age_seconds(mixed))
    assert ages == [5.0, 90.0]


def names_of(text: bytes) -> list[str]:
    return [entry["mm_hash"] for entry in json.loads(text)["entries"]]


@pytest.mark.parametrize("limit", [0, 1, 249, 250, 251, 999, 1000, 5000])
async def test_as_many_entries_as_are_wanted_in_either_order(limit):
    """Written in pieces, each once: whoever wants more later gets what is there, and what is not."""
    rows = [{"mm_hash": f"{number}", "bytes": 1000 - number, "age_seconds": float(number)} for number in range(1000)]
    rank = RankEntries({"rank": 0, "entries_total": 1000}, rows)
    largest, oldest = [f"{number}" for number in range(1000)], [f"{number}" for number in reversed(range(1000))]
    for wanted in (limit, 600, limit):
        assert names_of(await rank.json(wanted, "bytes", None)) == largest[:wanted]
        assert names_of(await rank.json(wanted, "age", None)) == oldest[:wanted]
        assert names_of(await rank.json(wanted, "bytes", lambda name: f"a{name}")) == [
            f"a{n}" for n in largest[:wanted]
        ]
    assert json.loads(await rank.json(0, "bytes", None)) == {"rank": 0, "entries_total": 1000, "entries": []}


async def test_the_loop_turns_while_thousands_of_entries_are_written():
    """Once for each piece: the streams of the proxy wait for no more than one."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    before = turns
    await RankEntries({}, [{"mm_hash": "a"}] * 1000).json(1000, "bytes", None)
    assert turns - before >= 4
    counting.cancel()


async def test_entries_of_an_engine_that_is_gone(engine, fake):
    fake.down = True
    with pytest.raises(EngineError):
        await EncoderCacheEntries(engine, clocks=Clocks(FakeClock())).of_workers()
