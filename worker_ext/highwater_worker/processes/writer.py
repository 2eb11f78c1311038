"""A thread that writes this process's host memory into its file once a second.

It touches neither torch nor the engine, waits for nothing but its own clock, and ends in silence where it cannot write:
vLLM must serve as well without it. A forked child gets a thread and a file of its own. The file has 4096 bytes, and is
rewritten in place with one system call; docs/recorder-file.md describes it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Event, Thread
from typing import Any

from highwater_worker.devices.cgroup import read_container, read_oom_kills
from highwater_worker.devices.host import read_machine
from highwater_worker.errors import Notes, printable
from highwater_worker.files import ROOT, OpenFile, checked, encoded, file_system_of, is_remote, new_file, remove_silent
from highwater_worker.identity import boot_id, identity, pid_namespace, pid_started
from highwater_worker.processes.figures import count_descriptors, descriptors_limit, list_processes, read_figures
from highwater_worker.processes.role import Role, engine_settings, own_role
from highwater_worker.processes.shared_memory import SPARED, read_shm

SECONDS = 1.0
_SELDOM_SECONDS = 10.0
"""The time between two looks at the container by a process that is not the first one, at other processes and at the
role, which changes as a process starts others."""
_SHM_SECONDS = 10.0
"""The time between two looks at `/dev/shm`, or more by their cost."""
_STOP_SECONDS = 1.0
"""The time that an end waits for the thread, which the disk may hold."""
_EARLY = 100
_SUFFIX = ".process"
_NAME = re.compile(r"highwater-([0-9]{1,10})-[0-9]{1,20}\.process$")
_MAX_SCANNED = 4096
_OLD_SECONDS = 600.0
_SCHEMA = 1
MAGIC = b"HWPROC01"
FILE_BYTES = 4096
_HEAD = struct.Struct("<8sII")
_CHECKSUM_BYTES = 4
MAX_BODY_BYTES = FILE_BYTES - _HEAD.size - _CHECKSUM_BYTES
_READABLE_BY_ALL = 0o644


class ProcessFile(OpenFile):
    """The open file; it is removed where its process ends in order."""

    _written = 1

    def write(self, body: bytes) -> None:
        """Write one JSON object in ASCII over the old; raises OSError, and ValueError over `MAX_BODY_BYTES`."""
        self._written += 1
        self._pwrite(_framed(self._written, body), 0)


def make_process_file(path: Path, body: bytes) -> ProcessFile:
    """Make a file with its first content; the folder is made where it is missing. Raises as `ProcessFile.write`."""
    frame = _framed(1, body)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, _READABLE_BY_ALL) as descriptor:
        os.pwrite(descriptor, frame, 0)
    return ProcessFile(path, descriptor)


def _framed(sequence: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{len(body)} bytes do not fit into {MAX_BODY_BYTES}")
    return checked(_HEAD.pack(MAGIC, sequence & 0xFFFFFFFF, len(body)), body).ljust(FILE_BYTES, b"\0")


class ProcessWriter:
    """Writes one process's file; `clock` is monotonic seconds, the same in all processes of a machine."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        root: Path = ROOT,
        shm: str = "/dev/shm",  # noqa: S108 - looked at, never written to
    ) -> None:
        self.folder = folder
        self._clock = clock
        self._wall_clock = wall_clock
        self._root = root
        self._shm = shm
        self._is_first = False
        self._worker: dict[str, Any] = {}
        self._engine: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._due: dict[str, float] = {}
        self._role = Role("other")
        self._file: ProcessFile | None = None
        self._last_cost_ms: float | None = None
        self._failures = 0
        self._kills: int | None = None
        self._ends_in_order = False
        self._shm_cpu_seconds = 0.0
        self._stopped = Event()
        self._thread: Thread | None = None
        self.pid = os.getpid()

    def set_worker(self, worker: object) -> None:
        """Note that this process has a worker: its ranks and its engine's settings; called on the engine's thread."""
        ranks = identity(worker)
        self._worker = {name: ranks[name] for name in ("rank", "dp_rank", "tp_rank", "pp_rank")}
        self._engine = engine_settings(worker)

    def start(self) -> None:
        """Start the thread; a RuntimeError says that none can be started."""
        thread = Thread(target=self.run, name="highwater-process", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """End the thread, and remove the file: the process ends in order, or the recorder is not wanted any more."""
        self._stopped.set()
        if self._thread is not None and self.pid == os.getpid():
            self._thread.join(_STOP_SECONDS)

    def run(self) -> None:
        """Write once a second until `stop`: the thread's body."""
        try:
            # Not at once: many processes only start another program.
            while not self._stopped.wait(SECONDS):
                if not self._ends_in_order:
                    # Not at the start: multiprocessing empties its list in a child that it has just forked.
                    self._ends_in_order = True
                    atexit.register(self.stop)
                    Finalize(None, self.stop, exitpriority=_EARLY)
                    self._update_role()
                    if self._is_first:
                        with suppress(RuntimeError):  # then nothing is known of `/dev/shm`
                            Thread(target=self._watch_shm, name="highwater-shm", daemon=True).start()
                if not self.write():
                    break
        finally:
            if self._file is not None:
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
                remove_silent(self.folder, _SUFFIX, self._wall_clock() - _OLD_SECONDS)
                path = self.folder / f"highwater-{self.pid}-{pid_started(self._root)}{_SUFFIX}"
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
            if len(body) <= MAX_BODY_BYTES:
                break
            record.pop(dropped, None)
            body = encoded(record)
        return body

    def record(self, now: float) -> dict[str, Any]:
        """Return the file's content as of `now`, in monotonic seconds."""
        notes = Notes()
        figures = notes.attempt("figures", lambda: read_figures("self", self._root)) or {}
        self._every("role", _SELDOM_SECONDS, now, self._update_role)
        container = self._every(
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
            "descriptors": notes.attempt("descriptors", lambda: count_descriptors(self._root)),
            "descriptors_limit": descriptors_limit(),
            "cgroup": container,
            "cost_ms": self._last_cost_ms,
            "cpu_seconds": round(time.thread_time() + self._shm_cpu_seconds, 6),
            "failures": self._failures,
        }
        if self._engine:
            record["engine"] = self._engine
        if self._is_first:
            record["shm"] = self._kept.get("shm")
            record["machine"] = self._every("machine", _SELDOM_SECONDS, now, lambda: read_machine(self._root))
            record["others"] = self._every(
                "others", _SELDOM_SECONDS, now, lambda: list_processes(_writers(self.folder), self._root)
            )
        return record

    def _watch_shm(self) -> None:
        """Look at `/dev/shm` until `stop`: the body of a thread of its own.

        It reads what every process has mapped, page by page, and may wait for the interpreter after each.
        """
        while True:
            self._every("shm", 0.0, self._clock(), lambda: read_shm(self._shm, f"{self._root}/proc"))
            before, self._shm_cpu_seconds = self._shm_cpu_seconds, time.thread_time()
            if self._stopped.wait(max(_SHM_SECONDS, SPARED * (self._shm_cpu_seconds - before))):
                return

    @cached_property
    def _constant(self) -> dict[str, Any]:
        attempt, root = Notes().attempt, self._root
        return {
            "started": attempt("started", lambda: pid_started(root)),
            "boot_id": attempt("boot_id", lambda: boot_id(root)),
            "host": attempt("host", lambda: printable(socket.gethostname(), 64)),
            "pid_namespace": attempt("pid_namespace", lambda: pid_namespace(root)),
            "vllm": _version(),
        }

    def _update_role(self) -> None:
        role = own_role()
        if role.role == "other" and self._worker:
            role = Role("worker", self._worker.get("rank"))
        self._role = role
        # Of several that could, the first one reports what they share.
        self._is_first = multiprocessing.parent_process() is None

    def _every(self, name: str, seconds: float, now: float, read: Callable[[], Any]) -> Any:  # noqa: ANN401 - read's
        if now >= self._due.get(name, float("-inf")):
            self._due[name] = now + seconds
            value = Notes().attempt(name, read)
            if isinstance(value, dict):
                value["mono"] = round(now, 3)
            self._kept[name] = value
        return self._kept.get(name)


def _version() -> str | None:
    # Never imported for it: in a process that has not got so far it would be loaded here.
    version = getattr(sys.modules.get("vllm.version"), "__version__", None)
    return printable(version, 40) if isinstance(version, str) else None


def _writers(folder: Path) -> set[int]:
    with suppress(OSError), os.scandir(folder) as entries:
        names = [_NAME.match(entry.name) for entry in islice(entries, _MAX_SCANNED)]
        return {int(name[1]) for name in names if name is not None}
    return set()


class _Current:
    """The writer of this process; forked children replace it."""

    writer: ProcessWriter | None = None
    follows_forks = False


def start_process_file(directory: str) -> None:
    """Write this process's file from now on, and its forked children's; a second call does nothing.

    Raises ValueError where the directory is no absolute path, or lies on another machine, and RuntimeError where no
    thread can be started.
    """
    if _Current.writer is not None and _Current.writer.pid == os.getpid():
        return
    if not directory.startswith("/") or "\0" in directory:
        raise ValueError(f"HIGHWATER_RECORDER_DIR is {directory!r}; it must be an absolute path")
    folder = Path(directory)
    kind = file_system_of(folder)
    if is_remote(kind):
        raise ValueError(f"{directory!r} lies on {kind}; it must be on this machine")
    _start(folder)
    if not _Current.follows_forks:
        _Current.follows_forks = True
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _start(folder: Path) -> None:
    writer = ProcessWriter(folder)
    writer.start()
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
