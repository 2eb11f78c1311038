"""Starts that are killed before a rank is read: an incident from the first on, one for a loop, and a restart each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from highwater.diagnose.evidence import Incident
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.store import IncidentStore
from highwater.diagnose.incidents.watcher import IncidentWatcher
from highwater.diagnose.log.starts import FailedStart
from highwater.host.process_lives import ProcessLives
from highwater.host.watch import HostReader
from highwater.model.engine import SeenProcess
from highwater.model.policy import PolicyStatus
from highwater.model.report import Report
from highwater.model.units import MIB
from highwater.process.clocks import Clocks
from tests.fakes.engine import core_on
from tests.unit.host.recorded import BOOT, machine, record, write

LIMIT = 1250 * MIB
ROLES = {1: ("api_server", 0, 672), 60: ("engine_core", 1, 625), 90: ("worker", 60, 572)}
REFUSED = (
    "(APIServer pid=1) INFO 11-20 17:3{number}:20 [api_server.py:1351] vLLM API server version 0.32.0\n"
    "(EngineCore pid=60) ERROR [core.py:1510] ValueError: No available memory for the cache blocks.\n"
)


class Pod:
    """A sidecar that has not seen an engine yet, on one fake clock, and the files of the container beside it."""

    def __init__(self, path: Path, *, recorders: bool, log: bool) -> None:
        self.core, self.folder, self.log = core_on(), path / "recorders", path / "engine.log"
        self.core.fake.down = True
        self.clock = self.core.clock
        self.has_recorders = recorders
        for folder in (self.folder, path / "incidents"):
            folder.mkdir()
        if log:
            self.log.touch()
        reader = HostReader(
            self.folder,
            clocks=Clocks(self.clock, self.core.wall),
            root=machine(path / "root"),
            shm=path,
        )
        self.reader, self.lives = reader, ProcessLives(reader.exists)
        self.core.processes.lives = lambda: self.lives.last
        self.incidents = Incidents(
            IncidentStore(path / "incidents"),
            engine_log=self.log if log else None,
            clocks=Clocks(self.clock, self.core.wall),
        )
        self.box = IncidentWatcher(
            self.incidents,
            self.core.history,
            recorders=None,
            starts=self.core.poller.starts,
            life=lambda: self.core.poller.life,
            policy=lambda: PolicyStatus(level="held", mode="act", summary="held"),
        )
        self.core.poller.reports.subscribe(self.box.notice)

    def write(self, start: int, *, kills: int = 0, used: int = LIMIT, pids: tuple[int, ...] = (1, 60, 90)) -> None:
        """Write the container's files, as its processes do once a second."""
        counted = {"version": 2, "inode": start, "path": "/pod", "used": used, "kept": used, "limit": LIMIT}
        for pid in pids if self.has_recorders else ():
            role, parent, peak = ROLES[pid]
            mine = {"pid": pid, "started": 1000 * start + pid, "role": role, "parent_pid": parent}
            group = counted | {"events": {"oom_kill": kills}, "mono": self.clock.now}
            sizes = {"peak_bytes": peak * MIB, "pid_namespace": 4026532000 + start, "boot_id": BOOT, "host": "pod"}
            times = {"at": self.core.wall(), "mono": self.clock.now}
            write(self.folder, record(**mine, **sizes, **times, cgroup=group))

    def remove(self) -> None:
        """What the processes do that end in order."""
        for path in self.folder.glob("*.process"):
            path.unlink()

    async def tick(self, seconds: float = 5.0) -> Report:
        """A look at the files, a poll, and everything written that was noticed."""
        self.clock.advance(seconds)
        self.lives.look(self.reader.read())
        report = await self.core.poller.poll(spare_idle=True)
        writing = asyncio.create_task(self.box.run())
        await self.box._waiting.join()
        writing.cancel()
        await asyncio.wait({writing})
        return report

    async def idle(self, seconds: float) -> Report:
        for _ in range(int(seconds // 5)):
            report = await self.tick()
        return report

    async def start(self, number: int, *, kills: int = 1, runs: int = 2, pause: float = 60.0) -> Report:
        """A start that is killed while it loads, and the pause until the next one."""
        for _ in range(runs):
            self.write(number, used=LIMIT // 2)
            await self.tick()
        self.write(number, kills=kills)
        return await self.idle(pause)

    async def only(self) -> Incident:
        (headline,) = await self.incidents.headlines()
        incident = await self.incidents.read(headline.id)
        assert incident is not None
        return incident


@pytest.fixture
def pod(tmp_path):
    """A maker of pods; what they hold open is closed."""
    made: list[Pod] = []

    def make(*, recorders: bool = True, log: bool = False) -> Pod:
        made.append(Pod(tmp_path, recorders=recorders, log=log))
        return made[-1]

    yield make
    for one in made:
        one.incidents.close()


@pytest.mark.parametrize("log", [False, True])
async def test_a_start_that_the_kernel_kills_is_an_incident_an_event_and_a_restart(pod, log):
    one = pod(log=log)
    await one.tick()
    report = await one.start(1)
    said = (
        "it was killed by the kernel for memory while it started: API server 672 MiB at its peak, EngineCore 625 MiB "
        "at its peak, worker 572 MiB at its peak; container at 1.22 GiB of 1.22 GiB; oom_kill 1"
    )
    incident = await one.only()
    assert (incident.kind, incident.reason, incident.count) == ("start_failed", said, 1)
    assert incident.summary.startswith(f"The engine did not start: {said}")
    assert one.core.summaries("state") == [f"the engine did not start: {said}"]
    assert report.engine.restarts == 1
    said = report.engine.ended_starts
    assert said.startswith("the engine's last start was killed by the kernel for memory at 20")
    assert report.engine.hint.startswith(said)
    assert "engine_url" not in report.engine.hint


@pytest.mark.parametrize("log", [False, True])
async def test_a_crash_loop_is_one_incident_with_a_count(pod, log):
    one = pod(log=log)
    await one.tick()
    for number in (1, 2, 3):
        report = await one.start(number)
    incident = await one.only()
    assert (incident.count, incident.ended_at, report.engine.restarts) == (3, None, 3)
    assert [told.partition(": ")[0] for told in one.core.summaries("incident")] == [
        f"incident {incident.id}",
        f"incident {incident.id}, 2 times",
        f"incident {incident.id}, 3 times",
    ]
    assert report.engine.hint.startswith(
        "the engine's last 3 starts ended before it was ready; the last one was killed by the kernel for memory at 20"
    )
    one.write(4)
    one.core.processes.one = lambda: SeenProcess("API server, pid 1")
    hint = (await one.tick()).engine.hint
    assert "seems to be loading" in hint
    assert "before, the engine's last 3 starts ended" in hint
    engine = one.core.poller.current().engine
    assert engine.loading_process == "API server, pid 1"
    if one.has_recorders:  # by the start of its first process, in ticks since boot
        assert engine.loading_since == pytest.approx(one.core.wall() - one.clock.now + 40.01)
    one.core.fake.down = False
    one.write(4)
    report = await one.tick()
    assert (report.engine.restarts, report.engine.hint, report.start_failure) == (3, None, None)
    await one.tick()
    assert (await one.only()).ended_at is not None


@pytest.mark.parametrize("recorders", [False, True])
async def test_the_log_says_why_and_the_files_how_full_it_was(pod, recorders):
    one = pod(recorders=recorders, log=True)
    await one.tick()
    for number in (1, 2, 3):
        one.write(number, used=LIMIT // 2)
        await one.tick()
        one.write(number, kills=1)
        with one.log.open("a") as file:
            file.write(REFUSED.format(number=number))
        report = await one.idle(70.0)
    incident = await one.only()
    assert (incident.kind, incident.count, report.engine.restarts) == ("start_failed", 3, 3)
    assert "the log says that nothing is left for the KV cache" in incident.summary
    assert ("oom_kill 1" in incident.summary) is recorders


async def test_so_far_is_counted_from_the_start_that_runs_and_a_process_of_the_last_one_is_none(pod, monkeypatch):
    """An API server whose workers were killed takes a while to end; it loads nothing."""
    one = pod(recorders=False, log=True)
    began = one.clock.now
    one.core.processes.one = lambda: SeenProcess("API server, pid 1", began)
    await one.tick()
    assert (await one.idle(60.0)).engine.loading_since == began
    monkeypatch.setattr(one.incidents._log, "look", lambda *_, **__: (FailedStart(id="1"),))
    await one.tick()
    monkeypatch.setattr(one.incidents._log, "look", lambda *_, **__: ())
    engine = (await one.idle(5.0)).engine
    assert (engine.loading_since, engine.loading_process) == (None, None)
    kept = engine.ended_starts
    assert (await one.idle(5.0)).engine.ended_starts == kept, "an incident keeps it: no age"
    again = one.clock.now
    one.core.processes.one = lambda: SeenProcess("API server, pid 90", again)
    engine = (await one.idle(5.0)).engine
    assert (engine.loading_since, engine.loading_process) == (again, "API server, pid 90")
    one.core.processes.one = lambda: SeenProcess("API server, pid 90")
    assert (await one.idle(5.0)).engine.loading_since >= again, "it is not known, and it was seen first then"


async def test_a_log_that_begins_again_without_a_message_is_a_start_that_ended_without_a_word(pod, monkeypatch):
    one = pod(recorders=False, log=True)
    await one.tick()
    for number in (1, 2, 3):
        ended = (FailedStart(id=f"{number}"),)
        monkeypatch.setattr(one.incidents._log, "look", lambda *_, ended=ended, **__: ended)
        await one.tick()
        monkeypatch.setattr(one.incidents._log, "look", lambda *_, **__: ())
        report = await one.idle(60.0)
    incident = await one.only()
    assert (incident.count, report.engine.restarts) == (3, 3)
    assert incident.reason == "it ended during its start, without an error message"
    assert "the last one ended without a word at 20" in report.engine.hint


async def test_without_files_and_log_nothing_is_known_and_nothing_is_said(pod):
    one = pod(recorders=False)
    one.core.processes.unseen_starts = " Nothing shows that"
    await one.tick()
    report = await one.start(1)
    assert (await one.incidents.headlines(), report.engine.restarts) == ([], 0)
    assert report.engine.hint.endswith("is engine_url right? Nothing shows that")


async def test_a_sidecar_that_starts_in_a_loop_counts_what_it_sees(pod):
    one = pod()
    one.write(1, kills=1)
    one.clock.advance(60.0)
    report = await one.start(2)
    assert ((await one.only()).count, report.engine.restarts) == (1, 1)


async def test_starts_that_are_found_dead_at_once_count_each(pod):
    one = pod()
    await one.tick()
    for number in (1, 2, 3):
        one.write(number, kills=1)
        one.clock.advance(20.0)
    report = await one.idle(15.0)
    assert ((await one.only()).count, report.engine.restarts, len(one.core.summaries("state"))) == (3, 3, 3)


WHY = "whether it was stopped or failed is not known without engine_log"


async def test_an_end_that_may_be_a_planned_stop_is_an_event_and_a_loop_of_them_an_incident(pod):
    one = pod()
    for number, count in ((1, 0), (2, 1), (3, 2)):
        one.write(number)
        await one.tick()
        one.remove()
        report = await one.idle(60.0)
        assert [each.count for each in await one.incidents.headlines()] == ([count] if count else [])
        assert report.engine.restarts == number
    said = f"it ended before it was ready; {WHY}"
    assert one.core.summaries("state") == [f"the engine did not start: {said}"] * 3
    assert (await one.only()).summary == f"The engine did not start: {said}"
    assert report.engine.hint.startswith(
        "the engine's last 3 starts ended before it was ready; the last one ended at 20"
    )
    assert WHY in report.engine.hint


async def test_no_report_leads_with_an_older_start_than_the_last(pod):
    """One that may have been stopped comes after one that the kernel killed."""
    one = pod()
    await one.tick()
    assert (await one.start(1)).start_failure is not None
    one.clock.advance(700.0)
    one.write(2)
    await one.tick()
    one.remove()
    report = await one.idle(60.0)
    assert (report.start_failure, report.engine.restarts) == (None, 2)
    assert "the last one ended at 20" in report.engine.hint


async def test_a_crash_of_a_loading_enginecore_is_an_incident_from_the_first_on(pod):
    one = pod()
    await one.tick()
    for number in (1, 2):
        one.write(number, used=LIMIT // 2, pids=(1, 60))
        await one.tick()
        next(one.folder.glob("highwater-1-*.process")).unlink()
        report = await one.idle(60.0)
        assert ((await one.only()).count, report.engine.restarts) == (number, number)
    left = "ended from outside or by a crash: EngineCore 625 MiB at its peak; container at 625 MiB of 1.22 GiB"
    assert (await one.only()).summary == f"The engine did not start: it ended before it was ready; {WHY}; {left}"


async def test_a_death_is_no_failed_start(pod):
    one = pod()
    one.core.fake.down = False
    for _ in range(3):
        one.write(1)
        await one.tick()
    one.core.fake.down = True
    report = await one.idle(120.0)
    assert ([headline.kind for headline in await one.incidents.headlines()], report.engine.restarts) == (["died"], 0)
    report = await one.start(2)
    kinds = [headline.kind for headline in await one.incidents.headlines()]
    assert (kinds, report.engine.restarts) == (["start_failed", "died"], 2)


async def test_a_baseline_is_known_after_starts_that_failed(pod):
    one = pod()
    await one.tick()
    await one.start(1)
    one.core.fake.down = False
    one.core.fake.serve_images()
    report = await one.tick()
    assert (report.growth.since_ready_bytes, report.engine.restarts) == (0, 1)
