"""The processes that every request of the engine waits for, and since when: stopped ones, and a silent EngineCore.

In another PID namespace, as in a pod, nothing shows that a process is stopped: its file only grows old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from highwater.host.reading import HostReading, ProcessMemory, Role
from highwater.readings.engine import Process
from highwater.recorder.progress import LOST_SECONDS, SILENT_SECONDS, SilentCore, how_to_continue

_SERVERS: frozenset[Role] = frozenset({"api_server", "launcher"})


class SilentCores:
    """Remembers which EngineCores fell silent under an API server that writes: their files may be swept meanwhile."""

    def __init__(self) -> None:
        self._silent: dict[Process, tuple[ProcessMemory, float]] = {}  # with the time of the last write
        self._workers: set[str | None] = set()  # the containers in which one writes

    def look(self, reading: HostReading) -> None:
        servers = [one for one in reading.processes if one.source == "file" and one.role in _SERVERS]
        writing = {Process(one.host, one.pid, one.started) for one in reading.processes}
        fallen = {
            Process(one.host, one.pid, one.started): (one, reading.taken_at - one.age_seconds)
            for one in reading.ended
            if one.role == "engine_core" and not one.is_known and one.age_seconds >= SILENT_SECONDS
        }
        self._silent = {  # never changed in place: `look` runs in a thread, and `longest` on the event loop
            process: (one, at)
            for process, (one, at) in (self._silent | fallen).items()
            if process not in writing and any(_is_served_by(one, server) for server in servers)
        }
        self._workers = {one.container for one in reading.processes if one.role == "worker"}

    def longest(self, now: float) -> SilentCore | None:
        """Return the one that has been silent for the longest; ``now`` is in Unix seconds."""
        one, at = min(self._silent.values(), key=lambda known: known[1], default=(None, now))
        if one is None:
            return None
        name = f"{one.name} (pid {one.pid})"
        return SilentCore(name=name, seconds=now - at, has_workers=one.container in self._workers)


def _is_served_by(core: ProcessMemory, server: ProcessMemory) -> bool:
    """Return whether they are of one life: in a container the same numbers come again."""
    is_beside = (core.host, core.container) == (server.host, server.container)
    return is_beside and (server.started or 0) <= (core.started or 0)


class StoppedEngine:
    """Remembers since when processes of the engine are stopped.

    For the first five seconds a debugger may let go, as with a worker.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since: dict[tuple[int, int | None], float] = {}  # by pid and start

    def look(self, processes: Sequence[ProcessMemory], stopped: Iterable[ProcessMemory]) -> str | None:
        """Return in one sentence what holds every request, and what to do; ``None`` if nothing does.

        That is an EngineCore, or all API servers: while one of several is stopped, the others serve. ``stopped`` are
        the API servers and EngineCores among the last reading's ``processes`` that are stopped now.
        """
        now, before = self._monotonic(), self._since
        own = _above_workers(processes)
        # Two engines may have a parent in common: what only /proc shows may be the other's.
        found = {
            (one.pid, one.started): one
            for one in stopped
            if one.role == "api_server" or one.source != "proc" or one.pid in own
        }
        self._since = {key: before.get(key, now) for key in found}
        lasting = [one for key, one in found.items() if now - self._since[key] >= LOST_SECONDS]
        if not lasting or not _hold_all(lasting, processes):
            return None
        named = "; ".join(
            f"{one.name} (pid {one.pid}) has been stopped by a signal or a debugger for "
            f"{now - self._since[one.pid, one.started]:.0f} s"
            for one in lasting
        )
        return f"{named}; requests wait until it goes on: {how_to_continue(one.pid for one in lasting)}"


def _hold_all(stopped: Iterable[ProcessMemory], processes: Iterable[ProcessMemory]) -> bool:
    if any(one.role == "engine_core" for one in stopped):
        return True
    servers = [one for one in processes if one.role == "api_server"]
    # A shell or `timeout` that started vLLM has its command line.
    wrappers = {one.parent_pid for one in servers}
    return {one.pid for one in servers} - wrappers <= {one.pid for one in stopped}


def _above_workers(processes: Iterable[ProcessMemory]) -> set[int]:
    parents = {one.pid: one.parent_pid for one in processes}
    above: set[int] = set()
    for one in processes:
        pid = one.pid if one.rank is not None else None
        while pid is not None and pid in parents and pid not in above:
            above.add(pid)
            pid = parents[pid]
    return above
