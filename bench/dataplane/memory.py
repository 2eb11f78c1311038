"""Resident memory of a proxy: idle, for each open stream, and what uploads add; each of fresh processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.dataplane.proxies import Proxy
from bench.dataplane.slices import LoadGenerator, result_of
from bench.dataplane.works import MB, UPLOAD_BYTES

OPEN_STREAMS = 512
KB = 1000
# The few small requests that make a process load what it loads once.
WARM_UP = ({"posts": 4, "seconds": 0.3}, {"streams": 4, "interval_us": 1000, "count": 50})


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of all processes of a proxy."""

    idle_mb: float
    kb_per_stream: float
    upload_growth_mb: float


def memory_of(start: Callable[[], AbstractContextManager[Proxy]], load: LoadGenerator, settle_seconds: float) -> Memory:
    """Measure one proxy, started twice.

    Raises:
        DemoError: It could not be started, or an answer was not what it should be.
    """
    with start() as proxy:
        time.sleep(settle_seconds)
        idle = rss_bytes(proxy.pids())
        _warm_up(proxy, load)
        per_stream = _stream_bytes(proxy, load)
    with start() as proxy:
        _warm_up(proxy, load)
        growth = _upload_bytes(proxy, load)
    return Memory(idle / MB, per_stream / KB, growth / MB)


def _warm_up(proxy: Proxy, load: LoadGenerator) -> None:
    for options in WARM_UP:
        load.run(proxy, options)


def _stream_bytes(proxy: Proxy, load: LoadGenerator) -> float:
    before = rss_bytes(proxy.pids())
    process = load.start(proxy, {"streams": OPEN_STREAMS, "interval_us": 100_000, "count": 20})
    time.sleep(1.2)  # all are open by then, and none has ended
    during = rss_bytes(proxy.pids())
    result_of(process, proxy)
    return (during - before) / OPEN_STREAMS


def _upload_bytes(proxy: Proxy, load: LoadGenerator) -> int:
    pids = proxy.pids()
    before = rss_bytes(pids)
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here; proc(5)
    load.run(proxy, {"uploads": 4, "upload_bytes": UPLOAD_BYTES, "seconds": 1.5})
    return peak_bytes(pids) - before


def rss_bytes(pids: Sequence[int]) -> int:
    """Return what the processes have in memory now, shared pages counted in each."""
    return sum(_status_bytes(pid, "VmRSS") for pid in pids)


def peak_bytes(pids: Sequence[int]) -> int:
    """The most that they had."""
    return sum(_status_bytes(pid, "VmHWM") for pid in pids)


def _status_bytes(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise ValueError(f"/proc/{pid}/status has no {key}")
