"""The loop: an engine that comes, goes, hangs and comes back as another, and what the report says of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from highwater.engine.capabilities import EXTENSION, REDETECT_SECONDS
from highwater.model.engine import SeenProcess
from highwater.process.errors import EngineGarbled
from highwater.watch.recorder.progress import SilentCore
from highwater.watch.sources import polled_sources
from tests.fakes.engine import IMAGE_BYTES, IMAGES, USED_READY, Core, core_on

GROWN = 2 * IMAGES * IMAGE_BYTES


@pytest.fixture
def core() -> Core:
    return core_on()


def only(result: object):
    """A garble that answers with this whatever was asked."""
    return lambda _: result


# --- the engine's life ---


async def test_before_the_first_poll_nothing_is_known(core):
    report = core.poller.current()
    assert (report.engine.state, report.engine.hint) == ("starting", "not asked yet")
    assert (report.stale, report.taken_at, report.ranks) == (True, None, ())


async def test_the_first_good_poll_is_the_baseline(core):
    report = await core.tick()
    assert (report.engine.state, report.engine.hint, report.stale) == ("ready", None, False)
    assert (report.ranks_expected, report.ranks_reported, len(report.ranks)) == (2, 2, 2)
    assert (report.growth.since_ready_bytes, report.taken_at) == (0, core.clock.now)
    assert (report.engine.version, report.engine.model) == ("0.32.0", "Qwen/Qwen3-VL-32B-Instruct")
    assert core.summaries() == ["engine starting -> ready"]
    assert [(one.state_before, one.state_after) for one in core.history.events()] == [("starting", "ready")]


async def test_without_recorders_only_the_workers_own_answers_count(core):
    report = await core.tick()
    assert [(rank.rank, rank.source) for rank in report.ranks] == [(0, "rpc"), (1, "rpc")]
    assert (report.progress, report.ranks_missing, core.fake.polled()) == (None, (), ["memory"])


async def test_growth_is_told_from_the_baseline_on(core):
    await core.tick()
    core.fake.serve_images()
    report = await core.tick()
    assert report.growth.since_ready_bytes == GROWN
    assert report.encoder_cache.entries == IMAGES


async def test_a_late_engine_is_starting_not_down(core):
    core.fake.down = True
    await core.tick(0.0)
    report = await core.tick()
    assert report.engine.state == "starting"
    assert "nothing answers yet at http://engine:8000" in (report.engine.hint or "")
    assert core.counted.failures == [("detection", "unreachable")] * 2
    core.fake.down = False
    assert (await core.tick()).engine.state == "ready"


async def test_an_engine_whose_core_is_stopped_is_stuck_though_its_api_server_answers(core):
    """An idle engine's own counts stand still then, and /health says 200: nothing else shows it."""
    await core.tick()
    core.processes.stopped = lambda: "EngineCore (pid 11) has been stopped for 6 s"
    report = await core.tick()
    assert (report.engine.state, report.engine.hint) == ("stuck", "EngineCore (pid 11) has been stopped for 6 s")
    core.processes.stopped = lambda: None
    assert (await core.tick()).engine.state == "ready"


async def test_a_silent_core_is_busy_and_stuck_once_requests_wait(core):
    """In a pod vLLM's counts stand at zero: its readiness stays, and the probe restarts it when somebody waits."""
    await core.tick()
    seconds = 20.0
    core.processes.silent_core = lambda: SilentCore("EngineCore (pid 60)", seconds, has_workers=True)
    assert (await core.tick()).engine.state == "ready"
    seconds = 40.0
    report = await core.tick()
    assert (report.engine.state, report.engine.traits.serves) == ("busy", True)
    assert "EngineCore (pid 60) has written nothing for 40 s while the API server does" in report.engine.hint
    core.poller._rounds._requests_under_way = lambda: 2
    states = [(await core.tick(6.0)).engine.state for _ in range(3)]
    core.poller._rounds._requests_under_way = lambda: 0  # the clients have given up
    assert [*states, (await core.tick()).engine.state] == ["busy", "busy", "stuck", "stuck"]
    core.processes.silent_core = lambda: None
    assert (await core.tick()).engine.state == "ready"


async def test_a_silent_core_says_nothing_of_an_engine_that_is_held_or_starts(core):
    core.processes.silent_core = lambda: SilentCore("EngineCore (pid 60)", 400.0, has_workers=True)
    core.fake.down = True
    assert (await core.tick()).engine.state == "starting"
    core.processes.silent_core = lambda: None
    core.fake.down, core.fake.asleep = False, True
    await core.tick()
    core.processes.silent_core = lambda: SilentCore("EngineCore (pid 60)", 400.0, has_workers=True)
    assert (await core.tick()).engine.state == "sleeping"


async def test_an_engine_whose_process_runs_seems_to_be_loading(core):
    """A user who waits for a 100 GB model should not have to check the URL. An old process is not mentioned."""
    core.fake.down = True
    core.processes.one = lambda: SeenProcess("EngineCore, pid 4711")
    report = await core.tick()
    assert report.engine.state == "starting"
    assert report.engine.hint == (
        "the engine seems to be loading: a process of it runs (EngineCore, pid 4711). Nothing answers yet at "
        "http://engine:8000 (GET /version: All connection attempts failed); if that lasts, is engine_url right?"
    )
    core.fake.down = False
    core.fake.late |= {"/version", "/metrics", "/health", "/openapi.json", "/v1/models"}
    assert (await core.tick()).engine.loading_process == "EngineCore, pid 4711", "no answer in time, so far"
    core.fake.late.clear()
    await core.tick()
    core.fake.down = True
    assert "nothing answers any more" in ((await core.tick(0.0)).engine.hint or "")


async def test_an_engine_that_goes_is_gone_and_asked_anew_when_it_is_back(core, caplog):
    """Another version with other options may stand there then. Each change is a warning in the log, once."""
    await core.tick()
    core.fake.down = True
    await core.tick(0.0)
    report = await core.tick(5.0)
    assert (report.engine.state, report.stale) == ("gone", True)
    assert (len(report.ranks), report.age_seconds) == (2, 5.0), "the last numbers before a crash are what is wanted"
    assert "nothing answers any more" in (report.engine.hint or "")
    assert not core.engine.rpc_allowed
    core.fake.down = False
    core.fake.reload("0.33.0")
    report = await core.tick()
    assert (report.engine.state, report.engine.version, report.stale) == ("ready", "0.33.0", False)
    assert [summary.partition(":")[0] for summary in core.summaries("state")] == [
        "engine starting -> ready",
        "engine ready -> gone",
        "engine gone -> ready",
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == core.summaries("state")


async def test_a_process_of_an_engine_that_is_newer_than_the_end_may_be_its_restart(core):
    """It loads vLLM before it writes anything; a supervisor starts it before a second round finds nobody listening."""
    await core.tick()
    old = SeenProcess("API server, pid 10", core.wall() - 3.0)
    core.processes.one = lambda: old
    core.fake.down = True
    await core.tick()
    new = SeenProcess("API server, pid 4711", core.wall() + 0.5)
    await core.tick()
    said = [(await core.tick()).engine]
    core.processes.one = lambda: new
    said += [(await core.tick()).engine for _ in range(2)]
    assert [(engine.state, engine.loading_process) for engine in said] == [("gone", None), *[("gone", new.name)] * 2]
    assert "and no restart of it is seen: " in said[0].hint
    assert "and a newer process of an engine runs (API server, pid 4711): " in said[-1].hint


async def test_one_broken_connection_is_not_an_end(core):
    await core.tick()
    core.fake.serve_images()
    core.fake.broken = [True]
    report = await core.tick()
    assert (report.engine.state, report.engine.hint, report.growth.since_ready_bytes) == ("ready", None, GROWN)
    assert (core.counted.failures, core.fake.broken) == ([], [])


async def test_connections_that_break_again_and_again_are_not_an_end_either(core):
    await core.tick()
    life = core.poller.life
    core.fake.serve_images()
    core.fake.broken = [True] * 8
    states = [(await core.tick(50.0)).engine.state for _ in range(4)]
    assert states == ["slow", "slow", "slow", "not_answering"]
    report = await core.tick()
    assert (report.engine.state, report.growth.since_ready_bytes) == ("ready", GROWN)
    assert core.poller.life == life


async def test_one_refused_connection_is_not_an_end(core):
    await core.tick()
    core.fake.serve_images()
    core.fake.down = True
    report = await core.tick()
    assert (report.engine.state, report.stale) == ("ready", True)
    assert "it is polled once more before it counts as gone" in (report.engine.hint or "")
    core.fake.down = False
    assert (await core.tick()).growth.since_ready_bytes == GROWN


async def test_the_same_processes_are_the_same_life_whatever_was_refused(core):
    await core.tick()
    life = core.poller.life
    core.fake.serve_images()
    core.fake.down = True
    assert [(await core.tick(10.0)).engine.state for _ in range(3)] == ["ready", "gone", "gone"]
    core.fake.down = False
    report = await core.tick()
    assert (report.engine.state, report.engine.restarts, report.growth.since_ready_bytes) == ("ready", 0, GROWN)
    assert core.poller.life.id == life.id


async def test_an_engine_that_nobody_restarts_stays_gone(core):
    await core.tick()
    core.fake.down = True
    states = [(await core.tick(20.0)).engine.state for _ in range(60)]
    assert states == ["ready", *["gone"] * 59]
    hint = core.poller.current().engine.hint or ""
    assert hint.startswith("dead for 19 min 20 s, and no restart of it is seen: ")
    assert "nothing answers any more" in hint
    core.fake.down = False
    core.fake.start_again()
    report = await core.tick()
    assert (report.engine.state, report.engine.restarts, report.growth.since_ready_bytes) == ("ready", 1, 0)


async def test_another_process_with_the_same_number_is_another_life(core):
    """As in a container, where the first processes have the same numbers each time: their start tells them apart."""
    await core.tick()
    life = core.poller.life
    core.fake.serve_images()
    for worker in core.fake.workers:
        worker.pid_started += 1000
    report = await core.tick()
    assert (report.engine.restarts, report.growth.since_ready_bytes) == (1, 0)
    assert core.poller.life.id != life.id


async def test_a_sidecar_that_starts_late_does_not_take_the_growth_for_the_baseline():
    core = core_on()
    core.fake.serve_images()
    report = await core.tick()
    assert (report.growth.since_ready_bytes, core.poller.life.baseline) == (None, ())
    assert (report.growth.reason or "").startswith("baseline not known")


async def test_a_sidecar_that_starts_late_knows_what_the_state_file_holds(tmp_path):
    first = core_on(state_file=tmp_path / "state.json")
    began_at = (await first.tick()).growth.baseline_taken_at
    for pid_started, grown, since in ((123456, GROWN, began_at), (654321, None, None)):
        second = core_on(state_file=tmp_path / "state.json")
        second.clock.advance(60.0)
        second.fake.serve_images()
        for worker in second.fake.workers:
            worker.pid_started = pid_started
        growth = (await second.tick()).growth
        assert (growth.since_ready_bytes, growth.baseline_taken_at) == (grown, since)


async def test_a_sidecar_that_sees_the_engine_come_up_knows_its_baseline(core):
    core.fake.down = True
    await core.tick()
    core.fake.down, core.fake.tokens = False, 5
    assert (await core.tick()).growth.since_ready_bytes == 0


async def test_no_worker_call_to_an_engine_that_came_back_without_the_extension(core):
    await core.tick()
    core.fake.down = True
    await core.tick(0.0)
    await core.tick()
    core.fake.down, core.fake.extension = False, None
    calls = len(core.fake.ops())
    report = await core.tick()
    assert len(core.fake.ops()) == calls
    assert "start vLLM with --worker-extension-cls" in (report.engine.hint or "")


async def test_a_restart_between_two_polls_begins_a_new_baseline(core):
    await core.tick()
    core.fake.serve_images()
    await core.tick()
    core.fake.start_again()
    report = await core.tick()
    assert report.growth.since_ready_bytes == 0
    assert report.growth.baseline_taken_at == core.clock.now
    core.fake.serve_images(1)
    assert (await core.tick()).growth.since_ready_bytes == 2 * IMAGE_BYTES


async def test_a_restart_with_another_version_is_detected_again():
    core = core_on("0.28.0")
    await core.tick()
    core.fake.reload("0.33.0")
    await core.tick()
    assert (await core.tick()).engine.version == "0.33.0"
    assert core.poller.capabilities.reset_prefix_cache


async def test_one_new_worker_is_not_another_engine(core):
    await core.tick()
    core.fake.workers[1].pid += 1
    core.fake.serve_images(1)
    assert (await core.tick()).growth.since_ready_bytes == 2 * IMAGE_BYTES


async def test_detection_is_asked_once(core):
    for _ in range(5):
        await core.tick()
    assert len(core.fake.asked("/server_info")) == 1


async def test_an_engine_without_the_extension_is_asked_again_now_and_then():
    core = core_on(extension=None)
    await core.tick()
    await core.tick(REDETECT_SECONDS - 1)
    assert len(core.fake.asked("/server_info")) == 1
    core.fake.extension = EXTENSION
    report = await core.tick(1.0)
    assert (len(core.fake.asked("/server_info")), report.ranks_reported) == (2, 2)


@pytest.mark.parametrize(("knob", "state"), [("paused", "paused"), ("asleep", "sleeping")])
async def test_paused_and_sleeping_are_told(core, knob, state):
    setattr(core.fake, knob, True)
    assert (await core.tick()).engine.state == state
    assert core.poller.life.baseline == ()
    setattr(core.fake, knob, False)
    assert (await core.tick()).engine.state == "ready"
    assert core.poller.life.baseline != ()


# --- late, stale ---


async def test_without_recorders_workers_that_do_not_answer_may_be_in_a_long_step(core):
    await core.tick()
    core.fake.hang = asyncio.Event()
    for seconds in (1.0, 119.0):
        report = await core.tick(seconds)
        assert (report.engine.state, report.stale) == ("busy", True)
        assert "worker call memory" in (report.engine.hint or "")
    report = await core.tick(1.0)
    assert (report.engine.state, report.stale) == ("not_answering", True)
    assert "it has answered no call for 120 s (worker call memory" in (report.engine.hint or "")
    assert core.fake.polled() == ["memory", "memory"]
    assert core.counted.failures == [("workers", "unresponsive")] * 3
    assert core.fake.asked("/is_paused")[1:] == [], "nothing more is asked of a loop that stands still"
    core.fake.hang.set()
    await core.engine.aclose()


async def test_it_is_ready_again_when_the_call_has_come_back(core):
    await core.tick()
    core.fake.hang = asyncio.Event()
    await core.tick()
    core.fake.hang.set()
    await asyncio.wait({core.engine._outstanding})
    core.fake.hang = None
    core.fake.serve_images()
    report = await core.tick()
    assert (report.engine.state, report.stale, report.growth.since_ready_bytes) == ("ready", False, GROWN)
    assert len(core.fake.asked("/server_info")) == 1


async def test_a_report_grows_old(core):
    await core.tick()
    core.clock.advance(11.0)
    assert (core.poller.current().age_seconds, core.poller.current().stale) == (11.0, False)
    core.clock.advance(0.1)
    assert core.poller.current().stale


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_wall_clock_that_is_set_changes_no_age(core, hours):
    await core.tick(1.0, spare_idle=True)
    core.wall.set_by += hours * 3600.0
    for worker in core.fake.workers:
        worker.non_torch += IMAGE_BYTES
    ages = [(await core.tick(1.0, spare_idle=True)).age_seconds for _ in range(6)]
    report = core.poller.current()
    assert (ages, report.stale) == ([1.0, 2.0, 3.0, 4.0, 0.0, 1.0], False)
    assert report.ranks[0].used_bytes == USED_READY + IMAGE_BYTES
    assert report.taken_at == core.wall() - 1.0


@pytest.mark.parametrize("skew", [-3600.0, -11.0, 11.0, 3600.0])
async def test_a_node_whose_clock_is_wrong_is_as_fresh_as_the_others(core, skew):
    core.fake.workers[1].skew = skew
    report = await core.tick()
    assert (report.age_seconds, report.stale, report.taken_at) == (0.0, False, core.clock.now)
    assert [rank.taken_at for rank in report.ranks] == [core.clock.now] * 2  # an incident's evidence, among others
    assert report.growth.baseline_taken_at == core.clock.now
    core.clock.advance(11.1)
    assert (core.poller.current().age_seconds, core.poller.current().stale) == (pytest.approx(11.1), True)


# --- one failing source ---


@pytest.mark.parametrize(
    ("path", "source", "reason"), [("/metrics", "engine_metrics", "refused"), ("/is_paused", "pause_state", "garbled")]
)
async def test_a_failing_source_costs_only_itself(core, path, source, reason):
    core.fake.failing[path] = 500
    report = await core.tick()
    assert (report.engine.state, report.ranks_reported, report.stale) == ("ready", 2, False)
    assert (report.engine.hint or "").startswith(f"{source}: ")
    assert core.counted.failures == [(source, reason)]


async def test_an_engine_that_answers_errors_alone_is_not_ready_for_ever(core):
    await core.tick()
    core.fake.failing |= dict.fromkeys(("/metrics", "/is_paused", "/collective_rpc"), 503)
    assert (await core.tick()).engine.state == "slow"
    report = await core.tick(130.0)
    assert (report.engine.state, report.stale) == ("not_answering", True)
    core.fake.failing.clear()
    assert (await core.tick()).engine.state == "ready"


async def test_an_api_server_that_outlives_its_engine_says_so_and_is_no_status_ok(core):
    await core.tick()
    core.fake.failing["/health"] = 503
    reports = [await core.tick() for _ in range(5)]
    assert {report.engine.state for report in reports} == {"gone"}
    assert reports[0].engine.hint == "the API server says that its engine is dead (GET /health answered 503)"
    core.fake.failing.clear()
    core.fake.start_again()
    report = await core.tick()
    assert (report.engine.state, report.engine.restarts) == ("ready", 1)


async def test_an_api_server_that_scales_is_not_dead(core):
    """Each of its paths has 503 then."""
    await core.tick()
    core.fake.failing |= dict.fromkeys(("/health", "/metrics", "/is_paused", "/collective_rpc", "/version"), 503)
    assert {(await core.tick()).engine.state for _ in range(5)} == {"slow"}


async def test_an_api_server_that_has_errors_alone_is_out_of_service_soon(core):
    """Its /health says that the engine is dead, and no other answer shows that vLLM said so."""
    await core.tick()
    core.fake.failing |= {"/metrics": 500} | dict.fromkeys(
        ("/health", "/v1/models", "/is_paused", "/collective_rpc"), 503
    )
    assert [(await core.tick(6.0)).engine.state for _ in range(4)][-1] == "not_answering"


@pytest.mark.parametrize(("models", "state"), [(True, "not_answering"), (False, "slow")], ids=["all late", "models"])
async def test_an_api_server_that_serves_nothing_is_out_of_service_soon(core, models, state):
    """Though /health says 200: by its model list, which is asked for once the first round was late."""
    await core.tick()
    core.fake.late |= {"/metrics", *(["/v1/models"] if models else [])}
    states = [(await core.tick(6.0)).engine.state for _ in range(4)]
    assert states == ["slow", "slow", state, state]
    core.fake.late.clear()
    assert (await core.tick()).engine.state == "ready"


async def test_a_call_to_an_engine_that_is_no_more_is_forgotten(core):
    await core.tick()
    core.fake.hang = asyncio.Event()
    await core.tick()
    assert core.engine.rpc_outstanding_seconds is not None
    core.fake.down = True
    await core.tick()
    await core.tick()
    assert core.engine.rpc_outstanding_seconds is None
    core.fake.down, core.fake.hang = False, None
    core.fake.start_again()
    await core.tick()
    assert (await core.tick()).engine.state == "ready"


async def test_workers_that_answer_garbage_cost_only_their_numbers(core):
    await core.tick()
    core.fake.garble, core.fake.running = only({"results": ["?"]}), 3
    report = await core.tick()
    assert (report.engine.state, report.engine.requests_running, report.age_seconds) == ("ready", 3, 1.0)
    assert core.counted.failures == [("workers", "garbled")]
    assert (await core.tick(11.0)).stale


async def test_an_extension_of_another_schema_is_called_that(core):
    core.fake.garble = lambda answers: {"results": [json.dumps(answer | {"schema": 2}) for answer in answers]}
    report = await core.tick()
    assert report.engine.hint == "workers: the worker extension speaks schema 2, the sidecar 1"
    assert (report.ranks, report.stale) == ((), True)


async def test_an_odd_source_does_not_end_the_loop(core, monkeypatch):
    seen: list[int] = []

    async def poll(**_):
        seen.append(1)
        if len(seen) == 2:
            raise asyncio.CancelledError
        raise ZeroDivisionError

    monkeypatch.setattr(core.poller, "poll", poll)
    with pytest.raises(asyncio.CancelledError):
        await core.poller.run()
    assert core.counted.failures == [("poller", "unexpected")]


async def test_polls_never_overlap(core):
    await asyncio.gather(*(core.poller.poll() for _ in range(5)))
    assert (core.counted.polls, core.fake.most_rpcs_in_flight) == (5, 1)


async def test_listeners_are_told_of_every_poll(core):
    told = []
    core.poller.reports.subscribe(told.append)
    await core.tick()
    core.fake.down = True
    await core.tick()
    await core.tick()
    assert [report.engine.state for report in told] == ["ready", "ready", "gone"]


# --- an idle engine ---


async def test_an_idle_engines_workers_are_left_alone(core):
    for _ in range(5):
        assert not (await core.tick(1.0, spare_idle=True)).stale
    assert core.fake.polled() == ["memory"]
    report = await core.tick(1.0, spare_idle=True)
    assert (core.fake.polled(), report.age_seconds) == (["memory"] * 2, 0.0)


@pytest.mark.parametrize("change", [{"running": 1}, {"waiting": 1}, {"tokens": 5}])
async def test_an_engine_that_did_anything_is_read_at_once(core, change):
    await core.tick(1.0, spare_idle=True)
    vars(core.fake).update(change)
    await core.tick(1.0, spare_idle=True)
    assert core.fake.polled() == ["memory"] * 2


async def test_the_history_keeps_a_reading_once(core):
    for _ in range(4):
        await core.tick(1.0, spare_idle=True)
    assert len(core.history.readings(0.0, 0.0)[1]) == 1


# --- hints ---


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"dev_mode": False}, ("VLLM_SERVER_DEV_MODE=1", f"--worker-extension-cls {EXTENSION}", "PYTHONPATH")),
        ({"extension": None}, (f"start vLLM with --worker-extension-cls {EXTENSION}",)),
        ({"extension": "mine.Both"}, ("--worker-extension-cls mine.Both", "engine_has_extension=true")),
        ({"data_parallel": 2}, ("2 of 4 ranks answer", "first data-parallel engine")),
    ],
)
async def test_the_hint_says_exactly_what_to_do(knobs, words):
    hint = (await core_on(**knobs).tick()).engine.hint or ""
    assert all(word in hint for word in words), hint


async def test_an_engine_that_does_not_tell_its_extension_has_a_hint_too(core):
    """/server_info that cannot be dumped: the operator's word is asked for."""
    core.fake.failing["/server_info"] = 500
    assert "set engine_has_extension=true" in ((await core.tick()).engine.hint or "")


async def test_a_subclass_works_on_the_operators_word():
    core = core_on(extension="mine.Both", engine_has_extension=True)
    report = await core.tick()
    assert (report.ranks_reported, report.engine.hint) == (2, None)


async def test_without_development_mode_the_load_is_known():
    core = core_on(dev_mode=False)
    core.fake.running = 3
    report = await core.tick()
    assert (report.engine.state, report.engine.requests_running, report.ranks, report.stale) == ("ready", 3, (), True)
    assert core.fake.ops() == []


async def test_a_new_source_is_asked_with_the_others():
    class Odd:
        name = "odd"
        reach = "api_server"

        def available(self, _):
            return True

        async def read(self):
            raise EngineGarbled("odd")

    core = core_on(sources=lambda engine, budgets: (Odd(), *polled_sources(engine, budgets)))
    report = await core.tick()
    assert (report.engine.hint, report.ranks_reported) == ("odd: odd", 2)
