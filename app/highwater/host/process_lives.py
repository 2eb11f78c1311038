"""The engine's lives by its processes' files: which processes belong to one life, whether it runs, how it ended.

A process belongs to its parent's life. Without a known parent it belongs to the last life of its host in which nobody
has its place: a second API server without a number is another life's. What began after the last sign of a life is not
of it, and a container's first process begins one. How a life ended is told by what it left: the kernel's count of
kills for memory in its container, else how full that was at the last look.

And the processes that every request waits for: stopped ones, and an EngineCore that fell silent. In another PID
namespace, as in a pod, nothing shows that a process is stopped: its file only grows old.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Final

from highwater.host.reading import EndedProcess, HostReading, ProcessMemory, Role, bare_name
from highwater.model.engine import EndedLife, ProcessLife
from highwater.model.rank import Process
from highwater.model.units import size_text
from highwater.watch.recorder.progress import LOST_SECONDS, UNHEARD_SECONDS, SilentCore, how_to_continue

_SERVERS: Final[frozenset[Role]] = frozenset({"api_server", "launcher"})
_ENGINE: Final[frozenset[Role]] = _SERVERS | {"engine_core", "worker", "coordinator"}
# A process writes once a second.
_JUST_NOW_SECONDS: Final = 3.0
_MAX_NAMED, _MAX_CONTAINERS = 4, 256
_WITHOUT_A_WORD: Final = "ended without a word"
_KILLED, _PROBABLY = "was killed by the kernel for memory", "probably killed by the kernel for memory"
_FIRST_PID: Final = 1


class ProcessLives:
    """Groups the processes of each reading into lives.

    ``exists`` returns whether a process is certainly there, though it does not write: a signal has stopped it. Where
    processes have the name of the sidecar's own ``host``, as in a pod, those of others are another engine's.

    Attributes:
        last: When the last reading was made, in Unix seconds, and the lives that it shows, the oldest first.
    """

    def __init__(
        self, exists: Callable[[ProcessMemory], bool] = lambda _: False, host: str = socket.gethostname()
    ) -> None:
        self.last: tuple[float, tuple[ProcessLife, ...]] | None = None
        self._exists = exists
        self._host = host
        self._shares_host = False
        self._running: tuple[ProcessMemory, ...] = ()
        # The kills that a container had counted when it was seen first: it may have had another use before.
        self._kills: dict[str, int] = {}

    def look(self, reading: HostReading) -> None:
        running = [one for one in reading.processes if one.source == "file" and _is_engine(one)]
        seen = {one.process for one in (*running, *reading.ended)}
        running += [one for one in self._running if one.process not in seen and self._exists(one)]
        self._running = tuple(running)
        ended = [one for one in reading.ended if _is_engine(one)]
        containers = {one.key: one for one in reading.containers}
        for process in running:
            container = containers.get(process.container or "")
            if container is not None and not container.is_private:  # a private one began with the engine
                self._kills[container.key] = self._kills.pop(container.key, container.oom_kills)
        for key in list(self._kills)[:-_MAX_CONTAINERS]:
            del self._kills[key]
        before = dict(self._kills)
        known = [*running, *ended]
        self._shares_host |= any(one.host == self._host for one in known)
        groups = _grouped(one for one in known if one.host == self._host or not self._shares_host)
        self.last = reading.taken_at, tuple(_life(group, reading.taken_at, before) for group in groups)


def engines_in(processes: Iterable[ProcessMemory]) -> int:
    written = [one for one in processes if one.source == "file" and one.age_seconds <= _JUST_NOW_SECONDS]
    groups = _grouped(filter(_is_engine, written))
    return sum(any(one.role in _SERVERS for one in group) for group in groups)


def _life(group: Sequence[ProcessMemory], taken_at: float, kills: dict[str, int]) -> ProcessLife:
    """Return a group as a life; ``kills`` has those counted before it, by container, and is counted on."""
    ended = [one for one in group if isinstance(one, EndedProcess)]
    running = [one for one in group if not isinstance(one, EndedProcess)]
    servers = [one for one in group if one.role in _SERVERS or one.pid == _FIRST_PID]
    containers = [one.last_container for one in ended if one.last_container is not None]
    largest_first = sorted(ended, key=lambda one: one.peak_bytes or 0, reverse=True)
    names = [
        f"{one.name} {size_text(one.peak_bytes)} at its peak" if one.peak_bytes else one.name for one in largest_first
    ]
    more = len(names) - _MAX_NAMED
    named = ", ".join(names[:_MAX_NAMED]) + (f", and {more} more" if more > 0 else "")
    end = EndedLife(how=_WITHOUT_A_WORD, processes=named)
    if (last := min(containers, key=attrgetter("age_seconds"), default=None)) is not None:
        counted = max(one.oom_kills for one in containers if one.key == last.key)
        before, kills[last.key] = kills.get(last.key, 0), max(counted, kills.get(last.key, 0))
        how = f"{_WITHOUT_A_WORD}, {_PROBABLY}," if last.is_nearly_full else _WITHOUT_A_WORD
        new = max(counted - before, 0)
        sizes = [size for size in (last.used_bytes, last.peak_bytes) if size is not None]
        memory, limit = "", last.limit_bytes
        if sizes:
            most = max(sizes)
            memory = f"{size_text(most)}, without a limit"
            if limit is not None:
                memory = f"{size_text(min(most, limit))} of {size_text(limit)}"
        end = replace(end, how=_KILLED if new else how, memory=memory, oom_kills=new)
    return ProcessLife(
        processes=frozenset(one.process for one in group),
        last_at=taken_at - min(one.age_seconds for one in group),
        # What an API server that was killed leaves behind loads nothing.
        is_running=bool(running) and not (servers and all(one in ended for one in servers)),
        has_server=bool(servers),
        is_serving=any(one.age_seconds <= _JUST_NOW_SECONDS for one in running if not servers or one in servers),
        end=end,
        started_at=min(
            (
                taken_at - one.age_seconds - one.run_seconds
                for one in group
                if one.role in _ENGINE and one.run_seconds is not None
            ),
            default=None,
        ),
    )


def _grouped(processes: Iterable[ProcessMemory]) -> list[list[ProcessMemory]]:
    groups: list[list[ProcessMemory]] = []
    by_pid: dict[tuple[str | None, str | None, int | None], list[ProcessMemory]] = {}
    last: dict[str | None, list[ProcessMemory]] = {}
    for one in sorted(processes, key=lambda one: (one.started or 0, one.pid)):
        # A container's first process has no parent that is seen, whatever its file says.
        parent = None if one.pid == _FIRST_PID else one.parent_pid
        group = by_pid.get((one.host, one.container, parent))
        if group is None or _began_after(one, group):
            group = last.get(one.host, [])
            is_first = one.pid == _FIRST_PID or not group or _began_after(one, group)
            if is_first or any(_place(one) == _place(other) for other in group):
                group = []
                groups.append(group)
            last[one.host] = group
        group.append(one)
        by_pid[one.host, one.container, one.pid] = group
    return groups


def _began_after(one: ProcessMemory, group: Sequence[ProcessMemory]) -> bool:
    late = 0.0 if all(isinstance(other, EndedProcess) for other in group) else _JUST_NOW_SECONDS
    silent = min(other.age_seconds for other in group) - late
    return one.run_seconds is not None and 0.0 <= one.run_seconds < silent - one.age_seconds


def _place(one: ProcessMemory) -> tuple[object, ...]:
    return one.role, one.rank, one.dp_rank, bare_name(one.name)


def _is_engine(one: ProcessMemory) -> bool:
    return one.role in _ENGINE or one.pid == _FIRST_PID


# --- what every request waits for ---


class SilentCores:
    """Remembers which EngineCores fell silent under an API server that writes: their files may be swept meanwhile."""

    def __init__(self) -> None:
        self._silent: dict[Process, tuple[ProcessMemory, float]] = {}  # with the time of the last write
        self._workers: set[str | None] = set()  # the containers in which one writes

    def look(self, reading: HostReading) -> None:
        servers = [one for one in reading.processes if one.source == "file" and one.role in _SERVERS]
        writing = {one.process for one in reading.processes}
        fallen = {
            one.process: (one, reading.taken_at - one.age_seconds)
            for one in reading.ended
            if one.role == "engine_core" and not one.is_known and one.age_seconds >= UNHEARD_SECONDS
        }
        self._silent = {  # never changed in place: `look` runs in a thread, and `longest` on the event loop
            process: (one, at)
            for process, (one, at) in (self._silent | fallen).items()
            # Of one life with a server that writes: in a container the same numbers come again.
            if process not in writing
            and any(
                (one.host, one.container) == (server.host, server.container)
                and (server.started or 0) <= (one.started or 0)
                for server in servers
            )
        }
        self._workers = {one.container for one in reading.processes if one.role == "worker"}

    def longest(self, now: float) -> SilentCore | None:
        """Return the one that has been silent for the longest; ``now`` is in Unix seconds."""
        one, at = min(self._silent.values(), key=lambda known: known[1], default=(None, now))
        if one is None:
            return None
        name = f"{one.name} (pid {one.pid})"
        return SilentCore(name=name, seconds=now - at, has_workers=one.container in self._workers)


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
        parents = {one.pid: one.parent_pid for one in processes}
        own: set[int] = set()  # the workers, and all above them
        for one in processes:
            pid = one.pid if one.rank is not None else None
            while pid is not None and pid in parents and pid not in own:
                own.add(pid)
                pid = parents[pid]
        # Two engines may have a parent in common: what only /proc shows may be the other's.
        found = {
            (one.pid, one.started): one
            for one in stopped
            if one.role == "api_server" or one.source != "proc" or one.pid in own
        }
        self._since = {key: before.get(key, now) for key in found}
        lasting = [one for key, one in found.items() if now - self._since[key] >= LOST_SECONDS]
        servers = {one.pid: one.parent_pid for one in processes if one.role == "api_server"}
        # A shell or `timeout` that started vLLM has its command line.
        are_all_held = servers.keys() - set(servers.values()) <= {one.pid for one in lasting}
        if not lasting or not (are_all_held or any(one.role == "engine_core" for one in lasting)):
            return None
        named = "; ".join(
            f"{one.name} (pid {one.pid}) has been stopped by a signal or a debugger for "
            f"{now - self._since[one.pid, one.started]:.0f} s"
            for one in lasting
        )
        return f"{named}; requests wait until it goes on: {how_to_continue(one.pid for one in lasting)}"
