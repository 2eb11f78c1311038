"""A rule of the policy: what it watches, where it acts, and which remedies it may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from highwater.units import MIB

MIN_GAIN_BYTES = 256 * MIB

# The signals, and the remedies of a rule that names none. Host memory has none: what frees it costs cache hits, so an
# operator must ask for it by name.
_DEVICE = ("release", "trim_encoder_cache", "reset_encoder_cache")
SIGNAL_REMEDIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "device_free_bytes": _DEVICE,
        "device_used_ratio": _DEVICE,
        "device_growth_bytes": _DEVICE,
        "encoder_cache_bytes": ("trim_encoder_cache", "reset_encoder_cache"),
        "host_used_ratio": (),
        "host_growth_bytes": (),
    }
)
ALL_REMEDIES = (*_DEVICE, "reset_mm_cache", "reset_prefix_cache")
# Less is worse: high water is reached from above, and low water lies over it.
FALLING_SIGNALS = frozenset({"device_free_bytes"})
RATIO_SIGNALS = frozenset({"device_used_ratio", "host_used_ratio"})
HOST_SIGNALS = frozenset({"host_used_ratio", "host_growth_bytes"})
# Signals of a device's fill: pressure on them can be urgent.
FILL_SIGNALS = frozenset({"device_free_bytes", "device_used_ratio"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One signal to watch and the remedies that may lower it, in the order in which they are tried.

    Attributes:
        name: Unique among the rules.
        signal: One of ``SIGNAL_REMEDIES``.
        high_water: The rule acts at this value or beyond. ``None``, with ``device_free_bytes`` only: both waters are
            derived for each rank from the engine's own plan (``waters``).
        low_water: At this value (or better) the rule is satisfied.
        sustain_seconds: How long the signal must stay at high water first.
        cooldown_seconds: How long the rule rests after a relief that did not reach low water.
        min_gain_bytes: A remedy is run only where it can give at least that much, or what is missing if that is less.
        remedies: Names, in order.
    """

    name: str
    signal: str
    high_water: float | None = None
    low_water: float | None = None
    sustain_seconds: float = 0.0
    cooldown_seconds: float = 60.0
    min_gain_bytes: int = MIN_GAIN_BYTES
    remedies: tuple[str, ...] = ()

    @property
    def is_derived(self) -> bool:
        """True if its waters come from the engine's plan."""
        return self.high_water is None or self.low_water is None


def reached(signal: str, value: float, water: float) -> bool:
    """Return whether the value is at high water or beyond."""
    return value <= water if signal in FALLING_SIGNALS else value >= water


def relieved(signal: str, value: float, water: float) -> bool:
    """Return whether the value is at low water or better."""
    return value >= water if signal in FALLING_SIGNALS else value <= water
