"""The host memory of a worker."""

from __future__ import annotations

import pytest

from highwater.accounting.attribution import account
from highwater.accounting.host_share import host_share, host_used
from highwater.readings.rank import HostMemory
from tests.unit.accounting.story import worker


@pytest.mark.parametrize(
    ("host", "share"),
    [
        (HostMemory(cgroup_used_bytes=1, cgroup_limit_bytes=4, node_total_bytes=100, node_available_bytes=50), (1, 4)),
        (HostMemory(cgroup_used_bytes=1, node_total_bytes=100, node_available_bytes=40), (60, 100)),
        (HostMemory(rss_bytes=5), (None, None)),
    ],
)
def test_host_memory_is_the_limits_where_there_is_one(host, share):
    """Else the node's, else not known."""
    reading = account(worker(host_memory=host))
    assert host_share(reading) == share
    assert host_used([reading]) == share[0]
