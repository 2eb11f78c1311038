"""Requests of one of vLLM's processes to trace its own Python memory: files in the recorders' folder, and the results.

The process itself decides whether it traces (worker_ext: ``highwater_worker.processes.host_trace``). Its result is
foreign text of at most 4 KiB: it is validated, shown, and never acted upon.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from highwater.files.regular import open_regular
from highwater.host.process_files import ProcessFiles
from highwater.host.process_record import ProcessRecord
from highwater.text.printable import cleaned
from highwater.units import size_text, span_text

# Of these requests alone; the worker package refuses another one (highwater_worker.processes.host_trace).
_REQUEST_SCHEMA: Final = 1
_MAX_RESULT: Final = 4096
_Size = Annotated[int, Field(ge=-(2**62), le=2**62)]
_Text = Annotated[str, Field(max_length=300)]
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class CannotTrace(Exception):
    """The process cannot be traced; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Malloc:
    """glibc's own figures."""

    arena_bytes: _Size = 0
    mapped_bytes: _Size = 0
    used_bytes: _Size = 0
    free_bytes: _Size = 0
    top_bytes: _Size = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The process at one moment, as its kernel and its allocator count."""

    anonymous_bytes: _Size | None = None
    malloc: Malloc | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The growth at one line of Python: bytes, number of allocations, and the lines that called it."""

    file: _Text
    line: _Size
    bytes: _Size
    count: _Size
    callers: Annotated[tuple[_Text, ...], Field(max_length=8)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """A process's report on a trace.

    Attributes:
        why: The reason for the state; empty while it runs.
        id: Of the request; ``None`` where that could not be read.
        seconds: As requested.
        since_seconds: Before the end; growth is counted from then on.
        stopped_ms: How long each reading stopped the process.
        tracer_bytes: Memory of tracemalloc itself at the end.
        grown_bytes: Of all lines that grew, those that are not listed included.
    """

    state: Annotated[str, Field(pattern=r"^(running|ended|refused|failed)$")]
    pid: _Size
    started: _Size
    why: _Text = ""
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    seconds: _Seconds = 0.0
    since_seconds: _Seconds = 0.0
    stopped_ms: Annotated[tuple[_Seconds, ...], Field(max_length=8)] = ()
    tracer_bytes: _Size = 0
    grown_bytes: _Size = 0
    before: Figures | None = None
    after: Figures | None = None
    lines: Annotated[tuple[Line, ...], Field(max_length=32)] = ()


_RESULT = TypeAdapter(TraceResult)


def find_process(folder: Path, wanted: str) -> tuple[ProcessRecord, str]:
    """Return a process by its pid or name (``api-server``, ``engine-core``, ``worker-1``), and its display name.

    Raises:
        CannotTrace: No process matches, or several do; the text lists them.
    """
    named = [(record, record.name) for record in ProcessFiles(folder).read()]
    identifier = _plain(wanted)
    matching = [one for one in named if identifier in _identifiers(*one)]
    if len(matching) == 1:
        return matching[0]
    if not named:
        hint = "vLLM writes process files where HIGHWATER_RECORDER_DIR names this folder"
        raise CannotTrace(f"{wanted!r} is no process of {folder}: there are none; {hint}")
    owners = Counter(word for one in named for word in _identifiers(*one))
    there = ", ".join(
        f"{next(word for word in _identifiers(record, name) if owners[word] == 1)} ({name}, pid {record.pid})"
        for record, name in matching or named
    )
    if matching:
        raise CannotTrace(f"{wanted!r} means several processes; name one: {there}")
    raise CannotTrace(f"{wanted!r} is no process of {folder}; name one: {there}")


def _identifiers(record: ProcessRecord, name: str) -> tuple[str, ...]:
    """Return the words that mean a process, the easiest first; the last, its pid, means no other."""
    role, number = _plain(record.role), record.rank if record.role == "worker" else None
    number = record.index if number is None else number
    numbered = () if number is None else (f"{role}-{number}",)
    return tuple(dict.fromkeys((role, *numbered, _plain(name), str(record.pid))))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower().replace("enginecore", "engine core")).strip("-")


def ask(folder: Path, record: ProcessRecord, *, action: str, minutes: float, frames: int) -> str:
    """Put a request to ``start`` or ``stop`` into the recorders' folder, and return its id.

    At most 60 minutes are traced, and at most 8 frames of each stack are kept.

    Raises:
        CannotTrace: The request cannot be written there.
    """
    request_id = secrets.token_hex(8)
    path = _request_path(folder, record)
    request = {
        "schema": _REQUEST_SCHEMA,
        "id": request_id,
        "action": action,
        "minutes": minutes,
        "frames": frames,
        "boot_id": record.boot_id,
        "pid": record.pid,
        "started": record.started,
    }
    hidden = folder / f".{path.name}.{request_id}.tmp"
    try:
        # Readable by all: the engine may run as another user than this process. It holds no secret.
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o644)
            json.dump(request, file)
        hidden.rename(path)
    except OSError as exc:
        with suppress(OSError):
            hidden.unlink()
        raise CannotTrace(f"{folder}: the request cannot be written: {exc.strerror or exc}") from exc
    return request_id


def withdraw(folder: Path, record: ProcessRecord) -> None:
    """Remove a request that the process did not take."""
    with suppress(OSError):
        _request_path(folder, record).unlink()


def _request_path(folder: Path, record: ProcessRecord) -> Path:
    return folder / f"highwater-{record.pid}-{record.started}.trace-request"


def read_result(folder: Path, record: ProcessRecord) -> TraceResult | None:
    """Return a process's last result.

    ``None`` where it reported nothing, or nothing that can be read; and, as long as the process's own file exists,
    where the result belongs to another user than that file.
    """
    name = f"highwater-{record.pid}-{record.started}"
    try:
        with os.fdopen(open_regular(folder / f"{name}.trace.json"), "rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            result = _RESULT.validate_python(json.loads(file.read(_MAX_RESULT + 1)))
    except (OSError, ValueError, RecursionError, ValidationError):
        return None
    with suppress(FileNotFoundError):  # a process removes its own file when it ends
        if os.lstat(folder / f"{name}.process").st_uid != owner:
            return None
    return cleaned(result) if (result.pid, result.started) == (record.pid, record.started) else None


def has_ended(folder: Path, record: ProcessRecord) -> bool:
    """Return whether a process has ended, or writes nothing of itself any more: no result will come then."""
    name = f"highwater-{record.pid}-{record.started}.process"
    return not os.path.lexists(folder / name) or ProcessFiles(folder).has_ended(record)


def trace_text(result: TraceResult, name: str) -> str:
    """Return the result of the process of that name in sentences."""
    head = f"{name} (pid {result.pid}): {result.state}{f', {result.why}' if result.why else ''}"
    if result.after is None:
        return f"{head}; {span_text(result.seconds)} in all" if result.state == "running" else head
    return "\n".join([head, *_growth(result)])


def _growth(result: TraceResult) -> Iterator[str]:
    since = f"more than {span_text(result.since_seconds)} before"
    if result.lines:
        yield f"Python holds {size_text(result.grown_bytes)} {since}, of it by line:"
    else:
        yield f"No line of Python holds {since}."
    for line in result.lines:
        callers = "".join(f" ← {one}" for one in line.callers)
        yield f"  {size_text(line.bytes, signed=True)} in {line.count:+,} pieces: {line.file}:{line.line}{callers}"
    before, after = result.before or Figures(), result.after or Figures()
    if before.malloc is not None and after.malloc is not None:
        yield (
            f"malloc: in use {size_text(before.malloc.used_bytes)} → {size_text(after.malloc.used_bytes)}, "
            f"free {size_text(before.malloc.free_bytes)} → {size_text(after.malloc.free_bytes)}, since the start."
        )
    if before.anonymous_bytes is not None and after.anonymous_bytes is not None:
        change = after.anonymous_bytes - before.anonymous_bytes
        yield (
            f"Anonymous memory: {size_text(before.anonymous_bytes)} → {size_text(after.anonymous_bytes)} "
            f"({size_text(change, signed=True)}), tracemalloc's own included. What neither Python nor malloc counts "
            "is a library's own mappings."
        )
    if result.stopped_ms:
        yield (
            f"tracemalloc itself had {size_text(result.tracer_bytes)}; a reading took up to "
            f"{max(result.stopped_ms):,.0f} ms, in which Python stood still."
        )
