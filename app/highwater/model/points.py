"""A rank's memory at one moment, flat: kept by history, recorders, incidents, measured loads and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self

from highwater.model.components import COMPONENT_NAMES
from highwater.model.rank import Components, RankReading, TorchMemory

ROW: Final[tuple[str, ...]] = (
    "used_bytes",
    "free_bytes",
    "total_bytes",
    "used_ratio",
    *COMPONENT_NAMES,
    "torch_allocated_bytes",
    "torch_reserved_bytes",
    "encoder_cache_entries",
    "host_rss_bytes",
)


_UNKNOWN: Final = Components()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    at: float  # Unix seconds
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    components: Components = _UNKNOWN
    torch_allocated_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    encoder_cache_entries: int | None = None  # cached encoder outputs, on the device or the host
    host_rss_bytes: int | None = None  # the resident set size of the worker's process

    @classmethod
    def of(cls, reading: RankReading) -> Self:
        return cls(
            at=reading.taken_at,
            total_bytes=reading.total_bytes,
            used_bytes=reading.used_bytes,
            free_bytes=reading.free_bytes,
            components=reading.components,
            torch_allocated_bytes=reading.torch.allocated_bytes,
            torch_reserved_bytes=reading.torch.reserved_bytes,
            encoder_cache_entries=reading.encoder_cache.entries if reading.encoder_cache is not None else None,
            host_rss_bytes=reading.host_memory.rss_bytes,
        )

    @classmethod
    def of_row(cls, at: float, row: Mapping[str, Any]) -> Self:
        """Return the point of a row of ``GET /memory/history``. Raises KeyError where the row lacks a name."""
        parts = {name: row[name] for name in COMPONENT_NAMES}
        rest = {name: row[name] for name in ROW if name not in parts and name != "used_ratio"}
        return cls(at=at, components=Components(**parts), **rest)

    def row(self) -> dict[str, float | None]:
        return {name: getattr(self.components if name in COMPONENT_NAMES else self, name) for name in ROW}

    @property
    def used_ratio(self) -> float | None:
        return self.used_bytes / self.total_bytes if self.used_bytes is not None and self.total_bytes else None

    @property
    def torch(self) -> TorchMemory:
        return TorchMemory(allocated_bytes=self.torch_allocated_bytes, reserved_bytes=self.torch_reserved_bytes)


def thin(points: Sequence[MemoryPoint], most: int, *, recent: int = 1) -> tuple[MemoryPoint, ...]:
    """Return at most ``most`` points: the last ``recent``, and the fullest of each stretch before them.

    A rise that lasted for one point must not fall between two that are kept.
    """
    room = most - recent
    if len(points) <= most or room < 1:
        return tuple(points[-most:])
    earlier, last = points[: len(points) - recent], points[len(points) - recent :]
    bounds = [index * len(earlier) // room for index in range(room + 1)]
    highest = (max(earlier[start:end], key=lambda point: point.used_bytes or 0) for start, end in pairwise(bounds))
    return (*highest, *last)
