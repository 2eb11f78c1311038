"""The figures of every device family, in bytes and counts; None where one is unknown."""

from __future__ import annotations

from typing import NamedTuple


class Space(NamedTuple):
    """A device's memory as its driver sees it."""

    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None


class AllocatorFigures(NamedTuple):
    """The figures of torch's caching allocator; the names are those of the answer."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
