"""The remedies, a row each: what one frees, how much it can give, and what it is credited with.

A new remedy is a row here and its class in ``relief/remedies/``, which says how it is run. The policy asks these rows.
By name its decisions know ``release`` alone, which they also choose for an engine that is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from highwater.readings.rank import RankReading

# When a rule with derived waters uses a remedy: whenever it can give enough; not while vLLM would only want these bytes
# back, unless memory is urgently short; or only where that is so at high water.
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
    if reading.device.type == "cpu":  # free heap, of which the size is unknown
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
    """One remedy, as it is known before it is run.

    Attributes:
        lowers: The signals that it lowers, so that a rule on one of them uses it if it names no remedies.
        can_give: Returns what it can give on a rank, by the workers' figures.
        components: The components that it is credited with; ``components_on`` has those of devices where they differ.
        has_own_figure: True if the workers measure in the call what it freed: that counts then.
        needs_release: True if the device sees the bytes only after the allocator's cached blocks were released. Such a
            remedy has one component.
        takes_target: True if it can stop before all is freed (``readings.remedy.Target``).
        moves_to_host: True if the bytes go to host memory, so that a device which shares that gains nothing.
        default_use: When a rule with derived waters uses it.
        gain_field: The field of a rank's pressure (``readings.policy.RankPressure``) that shows what it could give, as
            the workers report it; ``None``: none does.
    """

    name: str
    frees: str
    does_not_free: str
    lowers: tuple[str, ...] = ()
    can_give: Callable[[RankReading], PossibleGain] = lambda _: PossibleGain(None)
    components: tuple[str, ...] = ()
    components_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_own_figure: bool = False
    needs_release: bool = False
    takes_target: bool = False
    moves_to_host: bool = False
    default_use: DefaultUse = "always"
    gain_field: str | None = None

    def credited_components(self, device_type: str | None) -> tuple[str, ...]:
        """Return the components that it is credited with on such a device; the last gets what no other accounts for."""
        return self.components_on.get(device_type or "", self.components)


_ROWS: Final = (
    RemedyTraits(
        name="release",
        frees="blocks that PyTorch's allocator keeps and nobody uses (on CPU: free heap)",
        does_not_free="anything still referenced: weights, KV pool, encoder cache entries",
        lowers=_DEVICE_SIGNALS,
        can_give=_releasable,
        components=("torch_cached_bytes",),
        # On NPU empty_cache drops the operators' workspaces too, on CPU the heap's free pages: both are non_torch.
        components_on={"cpu": ("non_torch_bytes",), "npu": ("torch_cached_bytes", "non_torch_bytes")},
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
"""The field of a rank's pressure that shows what a remedy could give, for the remedies that have one."""
