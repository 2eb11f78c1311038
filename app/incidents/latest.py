"""Each rank as it stood last, and how it moved: the reading and the series made one. Pure.

The series may reach further than the last full reading (a recorder writes more often than the poller asks), and
the reading knows what a series does not keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from app.attribution import COMPONENTS, rank_key
from app.incidents.evidence import point
from app.incidents.incident import Evidence, Point, RankEvidence
from app.readings import Components, EncoderCache, RankReading, TorchMemory
from app.units import MIB

# Below it a device counts as full: on the measured machine the benchmark left 1.4 %, and 180 MiB were refused at 0.1 %.
FULL_RATIO = 0.02
# Of total, and in bytes: less than both is noise.
NOTABLE_RATIO, NOTABLE_BYTES = 0.01, 256 * MIB
# From this age on a reading's age is worth a word.
OLD_SECONDS = 5.0

_Parts = TypeVar("_Parts", Components, TorchMemory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """One rank as it stood last; what is not known is ``None``.

    Attributes:
        evidence: What it was made from.
        at: When.
        free_bytes: What the device still had; on CPU what the process could still get.
    """

    evidence: RankEvidence
    at: float | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    components: Components = field(default_factory=Components)
    torch: TorchMemory = field(default_factory=TorchMemory)

    @property
    def name(self) -> str:
        """The rank as an operator calls it."""
        return self.evidence.name

    @property
    def device_type(self) -> str | None:
        """``npu``, ``cuda``, ``cpu``, ...; ``None`` where not known."""
        return self.evidence.reading.device.type if self.evidence.reading is not None else None

    @property
    def free_ratio(self) -> float | None:
        """Free over total."""
        if self.free_bytes is None or not self.total_bytes:
            return None
        return self.free_bytes / self.total_bytes

    @property
    def is_full(self) -> bool:
        """Whether next to nothing was free, as far as that is known."""
        return self.free_ratio is not None and self.free_ratio < FULL_RATIO

    @property
    def notable_bytes(self) -> int:
        """How much of its memory is more than noise."""
        return max(NOTABLE_BYTES, int(NOTABLE_RATIO * (self.total_bytes or 0)))

    @property
    def requested_bytes(self) -> int | None:
        """What vLLM planned with at start."""
        return self.evidence.reading.budget.requested_bytes if self.evidence.reading is not None else None

    @property
    def encoder_cache(self) -> EncoderCache | None:
        """The totals of its encoder cache, where it has one."""
        return self.evidence.reading.encoder_cache if self.evidence.reading is not None else None

    @property
    def unused_bytes(self) -> int | None:
        """Reserved by PyTorch's allocator and not allocated."""
        if self.torch.reserved_bytes is None or self.torch.allocated_bytes is None:
            return None
        return max(self.torch.reserved_bytes - self.torch.allocated_bytes, 0)

    @property
    def releasable_bytes(self) -> int | None:
        """What a release would have given back of them."""
        return self.evidence.reading.releasable_bytes if self.evidence.reading is not None else None

    def age_seconds(self, at: float) -> float | None:
        """How long before that moment."""
        return max(at - self.at, 0.0) if self.at is not None else None

    def age_words(self, at: float) -> str:
        """How long before that moment, as a part of a sentence; nothing where it was just before."""
        seconds = self.age_seconds(at)
        return f", {seconds:.0f} s before" if seconds is not None and seconds >= OLD_SECONDS else ""


def latest(evidence: RankEvidence) -> Latest:
    """The rank as it stood last."""
    reading = evidence.reading
    if reading is None:
        if not evidence.series:
            return Latest(evidence=evidence)
        last = evidence.series[-1]
        return Latest(
            evidence=evidence,
            at=last.at,
            used_bytes=last.used_bytes,
            components=last.components,
            torch=last.torch,
        )
    last = evidence.series[-1] if evidence.series and evidence.series[-1].at > reading.taken_at else point(reading)
    return Latest(
        evidence=evidence,
        at=last.at,
        total_bytes=reading.total_bytes,
        used_bytes=last.used_bytes,
        free_bytes=_free(reading, last),
        components=_filled(last.components, reading.components),
        torch=_filled(last.torch, reading.torch),
    )


def _filled(newer: _Parts, older: _Parts) -> _Parts:
    """A series need not keep all that a reading has: what the newer one does not tell is taken from the older."""
    untold = {part.name: getattr(older, part.name) for part in fields(newer) if getattr(newer, part.name) is None}
    return replace(newer, **untold)


def _free(reading: RankReading, last: Point) -> int | None:
    """What used bytes have grown by since the reading is free no more."""
    if reading.free_bytes is None or reading.used_bytes is None or last.used_bytes is None:
        return reading.free_bytes
    return max(reading.free_bytes - (last.used_bytes - reading.used_bytes), 0)


def known_points(evidence: RankEvidence) -> tuple[Point, ...]:
    """The series and the reading, oldest first."""
    if evidence.reading is None:
        return evidence.series
    return tuple(sorted((*evidence.series, point(evidence.reading)), key=lambda known: known.at))


def baseline_of(evidence: Evidence, rank: RankEvidence) -> RankReading | None:
    """The first reading of this rank's process after the engine was ready; that of another process is none."""
    key = rank_key(rank)
    for first in evidence.baseline:
        if rank_key(first) == key and (rank.pid is None or first.pid in (None, rank.pid)):
            return first
    return None


def rise(rank: RankEvidence, first: RankReading | None, counter: str) -> int | None:
    """By how much a counter of PyTorch's allocator rose on this rank.

    Args:
        rank: The rank.
        first: Its first reading, where there is one; else the series tells.
        counter: ``alloc_retries`` or ``ooms``.
    """
    values = [getattr(known.torch, counter) for known in known_points(rank)]
    if first is not None:
        values.insert(0, getattr(first.torch, counter))
    known = [value for value in values if value is not None]
    return max(known) - known[0] if len(known) > 1 else None


def component_growth(evidence: Evidence) -> tuple[bool, Mapping[str, int]]:
    """By how much each component grew, summed over the ranks whose beginning is known.

    Returns:
        Whether that is since the engine was ready (else since the series began), and bytes by component.
    """
    firsts = [baseline_of(evidence, rank) for rank in evidence.ranks]
    since_ready = any(first is not None for first in firsts)
    grown: dict[str, int] = {}
    for rank, first in zip(evidence.ranks, firsts, strict=True):
        points = known_points(rank)
        if not points or (since_ready and first is None):
            continue
        before = first.components if first is not None else points[0].components
        for name, change in _changes(before, latest(rank).components):
            grown[name] = grown.get(name, 0) + change
    return since_ready, grown


def _changes(before: Components, after: Components) -> Iterable[tuple[str, int]]:
    for name in COMPONENTS:
        was, now = getattr(before, name), getattr(after, name)
        if was is not None and now is not None:
            yield name, now - was
