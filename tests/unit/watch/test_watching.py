"""What watching asks of an engine whose recorders run: no worker, and the API server as little as will do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from highwater.diagnose.verdict import JudgedReport, verdict
from highwater.http.text.report import report_text
from highwater.model.engine import EndedLife, ProcessLife, SeenProcess
from highwater.model.rank import Process
from highwater.model.report import Report
from highwater.watch.round import COUNTS_SETTLE_SECONDS, IDLE_REQUEST_SECONDS
from tests.fakes.engine import KV_POOL, WEIGHTS, Core, core_on
from tests.fakes.recorders import phase

HOUR = 3600


@pytest.fixture
def watch(tmp_path, monkeypatch, cores):
    """A maker of cores whose workers start their recorders by themselves."""
    monkeypatch.setattr("socket.gethostname", lambda: "node-a")  # as in a pod

    def make(*, is_up: bool = True, **knobs) -> Core:
        core = core_on(recorder_dir=tmp_path, **knobs)
        if is_up:
            core.fake.start_recorders(tmp_path / "recorder")
        cores.append(core)
        return core

    return make


async def rounds(core: Core, count: int, *, every: float = 1.0) -> list[Report]:
    """So many polls as the loop makes them."""
    return [await core.tick(every, spare_idle=True) for _ in range(count)]


async def at_work(core: Core, seconds: int) -> list[Report]:
    """The same, with steps all the time."""
    reports = []
    core.fake.running = 1
    for _ in range(seconds):
        core.fake.tokens += 100
        core.fake.end_step()
        reports += await rounds(core, 1)
    core.fake.running = 0
    return reports


def asked(core: Core) -> Counter[str]:
    return Counter(call.path for call in core.fake.calls)


@pytest.mark.slow("minutes of a simulated engine")
@pytest.mark.untraced
@pytest.mark.parametrize("knobs", [{"dev_mode": False}, {"extension": None}, {}], ids=["plain", "dev mode", "class"])
async def test_in_twenty_minutes_of_watching_no_worker_is_called(watch, knobs):
    """Whatever could be called: each five minutes bring some work, and every reading is fresh."""
    core = watch(**knobs)
    reports = await rounds(core, 2)
    for _ in range(4):
        reports += await at_work(core, 20) + await rounds(core, 20) + await rounds(core, 52, every=5.0)
    assert core.fake.ops() == []
    assert {(report.engine.state, report.stale, len(report.ranks)) for report in reports} == {("ready", False, 2)}
    assert {report.age_seconds for report in reports} == {0.0}
    assert len(core.fake.asked("/server_info")) <= 1, "what the engine can do is found out once"


async def test_the_model_has_a_name_where_the_engine_shows_no_configuration(watch):
    (report,) = await rounds(watch(dev_mode=False), 1)
    assert report.engine.model == "Qwen/Qwen3-VL-32B-Instruct"


async def test_the_counts_of_an_idle_engine_are_read_every_15_seconds(watch):
    core = watch()
    await at_work(core, 2)
    await rounds(core, int(COUNTS_SETTLE_SECONDS))
    core.fake.calls.clear()
    await rounds(core, int(4 * IDLE_REQUEST_SECONDS))
    assert asked(core) == {"/metrics": 4, "/is_paused": 4, "/health": 60}
    core.fake.calls.clear()
    await at_work(core, 3)
    assert asked(core) == {"/metrics": 3}
    core.fake.end_step()
    core.fake.calls.clear()
    await rounds(core, int(2 * IDLE_REQUEST_SECONDS))
    assert asked(core)["/metrics"] == COUNTS_SETTLE_SECONDS + 1, "the last step's counts, and one more look"


async def test_a_request_at_the_gate_has_the_counts_read_each_second(watch):
    core = watch()
    await rounds(core, 10)
    core.fake.calls.clear()
    core.poller._rounds._requests_under_way = lambda: 1
    await rounds(core, 3)
    assert asked(core)["/metrics"] == 3


async def test_a_rank_that_falls_silent_has_the_workers_called(watch):
    core = watch()
    await rounds(core, 2)
    core.fake.workers[1].recorder.works = False
    await rounds(core, 8)
    assert core.fake.ops().count("memory") >= 1


async def test_the_end_of_an_idle_engine_is_seen_at_once(watch):
    """Though its counts are read seldom: it is asked each second whether it is there."""
    core = watch()
    await rounds(core, 30)
    core.fake.down = True
    assert [report.engine.state for report in await rounds(core, 2)] == ["ready", "gone"]


async def test_an_api_server_whose_engine_is_dead_says_so_while_nothing_moves(watch):
    core = watch()
    await rounds(core, 30)
    core.fake.failing["/health"] = 503
    core.fake.calls.clear()
    reports = await rounds(core, 4)
    assert {report.engine.state for report in reports} == {"gone"}
    assert asked(core)["/health"] == asked(core)["/metrics"] == 4


async def starving(core: Core, seconds: int) -> list[Report]:
    """Steps without tokens, while a request waits for room."""
    core.fake.kv_usage, core.fake.waiting, core.fake.waiting_by_reason = 0.983, 1, {"capacity": 1, "deferred": 0}
    reports = []
    for _ in range(seconds):
        core.fake.end_step()
        reports += await rounds(core, 1)
    return reports


async def test_steps_without_tokens_are_no_progress(watch):
    core = watch()
    core.fake.kv_connector = "NixlConnector"
    await at_work(core, 2)
    for worker in core.fake.workers:
        worker.recorder.tokens_at = core.clock.now
    reports = await starving(core, 12)
    assert [report.engine.state for report in reports[8:]] == ["ready", "stuck", "stuck", "stuck"]
    assert "vLLM's reasons: capacity 1" in reports[-1].engine.hint
    assert "the KV connector NixlConnector (kv_producer) may hold those" in reports[-1].engine.hint
    assert reports[-1].progress.is_starved
    for worker in core.fake.workers:
        worker.recorder.tokens_at = core.clock.now
    assert (await starving(core, 1))[-1].engine.state == "ready"


@pytest.mark.parametrize(
    ("second", "is_starved"),
    [
        ((0, 3, 50, {"capacity": 3, "deferred": 0}), True),
        ((0, 3, 50, {}), True),
        ((0, 3, 50, {"capacity": 0, "deferred": 3}), False),
        ((1, 3, 50, {"capacity": 3}), False),
        ((0, 0, 50, {}), False),
    ],
    ids=["room", "no reasons", "put off", "one runs", "none waits"],
)
async def test_a_replica_that_schedules_nothing_while_others_work_is_named_and_restarted_by_nobody(
    watch, second, is_starved
):
    core = watch(dev_mode=False)
    core.fake.second = second
    reports = await at_work(core, 15)
    assert {report.engine.state for report in reports} == {"ready"}
    assert {report.engine.starved for report in reports[:9]} == {()}
    told = verdict(reports[-1])
    if not is_starved:
        assert (reports[-1].engine.starved, told.exit_status) == ((), 0)
        return
    (sentence,) = reports[-1].engine.starved
    reasons = " (vLLM: capacity 3)" if second[3] else ""
    assert sentence == (
        "data-parallel engine 1 (of 2) has scheduled nothing for 14 s while others work: "
        f"3 waiting, none running{reasons}; no recorder shows its steps, and after an abort its counts may be old"
    )
    assert (reports[-1].engine.hint, told.exit_status, told.reason) == (sentence, 1, "replica_starved")
    assert told.sentence.startswith("Data-parallel engine 1 (of 2) has scheduled nothing for 14 s")
    core.fake.second = (0, 3, 60, {})
    assert (await at_work(core, 2))[-1].engine.starved == (), "it has scheduled something"


async def test_replicas_that_all_stand_still_are_not_one_among_others_that_work(watch):
    core = watch(dev_mode=False)
    core.fake.second = (0, 3, 50, {})
    assert {report.engine.starved for report in await rounds(core, 30)} == {()}


async def test_a_starved_engine_that_is_paused_is_paused(watch):
    core = watch()
    for worker in core.fake.workers:
        worker.recorder.tokens_at = core.clock.now
    await starving(core, 14)
    assert core.poller.current().engine.state == "stuck"
    core.fake.paused = True
    assert (await starving(core, 2))[-1].engine.state == "paused"


async def test_counts_that_stay_after_an_abort_are_no_hang(watch):
    """The last step had nothing to do: nobody owes one, whatever the engine counted before it."""
    core = watch()
    await at_work(core, 3)
    core.fake.running = 1
    core.fake.end_step()
    for worker in core.fake.workers:
        worker.recorder.is_out_of_work = True
    reports = await rounds(core, 60)
    assert {report.engine.state for report in reports} == {"ready"}
    assert reports[-1].progress.verdict == "idle"


async def test_a_pause_is_seen_though_it_is_not_asked_for_while_steps_progress(watch):
    core = watch()
    await at_work(core, 5)
    core.fake.running, core.fake.paused = 1, True
    reports = await rounds(core, 60)
    assert {report.engine.state for report in reports} == {"ready", "paused"}
    assert reports[-1].engine.state == "paused"
    core.fake.paused = False
    assert (await at_work(core, 2))[-1].engine.state == "ready"


async def test_a_loop_that_stands_still_while_nothing_moves_is_stuck_until_it_answers(watch):
    """No recorder shows it and no count: the question that it leaves unanswered does."""
    core = watch()
    await rounds(core, 10)
    core.fake.late.add("/is_paused")
    states = [report.engine.state for report in await rounds(core, 30)]
    assert states[int(IDLE_REQUEST_SECONDS)] == "slow"
    assert states[-1] == "stuck"
    assert "schedules no work: a call has waited for" in (core.poller.current().engine.hint or "")
    core.fake.late.clear()
    assert (await rounds(core, 1))[-1].engine.state == "ready"


async def test_a_loop_that_answers_owes_no_step(watch):
    """Though the engine counts a request, and the last step had tokens: its counts may be old."""
    core = watch()
    await at_work(core, 3)
    core.fake.running = 1
    assert {report.engine.state for report in await rounds(core, 60)} == {"ready"}


async def test_a_question_that_a_step_held_up_is_forgotten_with_the_step(watch):
    core = watch()
    await rounds(core, 10)
    core.fake.late.add("/is_paused")
    await rounds(core, 16)
    core.fake.late.clear()
    await at_work(core, 2)
    assert {report.engine.state for report in await rounds(core, 60)} == {"ready"}


async def test_what_the_former_engine_was_asked_is_not_what_the_next_one_owes(watch, tmp_path):
    """A request waits from its first second on: for as long as it has waited there, and not since before."""
    core = watch(dev_mode=False)
    await rounds(core, 2)
    await starving(core, 8)
    core.fake.down = True
    assert (await rounds(core, 30))[-1].engine.state == "gone"
    core.fake.start_again()
    core.fake.start_recorders(tmp_path / "recorder", "b" * 16)
    core.fake.down = False
    states = [report.engine.state for report in await rounds(core, 15)]
    assert (set(states[:8]), states[-1]) == ({"ready"}, "stuck")


# --- what the recorders say of worker calls ---


async def test_workers_are_called_where_every_recorder_says_that_they_may_be(watch):
    core = watch(extension=None)
    await rounds(core, 2)
    assert core.poller.capabilities.collective_rpc
    (answer, _) = await core.engine.rpc("memory")
    assert answer["ok"]


@pytest.mark.parametrize("knobs", [{"dev_mode": False}, {"extension": None, "rpc": None}])
async def test_workers_are_not_called_where_that_is_not_said(watch, knobs):
    """By every one of them, in development mode: a call of what is not there puts the engine's queues out of step."""
    rpc = knobs.pop("rpc", True)
    core = watch(**knobs)
    if rpc is None:
        core.fake.workers[1].recorder.stop(core.clock.now)
    await rounds(core, 2)
    assert not core.poller.capabilities.collective_rpc
    assert not core.engine.rpc_allowed


async def test_one_replicas_word_is_not_that_of_all(watch, tmp_path):
    """The first of two replicas of a dense model counts itself alone, and the second may be without the plugin."""
    core = watch(is_up=False, extension=None, data_parallel=2, tensor_parallel=1)
    first = core.fake.workers[0]
    sizes = {"ranks_expected": 1, "data_parallel": 1, "pipeline_parallel": 1, "tensor_parallel": 1}
    identity = core.fake._identity(first) | sizes | {"rpc": True, "self_started": True}
    payload = {"directory": str(tmp_path / "recorder"), "instance": "a" * 16}
    first.recorder.start(identity, payload, first.device(), core.clock.now)
    await rounds(core, 3)
    assert core.recorders.ranks_expected == 1
    assert (core.engine.rpc_allowed, core.fake.ops()) == (False, [])


async def test_a_word_is_good_for_as_long_as_its_worker_lives(watch):
    core = watch(extension=None)
    await rounds(core, 2)
    assert core.engine.rpc_allowed
    core.fake.plugin = False
    for worker in core.fake.workers:
        core.fake.kill(worker)
    calls = core.fake.ops()
    await rounds(core, 5)
    assert (core.engine.rpc_allowed, core.fake.ops()) == (False, calls)


async def test_another_engine_is_not_called_on_the_former_ones_word(watch, tmp_path):
    core = watch(extension=None)
    await rounds(core, 2)
    core.fake.down = True
    for worker in core.fake.workers:
        core.fake.kill(worker)
    await rounds(core, 5)
    core.fake.down = core.fake.plugin = False
    core.fake.start_again()
    await rounds(core, 5)
    assert (core.engine.rpc_allowed, core.fake.ops()) == (False, [])


# --- an engine that loads ---


def load(core: Core, folder, instance: str, *phases: dict[str, object]) -> None:
    """Workers that are there, and so far, while nothing listens."""
    core.fake.down = True
    core.fake.start_again()
    core.fake.start_recorders(folder, instance)
    for worker in core.fake.workers:
        worker.recorder.phases = list(phases)


async def test_an_engine_that_loads_is_shown(watch, tmp_path):
    core = watch(is_up=False, dev_mode=False)
    load(core, tmp_path / "recorder", "b" * 16, phase("init", core.clock.now))
    for worker in core.fake.workers:
        worker.weights = worker.kv_cache = 0
    (report,) = await rounds(core, 1)
    assert (report.engine.state, report.stale, len(report.ranks)) == ("starting", False, 2)
    assert [one.name for one in report.ranks[0].start] == ["init"]
    assert report.engine.hint == "the engine is loading (phases done: init); nothing answers yet at http://engine:8000"
    loading = core.poller.life.id
    for worker in core.fake.workers:
        worker.weights, worker.kv_cache = WEIGHTS, KV_POOL
        worker.recorder.phases += [phase("weights", core.clock.now), phase("warm_up", core.clock.now)]
    reports = await rounds(core, 3)
    assert {one.growth.seconds_to_full for one in reports} == {None}
    core.fake.down = False
    (report,) = await rounds(core, 1)
    assert (report.engine.state, report.engine.restarts, report.growth.since_ready_bytes) == ("ready", 0, 0)
    assert [one.name for one in report.ranks[0].start] == ["init", "weights", "warm_up"]
    assert core.poller.life.id == loading
    assert [one.engine.is_loading for one in (*reports[:1], report)] == [True, False]
    assert report.engine.extension_versions
    assert [summary.partition(":")[0] for summary in core.summaries()] == ["engine starting -> ready"]


@pytest.mark.parametrize("shown_by", ["files", "proc", "nothing"])
async def test_a_start_is_as_long_as_its_first_process_or_else_as_it_was_seen(watch, tmp_path, shown_by):
    """An API server loads vLLM for a minute before there is a worker, whose first phase comes later."""
    core = watch(is_up=False, dev_mode=False)
    core.fake.down = True
    began = core.clock.now - 60.0
    life = replace(life_of(core, is_running=True), started_at=began)
    if shown_by == "files":
        core.processes.lives = lambda: (core.clock.now, (replace(life, last_at=core.clock.now),))
    elif shown_by == "proc":
        core.processes.one = lambda: SeenProcess("API server, pid 10", began)
    reports = await rounds(core, 30)
    load(core, tmp_path / "recorder", "b" * 16, phase("init", core.clock.now))
    life = replace(life, processes=life.processes | life_of(core, is_running=True).processes)
    first = began if shown_by != "nothing" else core.clock.now
    reports += await rounds(core, 30)
    since = [report.engine.loading_since for report in reports if report.engine.loading_since is not None]
    assert set(since) == {first}
    for worker in core.fake.workers:
        worker.recorder.phases += [phase("warm_up", core.clock.now - 2.0)]
    ready_at = core.clock.now
    core.fake.down = False
    reports = await rounds(core, 20)
    assert {report.engine.last_start_seconds for report in reports} == {ready_at - first}


async def test_a_sidecar_that_comes_later_knows_how_long_the_start_took_but_for_a_rank_that_joined(watch):
    core = watch()
    life = replace(life_of(core, is_running=True), started_at=core.clock.now - 300.0)
    for worker, ago in zip(core.fake.workers, (200.0, 10.0), strict=True):
        worker.recorder.phases = [phase("init", core.clock.now - ago), phase("warm_up", core.clock.now - ago + 5.0)]
    assert (await rounds(core, 1))[-1].engine.last_start_seconds == 7.0
    core.processes.lives = lambda: (core.clock.now, (life,))
    assert (await rounds(core, 1))[-1].engine.last_start_seconds == 107.0


async def test_an_engine_that_loads_again_is_shown_as_soon_as_it_writes(watch, tmp_path):
    core = watch()
    await rounds(core, 2)
    core.fake.down = True
    ended = (await rounds(core, 2))[-1].engine
    assert (ended.state, ended.is_loading) == ("gone", False)
    load(core, tmp_path / "recorder", "b" * 16, phase("init", core.clock.now))
    report = (await rounds(core, 2))[-1]
    assert (report.engine.state, report.stale, report.engine.restarts) == ("starting", False, 1)
    assert report.engine.is_loading
    assert [one.name for one in report.ranks[0].start] == ["init"]


async def test_what_a_dead_engine_leaves_is_no_start_however_alive_its_files_look(watch):
    """Its API server says for a while that it is dead, and then no process listens, beside workers that still write."""
    core = watch()
    await rounds(core, 30)
    core.fake.failing["/health"] = 503
    reports = await rounds(core, 3)
    core.fake.down = True
    reports += await rounds(core, 2)
    for worker in core.fake.workers:
        core.fake.kill(worker)
    reports += await rounds(core, 5)
    assert {(report.engine.state, report.engine.since) for report in reports} == {("gone", reports[0].engine.since)}
    assert {(report.engine.is_loading, report.start_failure) for report in reports} == {(False, None)}


@pytest.mark.parametrize("is_read", [True, False])
async def test_each_death_that_the_api_server_tells_of_is_counted(watch, tmp_path, is_read):
    """Also where the next life is known by nothing but that it responds."""
    core = watch(dev_mode=False)
    for number in (1, 2, 3):
        await rounds(core, 30)
        core.fake.failing["/health"] = 503
        await rounds(core, 2)
        core.fake.down = True
        core.fake.start_again()
        await rounds(core, 5)
        if is_read:
            core.fake.start_recorders(tmp_path / "recorder", f"{number}" * 16)
            await rounds(core, 3)
        core.fake.down = False
        core.fake.failing.clear()
        report = (await rounds(core, 3))[-1]
        assert (report.engine.state, report.engine.restarts) == ("ready", number)


async def test_what_a_killed_api_server_leaves_is_not_loading(watch, tmp_path):
    core = watch(is_up=False, dev_mode=False)
    load(core, tmp_path / "recorder", "b" * 16, phase("init", core.clock.now), phase("warm_up", core.clock.now))
    orphans = (life_of(core, is_running=False),)
    core.processes.lives = lambda: (core.clock.now, orphans)
    report = (await rounds(core, 3))[-1]
    assert (report.engine.state, report.engine.is_loading) == ("gone", False)
    assert (report.engine.hint or "").startswith(
        "dead for 2.0 s by the files that it left, and no restart of it is seen: nothing answers"
    )


async def test_a_start_that_its_processes_show_ends_the_end_until_it_has_failed(watch):
    core = watch()
    await rounds(core, 2)
    core.fake.down = True
    report = (await rounds(core, 3))[-1]
    assert (report.engine.state, "and no restart of it is seen" in report.engine.hint) == ("gone", True)
    known = {"processes": frozenset({Process("node-a", 9, 9)}), "end": EndedLife(how="ended without a word")}
    begun = core.clock.now + 60.0

    def start(*, runs: bool) -> tuple[float, tuple[ProcessLife, ...]]:
        at = max(core.clock.now, begun)
        return at, (ProcessLife(**known, last_at=at, is_running=runs, has_server=True, is_serving=runs),)

    core.processes.lives = lambda: start(runs=True)
    assert {report.engine.state for report in await rounds(core, 90)} == {"starting"}
    core.processes.lives = lambda: start(runs=False)
    report = (await rounds(core, 2))[-1]
    assert (report.engine.state, report.engine.restarts) == ("gone", 2)
    assert report.engine.hint.startswith("the engine's last start ended without a word")


async def test_a_loaded_engine_whose_api_server_hangs_is_not_one_that_loads(watch):
    core = watch(dev_mode=False)
    for worker in core.fake.workers:
        worker.recorder.phases = [phase("init", core.clock.now), phase("warm_up", core.clock.now)]
    core.fake.late |= {"/version", "/metrics", "/health", "/openapi.json"}
    report = (await rounds(core, 5))[-1]
    assert "loading" not in (report.engine.hint or "")


@pytest.mark.parametrize("knobs", [{"dev_mode": False}, {"extension": None}], ids=["plain", "dev mode"])
async def test_where_recorders_were_read_nobody_is_told_to_install_them(watch, knobs):
    core = watch(**knobs)
    await rounds(core, 2)
    for worker in core.fake.workers:
        worker.recorder.works = False
    hints = [report.engine.hint or "" for report in await rounds(core, 12)]
    assert [hint for hint in hints if "start vLLM" in hint] == []
    core.fake.down = True
    await rounds(core, 3)
    for worker in core.fake.workers:
        worker.recorder.close()
    core.fake.down = False
    assert "start vLLM" in ((await rounds(core, 3))[-1].engine.hint or "")


async def test_a_writer_that_is_only_silent_has_not_given_its_place_away(watch, tmp_path):
    """Its process is there: the engine hangs, and another one's files in the folder are not its next life."""
    core = watch(is_up=False, dev_mode=False)
    for worker, instance in zip(core.fake.workers, ("a" * 16, "b" * 16), strict=True):
        if instance[0] == "b":
            await rounds(core, 2)
            core.fake.workers[0].recorder.works = False
        payload = {"directory": str(tmp_path / "recorder"), "instance": instance}
        identity = core.fake._identity(worker) | {"self_started": True}
        worker.recorder.start(identity, payload, worker.device(), core.clock.now)
    await rounds(core, 20)
    assert {record.status for record in core.recorders.records} == {"silent"}
    assert core.recorders.files.instance == "a" * 16


async def test_recorders_that_a_sidecar_started_are_not_taken_for_an_engine_that_loads(watch, cores, tmp_path):
    """They may be another engine's: nobody answers who could say whose they are."""
    core, other = (core_on(recorder_dir=tmp_path / name) for name in ("own", "other"))
    cores += [core, other]
    core.recorders.files.folder = tmp_path / "other" / "recorder"
    await rounds(other, 2)
    core.fake.down = True
    report = (await rounds(core, 3))[-1]
    assert (report.engine.state, report.ranks) == ("starting", ())


async def test_a_start_that_failed_stays_visible_until_the_engine_is_up(watch, tmp_path):
    core = watch(is_up=False, dev_mode=False)
    failing = (phase("init", core.clock.now), phase("profile", core.clock.now, "OutOfMemoryError: no room"))
    load(core, tmp_path / "recorder", "b" * 16, *failing)
    await rounds(core, 1)
    for worker in core.fake.workers:
        core.fake.kill(worker)
    report = (await rounds(core, 5))[-1]
    said = "rank 0 (pid 4244 on node-a) failed in phase profile after 2.0 s: OutOfMemoryError: no room"
    assert report.start_failure.summary == f"the engine did not start: {said}"
    assert [[one.name for one in rank.phases] for rank in report.start_failure.ranks] == [["init", "profile"]] * 2
    assert core.summaries("state") == [report.start_failure.summary]
    load(core, tmp_path / "recorder", "c" * 16, phase("init", core.clock.now))
    report = (await rounds(core, 2))[-1]
    assert ([rank.pid for rank in report.ranks], report.stale) == ([4246, 4247], False)
    assert report.start_failure is not None
    core.fake.down = False
    assert (await rounds(core, 1))[-1].start_failure is None


async def test_starts_that_fail_again_and_again_are_starts(watch, tmp_path):
    """The files of those before are not of an engine that has died: this sidecar saw each of them."""
    core = watch(is_up=False, dev_mode=False)
    states = set()
    for life in "bcd":
        load(core, tmp_path / "recorder", life * 16, phase("init", core.clock.now))
        states |= {report.engine.state for report in await rounds(core, 2)}
        for worker in core.fake.workers:
            core.fake.kill(worker)
        states |= {report.engine.state for report in await rounds(core, 40)}
    assert (states, len(core.summaries("state"))) == ({"starting"}, 3)


@pytest.mark.parametrize("last", ["profile", "warm_up"])
async def test_a_start_that_ends_in_order_failed_where_its_work_was_not_done(watch, tmp_path, last):
    """The engine's core may have refused to go on: no worker saw why."""
    core = watch(is_up=False, dev_mode=False)
    load(core, tmp_path / "recorder", "b" * 16, phase("init", core.clock.now), phase(last, core.clock.now))
    await rounds(core, 1)
    for worker in core.fake.workers:
        worker.recorder.stop(core.clock.now)
    report = (await rounds(core, 3))[-1]
    said = "the engine did not start: the process of rank 0 (pid 4244 on node-a) ended after phase profile"
    assert (report.start_failure and report.start_failure.summary) == (said if last == "profile" else None)
    assert (report.engine.state, report.stale) == ("starting", True)


# --- an engine that had ended before the sidecar began ---

UP = ("init", "warm_up")


def left(core: Core, folder, seconds: float, *, instance: str = "a" * 16, phases=UP, in_order: bool = False) -> float:
    """Workers that were killed, or stopped in order, so long before the first poll; return when they wrote last."""
    core.fake.start_recorders(folder, instance)
    for worker in core.fake.workers:
        worker.recorder.phases = [phase(name, core.clock.now) for name in phases]
    core.fake.record()
    at = core.clock.now
    for worker in core.fake.workers:
        if in_order:
            worker.recorder.stop(at)
        core.fake.kill(worker)
    core.fake.down = True
    core.clock.advance(seconds)
    return at


def life_of(core: Core, *, is_running: bool, pids: int = 0) -> ProcessLife:
    """The life of the workers' processes, or of others."""
    processes = frozenset(Process("node-a", one.pid + pids, one.pid_started) for one in core.fake.workers)
    end = EndedLife(how="ended without a word")
    return ProcessLife(
        processes=processes,
        last_at=core.clock.now,
        is_running=is_running,
        has_server=True,
        is_serving=is_running,
        end=end,
    )


@pytest.mark.parametrize("is_minutes", [True, False])
async def test_a_sidecar_that_begins_beside_a_dead_engine_says_so(watch, tmp_path, is_minutes):
    core = watch(is_up=False, dev_mode=False)
    at = left(core, tmp_path / "recorder", 90.0 if is_minutes else 5.0)
    if not is_minutes:
        lives = (life_of(core, is_running=False),)
        core.processes.lives = lambda: (core.clock.now, lives)
    reports = await rounds(core, 40)
    assert {(report.engine.state, report.engine.since, report.ranks) for report in reports} == {("gone", at, ())}
    hints = [report.engine.hint for report in (reports[0], reports[-1])]
    expected = ("1 min 31 s", "2 min 10 s") if is_minutes else ("6.0 s", "45 s")
    for hint, span in zip(hints, expected, strict=True):
        told = f"dead for {span} by the files that it left, and no restart of it is seen: nothing answers any more at "
        assert hint.startswith(told)
    assert core.summaries("state") == [f"engine starting -> gone: {hints[0]}"]
    load(core, tmp_path / "recorder", "b" * 16, phase("init", core.clock.now))
    assert (await rounds(core, 2))[-1].engine.state == "starting"
    core.fake.down = False
    report = (await rounds(core, 1))[-1]
    assert (report.engine.state, report.growth.since_ready_bytes) == ("ready", 0)


async def test_an_engine_that_had_been_stopped_in_order_is_not_dead(watch, tmp_path):
    core = watch(is_up=False, dev_mode=False)
    at = left(core, tmp_path / "recorder", 2.0, in_order=True)
    engine = (await rounds(core, 2))[-1].engine
    assert (engine.state, engine.state_text, engine.since, engine.stopped_at) == ("gone", "stopped in order", at, at)
    assert engine.hint.startswith("stopped in order at ")


async def test_files_of_an_earlier_engine_say_nothing_while_another_one_may_load(watch, tmp_path):
    """A pod's sidecar begins before its engine, and the folder may have files of the engine before."""
    core = watch(is_up=False, dev_mode=False)
    left(core, tmp_path / "recorder", 90.0)
    core.processes.lives = lambda: None
    assert (await rounds(core, 3))[-1].engine.state == "starting", "the processes' files are still to be read"
    lives = [life_of(core, is_running=False), life_of(core, is_running=True, pids=100)]
    core.processes.lives = lambda: (core.clock.now, lives)
    assert {report.engine.state for report in await rounds(core, 3)} == {"starting"}
    del lives[1]
    assert (await rounds(core, 3))[-1].engine.state == "gone"


async def test_a_recorder_that_writes_beside_one_that_has_ended_is_of_an_engine_that_loads(watch, tmp_path):
    core = watch(is_up=False, dev_mode=False)
    left(core, tmp_path / "recorder", 90.0)
    load(core, tmp_path / "recorder", "b" * 16, phase("init", core.clock.now))
    assert {report.engine.is_loading for report in await rounds(core, 3)} == {True}


@pytest.mark.parametrize(("phases", "last"), [(UP, "gone"), (("init",), "starting")], ids=["up", "loads"])
async def test_a_recorder_that_has_been_silent_for_seconds_has_not_ended(watch, tmp_path, phases, last):
    core = watch(is_up=False, dev_mode=False)
    left(core, tmp_path / "recorder", 5.0, phases=phases)
    states = [report.engine.state for report in await rounds(core, 40)]
    assert (states[:20], states[-5:]) == (["starting"] * 20, [last] * 5)


async def test_files_of_another_host_are_no_evidence_of_this_one(watch, tmp_path, monkeypatch):
    """A folder that pods of a node share: ours has not written yet, and the other's engine has ended."""
    core = watch(is_up=False, dev_mode=False)
    left(core, tmp_path / "recorder", 60.0)
    core.recorders.host = "node-b"
    assert (await rounds(core, 3))[-1].engine.state == "starting"


async def test_another_hosts_recorders_are_not_followed_when_ours_have_ended(watch, tmp_path):
    core = watch(dev_mode=False)
    await rounds(core, 2)
    core.fake.down = True
    for worker in core.fake.workers:
        core.fake.kill(worker)
    await rounds(core, 3)
    core.fake.start_again()
    identity = core.fake._identity
    core.fake._identity = lambda worker: identity(worker) | {"host": "node-b"}
    core.fake.start_recorders(tmp_path / "recorder", "b" * 16)
    core.fake.down = True
    report = (await rounds(core, 5))[-1]
    assert (report.engine.state, report.engine.is_loading) == ("gone", False)


async def test_a_file_that_cannot_be_read_may_be_of_an_engine_that_loads(watch, tmp_path):
    """Of another version of the worker package, say: it is named, and nobody is said to be dead."""
    core = watch(is_up=False, dev_mode=False)
    left(core, tmp_path / "recorder", 60.0)
    (tmp_path / "recorder" / f"highwater-{'c' * 16}-77.ring").write_bytes(b"HWRING" + bytes(90))
    assert (await rounds(core, 3))[-1].engine.state == "starting"


async def test_in_a_pod_files_of_other_hosts_are_another_engines(watch, tmp_path):
    core = watch(is_up=False, dev_mode=False)
    at = left(core, tmp_path / "recorder", 60.0)
    core.fake.start_again()
    identity = core.fake._identity
    core.fake._identity = lambda worker: identity(worker) | {"host": "node-b"}
    left(core, tmp_path / "recorder", 60.0, instance="b" * 16)
    assert (await rounds(core, 1))[-1].engine.since == at


async def test_since_when_an_engine_is_ready_is_what_its_recorders_say(watch, tmp_path):
    core = watch(is_up=False, dev_mode=False)
    core.fake.start_recorders(tmp_path / "recorder")
    ready = core.clock.now
    for worker in core.fake.workers:
        worker.recorder.phases = [phase("warm_up", ready - 2.0, seconds=2.0)]
    await rounds(core, 0)
    core.clock.advance(3 * HOUR)
    assert {report.engine.since for report in await rounds(core, 3)} == {ready}
    core.fake.late.add("/metrics")
    core.fake.late.add("/health")
    await rounds(core, 2)
    core.fake.late.clear()
    report = (await rounds(core, 1))[-1]
    assert (report.engine.state, report.engine.since) == ("ready", core.clock.now)


# --- who is missing ---


async def test_of_a_dead_engine_no_rank_is_missing(watch):
    """Its ranks ended one after the other: that it died is all there is to say; its readings are of before."""
    core = watch(dev_mode=False)
    await rounds(core, 2)
    core.fake.kill(core.fake.workers[1])
    report = (await rounds(core, 2))[-1]
    assert (verdict(report).exit_status > 0, len(report.ranks_missing)) == (True, 1)
    core.fake.kill(core.fake.workers[0])
    report = (await rounds(core, 2))[-1]
    assert (report.engine.state, len(report.ranks_missing)) == ("stuck", 2), "its API server lives on"
    assert (verdict(report).state, verdict(report).exit_status) == ("stuck", 2)
    core.fake.down = True
    report = (await rounds(core, 3))[-1]
    assert (report.engine.state, report.ranks_missing, report.stale) == ("gone", (), True)
    assert (verdict(report).state, verdict(report).exit_status) == ("dead", 2)


async def test_the_readings_of_an_engine_that_ended_are_not_those_of_the_next_one(watch, tmp_path):
    """While it loads, and its workers have no file yet: nothing is known of its memory."""
    core = watch(dev_mode=False)
    await rounds(core, 2)
    core.fake.down = True
    for worker in core.fake.workers:
        core.fake.kill(worker)
    report = (await rounds(core, 3))[-1]
    assert (report.engine.state, len(report.ranks)) == ("gone", 2)
    assert "2 of 2 ranks, as the engine that ended had them, read" in report_text(JudgedReport.of(report))
    lives = (life_of(core, is_running=True, pids=100),)
    core.processes.lives = lambda: (core.clock.now, lives)
    report = (await rounds(core, 2))[-1]
    assert (report.engine.state, report.ranks, report.taken_at, report.stale) == ("starting", (), None, True)
    assert (report.encoder_cache, report.growth.since_ready_bytes, report.ranks_reported) == (None, None, 0)


@pytest.mark.parametrize("layout", [{"data_parallel": 2, "tensor_parallel": 1}, {"pipeline_parallel": 2}])
async def test_missing_ranks_are_named_by_what_the_recorders_expect(watch, layout):
    core = watch(dev_mode=False, **layout)
    last = core.fake.workers[-1]
    last.recorder.close()
    (core.recorders.files.folder / f"highwater-{'a' * 16}-{last.pid}.ring").unlink()
    report = (await rounds(core, 2))[-1]
    assert report.ranks_expected == len(core.fake.workers)
    (missing,) = report.ranks_missing
    assert (missing.dp_rank, missing.pp_rank, missing.tp_rank) == (last.dp_rank, last.pp_rank, last.tp_rank)
    assert "missing: " in (report.engine.hint or "")
