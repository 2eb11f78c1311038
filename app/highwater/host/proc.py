"""The engine's processes as this machine's ``/proc`` shows them, where the PID namespace is shared.

Used for processes that write no file: those of an engine without the worker package, and others that it has started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from highwater.host.reading import ProcessMemory, Role
from highwater.process.machine import parent_and_start
from highwater.text.printable import plain

MAX_PROCESSES = 8192
"""Processes of the machine that a search goes through."""
MAX_FOUND = 128
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


def find_engine(proc: Path, known: Iterable[int]) -> tuple[ProcessMemory, ...]:
    """Return the processes of an engine: those known, their ancestors as far as these are vLLM's, and all below.

    What starts an API server, and is none of vLLM's processes itself, may have started another engine's too.
    """
    parents: dict[int, int] = {}
    with suppress(OSError):
        for pid in [int(name) for name in os.listdir(proc) if name.isdigit()][:MAX_PROCESSES]:
            with suppress(OSError, ValueError, IndexError):
                parents[pid] = parent_and_start(proc, pid)[0]
    roots: set[int] = set()
    for pid in known:
        top = pid
        while (above := parents.get(top, 0)) > 1 and "vllm" in _title(proc, above).lower():
            if (role_of(_title(proc, top)), role_of(_title(proc, above))) == ("api_server", "other"):
                break
            top = above
        if top in parents:
            roots.add(top)
    rows = (read_process(proc, pid) for pid in islice(sorted(_below(roots, parents)), MAX_FOUND))
    return tuple(one for one in rows if one is not None)


def _below(roots: set[int], parents: Mapping[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    pids: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in pids:
            pids.add(pid)
            waiting += children.get(pid, [])
    return pids


def read_process(proc: Path, pid: int) -> ProcessMemory | None:
    """Return a process under its program's name; ``None`` if it has ended, or is one of the kernel's own threads."""
    folder, figures = proc / str(pid), dict[str, Any]()
    try:
        status = (folder / "status").read_text(encoding="ascii", errors="replace")
        parent_pid, started = parent_and_start(proc, pid)
    except (OSError, ValueError, IndexError):
        return None
    for key, size in _kib_lines(status):
        if key in _SIZES:
            figures[_SIZES[key]] = size
    if "anonymous_bytes" not in figures:
        return None
    if threads := re.search(r"^Threads:\s*([0-9]+)\s*$", status, re.MULTILINE):
        figures["threads"] = int(threads[1])
    with suppress(OSError):  # only its owner may see them
        figures["descriptors"] = len(os.listdir(folder / "fd"))
    with suppress(OSError):
        limits = (folder / "limits").read_text(encoding="ascii", errors="replace")
        if most := re.search(r"^Max open files +([0-9]{1,15}) ", limits, re.MULTILINE):
            figures["descriptors_limit"] = int(most[1])
    title = _title(proc, pid)
    return ProcessMemory(
        role=role_of(title),
        name=plain(title, 120).split(" ")[0].rpartition("/")[2][:40],
        pid=pid,
        started=started,
        parent_pid=parent_pid,
        source="proc",
        **figures,
    )


def role_of(title: str) -> Role:
    for mark, role in _TITLES:
        if mark in title:
            return role
    return "api_server" if _SERVES.search(title) else "other"


def read_machine(proc: Path) -> tuple[int | None, int | None]:
    """Return ``MemTotal`` and ``MemAvailable`` in bytes, as far as they are shown."""
    sizes: dict[str, int] = {}
    with suppress(OSError):
        sizes = dict(_kib_lines((proc / "meminfo").read_text(encoding="ascii", errors="replace")))
    return sizes.get("MemTotal"), sizes.get("MemAvailable")


def _kib_lines(text: str) -> Iterable[tuple[str, int]]:
    for key, size in re.findall(r"^(\w+):\s*([0-9]+) kB$", text, re.MULTILINE):
        yield key, int(size) * 1024


def _title(proc: Path, pid: int) -> str:
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            return file.read(512).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
