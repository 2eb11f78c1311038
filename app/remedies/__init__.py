"""What gives memory back. A new remedy is one file here and one line in ``REMEDIES``."""

from __future__ import annotations

from app.remedies.release import Release
from app.remedies.remedy import Remedy, Run
from app.remedies.reset_encoder_cache import ResetEncoderCache
from app.remedies.reset_mm_cache import ResetMmCache
from app.remedies.reset_prefix_cache import ResetPrefixCache

__all__ = ["REMEDIES", "Remedy", "Run"]

REMEDIES: tuple[Remedy, ...] = (Release(), ResetEncoderCache(), ResetMmCache(), ResetPrefixCache())
