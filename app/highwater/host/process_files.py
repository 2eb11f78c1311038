"""The files that vLLM's processes write of themselves, read as foreign bytes. docs/recorder-file.md is the contract.

What a file says is shown and never acted upon. An invalid file costs only itself and is named; a bounded number of
bounded files is read. Reading blocks: call it in a thread.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from highwater.errors import os_reason
from highwater.files.regular import NotARegularFileError, first_names, open_regular, stamp_of, status_of
from highwater.flaws import flaw
from highwater.host.process_record import ProcessRecord
from highwater.process.machine import Machine
from highwater.text.printable import plain
from highwater.text.strict_json import parse_json

MAGIC = b"HWPROC01"
FILE_BYTES = 4096
MAX_FILES = 256
MAX_ENTRIES = 4096
"""Of the folder, whatever their names: it may hold files that are not Highwater's."""
CURRENT_SECONDS = 15.0
"""A process writes once a second; one that has not written for longer is not shown as running."""
STALE_SECONDS = 600.0
MAX_SILENT = 128
"""Processes that have ended, of several lives of the engine in a crash loop."""
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
        silent: The processes of the last read that have ended or fallen silent, the freshest first. One that a signal
            has stopped is silent too; where this machine shows that it exists, it is left out.

    Args:
        folder: The recorders' folder; ``None``: no files are read.
        machine: The machine whose processes they may be; by default the sidecar's.
    """

    def __init__(self, folder: Path | None, machine: Machine | None = None) -> None:
        self.problems: tuple[str, ...] = ()
        self.silent: tuple[ProcessRecord, ...] = ()
        self._has_folder = folder is not None
        self._folder = folder or Path()
        self._machine = machine or Machine()
        # Files that have not changed since are not read again, those of processes that have ended included.
        self._known: dict[str, _Known] = {}

    def read(self) -> tuple[ProcessRecord, ...]:
        """Return the processes that run, by pid; a file that cannot be used is named in ``problems``."""
        problems: list[str] = []
        records: list[ProcessRecord] = []
        silent: list[ProcessRecord] = []
        seen: dict[str, _Known] = {}
        listed = self._listed(problems)
        names = [name for name in listed if _NAME.fullmatch(name)]
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
            record = replace(known[1], age_seconds=self._age(known[1]))
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
            if not (_NAME.fullmatch(name) or _TMP_NAME.fullmatch(name)):
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
        rings = (status_of(self._folder / name) for name in listed if name.endswith(".ring"))
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

    def _age(self, record: ProcessRecord) -> float:
        if self._machine.is_boot(record.boot_id):
            return max(0.0, self._machine.monotonic() - record.mono)
        return abs(self._machine.clock() - record.at)  # a time to come is as far from now


def read_record(path: Path, name: str) -> ProcessRecord:
    """Raises BadProcessFile: the content is damaged or invalid, or does not fit the file's name."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            body = _body(file.fileno())
    except NotARegularFileError as exc:
        raise BadProcessFile("it is not a regular file") from exc
    except OSError as exc:
        raise BadProcessFile(os_reason(exc)) from exc
    try:
        record: ProcessRecord = _RECORD.validate_python(parse_json(body.decode("utf-8")))
    except ValidationError as exc:
        raise BadProcessFile(plain(flaw(exc.errors(include_url=False, include_input=False)), 200)) from exc
    except ValueError as exc:
        raise BadProcessFile("its text is no JSON") from exc
    matched = _NAME.fullmatch(name)
    if matched is None or int(matched[1]) != record.pid or record.started not in {None, int(matched[2])}:
        raise BadProcessFile("its name is of another process")
    return record


def _body(descriptor: int) -> bytes:
    for _ in range(_TORN_TRIES):
        content = os.pread(descriptor, FILE_BYTES, 0)
        if len(content) < _HEAD.size or not content.startswith(MAGIC):
            raise BadProcessFile("it is no process file")
        _, _, length, checksum = _HEAD.unpack_from(content)
        body = content[_HEAD.size : _HEAD.size + length]
        if len(body) == length and zlib.crc32(body, zlib.crc32(content[:_CHECKED_BYTES])) == checksum:
            return body
    raise BadProcessFile("its checksum is wrong")
