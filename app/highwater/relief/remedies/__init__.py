"""The remedies, which give memory back. A new remedy is one file here and one line in ``all_remedies``."""

from __future__ import annotations

from highwater.relief.remedies.release import Release
from highwater.relief.remedies.remedy import PLAIN, Ask, Remedy, Run
from highwater.relief.remedies.reset_encoder_cache import ResetEncoderCache
from highwater.relief.remedies.reset_mm_cache import ResetMmCache
from highwater.relief.remedies.reset_prefix_cache import ResetPrefixCache
from highwater.relief.remedies.trim_encoder_cache import TrimEncoderCache

__all__ = ["PLAIN", "REMEDIES", "Ask", "Remedy", "Run", "all_remedies"]


def all_remedies(*, host_budget_bytes: int | None = None) -> tuple[Remedy, ...]:
    """Every remedy there is.

    Args:
        host_budget_bytes: For trim, see there.
    """
    trim = TrimEncoderCache(host_budget_bytes=host_budget_bytes)
    return (Release(), trim, ResetEncoderCache(), ResetMmCache(), ResetPrefixCache())


REMEDIES = all_remedies()
"""Every remedy, as it is without settings."""
