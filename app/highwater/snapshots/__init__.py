"""PyTorch memory snapshots in words: the free memory of segments, what pins it, and the growth between two.

SnapshotError       a file cannot be explained; its text says why
  +- UnsafePickle   the file is not plain data, or too large, and was not read
"""

from __future__ import annotations


class SnapshotError(Exception):
    """A snapshot cannot be read or explained."""


class UnsafePickle(SnapshotError):
    """The file is not a pickle of plain data within the bounds; nothing of it was built."""
