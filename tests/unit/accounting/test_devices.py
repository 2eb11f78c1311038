"""Devices that ranks share, or do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.accounting.components import account
from highwater.accounting.totals import device_total, used_total
from highwater.readings.rank import Device
from tests.unit.accounting.story import cpu, worker

GIB = 1024**3


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        ({"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-a", "index": 1}, True),
        ({"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-b", "index": 0}, False),
        ({"index": 0, "physical_index": 4}, {"index": 1, "physical_index": 4}, True),
        ({"index": 0, "physical_index": 4}, {"index": 0, "physical_index": 5}, False),
        ({"index": 0}, {"index": 0}, False),
    ],
)
def test_a_card_is_known_by_its_identity_or_its_number_on_the_machine(first, second, is_one):
    """Not by the index that a process gives it: two engines each see their own device as 0."""
    ranks = [
        account(worker(rank=rank, device=Device(type="cuda", **device), used_bytes=10))
        for rank, device in enumerate((first, second))
    ]
    assert (ranks[0].card == ranks[1].card) is is_one
    assert used_total(ranks) == (10 if is_one else 20)
    assert device_total([replace(rank, total_bytes=50) for rank in ranks]) == (50 if is_one else 100)
    elsewhere = replace(ranks[1], host="node-b")
    assert ranks[0].card != elsewhere.card


def test_workers_on_a_cpu_never_share_a_device():
    """Each counts the memory of its own process."""
    assert used_total([replace(account(cpu()), rank=rank) for rank in (0, 1)]) == 4 * GIB
