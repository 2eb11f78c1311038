"""The incident watcher: which moments are worth an incident, what is known of them then, and when they are over."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gated_proxy.door_items import Cost, RequestItems
from highwater.diagnose.evidence import Incident
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.store import IncidentStore
from highwater.diagnose.incidents.watcher import BACKLOG, IncidentWatcher
from highwater.diagnose.log.starts import FailedStart
from highwater.engine.client import Engine
from highwater.host.needs import ProcessorCaches
from highwater.host.past import HostFacts, OomKillWatch
from highwater.host.reading import ProcessMemory
from highwater.model.engine import EngineState, EngineStatus, StartedRank, StartFailure
from highwater.model.policy import PolicyStatus
from highwater.model.report import Event, Report
from highwater.process.clocks import Clocks
from highwater.process.errors import EngineUnresponsive
from tests.fakes.engine import IMAGE_BYTES, IMAGES, USED_AFTER, USED_READY, Core, core_on
from tests.fakes.raising import raising
from tests.fakes.recorders import phase
from tests.unit.host.test_oom_kills import seen
from tests.unit.host.test_past import Pod, leak

POLICY = PolicyStatus(level="calm", mode="act", summary="calm")


class Boxed:
    """A core with an incident watcher, whose writing a test has done."""

    def __init__(self, core: Core, folder: Path | None, log: Path | None = None) -> None:
        self.core, self.fake, self.clock, self.log = core, core.fake, core.clock, log
        self.oom_kills = OomKillWatch(Clocks(core.clock))
        self.host: HostFacts | Exception | None = None
        self.pod: Pod | None = None
        self.errors = 0
        self.stopped: tuple[ProcessMemory, ...] = ()
        self.incidents = Incidents(IncidentStore(folder), engine_log=log, clocks=Clocks(core.clock, core.clock))
        self.box = IncidentWatcher(
            self.incidents,
            core.history,
            recorders=core.recorders,
            starts=core.poller.starts,
            life=lambda: core.poller.life,
            policy=lambda: POLICY,
            stopped_processes=lambda: self.stopped,
            oom_kills=self.oom_kills,
            read_host=self._read_host,
            ended_in_order=core.poller.note_stop,
            internal_error=self._count,
        )
        core.poller.reports.subscribe(self.box.notice)

    async def _read_host(self) -> HostFacts | None:
        if isinstance(self.host, Exception):
            raise self.host
        if self.pod is not None:
            return await self.pod.watch.facts()
        if self.host is not None:
            self.oom_kills.look(self.host.reading)
        return self.host

    def _count(self) -> None:
        self.errors += 1

    async def tick(self, seconds: float = 1.0) -> Report:
        """A poll as the loop makes it, and everything written that was noticed."""
        report = await self.core.tick(seconds, spare_idle=True)
        await self.write()
        return report

    async def write(self) -> None:
        """What ``run`` does, until nothing waits."""
        writing = asyncio.create_task(self.box.run())
        await self.box.finish()
        writing.cancel()
        await asyncio.wait({writing})

    async def come_up(self) -> None:
        """Ready, with readings of every rank."""
        for _ in range(2):
            await self.tick()

    async def die(self) -> None:
        """One refused connection is not its end."""
        self.fake.down = True
        await self.tick(0.0)
        await self.tick()

    def start_again(self) -> None:
        self.fake.down = False
        self.fake.start_again()

    async def kinds(self) -> list[str | None]:
        """Of all incidents, oldest first."""
        return [headline.kind for headline in reversed(await self.incidents.headlines())]

    async def only(self) -> Incident:
        """The one that there is."""
        (headline,) = await self.incidents.headlines()
        incident = await self.incidents.read(headline.id)
        assert incident is not None
        return incident

    def told(self) -> list[str]:
        """The events about incidents, oldest first."""
        return self.core.summaries("incident")


@pytest.fixture
def boxed(tmp_path):
    """A maker of boxed cores, with recorders or without; what they hold open is closed in the end."""
    made: list[Boxed] = []

    def make(version: str = "0.32.0", *, recorders: bool = True, logged: bool = False, **knobs) -> Boxed:
        log = tmp_path / "engine.log" if logged else None
        if log is not None:
            log.touch()
        kept = tmp_path / "incidents"
        kept.mkdir()
        core = core_on(version, recorder_dir=tmp_path / "recorders" if recorders else None, **knobs)
        made.append(Boxed(core, kept, log))
        return made[-1]

    yield make
    for one in made:
        one.incidents.close()
        if one.core.recorders is not None:
            one.core.recorders.close()
        for worker in one.fake.workers:
            worker.recorder.close()


@pytest.fixture(params=[True, False], ids=["recorders", "no recorders"])
def either(request, boxed) -> Boxed:
    return boxed(recorders=request.param)


@pytest.fixture
def one(boxed) -> Boxed:
    return boxed()


# --- which moments ---


async def test_an_engine_that_lives_makes_none(either):
    await either.come_up()
    for change in ({"paused": True}, {"paused": False, "asleep": True}, {"asleep": False, "running": 9}):
        vars(either.fake).update(change)
        either.fake.serve_images()
        await either.tick(6.0)
    assert (await either.kinds(), either.told()) == ([], [])


async def test_a_dead_engine_is_one_incident(either):
    await either.come_up()
    either.fake.down = True
    for _ in range(5):
        await either.tick(30.0)
    incident = await either.only()
    assert (incident.kind, incident.count, incident.ended_at) == ("died", 1, None)
    assert (incident.engine.state, incident.engine.version) == ("gone", "0.32.0")
    assert incident.reason.startswith("nothing answers any more")
    assert "engine_url" not in incident.reason  # it was right: the engine served
    assert "still running there" not in incident.summary  # a question, which is the hint's
    assert either.told() == [f"incident {incident.id}: {incident.summary}"]
    either.start_again()
    await either.tick()
    assert (await either.only()).ended_at == either.clock.now
    assert either.told()[1:] == [f"incident {incident.id} ended: the engine is ready"]
    assert {one.incident for one in either.core.history.events() if one.kind == "incident"} == {incident.id}
    await either.come_up()
    assert len(either.told()) == 2


async def test_the_model_is_kept_where_only_recorders_name_it(boxed, tmp_path):
    one = boxed(dev_mode=False)
    one.fake.start_recorders(tmp_path / "recorders" / "recorder")
    await one.come_up()
    one.fake.down = True
    for worker in one.fake.workers:
        one.fake.kill(worker)
    for _ in range(3):
        await one.tick(6.0)
    assert (one.core.poller.current().engine.model, (await one.only()).engine.model) == (None, one.fake.model)


async def test_the_last_report_that_names_the_model_counts(boxed):
    one = boxed()
    await one.come_up()
    known = one.core.poller.current()
    for model in ("first", "second", None):
        one.box.notice(replace(known, engine=replace(known.engine, model=model)))
    failed = replace(known.ranks[0], torch=replace(known.ranks[0].torch, ooms=1))
    one.box.notice(replace(known, engine=replace(known.engine, model=None), ranks=(failed, *known.ranks[1:])))
    await one.write()
    assert (await one.only()).engine.model == "second"


@pytest.mark.parametrize(("named", "told"), [("of the start", "of the start"), (None, "of the life before")])
async def test_a_start_that_failed_has_its_own_model(one, named, told):
    await one.come_up()
    known = one.core.poller.current()
    before = replace(known, engine=replace(known.engine, model="of the life before"))
    rank = StartedRank(rank=0, dp_rank=0, host="a", pid=7, status="dead", phases=())
    failure = StartFailure(at=1.0, recorder_instance="c" * 16, summary="the engine's start failed", ranks=(rank,))
    one.box.notice(before)
    one.box.notice(replace(known, engine=replace(known.engine, model=named), start_failure=failure))
    await one.write()
    assert (await one.only()).engine.model == told


@pytest.mark.parametrize(("pause", "kinds"), [(120.0, ["start_failed"]), (700.0, [])])
async def test_workers_that_end_in_order_while_they_load_are_an_incident_the_second_time(one, pause, kinds):
    await one.come_up()
    known = one.core.poller.current()
    rank = StartedRank(rank=0, dp_rank=0, host="a", pid=7, status="ended", phases=())
    for number in (1, 2):
        assert await one.kinds() == []
        at = pause * number
        failure = StartFailure(at=at, recorder_instance=f"{number}" * 16, summary="it ended", ranks=(rank,))
        one.box.notice(replace(known, start_failure=failure))
        await write_what_waits(one)
    assert await one.kinds() == kinds


async def test_an_engine_that_ends_in_order_is_an_event(one):
    await one.come_up()
    for worker in one.fake.workers:
        worker.recorder.stop(one.clock.now)
    await one.tick(0.1)
    await one.die()
    assert await one.kinds() == []
    assert "the engine ended in order: every worker closed its recorder" in one.core.summaries("state")
    engine = (await one.tick()).engine
    assert (engine.state, engine.stopped_at, engine.traits.level) == ("gone", one.clock.now - 2.0, "warn")
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(engine.stopped_at))
    assert engine.hint.startswith(f"stopped in order at {at}; start it again. Nothing answers at ")
    assert engine.in_words == f"the engine was {engine.hint}"
    one.start_again()
    engine = (await one.tick()).engine
    assert (engine.stopped_at, engine.traits.level) == (None, "good")


async def test_a_second_death_is_a_second_incident(either):
    await either.come_up()
    for _ in range(2):
        await either.die()
        either.start_again()
        await either.tick()
    assert await either.kinds() == ["died", "died"]


async def test_a_hanging_engine_is_one_incident(either):
    await either.come_up()
    either.fake.running, either.fake.hang = 1, asyncio.Event()
    if either.core.recorders is not None:
        either.fake.begin_step()
        await either.tick(60.0)
        assert await either.kinds() == [], "a long step is no hang"
    for _ in range(3):
        await either.tick(70.0)
    incident = await either.only()
    assert (incident.kind, incident.count, incident.ended_at) == ("hung", 1, None)
    assert incident.engine.requests_running == 1
    either.fake.hang.set()
    if either.core.engine._outstanding is not None:
        await asyncio.wait({either.core.engine._outstanding})
    either.fake.hang = None
    either.fake.end_step()
    await either.tick()
    await either.tick()
    assert (await either.only()).ended_at is not None


async def test_a_hang_knows_the_stopped_processes_beside_the_workers(one):
    await one.come_up()
    one.fake.running, one.fake.hang = 1, asyncio.Event()
    one.stopped = (ProcessMemory(role="engine_core", name="EngineCore", pid=4242),)
    one.fake.begin_step()
    for _ in range(3):
        await one.tick(70.0)
    (found,) = (found for found in (await one.only()).findings if found.name == "stopped_ranks")
    assert found.figures == {"EngineCore pid": 4242}
    one.fake.hang.set()


async def test_without_recorders_a_step_may_be_long(boxed):
    one = boxed(recorders=False)
    await one.come_up()
    one.fake.running, one.fake.hang = 1, asyncio.Event()
    for _ in range(5):
        assert (await one.tick(20.0)).engine.state == "busy"
        assert await one.kinds() == []
    for _ in range(3):
        await one.tick(20.0)
    assert (await one.only()).kind == "hung"
    assert one.core.poller.current().engine.state == "not_answering"


async def test_a_front_end_that_is_late_makes_none(one):
    await one.come_up()
    one.fake.late |= {"/metrics", "/health"}
    states = {(await one.tick(5.0)).engine.state for _ in range(4)}
    assert (states, await one.kinds()) == ({"slow"}, [])


async def test_a_connection_that_breaks_makes_none(either):
    await either.come_up()
    either.fake.broken = [True] * 6
    for _ in range(4):
        await either.tick()
    assert await either.kinds() == []


def end_every_worker(one: Boxed) -> None:
    """The API server outlives them, and is late."""
    for worker in one.fake.workers:
        worker.recorder.works = False
        one.fake.kill(worker)
    one.fake.late |= {"/metrics", "/health", "/version", "/is_paused", "/is_sleeping"}


async def test_an_engine_whose_workers_are_all_gone_has_died_once(one):
    await one.come_up()
    end_every_worker(one)
    assert (await one.tick()).engine.state == "stuck"
    incident = await one.only()
    assert (incident.kind, incident.reason.partition(" (")[0]) == ("died", "the process of every worker is gone")
    one.fake.down = True
    for _ in range(3):
        await one.tick(40.0)
    assert one.core.poller.current().engine.state == "gone"
    incident = await one.only()
    assert (incident.kind, incident.count) == ("died", 1)


async def test_an_end_is_told_once_though_the_api_server_answers_on_for_a_while(boxed):
    """As after a kill on a busy machine: refused twice, then answered with calls that are late, and gone again."""
    one = boxed(recorders=False)
    await one.come_up()
    await one.die()
    await see(one, "busy", "not_answering", "gone")
    assert [(one.kind, one.count) for one in await one.incidents.headlines()] == [("died", 1)]


async def test_an_engine_that_goes_on_after_its_end_was_told_may_hang_and_end_again(boxed):
    one = boxed(recorders=False)
    await one.come_up()
    await one.die()
    await see(one, "ready", "not_answering", "ready", "gone")
    assert await one.kinds() == ["died", "hung", "died"]


async def see(one: Boxed, *states: EngineState) -> None:
    """Let the watcher have reports of the same engine in these states, one after the other."""
    for state in states:
        one.clock.now += 90.0
        report = one.core.poller.current()
        one.box.notice(replace(report, engine=replace(report.engine, state=state)))
        await one.write()


async def test_an_api_server_that_outlives_the_workers_it_has_ended_is_no_incident(boxed):
    """As vLLM 0.32.0 on a busy machine: it says that it ends, ends them, and is seen before it is gone."""
    one = boxed(logged=True)
    await one.come_up()
    one.log.write_text(
        "(APIServer pid=1) INFO 06-05 01:45:00 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
    )
    end_every_worker(one)
    assert (await one.tick()).engine.state == "stuck"
    one.fake.down = True
    for _ in range(2):
        await one.tick(6.0)
    assert await one.kinds() == []
    assert any("ended in order, as its log says" in summary for summary in one.core.summaries("state"))


async def test_an_engine_that_hangs_and_is_ended_is_one_incident(either):
    await either.come_up()
    fall_silent(either)
    for _ in range(8):
        await either.tick(20.0)
    await either.die()
    incident = await either.only()
    assert (incident.kind, incident.id.endswith("-hung")) == ("died", True)
    assert "ended from outside, as a liveness probe does" in incident.summary


async def test_a_hang_that_becomes_a_death_is_counted_once(one):
    await test_an_engine_that_hangs_and_is_ended_is_one_incident(one)
    again = Incidents(IncidentStore(one.incidents.folder))
    for counts in (one.incidents.counts, again.counts):
        assert {kind: number for kind, number in counts.items() if number} == {"hung": 1}


async def test_a_hang_is_as_long_as_nothing_moved(one):
    await one.come_up()
    fall_silent(one)
    await one.tick(60.0)
    one.fake.down = True
    for _ in range(2):
        await one.tick()
    assert "it had hung for 1 min 2 s before" in [each.title for each in (await one.only()).findings]


async def test_a_kill_that_is_counted_late_completes_the_incident(either):
    await either.come_up()
    either.oom_kills.look(seen(0))
    either.fake.down = True
    for _ in range(2):
        await either.core.tick()
    await write_what_waits(either)
    assert "killed_by_kernel" not in [each.name for each in (await either.only()).findings]
    either.oom_kills.look(seen(1))
    await either.tick(6.0)
    assert "the kernel killed a process" in (await either.only()).summary


async def test_workers_that_close_their_recorders_late_ended_in_order(one):
    """vLLM stops to listen first."""
    await one.come_up()
    one.fake.down = True
    for _ in range(2):
        await one.core.tick(0.5)
    await write_what_waits(one)
    assert await one.kinds() == ["died"]
    for worker in one.fake.workers:
        worker.recorder.stop(one.clock.now)
    await one.tick(6.0)
    assert await one.kinds() == []


async def write_what_waits(one: Boxed) -> None:
    """Write, while the sidecar goes on."""
    writing = asyncio.create_task(one.box.run())
    await one.box._waiting.join()
    writing.cancel()
    await asyncio.wait({writing})


def fall_silent(one: Boxed) -> None:
    """A rank is gone, and the loop answers nothing."""
    one.fake.workers[1].recorder.works = False
    one.fake.kill(one.fake.workers[1])
    one.fake.running, one.fake.hang = 1, asyncio.Event()


async def test_out_of_memory_is_an_incident_of_an_engine_that_goes_on(either):
    """PyTorch's own count tells, on whichever rank; a storm of it is one."""
    await either.come_up()
    for _ in range(3):
        either.fake.workers[1].ooms += 1
        either.fake.tokens += 1
        await either.tick()
    incident = await either.only()
    assert (incident.kind, incident.count) == ("out_of_memory", 3)
    assert incident.reason == "PyTorch's allocator on rank 1 could not get what it asked for"
    assert incident.engine.state == "ready"
    await either.tick()
    assert (await either.only()).ended_at is not None


async def test_out_of_memory_on_a_rank_that_no_call_reaches(boxed):
    one = boxed(tensor_parallel=1, data_parallel=2)
    await one.come_up()
    one.fake.workers[1].ooms = 1
    await one.tick()
    assert (await one.only()).reason == "PyTorch's allocator on rank 1.0 could not get what it asked for"


async def test_a_count_that_starts_anew_in_a_new_process_is_none(either):
    either.fake.workers[0].ooms = 3
    await either.come_up()
    assert await either.kinds() == [], "what was before us is not ours to tell"
    either.fake.start_again()
    either.fake.workers[0].ooms = 5
    for _ in range(6):
        either.fake.tokens += 1
        await either.tick()
    assert [rank.torch.ooms for rank in either.core.poller.current().ranks] == [5, 0]
    assert await either.kinds() == ["died"], "the former process ended, and nobody saw it"


async def test_a_reading_without_the_count_forgets_nothing(boxed):
    one = boxed()
    for worker in one.fake.workers:
        worker.recorder.torch = False
    await one.come_up()
    one.fake.running, one.fake.hang = 1, asyncio.Event()
    for _ in range(8):
        one.fake.end_step()
        report = await one.tick()
    assert report.ranks[0].torch.ooms is None
    one.fake.hang.set()
    await asyncio.wait({one.core.engine._outstanding})
    one.fake.workers[0].ooms, one.fake.running, one.fake.hang = 1, 0, None
    one.fake.end_step()
    await one.tick()
    assert await one.kinds() == ["out_of_memory"]


@pytest.mark.parametrize("how", ["never answers", "takes calls and never answers"])
async def test_an_engine_that_was_never_there_makes_none(boxed, how, monkeypatch):
    one = boxed()
    if how == "never answers":
        one.fake.down = True
    else:

        async def late(*_, **__):
            raise EngineUnresponsive("GET /version: no answer in time")

        monkeypatch.setattr(Engine, "get_json", late)
    states = {(await one.tick(60.0)).engine.state for _ in range(3)}
    assert states == {"starting"}
    await one.die()
    assert await one.kinds() == []


async def test_an_engine_on_its_way_back_makes_none(one, monkeypatch):
    await one.come_up()
    await one.die()
    one.fake.down = False

    async def late(*_, **__):
        raise EngineUnresponsive("GET /version: no answer in time")

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "get_json", late)
        assert (await one.tick(90.0)).engine.state == "starting"
    one.fake.down = True
    assert (await one.tick(90.0)).engine.state == "gone"
    assert await one.kinds() == ["died"]


NO_ROOM = (
    "(EngineCore pid=7) ERROR [core.py:1510] EngineCore failed to start.\n"
    "(EngineCore pid=7) ERROR [core.py:1510] ValueError: No available memory for the cache blocks. Try increasing\n"
)


@pytest.mark.parametrize("was_there", [True, False])
async def test_a_start_that_fails_is_an_incident(boxed, was_there):
    one = boxed(logged=True)
    if was_there:
        await one.come_up()
    one.fake.down = True
    await one.tick()
    with one.log.open("a") as file:
        file.write(NO_ROOM)
    for _ in range(3):
        await one.tick(10.0)
    assert await one.kinds() == (["died"] if was_there else []) + ["start_failed"]
    (headline, *_) = await one.incidents.headlines()
    incident = await one.incidents.read(headline.id)
    assert incident.summary == "The engine did not start: the log says that nothing is left for the KV cache"
    assert (incident.ranks, incident.ended_at) == ((), None), "the ranks of another engine tell nothing of it"
    assert one.told()[-1] == f"incident {incident.id}: {incident.summary}"
    one.start_again()
    await one.tick()
    assert (await one.incidents.read(headline.id)).ended_at == one.clock.now


async def test_the_log_is_looked_at_while_the_poller_runs(boxed):
    one = boxed(logged=True)
    await one.come_up()
    writing = asyncio.create_task(one.box.run())
    one.fake.down = True
    await one.core.tick()
    await one.box._waiting.join()
    one.log.write_text(
        "(EngineCore pid=7) ERROR [core.py:1512] RuntimeError: CUDA driver error: out of memory\n" + NO_ROOM
    )
    for _ in range(2):
        await one.core.tick(3.0)
        await one.box._waiting.join()
    (died,) = await one.incidents.headlines()
    assert died.summary.startswith("The engine died")
    assert "found no room on the GPU" in died.summary
    await one.core.tick(3.0)
    await one.box._waiting.join()
    writing.cancel()
    await asyncio.wait({writing})
    assert await one.kinds() == ["died", "start_failed"]


async def test_a_kill_by_the_kernel_is_told_with_the_death(either):
    await either.come_up()
    for kills in (0, 1):
        either.oom_kills.look(seen(kills))
    await either.tick(100.0)
    either.host = HostFacts(reading=seen(3), caches=ProcessorCaches(kind="off"))
    await either.die()
    incident = await either.only()
    finding = next(finding for finding in incident.findings if finding.name == "killed_by_kernel")
    assert (finding.weight, finding.figures) == ("likely", {"oom_kills": 2})
    assert "the kernel killed a process of the engine's container for memory" in incident.summary


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_whole", [False, True], ids=["one process", "the whole container"])
async def test_an_engine_that_the_kernel_killed_in_its_pod_names_what_grew(one, tmp_path, version, is_whole):
    await one.come_up()
    one.pod = pod = Pod(tmp_path, version, booted_at=one.clock.now - 740.0)
    pod.kills = one.oom_kills
    pod.watch.listeners[:] = [one.oom_kills.look]
    await leak(pod)
    if not is_whole:
        pod.write("api_server", 460, kept=900, kills=1)
    pod.now = one.clock.now + 4.0 - pod.booted_at
    one.fake.down = True
    for _ in range(2):
        await one.tick()
    incident = await one.only()
    names = {finding.name for finding in incident.findings if finding.weight == "likely"}
    assert names == ({"host_memory"} if is_whole else {"host_memory", "killed_by_kernel"})
    assert "EngineCore grew from 450 MiB to 2.31 GiB in 4 min" in incident.summary
    assert ("kill_not_known" in {finding.name for finding in incident.findings}) is is_whole
    assert "memory was not short" not in incident.summary


async def test_recorders_that_cannot_be_read_cost_no_incident(one, monkeypatch):
    await one.come_up()
    monkeypatch.setattr(one.core.recorders, "last_minutes", raising(OSError("gone")))
    await one.die()
    assert (len((await one.only()).ranks), one.errors) == (2, 1)


async def test_host_memory_that_cannot_be_read_costs_no_incident(one):
    await one.come_up()
    one.host = OSError("gone")
    await one.die()
    incident = await one.only()
    assert one.errors == 1
    assert "kill_not_known" in {finding.name for finding in incident.findings}


async def test_what_an_earlier_sidecar_left_open_is_ended(one):
    """The engine is ready: it cannot be going on."""
    await one.come_up()
    await one.die()
    later = Boxed(one.core, one.incidents.folder)
    one.core.poller.reports.listeners.remove(one.box.notice)
    one.fake.down = False
    await later.tick()
    assert (await later.only()).ended_at == one.clock.now


# --- what is known ---


async def test_a_death_is_told_with_all_that_the_ranks_wrote(one):
    await one.come_up()
    one.fake.serve_images()
    one.fake.running, one.fake.kv_usage = 3, 0.5
    for _ in range(25):
        one.clock.advance(0.1)
        one.fake.end_step()
        one.fake.record()
    one.clock.advance(-2.0)
    one.fake.begin_step()
    one.clock.advance(2.0)
    for worker in one.fake.workers:
        worker.recorder.stack = ["attention.py:7 forward", "model.py:3 run"]
    await one.tick(1.0)
    one.fake.kill(one.fake.workers[1])
    one.fake.workers[1].recorder.works = False
    await one.tick(1.5)
    await one.die()
    assert one.core.recorders.files.instance is None
    incident = await one.only()
    first, second = incident.ranks
    assert [(rank.rank, rank.pid, rank.status) for rank in incident.ranks] == [(0, 4242, "alive"), (1, 4243, "dead")]
    assert first.stack == second.stack == ("attention.py:7 forward", "model.py:3 run")
    assert (first.step_seconds, second.step_seconds) == (pytest.approx(5.5), pytest.approx(3.0))
    assert first.doing == "in one step for 5.5 s"
    assert second.doing == "it wrote last 2.5 s ago, in one step for 3.0 s"
    assert (first.reading.used_bytes, first.reading.source) == (USED_AFTER, "recorder")
    assert (len(first.entries), first.entries[0].bytes) == (20, IMAGE_BYTES)
    assert [point.used_bytes for point in first.series][::2][:2] == [USED_READY, USED_AFTER]
    assert len(first.series) > 20
    assert first.series[-1].at == pytest.approx(one.clock.now)
    assert second.series[-1].components.encoder_cache_bytes == IMAGES * IMAGE_BYTES
    assert (incident.engine.requests_running, incident.engine.kv_cache_usage_ratio) == (3, 0.5)
    assert incident.growth.since_ready_bytes == IMAGES * IMAGE_BYTES, "of the rank that still lived"
    assert any(finding.name == "lost_ranks" for finding in incident.findings)
    assert incident.policy.mode == "act"


async def test_of_an_idle_engine_the_readings_since_its_last_sample_are_there_too(one):
    await one.come_up()
    for _ in range(5):
        await one.tick(1.0)
    await one.die()
    incident = await one.only()
    for rank in incident.ranks:
        times = [point.at for point in rank.series]
        assert times == sorted(times)
        assert len(times) >= 5
        assert times[-1] == pytest.approx(one.clock.now - 1.0, abs=0.2)


async def test_a_rank_that_only_a_file_tells_of_is_there_too(boxed):
    one = boxed(tensor_parallel=1, data_parallel=2)
    await one.come_up()
    one.fake.kill(one.fake.workers[1])
    await one.tick(4.0)
    await one.die()
    incident = await one.only()
    assert [(rank.dp_rank, rank.pid, rank.status) for rank in incident.ranks] == [(0, 4242, "alive"), (1, 4243, "dead")]
    assert incident.ranks[1].reading.used_bytes == USED_READY


async def test_without_recorders_the_history_tells(boxed):
    one = boxed(recorders=False)
    await one.come_up()
    for _ in range(3):
        one.fake.serve_images(1)
        await one.tick()
    await one.die()
    rank = (await one.only()).ranks[0]
    assert (rank.status, rank.stack, rank.reading.source) == ("unknown", (), "rpc")
    assert [point.used_bytes - USED_READY for point in rank.series] == [n * IMAGE_BYTES for n in range(4)]


async def test_without_the_extension_the_load_is_known(boxed):
    one = boxed(recorders=False, extension=None)
    one.fake.running = 7
    await one.come_up()
    await one.die()
    incident = await one.only()
    assert (incident.ranks, incident.engine.requests_running) == ((), 7)


async def test_the_span_before_it_is_told(one):
    await one.come_up()
    one.core.history.record("mark", "mark 'long ago'")
    one.clock.advance(601.0)
    one.core.history.record("mark", "mark 'bench'")
    one.core.history.record("policy", "memory: calm -> short", rule="device")
    one.core.history.record("reset", "release done", trigger="policy", rule="device")
    one.core.history.record("reset", "release done", trigger="reclaim")
    await one.die()
    incident = await one.only()
    assert [event.kind for event in incident.events] == ["mark", "policy", "reset", "reset", "state"]
    assert [event.summary for event in incident.decisions] == ["memory: calm -> short", "release done"]


async def test_requests_with_images_that_ran_or_had_just_ended_are_named_the_largest_first(one):
    def sent(name: str, size: int, ended_at: float | None) -> RequestItems:
        return RequestItems(name, None, "chat", "passed", Cost(size), (), 0.0, 0.0, ended_at, 200)

    await one.come_up()
    at = one.clock.now
    one.box._requests = lambda: [sent("old", 9, at - 59.0), sent("just", 1, at - 58.0), sent("runs", 5, None)]
    await one.die()
    assert [each.request_id for each in (await one.only()).requests] == ["runs", "just"]


async def test_another_life_has_its_own_evidence(one):
    await one.come_up()
    one.fake.serve_images()
    one.fake.begin_step()
    await one.tick(2.0)
    await one.die()
    one.start_again()
    for worker in one.fake.workers:
        worker.recorder.refuses = "OSError: no space left on device"
    await one.come_up()
    await one.die()
    newest, _ = await one.incidents.headlines()
    incident = await one.incidents.read(newest.id)
    assert [(rank.pid, rank.reading.used_bytes, rank.doing) for rank in incident.ranks] == [
        (4244, USED_READY, ""),
        (4245, USED_READY, ""),
    ]
    assert {point.used_bytes for rank in incident.ranks for point in rank.series} == {USED_READY}


async def test_a_life_that_nobody_saw_begin_has_its_own_evidence_too(either):
    await either.come_up()
    either.fake.begin_step()
    await either.tick(2.0)
    either.fake.start_again()
    await either.core.tick()
    await either.die()
    last, first = await either.incidents.headlines()
    assert (first.kind, last.kind) == ("died", "died")
    assert "other processes answer in its place" in first.summary
    read_last, seen = 2.0, either.clock.now
    assert first.at < first.ended_at <= seen
    assert first.ended_at - first.at >= read_last
    incident = await either.incidents.read(last.id)
    assert [(rank.pid, rank.status, rank.doing) for rank in incident.ranks] == [
        (4244, "unknown", ""),
        (4245, "unknown", ""),
    ]


async def test_a_recorder_that_fell_behind_does_not_hide_what_a_worker_answered(one):
    await one.come_up()
    for worker in one.fake.workers:
        worker.recorder.works = False
    one.fake.serve_images()
    await one.tick(4.0)
    await one.die()
    incident = await one.only()
    assert [(rank.status, rank.reading.used_bytes, rank.reading.source) for rank in incident.ranks] == [
        ("silent", USED_AFTER, "rpc"),
        ("silent", USED_AFTER, "rpc"),
    ]


# --- the writing ---


async def test_what_was_noticed_is_written_beside_the_poller(one):
    await one.come_up()
    task = asyncio.create_task(one.box.run())
    one.fake.down = True
    with one.core.history.watch() as queue:
        await one.core.tick()
        await one.core.tick()
        while not isinstance(told := await queue.get(), Event) or told.kind != "incident":
            pass
    task.cancel()
    await asyncio.wait({task})
    assert await one.kinds() == ["died"]


async def test_one_that_cannot_be_handled_costs_only_itself(one, monkeypatch, caplog):
    await one.come_up()
    handled: list[object] = []

    async def handle(*noticed):
        handled.append(noticed)
        if len(handled) == 1:
            raise ZeroDivisionError
        raise asyncio.CancelledError

    for part in ("_write", "_end_all"):
        monkeypatch.setattr(one.box, part, handle)
    for down in (True, True, False):
        one.fake.down = down
        await one.core.tick()
    with pytest.raises(asyncio.CancelledError):
        await one.box.run()
    assert (len(handled), one.errors) == (2, 1)
    assert "could not be handled" in caplog.text


async def test_a_full_queue_never_blocks(one):
    await one.come_up()
    for _ in range(2 * BACKLOG):
        one.fake.workers[0].ooms += 1
        await one.core.tick()
    assert one.box._waiting.qsize() == BACKLOG
    await one.write()
    assert (await one.only()).count == BACKLOG
    await one.tick()
    await one.tick()
    assert (await one.only()).ended_at is not None


async def test_an_engine_that_stays_ready_fills_no_queue(one):
    """While one incident is written for long, a death must find room."""
    await one.come_up()
    for _ in range(2 * BACKLOG):
        await one.core.tick()
    assert one.box._waiting.qsize() == 0
    one.fake.down = True
    await one.core.tick(0.0)
    await one.core.tick()
    assert one.box._waiting.qsize() == 1


async def test_a_death_finds_room_while_the_one_before_it_is_written(one):
    await one.come_up()
    for ready in (2 * BACKLOG, 1):
        one.fake.down = True
        await one.core.tick(0.0)
        await one.core.tick()
        one.start_again()
        for _ in range(ready):
            await one.core.tick(600.0 / BACKLOG)
    assert one.box._waiting.qsize() == 4
    await one.write()
    assert await one.kinds() == ["died", "died"]
    assert all(headline.ended_at is not None for headline in await one.incidents.headlines())


async def test_what_finds_no_room_is_logged(one, caplog):
    """Nothing else would say that it is missing."""
    await one.come_up()
    for _ in range(BACKLOG + 1):
        one.fake.workers[0].ooms += 1
        await one.core.tick()
    assert f"an incident is not written: {BACKLOG} before it wait for the disk" in caplog.text


async def test_a_folder_that_is_full_is_logged(one, monkeypatch, caplog):
    await one.come_up()
    one.incidents.folder.chmod(0o500)
    monkeypatch.setattr(one.incidents._store, "_flush", lambda _: setattr(one.incidents._store, "problem", "no room"))
    await one.die()
    assert "no room" in caplog.text
    assert await one.kinds() == ["died"]


async def test_no_evidence_is_mixed_up_by_a_rank_without_a_number(one):
    await one.come_up()
    engine = EngineStatus(url="http://engine:8000", state="ready")
    ranks = tuple(replace(rank, rank=None, dp_rank=None) for rank in one.core.poller.current().ranks[:1])
    one.box.notice(replace(one.core.poller.current(), engine=engine, ranks=ranks))
    await one.die()
    assert len((await one.only()).ranks) == 2
    assert json.loads((one.incidents.folder / f"{(await one.only()).id}.json").read_bytes())["kind"] == "died"


@pytest.mark.parametrize(("is_next", "seconds"), [(False, 36.0), (True, 6.0)])
async def test_a_start_that_the_log_says_nothing_of_is_told_when_the_next_one_writes(boxed, is_next, seconds):
    """Until then its last lines may come."""
    one = boxed(logged=True, recorders=False)
    one.box._starts._starts = SimpleNamespace(is_under_way=is_next, note_failed_by_log=lambda _: True)
    one.fake.down = True
    report = await one.core.tick()
    failure = StartFailure(
        at=one.clock.now - 16.0, recorder_instance="process-1-9", summary="it ended", ranks=(), is_silent=True
    )
    told = replace(report, start_failure=failure)
    for passed, count in ((0.0, 0), (seconds - 2.0, 0), (2.0, 1)):
        one.clock.advance(passed)
        one.box.notice(told)
        await write_what_waits(one)
        assert len(await one.kinds()) == count


async def test_a_start_whose_log_began_again_is_told_at_once(boxed):
    one = boxed(logged=True, recorders=False)
    one.core.poller.starts.note_failed_by_log = lambda _: False
    begun = iter([(), (FailedStart(id="a"),)])

    async def failed_starts(*, at_once: bool) -> tuple[FailedStart, ...]:
        return next(begun, ())

    one.incidents.failed_starts = failed_starts
    one.fake.down = True
    report = await one.core.tick()
    for _ in range(2):
        one.clock.advance(5.0)
        one.box.notice(report)
        await write_what_waits(one)
    assert await one.kinds() == []
    failure = StartFailure(
        at=one.clock.now - 3.0, recorder_instance="process-1-9", summary="it ended", ranks=(), is_silent=True
    )
    one.box.notice(replace(report, start_failure=failure))
    await write_what_waits(one)
    assert await one.kinds() == ["start_failed"]


@pytest.mark.parametrize("has_log", [False, True])
async def test_a_start_that_failed_is_an_incident_without_a_log_too(boxed, tmp_path, has_log):
    one = boxed(dev_mode=False, logged=has_log)
    at = one.clock.now
    one.fake.down = True
    one.fake.start_recorders(tmp_path / "recorders" / "recorder", "b" * 16)
    for worker in one.fake.workers:
        worker.recorder.phases = [phase("init", at), phase("kv_cache", at, "ValueError: too long")]
    await one.tick()
    for worker in one.fake.workers:
        one.fake.kill(worker)
    for _ in range(6):
        await one.tick()
    incident = await one.only()
    assert (incident.kind, incident.count, incident.start) == ("start_failed", 1, "b" * 16)
    assert incident.engine.model == one.fake.model
    assert incident.reason == "rank 0 (pid 4242 on node-a) failed in phase kv_cache after 2.0 s: ValueError: too long"
    assert [[each.name for each in rank.reading.start] for rank in incident.ranks] == [["init", "kv_cache"]] * 2
    silence = "which lines of the engine's log are of this start is not known"
    assert [note for note in incident.notes if "engine_log is not set" not in note] == ([silence] if has_log else [])
    one.start_again()
    await one.tick()
    assert (await one.only()).ended_at == one.clock.now


async def test_a_wake_up_that_fails_is_an_event(boxed):
    one = boxed(logged=True)
    await one.come_up()
    one.fake.asleep = True
    for _ in range(2):
        report = await one.tick(10.0)
    assert report.engine.state == "sleeping"
    core = "(EngineCore pid=418) ERROR 09-02 00:55:35 [core.py:1210] "
    with one.log.open("a") as file:
        file.write("(EngineCore pid=418) CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163\n")
        file.write(f"{core}Invocation of wake_up method failed\n")
    for _ in range(3):
        await one.tick(10.0)
    said = [summary for summary in one.core.summaries("state") if "wake up" in summary]
    assert [summary.partition(".")[0] for summary in said] == [
        "the engine was told to wake up and could not: the device's memory was short"
    ]
    assert await one.kinds() == []


async def test_an_orderly_end_by_the_log_is_an_event(boxed):
    one = boxed(logged=True, recorders=False)
    await one.come_up()
    one.log.write_text("(APIServer pid=1) INFO:     Shutting down\n")
    await one.die()
    assert await one.kinds() == []
    assert any("ended in order, as its log says" in summary for summary in one.core.summaries("state"))
    assert (await one.tick()).engine.stopped_at is not None
