"""Writes each of vLLM's processes' host memory into a file of its own, once a second: who it is, and what it has.

The thread touches neither torch nor the engine, waits for nothing but its own clock, and ends in silence where it
cannot write: vLLM must serve as well without it. A forked child gets a thread and a file of its own.

vLLM names its processes where it makes them: `ApiServer_0` (vllm 0.12.0 v1/utils.py:210, vllm 0.32.0 v1/utils.py:250),
`APIServer_DPRank_0` (vllm 0.32.0 entrypoints/launchers/dp_supervisor.py:405), `EngineCore_DP0` and `EngineCore` (vllm
0.12.0 v1/engine/utils.py:123, vllm 0.32.0 v1/engine/utils.py:284), `VllmWorker-0` (vllm 0.12.0
v1/executor/multiproc_executor.py:598, vllm 0.32.0 v1/executor/multiproc_executor.py:747) and `VLLM_DP_Coordinator`
(vllm 0.12.0 v1/engine/coordinator.py:80, vllm 0.32.0 v1/engine/coordinator.py:106). The main process is the API server
where it started no other.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from highwater_worker.engine_view import engine_settings, identity
from highwater_worker.errors import Notes, printable
from highwater_worker.kernel import proc
from highwater_worker.kernel.cgroup import list_processes, read_container, read_oom_kills
from highwater_worker.kernel.shm import SPARED, read_shm
from highwater_worker.wire import (
    MAX_PROCESS_BYTES,
    PROCESS_NAME,
    PROCESS_SUFFIX,
    ProcessFile,
    Writer,
    encoded,
    make_process_file,
    remove_silent,
)

SECONDS = 1.0
_SELDOM_SECONDS = 10.0
"""The time between two looks at the container by a process that is not the first one, at other processes and at the
role, which changes as a process starts others."""
_SHM_SECONDS = 10.0
"""The time between two looks at `/dev/shm`, or more by their cost."""
_MAX_SCANNED = 4096
_OLD_SECONDS = 600.0
_SCHEMA = 1

_NAMES = (
    (re.compile(r"API_?Server(?:_DPRank)?_?([0-9]{0,6})", re.IGNORECASE), "api_server"),
    (re.compile(r"(?:DP)?EngineCore(?:Actor)?(?:_DP([0-9]{1,6}))?"), "engine_core"),
    (re.compile(r"(?:Vllm)?Worker[-_]([0-9]{1,6})"), "worker"),
    (re.compile(r"VLLM_DP_Coordinator()"), "coordinator"),
)
_API_SERVER = re.compile(r"API_?Server", re.IGNORECASE)
_SERVES = re.compile(r"serve|vllm|api_server|openai", re.IGNORECASE)


class Role(NamedTuple):
    """A role, and which of several it is; the names are those of the file."""

    role: str
    number: int | None = None


def role_of(name: str, children: Iterable[str] = (), arguments: Sequence[str] = ()) -> Role:
    """Return the role of a process, by its name in `multiprocessing`, its children's names and its command line."""
    for pattern, role in _NAMES:
        match = pattern.fullmatch(name)
        if match is not None:
            return Role(role, int(match[1]) if match[1] else None)
    if name != "MainProcess":
        return Role("other")
    if any(_API_SERVER.match(child) for child in children):
        return Role("launcher")
    if any("EngineCore" in child for child in children) or any(_SERVES.search(word) for word in arguments[:2]):
        # `vllm serve`, `python -m vllm.entrypoints.openai.api_server`: the first words name it
        return Role("api_server")
    return Role("other")


class ProcessWriter(Writer):
    """Writes one process's file; `clock` is monotonic seconds, the same in all processes of a machine."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        root: Path = proc.ROOT,
        shm: str = "/dev/shm",  # noqa: S108 - looked at, never written to
    ) -> None:
        super().__init__("highwater-process")
        self.folder = folder
        self._clock = clock
        self._wall_clock = wall_clock
        self._root = root
        self._shm = shm
        self._is_first = False
        self._worker: dict[str, Any] = {}
        self._engine: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._due: dict[str, float] = {}
        self._role = Role("other")
        self._file: ProcessFile | None = None
        self._last_cost_ms: float | None = None
        self._failures = 0
        self._kills: int | None = None
        self._ends_in_order = False
        self._shm_cpu_seconds = 0.0

    def set_worker(self, worker: object) -> None:
        """Note that this process has a worker: its ranks and its engine's settings; called on the engine's thread."""
        ranks = identity(worker)
        self._worker = {name: ranks[name] for name in ("rank", "dp_rank", "tp_rank", "pp_rank")}
        self._engine = engine_settings(worker)

    def run(self) -> None:
        try:
            # Not at once: many processes only start another program.
            while not self._stopped.wait(SECONDS):
                if not self._ends_in_order:
                    # Not at the start: multiprocessing empties its list in a child that it has just forked.
                    self._ends_in_order = True
                    self.end_with_process()
                    self._update_role()
                    if self._is_first:
                        with suppress(RuntimeError):  # then nothing is known of `/dev/shm`
                            Thread(target=self._watch_shm, name="highwater-shm", daemon=True).start()
                if not self.write():
                    break
        finally:
            if self._file is not None:
                # The process ends in order, or the recorder is not wanted any more.
                self._file.close(removes=not self._has_last_look())

    def _has_last_look(self) -> bool:
        """Write once more if the kernel has killed a process of this container, and return whether that succeeded.

        The counter is gone with the container, and the processes that outlive a kill end within a second or two.
        """
        kills = read_oom_kills(self._root)
        if not kills or self._kills is None or kills <= self._kills or self._file is None or not self._file.is_there():
            return False
        self._due.clear()
        failures = self._failures
        return self.write() and self._failures == failures

    def write(self) -> bool:
        """Write the file once, and return whether to go on; never raises."""
        if os.getpid() != self.pid:
            return False
        started = time.perf_counter()
        try:
            if self._file is None:
                self._kills = read_oom_kills(self._root)
                remove_silent(self.folder, PROCESS_SUFFIX, self._wall_clock() - _OLD_SECONDS)
                path = self.folder / f"highwater-{self.pid}-{proc.pid_started(self._root)}{PROCESS_SUFFIX}"
                self._file = make_process_file(path, self._body())
            elif not self._file.is_there():
                return False  # swept, or the folder is gone
            else:
                self._file.write(self._body())
        except Exception:  # noqa: BLE001 - a disk that is full now may not be later; there is nowhere to report it
            self._failures += 1
        self._last_cost_ms = round((time.perf_counter() - started) * 1000, 3)
        return True

    def leave(self) -> None:
        """Let go of the file of the process that this one was forked from, and leave it in its place."""
        if self._file is not None:
            self._file.leave()

    def _body(self) -> bytes:
        now = self._clock()
        record = self.record(now)
        body = encoded(record)
        for dropped in ("others", "shm", "engine"):  # the process's own figures come first
            if len(body) <= MAX_PROCESS_BYTES:
                break
            record.pop(dropped, None)
            body = encoded(record)
        return body

    def record(self, now: float) -> dict[str, Any]:
        """Return the file's content as of `now`, in monotonic seconds."""
        notes = Notes()
        figures = notes.attempt("figures", lambda: proc.read_figures("self", self._root)) or {}
        self._at_most_every("role", _SELDOM_SECONDS, now, self._update_role)
        container = self._at_most_every(
            "container", SECONDS if self._is_first else _SELDOM_SECONDS, now, lambda: read_container(self._root)
        )
        record: dict[str, Any] = {
            "schema": _SCHEMA,
            "at": round(self._wall_clock(), 3),
            "mono": round(now, 3),
            "pid": self.pid,
            **self._constant,
            "role": self._role.role,
            "index": self._role.number,
            **self._worker,
            **figures,
            "descriptors": notes.attempt("descriptors", lambda: proc.count_descriptors(self._root)),
            "descriptors_limit": proc.descriptors_limit(),
            "cgroup": container,
            "cost_ms": self._last_cost_ms,
            "cpu_seconds": round(time.thread_time() + self._shm_cpu_seconds, 6),
            "failures": self._failures,
        }
        if self._engine:
            record["engine"] = self._engine
        if self._is_first:
            record["shm"] = self._last.get("shm")
            record["machine"] = self._at_most_every(
                "machine", _SELDOM_SECONDS, now, lambda: proc.read_machine(self._root)
            )
            record["others"] = self._at_most_every(
                "others", _SELDOM_SECONDS, now, lambda: list_processes(_writers(self.folder), self._root)
            )
        return record

    def _watch_shm(self) -> None:
        """Look at `/dev/shm` until `end`: the body of a thread of its own.

        It reads what every process has mapped, page by page, and may wait for the interpreter after each.
        """
        while True:
            self._at_most_every("shm", 0.0, self._clock(), lambda: read_shm(self._shm, f"{self._root}/proc"))
            before, self._shm_cpu_seconds = self._shm_cpu_seconds, time.thread_time()
            if self._stopped.wait(max(_SHM_SECONDS, SPARED * (self._shm_cpu_seconds - before))):
                return

    @cached_property
    def _constant(self) -> dict[str, Any]:
        attempt, root = Notes().attempt, self._root
        vllm = getattr(sys.modules.get("vllm.version"), "__version__", None)
        return {
            "started": attempt("started", lambda: proc.pid_started(root)),
            "boot_id": attempt("boot_id", lambda: proc.boot_id(root)),
            "host": attempt("host", lambda: printable(socket.gethostname(), 64)),
            "pid_namespace": attempt("pid_namespace", lambda: proc.pid_namespace(root)),
            # Never imported for it: in a process that has not got so far it would be loaded here.
            "vllm": printable(vllm, 40) if isinstance(vllm, str) else None,
        }

    def _update_role(self) -> None:
        # Not `active_children()`, which waits for those that have ended: they are vLLM's to wait for.
        children = list(getattr(multiprocessing.process, "_children", ()))
        names = [str(getattr(child, "name", "")) for child in children]
        role = role_of(multiprocessing.current_process().name, names, sys.argv)
        if role.role == "other" and self._worker:
            role = Role("worker", self._worker.get("rank"))
        self._role = role
        # Of several that could, the first one reports what they share.
        self._is_first = multiprocessing.parent_process() is None

    def _at_most_every(self, name: str, seconds: float, now: float, read: Callable[[], Any]) -> Any:  # noqa: ANN401 - read's
        if now >= self._due.get(name, float("-inf")):
            self._due[name] = now + seconds
            value = Notes().attempt(name, read)
            if isinstance(value, dict):
                value["mono"] = round(now, 3)
            self._last[name] = value
        return self._last.get(name)


def _writers(folder: Path) -> set[int]:
    with suppress(OSError), os.scandir(folder) as entries:
        names = [PROCESS_NAME.fullmatch(entry.name) for entry in islice(entries, _MAX_SCANNED)]
        return {int(name[1]) for name in names if name is not None}
    return set()


class _Current:
    """The writer of this process; forked children replace it."""

    writer: ProcessWriter | None = None
    follows_forks = False


def start_process_file(folder: Path) -> None:
    """Write this process's file from now on, and its forked children's; a second call does nothing.

    Raises ValueError where the folder lies on another machine, and RuntimeError where no thread can be started.
    """
    if _Current.writer is not None and _Current.writer.pid == os.getpid():
        return
    kind = proc.file_system_of(folder)
    if proc.is_remote(kind):
        raise ValueError(f"{str(folder)!r} lies on {kind}; it must be on this machine")
    _start(folder)
    if not _Current.follows_forks:
        _Current.follows_forks = True
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _start(folder: Path) -> None:
    writer = ProcessWriter(folder)
    writer.start_thread()
    _Current.writer = writer


def worker_made(worker: object) -> None:
    if _Current.writer is not None:
        _Current.writer.set_worker(worker)


def _after_fork_in_child() -> None:
    before = _Current.writer
    if before is None:
        return
    _Current.writer = None
    with suppress(Exception):
        before.leave()
        _start(before.folder)
