"""The waters of the default rule: free bytes on each rank, derived from the engine's own plan. Pure.

A server dies of one absolute demand (an image's activations, a workspace) that meets too few free bytes while the
allocator keeps blocks that nobody uses. What vLLM holds by design is a share of any size. So the waters are measured in
free bytes, in what the plan leaves over::

    total ──────────────────────────────────────────────────────────────┐
      │◄──────────── planned = max(requested, at rest) ────►│◄─ slack ─►│
                                                            0   high low  free

    slack = total - max(requested, at rest)
    high  = min(max(slack / 4, 512 MiB), slack / 2, 2 GiB)      acts with less free than that
    low   = min(2 x high, 0.9 x slack)                          satisfied with that much free; so it can be reached

*At rest* is what stays in use whatever the policy does: used bytes less encoder outputs, releasable reserve and other
tensors, all processes on the device counted. It is taken from the first readings of the engine's life where those are
known, so that a growing neighbour on the device, or a leak, does not lower the waters step by step. A sidecar that
started later takes the present reading.

``requested`` is what the engine reports, else the total times ``gpu_memory_utilization`` where that sized the KV pool;
where it did not, what is at rest alone counts.
"""

from __future__ import annotations

from typing import NamedTuple

from highwater.accounting.remedies import reserve_bytes
from highwater.readings.rank import RankReading
from highwater.units import GIB, MIB

MIN_HIGH_BYTES = 512 * MIB
MAX_HIGH_BYTES = 2 * GIB
MIN_SLACK_BYTES = 256 * MIB
LOW_SHARE = 0.9


class Waters(NamedTuple):
    """Free bytes of one rank's device: below ``high`` the rule acts, at ``low`` it is satisfied."""

    high: int
    low: int


def at_rest_bytes(reading: RankReading) -> int | None:
    """Return what stays in use whatever the policy does, by all processes on the device; ``None``: unknown."""
    if reading.used_bytes is None:
        return None
    parts = reading.components
    passing = (parts.encoder_cache_bytes or 0) + (parts.other_tensors_bytes or 0) + (reserve_bytes(reading) or 0)
    return max(reading.used_bytes - passing, 0)


def requested_bytes(reading: RankReading) -> int | None:
    budget, total = reading.budget, reading.total_bytes
    if budget.requested_bytes is not None:
        return budget.requested_bytes
    share = budget.gpu_memory_utilization
    # The workers say nothing where the KV pool's size was given (--kv-cache-memory-bytes, from 0.19 on on an NPU too),
    # and the share is then a default that sized nothing; vllm-ascend up to 0.13 never says it
    # (worker_ext/highwater_worker/memory/engine_budget.py).
    is_old_ascend = reading.device.type == "npu" and not reading.launch.kv_cache_given
    if share is None or total is None or not is_old_ascend:
        return None
    return int(total * share)


def slack_bytes(reading: RankReading, baseline: RankReading | None) -> int | None:
    """Return what the engine's plan leaves over on this device; ``None``: unknown.

    The baseline is the rank at the beginning of its engine's life, if known.
    """
    at_rest = at_rest_bytes(baseline) if baseline is not None else None
    if at_rest is None:
        at_rest = at_rest_bytes(reading)
    if at_rest is None or reading.total_bytes is None:
        return None
    return reading.total_bytes - max(requested_bytes(baseline or reading) or 0, at_rest)


def derive(slack: int) -> Waters | None:
    if slack < MIN_SLACK_BYTES:
        return None
    high = min(max(slack // 4, MIN_HIGH_BYTES), slack // 2, MAX_HIGH_BYTES)
    return Waters(high, min(2 * high, int(slack * LOW_SHARE)))
