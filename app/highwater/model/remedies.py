"""The remedies, one row each: what a remedy frees, how much it can give, and what it is credited with.

A new remedy is a row here and a class in ``act/remedies.py``, which says how it is run. The policy reads these rows and
knows only ``release`` by name, which it also runs on an idle engine.

Traffic changes memory between two readings as much as a remedy does. So a remedy is credited with its own components
only: a trim that moved nothing gets no credit for the release after it. The event, ``/policy`` and the metric show the
same figure, and it is never negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from highwater.model.components import COMPONENT_NAMES
from highwater.model.policy import RankFreed, RankPressure
from highwater.model.rank import DEVICES, Components, Ranked, RankReading, key_of
from highwater.model.units import MIB, difference, gib_text, sum_known

Outcome: TypeAlias = Literal["done", "refused", "failed", "observed"]
Mode: TypeAlias = Literal["safe", "now"]
# `nothing`: the remedy runs beside requests; `gate`: new requests were held, and running ones had ended.
QuiescedBy: TypeAlias = Literal["nothing", "gate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The bound of a trim, on every rank; at most one of them. None: all that no running request still needs."""

    free_bytes: int | None = None  # device bytes to free
    keep_bytes: int | None = None  # device bytes of encoder outputs to keep at most
    idle_seconds: float | None = None  # free what was not used for so long


UNNEEDED = Target()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDelta(Ranked):
    """The difference between two readings of one rank; its maker defines the sign.

    ``card`` is the same for ranks on one device: used bytes are the whole device's on each of them.
    """

    rank: int | None
    dp_rank: int | None
    card: str | None = None
    used_bytes: int | None
    components: Components


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyResult:
    remedy: str
    outcome: Outcome
    reason: str | None = None  # why it was not done, or what the engine reported
    seconds: float = 0.0  # from start to the reading after it
    # "Less in use now": used bytes before less after, over all ranks; negative when traffic took more meanwhile.
    freed_bytes: int | None = None
    freed_components: Components = Components()  # noqa: RUF009 - frozen
    ranks: tuple[RankDelta, ...] = ()
    # "Given back": of what the remedy can free (app/highwater/model/remedies.py), over all ranks, as in `/policy`
    # and in the metric; `None` where that was not measured, as in `credited_components`.
    credited_bytes: int | None = None
    credited_components: Components = Components()  # noqa: RUF009 - as above
    can_give_bytes: int | None = None  # of a dry run: what it could give back now, over all ranks, at most
    would: str | None = None  # of a dry run that is not refused: what it would do, in a few words
    frees: str = ""  # what this remedy can free, in words; `does_not_free`: what it cannot
    does_not_free: str = ""
    quiesced_by: QuiescedBy | None = None  # what kept requests away from it; `None` where it did not come to that
    held_seconds: float | None = None  # how long new requests waited for it at the gate
    detail: tuple[Mapping[str, Any], ...] = ()  # the workers' responses, rank by rank

    @property
    def summary(self) -> str:
        text = f"{self.remedy} {self.outcome}"
        if self.outcome == "done" and self.credited_bytes is not None:
            together = f", {len(self.ranks)} ranks together," if len(self.ranks) > 1 else ""
            text += f", gave back {gib_text(self.credited_bytes)}{together} in {self.seconds:.2f} s"
            less = self.freed_bytes
            if less is not None and abs(less - self.credited_bytes) >= MIB:
                text += f"; {gib_text(abs(less))} {'less' if less >= 0 else 'more'} in use now"
        return f"{text}: {self.reason}" if self.reason else text


# When a rule with derived waters runs a remedy: whenever it can give enough; if vLLM counts on the bytes and would take
# them back, only when memory is urgently short; or only when it is urgently short and high water is reached.
DefaultUse: TypeAlias = Literal["always", "unless_wanted_back", "last_resort"]

_DEVICE_SIGNALS: Final = ("device_free_bytes", "device_used_ratio", "device_growth_bytes")
_ENCODER_SIGNALS: Final = (*_DEVICE_SIGNALS, "encoder_cache_bytes")
_ENCODER_CACHE: Final = ("encoder_cache_bytes",)


class PossibleGain(NamedTuple):
    """The bytes that a remedy can give on one rank; ``None`` without any figure, a bound where it is not certain."""

    size: int | None
    is_certain: bool = True


def reserve_bytes(reading: RankReading) -> int | None:
    """Return what a release can give back at most: the worker's figure, else the allocator's unused blocks."""
    if reading.releasable_bytes is not None:
        return reading.releasable_bytes
    cached = reading.components.torch_cached_bytes
    return max(cached - (reading.torch.inactive_split_bytes or 0), 0) if cached is not None else None


def _releasable(reading: RankReading) -> PossibleGain:
    if reading.device.traits.is_host_memory:  # free heap, of which the size is unknown
        return PossibleGain(None)
    return PossibleGain(reserve_bytes(reading) or 0, reading.releasable_bytes is not None)


def _trimmable(reading: RankReading) -> PossibleGain:
    if reading.trimmable_bytes is None:
        return PossibleGain(_cached(reading), is_certain=False)
    return PossibleGain(reading.trimmable_bytes)


def _cached(reading: RankReading) -> int:
    return reading.components.encoder_cache_bytes or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyTraits:
    """One remedy, as it is known before it is run."""

    name: str
    frees: str
    does_not_free: str
    lowers: tuple[str, ...] = ()  # the signals that it lowers: a rule on one of them uses it if it names no remedies
    # What it can give on a rank, by the workers' figures.
    can_give: Callable[[RankReading], PossibleGain] = lambda _: PossibleGain(None)
    # The components that it is credited with, the last with what no other accounts for; `components_on`: on devices of
    # which they differ.
    components: tuple[str, ...] = ()
    components_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_own_figure: bool = False  # the workers measure in the call what it freed: that counts then
    # The device sees the bytes only after the allocator's cached blocks were released. Such a remedy has one component.
    needs_release: bool = False
    takes_target: bool = False  # it can stop before all is freed (`Target`)
    moves_to_host: bool = False  # the bytes go to host memory, so that a device which shares that gains nothing
    default_use: DefaultUse = "always"  # when a rule with derived waters uses it
    # The field of a rank's pressure (`policy.RankPressure`) that shows what it could give, as the workers report it.
    gain_field: str | None = None


_ROWS: Final = (
    RemedyTraits(
        name="release",
        frees="blocks that PyTorch's allocator keeps and nobody uses (on CPU: free heap)",
        does_not_free="anything still referenced: weights, KV pool, encoder cache entries",
        lowers=_DEVICE_SIGNALS,
        can_give=_releasable,
        components=("torch_cached_bytes",),
        components_on={device_type: traits.release_frees for device_type, traits in DEVICES.items()},
        has_own_figure=True,
        gain_field="can_release_bytes",
    ),
    RemedyTraits(
        name="trim_encoder_cache",
        frees=(
            "encoder outputs on the device, moved to host memory; they go back to PyTorch's allocator, and with "
            "release to the device"
        ),
        does_not_free=(
            "weights, KV pool, outputs that a running request needs; on CPU everything: the device is the host there"
        ),
        lowers=_ENCODER_SIGNALS,
        can_give=_trimmable,
        components=_ENCODER_CACHE,
        needs_release=True,
        takes_target=True,
        moves_to_host=True,
        default_use="unless_wanted_back",
        gain_field="can_trim_bytes",
    ),
    RemedyTraits(
        name="reset_encoder_cache",
        frees="encoder outputs on the device; they go back to PyTorch's allocator, and with release to the device",
        does_not_free="weights, KV pool, processor caches on the host",
        lowers=_ENCODER_SIGNALS,
        can_give=lambda reading: PossibleGain(_cached(reading)),
        components=_ENCODER_CACHE,
        needs_release=True,
        default_use="last_resort",
    ),
    RemedyTraits(
        name="reset_mm_cache",
        frees="processed images in the API server's and EngineCore's host memory",
        does_not_free="device memory: encoder outputs, weights and KV pool stay, and so does the allocator's reserve",
    ),
    RemedyTraits(
        name="reset_prefix_cache",
        frees="KV blocks that hold cached prefixes, for new requests",
        does_not_free="device memory: the KV pool is preallocated and keeps its size",
    ),
)
TRAITS: Final[Mapping[str, RemedyTraits]] = MappingProxyType({row.name: row for row in _ROWS})
"""Every remedy by its name, in the order in which a rule that names none tries them."""
GAIN_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {row.name: row.gain_field for row in _ROWS if row.gain_field is not None}
)


def possible_bytes(remedy: str, ranks: Iterable[RankReading], target: Target = UNNEEDED) -> int | None:
    """Return what a remedy, given by its name, can give back at most, over all ranks; ``None``: not known."""

    def wanted(size: int) -> int:
        if target.keep_bytes is not None:
            return max(size - target.keep_bytes, 0)
        return size if target.free_bytes is None else min(size, target.free_bytes)

    sizes = [TRAITS[remedy].can_give(reading).size for reading in ranks]
    return sum(wanted(size) for size in sizes if size is not None) if sizes and None not in sizes else None


def gains(rank: RankPressure) -> dict[str, int | None]:
    return {name: getattr(rank, field) for name, field in GAIN_FIELDS.items()}


def can_give(ranks: Iterable[RankPressure]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for rank in ranks:
        sizes.update({name: size or 0 for name, size in gains(rank).items()})
    return {name: size for name, size in sizes.items() if size > 0}


@dataclass(frozen=True, slots=True)
class Credit:
    ranks: tuple[RankFreed, ...]  # those that were read before and after it
    components: Components  # over all ranks; `None` for those that it cannot free

    @property
    def freed_bytes(self) -> int | None:
        return sum(one.freed_bytes or 0 for one in self.ranks) if self.ranks else None


def credit(
    remedy: str,
    before: Sequence[RankReading],
    after: Sequence[RankReading],
    detail: Sequence[Mapping[str, Any]] = (),
    *,
    is_released: bool = True,
) -> Credit:
    """Credit a remedy, given by its name, with what it freed.

    Of the workers' responses (``detail``) the figure of a release counts: it measures in the call, before the engine
    goes on. Without ``is_released`` what left the encoder cache is the allocator's now, and the device has gained
    nothing.
    """
    traits = TRAITS[remedy]
    earlier = {reading.key: reading for reading in before}
    reported = {
        key_of(response.get("dp_rank"), response.get("rank")): max(size, 0)
        for response in detail
        if isinstance(size := response.get("freed_bytes"), int)
    }
    parts = {
        now.key: _parts(traits, earlier[now.key], now, reported.get(now.key), is_released=is_released)
        for now in after
        if now.key in earlier
    }
    ranks = tuple(
        # 0 for a remedy that frees no device memory.
        RankFreed(rank=now.rank, dp_rank=now.dp_rank, freed_bytes=sum_known(sizes.values()) if sizes else 0)
        for now in after
        if (sizes := parts.get(now.key)) is not None
    )
    sums = {name: sum_known(sizes.get(name) for sizes in parts.values()) for name in COMPONENT_NAMES}
    return Credit(ranks, Components(**sums))


def _parts(
    remedy: RemedyTraits, was: RankReading, now: RankReading, reported: int | None, *, is_released: bool
) -> dict[str, int | None]:
    def left(component: str) -> int | None:
        return difference(getattr(was.components, component), getattr(now.components, component))

    components = remedy.components_on.get(was.device.type or "", remedy.components)
    sizes = {component: left(component) for component in components}
    if remedy.needs_release and not is_released:
        kept = max(-(left("torch_cached_bytes") or 0), 0)
        sizes = {component: difference(size, kept) for component, size in sizes.items()}
    sizes = {component: None if size is None else max(size, 0) for component, size in sizes.items()}
    if not remedy.has_own_figure or reported is None:
        return sizes
    *names, last = sizes
    credited: dict[str, int | None] = {}
    for name in names:
        credited[name] = min(sizes[name] or 0, reported)
        reported -= credited[name] or 0
    return {**credited, last: reported}


def reasons_of(results: Iterable[tuple[str, str]]) -> list[str]:
    """Return each reason once, behind the remedies that have it, from pairs of remedy and reason."""
    remedies: dict[str, list[str]] = {}
    for remedy, reason in results:
        remedies.setdefault(reason, []).append(remedy)
    return [f"{', '.join(names)}: {reason}" for reason, names in remedies.items()]


# --- sums over ranks, each device counted once, and the difference between two readings of the same ranks ---


def host_used(ranks: Sequence[RankReading]) -> int | None:
    return max((used for used, _ in (rank.host_memory.share for rank in ranks) if used is not None), default=None)


def used_total(ranks: Iterable[RankReading]) -> int | None:
    """Return the used bytes of all devices, each counted once, other programs included."""
    return once_per_card((rank.card, rank.used_bytes) for rank in ranks)


def device_total(ranks: Iterable[RankReading]) -> int | None:
    return once_per_card((rank.card, rank.total_bytes) for rank in ranks)


def first_of_each_card(ranks: Sequence[RankReading]) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for position, rank in enumerate(ranks):
        if rank.used_bytes is not None:
            first.setdefault(rank.card, position)
    return tuple(first.values())


def once_per_card(sizes: Iterable[tuple[str | None, int | None]]) -> int | None:
    first: dict[object, int] = {}
    for name, size in sizes:
        if size is not None:
            first.setdefault(object() if name is None else name, size)
    return sum_known(first.values())


def compare(before: Sequence[RankReading], after: Sequence[RankReading]) -> tuple[RankDelta, ...]:
    earlier = {reading.key: reading for reading in before}
    return tuple(
        RankDelta(
            rank=now.rank,
            dp_rank=now.dp_rank,
            card=now.card,
            used_bytes=difference(now.used_bytes, was.used_bytes),
            components=Components(
                **{
                    name: difference(getattr(now.components, name), getattr(was.components, name))
                    for name in COMPONENT_NAMES
                }
            ),
        )
        for now in after
        if (was := earlier.get(now.key)) is not None
    )


def freed(before: Sequence[RankReading], after: Sequence[RankReading]) -> tuple[RankDelta, ...]:
    """Return what each rank gave back; negative where traffic took more meanwhile."""
    return compare(after, before)


def total(deltas: Sequence[RankDelta]) -> tuple[int | None, Components]:
    """Return the sum over the ranks: used bytes, each device's once, and by component."""
    parts = {name: sum_known(getattr(delta.components, name) for delta in deltas) for name in COMPONENT_NAMES}
    used = once_per_card((delta.card, delta.used_bytes) for delta in deltas)
    cards = [delta.card for delta in deltas if delta.card is not None]
    if used is not None and len(set(cards)) < len(cards):
        # On each of several ranks on one device, what the others own stands under non_torch.
        parts["non_torch_bytes"] = used - sum(parts[name] or 0 for name in COMPONENT_NAMES if name != "non_torch_bytes")
    return used, Components(**parts)
