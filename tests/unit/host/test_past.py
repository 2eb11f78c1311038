"""The last minutes: what grew, how full it was, and what the dead have left, by files as a worker writes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from highwater.diagnose.rules.book import host_findings
from highwater.host.needs import CacheCounts
from highwater.host.past import MAX_PARTS, HostPast, OomKillWatch
from highwater.host.reading import EndedProcess, HostReading, ProcessMemory
from highwater.host.report import GrownPart
from highwater.host.watch import HostReader, HostWatch
from highwater.http.text.host import host_text
from highwater.model.units import MIB
from highwater.process.clocks import Clocks
from tests.unit.host.recorded import machine, reading, record, write

V1_STAT = {"total_rss": 1, "total_cache": 0, "total_active_file": 0, "total_inactive_file": 0}
LIMIT = 4096 * MIB


class Pod:
    """An engine in a container of its own whose processes write files, and a sidecar beside it, on one clock."""

    def __init__(self, tmp_path, version: int = 2, booted_at: float = 1000.0) -> None:
        self.now, self.version, self.folder, self.booted_at = 500.0, version, tmp_path / "ring", booted_at
        root = machine(tmp_path / "root")
        (tmp_path / "shm").mkdir()
        wandering = cycle((0.0, -0.003, 0.002))
        reader = HostReader(
            self.folder,
            clocks=Clocks(lambda: self.now, lambda: self.now + booted_at + next(wandering)),
            root=root,
            shm=tmp_path / "shm",
        )
        self.life: str | None = None
        self.queries: int | None = 0
        self.watch = HostWatch(
            reader,
            judge=host_findings,
            counts=lambda: CacheCounts(queries=self.queries),
            life=lambda: self.life,
            clocks=Clocks(lambda: self.now),
        )
        self.kills = OomKillWatch(Clocks(lambda: self.now))
        self.watch.listeners.append(self.kills.look)

    def write(self, role: str, mib: int, *, kept: int, kills: int = 0, inode: int = 77, **changes) -> None:
        """One process's file, as of now."""
        stat = V1_STAT if self.version == 1 else {"anon": kept * MIB, "file": 0}
        cgroup = {
            "version": self.version,
            "inode": inode,
            "used": kept * MIB,
            "kept": kept * MIB,
            "limit": LIMIT,
            "stat": stat,
            "events": {"oom_kill": kills},
            "mono": self.now,
        }
        pid = {"api_server": 1, "engine_core": 2, "worker": 3}[role]
        given = {"pid": pid, "role": role, "anonymous_bytes": mib * MIB, "cgroup": cgroup} | changes
        write(self.folder, record(mono=self.now, at=self.now + self.booted_at, **given))

    async def pass_by(self, seconds: float) -> HostReading:
        self.now += seconds
        return (await self.watch.read()).reading


@pytest.fixture(params=[1, 2], ids=["cgroup v1", "cgroup v2"])
def pod(request, tmp_path) -> Pod:
    return Pod(tmp_path, request.param)


async def leak(pod: Pod, seconds: int = 240) -> int:
    """EngineCore grows by 8 MiB a second from 450 MiB on; returns what it then has."""
    pod.life = "a"
    for passed in range(0, seconds + 1, 5):
        core = 450 + 8 * passed
        pod.write("api_server", 460, kept=1600 + core)
        pod.write("engine_core", core, kept=1600 + core)
        pod.write("worker", 700, kept=1600 + core)
        await pod.pass_by(0.5)
        pod.now += 4.5
    return core


async def test_of_one_process_that_was_killed_the_survivor_has_the_counter(pod):
    """The API server writes on for a second or two; the process that grew is named, with over which time."""
    core = await leak(pod)
    pod.write("api_server", 460, kept=1200, kills=1)
    pod.now += 0.5
    facts = await pod.watch.facts()
    assert pod.kills.recent(facts.reading).count == 1
    assert facts.suspect.text == f"EngineCore grew from 450 MiB to {core / 1024:.2f} GiB in 4 min"
    assert round(facts.fullest.ratio, 2) == round((1600 + core) / 4096, 2)
    assert facts.ended_together == 0


async def test_a_whole_container_that_was_killed_has_left_its_last_look(pod):
    await leak(pod)
    pod.now += 8.0
    facts = await pod.watch.facts()
    assert pod.kills.recent(facts.reading) is None
    assert (facts.ended_together, facts.suspect.name) == (3, "EngineCore")
    assert facts.fullest.ratio > 0.95


async def test_one_that_was_stopped_before_does_not_hide_that_all_others_ended_together(pod):
    await leak(pod, 60)
    for _ in range(45):
        pod.now += 1.0
        pod.write("api_server", 460, kept=1600)
        pod.write("worker", 700, kept=1600)
    pod.now += 4.0
    facts = await pod.watch.facts()
    assert (facts.ended_together, pod.kills.recent(facts.reading)) == (2, None)


async def test_processes_that_fall_silent_seconds_apart_have_not_ended_together(pod):
    for role in ("api_server", "worker"):
        pod.write(role, 460, kept=1600)
        pod.now += 4.0
    assert (await pod.watch.facts()).ended_together == 0


async def test_files_that_are_gone_with_their_volume_have_been_read(pod):
    await leak(pod)
    for path in pod.folder.iterdir():
        path.unlink()
    facts = await pod.watch.facts()
    assert (facts.reading.processes, facts.suspect.name) == ((), "EngineCore")
    assert facts.fullest.ratio > 0.95


async def test_what_grew_while_it_loaded_is_its_start(pod):
    for size in (10, 400, 800):
        pod.write("worker", size, kept=size)
        await pod.pass_by(5.0)
    pod.life = "a"
    pod.write("worker", 801, kept=801)
    await pod.pass_by(5.0)
    assert (await pod.watch.facts()).suspect.text == "worker held the most, 801 MiB"


async def test_what_the_dead_have_left_names_them_though_no_sidecar_saw_them(pod):
    """It began after their end, or looks every five seconds and they lived for four."""
    for role, size in (("api_server", 450), ("engine_core", 440)):
        pod.write(role, size, kept=4000, kills=1)
    pod.now += 4.0
    await pod.watch.read()
    facts = await pod.watch.facts()
    assert facts.suspect.text == "API server held the most, 450 MiB"
    assert pod.kills.recent(facts.reading).count == 1
    assert len(facts.parts) == len(facts.reading.processes) == facts.ended_together == 2
    pod.now += 20.0
    facts = await pod.watch.facts()
    assert (len(facts.parts), len(facts.reading.ended)) == (2, 2)
    said = host_text(await pod.watch.report())
    assert (
        "API server (pid 1) is silent, its last look was 24 s ago: 450 MiB anonymous, its container at 97.7 % of"
        in said
    )
    assert "oom_kill 1" in said


async def test_the_next_life_is_not_accused(pod):
    pod.life = "a"
    for _ in range(3):
        pod.write("engine_core", 450, kept=900, started=5)
        await pod.pass_by(2.0)
    pod.now += 6.0
    for size in (50, 400):
        pod.write("engine_core", size, kept=size, started=6, inode=78)
        await pod.pass_by(2.0)
    facts = await pod.watch.facts()
    assert [part.bytes for part in facts.parts if part.role] == [450 * MIB]


async def test_growth_that_began_late_is_told_since_then(pod):
    pod.life = "a"
    for passed in range(0, 200, 5):
        pod.write("worker", 700 + max(0, passed - 170) * 40, kept=2000)
        await pod.pass_by(5.0)
    facts = await pod.watch.facts()
    assert facts.suspect.text == "worker grew from 700 MiB to 1.66 GiB in 25 s"


async def test_the_host_report_names_the_part_that_grows_and_its_pace(pod):
    await leak(pod)
    report = await pod.watch.report()
    found = next(one for one in report.findings if one.name == "container_nearly_full")
    assert "EngineCore grew from 450 MiB to 2.31 GiB in 4 min, +480 MiB a minute. Its pid is 2." in found.text
    assert "memray attach PID" in found.advice
    assert "--mm-processor-cache-gb" not in found.advice
    assert pod.watch.now.report.summary.warnings[0] == found.text


def test_the_number_of_parts_is_bounded():
    past = HostPast()
    for number in range(3 * MAX_PARTS):
        one = ProcessMemory(role="other", name="x", pid=number + 1, started=1, anonymous_bytes=MIB)
        past.add(HostReading(taken_at=float(number), processes=(one,)))
    assert len(past._courses) == MAX_PARTS
    for second in range(2000):
        past.add(reading(taken_at=1000.0 + second))
    assert len(past._fills) == 128
    assert max(len(course._values) for course in past._courses.values()) < 90


def test_without_a_limit_the_machine_is_what_fills():
    past, known = HostPast(), reading(taken_at=1.0)
    free = replace(known.container, limit_bytes=None)
    full = replace(known.machine, total_bytes=1000, available_bytes=20)
    seen = replace(known, container=free, machine=full)
    past.add(seen)
    facts = past.facts(seen, None)
    assert (facts.fullest.is_limited, facts.fullest.ratio) == (False, 0.98)


def test_a_part_that_moves_by_itself_has_not_grown():
    part = GrownPart(kind="process", name="w", bytes=2000 * MIB, at=1.0, grown_bytes=150 * MIB, seconds=9.0)
    assert (part.has_grown, replace(part, grown_bytes=300 * MIB).has_grown) == (False, True)
    assert part.text == "w held the most, 1.95 GiB"


@pytest.mark.parametrize("lives_on", [False, True])
def test_the_fullest_moment_is_one_before_the_last_sign_of_the_engine(lives_on):
    past, known = HostPast(), reading(taken_at=100.0)
    core = ProcessMemory(role="engine_core", name="c", pid=2, started=1, anonymous_bytes=MIB)
    other = replace(core, pid=1)
    kept = replace(known.container, key="k", age_seconds=0.0, limit_bytes=1000, kept_bytes=500)
    for at, bytes_kept in ((100.0, 500), (110.0, 900)):
        container = replace(kept, kept_bytes=bytes_kept)
        is_later = at > 100.0
        ended = EndedProcess(
            role="engine_core", name="c", pid=2, started=1, anonymous_bytes=MIB, age_seconds=at - 100.0
        )
        new = replace(core, pid=9, started=9)
        seen = HostReading(
            taken_at=at,
            processes=tuple(
                replace(one, container="k")
                for one in (((other,) if lives_on else ()) + (new,) if is_later else (core, other))
            ),
            ended=tuple(replace(ended, container="k", pid=pid) for pid in ((2,) if lives_on else (1, 2)) if is_later),
            container=container,
        )
        past.add(seen)
    assert past.facts(seen, None).fullest.ratio == (0.9 if lives_on else 0.5)
