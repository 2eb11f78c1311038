"""Whether every rank is recorded: said in one place, for what is asked, what may be called and what is shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from highwater.readings.rank import Device, TorchMemory
from highwater.recorder.recorders import Coverage, coverage, ranks_expected


def record(
    *, status: str = "alive", device: str = "cuda", allocated: int | None = 1, read: bool = True, **said: Any
) -> Any:
    """What is needed of a record; by default one rank of two, with its entries and our operations."""
    newest = SimpleNamespace(device=Device(type=device), torch=TorchMemory(allocated_bytes=allocated))
    identity = SimpleNamespace(**{"rpc": True, "ranks_expected": 2} | said)
    return SimpleNamespace(status=status, newest=newest if read else None, identity=identity, table=object())


FULL = record()
ROWS = {
    "both": ([FULL, FULL], 2, (2, True, True)),
    "one of two": ([FULL], 2, (1, False, False)),
    "how many there should be is not known": ([FULL, FULL], None, (2, False, True)),
    "by their own word there is one more": ([FULL, record(ranks_expected=3)], 2, (2, True, False)),
    "nobody says how many": ([record(ranks_expected=None)], None, (1, False, False)),
    "one is silent": ([FULL, record(status="silent")], 2, (1, False, False)),
    "one has no reading yet": ([FULL, record(read=False)], 2, (1, False, True)),
    "one shows less than its worker would": ([FULL, record(allocated=None)], 2, (2, False, True)),
    "a CPU has no more to show": ([FULL, record(device="cpu", allocated=None)], 2, (2, True, True)),
    "one has none of our operations": ([FULL, record(rpc=False)], 2, (2, True, False)),
    "one does not say which it has": ([FULL, record(rpc=None)], 2, (2, True, False)),
    "nobody": ([], 0, (0, True, False)),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_the_recorders_cover(row):
    """How many write, whether that is all, and whether workers may be called by their word."""
    records, expected, told = row
    found = coverage(records, expected)
    assert (len(found.writing), found.is_complete, found.offers_calls) == told


def test_entries_are_all_there_only_with_every_table():
    """And only where every rank is there."""
    bare = record()
    bare.table = None
    assert coverage([FULL, FULL], 2).has_entries
    assert not coverage([FULL, bare], 2).has_entries
    assert not coverage([FULL], 2).has_entries


def test_the_greatest_word_counts():
    """A rank that knows less says less; without any it is not known."""
    assert ranks_expected([record(ranks_expected=1), record(ranks_expected=4), record(ranks_expected=None)]) == 4
    assert ranks_expected([record(ranks_expected=None)]) is None


def test_without_recorders_nothing_is_covered():
    """Of an engine that has none, or whose life is not followed yet."""
    assert Coverage() == coverage([], None)
