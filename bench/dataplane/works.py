"""The kinds of work: the load generator's options, and which number of its answer counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from bench.figure import Goal

Sample: TypeAlias = Mapping[str, Any]
"""The load generator's output for one slice (see load.c); its times are in microseconds, `seconds` apart."""

UPLOAD_BYTES = 10_000_000
MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kind.

    Attributes:
        name: For lookups.
        what: As in the table.
        unit: Of the value.
        goal: Of the sidecar's value over nginx's.
        options: The load generator's, from the seconds that a slice should take.
        value: From a slice.
        needs_direct: It is run without a proxy too.
        is_over_direct: What counts is the difference to that.
    """

    name: str
    what: str
    unit: str
    goal: Goal
    options: Callable[[float], Mapping[str, float]]
    value: Callable[[Sample], float]
    needs_direct: bool = False
    is_over_direct: bool = False


def _streams(number: int, interval_ms: int) -> Callable[[float], Mapping[str, float]]:
    def options(seconds: float) -> Mapping[str, float]:
        return {"streams": number, "interval_us": interval_ms * 1000, "count": round(seconds * 1000 / interval_ms)}

    return options


def _cpu_per_request(sample: Sample) -> float:
    return float(sample["cpu_us"] / sample["requests"])


def _cpu_per_event(sample: Sample) -> float:
    return float(sample["cpu_us"] / sample["events"])


JSON = Work(
    name="json",
    what="JSON POST, 16 keep-alive connections, CPU per request",
    unit="us",
    goal=Goal("at most", 1.6),
    options=lambda seconds: {"posts": 16, "seconds": seconds},
    value=_cpu_per_request,
)
FRESH = Work(
    name="fresh",
    what="JSON POST, a new connection per request, 16 at once, CPU per request",
    unit="us",
    goal=Goal("at most", 2.0),
    options=lambda seconds: {"posts": 16, "fresh": 1, "seconds": seconds},
    value=_cpu_per_request,
)
SSE_64 = Work(
    name="sse-64",
    what="SSE, 64 streams at 10 ms, CPU per chunk",
    unit="us",
    goal=Goal("at most", 1.25),
    options=_streams(64, 10),
    value=_cpu_per_event,
)
SSE_256 = Work(
    name="sse-256",
    what="SSE, 256 streams at 25 ms, CPU per chunk",
    unit="us",
    goal=Goal("at most", 1.3),
    options=_streams(256, 25),
    value=_cpu_per_event,
)
FULL_SPEED = Work(
    name="full-speed",
    what="SSE, one stream at full speed, chunks per second",
    unit="/s",
    goal=Goal("at least", 1.0),
    # About what a fast proxy passes in that time.
    options=lambda seconds: {"streams": 1, "interval_us": 0, "count": round(seconds * 300_000)},
    value=lambda sample: float(sample["events"] / sample["seconds"]),
    needs_direct=True,
)
FIRST_BYTE = Work(
    name="first-byte",
    what="Added time to first byte, p50",
    unit="us",
    goal=Goal("at most", 1.2),
    options=lambda seconds: {"streams": 1, "interval_us": 0, "count": 1, "seconds": seconds},
    value=lambda sample: float(sample["first_byte_us"]["p50"]),
    needs_direct=True,
    is_over_direct=True,
)
DELAY = Work(
    name="delay",
    what="SSE, 64 streams at 10 ms, p99 delay beside 10 MB uploads",
    unit="us",
    goal=Goal("at most", 2.0),
    options=lambda seconds: {
        **_streams(64, 10)(seconds),
        "uploads": 4,
        "upload_bytes": UPLOAD_BYTES,
        "upload_every_ms": 400,
    },
    value=lambda sample: float(sample["delay_us"]["p99"]),
    needs_direct=True,
)
UPLOADS = Work(
    name="uploads",
    what="10 MB image bodies, four at once, CPU per MB",
    unit="us",
    goal=Goal("at most", 1.1),
    options=lambda seconds: {"uploads": 4, "upload_bytes": UPLOAD_BYTES, "seconds": seconds},
    value=lambda sample: float(sample["cpu_us"] / (sample["sent_bytes"] / MB)),
)
WORKS = (JSON, FRESH, SSE_64, SSE_256, FULL_SPEED, FIRST_BYTE, DELAY, UPLOADS)
