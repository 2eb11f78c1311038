"""The allocation that PyTorch's allocator could not make, by the figures in its message in the engine's log. Pure.

They are those of that very moment, and so newer than every reading: an engine can fill, or fragment, its device within
one step. PyTorch writes the message after it has given its unused blocks back to the device and tried once more: what
it still holds unallocated lies beside live tensors or belongs to captured graphs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from highwater.incidents.incident import LogMessage, RankEvidence
from highwater.readings.rank import RankReading
from highwater.units import GIB, KIB, MIB

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
_PID: Final = re.compile(r"\bpid=(\d+)\b")


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

    def is_of(self, rank: RankEvidence, *, is_only: bool) -> bool:
        """Return whether this rank's allocator wrote it; where the line does not name its process, the only rank's."""
        return is_only if self.pid is None or rank.pid is None else self.pid == rank.pid

    def reading(self, before: RankReading, at: float) -> RankReading:
        """Return the rank's last reading as it stood at the failure."""
        torch = replace(
            before.torch,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            inactive_split_bytes=self.reserved_bytes - self.allocated_bytes,
        )
        total = self.total_bytes if before.total_bytes is None else before.total_bytes
        return replace(
            before,
            taken_at=at,
            total_bytes=total,
            free_bytes=self.free_bytes,
            used_bytes=max(total - self.free_bytes, 0),
            torch=torch,
            releasable_bytes=0,
        )


def failed_allocations(messages: Sequence[LogMessage]) -> Sequence[FailedAllocation]:
    """Return those of the log's messages that have all figures, the last one first."""
    lines = [line for message in messages if message.name in _MESSAGES for line in message.lines]
    return [found for line in reversed(lines) if (found := _parsed(line)) is not None]


def _parsed(line: str) -> FailedAllocation | None:
    tried, total, free, allocated = (_size(pattern, line) for pattern in (_TRIED, _TOTAL, _FREE, _ALLOCATED))
    unallocated, reserved = _size(_UNALLOCATED, line), _size(_RESERVED, line)
    if tried is None or total is None or free is None or allocated is None:
        return None
    if reserved is None and unallocated is not None:
        reserved = allocated + unallocated
    if reserved is None or reserved < allocated:
        return None
    pid = _PID.search(line)
    return FailedAllocation(tried, total, free, allocated, reserved, None if pid is None else int(pid[1]))


def _size(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return int(float(number) * _UNITS[unit])
