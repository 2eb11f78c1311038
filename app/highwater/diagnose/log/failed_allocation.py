"""The figures in the message of an allocation that failed, in the engine's log.

They are those of that very moment, and so newer than every reading: an engine can fill, or fragment, its device within
one step. PyTorch writes the message after it has given its unused blocks back to the device and tried once more: what
it still holds unallocated lies beside live tensors or belongs to captured graphs.

An engine may live through such a failure. One counts only if it is its process's last and stands near the log's end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from highwater.diagnose.log.messages import RecognizedLine, WhichMemory, quoted
from highwater.diagnose.log.record import LogLine
from highwater.model.rank import RankReading
from highwater.model.units import GIB, KIB, MIB, span_text
from highwater.process.untrusted import plain

NEAR_SECONDS: Final = 60.0
NEAR_LINES: Final = 200
"""Before the log's end; the lines where it has no times. A traceback has fewer."""
_SAME_DEVICE: Final = 0.01
"""The part of its size by which a device's two figures may differ: the message's has two decimals."""
_UNITS: Final = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
_SIZE: Final = r"(?<![\d.])(\d{1,15}(?:\.\d{1,2})?) (bytes|[KMGT]iB)"
# torch 2.11 c10/cuda/CUDACachingAllocator.cpp, and c10/xpu/XPUCachingAllocator.cpp without what processes have in use.
# torch_npu 2.7 to 2.14, csrc/core/npu/NPUCachingAllocator.cpp and NPUWorkspaceAllocator.cpp, write what PyTorch wrote
# before 2.1; the workspaces' message has no figures of PyTorch's. Then c10/core/impl/alloc_cpu.cpp, NumPy, and vllm
# 0.32.0 distributed/device_communicators/shm_broadcast.py:254.
_TRIED: Final = re.compile(rf"[Tt]ried to (?:allocate|mmap) {_SIZE}|Unable to allocate {_SIZE}|: {_SIZE} required, ")
_TOTAL: Final = re.compile(rf"total capaci?ty of {_SIZE}|; {_SIZE} total capacity[;)]")
_FREE: Final = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free[;)]|required, {_SIZE} free")
_ALLOCATED: Final = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch|; {_SIZE} already allocated;")
_UNALLOCATED: Final = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED: Final = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_IN_USE: Final = re.compile(rf"this process has {_SIZE} memory in use")
_DEVICE: Final = re.compile(r"\b(CUDA|HIP|XPU|NPU)(?:WorkspaceAllocator)?\b")
# Ray's figures are in its own GB: "Memory on the node ... was 2152.43GB / 2265.25GB", and then its list of processes.
_OF_NODE: Final = re.compile(r"\bwas (\d{1,9}\.\d{1,2})GB / (\d{1,9}\.\d{1,2})GB\b")
_OF_PROCESS: Final = re.compile(r"\s*(\d{1,9})\s{1,40}(\d{1,9}\.\d{1,2})\s{1,40}(\S.*)")
_LIST_LINES: Final = 16
# A collector's time at the beginning of a line, else vLLM's in its record: a client's words stand in neither. The year
# is not said: that of a leap year stands for any.
_TIME: Final = re.compile(r"(?:\d{4}-|\b)(\d\d-\d\d[ T]\d\d:\d\d:\d\d)\b")
_OPENS: Final = re.compile(r'\{\s?"[@\w]{1,20}": ?"')
_MAX_PROCESSES: Final = 256
_ANY_YEAR, _YEAR = 2000, timedelta(days=366)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestProcess:
    """The process with the most host memory on a node, by Ray's list; ``size_gb`` is in Ray's GB."""

    pid: int
    name: str
    size_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation:
    """Sizes in bytes, as exact as the message's two decimals; what it does not say is ``None``.

    Attributes:
        platform: ``cuda``, ``hip``, ``xpu`` or ``npu``, as the message calls the device.
        in_use_bytes: What its process had of the device, PyTorch's and not, where the driver could say that.
        node_gb: Of host memory that Ray watches, what was in use and what there is, in Ray's GB.
        pid: The process that wrote it, where the line's prefix names it.
    """

    memory: WhichMemory = "device"
    platform: str | None = None
    tried_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    in_use_bytes: int | None = None
    node_gb: tuple[float, float] | None = None
    largest: LargestProcess | None = None
    pid: int | None = None

    def may_be_of(self, pid: int | None, total_bytes: int | None) -> bool:
        total = self.total_bytes
        if total is None or self.free_bytes is None:
            return False
        is_its_size = total_bytes is None or abs(total_bytes - total) <= _SAME_DEVICE * total
        return is_its_size and (self.pid is None or pid is None or self.pid == pid)

    def reading(self, before: RankReading, at: float) -> RankReading:
        """Return the rank's last reading as it stood at the failure; the components are those before it."""
        total, free, torch = before.total_bytes or self.total_bytes or 0, self.free_bytes or 0, before.torch
        releasable = before.releasable_bytes
        if self.reserved_bytes is not None and self.allocated_bytes is not None:
            releasable = 0
            torch = replace(
                torch,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                inactive_split_bytes=self.reserved_bytes - self.allocated_bytes,
            )
        used = max(total - free, 0)
        return replace(
            before,
            taken_at=at,
            total_bytes=total,
            free_bytes=free,
            used_bytes=used,
            used_ratio=used / total if total else None,
            torch=torch,
            releasable_bytes=releasable,
        )


class FailedAllocations:
    """Each process's last failure among lines that come one after another.

    A message that is cut or written in another way says nothing, and then an earlier one of its process counts no more.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[WhichMemory, int | None], tuple[Moment, FailedAllocation | None]] = {}
        self._is_untimed = False
        self._node: tuple[tuple[WhichMemory, int | None], int] | None = None  # Ray's list of processes is to come

    def add(self, found: RecognizedLine, at: Moment) -> None:
        line, known = found
        if self._is_untimed and at.is_timed:
            self._found = {key: (was.settled(at), failed) for key, (was, failed) in self._found.items()}
            self._is_untimed = False
        if known is None or known.of_memory in (None, "unclear"):
            self._note_process(line.message, at)
        elif any(pattern.search(line.message) for pattern in (_TRIED, _OF_NODE)):  # else another one has the figures
            # What a process quotes is another one's.
            key = known.of_memory, line.pid if quoted(line) is None else None
            if key in self._found or len(self._found) < _MAX_PROCESSES:
                failed = _parsed(line.message, key[1], known.of_memory)
                self._found[key] = at, failed
                self._is_untimed = self._is_untimed or not at.is_timed
                self._node = (key, at.number) if failed is not None and failed.node_gb is not None else self._node

    def _note_process(self, message: str, at: Moment) -> None:
        """Take the first row of Ray's list, which begins with the largest."""
        if self._node is None or (row := _OF_PROCESS.match(message)) is None:
            return
        (key, number), self._node = self._node, None
        _, failed = self._found[key]
        if failed is not None and at.number - number <= _LIST_LINES:
            largest = LargestProcess(pid=int(row[1]), name=plain(row[3], 80), size_gb=float(row[2]))
            self._found[key] = at, replace(failed, largest=largest)

    def near(self, end: Moment) -> tuple[FailedAllocation, ...]:
        """Return the failures that stand near the end of an engine's life; a quoted one only where it is not there."""
        near = [failed for at, failed in self._found.values() if failed is not None and at.is_near(end)]
        known = {replace(failed, pid=None) for failed in near if failed.pid is not None}
        return tuple(failed for failed in near if failed not in known)


@dataclass(frozen=True, slots=True)
class Moment:
    """A line's place in a log: its number, and its time, or else the last one until then (``is_timed`` is false)."""

    number: int = 0
    time: datetime | None = None
    is_timed: bool = True

    def next(self, text: str, lines: Iterable[LogLine] = ()) -> Moment:
        opens = _OPENS.match(text)
        found = _TIME.match(text, opens.end() if opens is not None else 0)
        for line in lines if found is None else ():
            if line.file is not None and found is None:
                found = _TIME.search(line.text, 0, max(len(line.text) - len(line.message), 0))
        time = None if found is None else _time_of(found[1])
        return Moment(self.number + 1, time or self.time, time is not None)

    def settled(self, later: Moment) -> Moment:
        """Return it with the time of the next line that has one, if it has none: an idle engine writes nothing."""
        return self if self.is_timed or not later.is_timed else Moment(self.number, later.time)

    def is_near(self, end: Moment) -> bool:
        """Return whether it is at most a minute before the end; where the log has no times, lines count."""
        gap = self._gap(end)
        return end.number - self.number < NEAR_LINES if gap is None else gap <= timedelta(seconds=NEAR_SECONDS)

    def is_old(self, end: Moment, within: float = NEAR_SECONDS) -> bool:
        gap = self._gap(end)
        return gap is not None and gap.total_seconds() > within

    def before(self, end: Moment) -> str:
        gap = self._gap(end)
        return f"{end.number - self.number:,} lines" if gap is None else span_text(gap.total_seconds())

    def _gap(self, end: Moment) -> timedelta | None:
        if self.time is None or end.time is None:
            return None
        gap = (end.time - self.time) % _YEAR
        return gap if gap < _YEAR / 2 else None


def _time_of(stamp: str) -> datetime | None:
    try:
        return datetime.fromisoformat(f"{_ANY_YEAR}-{stamp}Z")
    except ValueError:  # no such day or hour
        return None


def _parsed(line: str, pid: int | None, memory: WhichMemory) -> FailedAllocation | None:
    tried, total, free, allocated = (_size(pattern, line) for pattern in (_TRIED, _TOTAL, _FREE, _ALLOCATED))
    unallocated, reserved, node = _size(_UNALLOCATED, line), _size(_RESERVED, line), _OF_NODE.search(line)
    if memory != "device":
        if tried is None and node is None:
            return None
        of_node = None if node is None else (float(node[1]), float(node[2]))
        return FailedAllocation(memory=memory, tried_bytes=tried, free_bytes=free, node_gb=of_node, pid=pid)
    if reserved is None and unallocated is not None and allocated is not None:
        reserved = allocated + unallocated
    is_workspaces = "Workspace" in line[:200]
    if tried is None or total is None or (not is_workspaces and (allocated is None or reserved is None)):
        return None
    if reserved is not None and reserved < (allocated or 0):
        return None
    device = _DEVICE.search(line)
    return FailedAllocation(
        platform=None if device is None else device[1].lower(),
        tried_bytes=tried,
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        in_use_bytes=_size(_IN_USE, line),
        pid=pid,
    )


def _size(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return int(float(number) * _UNITS[unit])
