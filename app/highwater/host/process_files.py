"""The files that vLLM's processes write of themselves, read as foreign bytes. docs/recorder.md is the contract.

What a file says is shown and never acted upon. An invalid file costs only itself and is named; a bounded number of
bounded files is read. Reading blocks: call it in a thread.
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
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from highwater.errors import flaw, os_reason
from highwater.files.regular import NotARegularFileError, open_regular
from highwater.files.strict_json import refuse_constant
from highwater.host.proc import boot_id, started_of
from highwater.host.process_record import ProcessRecord
from highwater.text.printable import plain

MAGIC = b"HWPROC01"
FILE_BYTES = 4096
MAX_FILES = 256
MAX_ENTRIES = 4096
"""Of the folder, whatever their names: it may hold files that are not Highwater's."""
CURRENT_SECONDS = 15.0
"""A process writes once a second; one that has not written for longer is not shown as running."""
STALE_SECONDS = 600.0
_NAME = re.compile(r"highwater-([0-9]{1,10})-([0-9]{1,20})\.process", re.ASCII)
_TMP_NAME = re.compile(r"\.highwater-[0-9]{1,10}-[0-9]{1,20}\.process\.tmp", re.ASCII)
_HEAD = struct.Struct("<8sIII")
"""Magic, sequence, length of the body, and the checksum of these and the body."""
_CHECKED_BYTES = 16
_MAX_PROBLEMS = 16
_TORN_TRIES = 3

_RECORD = TypeAdapter(ProcessRecord)


class BadProcessFile(Exception):
    """The file is not used; the text says why."""


_Known: TypeAlias = tuple[tuple[int, ...], ProcessRecord | str]
"""A file's identity and state, and its record or its problem."""


class ProcessFiles:
    """The process files of a recorders' folder.

    Attributes:
        problems: The problems of the folder and its files as of the last read, one sentence each.

    Args:
        folder: The recorders' folder; ``None``: no files are read.
        clock: Unix seconds.
        monotonic: ``CLOCK_MONOTONIC``, which the processes of this machine share.
        proc: The folder in which the kernel shows processes.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self.problems: tuple[str, ...] = ()
        self._has_folder = folder is not None
        self._folder = folder or Path()
        self._clock = clock
        self._monotonic = monotonic
        self._proc = proc
        self._boot_id = boot_id(proc)
        self._namespace: int | None = None
        with suppress(OSError):
            self._namespace = os.stat(proc / "self/ns/pid").st_ino
        # Files that have not changed since are not read again, those of processes that have ended included.
        self._known: dict[str, _Known] = {}

    def read(self) -> tuple[ProcessRecord, ...]:
        """Return the processes that run, by pid; a file that cannot be used is named in ``problems``."""
        problems: list[str] = []
        records: list[ProcessRecord] = []
        seen: dict[str, _Known] = {}
        names = list(self._names(problems))
        owners = self._owners() if names else frozenset()
        if len(names) > MAX_FILES:
            problems.append(f"{self._folder}: more than {MAX_FILES} process files; the rest is not read")
            # Files that anybody can put there must not hide those that vLLM's user has written.
            names.sort(key=lambda name: (status := self._status(name)) is None or status.st_uid not in owners)
        for name in names[:MAX_FILES]:
            if (known := self._record(name, owners)) is None:
                continue
            seen[name] = known
            if isinstance(known[1], str):
                problems.append(f"{name}: {known[1]}")
            elif self._is_running(record := known[1]):
                records.append(replace(record, age_seconds=self._age(record)))
        self._known = seen
        self.problems = tuple(problems[:_MAX_PROBLEMS])
        return tuple(sorted(records, key=lambda record: record.pid))

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
        is_namespace_shared = self._namespace is not None and record.pid_namespace == self._namespace
        return is_namespace_shared and self.is_of_this_machine(record)

    def is_of_this_machine(self, record: ProcessRecord) -> bool:
        """Return whether a record was written under this kernel."""
        return self._boot_id is not None and record.boot_id == self._boot_id

    def _names(self, problems: list[str], *, with_unfinished: bool = False) -> Iterator[str]:
        if not self._has_folder:
            return
        try:
            with os.scandir(self._folder) as entries:
                for number, entry in enumerate(entries):
                    if number == MAX_ENTRIES:
                        problems.append(f"{self._folder}: more than {MAX_ENTRIES} files; the rest is not looked at")
                        break
                    is_unfinished = with_unfinished and _TMP_NAME.fullmatch(entry.name)
                    if _NAME.fullmatch(entry.name) or is_unfinished:
                        yield entry.name
        except FileNotFoundError:  # no process has written yet
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

    def _record(self, name: str, owners: frozenset[int]) -> _Known | None:
        if (status := self._status(name)) is None:
            return None
        stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            return known
        if status.st_uid not in owners:
            return stamp, f"it belongs to user {status.st_uid}, who owns neither the folder nor a recorder"
        try:
            return stamp, read_record(self._folder / name, name)
        except BadProcessFile as exc:
            return stamp, str(exc)

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return os.lstat(self._folder / name)
        except OSError:  # removed meanwhile
            return None

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
    """Return the record in a process file, whose name must be that of its content.

    Raises:
        BadProcessFile: It is damaged, or its content is invalid.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            body = _body(file.fileno())
    except NotARegularFileError as exc:
        raise BadProcessFile("it is not a regular file") from exc
    except OSError as exc:
        raise BadProcessFile(os_reason(exc)) from exc
    try:
        record: ProcessRecord = _RECORD.validate_python(json.loads(body, parse_constant=refuse_constant))
    except ValidationError as exc:
        raise BadProcessFile(plain(flaw(exc.errors(include_url=False, include_input=False)), 200)) from exc
    except (ValueError, RecursionError) as exc:
        raise BadProcessFile("its text is no JSON") from exc
    matched = _NAME.fullmatch(name)
    if matched is None or int(matched[1]) != record.pid or record.started not in {None, int(matched[2])}:
        raise BadProcessFile("its name is of another process")
    return record


def _body(descriptor: int) -> bytes:
    """Return the text; it is read again where it was being written."""
    for _ in range(_TORN_TRIES):
        content = os.pread(descriptor, FILE_BYTES, 0)
        if len(content) < _HEAD.size or not content.startswith(MAGIC):
            raise BadProcessFile("it is no process file")
        _, _, length, checksum = _HEAD.unpack_from(content)
        body = content[_HEAD.size : _HEAD.size + length]
        if len(body) == length and zlib.crc32(body, zlib.crc32(content[:_CHECKED_BYTES])) == checksum:
            return body
    raise BadProcessFile("its checksum is wrong")
