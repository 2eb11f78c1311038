"""Host memory as the sidecar reads and keeps it: in a thread every few seconds, and when a report is requested.

Process files come first, then what this machine's ``/proc`` and cgroups add to them. Nothing here calls the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from highwater.host.kernel import container_of, find_engine, own_pressure, own_shm, read_process, shares_shm, shm_of
from highwater.host.needs import NOT_COUNTED, CacheCounts
from highwater.host.past import HostFacts, HostPast, OutlookWindow
from highwater.host.process_files import ProcessFiles, ProcessRecord
from highwater.host.process_lives import SilentCores, StoppedEngine, engines_in
from highwater.host.reading import (
    NO_FILES,
    SHM,
    ContainerMemory,
    EndedProcess,
    HostReading,
    MachineMemory,
    ProcessMemory,
    Role,
    ShmMemory,
    name_of,
    named_apart,
)
from highwater.host.report import GrownPart, HostReport, Judge, OomKills, report_of
from highwater.model.engine import SeenProcess
from highwater.model.rank import RankReading
from highwater.process.clocks import STOPPED_STATES, SYSTEM, Clocks, Machine
from highwater.process.errors import contained
from highwater.watch.recorder.progress import SilentCore
from highwater_worker.kernel.cgroup import read_container
from highwater_worker.kernel.proc import read_machine
from highwater_worker.kernel.shm import SPARED

_NO_FOLDER = (
    "no process of the engine can be seen from here: set HIGHWATER_RECORDER_DIR for vLLM and recorder_dir for the "
    "sidecar, or share the PID namespace"
)
_NONE_ANY_MORE = (
    "no process of the engine is seen any more, though some were: it has ended, or another took its place that runs "
    "without HIGHWATER_RECORDER_DIR or the worker package"
)
_SEVERAL = (
    "processes of {engines} engines write into this folder, and all of them are shown: which of them are this "
    "sidecar's engine's is not known; give each engine a folder of its own (HIGHWATER_RECORDER_DIR, recorder_dir)"
)
_SWEEP_SECONDS, _MAX_PATH = 60.0, 160
_PROC_SECONDS = 10.0
"""The time between two searches of ``/proc`` for processes that write no file."""


class HostReader:
    """Reads host memory; without a ``folder`` of recorders only this machine's ``/proc`` can show anything.

    ``workers`` returns those that the poller knows. Tests replace ``root``, the file system's, and ``shm``, the mount
    of shared memory. Reading blocks for a few milliseconds: call it in a thread.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        workers: Callable[[], Sequence[RankReading]] = lambda: (),
        clocks: Clocks = SYSTEM,
        root: Path = Path("/"),
        shm: Path = Path(SHM),
    ) -> None:
        self._machine = Machine(clocks, root)
        self._has_folder = folder is not None
        self._files = ProcessFiles(folder, self._machine)
        self._workers = workers
        self._root = root
        self._shm = shm
        self._searched_at = self._swept_at = self._shm_at = self._shm_due = float("-inf")
        self._searched: frozenset[int] = frozenset()
        self._found: tuple[ProcessMemory, ...] = ()
        self._own_shm: ShmMemory | None = None
        self._has_seen_engine = False
        self._lock = threading.Lock()

    def read(self) -> HostReading:
        with self._lock:
            now = self._machine.monotonic()
            records = self._files.read()
            if now >= self._swept_at + _SWEEP_SECONDS:
                self._swept_at = now
                self._files.sweep()
            processes = [ProcessMemory(**one.as_process) for one in records]
            processes += self._listed(records, {one.pid for one in processes})
            processes += self._of_proc(records, {one.pid for one in processes}, now)
            containers = self._containers(records, processes)
            own = self._container("self", host="sidecar")
            if own is not None:
                # Where the sidecar's own group is the engine's too, it can be read now.
                containers = [
                    replace(own, host=one.host, is_private=one.is_private) if one.key == own.key else one
                    for one in containers
                ]
            counts = Counter(process.container for process in processes)
            main = max(containers, key=lambda one: (counts[one.key], one.used_bytes or 0), default=None)
            others = [one for one in containers if main is None or one.key != main.key]
            if own is not None and own.key not in {one.key for one in containers}:
                others.append(own)
            memory: dict[str, int] = {}
            with suppress(OSError):
                memory = read_machine(self._root)
            return HostReading(
                taken_at=self._machine.clock(),
                processes=named_apart(processes),
                ended=tuple(
                    EndedProcess(
                        **one.as_process, is_known=self._files.has_ended(one), last_container=one.last_container
                    )
                    for one in self._files.silent
                ),
                container=main,
                other_containers=tuple(others),
                shm=self._shared(records),
                machine=MachineMemory(**memory, pressure=own_pressure(self._root)),
                engine=next((replace(one.engine, version=one.vllm) for one in records if one.engine is not None), None),
                problems=self._problems(processes, is_seen=bool(records or self._found)),
            )

    def _problems(self, processes: Sequence[ProcessMemory], *, is_seen: bool) -> tuple[str, ...]:
        if (engines := engines_in(processes)) > 1:
            return (*self._files.problems, _SEVERAL.format(engines=engines))
        self._has_seen_engine = self._has_seen_engine or is_seen or bool(self._files.silent)
        if is_seen:
            return self._files.problems
        if self._has_seen_engine:
            return (*self._files.problems, _NONE_ANY_MORE)
        return (*self._files.problems, NO_FILES if self._has_folder else _NO_FOLDER)

    def is_stopped(self, process: ProcessMemory) -> bool:
        return self._machine.process_state(process.pid, process.started) in STOPPED_STATES

    def exists(self, process: ProcessMemory) -> bool:
        return self._machine.process_state(process.pid, process.started) not in {None, "Z", "?"}

    # --- processes ---

    def _listed(self, records: Iterable[ProcessRecord], known: set[int]) -> list[ProcessMemory]:
        rows = []
        for record in records:
            # The sidecar shares the engine's container on a machine without containers, and is not the engine's.
            own_pid = os.getpid() if self._files.shares_processes_with(record) else None
            for row in record.others:
                if row.pid in known or row.pid == own_pid:
                    continue
                known.add(row.pid)
                age = round(record.age_seconds + row.age_seconds, 3)
                rows.append(replace(row, host=record.host, container=record.container, age_seconds=age))
        return rows

    def _of_proc(self, records: Sequence[ProcessRecord], known: set[int], now: float) -> list[ProcessMemory]:
        pids = [one.pid for one in records if self._files.shares_processes_with(one)]
        pids += [
            worker.pid
            for worker in self._workers()
            if worker.pid
            and worker.pid_started
            and self._machine.process_state(worker.pid, worker.pid_started) not in {None, "?"}
        ]
        if not pids:
            self._found = ()
            return []
        # Not for those that it did not find: a zombie, or one process too many, is not found by the next one either.
        if now >= self._searched_at + _PROC_SECONDS or not self._searched >= set(pids):
            self._searched_at, self._searched = now, frozenset(pids)
            self._found = find_engine(self._root, pids)
            if now >= self._shm_due and not any(one.shm for one in records):
                began = time.thread_time()
                # With a shared PID namespace the engine's container still has a /dev/shm of its own.
                is_engines = all(shares_shm(one.pid, self._root) for one in self._found[:1])
                self._own_shm, self._shm_at = own_shm(str(self._shm), self._root) if is_engines else None, now
                self._shm_due = now + SPARED * (time.thread_time() - began)
        workers = {worker.pid: worker for worker in self._workers()}
        rows = []
        for before in self._found:
            one = None if before.pid in known else read_process(self._root, before.pid)
            if one is not None and one.started == before.started:
                rows.append(one)
        # Its command line is that of an engine's only API server.
        launchers = {one.parent_pid for one in rows if "::APIServer" in one.name}
        told = (replace(one, role="launcher") if one.pid in launchers else one for one in rows)
        return [self._named(one, workers.get(one.pid)) for one in told]

    def _named(self, one: ProcessMemory, worker: RankReading | None) -> ProcessMemory:
        role: Role = "worker" if worker is not None and one.role == "other" else one.role
        container = self._container(one.pid)
        rank, dp_rank = (worker.rank, worker.dp_rank) if worker is not None else (None, None)
        return replace(
            one,
            role=role,
            name=name_of(role, rank=rank, dp_rank=dp_rank, command=one.name),
            container=None if container is None else container.key,
            rank=rank,
            dp_rank=dp_rank,
        )

    # --- containers, shared memory ---

    def _containers(
        self, records: Sequence[ProcessRecord], processes: Iterable[ProcessMemory]
    ) -> list[ContainerMemory]:
        containers: dict[str, ContainerMemory] = {}
        read_now: set[str] = set()
        for record in records:
            container = record.last_container
            if container is None:
                continue
            if container.key not in containers or container.age_seconds < containers[container.key].age_seconds:
                containers[container.key] = container
        for process in processes:
            if process.source == "proc" and process.container is not None and process.container not in containers:
                seen = self._container(process.pid)
                if seen is not None:
                    containers[seen.key] = seen
        for record in self._files.silent:
            # On the sidecar's machine a group may outlive its processes: its counters are read after their end.
            last = record.last_container
            if last is None or not self._machine.is_boot(record.boot_id) or last.key in read_now:
                continue
            read_now.add(last.key)
            with suppress(OSError):  # a path that somebody made up
                seen = self._container("", record.host, path=str((record.cgroup or {}).get("path", ""))[:_MAX_PATH])
                if seen is not None and seen.key == last.key:
                    containers[seen.key] = replace(seen, is_private=last.is_private)
        return list(containers.values())

    def _container(self, pid: int | str, host: str | None = None, *, path: str | None = None) -> ContainerMemory | None:
        raw = read_container(self._root, pid, path=path)
        return None if raw is None else container_of(raw, boot_id=self._machine.boot_id, host=host, sees="sidecar")

    def _shared(self, records: Sequence[ProcessRecord]) -> ShmMemory | None:
        seen = [(one, one.shm) for one in records if one.shm is not None]
        if not seen:
            age = self._machine.monotonic() - self._shm_at
            return replace(self._own_shm, age_seconds=age) if self._found and self._own_shm is not None else None
        first, raw = seen[0]
        # A file that no process of one container has open may be another's, which has the same file system.
        namespaces = {one.pid_namespace for one, shm in seen if shm.get("device") == raw.get("device")}
        return shm_of(raw, age_seconds=first.age_of(raw), sees_all=len(namespaces) == 1)


_TICKS: Final = os.sysconf("SC_CLK_TCK")
SECONDS = 5.0
FRESH_SECONDS = 1.0
"""A reading that is younger is reused."""
_SERVING_ROLES: Final[frozenset[Role]] = frozenset({"api_server", "engine_core"})

log = logging.getLogger("highwater")


@dataclass(frozen=True, slots=True)
class HostNow:
    """The report on the last reading, made at a monotonic time, and what the container cannot drop.

    Of those ``parts`` what grows most comes first.
    """

    report: HostReport
    parts: tuple[GrownPart, ...] = ()
    read_at: float = 0.0

    @property
    def reading(self) -> HostReading:
        return self.report.reading


class HostWatch:
    """Keeps the last reading, and the pace of the container's memory.

    ``judge`` finds what is wrong with a report. ``counts`` returns the counters of the engine and its workers, ``life``
    an identifier of the engine's life while it is up: what grew before was its start; ``oom_kills`` the kernel's kills
    for memory. ``listeners`` take every reading.
    """

    def __init__(
        self,
        reader: HostReader,
        *,
        judge: Judge = lambda _report, _grown: (),
        counts: Callable[[], CacheCounts] = lambda: NOT_COUNTED,
        oom_kills: Callable[[], OomKills] = OomKills,
        life: Callable[[], str | None] = lambda: None,
        listeners: Iterable[Callable[[HostReading], None]] = (),
        clocks: Clocks = SYSTEM,
        internal_error: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._reader = reader
        self._judge = judge
        self._counts = counts
        self._oom_kills = oom_kills
        self._life = life
        self._life_seen: str | None = None
        self._monotonic = clocks.monotonic
        self._internal_error = internal_error
        self._sleep = sleep
        self._window = OutlookWindow()
        self._past = HostPast()
        self._lock = asyncio.Lock()
        self._stopped_engine = StoppedEngine(clocks.monotonic)
        self._silent_cores = SilentCores()
        self.listeners = [*listeners]
        self.now: HostNow | None = None

    async def run(self) -> None:
        while True:
            with contained(self._internal_error, log, "host memory could not be read"):
                await self.read()
            await self._sleep(SECONDS)

    async def read(self) -> HostNow:
        """Return a reading that is at most a second old."""
        async with self._lock:
            if self.now is None or self._monotonic() - self.now.read_at >= FRESH_SECONDS:
                return await self._read()
            return self.now

    async def facts(self) -> HostFacts:
        """Read once more, whatever the last reading's age, and return what is known of the last minutes."""
        async with self._lock:
            report = (await self._read()).report
            return self._past.facts(report.reading, report.processor_caches)

    async def report(self) -> HostReport:
        """Return the report on a reading that is at most a second old."""
        now = await self.read()
        return replace(now.report, age_seconds=round(max(0.0, self._monotonic() - now.read_at), 3))

    def kept_bytes(self) -> int | None:
        container = None if self.now is None else self.now.reading.container
        return None if container is None else container.kept_bytes

    @property
    def _processes(self) -> tuple[ProcessMemory, ...]:
        return () if self.now is None else self.now.reading.processes

    def engine_process(self) -> SeenProcess | None:
        """Return the last API server of the last reading; the others may outlive it, and load nothing."""
        servers = (one for one in self._processes if one.role in {"api_server", "launcher"})
        last = max(servers, key=lambda one: one.started or 0, default=None)
        if last is None or self.now is None:
            return None
        run = last.run_seconds
        if run is None and last.source == "proc" and last.started is not None:
            run = self.now.read_at - last.started / _TICKS
        taken_at = self.now.reading.taken_at
        return SeenProcess(f"{last.name}, pid {last.pid}", None if run is None else taken_at - last.age_seconds - run)

    def stopped_processes(self) -> tuple[ProcessMemory, ...]:
        """Return the processes of the last reading that are stopped now and every request needs, workers aside."""
        return tuple(one for one in self._processes if one.role in _SERVING_ROLES and self._reader.is_stopped(one))

    def stopped_engine(self) -> str | None:
        """Return in one sentence which stopped processes every request waits for; ``None`` if none. For each poll."""
        return self._stopped_engine.look(self._processes, self.stopped_processes())

    def silent_core(self) -> SilentCore | None:
        if self.now is None:
            return None
        return self._silent_cores.longest(self.now.reading.taken_at + self._monotonic() - self.now.read_at)

    async def _read(self) -> HostNow:
        self.now = now = await asyncio.to_thread(self._read_now, self._monotonic())
        for listener in self.listeners:
            name = getattr(listener, "__qualname__", listener)
            # The others must have it, and whoever requested this reading.
            with contained(self._internal_error, log, "a listener of host readings failed: %s", name):
                listener(now.reading)
        return now

    def _read_now(self, read_at: float) -> HostNow:
        life = self._life()
        if life is not None and life != self._life_seen:
            self._life_seen = life
            self._window.begin()
            self._past.begin()
        reading = self._reader.read()
        outlook = self._window.add(read_at, reading.container)
        self._past.add(reading)
        self._silent_cores.look(reading)
        parts = self._past.present_parts(reading)
        report = report_of(
            reading,
            judge=self._judge,
            outlook=outlook,
            grown=parts,
            counts=self._counts(),
            oom_kills=self._oom_kills(),
        )
        return HostNow(report, parts, read_at)
