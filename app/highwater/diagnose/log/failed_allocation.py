"""The allocation that PyTorch's allocator could not make, by the figures in its message in the engine's log.

They are those of that very moment, and so newer than every reading: an engine can fill, or fragment, its device within
one step. PyTorch writes the message after it has given its unused blocks back to the device and tried once more: what
it still holds unallocated lies beside live tensors or belongs to captured graphs.

An engine may live through such a failure. One counts only if it is its process's last and stands near the log's end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from highwater.diagnose.log.lines import RecognizedLine, quoted
from highwater.readings.rank import RankReading
from highwater.units import GIB, KIB, MIB

NEAR_SECONDS: Final = 60.0
NEAR_LINES: Final = 200
"""Before the log's end; the lines where it has no times. A traceback has fewer."""
_SAME_DEVICE: Final = 0.01
"""The part of its size by which a device's two figures may differ: the message's has two decimals."""
_MESSAGES: Final = ("npu_out_of_memory", "cuda_out_of_memory")
_UNITS: Final = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_SIZE: Final = r"(?<![\d.])(\d{1,7}(?:\.\d{1,2})?) (bytes|[KMG]iB)"
# torch 2.11 c10/cuda/CUDACachingAllocator.cpp. torch_npu 2.7 to 2.10, csrc/core/npu/NPUCachingAllocator.cpp,
# writes what PyTorch wrote before 2.1.
_TRIED: Final = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL: Final = re.compile(rf"total capacity of {_SIZE}|; {_SIZE} total capacity;")
_FREE: Final = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free;")
_ALLOCATED: Final = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch|; {_SIZE} already allocated;")
_UNALLOCATED: Final = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED: Final = re.compile(rf"{_SIZE} reserved in total by PyTorch")
# vLLM's time of a line, or a container runtime's. The year is not said: that of a leap year stands for any.
_TIME: Final = re.compile(r"\b(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)\b")
_MOST_PROCESSES: Final = 256
_ANY_YEAR, _YEAR = 2000, timedelta(days=366)


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """Sizes in bytes, as exact as the message's two decimals."""

    tried_bytes: int
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    pid: int | None
    """The process that wrote it, where the line's prefix names it."""

    def may_be_of(self, pid: int | None, total_bytes: int | None) -> bool:
        """Return whether the allocator of this process, on a device of this size, may have written it."""
        is_its_size = total_bytes is None or abs(total_bytes - self.total_bytes) <= _SAME_DEVICE * self.total_bytes
        return is_its_size and (self.pid is None or pid is None or self.pid == pid)

    def reading(self, before: RankReading, at: float) -> RankReading:
        """Return the rank's last reading as it stood at the failure; the components are those before it."""
        torch = replace(
            before.torch,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            inactive_split_bytes=self.reserved_bytes - self.allocated_bytes,
        )
        total = self.total_bytes if before.total_bytes is None else before.total_bytes
        used = max(total - self.free_bytes, 0)
        return replace(
            before,
            taken_at=at,
            total_bytes=total,
            free_bytes=self.free_bytes,
            used_bytes=used,
            used_ratio=used / total if total else None,
            torch=torch,
            releasable_bytes=0,
        )


class FailedAllocations:
    """Each process's last failure among lines that come one after another.

    A message that is cut or written in another way says nothing, and then an earlier one of its process counts no more.
    """

    def __init__(self) -> None:
        self._found: dict[int | None, tuple[Moment, FailedAllocation | None]] = {}

    def add(self, found: RecognizedLine, at: Moment) -> None:
        """Take the next line."""
        if found.known is None or found.known.name not in _MESSAGES:
            return
        # What a process quotes is another one's.
        pid = found.line.pid if quoted(found.line) is None else None
        if pid in self._found or len(self._found) < _MOST_PROCESSES:
            self._found[pid] = (at, _parsed(found.line.message, pid))

    def near(self, end: Moment) -> tuple[FailedAllocation, ...]:
        """Return the failures that stand near the end of an engine's life; a quoted one only where it is not there."""
        near = [failed for at, failed in self._found.values() if failed is not None and at.is_near(end)]
        known = {replace(failed, pid=None) for failed in near if failed.pid is not None}
        return tuple(failed for failed in near if failed not in known)


@dataclass(frozen=True, slots=True)
class Moment:
    """A line's place in a log: its number, and the last time that was named until then."""

    number: int = 0
    time: datetime | None = None

    def next(self, text: str) -> Moment:
        """Return that of the next line."""
        return Moment(self.number + 1, _time_of(text) or self.time)

    def is_near(self, end: Moment) -> bool:
        """Return whether it is at most a minute before the end; where the log has no times, lines count."""
        if self.time is None or end.time is None:
            return end.number - self.number < NEAR_LINES
        return (end.time - self.time) % _YEAR <= timedelta(seconds=NEAR_SECONDS)


def _time_of(line: str) -> datetime | None:
    found = _TIME.search(line[:200])
    try:
        return None if found is None else datetime.fromisoformat(f"{_ANY_YEAR}-{found[0]}Z")
    except ValueError:  # no such day or hour
        return None


def _parsed(line: str, pid: int | None) -> FailedAllocation | None:
    tried, total, free, allocated = (_size(pattern, line) for pattern in (_TRIED, _TOTAL, _FREE, _ALLOCATED))
    unallocated, reserved = _size(_UNALLOCATED, line), _size(_RESERVED, line)
    if tried is None or total is None or free is None or allocated is None:
        return None
    if reserved is None and unallocated is not None:
        reserved = allocated + unallocated
    if reserved is None or reserved < allocated:
        return None
    return FailedAllocation(tried, total, free, allocated, reserved, pid)


def _size(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return int(float(number) * _UNITS[unit])
