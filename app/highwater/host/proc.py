"""The engine's processes as this machine's ``/proc`` shows them, where the PID namespace is shared.

Used for processes that write no file: those of an engine without the worker package, and others that it has started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from highwater.host.reading import Role
from highwater.text.printable import plain

MAX_PROCESSES = 8192
"""Of the machine: looked at while searching for the engine's."""
MAX_FOUND = 128
_PARENT, _STARTED = 1, 19  # fields of /proc/<pid>/stat, counted from behind the command's name; proc(5)
_KIB = 1024
_SIZES = {
    "RssAnon": "anonymous_bytes",
    "RssFile": "file_bytes",
    "RssShmem": "shmem_bytes",
    "VmSwap": "swap_bytes",
    "VmHWM": "peak_bytes",
}
# Titles that vLLM gives its processes, beginning with VLLM_PROCESS_NAME_PREFIX; `::` may be cut off with the prefix.
_TITLES: tuple[tuple[str, Role], ...] = (
    ("::APIServer", "api_server"),
    ("::EngineCore", "engine_core"),
    ("::Worker", "worker"),
    ("::DPCoordinator", "coordinator"),
    ("::DPSupervisor", "launcher"),
    ("multiprocessing.resource_tracker", "resource_tracker"),
)
# `/usr/bin/vllm serve`, `python -m vllm.entrypoints.openai.api_server`; not a program that has such words further on.
_SERVES = re.compile(r"^(?:\S+ )?(?:-\S+ ){0,2}(?:\S*/)?vllm(?: serve\b|[./]entrypoints)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcFigures:
    """One process as ``/proc`` shows it; sizes in bytes.

    Attributes:
        pid: Its number here.
        started: In ticks since boot.
        title: Its command line, cut.
        role: By its title.
        sizes: ``anonymous_bytes`` and so on, and ``threads``, as far as they are shown.
        descriptors: How many files it has open; ``None`` where only its owner may see them.
        descriptors_limit: How many it may have open at once; ``None`` without a limit, or where it is not shown.
    """

    pid: int
    started: int
    parent_pid: int
    title: str
    role: Role
    sizes: Mapping[str, int]
    descriptors: int | None
    descriptors_limit: int | None


def find_engine(proc: Path, known: Iterable[int]) -> tuple[ProcFigures, ...]:
    """Return the processes of an engine: those known, their ancestors as far as these are vLLM's, and all below.

    Args:
        proc: The folder in which the kernel shows processes.
        known: Processes of the engine, by their numbers here. Without any, nothing is found.
    """
    parents = _parents(proc)
    roots: set[int] = set()
    for pid in known:
        top = pid
        while (above := parents.get(top, 0)) > 1 and _is_vllm(_title(proc, above)):
            top = above
        if top in parents:
            roots.add(top)
    found = _below(roots, parents)
    figures = (read_figures(proc, pid) for pid in islice(sorted(found), MAX_FOUND))
    return tuple(one for one in figures if one is not None)


def read_figures(proc: Path, pid: int) -> ProcFigures | None:
    """Return a process's figures; ``None`` if it does not exist, or has ended."""
    sizes: dict[str, int] = {}
    try:
        status = (proc / str(pid) / "status").read_text(encoding="ascii", errors="replace")
        stat = parent_and_start(proc, pid)
    except (OSError, ValueError, IndexError):
        return None
    for line in status.splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if key in _SIZES and words[1:] == ["kB"] and words[0].isdigit():
            sizes[_SIZES[key]] = int(words[0]) * _KIB
        elif key == "Threads" and value.strip().isdigit():
            sizes["threads"] = int(value)
    if "anonymous_bytes" not in sizes:  # the kernel's own thread, or one that has ended
        return None
    title = _title(proc, pid)
    descriptors: int | None = None
    with suppress(OSError):
        descriptors = len(os.listdir(proc / str(pid) / "fd"))
    return ProcFigures(
        pid=pid,
        started=stat[1],
        parent_pid=stat[0],
        title=plain(title, 120),
        role=role_of(title),
        sizes=sizes,
        descriptors=descriptors,
        descriptors_limit=_descriptors_limit(proc, pid),
    )


def _descriptors_limit(proc: Path, pid: int) -> int | None:
    try:
        text = (proc / str(pid) / "limits").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"^Max open files +([0-9]{1,15}) ", text, re.MULTILINE)
    return None if found is None else int(found[1])


def role_of(title: str) -> Role:
    """Return what a process is, by its command line."""
    for mark, role in _TITLES:
        if mark in title:
            return role
    return "api_server" if _SERVES.search(title) else "other"


def read_machine(proc: Path) -> dict[str, int]:
    """Return ``MemTotal`` and ``MemAvailable`` in bytes, as far as they are shown."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in (proc / "meminfo").read_text(encoding="ascii", errors="replace").splitlines():
            key, _, value = line.partition(":")
            words = value.split()
            if key in ("MemTotal", "MemAvailable") and words[1:] == ["kB"] and words[0].isdigit():
                found[key] = int(words[0]) * _KIB
    return found


def _parents(proc: Path) -> dict[int, int]:
    found: dict[int, int] = {}
    with suppress(OSError):
        pids = [int(name) for name in os.listdir(proc) if name.isdigit()]
        for pid in pids[:MAX_PROCESSES]:
            with suppress(OSError, ValueError, IndexError):
                found[pid] = parent_and_start(proc, pid)[0]
    return found


def _below(roots: set[int], parents: Mapping[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def parent_and_start(proc: Path, pid: int) -> tuple[int, int]:
    """Return a process's parent, and its start in ticks since boot; see proc(5).

    Raises:
        OSError: There is no such process, or it is hidden.
        ValueError: The kernel's line is not understood.
        IndexError: It is cut.
    """
    text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return int(fields[_PARENT]), int(fields[_STARTED])


def _title(proc: Path, pid: int) -> str:
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            raw: Any = file.read(512)
    except OSError:
        return ""
    return str(raw.replace(b"\0", b" ").decode("utf-8", "replace")).strip()


def _is_vllm(title: str) -> bool:
    return "vllm" in title.lower()
