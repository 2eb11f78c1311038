"""The host memory of a worker."""

from __future__ import annotations

import pytest

from highwater.accounting.components import account
from highwater.accounting.totals import host_used
from highwater.readings.rank import HostMemory
from tests.unit.accounting.story import worker


@pytest.mark.parametrize(
    ("host", "share"),
    [
        (HostMemory(cgroup_used_bytes=1, cgroup_limit_bytes=4, node_total_bytes=100, node_available_bytes=50), (1, 4)),
        (HostMemory(cgroup_used_bytes=1, node_total_bytes=100, node_available_bytes=40), (60, 100)),
        (HostMemory(cgroup_used_bytes=0, cgroup_limit_bytes=4, node_total_bytes=100, node_available_bytes=50), (0, 4)),
        (HostMemory(cgroup_limit_bytes=4, node_total_bytes=100, node_available_bytes=0), (100, 100)),
        (HostMemory(cgroup_limit_bytes=4, node_total_bytes=100), (None, None)),
        (HostMemory(rss_bytes=5), (None, None)),
    ],
)
def test_host_memory_is_the_limits_where_there_is_one(host, share):
    """Else the node's, else not known."""
    reading = account(worker(host_memory=host))
    assert reading.host_memory.share == share
    assert host_used([reading]) == share[0]
    used, total = share
    assert reading.host_memory.used_ratio == (None if used is None else used / total)


def test_of_several_workers_hosts_the_fullest_counts():
    """Workers of one host report the same figures, so that a sum would count these once a worker."""
    used = [HostMemory(cgroup_used_bytes=size, cgroup_limit_bytes=10) for size in (3, 5, 0)]
    readings = [account(worker(host_memory=host)) for host in (*used, HostMemory(rss_bytes=99))]
    assert host_used(readings) == 5
