"""The folder of the workers' recorder files: files of the engine's present life are read, old ones removed on request.

Nothing here writes a file. A file that cannot be used costs only itself, and is named in ``problems``. To read many
ranks takes milliseconds: any thread may call, one at a time.
"""

from __future__ import annotations

import re
import stat
import threading
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from highwater.model.components import MemoryPoint
from highwater.process.clocks import SYSTEM, Clocks, Machine
from highwater.process.errors import os_reason
from highwater.process.regular import first_names, stamp_of, status_of
from highwater.watch.recorder.contents import Identity, RingUnusable
from highwater.watch.recorder.rank import RankFile, RankRecord, read_samples
from highwater.watch.recorder.ring import Ring, has_magic
from highwater_worker.wire import RING_NAME

SCAN_SECONDS = 1.0
MAX_FILES = 256
MAX_ENTRIES = 4096  # of the folder, whatever their names: others may write into it

_TMP_NAME = re.compile(rf"\.({RING_NAME.pattern})\.tmp", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRing:
    """A file of another life of the engine, or of another engine; without a record where it cannot be read."""

    path: Path
    instance: str
    record: RankRecord | None = None
    problem: str | None = None

    @property
    def is_alive(self) -> bool:
        return self.record is not None and self.record.status == "alive"


def last_life(others: Iterable[OtherRing], host: str) -> tuple[RankRecord, ...]:
    """Return the ranks of the life that wrote last; empty where one writes, whoever's it is, or may: unread files.

    Where the engine's processes have this ``host``'s name, as in a pod, those of others are another engine's.
    """
    lives: dict[str, list[RankRecord]] = {}
    for other in others:
        record = other.record
        if record is None or record.status == "alive":
            return ()
        lives.setdefault(record.identity.instance, []).append(record)
    local = [life for life in lives.values() if any(record.identity.host == host for record in life)]
    return tuple(min(local or lives.values(), key=lambda life: min(one.age_seconds for one in life), default=()))


@dataclass(frozen=True, slots=True)
class Removal:
    removed: tuple[str, ...]  # the names of the files that were removed
    problems: tuple[str, ...]  # a sentence for each file that could not be removed, or that is not a recorder's


class RecorderFolder:
    """The folder, and the rings of one life of the engine (``instance``) in it."""

    def __init__(
        self,
        folder: Path,
        instance: str | None = None,
        *,
        clocks: Clocks = SYSTEM,
        proc: Path = Path("/proc"),
    ) -> None:
        self.folder = folder
        self._instance = instance
        self._machine = Machine(clocks, proc.parent)
        self._files: dict[str, RankFile] = {}
        self._unusable: dict[str, tuple[tuple[int, ...] | None, str]] = {}
        self._folder_problem: str | None = None
        self._duplicates: tuple[str, ...] = ()
        self._scanned_at: float | None = None
        self._shifts: dict[str | None, float] = {}  # of the wall clocks of the ranks' hosts, as read last
        self._lock = threading.RLock()

    @property
    def instance(self) -> str | None:
        return self._instance

    @property
    def problems(self) -> tuple[str, ...]:
        with self._lock:
            folder = () if self._folder_problem is None else (self._folder_problem,)
            unusable = (f"{name}: {reason}" for name, (_, reason) in self._unusable.items())
            damaged = (f"{name}: {file.problem}" for name, file in self._files.items() if file.problem is not None)
            return (*folder, *unusable, *damaged, *self._duplicates)

    def look(self) -> str | None:
        """Return why the folder cannot be read now: the workers may make it later."""
        with self._lock:
            self._names()
            return self._folder_problem

    def follow(self, instance: str | None) -> None:
        with self._lock:
            if instance != self._instance:
                self.close()
                self._instance = instance

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.ring.close()
            self._files.clear()
            self._unusable.clear()
            self._duplicates = ()
            self._scanned_at = None

    # --- the life that is followed ---

    def read(self) -> tuple[RankRecord, ...]:
        with self._lock:
            self._scan()
            records: list[RankRecord] = []
            for name, file in tuple(self._files.items()):
                try:
                    records.append(file.read())
                except RingUnusable as exc:
                    self._drop(name)
                    self._unusable[name] = (None, exc.reason)
            records.sort(
                key=lambda one: (one.status == "alive", one.identity.started_at, one.identity.pid)
            )  # newest last
            self._shifts = {one.identity.host: one.shift_seconds for one in records} or self._shifts
            ranks = {_key(record.identity): record for record in records}
            self._duplicates = tuple(
                f"{record.title} is also written by pid {newest.identity.pid}, which counts"
                for record in records
                if record is not (newest := ranks[_key(record.identity)])
            )
            return tuple(sorted(ranks.values(), key=lambda one: (one.identity.key, one.identity.pid)))

    def _scan(self) -> None:
        now = self._machine.monotonic()
        if self._scanned_at is not None and 0 <= now - self._scanned_at < SCAN_SECONDS:
            return
        self._scanned_at = now
        for name, file in tuple(self._files.items()):
            stamp = _stamp(file.ring.path)
            if stamp is None or stamp[:2] != file.ring.inode:
                self._drop(name)
        own = [name for name, instance in self._names() if instance == self._instance]
        self._unusable = {name: problem for name, problem in self._unusable.items() if name in own}
        for name in own:
            path = self.folder / name
            stamp = None if name in self._files else _stamp(path)
            if stamp is None or self._unusable.get(name, (None, ""))[0] == stamp:
                continue
            try:
                self._files[name] = RankFile(Ring(path), self._machine)
            except RingUnusable as exc:
                self._unusable[name] = (stamp, exc.reason)
            else:
                self._unusable.pop(name, None)

    def _drop(self, name: str) -> None:
        self._files.pop(name).ring.close()

    def _names(self, *, with_unfinished: bool = False) -> list[tuple[str, str]]:
        """Return names of rings and their instances; if there are too many, this life's first, then the newest."""
        try:
            listed = first_names(self.folder, MAX_ENTRIES)
        except OSError as exc:
            self._folder_problem = f"recorder_dir: {self.folder} cannot be listed: {os_reason(exc)}"
            return []
        names = [(match.group(), match.group(1)) for match in map(RING_NAME.fullmatch, listed) if match]
        if with_unfinished:
            names += [(match.group(), match.group(2)) for match in map(_TMP_NAME.fullmatch, listed) if match]
        stamps = {name: _stamp(self.folder / name) for name, _ in names} if len(names) > MAX_FILES else {}
        ages = {name: -stamp[3] for name, stamp in stamps.items() if stamp is not None}
        names.sort(key=lambda entry: (entry[1] != self._instance, ages.get(entry[0], 0), entry))
        self._folder_problem = None
        if len(names) > MAX_FILES or len(listed) == MAX_ENTRIES:
            read = f"{MAX_FILES} rings among {MAX_ENTRIES} files"
            self._folder_problem = f"recorder_dir: {self.folder} holds more than the {read} that are read"
        return names[:MAX_FILES]

    # --- any life ---

    def others(self) -> tuple[OtherRing, ...]:
        """Return the files of other lives; opens each of them, so not for every poll."""
        with self._lock:
            names = self._names()
        return tuple(self._other(self.folder / name, life) for name, life in names if life != self._instance)

    def _other(self, path: Path, instance: str) -> OtherRing:
        try:
            with closing(Ring(path)) as ring:
                file = RankFile(ring, self._machine)
                record = file.read(whole_file=True)
        except RingUnusable as exc:
            return OtherRing(path=path, instance=instance, problem=exc.reason)
        return OtherRing(path=path, instance=instance, record=record, problem=file.problem)

    def last_samples(self, path: Path, since: float = 0.0) -> tuple[Identity, tuple[MemoryPoint, ...]]:
        """Return a file's writer and samples since ``since``, oldest first. Raises RingUnusable: it cannot be read."""
        with closing(Ring(path)) as ring:
            return ring.identity, read_samples(ring, self._shifts.get(ring.identity.host, 0.0), since)

    def remove_stale(self, older_than_seconds: float) -> Removal:
        """Remove the rings of other lives whose writers have been silent for so long, and unfinished files.

        Nothing is removed but regular files with a recorder's name and, unless unfinished, its first bytes; nor a ring
        of a version that is not known here.
        """
        removed: list[str] = []
        problems: list[str] = []
        with self._lock:
            names = self._names(with_unfinished=True)
        for name, instance in names:
            if instance == self._instance:
                continue
            path = self.folder / name
            stamp = _stamp(path)
            try:
                age = self._silent_seconds(path, instance)
                # Compared again: the file that is removed must be the one that was judged.
                if age is not None and age >= older_than_seconds and stamp is not None and _stamp(path) == stamp:
                    path.unlink()
                    removed.append(name)
            except RingUnusable as exc:
                problems.append(f"{name} was left alone: {exc.reason}")
            except OSError as exc:
                problems.append(f"{name} could not be removed: {os_reason(exc)}")
        return Removal(tuple(removed), tuple(problems))

    def _silent_seconds(self, path: Path, instance: str) -> float | None:
        """``None``: it is written, or has gone. Raises RingUnusable: it is not known to be a recorder's."""
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise RingUnusable("not a regular file")
        unchanged = self._machine.clock() - status.st_mtime
        if _TMP_NAME.fullmatch(path.name):
            return unchanged
        other = self._other(path, instance)
        if other.record is None:
            # Damaged, but a recorder's: then only the file system shows how old it is.
            problem = other.problem or ""
            if problem.startswith(("version", "unreadable")) or not has_magic(path):
                raise RingUnusable(problem)
            return unchanged
        # Both must say so: the writer's wall clock may be another machine's.
        return None if other.is_alive else min(other.record.age_seconds, unchanged)


def _key(identity: Identity) -> tuple[object, ...]:
    """Return what two writers cannot both be. Those that do not know their rank are distinguished by their process."""
    process = identity.pid if identity.rank is None else None
    return identity.host, identity.dp_rank, identity.pp_rank, identity.tp_rank, identity.rank, process


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    status = status_of(path)
    return None if status is None else stamp_of(status)
