"""The recorders, from our side: started with each life of the engine, read at each poll, and what is told."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.engine.client import Engine
from highwater.model.rank import Device, TorchMemory
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.watch.poller import MIN_READ_SECONDS
from highwater.watch.ranks import Sizes, missing_ranks
from highwater.watch.recorder.recorders import (
    RETRY_SECONDS,
    SAMPLES_WHOLE,
    STALE_SECONDS,
    WAIT_SECONDS,
    Coverage,
    Recorders,
    coverage,
    ranks_expected,
)
from highwater.watch.round import COUNTS_SETTLE_SECONDS
from tests.fakes.engine import IMAGE_BYTES, RECORDER_RATE, RECORDER_SECONDS, USED_READY, Core, FakeWorker, core_on
from tests.fakes.raising import raising
from tests.fakes.recorders import FakeRecorder
from tests.fakes.ring import MONO, WALL, FakeWriter
from tests.patience import patiently


@pytest.fixture
def fly(tmp_path, cores):
    """A maker of cores with recorders."""

    def make(version: str = "0.32.0", **knobs) -> Core:
        cores.append(core_on(version, recorder_dir=tmp_path, **knobs))
        return cores[-1]

    return make


@pytest.fixture
def core(fly) -> Core:
    return fly()


async def spared(core: Core, seconds: float = 1.0) -> Report:
    """A poll as the loop makes it."""
    return await core.tick(seconds, spare_idle=True)


async def aloft(core: Core) -> Core:
    """Two polls: the first starts the recorders, the second reads them."""
    await spared(core)
    await spared(core)
    core.fake.calls.clear()
    return core


async def at_work(core: Core, polls: int, seconds: float = 1.0) -> list[Report]:
    """Polls of an engine that makes steps all the time."""
    reports = []
    for _ in range(polls):
        core.fake.running, core.fake.tokens = 1, core.fake.tokens + 100
        core.clock.advance(seconds)
        core.fake.end_step()
        reports.append(await spared(core, 0.0))
    return reports


def starts(core: Core) -> list[dict[str, object]]:
    """What the workers were told of recorders."""
    calls = [call for call in core.fake.asked("/collective_rpc") if call.op == "recorder_start"]
    return [json.loads(json.loads(call.body)["args"][1]) for call in calls]


def heard(report: Report) -> list[tuple[int, int, str]]:
    return [(rank.dp_rank, rank.rank, rank.source) for rank in report.ranks]


def rings(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "recorder").glob("*.ring"))


def fall_silent(core: Core, worker: FakeWorker, how: str) -> None:
    """One of the ways in which a worker writes no more."""
    worker.recorder.works = False
    if how == "dead":
        core.fake.kill(worker)
    elif how == "stopped":
        core.fake.proc.begin(worker.pid, "T")
    elif how == "ended":
        worker.recorder.stop(core.clock.now)


async def restarted(core: Core) -> None:
    """The engine goes, which takes two polls to see, and comes back as other processes."""
    core.fake.down = True
    await spared(core, 0.0)
    await spared(core)
    core.fake.down = False
    core.fake.start_again()


def beside(core: Core, folder: Path) -> Recorders:
    """Those of another sidecar of the same engine."""
    return Recorders(
        core.engine, folder, rate=5.0, seconds=60.0, proc=core.fake.proc.path,
        clocks=Clocks(core.recorders._monotonic, core.clock), sleep=core.recorders._sleep,
    )  # fmt: skip


# --- starting ---


async def test_recorders_are_started_once(core, tmp_path):
    for _ in range(4):
        await core.tick()
    assert core.fake.polled()[:3] == ["recorder_start", "memory", "memory"]
    (payload,) = starts(core)
    instance = payload.pop("instance")
    assert payload == {
        "directory": str(tmp_path / "recorder"),
        "rate": RECORDER_RATE,
        "seconds": RECORDER_SECONDS,
    }
    assert rings(tmp_path) == [f"highwater-{instance}-4242.ring", f"highwater-{instance}-4243.ring"]
    assert core.poller.current().engine.hint is None


async def test_recorders_are_started_again_when_the_engine_is_back(core, tmp_path):
    await aloft(core)
    await restarted(core)
    await spared(core)
    assert heard(await spared(core)) == [(0, 0, "recorder"), (0, 1, "recorder")]
    assert len(starts(core)) == 1
    assert len(rings(tmp_path)) == 4
    assert len({name.split("-")[1] for name in rings(tmp_path)}) == 2


async def test_recorders_are_started_again_for_other_processes(core):
    await aloft(core)
    core.fake.start_again()
    report = await core.tick()
    assert [rank.pid for rank in report.ranks] == [4244, 4245]
    assert len(starts(core)) == 0
    await spared(core)
    assert [rank.pid for rank in (await spared(core)).ranks] == [4244, 4245]
    assert len(starts(core)) == 1
    assert {record.identity.pid for record in core.recorders.records} == {4244, 4245}


async def test_a_restart_is_seen_through_files_too(core):
    """While all is well the workers are asked seldom: files that are written no more are the sign."""
    await aloft(core)
    core.fake.start_again()
    reports = [await spared(core) for _ in range(6)]
    assert {report.engine.state for report in reports} == {"ready"}
    assert [rank.pid for rank in reports[-1].ranks] == [4244, 4245]
    assert len(starts(core)) == 1
    assert reports[-1].growth.since_ready_bytes == 0


async def test_a_second_sidecar_reads_the_first_ones_recorders(core, tmp_path):
    await aloft(core)
    second = beside(core, tmp_path / "recorder")
    await second.begin()
    assert second.files.instance == core.recorders.files.instance
    assert len(await second.read()) == 2
    assert (second.problem, second.must_begin()) == (None, False)
    assert {worker.recorder.options["rate"] for worker in core.fake.workers} == {RECORDER_RATE}
    assert len(rings(tmp_path)) == 2
    second.close()
    assert {record.status for record in await core.recorders.read()} == {"alive"}


async def test_where_two_sidecars_started_some_recorders_each_all_get_one_name(core, tmp_path):
    core.fake.workers[1].recorder.refuses = "OSError: no space left on device"
    await aloft(core)
    core.fake.workers[1].recorder.refuses = None
    second = beside(core, tmp_path / "recorder")
    await second.begin()
    assert {worker.recorder.options["instance"] for worker in core.fake.workers} == {core.recorders.files.instance}
    second.close()


async def test_recorders_that_write_elsewhere_are_told(core, tmp_path):
    await aloft(core)
    second = beside(core, tmp_path / "elsewhere")
    await second.begin()
    assert second.problem is not None
    assert f"write to {tmp_path / 'recorder'}, not {tmp_path / 'elsewhere'}" in second.problem
    second.close()


async def test_what_does_not_start_is_told_and_tried_again(core):
    for worker in core.fake.workers:
        worker.recorder.refuses = "OSError: no space left on device"
    report = await core.tick()
    assert report.engine.hint == "rank 0 did not start its recorder: OSError: no space left on device"
    assert (report.engine.state, heard(report), report.progress) == ("ready", [(0, 0, "rpc"), (0, 1, "rpc")], None)
    await core.tick(RETRY_SECONDS - 1.5)
    assert len(starts(core)) == 1
    for worker in core.fake.workers:
        worker.recorder.refuses = None
    assert (await core.tick(1.5)).engine.hint is None
    assert len(starts(core)) == 2
    assert heard(await spared(core)) == [(0, 0, "recorder"), (0, 1, "recorder")]


async def test_who_started_goes_on_while_the_others_are_tried_again(core, tmp_path):
    core.fake.workers[1].recorder.refuses = "OSError: no space left on device"
    await spared(core)
    report = await spared(core)
    assert heard(report) == [(0, 0, "recorder"), (0, 1, "rpc")], "who has none is known by its answer"
    assert (report.engine.hint or "").startswith("rank 1 did not start its recorder")
    core.fake.workers[1].recorder.refuses = None
    await spared(core, RETRY_SECONDS)
    assert heard(await spared(core)) == [(0, 0, "recorder"), (0, 1, "recorder")]
    assert len({payload["instance"] for payload in starts(core)}) == 1
    assert len(rings(tmp_path)) == 2


async def test_nobody_is_tried_again_in_a_long_step(core):
    core.fake.workers[1].recorder.refuses = "OSError: no space left on device"
    await aloft(core)
    core.fake.hang = asyncio.Event()
    core.fake.begin_step()
    for _ in range(40):
        await spared(core, 2.0)
    assert core.fake.ops() == []
    core.fake.hang = None
    core.fake.end_step()
    await spared(core)
    await spared(core)
    assert core.fake.ops()[:2] == ["memory", "recorder_start"]


async def test_a_refused_call_is_told(core):
    core.fake.failing["/collective_rpc"] = 500
    await core.tick()
    assert core.recorders.problem == "the recorders were not started: worker call recorder_start answered 500"


async def test_a_start_that_comes_late_counts(core):
    core.fake.hang = asyncio.Event()
    report = await core.tick()
    assert report.engine.state == "busy"
    core.fake.hang.set()
    await asyncio.wait({core.engine._outstanding})
    core.fake.hang = None
    report = await spared(core)
    assert (report.engine.state, report.progress.verdict, len(starts(core))) == ("ready", "idle", 1)
    assert (await spared(core)).engine.hint is None
    await spared(core, RETRY_SECONDS)
    assert len(starts(core)) == 1


async def test_an_engine_without_the_extension_gets_no_recorders(fly):
    """The call would put its queues out of step."""
    core = fly(extension=None)
    await core.tick()
    assert core.fake.ops() == []
    assert "worker-extension-cls" in (core.poller.current().engine.hint or "")


async def test_files_that_are_elsewhere_are_told(core, tmp_path):
    await spared(core)
    for path in (tmp_path / "recorder").iterdir():
        path.unlink()
    report = await spared(core)
    assert "has the files of 0 of 2 workers: do all have it under the same path?" in (report.engine.hint or "")
    assert (report.progress, heard(report)) == (None, [(0, 0, "rpc"), (0, 1, "rpc")])


async def test_a_file_that_was_taken_away_comes_back(core, tmp_path):
    await aloft(core)
    before = rings(tmp_path)
    (tmp_path / "recorder" / before[1]).unlink()
    report = await spared(core, 2.0)
    assert "has the files of 1 of 2 workers" in (report.engine.hint or "")
    await spared(core, RETRY_SECONDS)
    report = await spared(core)
    assert (report.engine.hint, heard(report)) == (None, [(0, 0, "recorder"), (0, 1, "recorder")])
    assert rings(tmp_path) == before
    assert len(starts(core)) == 1


async def test_a_file_that_is_no_good_is_told(core, tmp_path):
    await spared(core)
    name = rings(tmp_path)[1]
    (tmp_path / "recorder" / name).write_bytes(b"nonsense")
    report = await spared(core, 2.0)
    assert (report.engine.hint or "").startswith(name)
    assert heard(report)[0] == (0, 0, "recorder")


async def test_files_of_former_lives_go_after_a_while(core, tmp_path):
    await aloft(core)
    first = set(rings(tmp_path))
    await restarted(core)
    for name in first:
        os.utime(tmp_path / "recorder" / name, (core.clock.now, core.clock.now))
    await spared(core)
    assert (len(rings(tmp_path)), first <= set(rings(tmp_path))) == (4, True)
    await spared(core, STALE_SECONDS + 1)
    assert first.isdisjoint(rings(tmp_path))
    assert len(rings(tmp_path)) == 2


# --- who is heard of ---

LAYOUTS = {
    "tp 2": {"tensor_parallel": 2},
    "pp 2": {"tensor_parallel": 1, "pipeline_parallel": 2},
    "dp 2": {"tensor_parallel": 1, "data_parallel": 2},
    "dp 2 x tp 2": {"tensor_parallel": 2, "data_parallel": 2},
    "dp 2 x pp 2 x tp 2": {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_rank_is_heard_of_once(fly, layout):
    core = fly(**LAYOUTS[layout])
    await core.tick()
    report = await core.tick()
    there = [(worker.dp_rank, worker.rank) for worker in core.fake.workers]
    assert heard(report) == [(dp, rank, "recorder" if dp else "rpc") for dp, rank in there]
    assert (report.ranks_expected, report.ranks_reported, report.ranks_missing) == (len(there), len(there), ())
    assert (report.engine.state, report.engine.hint, report.stale) == ("ready", None, False)
    assert [rank.used_bytes for rank in report.ranks] == [USED_READY] * len(there)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_without_recorders_the_other_engines_ranks_are_missing(layout):
    core = core_on(**LAYOUTS[layout])
    report = await core.tick()
    others = [worker for worker in core.fake.workers if worker.dp_rank]
    expected = len(core.fake.workers)
    answering = expected - len(others)
    assert (report.ranks_expected, report.ranks_reported) == (expected, answering)
    assert [(rank.dp_rank, rank.pp_rank, rank.tp_rank, rank.status) for rank in report.ranks_missing] == [
        (1, worker.pp_rank, worker.tp_rank, "never seen") for worker in others
    ]
    hint = report.engine.hint or ""
    assert (f"{answering} of {expected} ranks answer" in hint) is ("recorder_dir" in hint) is bool(others)


async def test_a_rank_that_answered_once_is_unheard(tmp_path):
    core = core_on()
    await core.tick()
    seen_at = core.clock.now
    core.fake.garble = lambda answers: {"results": [json.dumps(answers[0])]}
    for _ in range(3):
        (missing,) = (await core.tick()).ranks_missing
        assert (missing.status, missing.rank, missing.pid, missing.host) == ("unheard", 1, 4243, "node-a")
        assert (missing.last_seen_at, missing.used_bytes) == (seen_at, USED_READY)


@pytest.mark.parametrize("how", ["silent", "dead", "stopped", "ended"])
async def test_a_missing_rank_is_named_with_what_was_last_known(fly, how):
    core = await aloft(fly(tensor_parallel=1, data_parallel=2))
    core.clock.advance(0.5)
    core.fake.record()
    lost, seen_at = core.fake.workers[1], core.clock.now
    fall_silent(core, lost, how)
    report = await spared(core, 4.0)
    (missing,) = report.ranks_missing
    assert (missing.dp_rank, missing.pp_rank, missing.tp_rank) == (1, 0, 0)
    assert (missing.rank, missing.host, missing.pid, missing.status) == (0, "node-a", lost.pid, how)
    assert (missing.last_seen_at, missing.used_bytes) == (seen_at, USED_READY)
    assert (report.ranks_expected, report.ranks_reported) == (2, 1)
    assert f"1 of 2 ranks report; missing: dp 1 pp 0 tp 0 ({how})" in (report.engine.hint or "")


async def test_a_rank_that_has_not_written_yet_is_missing(fly):
    core = fly(tensor_parallel=1, data_parallel=2)
    (missing,) = (await core.tick()).ranks_missing
    assert (missing.status, missing.pid, missing.last_seen_at) == ("unheard", 4243, None)


async def test_workers_that_do_not_tell_their_place_are_counted(fly):
    """Older engines tell a rank's number at most: by it they are placed."""
    core = fly(tensor_parallel=2, pipeline_parallel=2)
    untold = {"tp_rank": None, "pp_rank": None}
    core.fake.garble = lambda answers: {"results": [json.dumps(answer | untold) for answer in answers]}
    assert (await core.tick()).ranks_missing == ()
    core.fake.garble = lambda answers: {"results": [json.dumps(answer | untold) for answer in answers[:3]]}
    (missing,) = missing_ranks(Sizes(1, 2, 2), (await core.tick()).ranks[:3], ())
    assert (missing.pp_rank, missing.tp_rank) == (1, 1)


async def test_workers_without_a_number_are_counted_too():
    core = core_on()
    untold = {"rank": None, "tp_rank": None, "pp_rank": None}
    core.fake.garble = lambda answers: {"results": [json.dumps(answer | untold) for answer in answers]}
    report = await core.tick()
    assert (report.ranks_reported, report.ranks_missing) == (2, ())


async def test_an_engine_that_does_not_tell_its_size_misses_nobody(fly):
    core = fly(data_parallel=2, engine_has_extension=True)
    core.fake.failing["/server_info"] = 500
    report = await core.tick()
    assert (report.ranks_expected, report.ranks_missing) == (None, ())


async def test_the_baseline_grows_by_ranks_that_are_heard_of_later(fly):
    core = fly(tensor_parallel=1, data_parallel=2)
    await spared(core)
    assert [rank.dp_rank for rank in core.poller.life.baseline] == [0]
    core.fake.serve_images(1)
    assert (await spared(core)).growth.since_ready_bytes == IMAGE_BYTES
    assert [rank.dp_rank for rank in core.poller.life.baseline] == [0, 1]
    core.fake.serve_images(1)
    assert (await spared(core)).growth.since_ready_bytes == 3 * IMAGE_BYTES


# --- who is asked ---


async def test_recorded_workers_are_not_called_while_they_work(core):
    await aloft(core)
    reports = await at_work(core, 10)
    assert [call.path for call in core.fake.calls] == ["/metrics"] * 10
    assert {report.progress.verdict for report in reports} == {"progressing"}
    assert {(report.engine.state, report.stale, report.age_seconds) for report in reports} == {("ready", False, 0.0)}
    assert {len(report.ranks) for report in reports} == {2}


async def test_recorded_workers_of_an_idle_engine_are_read_all_the_same(core):
    await aloft(core)
    reports = [await spared(core) for _ in range(10)]
    assert core.fake.ops() == []
    assert {(report.progress.verdict, report.age_seconds) for report in reports} == {("idle", 0.0)}
    assert len(core.recorders.last_minutes(core.recorders.files.instance)[4242]) == 1


async def test_a_rank_without_a_recorder_is_asked_each_time(core):
    core.fake.workers[1].recorder.refuses = "OSError: no space left on device"
    await aloft(core)
    reports = await at_work(core, 4)
    assert core.fake.polled() == ["memory"] * 4
    assert [heard(report) for report in reports] == [[(0, 0, "rpc"), (0, 1, "rpc")]] * 4


async def test_a_recorder_that_does_not_know_the_allocator_spares_nobody(core):
    """What is known must not come and go."""
    for worker in core.fake.workers:
        worker.recorder.torch = False
    await aloft(core)
    reports = await at_work(core, 3)
    assert core.fake.polled() == ["memory"] * 3
    core.fake.running = 0
    reports += [await spared(core) for _ in range(8)]
    assert len(core.fake.ops()) < 8
    assert None not in {rank.torch.allocated_bytes for report in reports for rank in report.ranks}


async def test_who_asks_for_a_reading_gets_one_of_now(fly):
    core = await aloft(fly(tensor_parallel=1, data_parallel=2))
    core.clock.advance(1.0)
    core.fake.record()
    asked_at = core.clock.now
    core.fake.serve_images(1)
    report = await core.poller.poll()
    assert core.fake.polled() == ["memory"]
    assert min(rank.taken_at for rank in report.ranks) > asked_at
    assert [rank.used_bytes for rank in report.ranks] == [USED_READY + IMAGE_BYTES] * 2
    assert core.clock.now - asked_at == pytest.approx(1 / RECORDER_RATE)


async def test_nobody_is_waited_for_long(fly):
    core = await aloft(fly(tensor_parallel=1, data_parallel=2))
    core.fake.workers[1].recorder.works = False
    asked_at = core.clock.now
    await core.poller.poll()
    assert core.clock.now - asked_at == pytest.approx(WAIT_SECONDS)


async def test_nobody_is_waited_for_when_the_engine_is_gone(core):
    await aloft(core)
    core.fake.down = True
    asked_at = core.clock.now
    assert [(await core.poller.poll()).engine.state for _ in range(2)] == ["ready", "gone"]
    assert core.clock.now == asked_at


# --- whether it moves ---


async def test_a_long_step_is_busy_and_nobody_is_asked(core):
    """The call would hang. Memory is read between steps only: the report grows old, and says so."""
    await aloft(core)
    core.fake.running, core.fake.hang = 4, asyncio.Event()
    core.fake.begin_step()
    reports = [await spared(core, 2.0) for _ in range(30)]
    assert core.fake.ops() == []
    assert {report.progress.verdict for report in reports} == {"busy"}
    assert [report.engine.state for report in reports] == ["ready"] * 4 + ["busy"] * 26
    assert reports[-1].engine.hint == "rank 0 (pid 4242 on node-a) has been in one step for 60 s"
    assert [report.age_seconds for report in reports[:3]] == pytest.approx([1.9, 3.9, 5.9], abs=0.2)
    assert {report.stale for report in reports if report.age_seconds > 10.1} == {True}
    assert {report.stale for report in reports if report.age_seconds < 9.9} == {False}
    assert reports[-1].engine.requests_running == 4


async def test_a_step_that_lasts_too_long_is_stuck_until_it_ends(core):
    await aloft(core)
    core.fake.running = 1
    core.fake.begin_step()
    core.fake.workers[1].recorder.stack = ["hccl.py:12 allreduce", "model.py:5 forward"]
    report = await spared(core, 121.0)
    assert (report.engine.state, report.progress.verdict, report.stale) == ("stuck", "stuck", True)
    assert report.engine.hint == report.progress.summary
    assert "longer than the 120 s" in (report.engine.hint or "")
    core.fake.end_step()
    report = await spared(core)
    assert (report.engine.state, report.engine.hint) == ("ready", None)
    assert [summary.partition(":")[0] for summary in core.summaries("state")][1:] == [
        "engine ready -> stuck",
        "engine stuck -> ready",
    ]


async def test_a_dead_rank_makes_the_engine_stuck(core):
    await aloft(core)
    fall_silent(core, core.fake.workers[1], "dead")
    core.fake.hang = asyncio.Event()
    reports = [await spared(core) for _ in range(6)]
    assert reports[-1].engine.state == "stuck"
    assert "rank 1 (pid 4243 on node-a) is dead" in (reports[-1].engine.hint or "")
    assert [rank.status for rank in reports[-1].ranks_missing] == ["dead"]


@pytest.mark.parametrize(("what", "verdict"), [("steps", "progressing"), ("a step", "busy")])
async def test_a_deadline_that_passes_while_ranks_move_is_no_hang(core, what, verdict):
    await aloft(core)
    await at_work(core, 3)
    core.fake.hang = asyncio.Event()
    if what == "a step":
        core.fake.begin_step()
        report = await core.tick(2.0)
    else:
        core.fake.tokens += 100
        core.clock.advance(1.0)
        core.fake.end_step()
        report = await core.tick(0.0)
    state = "ready" if what == "steps" else "busy"
    assert (report.engine.state, report.progress.verdict, report.stale) == (state, verdict, False)
    assert report.progress.summary in (report.engine.hint or "")
    assert "worker call memory" in (report.engine.hint or "")
    assert core.counted.failures == [("workers", "unresponsive")]


async def test_a_step_that_begins_just_then_is_no_hang(core):
    class Step:
        async def wait(self) -> None:
            core.fake.begin_step()
            core.clock.advance(8.0)
            core.fake.record()
            await asyncio.Event().wait()

    await aloft(core)
    core.fake.hang = Step()
    report = await core.tick()
    assert (report.engine.state, report.progress.verdict, report.stale) == ("busy", "busy", False)


async def test_a_hang_is_told_while_a_call_still_waits(fly):
    core = await aloft(fly(rpc_deadline_seconds=60.0))
    rounds = core.poller._rounds
    rounds.times = replace(rounds.times, poll_seconds=0.01)  # how often the files are read meanwhile

    class Stopped:
        async def wait(self) -> None:
            fall_silent(core, core.fake.workers[1], "stopped")
            core.clock.advance(6.0)
            core.fake.record()
            await asyncio.Event().wait()

    core.fake.hang = Stopped()
    report = await patiently(core.tick())
    assert (report.engine.state, report.progress.verdict) == ("stuck", "stuck")
    assert "rank 1 (pid 4243 on node-a) is stopped" in (report.engine.hint or "")
    assert core.engine.rpc_outstanding_seconds is not None


async def test_a_call_that_is_late_though_nobody_works_is_slow_and_then_stuck(core):
    await aloft(core)
    core.fake.hang = asyncio.Event()
    report = await core.tick()
    assert (report.engine.state, report.progress.verdict) == ("slow", "idle")
    assert report.stale is False, "the files are fresh"
    assert (await core.tick(10.0)).engine.state == "stuck"


async def test_an_api_server_that_is_late_beside_an_idle_core_is_slow_for_as_long_as_a_step_may_last(core):
    """A body of megabytes, a video that is decoded: the engine is no worse for it, and goes on."""
    await aloft(core)
    core.fake.late |= {"/metrics", "/health"}
    assert [(await spared(core, 30.0)).engine.state for _ in range(4)] == ["slow"] * 4
    assert "GET /metrics: no answer in time (no step has begun yet" in (core.poller.current().engine.hint or "")
    assert [(await spared(core, 30.0)).engine.state for _ in range(2)] == ["not_answering"] * 2
    core.fake.late.clear()
    assert (await spared(core)).engine.state == "ready"


async def test_requests_that_no_step_follows_are_stuck(core):
    await aloft(core)
    core.fake.end_step()
    core.fake.running = 2
    core.fake.late.add("/is_paused")
    states = [(await spared(core, 4.0)).engine.state for _ in range(2)]
    states += [(await spared(core, 4.0)).engine.state for _ in range(3)]
    report = core.poller.current()
    assert (states[0], states[-1], report.progress.verdict) == ("ready", "stuck", "stuck")
    assert "schedules no work" in (report.engine.hint or "")


async def test_what_waits_in_a_paused_engine_is_not_stuck(core):
    await aloft(core)
    core.fake.paused = True
    assert (await core.tick()).engine.state == "paused"
    core.fake.waiting = 3
    core.engine._answered_at -= 60
    states = [(await spared(core, 4.0)).engine.state for _ in range(10)]
    assert states == ["paused"] * 10
    core.fake.paused, core.fake.waiting = False, 0
    assert (await core.tick()).engine.state == "ready"


async def test_a_rested_engine_stays_paused_until_it_says_otherwise(core):
    await aloft(core)
    await spared(core, COUNTS_SETTLE_SECONDS)
    core.fake.paused = True
    await core.tick()
    core.fake.calls.clear()
    assert [(await spared(core)).engine.state for _ in range(3)] == ["paused"] * 3
    assert core.fake.asked("/is_paused") == []
    core.fake.paused = False
    states = [(await spared(core)).engine.state for _ in range(3)]
    assert (states[-1], len(core.fake.asked("/is_paused"))) == ("ready", 1)


async def test_a_paused_engine_stays_paused_while_a_call_is_late(core):
    await aloft(core)
    core.fake.paused = True
    await core.tick()
    core.fake.hang = asyncio.Event()
    core.fake.begin_step()
    report = await core.tick(2.0)
    assert (report.engine.state, report.progress.verdict) == ("paused", "busy")


# --- the engine's end ---


async def test_a_gone_engines_files_are_not_believed(core):
    """They are fresh for a moment longer: the last readings stay, marked as stale, and nobody moves."""
    await aloft(core)
    seen = core.poller.current().ranks
    core.fake.down = True
    for seconds, state in ((1.0, "ready"), (2.0, "gone"), (3.0, "gone")):
        report = await spared(core)
        assert (report.engine.state, report.age_seconds) == (state, pytest.approx(seconds))
        assert (report.stale, report.ranks, report.progress) == (True, seen, None)
    assert "nothing answers any more at http://engine:8000" in (report.engine.hint or "")


async def test_a_refusal_is_the_end_where_the_workers_are_gone_too(core):
    """No second round is needed: their processes are not there."""
    await aloft(core)
    core.fake.down = True
    for worker in core.fake.workers:
        core.fake.kill(worker)
    assert (await spared(core)).engine.state == "gone"


async def test_recorders_of_another_engine_tell_that_it_loads(core, tmp_path):
    await aloft(core)
    core.fake.down = True
    for worker in core.fake.workers:
        core.fake.kill(worker)
    assert (await spared(core)).engine.state == "gone"
    other = FakeRecorder()
    core.fake.proc.begin(5000)
    head = {"pid": 5000, "rank": 0, "host": "node-a", "self_started": True}
    options = {"directory": str(tmp_path / "recorder"), "instance": "f" * 16}
    other.start(head, options, core.fake.workers[0].device(), core.clock.now)
    other.record(core.fake.workers[0].memory(core.clock.now), {}, core.clock.now)
    assert (await spared(core, 0.5)).engine.state == "starting"
    other.close()


async def test_an_answer_that_breaks_off_is_not_the_end(core):
    await aloft(core)
    core.fake.breaks = True
    report = await core.tick()
    assert (report.engine.state, report.stale, report.progress.verdict) == ("slow", False, "idle")
    core.fake.breaks = False
    assert (await core.tick()).engine.state == "ready"


async def test_what_was_recorded_last_outlives_the_engine(core):
    await aloft(core)
    core.fake.down = True
    core.clock.advance(0.5)
    core.fake.serve_images(1)
    await spared(core, 0.0)
    await spared(core)
    assert [record.identity.pid for record in core.recorders.records] == [4242, 4243]
    core.fake.down = False
    core.fake.start_again()
    for worker in core.fake.workers:
        worker.recorder.refuses = "OSError: no space left on device"
    await spared(core)
    assert core.recorders.records == ()


# --- the last minutes ---


async def test_the_last_minutes_are_read_by_process(core, tmp_path):
    await aloft(core)
    core.fake.end_step()
    await spared(core)
    instance = core.recorders.files.instance
    core.fake.down = True
    await spared(core, 0.0)
    await spared(core)
    found = core.recorders.last_minutes(instance)
    assert {pid: [sample.used_bytes for sample in samples] for pid, samples in found.items()} == {
        4242: [USED_READY] * 2,
        4243: [USED_READY] * 2,
    }
    (tmp_path / "recorder" / f"highwater-{instance}-4243.ring").write_bytes(b"nonsense")
    assert list(core.recorders.last_minutes(instance)) == [4242]
    assert core.recorders.last_minutes("0" * 16) == {}


async def test_long_minutes_are_thinned(core):
    core.recorders._rate = 100.0
    await spared(core)
    first = core.clock.now
    for _ in range(800):
        core.clock.advance(0.01)
        core.fake.end_step()
        core.fake.record()
    samples = core.recorders.last_minutes(core.recorders.files.instance)[4242]
    assert samples[-1].at == pytest.approx(core.clock.now)
    times = [sample.at for sample in samples]
    assert times == sorted(times)
    assert SAMPLES_WHOLE < len(times) <= 2 * SAMPLES_WHOLE
    assert times[-SAMPLES_WHOLE] == pytest.approx(core.clock.now - 0.01 * (SAMPLES_WHOLE - 1))
    assert times[0] - first < 1.0


async def test_the_pace_is_of_all_ranks(fly):
    core = await aloft(fly(tensor_parallel=1, data_parallel=2))
    for _ in range(8):
        core.fake.serve_images(1)
        report = await spared(core)
    assert report.growth.bytes_per_second == pytest.approx(2 * IMAGE_BYTES, rel=0.3)


# --- looking more often ---


async def test_a_look_reads_the_files_and_asks_nobody(core):
    await aloft(core)
    told: list[Report] = []
    core.poller.reports.subscribe(told.append)
    core.clock.advance(0.2)
    core.fake.serve_images(1)
    core.fake.end_step()
    core.fake.record()
    core.fake.calls.clear()
    report = await core.poller.read_recorders()
    assert [rank.used_bytes for rank in report.ranks] == [USED_READY + IMAGE_BYTES] * 2
    assert (report.engine.state, report.age_seconds, report.stale) == ("ready", 0.0, False)
    assert (core.fake.calls, told) == ([], [report])


async def test_it_is_looked_as_often_as_is_asked(core):
    await aloft(core)
    assert core.poller._next_read(None) == (1.0, core.poller.read_recorders)
    assert core.poller._next_read(lambda report: 0.2 if report.ranks else 9.0) == (0.2, core.poller.read_recorders)
    assert core.poller._next_read(lambda _: 0.0)[0] == MIN_READ_SECONDS


async def test_without_recorders_it_is_polled_once_a_second_at_most():
    core = core_on()
    await core.tick()
    seconds, read = core.poller._next_read(lambda _: 0.1)
    assert seconds == 1.0
    core.fake.calls.clear()
    await read()
    assert core.fake.asked("/metrics")


async def test_a_pace_that_fails_costs_no_poll(core, monkeypatch):
    await aloft(core)
    polls: list[int] = []

    async def poll(**_):
        polls.append(1)
        if len(polls) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(core.poller, "poll", poll)
    with pytest.raises(asyncio.CancelledError):
        await core.poller.run(raising(ZeroDivisionError))
    assert ("poller", "unexpected") in core.counted.failures


# --- calls of somebody else's ---


async def test_a_worker_call_behind_another_ones_is_busy(core):
    """Weights that are loaded anew for a minute: no step, and our call waits; nobody is to restart that."""
    await aloft(core)
    core.fake.hang = asyncio.Event()
    for worker in core.fake.workers:
        worker.recorder.call, worker.recorder.call_since = "reload_weights", core.clock.now
    states = [(await core.tick(20.0)).engine.state for _ in range(3)]
    assert states == ["busy"] * 3
    assert "in the engine's call reload_weights for 6" in (core.poller.current().engine.hint or "")
    core.fake.hang.set()


# --- recorders that run by themselves ---


@pytest.fixture
def alone(tmp_path):
    """Recorders of an engine whose workers cannot be called, and a maker of files that are written all the same."""
    with ExitStack() as stack:

        def run(instance: str, pid: int, **identity) -> FakeWriter:
            writer = FakeWriter(tmp_path, instance=instance, pid=pid, boot_id="another kernel", **identity)
            stack.callback(writer.close)
            writer.sample()
            return writer

        engine = Engine("http://127.0.0.1:9", rpc_deadline_seconds=1.0)
        recorders = Recorders(
            engine,
            tmp_path,
            rate=10.0,
            seconds=120.0,
            clocks=Clocks(lambda: MONO, lambda: WALL),
        )
        stack.callback(recorders.close)
        yield recorders, run


async def test_recorders_that_run_already_are_followed_without_a_call(alone):
    recorders, run = alone
    await recorders.adopt()
    assert await recorders.read() == ()
    run("a" * 16, 51, ranks_expected=2)
    run("a" * 16, 52, rank=1, tp_rank=1, ranks_expected=2)
    await recorders.adopt()
    assert [record.identity.rank for record in await recorders.read()] == [0, 1]
    assert (recorders.ranks_expected, recorders.problem) == (2, None)


@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "ended"])
async def test_several_engines_are_named_only_as_long_as_they_write(alone, is_removed):
    recorders, run = alone
    run("a" * 16, 51)
    other = run("b" * 16, 52)
    await recorders.adopt()
    assert await recorders.read() == ()
    assert "the recorders of 2 engines" in (recorders.problem or "")
    other.path.unlink() if is_removed else other.stopped()
    await recorders.adopt()
    assert [record.identity.pid for record in await recorders.read()] == [51]
    assert recorders.problem is None


async def test_after_the_engines_end_the_next_ones_recorders_are_followed(alone):
    recorders, run = alone
    former = run("a" * 16, 51)
    await recorders.adopt()
    await recorders.read()
    recorders.forget()
    former.path.unlink()
    run("c" * 16, 53)
    await recorders.adopt()
    assert [record.identity.pid for record in await recorders.read()] == [53]


# --- whether every rank is recorded: said in one place, for what is asked, what may be called and what is shown ---


def record(
    *,
    status: str = "alive",
    device: str = "cuda",
    allocated: int | None = 1,
    read: bool = True,
    table: object = object(),
    **said: Any,
) -> Any:
    """What is needed of a record; by default one rank of two, with its entries and our operations."""
    newest = SimpleNamespace(device=Device(type=device), torch=TorchMemory(allocated_bytes=allocated))
    identity = SimpleNamespace(**{"rpc": True, "ranks_expected": 2} | said)
    return SimpleNamespace(status=status, newest=newest if read else None, identity=identity, table=table)


FULL = record()
ROWS = {
    "both": ([FULL, FULL], 2, (2, True, True, True)),
    "one of two": ([FULL], 2, (1, False, False, False)),
    "how many there should be is not known": ([FULL, FULL], None, (2, False, False, True)),
    "by their own word there is one more": ([FULL, record(ranks_expected=3)], 2, (2, True, True, False)),
    "nobody says how many": ([record(ranks_expected=None)], None, (1, False, False, False)),
    "one is silent": ([FULL, record(status="silent")], 2, (1, False, False, False)),
    "one has no reading yet": ([FULL, record(read=False)], 2, (1, False, False, True)),
    "one shows less than its worker would": ([FULL, record(allocated=None)], 2, (2, False, False, True)),
    "a CPU has no more to show": ([FULL, record(device="cpu", allocated=None)], 2, (2, True, True, True)),
    "one has none of our operations": ([FULL, record(rpc=False)], 2, (2, True, True, False)),
    "one does not say which it has": ([FULL, record(rpc=None)], 2, (2, True, True, False)),
    "one has no table of its entries": ([FULL, record(table=None)], 2, (2, True, False, True)),
    "nobody": ([], 0, (0, True, True, False)),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_the_recorders_cover(row):
    records, expected, told = row
    found = coverage(records, expected)
    assert (len(found.writing), found.is_complete, found.has_entries, found.offers_calls) == told


def test_the_greatest_word_counts():
    assert ranks_expected([record(ranks_expected=1), record(ranks_expected=4), record(ranks_expected=None)]) == 4
    assert ranks_expected([record(ranks_expected=None)]) is None


def test_without_recorders_nothing_is_covered():
    assert Coverage() == coverage([], None)
