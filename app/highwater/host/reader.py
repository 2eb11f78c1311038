"""Puts one reading together: process files first, then what this machine's ``/proc`` and groups add to them.

It blocks for a few milliseconds: call it in a thread. Nothing here calls the engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from highwater.host.cgroup import container_key, container_of, pressure_of, read_group, read_pressure
from highwater.host.names import name_of, named_apart
from highwater.host.proc import ProcFigures, find_engine, read_figures, read_machine
from highwater.host.process_files import FoundProcess, ProcessFiles, started_of
from highwater.host.process_record import ListedProcess
from highwater.host.reading import (
    ROLES,
    ContainerMemory,
    EngineMemorySettings,
    HostReading,
    MachineMemory,
    ProcessMemory,
    Role,
    ShmMemory,
)
from highwater.host.shared_memory import SHM, read_shm, shm_of

_SWEEP_SECONDS = 60.0
_PROC_SECONDS = 10.0
"""The time between two searches of ``/proc`` for processes that write no file."""


class WorkerProcess(NamedTuple):
    """A worker as the poller knows it."""

    pid: int | None
    pid_started: int | None
    rank: int | None
    dp_rank: int | None


class HostReader:
    """Reads host memory.

    Args:
        folder: The recorders'; ``None``: there is none, and only this machine's ``/proc`` can show anything.
        workers: Returns the workers that are known from elsewhere.
        clock: Unix seconds.
        monotonic: ``CLOCK_MONOTONIC``.
        root: The file system's root; a test brings its own.
        shm: Where shared memory is.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        workers: Callable[[], Sequence[WorkerProcess]] = lambda: (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
        shm: Path = SHM,
    ) -> None:
        self._proc = root / "proc"
        self._files = (
            None if folder is None else ProcessFiles(folder, clock=clock, monotonic=monotonic, proc=self._proc)
        )
        self._workers = workers
        self._clock = clock
        self._monotonic = monotonic
        self._root = root
        self._shm = shm
        self._searched_at = self._swept_at = float("-inf")
        self._found: tuple[ProcFigures, ...] = ()
        self._turn = threading.Lock()

    def read(self) -> HostReading:
        """Return host memory now."""
        with self._turn:
            return self._read()

    def _read(self) -> HostReading:
        now = self._monotonic()
        found = () if self._files is None else self._files.read()
        if self._files is not None and now >= self._swept_at + _SWEEP_SECONDS:
            self._swept_at = now
            self._files.sweep()
        processes = [_of_file(one) for one in found]
        processes += self._listed(found, {one.pid for one in processes})
        processes += self._of_proc(found, {one.pid for one in processes}, now)
        containers = self._containers(found, processes)
        main = _main_container(containers, processes)
        own = self._own_container()
        others = [one for one in containers if main is None or one.key != main.key]
        if own is not None and own.key not in {one.key for one in containers}:
            others.append(own)
        problems = () if self._files is None else self._files.problems
        return HostReading(
            taken_at=self._clock(),
            processes=named_apart(processes),
            container=main,
            other_containers=tuple(others),
            shm=self._shared(found, bool(self._found)),
            machine=self._machine(),
            engine=_settings(found),
            problems=problems if found or self._found else (*problems, self._why_nothing()),
        )

    # --- processes ---

    def _listed(self, found: Iterable[FoundProcess], known: set[int]) -> list[ProcessMemory]:
        """Return processes without files, as the first process of their container lists them."""
        rows = []
        for one in found:
            record, others = one.record, one.record.others
            key = None if record.cgroup is None else container_key(record.cgroup, record.boot_id, record.host)
            if others is None:
                continue
            for row in others.largest:
                if row.pid not in known and not self._is_sidecar(one, row):
                    known.add(row.pid)
                    rows.append(_of_listed(row, record.host, key, one.age_seconds + _since(record.mono, others.mono)))
        return rows

    def _is_sidecar(self, one: FoundProcess, row: ListedProcess) -> bool:
        # It shares the engine's container on a machine without containers, and is no process of the engine.
        return (
            False if self._files is None else self._files.shares_processes_with(one.record) and row.pid == os.getpid()
        )

    def _of_proc(self, found: Sequence[FoundProcess], known: set[int], now: float) -> list[ProcessMemory]:
        """Return processes that only ``/proc`` shows: searched for now and then, read each time."""
        files = self._files
        pids = [one.record.pid for one in found if files is not None and files.shares_processes_with(one.record)]
        pids += [
            worker.pid
            for worker in self._workers()
            if worker.pid and worker.pid_started and started_of(self._proc, worker.pid) == worker.pid_started
        ]
        if not pids:
            self._found = ()
            return []
        if now >= self._searched_at + _PROC_SECONDS or not {one.pid for one in self._found} >= set(pids):
            self._searched_at = now
            self._found = find_engine(self._proc, pids)
        ranks = {worker.pid: worker for worker in self._workers()}
        rows = []
        for before in self._found:
            one = None if before.pid in known else read_figures(self._proc, before.pid)
            if one is not None and one.started == before.started:
                rows.append(self._row(one, ranks.get(one.pid)))
        return rows

    def _row(self, one: ProcFigures, worker: WorkerProcess | None) -> ProcessMemory:
        role: Role = "worker" if worker is not None and one.role == "other" else one.role
        raw = read_group(one.pid, self._root)
        rank, dp_rank = (worker.rank, worker.dp_rank) if worker is not None else (None, None)
        return ProcessMemory(
            role=role,
            name=name_of(role, None, rank, dp_rank, one.title.split(" ")[0].rpartition("/")[2][:40]),
            pid=one.pid,
            started=one.started,
            parent_pid=one.parent_pid,
            container=None if raw is None else container_key(raw, self._boot_id(), None),
            rank=rank,
            dp_rank=dp_rank,
            anonymous_bytes=one.sizes.get("anonymous_bytes"),
            file_bytes=one.sizes.get("file_bytes"),
            shmem_bytes=one.sizes.get("shmem_bytes"),
            swap_bytes=one.sizes.get("swap_bytes"),
            peak_bytes=one.sizes.get("peak_bytes"),
            threads=one.sizes.get("threads"),
            descriptors=one.descriptors,
            descriptors_limit=one.descriptors_limit,
            source="proc",
        )

    # --- containers, shared memory, the machine ---

    def _containers(self, found: Sequence[FoundProcess], processes: Iterable[ProcessMemory]) -> list[ContainerMemory]:
        freshest: dict[str, tuple[float, ContainerMemory]] = {}
        for one in found:
            record, raw = one.record, one.record.cgroup
            if raw is None:
                continue
            age = one.age_seconds + _since(record.mono, raw.mono)
            made = container_of(raw, boot_id=record.boot_id, host=record.host, age_seconds=age)
            if made.key not in freshest or age < freshest[made.key][0]:
                freshest[made.key] = age, made
        containers = {key: made for key, (_, made) in freshest.items()}
        for process in processes:
            if process.source == "proc" and process.container is not None and process.container not in containers:
                raw = read_group(process.pid, self._root)
                if raw is not None:
                    made = container_of(raw, boot_id=self._boot_id(), sees="sidecar")
                    containers[made.key] = made
        return list(containers.values())

    def _own_container(self) -> ContainerMemory | None:
        raw = read_group("self", self._root)
        return None if raw is None else container_of(raw, boot_id=self._boot_id(), host="sidecar", sees="sidecar")

    def _shared(self, found: Sequence[FoundProcess], has_proc: bool) -> ShmMemory | None:
        reported = [(one, one.record.shm) for one in found if one.record.shm is not None]
        own = read_shm(self._shm)
        for one, raw in reported:
            is_here = self._files is not None and self._files.is_of_this_machine(one.record)
            if own is not None and is_here and raw is not None and own.device == raw.device:
                return shm_of(own, sees="sidecar")  # the same one, and read now
        for one, raw in reported:
            if raw is not None:
                return shm_of(raw, age_seconds=one.age_seconds + _since(one.record.mono, raw.mono))
        return shm_of(own, sees="sidecar") if own is not None and has_proc else None

    def _machine(self) -> MachineMemory:
        figures = read_machine(self._proc)
        return MachineMemory(
            total_bytes=figures.get("MemTotal"),
            available_bytes=figures.get("MemAvailable"),
            pressure=pressure_of(read_pressure(self._proc / "pressure/memory")),
        )

    def _boot_id(self) -> str | None:
        try:
            return (self._proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
        except (OSError, ValueError):
            return None

    def _why_nothing(self) -> str:
        if self._files is None:
            return (
                "no process of the engine can be seen from here: set HIGHWATER_RECORDER_DIR for vLLM and recorder_dir "
                "for the sidecar, or share the PID namespace"
            )
        return (
            "no process of the engine writes a file: vLLM needs HIGHWATER_RECORDER_DIR in its environment and the "
            "worker package of this version"
        )


def _of_file(one: FoundProcess) -> ProcessMemory:
    record = one.record
    role: Role = record.role if record.role in ROLES else "other"
    raw = record.cgroup
    return ProcessMemory(
        role=role,
        name=name_of(role, record.index, record.rank, record.dp_rank, record.command),
        pid=record.pid,
        started=record.started,
        parent_pid=record.parent_pid,
        host=record.host,
        container=None if raw is None else container_key(raw, record.boot_id, record.host),
        rank=record.rank,
        dp_rank=record.dp_rank,
        anonymous_bytes=record.anonymous_bytes,
        file_bytes=record.file_bytes,
        shmem_bytes=record.shmem_bytes,
        swap_bytes=record.swap_bytes,
        peak_bytes=record.peak_bytes,
        threads=record.threads,
        descriptors=record.descriptors,
        descriptors_limit=record.descriptors_limit,
        age_seconds=round(one.age_seconds, 3),
    )


def _of_listed(row: ListedProcess, host: str | None, container: str | None, age: float) -> ProcessMemory:
    role: Role = "resource_tracker" if row.tracker else "other"
    return ProcessMemory(
        role=role,
        name=name_of(role, None, None, None, row.name),
        pid=row.pid,
        started=row.started,
        host=host,
        container=container,
        anonymous_bytes=row.anonymous_bytes,
        file_bytes=row.file_bytes,
        shmem_bytes=row.shmem_bytes,
        swap_bytes=row.swap_bytes,
        peak_bytes=row.peak_bytes,
        threads=row.threads,
        age_seconds=round(age, 3),
        source="listed",
    )


def _main_container(
    containers: Iterable[ContainerMemory], processes: Iterable[ProcessMemory]
) -> ContainerMemory | None:
    counts = Counter(process.container for process in processes)
    return max(containers, key=lambda one: (counts[one.key], one.used_bytes or 0), default=None)


def _settings(found: Iterable[FoundProcess]) -> EngineMemorySettings | None:
    for one in found:
        if one.record.engine is not None:
            return EngineMemorySettings(version=one.record.vllm, **asdict(one.record.engine))
    return None


def _since(mono: float, earlier: float) -> float:
    return max(0.0, mono - earlier) if earlier else 0.0
