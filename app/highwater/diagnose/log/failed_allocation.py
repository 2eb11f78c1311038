"""The allocation that PyTorch's allocator could not make, by the figures in its message in the engine's log.

They are those of that very moment, and so newer than every reading: an engine can fill, or fragment, its device within
one step. PyTorch writes the message after it has given its unused blocks back to the device and tried once more: what
it still holds unallocated lies beside live tensors or belongs to captured graphs.

An engine may live through such a failure. One counts only if it is its process's last and stands near the log's end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from highwater.diagnose.log.lines import RecognizedLine
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
_PID: Final = re.compile(r"\bpid=(\d{1,9})\b")
# vLLM's time of a line, or a container runtime's. The year is not said: that of a leap year stands for any.
_TIME: Final = re.compile(r"\b(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)\b")
_ANY_YEAR, _YEAR = 2000, timedelta(days=366)
_LINE_LENGTH: Final = 4000


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


def failed_allocations(lines: Sequence[RecognizedLine]) -> list[FailedAllocation]:
    """Return each process's last failure in the lines of an engine's life, if it stands near their end.

    A message that is cut or written in another way says nothing, and then an earlier one of its process counts no more.
    """
    found: dict[str | None, tuple[int, datetime | None, FailedAllocation | None]] = {}
    time: datetime | None = None
    for number, (text, _, known) in enumerate(lines):
        time = _time_of(text) or time
        if known is not None and known.name in _MESSAGES:
            pid = _PID.search(text[:200])
            process = None if pid is None else pid[1]
            found[process] = (number, time, _parsed(text[:_LINE_LENGTH], process))
    return [
        failed
        for number, at, failed in found.values()
        if failed is not None and _is_near(at, time, after=len(lines) - number)
    ]


def _is_near(at: datetime | None, end: datetime | None, *, after: int) -> bool:
    if at is None or end is None:
        return after <= NEAR_LINES
    return (end - at) % _YEAR <= timedelta(seconds=NEAR_SECONDS)


def _time_of(line: str) -> datetime | None:
    found = _TIME.search(line[:120])
    try:
        return None if found is None else datetime.fromisoformat(f"{_ANY_YEAR}-{found[0]}Z")
    except ValueError:  # no such day or hour
        return None


def _parsed(line: str, pid: str | None) -> FailedAllocation | None:
    tried, total, free, allocated = (_size(pattern, line) for pattern in (_TRIED, _TOTAL, _FREE, _ALLOCATED))
    unallocated, reserved = _size(_UNALLOCATED, line), _size(_RESERVED, line)
    if tried is None or total is None or free is None or allocated is None:
        return None
    if reserved is None and unallocated is not None:
        reserved = allocated + unallocated
    if reserved is None or reserved < allocated:
        return None
    return FailedAllocation(tried, total, free, allocated, reserved, None if pid is None else int(pid))


def _size(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return int(float(number) * _UNITS[unit])
