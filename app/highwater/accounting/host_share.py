"""The host memory of a worker: used and total, of its control group or else of the node."""

from __future__ import annotations

from collections.abc import Sequence

from highwater.readings.rank import RankReading


def host_used(ranks: Sequence[RankReading]) -> int | None:
    return max((used for used, _ in map(host_share, ranks) if used is not None), default=None)


def host_share(rank: RankReading) -> tuple[int | None, int | None]:
    host = rank.host_memory
    if host.cgroup_limit_bytes and host.cgroup_used_bytes is not None:
        return host.cgroup_used_bytes, host.cgroup_limit_bytes
    if host.node_total_bytes and host.node_available_bytes is not None:
        return host.node_total_bytes - host.node_available_bytes, host.node_total_bytes
    return None, None


def host_ratio(rank: RankReading) -> float | None:
    used, total = host_share(rank)
    return used / total if used is not None and total else None
