"""The files that vLLM's processes write of themselves, read as foreign bytes. docs/recorder.md is the contract.

What a file says is shown and never acted upon. One that is no good costs only itself and is named; a bounded number of
bounded files is looked at. It blocks for as long as that takes: call it in a thread.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from highwater.errors import flaw, os_reason
from highwater.files.regular import NotARegularFileError, open_regular
from highwater.host.proc import parent_and_start
from highwater.host.process_record import ProcessRecord
from highwater.text.printable import plain

MAGIC = b"HWPROC01"
FILE_BYTES = 4096
MAX_FILES = 256
MAX_ENTRIES = 4096
"""Of the folder, whatever their names: it may hold what is not ours."""
CURRENT_SECONDS = 15.0
"""A process writes once a second; one that has been silent for longer is not shown as running."""
STALE_SECONDS = 600.0
_NAME = re.compile(r"highwater-([0-9]{1,10})-([0-9]{1,20})\.process", re.ASCII)
_TMP_NAME = re.compile(r"\.highwater-[0-9]{1,10}-[0-9]{1,20}\.process\.tmp", re.ASCII)
_HEAD = struct.Struct("<8sII")
_CHECKSUM = struct.Struct("<I")
_BODY_AT = _HEAD.size + _CHECKSUM.size
_MAX_PROBLEMS = 16
_TORN_TRIES = 3

_RECORD = TypeAdapter(ProcessRecord)


class BadProcessFile(Exception):
    """The file is left alone; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProcess:
    """A record, and its age in seconds by the best clock that is shared with its writer."""

    record: ProcessRecord
    age_seconds: float


class ProcessFiles:
    """The process files of a recorders' folder.

    Attributes:
        problems: What is wrong with the folder and its files as of the last read, one sentence each.

    Args:
        folder: Where the processes write.
        clock: Unix seconds.
        monotonic: ``CLOCK_MONOTONIC``, which the processes of this machine share.
        proc: The folder in which the kernel shows processes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self.problems: tuple[str, ...] = ()
        self._folder = folder
        self._clock = clock
        self._monotonic = monotonic
        self._proc = proc
        self._boot_id = _boot_id(proc)
        self._namespace = _namespace(proc)
        # Of files that have not changed since: those of processes that are gone need no second look.
        self._known: dict[str, tuple[tuple[int, ...], ProcessRecord | str]] = {}

    def read(self) -> tuple[FoundProcess, ...]:
        """Return the processes that run, by pid; what is wrong with a file is in ``problems``."""
        problems: list[str] = []
        found: list[FoundProcess] = []
        seen: dict[str, tuple[tuple[int, ...], ProcessRecord | str]] = {}
        owners = self._owners()
        names = list(self._names(problems))
        if len(names) > MAX_FILES:
            problems.append(f"{self._folder}: more than {MAX_FILES} process files; the rest is not read")
            # Files that anybody can put there must not hide those that vLLM's user has written.
            names.sort(key=lambda name: self._owner(name) not in owners)
        for name in names[:MAX_FILES]:
            known = self._record(name, owners)
            if known is None:
                continue
            seen[name] = known
            if isinstance(known[1], str):
                problems.append(f"{name}: {known[1]}")
            elif self._is_running(record := known[1]):
                found.append(FoundProcess(record=record, age_seconds=self._age(record)))
        self._known = seen
        self.problems = tuple(problems[:_MAX_PROBLEMS])
        return tuple(sorted(found, key=lambda one: one.record.pid))

    def sweep(self) -> int:
        """Remove the files of processes that have long ended, and return how many; what cannot be removed stays."""
        removed, now = 0, self._clock()
        for name in self._names([], with_unfinished=True):
            path = self._folder / name
            with suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_mtime < now - STALE_SECONDS:
                    path.unlink()
                    removed += 1
        return removed

    def shares_processes_with(self, record: ProcessRecord) -> bool:
        """Return whether a process's number means the same process here: the PID namespace is shared."""
        return (
            self._boot_id is not None
            and record.boot_id == self._boot_id
            and self._namespace is not None
            and record.pid_namespace == self._namespace
        )

    def is_of_this_machine(self, record: ProcessRecord) -> bool:
        """Return whether a record was written under this kernel."""
        return self._boot_id is not None and record.boot_id == self._boot_id

    def _names(self, problems: list[str], *, with_unfinished: bool = False) -> Iterator[str]:
        try:
            with os.scandir(self._folder) as entries:
                for number, entry in enumerate(entries):
                    if number == MAX_ENTRIES:
                        problems.append(f"{self._folder}: more than {MAX_ENTRIES} files; the rest is not looked at")
                        break
                    is_unfinished = with_unfinished and _TMP_NAME.fullmatch(entry.name)
                    if _NAME.fullmatch(entry.name) or is_unfinished:
                        yield entry.name
        except FileNotFoundError:  # nobody has written yet
            return
        except OSError as exc:
            problems.append(f"{self._folder}: {os_reason(exc)}")

    def _owners(self) -> frozenset[int]:
        """Return the users whose files are read: the folder's, root, this process's, and those who write recorders."""
        owners = {0, os.geteuid()}
        with suppress(OSError):
            owners.add(os.stat(self._folder).st_uid)
            with os.scandir(self._folder) as entries:
                for entry in islice(entries, MAX_ENTRIES):
                    if entry.name.endswith(".ring"):
                        with suppress(OSError):
                            owners.add(entry.stat(follow_symlinks=False).st_uid)
        return frozenset(owners)

    def _owner(self, name: str) -> int | None:
        try:
            return os.lstat(self._folder / name).st_uid
        except OSError:  # removed meanwhile
            return None

    def _record(self, name: str, owners: frozenset[int]) -> tuple[tuple[int, ...], ProcessRecord | str] | None:
        path = self._folder / name
        try:
            status = os.lstat(path)
        except OSError:  # removed meanwhile
            return None
        stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            return known
        if status.st_uid not in owners:
            return stamp, f"it belongs to user {status.st_uid}, who owns neither the folder nor a recorder"
        try:
            return stamp, read_record(path, name)
        except BadProcessFile as exc:
            return stamp, str(exc)

    def _is_running(self, record: ProcessRecord) -> bool:
        if self._age(record) > CURRENT_SECONDS:
            return False
        if not self.shares_processes_with(record) or record.started is None:
            return True
        started = started_of(self._proc, record.pid)
        return started is None or started == record.started

    def _age(self, record: ProcessRecord) -> float:
        if self.is_of_this_machine(record):
            return max(0.0, self._monotonic() - record.mono)
        return max(0.0, self._clock() - record.at)


def read_record(path: Path, name: str) -> ProcessRecord:
    """Return what a process file holds.

    Args:
        path: The file.
        name: Its name, which must be that of its content.

    Raises:
        BadProcessFile: It is damaged, or says what cannot be.
    """
    try:
        descriptor = open_regular(path)
    except NotARegularFileError as exc:
        raise BadProcessFile("it is not a regular file") from exc
    except OSError as exc:
        raise BadProcessFile(os_reason(exc)) from exc
    try:
        body = _body(descriptor)
    except OSError as exc:
        raise BadProcessFile(os_reason(exc)) from exc
    finally:
        os.close(descriptor)
    try:
        record: ProcessRecord = _RECORD.validate_python(json.loads(body, parse_constant=_refuse))
    except ValidationError as exc:
        raise BadProcessFile(plain(flaw(exc.errors(include_url=False, include_input=False)), 200)) from exc
    except (ValueError, RecursionError) as exc:
        raise BadProcessFile("its text is no JSON") from exc
    matched = _NAME.fullmatch(name)
    if matched is None or int(matched[1]) != record.pid or record.started not in {None, int(matched[2])}:
        raise BadProcessFile("its name is of another process")
    return record


def _body(descriptor: int) -> bytes:
    """Return the text, read again where it was being written.

    Raises:
        BadProcessFile: It is damaged.
    """
    for _ in range(_TORN_TRIES):
        content = os.pread(descriptor, FILE_BYTES, 0)
        if len(content) < _BODY_AT or not content.startswith(MAGIC):
            raise BadProcessFile("it is no process file")
        _, _, length = _HEAD.unpack_from(content)
        (checksum,) = _CHECKSUM.unpack_from(content, _HEAD.size)
        body = content[_BODY_AT : _BODY_AT + length]
        if len(body) == length and zlib.crc32(body, zlib.crc32(content[: _HEAD.size])) == checksum:
            return body
    raise BadProcessFile("its checksum is wrong")


def _refuse(word: str) -> Any:  # noqa: ANN401 - what `json` asks for
    raise ValueError(word)


def started_of(proc: Path, pid: int) -> int | None:
    """Return a process's start in ticks since boot; 0 if there is no such process, ``None`` if it is hidden."""
    try:
        return parent_and_start(proc, pid)[1]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except (OSError, ValueError, IndexError):
        return None


def _boot_id(proc: Path) -> str | None:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _namespace(proc: Path) -> int | None:
    try:
        return os.stat(proc / "self/ns/pid").st_ino
    except OSError:
        return None
