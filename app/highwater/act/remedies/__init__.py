"""The remedies, which give memory back: how each is run.

A new remedy is a row in ``model/remedies.py``, a class in one file here, and one line in ``all_remedies``.
"""

from __future__ import annotations

from highwater.act.remedies.remedy import Remedy
from highwater.act.remedies.resets import ResetEncoderCache, ResetMmCache, ResetPrefixCache
from highwater.act.remedies.workers import Release, TrimEncoderCache


def all_remedies(*, host_budget_bytes: int | None = None) -> tuple[Remedy, ...]:
    trim = TrimEncoderCache(host_budget_bytes=host_budget_bytes)
    return (Release(), trim, ResetEncoderCache(), ResetMmCache(), ResetPrefixCache())


REMEDIES = all_remedies()
"""The remedies as they are without settings."""
