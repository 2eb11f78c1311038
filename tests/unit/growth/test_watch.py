"""Floors are taken while the engine is idle only, kept over a restart of the sidecar, and judged at a bounded cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from highwater.growth.book import MAX_FILE_BYTES, FloorBook, FloorFile
from highwater.growth.series import (
    MAX_FLOORS,
    Bound,
    Measured,
    SeriesKey,
    device_series,
    superfluous,
)
from highwater.growth.watch import JUDGED_AT_ONCE, GrowthWatch, IdlePeriod, follow, is_due
from highwater.model.components import account
from highwater.model.engine import EngineStatus, Progress, WorkCounts
from highwater.model.rank import Components, Device, EncoderCache, Launch, RankReading, WorkerMemory
from highwater.model.report import Report
from highwater.model.units import GIB, MIB
from highwater.process.clocks import Clocks
from highwater.process.errors import UnknownName
from highwater.watch.history import History
from tests.fakes.clock import FakeClock

BOOT = "boot-1"


def rank(number: int = 0, *, tensors: float = 0.0, pid: int = 7, **changes: object) -> RankReading:
    worker = WorkerMemory(
        rank=number,
        host="node",
        pid=pid,
        pid_started=100 + pid,
        taken_at=0.0,
        device=Device(type="npu", index=number),
        total_bytes=64 * GIB,
        free_bytes=4 * GIB,
        used_bytes=60 * GIB,
    )
    parts = Components(weights_bytes=30 * GIB, other_tensors_bytes=int(GIB + tensors), torch_cached_bytes=600 * MIB)
    return replace(account(worker), **{"components": parts, "releasable_bytes": 500 * MIB, **changes})


def report(*ranks: RankReading, requests: float = 0.0, running: int = 0, **changes: object) -> Report:
    work = WorkCounts(requests=requests, images=requests, new_images=requests, tokens=100 * requests)
    status = EngineStatus(url="http://e", state="ready", requests_running=running, requests_waiting=0, work=work)
    return replace(Report(engine=status, ranks=ranks, stale=False), **changes)


async def no_series(_: float) -> list[Measured]:
    return []


class Watched:
    """A watch, its clock, and the traffic that it sees."""

    def __init__(self, path: Path | None = None, *, boot: str = BOOT, start: float = 1000.0) -> None:
        self.clock = FakeClock(start)
        self.history = History(10)
        self.watch = GrowthWatch(
            self.history,
            FloorFile(path, boot=boot),
            host_series=no_series,
            clocks=Clocks(self.clock, lambda: 1.7e9 + self.clock.now),
        )
        self.requests = 0

    async def see(self, seen: Report) -> None:
        self.watch.notice(seen)
        await self.watch.look(seen)

    async def burst(self, requests: int, *ranks: RankReading, idle: int = 16) -> None:
        await self.see(report(*ranks, requests=self.requests, running=1))
        self.requests += requests
        for _ in range(idle):
            self.clock.now += 1
            await self.see(report(*ranks, requests=self.requests))

    def verdict(self, measure: str = "other_tensors_bytes") -> str:
        (found,) = [one for one in self.watch.verdicts() if one.measure == measure]
        return found.verdict


async def leaking(watched: Watched, bursts: int = 30) -> None:
    for number in range(bursts):
        requests = (3, 9, 1, 7)[number % 4]
        await watched.burst(requests, rank(tensors=8.0 * MIB * (watched.requests + requests)))


async def test_a_leak_is_found_named_and_recorded():
    watched = Watched()
    await leaking(watched)
    found = watched.watch.verdicts()[0]
    assert (found.series, found.verdict) == ("rank 0 other_tensors_bytes", "leak")
    assert found.rate.per_driver == pytest.approx(8 * MIB)
    assert found.exhausted_at is not None
    assert found.limit_by == "the memory of its device"
    assert watched.verdict("weights_bytes") == watched.verdict("torch_cached_bytes") == "flat"
    assert [event.summary for event in watched.history.events()] == ["rank 0 other_tensors_bytes leaks"]


async def test_a_series_is_found_by_its_name_and_by_its_title():
    watched = Watched()
    with pytest.raises(UnknownName, match=r"series: 'nothing' is not known; allowed: none yet"):
        watched.watch.find("nothing")
    await leaking(watched)
    found = watched.watch.find("rank 0 other_tensors_bytes")
    assert found in watched.watch.verdicts()
    assert watched.watch.find("rank 0: other tensors") == found
    with pytest.raises(UnknownName, match=r"'nothing' is not known; allowed: 'rank 0 other_tensors_bytes', 'rank 0 "):
        watched.watch.find("nothing")


async def test_nothing_is_measured_under_load():
    watched = Watched()
    for _ in range(50):
        await watched.see(report(rank(tensors=9 * GIB), running=2))
        watched.clock.now += 1
    for _ in range(2):
        await watched.see(report(rank(tensors=9 * GIB)))
        watched.clock.now += 1
    assert watched.watch.data("rank 0 other_tensors_bytes") == []


async def test_the_verdict_on_an_engine_that_is_gone_is_about_the_past():
    watched = Watched()
    await leaking(watched)
    gone = report()
    await watched.see(replace(gone, stale=True, engine=replace(gone.engine, state="gone")))
    found = watched.watch.verdicts()[0]
    assert (found.verdict, found.is_over, found.exhausted_at) == ("leak", True, None)
    assert found.text.startswith("it leaked ")
    assert found.text.endswith("its process has ended, so that no floor is added")


async def test_of_an_engine_that_is_gone_no_further_floor_is_promised():
    """Nor in the data: every sentence is of the past."""
    watched = Watched()
    await watched.burst(1, rank(tensors=GIB))
    assert "one is taken" in watched.watch.verdicts()[0].text
    gone = report()
    await watched.see(replace(gone, stale=True, engine=replace(gone.engine, state="gone")))
    for one in watched.watch.verdicts():
        assert (one.verdict, one.is_over) == ("not_known", True)
        assert one.text == (
            "its floors were too few, or rose in too many ways, for a verdict; "
            "its process has ended, so that no floor is added"
        )


async def test_another_process_begins_anew():
    watched = Watched()
    await leaking(watched)
    await watched.burst(1, rank(tensors=0, pid_started=999))
    assert len(watched.watch.data("rank 0 other_tensors_bytes")) == 1
    assert watched.verdict() == "not_known"


async def test_a_restarted_sidecar_goes_on(tmp_path: Path):
    path = tmp_path / "state.growth"
    before = Watched(path)
    await leaking(before)
    kept = before.watch.data("rank 0 other_tensors_bytes")
    after = Watched(path, start=before.clock.now + 5)
    assert after.watch.data("rank 0 other_tensors_bytes") == kept
    after.requests = before.requests
    await after.burst(2, rank(tensors=8.0 * MIB * (before.requests + 2)))
    assert after.verdict() == "leak"
    assert Watched(path, boot="boot-2", start=before.clock.now + 5).watch.data("rank 0 other_tensors_bytes") == []
    assert Watched(path, start=500.0).watch.data("rank 0 other_tensors_bytes") == []


async def test_a_broken_file_costs_its_broken_lines(tmp_path: Path):
    path = tmp_path / "state.growth"
    before = Watched(path)
    await leaking(before, bursts=5)
    kept = before.watch.data("rank 0 other_tensors_bytes")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"place": "moon"}\n', b"\xff\n", *lines[2:], lines[-1][:40]]))
    assert Watched(path, start=before.clock.now + 5).watch.data("rank 0 other_tensors_bytes") == kept


async def test_a_folder_in_the_files_place_is_reported(tmp_path: Path):
    watched = Watched(tmp_path)
    await leaking(watched)
    assert watched.verdict() == "leak"
    assert watched.watch._file.problem is not None


def test_releasable_bytes_are_no_growth():
    (reserve,) = [one for one in device_series(rank()) if one.key.measure == "torch_cached_bytes"]
    assert reserve.value == 100 * MIB
    assert reserve.room == 4 * GIB + 500 * MIB


def test_the_encoder_caches_budget_is_its_bound():
    cache = EncoderCache(entries=2, device_bytes=10 * MIB, embeds=100, capacity_embeds=1000)
    full = rank(components=Components(encoder_cache_bytes=10 * MIB), encoder_cache=cache)
    (one,) = device_series(full)
    assert one.bounds == (Bound(limit=100 * MIB, what="the encoder cache's budget"),)


@pytest.mark.parametrize(
    "change",
    [
        {"stale": True},
        {"progress": Progress(verdict="progressing", since_seconds=1.0, ranks=(), summary="")},
        {"engine": replace(report().engine, requests_waiting=1)},
        {"engine": replace(report().engine, requests_running=None)},
        {"engine": replace(report().engine, state="sleeping")},
        {"engine": replace(report().engine, state="busy")},
        {"engine": replace(report().engine, work=WorkCounts(requests=1))},
    ],
)
def test_a_rest_ends_with_any_sign_of_work(change: dict[str, object]):
    idle = follow(follow(IdlePeriod(), report(), 10.0), report(), 20.0)
    assert idle.seconds(20.0) == 10.0
    assert follow(idle, report(**change), 21.0).seconds(21.0) == 0.0


def test_a_floor_is_taken_once_a_rest_and_once_a_minute():
    idle = IdlePeriod(since=100.0)
    assert not is_due(idle, None, 102.9, idle_seconds=3.0)
    assert is_due(idle, None, 103.0, idle_seconds=3.0)
    assert is_due(idle, 90.0, 103.0, idle_seconds=3.0)
    assert not is_due(idle, 103.0, 162.0, idle_seconds=3.0)
    assert is_due(idle, 103.0, 163.0, idle_seconds=3.0)
    assert not is_due(IdlePeriod(), None, 163.0, idle_seconds=3.0)


def test_a_day_fits_and_the_newest_floors_stay():
    times: list[float] = []
    for second in range(0, 86_400, 20):
        times.append(float(second))
        if len(times) > MAX_FLOORS:
            del times[superfluous(times)]
    assert len(times) == MAX_FLOORS
    assert times[:4] == [0.0, 20.0, 40.0, 60.0]
    assert times[-40:] == [86_380.0 - 20 * n for n in reversed(range(40))]
    assert max(two - one for one, two in pairwise(times)) < 3600


def _many(value: float) -> Iterable[Measured]:
    for owner in range(8):
        for measure in range(30):
            key = SeriesKey(f"worker rank {owner}", f"measure {measure} bytes", "host", "bytes", f"host/{owner}/1")
            yield Measured(key=key, value=GIB + (value * MIB if measure % 10 == 0 else measure), room=float(GIB))


@pytest.mark.slow("days of a simulated engine")
@pytest.mark.untraced
async def test_eight_ranks_of_thirty_series_over_a_day_cost_little(tmp_path: Path):
    """Under 10 ms of this process's CPU a second, with a tenth of the series leaking; and the file stays bounded.

    A day of floors is taken first; then some minutes of traffic are measured, at a poll a second.
    """
    watched, path = Watched(tmp_path / "growth"), tmp_path / "growth"
    work = [0.0]

    async def series(_: float) -> list[Measured]:
        return list(_many(work[0]))

    watch = GrowthWatch(
        watched.history,
        FloorFile(path, boot=BOOT),
        host_series=series,
        clocks=Clocks(watched.clock, watched.clock),
    )
    book = watch._books["host"]
    for number in range(600):
        work[0] += 1 + number % 7
        at = 1000.0 + 144.0 * number
        counts = WorkCounts(requests=work[0], images=work[0], new_images=work[0], tokens=work[0] * 90)
        book.add(at, at, counts, {one.key: one.value for one in _many(work[0])})
        watched.clock.now = at
    began, seconds = time.process_time(), 0
    for number in range(12):
        for second in range(20):
            seen = report(rank(device=Device(type="cpu")), requests=work[0], running=int(second < 4))
            watch.notice(seen)
            await watch.look(seen)
            watched.clock.now += 1
            seconds += 1
        work[0] += 1 + number % 7
    spent = (time.process_time() - began) / seconds
    assert len(book.rows) == MAX_FLOORS
    assert path.stat().st_size < MAX_FILE_BYTES
    assert sum(one.verdict == "leak" for one in watch.verdicts()) > 0
    assert spent < 0.010, f"{spent * 1000:.2f} ms a second"
    assert JUDGED_AT_ONCE == 2


async def test_the_file_is_written_anew_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("highwater.growth.book.MAX_FILE_BYTES", 60_000)
    watched = Watched(tmp_path / "growth")
    sizes = []
    for number in range(120):
        await watched.burst(1 + number % 3, rank(tensors=number * MIB), idle=5)
        sizes.append((tmp_path / "growth").stat().st_size)
    assert max(sizes) <= 60_000
    lines = (tmp_path / "growth").read_text().splitlines()
    assert json.loads(lines[-1])["work"][0] == watched.requests


def test_counts_that_begin_again_are_another_engines():
    book, key = FloorBook(), SeriesKey("rank 0", "weights_bytes", "device", "bytes", "a")
    assert book.add(1.0, 1.0, WorkCounts(requests=50), {key: 1.0})
    assert book.add(2.0, 2.0, WorkCounts(requests=3), {key: 1.0})
    assert not book.add(2.0, 3.0, WorkCounts(requests=4), {key: 1.0})
    assert [row.at for row in book.rows] == [2.0]


async def slept(watched: Watched, used: float, *, seconds: int = 5, awake: int = 3, **changes: object) -> None:
    """A cycle: some requests, then a sleep that leaves so many GiB in use."""
    watched.requests += 2
    for _ in range(awake):
        watched.clock.now += 20
        await watched.see(report(rank(), requests=watched.requests))
    sizes = {"used_bytes": int(used * GIB), "free_bytes": int((64 - used) * GIB)}
    left = rank(**sizes | {"asleep_tags": ("weights",)} | changes)
    seen = report(left, requests=watched.requests)
    for _ in range(seconds):
        watched.clock.now += 1
        await watched.see(replace(seen, engine=replace(seen.engine, state="sleeping")))


async def test_what_each_sleep_leaves_behind_is_a_series_with_one_floor_a_sleep():
    """1.26 GiB, 1.50, 1.73, 1.97, ...: about 240 MiB a cycle, until a wake-up runs out of memory."""
    watched = Watched()
    for cycle in range(20):
        await slept(watched, 1.26 + 0.2365 * cycle, seconds=4 + cycle % 3, awake=2 + cycle % 5)
    found = watched.watch.find("rank 0 used_asleep_bytes")
    assert (found.verdict, found.place, found.limit_by) == ("leak", "asleep", "the memory of its device")
    assert (found.rate.driver, found.rate.per_driver) == ("sleep", pytest.approx(0.2365 * GIB))
    assert "release" in (found.advice or "")
    assert len(watched.watch.data("rank 0 used_asleep_bytes")) == 20


async def test_a_few_sleeps_that_leave_more_each_time_are_said_with_the_remedy():
    watched = Watched()
    for cycle in range(8):
        await slept(watched, 1.26 + 0.2365 * cycle)
    found = watched.watch.find("rank 0 used_asleep_bytes")
    assert (found.verdict, found.text[:9]) == ("not_known", "it rises,")
    assert "while the engine sleeps" in (found.advice or "")


async def test_sleeps_that_leave_the_same_behind_are_flat():
    watched = Watched()
    for cycle in range(12):
        await slept(watched, 1.26 + 0.0001 * (cycle % 2))
    found = watched.watch.find("rank 0 used_asleep_bytes")
    assert (found.verdict, found.advice) == ("flat", None)


@pytest.mark.parametrize(
    "changes",
    [{"seconds": 2}, {"asleep_tags": (), "age_seconds": 30.0}, {"device": Device(type="cpu")}],
    ids=["not settled", "read before it", "CPU"],
)
async def test_a_sleep_that_was_not_seen_has_no_floor(changes):
    """A reading of the time before would be the awake engine's."""
    watched = Watched()
    for _ in range(3):
        await slept(watched, 1.26, **changes)
    assert watched.watch.data("rank 0 used_asleep_bytes") == []


async def test_sleeps_are_counted_on_over_a_restart_of_the_sidecar(tmp_path):
    watched = Watched(tmp_path / "floors")
    for cycle in range(4):
        await slept(watched, 1.26 + 0.24 * cycle)
    again = Watched(tmp_path / "floors", start=watched.clock.now)
    again.requests = watched.requests
    await slept(again, 2.3)
    assert [floor.sleeps for floor in again.watch.data("rank 0 used_asleep_bytes")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("segments", "has_encoder", "is_said"), [(False, True, True), (False, False, False), (True, True, False)]
)
async def test_non_torch_growth_on_an_npu_names_its_known_cause(segments, has_encoder, is_said):
    watched = Watched()
    cache = EncoderCache(entries=1, device_bytes=1) if has_encoder else None
    launch = Launch(expandable_segments=segments)
    for number in range(16):
        parts = Components(weights_bytes=30 * GIB, non_torch_bytes=GIB + 40 * MIB * number)
        await watched.burst(2, rank(components=parts, launch=launch, encoder_cache=cache))
    found = watched.watch.find("rank 0 non_torch_bytes")
    assert ("PYTORCH_NPU_ALLOC_CONF=expandable_segments:True" in (found.advice or "")) is is_said


async def under_load(watched: Watched, minutes: float, mib_a_minute: float, *, clients: int = 3) -> None:
    """Requests that never pause, one a second for each client, and a rank whose tensors grow by the clock."""
    for _ in range(int(minutes * 60)):
        watched.clock.now += 1
        watched.requests += clients
        grown = (watched.clock.now - 1000.0) / 60 * mib_a_minute * MIB
        await watched.see(report(rank(tensors=grown), requests=watched.requests, running=clients))


async def test_an_engine_that_is_never_idle_gets_a_verdict_by_windows_of_equal_work():
    watched = Watched()
    await under_load(watched, 6, 240)
    found = watched.watch.verdicts()[0]
    assert (found.series, found.verdict, found.ground) == ("rank 0 other_tensors_bytes", "leak", "equal_work")
    assert found.rate.low < found.rate.per_driver == pytest.approx(240 * 60 * MIB, rel=0.01)
    assert found.text.endswith(
        "; requests that each hold more bytes, such as larger images, look the same "
        "(by the lowest value of each 15 s with as many requests, for lack of idle floors)"
    )
    assert watched.watch.data(found.series) == []
    assert len(watched.watch.data(found.series, found.ground)) == 24
    assert [event.summary for event in watched.history.events()] == ["rank 0 other_tensors_bytes leaks"]


async def test_what_a_vllm_does_not_count_is_no_measure_of_its_load():
    """0.11.0 has no count of images; and a cache that a relief has emptied is no divisor."""
    watched = Watched()
    for second in range(80 * 60):
        watched.clock.now += 1
        grown = 0.0 if second > 79 * 60 else second * 4.0 * MIB
        seen = report(rank(tensors=grown), requests=float(second), running=4)
        work = replace(seen.engine.work, images=None, new_images=None)
        await watched.see(replace(seen, engine=replace(seen.engine, work=work)))
    assert "rank 0 other_tensors_bytes leaks" in [event.summary for event in watched.history.events()]


async def test_growth_under_load_that_a_warm_up_may_make_takes_an_hour():
    watched = Watched()
    await under_load(watched, 30, 2)
    assert (watched.verdict(), watched.verdict("weights_bytes")) == ("not_known", "flat")
    (found,) = [one for one in watched.watch.verdicts() if one.measure == "other_tensors_bytes"]
    assert "takes growth by half, an even load for an hour, or idle floors" in found.text
    await under_load(watched, 45, 2)
    assert watched.verdict() == "leak"


async def test_memory_that_rises_with_the_load_is_no_leak():
    watched = Watched()
    for second in range(2400):
        watched.clock.now += 1
        running = 4 + second // 60
        watched.requests += running
        seen = report(rank(tensors=32.0 * MIB * running), requests=watched.requests, running=running)
        await watched.see(seen)
        assert "leak" not in {one.verdict for one in watched.watch.verdicts()}


async def test_idle_floors_of_late_decide_and_old_ones_do_not():
    watched = Watched()
    for _ in range(12):
        await watched.burst(3, rank())
    assert watched.verdict() == "flat"
    begun = watched.clock.now
    for second in range(3000):
        watched.clock.now += 1
        watched.requests += 3
        grown = rank(tensors=(watched.clock.now - begun) * 2 * MIB)
        await watched.see(report(grown, requests=watched.requests, running=3))
        if second == 600:
            assert watched.verdict() == "flat"
    (found,) = [one for one in watched.watch.verdicts() if one.measure == "other_tensors_bytes"]
    assert (found.verdict, found.ground) == ("leak", "equal_work")


async def test_a_process_that_began_under_load_is_not_over():
    watched = Watched()
    await watched.burst(1, rank())
    for _ in range(40):
        watched.clock.now += 1
        watched.requests += 3
        await watched.see(report(rank(), rank(1), requests=watched.requests, running=3))
    found = [one for one in watched.watch.verdicts() if one.owner == "rank 1"]
    assert found
    assert not any(one.is_over for one in found)
