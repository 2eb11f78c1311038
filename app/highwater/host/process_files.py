"""The files that vLLM's processes write of themselves, read as foreign bytes. docs/recorder-file.md is the contract.

What a file says is bounded on entry, shown, and never acted upon; unknown fields are ignored. An invalid file costs
only itself and is named; a bounded number of bounded files is read. Reading blocks: call it in a thread.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from highwater.host.kernel import container_key, container_of
from highwater.host.reading import (
    ROLES,
    Bytes,
    ContainerMemory,
    EngineMemorySettings,
    ProcessMemory,
    Role,
    Seconds,
    Text,
    name_of,
)
from highwater.process.clocks import Machine
from highwater.process.errors import os_reason
from highwater.process.regular import NotARegularFileError, first_names, open_regular, stamp_of, status_of
from highwater.process.untrusted import flaw, parse_json, plain
from highwater_worker.kernel.proc import MACHINES_PID_NAMESPACE
from highwater_worker.wire import PROCESS_FILE_BYTES, PROCESS_NAME, RING_NAME, process_body

MAX_FILES = 256
MAX_ENTRIES = 4096
"""Of the folder, whatever their names: it may hold files that are not Highwater's."""
CURRENT_SECONDS = 15.0
"""A process writes once a second; one that has not written for longer is not shown as running."""
STALE_SECONDS = 600.0
MAX_SILENT = 128
"""Processes that have ended, of several lives of the engine in a crash loop."""
_TMP_NAME = re.compile(r"\.highwater-[0-9]{1,10}-[0-9]{1,20}\.process\.tmp", re.ASCII)
_MAX_PROBLEMS = 16
_TORN_TRIES = 3
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord(ProcessMemory):
    """One process by its own file; ``age_seconds`` is by the best clock that is shared with the writer.

    Attributes:
        at: Unix seconds; ``mono`` is the same moment on the machine's monotonic clock.
        pid_namespace: The inode of its PID namespace: in another one its ``pid`` means another process.
        cgroup: Its container's counters, of its own last look at ``mono`` of them; ``shm`` and ``others`` likewise.
        others: Processes beside it that write no file, as it sees them.
    """

    schema: Annotated[int, Field(ge=1, le=1, strict=True)]
    at: Seconds
    mono: Seconds
    boot_id: Text | None = None
    pid_namespace: Bytes | None = None
    vllm: Text | None = None
    cgroup: dict[str, Any] | None = None
    shm: dict[str, Any] | None = None
    others: Annotated[tuple[ProcessMemory, ...], Field(max_length=32)] = ()
    engine: EngineMemorySettings | None = None

    @property
    def as_process(self) -> dict[str, Any]:
        """A ``ProcessMemory`` as keywords."""
        kept = {one.name: getattr(self, one.name) for one in fields(ProcessMemory)}
        return kept | {"age_seconds": round(self.age_seconds, 3)}

    def age_of(self, look: Mapping[str, Any]) -> float:
        """Return the age of one of its looks: the processes of an engine look in turns."""
        return self.age_seconds + _since(self.mono, look.get("mono"))

    @property
    def last_container(self) -> ContainerMemory | None:
        if self.cgroup is None:
            return None
        return container_of(
            self.cgroup,
            boot_id=self.boot_id,
            host=self.host,
            age_seconds=self.age_of(self.cgroup),
            is_private=self.pid_namespace not in {None, MACHINES_PID_NAMESPACE},
        )


_RECORD = TypeAdapter(ProcessRecord)


class BadProcessFile(Exception):
    """The file is not used; the text says why."""


_Known: TypeAlias = tuple[tuple[int, ...], ProcessRecord | str]
"""A file's identity and state, and its record or its problem."""


class ProcessFiles:
    """The process files of a recorders' folder.

    Attributes:
        problems: The problems of the folder and its files as of the last read, one sentence each.
        silent: The processes of the last read that have ended or fallen silent, the freshest first. One that a signal
            has stopped is silent too; where this machine shows that it exists, it is left out.

    Args:
        folder: The recorders' folder; ``None``: no files are read.
        machine: The machine whose processes they may be.
    """

    def __init__(self, folder: Path | None, machine: Machine) -> None:
        self.problems: tuple[str, ...] = ()
        self.silent: tuple[ProcessRecord, ...] = ()
        self._has_folder = folder is not None
        self._folder = folder or Path()
        self._machine = machine
        # Files that have not changed since are not read again, those of processes that have ended included.
        self._known: dict[str, _Known] = {}

    def read(self) -> tuple[ProcessRecord, ...]:
        """Return the processes that run, by pid; a file that cannot be used is named in ``problems``."""
        problems: list[str] = []
        records: list[ProcessRecord] = []
        silent: list[ProcessRecord] = []
        seen: dict[str, _Known] = {}
        listed = self._listed(problems)
        names = [name for name in listed if PROCESS_NAME.fullmatch(name)]
        owners = self._owners(listed) if names else frozenset()
        if len(names) > MAX_FILES:
            problems.append(f"{self._folder}: more than {MAX_FILES} process files; the rest is not read")
            names.sort(key=lambda name: self._rank(name, owners))
        for name in names[:MAX_FILES]:
            if (known := self._record(name, owners)) is None:
                continue
            seen[name] = known
            if isinstance(known[1], str):
                problems.append(f"{name}: {known[1]}")
                continue
            record = known[1]
            # By the clock that both share, else by the wall's, of which a time to come is as far from now.
            is_of_boot = self._machine.is_boot(record.boot_id)
            age = self._machine.monotonic() - record.mono if is_of_boot else abs(self._machine.clock() - record.at)
            record = replace(record, age_seconds=max(0.0, age))
            if self.has_ended(record) or record.age_seconds > CURRENT_SECONDS:
                silent.append(record)
            else:
                records.append(record)
        self._known = seen
        self.problems = tuple(problems[:_MAX_PROBLEMS])
        # One that a signal has stopped is there.
        gone = [one for one in silent if self.has_ended(one) or not self.shares_processes_with(one)]
        recent = [one for one in gone if one.age_seconds <= STALE_SECONDS]
        self.silent = tuple(sorted(recent, key=lambda one: (one.age_seconds, one.pid))[:MAX_SILENT])
        return tuple(sorted(records, key=lambda record: record.pid))

    def sweep(self) -> int:
        removed, now = 0, self._machine.clock()
        for name in self._listed([]):
            if not (PROCESS_NAME.fullmatch(name) or _TMP_NAME.fullmatch(name)):
                continue
            path = self._folder / name
            with suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_mtime < now - STALE_SECONDS:
                    path.unlink()
                    removed += 1
        return removed

    def shares_processes_with(self, record: ProcessRecord) -> bool:
        return self._machine.shares_processes(record.boot_id, record.pid_namespace)

    def has_ended(self, record: ProcessRecord) -> bool:
        """Return whether a process is known to have ended: never where its PID namespace is another one."""
        if not self.shares_processes_with(record) or record.started is None:
            return False
        return self._machine.process_state(record.pid, record.started) in {None, "Z"}

    def _rank(self, name: str, owners: frozenset[int]) -> tuple[bool, float]:
        """Return the order in which too many files are read.

        Those that anybody can put there must not hide those that vLLM's user has written, nor must those of processes
        that have ended hide those of processes that run.
        """
        status = status_of(self._folder / name)
        return (True, 0.0) if status is None else (status.st_uid not in owners, -status.st_mtime)

    def _listed(self, problems: list[str]) -> list[str]:
        try:
            names = first_names(self._folder, MAX_ENTRIES + 1) if self._has_folder else []
        except FileNotFoundError:  # no process has written yet
            return []
        except OSError as exc:
            problems.append(f"{self._folder}: {os_reason(exc)}")
            return []
        if len(names) > MAX_ENTRIES:
            problems.append(f"{self._folder}: more than {MAX_ENTRIES} files; the rest is not looked at")
        return names[:MAX_ENTRIES]

    def _owners(self, listed: Iterable[str]) -> frozenset[int]:
        """Return the users whose files are read: the folder's, root, this process's, and those who write recorders."""
        owners = {0, os.geteuid()}
        with suppress(OSError):
            owners.add(os.stat(self._folder).st_uid)
        rings = (status_of(self._folder / name) for name in listed if RING_NAME.fullmatch(name))
        return frozenset(owners.union(status.st_uid for status in rings if status is not None))

    def _record(self, name: str, owners: frozenset[int]) -> _Known | None:
        if (status := status_of(self._folder / name)) is None:  # removed meanwhile
            return None
        stamp = stamp_of(status)
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            return known
        if status.st_uid not in owners:
            return stamp, f"it belongs to user {status.st_uid}, who owns neither the folder nor a recorder"
        try:
            return stamp, read_record(self._folder / name, name)
        except BadProcessFile as exc:
            return stamp, str(exc)


def read_record(path: Path, name: str) -> ProcessRecord:
    """Raises BadProcessFile: the content is damaged or invalid, or does not fit the file's name."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            tries = (process_body(os.pread(file.fileno(), PROCESS_FILE_BYTES, 0)) for _ in range(_TORN_TRIES))
            body = next((one for one in tries if one is not None), None)
    except NotARegularFileError as exc:
        raise BadProcessFile("it is not a regular file") from exc
    except OSError as exc:
        raise BadProcessFile(os_reason(exc)) from exc
    except ValueError as exc:
        raise BadProcessFile(str(exc)) from exc
    if body is None:
        raise BadProcessFile("its checksum is wrong")
    try:
        record: ProcessRecord = _RECORD.validate_python(_in_our_names(parse_json(body.decode("utf-8"))))
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
        errors.sort(key=lambda error: error["loc"] != ("schema",))  # of another version the rest is of no account
        raise BadProcessFile(plain(flaw(errors), 200)) from exc
    except ValueError as exc:
        raise BadProcessFile("its text is no JSON") from exc
    matched = PROCESS_NAME.fullmatch(name)
    if matched is None or int(matched[1]) != record.pid or record.started not in {None, int(matched[2])}:
        raise BadProcessFile("its name is of another process")
    return replace(
        record,
        container=None if record.cgroup is None else container_key(record.cgroup, record.boot_id, record.host),
        run_seconds=None if record.started is None else round(record.mono - record.started / _TICKS, 3),
    )


def _in_our_names(raw: object) -> object:
    """Return a file's JSON with the fields that are told here; what is wrong in the others pydantic says."""
    if not isinstance(raw, dict):
        return raw
    told = {"source": "file", "container": None, "age_seconds": 0.0, "run_seconds": None}
    if isinstance(role := raw.get("role"), str):
        known: Role = next((one for one in ROLES if one == role), "other")  # a newer worker package may have more
        who = {name: raw.get(name) for name in ("index", "rank", "dp_rank", "command")}
        told |= {"role": known, "name": name_of(known, **who)}
    others = raw.get("others")
    rows = others.get("largest") if isinstance(others, dict) else None
    age = _since(raw.get("mono"), others.get("mono")) if isinstance(others, dict) else 0.0
    return raw | told | {"others": [_other(row, age) for row in rows] if isinstance(rows, list) else []}


def _since(mono: object, earlier: object) -> float:
    """Return the seconds between two times of a file, 0 where it does not tell."""
    if isinstance(mono, (int, float)) and isinstance(earlier, (int, float)) and 0 < earlier < mono < math.inf:
        return mono - earlier
    return 0.0


def _other(row: object, age_seconds: float) -> object:
    if not isinstance(row, dict):
        return row
    role: Role = "resource_tracker" if row.get("tracker") is True else "other"
    name = name_of(role, command=row.get("name"))
    told = {"role": role, "name": name, "source": "listed", "container": None, "run_seconds": None}
    return row | told | {"age_seconds": age_seconds}
