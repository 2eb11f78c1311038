"""glibc's own figures of this process, and none where the C library has none."""

from __future__ import annotations

from types import SimpleNamespace

from highwater_worker.processes.figures import read_malloc


def test_glibc_counts_what_is_in_use():
    """Its parts are within what it has from the system."""
    found = read_malloc()
    assert found is not None
    assert 0 < found["used_bytes"] <= found["arena_bytes"] + found["mapped_bytes"]


def test_another_library_has_none():
    """musl, and glibc before 2.33."""
    assert read_malloc(SimpleNamespace()) is None
